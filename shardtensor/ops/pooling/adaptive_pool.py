"""Adaptive max and average pooling, in one to three dims.

Pooling a sharded dim to one value would leave the value with one rank. Instead an average is a mean: Partial over that
mesh dim, reduced when it is needed. A maximum is taken over the ranks at once and is replicated. Other output sizes are
sharded, and ranks without outputs have empty shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Replicate

from ..._compat import nn_functions
from ...communication.halo import Fetch
from ...dispatch.tensor import ShardTensor, from_part, redistribute_to, wrap
from ...layout.intervals import Interval, intervals_of, map_boundaries
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ...layout.strides import index_select_like, stride_like
from ...operators.declaration import Arguments, Composed, LocalPlan, Plan, operator
from ..common.stencil import Constant, keeping_sums, result_dtype, scaled_boundary, with_sizes
from .pool import GlobalIndices, Numbers, Pooled, local_plan, values_of


def adaptive_window(n: int, out: int, o: int) -> Interval:
    """Input interval of output ``o`` when a dim of length ``n`` is pooled to ``out``.

    Example:
        >>> [adaptive_window(5, 3, o) for o in range(3)]
        [(0, 2), (1, 4), (3, 5)]
    """
    return (o * n // out, -(-(o + 1) * n // out))


def _adaptive_pool(
    call: Arguments, ndim: int, meta: Tensor, function: Callable[..., Pooled], indices: bool
) -> LocalPlan:
    """The plan that pools the input's last ``ndim`` dims to the sizes of ``meta``.

    A sharded dim that becomes 1 is pooled within each shard only: the result has one entry there per rank with a shard.
    """
    spec = call.tensors["input"]
    first = len(spec.shape) - ndim
    target, sizes = list(meta.shape), {}
    needs: dict[int, list[Interval]] = {}
    unequal: dict[int, list[Interval]] = {}
    origin = [0] * ndim
    for d, m in spec.sharded_dims().items():
        if d < first:
            continue
        n, out, rank = spec.shape[d], target[d], spec.coordinate[m]
        own = intervals_of(spec.sizes_along(m))
        if out == 1:
            sizes[d] = tuple(int(b > a) for a, b in own)
            target[d] = sum(sizes[d])
            origin[d - first] = own[rank][0]
            continue
        sizes[d] = map_boundaries(spec.sizes_along(m), scaled_boundary(n, out))
        outs = intervals_of(sizes[d])
        needs[d] = [
            (adaptive_window(n, out, a)[0], adaptive_window(n, out, b - 1)[1]) if b > a else (0, 0) for a, b in outs
        ]
        origin[d - first] = needs[d][rank][0]
        if n % out:
            unequal[d] = [adaptive_window(n, out, o) for o in range(*outs[rank])]
    fetch = Fetch.of(spec, needs)
    smallest, least = (lambda t: values_of(function(t, [2] * ndim))), [1] * len(spec.shape)
    dtype = result_dtype(call, spec.tensor_meta.dtype, smallest, least)
    out_meta = torch.empty_strided(target, stride_like(meta, target), dtype=meta.dtype, device="meta")
    shape = with_sizes(spec, out_meta, dtype, sizes).local_shape()[first:]
    if 0 in shape:
        unequal = {}
    evened = [_EvenWindows(d, w, origin[d - first], not indices, dtype, call.device) for d, w in unequal.items()]
    places: list[int | Constant] = list(origin)
    given = list(fetch.shape[first:])
    for dim in evened:
        places[dim.dim - first], given[dim.dim - first] = dim.table, dim.size

    def kernel(local: Tensor) -> Pooled:
        for dim in evened:
            local = dim.spread(local)
        result = function(local, shape)
        for dim in () if indices else evened:
            result = dim.rescale(result)  # type: ignore[arg-type]
        return result

    to_global = GlobalIndices(given, places, spec.shape[first:]) if indices else None
    return local_plan(spec, fetch, dtype, kernel, (), to_global, out_meta, sizes, (smallest, least))


class _EvenWindows:
    """Windows of unequal lengths along a dim, spread out so that all are as long as the longest: one kernel pools them.

    Args:
        windows: global intervals.
        origin: global index of the first element of what is spread.
        averaged: shorter windows are filled up with zeros, and their averages rescaled; else with their own last
            element, which changes no maximum.

    Attributes:
        table: the global index from which each element is taken.
        size: how many there are.
    """

    def __init__(
        self,
        dim: int,
        windows: Sequence[Interval],
        origin: int,
        averaged: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        widest = max(b - a for a, b in windows)
        taken = [min(a + t, b - 1) for a, b in windows for t in range(widest)]
        excess = [a + t >= b for a, b in windows for t in range(widest)]
        scale = [widest / (b - a) for a, b in windows]
        self.dim, self.size = dim, len(taken)
        self._averaged = averaged
        self.table = Constant(lambda: torch.tensor(taken, device=device))
        self._index = Constant(lambda: torch.tensor(taken, device=device) - origin)
        self._excess = Constant(lambda: torch.tensor(excess, device=device))
        self._scale = Constant(lambda: torch.tensor(scale, dtype=dtype, device=device))

    def spread(self, local: Tensor) -> Tensor:
        """What the kernel is given."""
        result = index_select_like(local, self.dim, self._index.like(local))
        if self._averaged:
            # masked_fill would return it row-major.
            result = torch.where(self._along(self._excess.like(local), local), result.new_zeros(()), result)
        return result

    def rescale(self, averages: Tensor) -> Tensor:
        """The averages over the windows themselves."""
        return averages * self._along(self._scale.like(averages), averages)

    def _along(self, values: Tensor, t: Tensor) -> Tensor:
        return values.view(-1, *[1] * (t.ndim - self.dim - 1))


def _best_of_ranks(
    values: ShardTensor, places: ShardTensor, meta: Tensor, dims: Sequence[int]
) -> tuple[ShardTensor, ShardTensor]:
    """The maximum over the ranks' own maxima along ``dims``, replicated over the mesh dims that sharded them."""
    spec = values._spec
    sharded = spec.sharded_dims()
    target = spec.with_axes({sharded[d]: AxisLayout(Replicate()) for d in dims})
    out = with_sizes(target, meta, values.dtype, {})
    shape = out.local_shape()

    def candidates(t: ShardTensor) -> Tensor:
        gathered = redistribute_to(t, target.replace(meta=t._spec.tensor_meta)).to_local()
        return gathered.movedim(list(dims), list(range(-len(dims), 0))).flatten(-len(dims))

    best, index = candidates(values), candidates(places)
    if best.numel() == 0:
        best, index = best.reshape(shape), index.reshape(shape)
    else:
        # In the order of the global tensor: torch takes the first of equal maxima, and the last NaN.
        order = index.argsort(-1)
        best, index = best.gather(-1, order).flatten(0, -2), index.gather(-1, order).flatten(0, -2)
        best, chosen = F.adaptive_max_pool1d(best, 1, return_indices=True)
        best, index = best.reshape(shape), index.gather(-1, chosen).reshape(shape)
    return from_part(best, out), wrap(index, with_sizes(target, meta, torch.int64, {}))


# -- entry points ------------------------------------------------------------------------------------------------------

_nn, _aten = nn_functions, torch.ops.aten


def _declare_adaptive(n: int) -> None:
    name = f"adaptive_avg_pool{n}d"
    average = getattr(F, name)

    @operator(average, getattr(torch if n == 1 else _nn, name), getattr(_aten, name), tensors="input", partial="input")
    def plan_adaptive_avg_pool(call: Arguments, input: ShardTensorSpec, output_size: Numbers) -> Plan:
        """The mean of a sharded dim that is pooled to one value is a Partial."""
        meta = call.returned(average, input, output_size)
        spec = call.redistribute("input", keeping_sums(input))
        to_one = [d for d in range(len(spec.shape) - n, len(spec.shape)) if meta.shape[d] == 1]
        if not set(to_one) & set(spec.sharded_dims()):
            return _adaptive_pool(call, n, meta, average, indices=False)
        return Composed(lambda x: average(x.mean(to_one, keepdim=True), output_size))


def _declare_adaptive_max(n: int, returns_indices: bool, *spellings: Callable[..., Any]) -> None:
    best = getattr(F, f"adaptive_max_pool{n}d_with_indices")

    @operator(*spellings, tensors="input")
    def plan_adaptive_max_pool(
        call: Arguments, input: ShardTensorSpec, output_size: Numbers, return_indices: bool = False
    ) -> Plan:
        """The ranks take the maximum together of a sharded dim that is pooled to one value."""
        meta = call.returned(best, input, output_size)[0]
        inside = _adaptive_pool(call, n, meta, best, indices=True)
        to_one = [d for d in input.sharded_dims() if d >= len(input.shape) - n and meta.shape[d] == 1]

        def pool(x: Tensor) -> Any:
            values, places = inside.run([x])
            if to_one:
                values, places = _best_of_ranks(values, places, meta, to_one)
            return (values, places) if returns_indices or return_indices else values

        return Composed(pool)


for _n in (1, 2, 3):
    _declare_adaptive(_n)
    _name = f"adaptive_max_pool{_n}d"
    _declare_adaptive_max(_n, False, getattr(F, _name))
    # Below torch.nn.functional, these always return the indices too.
    _below = getattr(torch if _n == 1 else _nn, _name), getattr(F, f"{_name}_with_indices"), getattr(_aten, _name)
    _declare_adaptive_max(_n, True, *_below)
