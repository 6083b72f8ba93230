"""What pooling, padding and resampling share: operators that treat each spatial dim by itself.

Such an operator is planned above autograd. torch runs it on the global tensor without its data, which gives the
output's shape and torch's own errors on every rank; then each rank fetches what its outputs read, one dim after the
other (so that corners come along), and a plain torch kernel does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate

from ..._compat import TensorMeta, constant_like
from ...communication.halo import Fetch
from ...communication.zeros import padded
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ...layout.strides import stride_like
from ...operators.arguments import Arguments
from ...operators.autocast import autocast_dtype
from ...operators.plan import Plan


def keeping_sums(spec: ShardTensorSpec) -> ShardTensorSpec:
    """The spec with its Partials reduced, but for sums: a linear operator may be applied to the contributions."""
    others = [m for m, p in enumerate(spec.placements) if isinstance(p, Partial) and p.reduce_op != "sum"]
    return spec.with_axes({m: AxisLayout(Replicate()) for m in others})


def result_dtype(
    call: Arguments, dtype: torch.dtype, probe: Callable[[Tensor], Tensor], shape: Sequence[int]
) -> torch.dtype:
    """The dtype that an operator gives: the input's, unless autocast has another idea.

    Autocast knows no meta tensors; so ask ``probe``, the operator, with a tensor of the small ``shape``.
    """
    return dtype if call.autocast() is None else autocast_dtype(probe, [shape], [dtype], call.device)


def with_sizes(
    spec: ShardTensorSpec, meta: Tensor, dtype: torch.dtype, sizes: Mapping[int, tuple[int, ...]]
) -> ShardTensorSpec:
    """The spec of a result with the global shape of ``meta``; shard ``sizes`` by tensor dim, where they differ."""
    sharded = spec.sharded_dims()
    layout = list(spec.layout)
    for dim, new in sizes.items():
        layout[sharded[dim]] = layout[sharded[dim]]._replace(sizes=new)
    return spec.with_layout(layout, TensorMeta(meta.shape, meta.stride(), dtype))


@dataclass(frozen=True, slots=True)
class Differentiated:
    """A function of a local tensor, and its gradient by one of torch's kernels.

    Attributes:
        forward: returns its value, which autograd could differentiate, too, and what else the gradient needs.
        backward: the argument's gradient, out of that of the value, a tensor in the argument's shape and memory format
            (but of any values), and what ``forward`` returned besides.
    """

    forward: Callable[[Tensor], tuple[Tensor, tuple[Tensor, ...]]]
    backward: Callable[..., Tensor]


# Of a function's outputs along a dim: how many come before the wanted ones, how many are wanted, how many there are.
Wanted = tuple[int, int, int]


def grown(t: Tensor, least: Sequence[int]) -> Tensor:
    """The tensor with zeros behind its elements along dims that are shorter than that."""
    missing = [max(0, n - size) for n, size in zip(least, t.shape, strict=True)]
    return padded(t, [n for lacking in reversed(missing) for n in (0, lacking)])


def nothing(
    shape: Sequence[int],
    out_shape: Sequence[int],
    function: Callable[[Tensor], Tensor] | None = None,
    least: Sequence[int] = (),
) -> Differentiated:
    """A function between tensors without elements, of these shapes. Kernels refuse empty dims.

    Args:
        function: what the other ranks call, where its gradient is not independent of its argument. Derivatives of any
            order are to come through what was fetched as on these ranks, in their order: so the graph has the kernel's
            nodes. It gets enough zeros to have an output, which is left out.
        least: lengths of dims with which it has one.
    """

    def forward(t: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        some = t if function is None else function(grown(t, least)).flatten()[:0]
        return some.reshape(out_shape), ()

    return Differentiated(forward, lambda grad, _: grad.reshape(shape))


def taken(function: Differentiated, wanted: Mapping[int, Wanted], ndim: int) -> Differentiated:
    """A function with only the wanted outputs, ``{dim: which}`` where not all are; of ``ndim`` dims."""
    if not wanted:
        return function
    places = [(d, drop, count) for d, (drop, count, _) in wanted.items()]
    around = {d: (drop, total - drop - count) for d, (drop, count, total) in wanted.items()}
    unwanted = [n for d in reversed(range(ndim)) for n in around.get(d, (0, 0))]

    def forward(t: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        found, kept = function.forward(t)
        result = found
        for place in places:
            result = result.narrow(*place)
        # Without the rest where that is much; where it is what a halo gives, a copy of the result costs more.
        return result if 4 * result.numel() > 3 * found.numel() else result.clone(), kept

    def backward(grad: Tensor, *others: Tensor) -> Tensor:
        return function.backward(padded(grad, unwanted), *others)

    return Differentiated(forward, backward)


class StencilPlan(Plan):
    """Fetch what this rank's outputs read, and call a function with it. The input is saved for second derivatives.

    Neither the input nor the result is Partial.
    """

    saves: tuple[int, ...] = (0,)
    twice = True

    def __init__(self, fetch: Fetch, function: Differentiated, outputs: ShardTensorSpec) -> None:
        self.fetch, self.function, self.outputs, self._fetches = fetch, function, outputs, bool(fetch)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self.function.forward(self.fetch(x) if self._fetches else x)

    def backward(self, needed: Sequence[bool], grads: Sequence[Tensor | None], x: Tensor, *kept: Tensor) -> list[Any]:
        grad = grads[0]
        if grad is None:
            return [None]
        if not self._fetches:
            return [self.function.backward(grad, x, *kept)]
        return [self.fetch.backward(self.function.backward(grad, self._read(x), *kept), overwrite=True)]

    def _read(self, like: Tensor) -> Tensor:
        """A tensor in the shape of what the function reads, of any values."""
        shape = self.fetch.shape
        return torch.empty_strided(shape, stride_like(like, shape), dtype=like.dtype, device=like.device)


class LinearStencilPlan(StencilPlan):
    """One with a linear function, whose gradient needs no more of the input than its shape."""

    saves = ()
    linear = True

    def backward(self, needed: Sequence[bool], grads: Sequence[Tensor | None], *kept: Tensor) -> list[Any]:
        grad = grads[0]
        if grad is None:
            return [None]
        return [self.fetch.backward(self.function.backward(grad, self._read(grad), *kept), overwrite=True)]


class Constant:
    """A small tensor that follows from specs, made when a plan is, outside of any trace."""

    __slots__ = ("_data",)

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._data = make()

    def like(self, tensor: Tensor) -> Tensor:
        """The constant, for use with ``tensor``."""
        return constant_like(self._data, tensor)


def per_dim(value: Any, n: int) -> tuple[Any, ...]:
    """One entry per dim of an argument that may be a number or a sequence of one."""
    entries = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return entries * n if len(entries) == 1 else entries


def scaled_boundary(n: int, out: int) -> Callable[[int], int]:
    """How a dim of length ``n`` that becomes ``out`` long maps boundaries: each output to where its centre lies.

    Example:
        >>> boundary = scaled_boundary(7, 14)
        >>> [boundary(b) for b in (0, 3, 7)]
        [0, 6, 14]
    """
    # Outputs o with (o + 1/2) * n / out < b, counted in integers.
    return lambda b: max(0, min(out, -((n - 2 * b * out) // (2 * n))))
