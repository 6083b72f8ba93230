"""Max and average pooling with fixed windows, in one to three dims.

The kernel pads, not this module. A rank whose windows reach over a global end gives its kernel the operator's padding,
and a rank whose windows do not gives it none. Outputs that come out in excess at boundaries between ranks are dropped.
So divisors at the global ends, ``-inf`` in the padding and the choice among equal maxima are torch's by construction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._compat import AutogradFunction, nn_functions
from ...communication.halo import Fetch, Narrow
from ...dispatch.gradients import for_tangents
from ...layout.intervals import Interval, intervals_of, length, map_boundaries
from ...layout.spec import ShardTensorSpec
from ...layout.strides import stride_like
from ...layout.windows import Window
from ...operators.declaration import Arguments, Composed, LocalPlan, Plan, operator
from ..common.batch_parallel import Names, Result, image_names, plan_by_batch
from ..common.stencil import (
    Constant,
    Differentiated,
    StencilPlan,
    Wanted,
    keeping_sums,
    nothing,
    per_dim,
    result_dtype,
    taken,
    with_sizes,
)

Numbers = int | Sequence[int]
# What a kernel returns: the values, or the values and their flat indices.
Pooled = Tensor | tuple[Tensor, Tensor]
Kernel = Callable[[Tensor], Pooled]

# -- geometry ----------------------------------------------------------------------------------------------------------


def pool_reads(window: Window, out: Interval, least: int = 0) -> tuple[Interval, int, int]:
    """What a kernel that pads both ends alike has to be given to compute the outputs ``out``.

    Args:
        least: the kernel accepts no shorter input; the global dim is not shorter.

    Returns:
        The input interval, the padding, and how many of the kernel's outputs to drop before the wanted ones.

    Example:
        >>> w = Window(size=9, kernel=3, stride=2, before=1, after=1)
        >>> pool_reads(w, (0, 2)), pool_reads(w, (2, 4)), pool_reads(w, (4, 5))
        (((0, 4), 1, 0), ((3, 8), 0, 0), ((6, 9), 1, 1))
    """
    if out[1] <= out[0]:
        return (0, 0), 0, 0
    start, stop = window.reads(out)
    if start >= 0 and stop <= window.size:
        return (start, stop), 0, 0
    # With padding the kernel's first window starts before the input it is given; begin so many outputs earlier that
    # the wanted ones start where they should.
    first = max(0, out[0] - -(-window.before // window.stride))
    stop = min(window.size, max(stop, first * window.stride + least))
    first = min(first, max(0, (stop - least) // window.stride))
    return (first * window.stride, stop), window.before, out[0] - first


class GlobalIndices:
    """Flat indices into a spatial shape of this rank's, as flat indices into the global one.

    Args:
        shape: what the kernel was given.
        places: per dim, the global index of its first element, or a table of the global indices of all.
        global_shape: the global spatial shape.
    """

    def __init__(self, shape: Sequence[int], places: Sequence[int | Constant], global_shape: Sequence[int]) -> None:
        self._dims = list(zip(shape, places, global_shape, strict=True))
        # Where all dims but the first are global, indices are shifted by a number.
        self._shift = None
        if isinstance(places[0], int) and tuple(shape[1:]) == tuple(global_shape[1:]) and not any(places[1:]):
            self._shift = places[0] * math.prod(global_shape[1:])

    def __call__(self, indices: Tensor) -> Tensor:
        if self._shift is not None:
            return indices + self._shift if self._shift else indices
        result, rest, step = torch.zeros_like(indices), indices, 1
        for n, places, total in reversed(self._dims):
            at = rest % n
            result = result + (places.like(at)[at] if isinstance(places, Constant) else places + at) * step
            rest = rest // n
            step *= total
        return result


# -- fixed windows -----------------------------------------------------------------------------------------------------


def _pool(
    call: Arguments,
    meta: Pooled,
    windows: Sequence[Window],
    kernel: Callable[[Sequence[int]], Kernel],
    gradient: Callable[[Sequence[int]], Differentiated] | None = None,
    *,
    full_windows: bool = False,
) -> Plan:
    """The plan that pools the input's last dims.

    Args:
        meta: what torch returns for the global tensor.
        windows: one per spatial dim.
        kernel: gives the kernel with these paddings.
        gradient: gives the kernel of values with these paddings and its gradient, where that is a kernel of torch's.
        full_windows: the kernel refuses inputs shorter than the window, even if padded.
    """
    spec = call.tensors["input"]
    first = len(spec.shape) - len(windows)
    sizes: dict[int, tuple[int, ...]] = {}
    needs: dict[int, list[Interval]] = {}
    paddings, origin = [w.before for w in windows], [0] * len(windows)
    wanted: dict[int, Wanted] = {}
    for d, m in spec.sharded_dims().items():
        if d < first:
            continue
        w, rank = windows[d - first], spec.coordinate[m]
        sizes[d] = map_boundaries(spec.sizes_along(m), w.owned_boundary)
        reads = [pool_reads(w, out, w.kernel if full_windows else 0) for out in intervals_of(sizes[d])]
        needs[d] = [need for need, _, _ in reads]
        need, padding, drop = reads[rank]
        origin[d - first], paddings[d - first] = need[0], padding
        given = Window(length(need), w.kernel, w.stride, w.dilation, padding, padding, w.ceil_mode)
        if drop or given.outputs != sizes[d][rank]:
            wanted[d] = drop, sizes[d][rank], given.outputs
    fetch = Fetch.of(spec, needs)
    unpadded, least = kernel([0] * len(windows)), [1] * first + [w.extent for w in windows]

    def smallest(t: Tensor) -> Tensor:
        return values_of(unpadded(t))

    dtype = result_dtype(call, spec.tensor_meta.dtype, smallest, least)
    if gradient is not None and dtype == spec.tensor_meta.dtype and not spec.partial_mesh_dims():
        out = with_sizes(spec, values_of(meta), dtype, sizes)
        shape = out.local_shape()
        if 0 in shape:
            return StencilPlan(fetch, nothing(fetch.shape, shape, smallest, least), out)
        return StencilPlan(fetch, taken(gradient(paddings), wanted, len(shape)), out)
    indices = GlobalIndices(fetch.shape[first:], origin, spec.shape[first:]) if isinstance(meta, tuple) else None
    places = [(d, drop, count) for d, (drop, count, _) in wanted.items()]
    own = kernel(paddings)
    return local_plan(spec, fetch, dtype, own, places, indices, values_of(meta), sizes, (smallest, least))


def local_plan(
    spec: ShardTensorSpec,
    fetch: Fetch,
    dtype: torch.dtype,
    kernel: Kernel,
    wanted: Sequence[Narrow],
    indices: Callable[[Tensor], Tensor] | None,
    meta: Tensor,
    sizes: dict[int, tuple[int, ...]],
    smallest: tuple[Callable[[Tensor], Tensor], Sequence[int]],
) -> LocalPlan:
    """Fetch, run the kernel, and take what is wanted of its outputs.

    Args:
        dtype: which the kernel is to be given.
        indices: makes the kernel's indices global; None where it returns none.
        meta, sizes: the global result without its data, and its shard sizes by tensor dim.
        smallest: a kernel with the same gradient, and the least shape that it takes: see :func:`.nothing`.
    """
    out = with_sizes(spec, meta, dtype, sizes)
    outputs = out if indices is None else (out, with_sizes(spec, meta, torch.int64, sizes))
    casts, fetches, shape = dtype != spec.tensor_meta.dtype, bool(fetch), out.local_shape()
    without_elements = nothing(fetch.shape, shape, *smallest)

    def taken(found: Tensor) -> Tensor:
        for place in wanted:
            found = found.narrow(*place)
        return found.clone() if wanted else found  # dense, in its memory format, and without the rest

    def pool(local: Tensor) -> Pooled:
        read = fetch(local) if fetches else local
        read = read.to(dtype) if casts else read
        if 0 in shape:
            # Yet this rank takes part in the exchange of the backward pass, and of those of its derivatives.
            values, _ = without_elements.forward(read)
            return values if indices is None else (values, local.new_empty(shape, dtype=torch.int64))
        found: Any = kernel(read)
        if indices is None:
            return taken(found)
        return taken(found[0]), indices(taken(found[1]))

    return LocalPlan(pool, outputs)


def values_of(result: Pooled) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def _windows(
    spec: ShardTensorSpec, kernel: Sequence[int], stride: Sequence[int], padding: Numbers, dilation: Numbers, ceil: bool
) -> list[Window]:
    n = len(kernel)
    columns = spec.shape[-n:], kernel, stride, per_dim(dilation, n), per_dim(padding, n)
    return [Window(n, k, s, d, p, p, ceil) for n, k, s, d, p in zip(*columns, strict=True)]


def _stride(kernel_size: Numbers, stride: Numbers | None) -> Numbers:
    return kernel_size if stride is None or stride in ((), []) else stride


# -- entry points ------------------------------------------------------------------------------------------------------

_nn, _aten = nn_functions, torch.ops.aten


def _max_pool(n: int, *options: Any) -> Differentiated:
    with_indices = getattr(_nn, f"max_pool{n}d_with_indices")
    gradient = getattr(_aten, f"max_pool{n}d_with_indices_backward").default

    def pool(t: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        values, indices = with_indices(t, *options)
        return values, (indices,)

    return Differentiated(pool, lambda grad, read, indices: gradient(grad, read, *options, indices))


def _avg_pool(n: int, *options: Any) -> Differentiated:
    average, gradient = getattr(_nn, f"avg_pool{n}d"), getattr(_aten, f"avg_pool{n}d_backward").default
    return Differentiated(lambda t: (average(t, *options), ()), lambda grad, read: gradient(grad, read, *options))


def _declare_max_pool(n: int) -> None:
    function = getattr(F, f"max_pool{n}d")
    plain = getattr(torch, f"max_pool{n}d")
    with_indices = getattr(torch if n == 1 else _nn, f"max_pool{n}d_with_indices")

    name = f"max_pool{n}d_with_indices"

    @operator(
        *(plain, function, getattr(_aten, f"max_pool{n}d")),
        *(with_indices, getattr(F, name), getattr(_aten, name)),
        tensors="input",
    )
    def plan_max_pool(
        call: Arguments,
        input: ShardTensorSpec,
        kernel_size: Numbers,
        stride: Numbers | None = None,
        padding: Numbers = 0,
        dilation: Numbers = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Plan:
        indices = return_indices or call.name == name
        step, run = _stride(kernel_size, stride), with_indices if indices else plain
        meta = call.returned(function, input, kernel_size, step, padding, dilation, ceil_mode, indices)
        size, step, dilation = (per_dim(value, n) for value in (kernel_size, step, dilation))
        return _pool(
            call,
            meta,
            _windows(input, size, step, padding, dilation, ceil_mode),
            lambda pads: lambda t: run(t, size, step, pads, dilation, ceil_mode),
            None if indices or n == 1 else lambda pads: _max_pool(n, size, step, tuple(pads), dilation, ceil_mode),
        )


def _declare_avg_pool(n: int) -> None:
    function = getattr(F, f"avg_pool{n}d")

    @operator(function, getattr(_aten, f"avg_pool{n}d"), tensors="input", partial="input")
    def plan_avg_pool(
        call: Arguments,
        input: ShardTensorSpec,
        kernel_size: Numbers,
        stride: Numbers | None = None,
        padding: Numbers = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Plan:
        step = _stride(kernel_size, stride)
        options = (ceil_mode, count_include_pad, *(() if divisor_override is None else (divisor_override,)))
        meta = call.returned(function, input, kernel_size, step, padding, *options)
        size, step = per_dim(kernel_size, n), per_dim(step, n)
        call.redistribute("input", keeping_sums(input))
        last = ceil_mode, count_include_pad, divisor_override
        return _pool(
            call,
            meta,
            _windows(input, size, step, padding, 1, ceil_mode),
            lambda pads: lambda t: function(t, size, step, pads, *options),
            None if n == 1 else lambda pads: _avg_pool(n, size, step, tuple(pads), *last),
            full_windows=n == 3,
        )


for _n in (1, 2, 3):
    _declare_max_pool(_n)
    _declare_avg_pool(_n)


# -- unpool ------------------------------------------------------------------------------------------------------------

# ``max_unpool``: the inverse of max pooling, which is told where each maximum was.


class _Unpool(AutogradFunction):
    """``unpool(x, places)``, where several elements may go to one place, and one of them has an effect.

    torch's gradient counts all of them, and so do derivatives of it. A tangent, which is made of these, is that of the
    one element.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, unpool: Callable[[Tensor, Tensor], Tensor], n: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.unpool, ctx.n = unpool, n
        return unpool(x, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (places,) = ctx.saved_tensors
        return _Picked.apply(grad, places, ctx.unpool, ctx.n), None, None, None


class _Picked(AutogradFunction):
    """The elements of ``grad`` at ``places`` of its last ``n`` dims, which are numbered together."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, places: Tensor, unpool: Callable[[Tensor, Tensor], Tensor], n: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.unpool, ctx.n, ctx.shape = unpool, n, grad.shape
        picked = grad.flatten(-n).gather(-1, places.flatten(-n)).view(places.shape)
        return picked

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (places,) = ctx.saved_tensors
        if for_tangents.value:
            return _Unpool.apply(grad, places, ctx.unpool, ctx.n), None, None, None
        nothing = grad.new_zeros(ctx.shape).flatten(-ctx.n)
        added = nothing.scatter_add(-1, places.flatten(-ctx.n), grad.flatten(-ctx.n))
        return added.view(ctx.shape), None, None, None


def _declare_unpool(n: int) -> None:
    function: Callable[..., Tensor] = getattr(F, f"max_unpool{n}d")

    @operator(function, tensors="input indices")
    def plan_max_unpool(
        call: Arguments,
        input: ShardTensorSpec,
        indices: ShardTensorSpec,
        kernel_size: Numbers,
        stride: Numbers | None = None,
        padding: Numbers = 0,
        output_size: Sequence[int] | None = None,
    ) -> Plan:
        size = None if output_size is None else tuple(output_size)
        shape = call.returned(function, input, indices, kernel_size, stride, padding, size).shape
        names, out = image_names(len(input.shape), n), list(shape[-n:])

        def unpool(x: Tensor, places: Tensor) -> Tensor:
            return function(x, places, kernel_size, stride, padding, out)

        given = torch.empty_strided(input.shape, input.stride, device="meta")
        # The kernel gives it the input's memory format; on tensors without data torch calls it row-major.
        result = Result(shape, names, input.tensor_meta.dtype, stride_like(given, shape))
        return plan_by_batch(
            call, lambda x, places: _Unpool.apply(x, places, unpool, n), {"input": names, "indices": names}, [result]
        )


for _n in (1, 2, 3):
    _declare_unpool(_n)


# -- fractional max pool -----------------------------------------------------------------------------------------------

# ``fractional_max_pool``: pooling over windows of random sizes.


def _declare_fractional_pool(n: int) -> None:
    name = f"fractional_max_pool{n}d"
    function: Callable[..., tuple[Tensor, Tensor]] = getattr(F, f"{name}_with_indices")

    @operator(getattr(F, name), function, tensors="input _random_samples")
    def plan_fractional_max_pool(
        call: Arguments,
        input: ShardTensorSpec,
        kernel_size: Numbers,
        output_size: Numbers | None = None,
        output_ratio: float | Sequence[float] | None = None,
        return_indices: bool = False,
        _random_samples: ShardTensorSpec | None = None,
    ) -> Plan:
        indices = return_indices or call.name != name
        batched = len(input.shape) == n + 2
        batch, channels = input.shape[0] if batched else 1, input.shape[-n - 1]
        dtype = input.tensor_meta.dtype
        if _random_samples is None:

            def draw_and_pool(x: Tensor, _: None) -> Tensor | tuple[Tensor, Tensor]:
                # A few numbers per channel, drawn as on one device: by every rank for the global tensor.
                drawn = torch.rand(batch, channels, n, dtype=dtype, device=x.device)
                pooled = function(x, kernel_size, output_size, output_ratio, True, drawn)
                return pooled if indices else pooled[0]

            return Composed(draw_and_pool)
        shape = call.returned(function, input, kernel_size, output_size, output_ratio, True, _random_samples)[0].shape
        names, out = image_names(len(input.shape), n), list(shape[-n:])

        def pool(x: Tensor, at: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            pooled = function(x, kernel_size, out, None, True, at)
            return pooled if indices else pooled[0]

        def probe(x: Tensor) -> Tensor:
            return function(x, 1, 1, None, True, x.new_zeros(1, 1, n))[0]

        # In three dims torch takes no input of length 1.
        results = [Result(shape, names, result_dtype(call, dtype, probe, [1, 1, *[2] * n]))]
        if indices:
            results.append(Result(shape, names, torch.int64))
        sample_names: Names = ["batch" if batched else None, "channels", None]
        return plan_by_batch(call, pool, {"input": names, "_random_samples": sample_names}, results)


for _n in (2, 3):
    _declare_fractional_pool(_n)
