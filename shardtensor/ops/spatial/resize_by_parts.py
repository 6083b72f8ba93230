"""Resampling on one rank by parts: the shard by itself, while its halo travels, and the outputs at its borders.

[Note: resampling by parts] torch's kernel resamples the shard as if that were all there is. Right are the outputs that
read nothing of the halo; the others are computed anew, from the halo and the edge of the shard that they read, and
overwritten. So neither the shard nor the result is copied, and nobody waits before most of the work is done. In the
gradient those outputs are wrong likewise, but only for the edge that they read: the gradients of that edge and of the
halo come from all outputs that read the edge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...geometry import Interval, length
from ...halo import Axis, Halo
from ...spec import ShardTensorSpec
from ...strides import stride_like
from ..common.stencil import Differentiated, LinearStencilPlan
from .resample import LocalResampling
from .taps import Taps, as_local

__all__ = ["ResizeByParts", "plan_by_parts"]

# Elements of a rank's outputs from which on it takes longer to copy them than to call some kernels.
WORTH_OVERLAPPING = 1 << 16

Reads = Callable[[int], Interval]  # what an output reads, by its index
Narrow = tuple[int, int, int]  # (dim, start, length)


class ResizeByParts(LinearStencilPlan):
    """The shard while the halo travels, and then the borders. See [Note: resampling by parts].

    Args:
        joined: the same with shard and halo in one, for second derivatives.
        outputs: the result's spec.
        halo: what is exchanged, along one dim.
        shape: of the shard.
        shard: resamples the shard by itself.
        borders: those before and after it; None where no output reads the halo.
    """

    def __init__(
        self,
        joined: LinearStencilPlan,
        outputs: ShardTensorSpec,
        halo: Halo,
        shape: Sequence[int],
        shard: Differentiated,
        borders: Sequence[_Border | None],
    ) -> None:
        super().__init__(joined.fetch, joined.function, outputs)
        self._halo, self._shape, self._shard, self._borders = halo, shape, shard, borders

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        sides = self._halo.nothing()
        pending = self._halo.start(0, x, sides)
        y, _ = self._shard.forward(x)
        self._halo.finish(0, pending, sides, after=y)
        for side, border in zip(sides[0], self._borders, strict=True):
            if side is not None and border is not None:
                border.compute(y, side, x)
        return y, ()

    def again(self, *tensors: Any) -> Any:
        return super().forward(*tensors)[0]

    def backward(self, needed: Sequence[bool], grads: Sequence[Tensor | None], *kept: Tensor) -> list[Any]:
        grad = grads[0]
        if grad is None:
            return [None]
        sides, edges = self._halo.nothing(), []
        for k, border in enumerate(self._borders):
            if border is not None:
                sides[0][k], edge = border.differentiate(grad)
                edges.append((border.edge, edge))
        pending = self._halo.start_return(0, sides, grad)
        total = self._shard.backward(grad, _anything(self._shape, grad))
        for place, edge in edges:
            total.narrow(*place).copy_(edge)
        self._halo.add_to_shard(0, total, self._halo.finish_return(0, pending, sides, after=total))
        return [total]


@dataclass(frozen=True, slots=True)
class _Border:
    """The outputs that read one side of the halo, and the gradients of what is next to it.

    Attributes:
        before: whether the halo comes before the shard.
        edge: in the shard, where its gradient by itself is wrong.
        rest: in the shard, what these outputs read of it.
        outputs: they, among the rank's.
        function: gives them, out of halo and rest.
        reaching: the outputs that read the halo or the edge.
        reached: the shape of what those read.
        gradient: its gradient is that of what they read.
        side_reached, edge_reached: the halo and the edge in that.
    """

    before: bool
    edge: Narrow
    rest: Narrow
    outputs: Narrow
    function: Differentiated
    reaching: Narrow
    reached: tuple[int, ...]
    gradient: Differentiated
    side_reached: Narrow
    edge_reached: Narrow

    def compute(self, y: Tensor, side: Tensor, x: Tensor) -> None:
        """Overwrite these outputs in ``y``."""
        rest = x.narrow(*self.rest)
        read = torch.cat((side, rest) if self.before else (rest, side), self.rest[0])
        y.narrow(*self.outputs).copy_(self.function.forward(read)[0])

    def differentiate(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of the side and of the edge, out of that of all this rank's outputs."""
        found = self.gradient.backward(grad.narrow(*self.reaching), _anything(self.reached, grad))
        return found.narrow(*self.side_reached), found.narrow(*self.edge_reached)


def _anything(shape: Sequence[int], like: Tensor) -> Tensor:
    """A tensor of this shape, of any values."""
    return torch.empty_strided(shape, stride_like(like, shape), dtype=like.dtype, device=like.device)


# -- made once ---------------------------------------------------------------------------------------------------------


def plan_by_parts(
    joined: LinearStencilPlan,
    spec: ShardTensorSpec,
    outputs: ShardTensorSpec,
    local: LocalResampling,
    mine: Mapping[int, tuple[Interval, Interval]],
) -> ResizeByParts | None:
    """The same by parts; None where that does not pay, or where they cannot be computed apart.

    Each rank may choose by itself: both ways send the same messages.

    Args:
        spec, outputs: of the tensor and of the result.
        mine: per dim that is resampled, the inputs that this rank reads and its outputs.
    """
    shape, out_shape = spec.local_shape(), outputs.local_shape()
    active = [axis for axis in joined.fetch.axes if axis.transfers.active]
    whole = all(axis.main == axis.transfers.own for axis in joined.fetch.axes)
    if math.prod(out_shape) < WORTH_OVERLAPPING or 0 in shape or len(active) != 1 or not whole:
        return None
    (axis,) = active
    if local.resizes[axis.dim].mode in ("nearest", "nearest-exact"):
        return None  # for some scales torch's gradient is that of other neighbours than its forward pass takes
    dim, own, out = axis.dim, axis.transfers.own, mine[axis.dim][1]
    reads = _reads(local.resizes[dim].taps(), 0, 0)
    inner = _inner(own, out, reads)
    # Of each dim: as what torch is to resample the shard, and which of its outputs is the first one asked for.
    alone = {d: as_local(local.resizes[d], *((own, inner) if d == dim else mine[d])) for d in mine}
    resizes = [found[0] for found in alone.values() if found is not None]
    drops = {d: inner[0] - out[0] if d == dim else 0 for d in mine}
    if {d: found and found[1] for d, found in alone.items()} != drops:
        return None
    if [resize.out for resize in resizes] != [length(mine[d][1]) for d in mine]:
        return None
    spans = _spans(axis, out, inner, reads, _reads(resizes[list(mine).index(dim)].taps(), out[0], own[0]))
    if spans is None:
        return None
    borders = [None if span is None else _border(dim, span, axis, mine, local, shape, out_shape) for span in spans]
    halo, shard = Halo([axis], spec.mesh, shape), local.by_kernel(shape, resizes)
    return ResizeByParts(joined, outputs, halo, shape, shard, borders)


@dataclass(frozen=True, slots=True)
class _Spans:
    """What follows from a halo before (or after) the shard, along its dim. All indices are global.

    Attributes:
        side, edge: the halo, and the part of the shard whose gradients the shard by itself gets wrong.
        touched: the outputs that read the halo.
        read: what they read.
        reaching: the outputs that read the halo or the edge.
        reached: what those read.
    """

    side: Interval
    edge: Interval
    touched: Interval
    read: Interval
    reaching: Interval
    reached: Interval


def _reads(taps: Taps, first: int, origin: int) -> Reads:
    """What outputs read, of which the taps of number ``first`` on are given, for inputs from ``origin`` on."""
    width = taps.weights.shape[1]

    def reads(output: int) -> Interval:
        start = int(taps.first[output - first]) + origin
        return start, start + width

    return reads


def _inner(own: Interval, out: Interval, reads: Reads) -> Interval:
    """Those outputs that read nothing but the shard."""
    a, b = out
    while a < b and reads(a)[0] < own[0]:
        a += 1
    while a < b and reads(b - 1)[1] > own[1]:
        b -= 1
    return a, b


def _hull(intervals: Iterable[Interval]) -> Interval:
    starts, stops = zip(*intervals)
    return min(starts), max(stops)


def _spans(axis: Axis, out: Interval, inner: Interval, reads: Reads, alone: Reads) -> list[_Spans | None] | None:
    """What the halo before the shard touches, and the one after it; None where these are not apart.

    Args:
        out, inner: this rank's outputs, and those of them that read no halo.
        alone: what an output reads of the shard where that is resampled by itself.
    """
    own = axis.transfers.own
    found: list[_Spans | None] = []
    for side, touched in zip(axis.sides, ((out[0], inner[0]), (inner[1], out[1])), strict=True):
        if not length(side) or not length(touched):
            if length(side) or length(touched):
                return None
            found.append(None)
            continue
        start, stop = _hull(read(o) for read in (reads, alone) for o in range(*touched))
        first, last = touched
        if not found:
            edge = own[0], max(own[0], stop)
            while last < out[1] and reads(last)[0] < edge[1]:
                last += 1
        else:
            edge = min(own[1], start), own[1]
            while first > out[0] and reads(first - 1)[1] > edge[0]:
                first -= 1
        reaching = first, last
        read, reached = (_hull([side, *map(reads, range(*outputs))]) for outputs in (touched, reaching))
        if _hull([side, own, reached]) != _hull([side, own]):
            return None  # of the other halo
        found.append(_Spans(side, edge, touched, read, reaching, reached))
    before, after = found
    return None if before and after and before.edge[1] > after.edge[0] else found


def _border(
    dim: int,
    span: _Spans,
    axis: Axis,
    mine: Mapping[int, tuple[Interval, Interval]],
    local: LocalResampling,
    shape: Sequence[int],
    out_shape: Sequence[int],
) -> _Border:
    def narrow(part: Interval, of: Interval) -> Narrow:
        return dim, part[0] - of[0], length(part)

    def resampling(read: Interval, outputs: Interval) -> tuple[list[int], Differentiated]:
        read_shape, outputs_shape = list(shape), list(out_shape)
        read_shape[dim], outputs_shape[dim] = length(read), length(outputs)
        return read_shape, local.function(read_shape, outputs_shape, {**mine, dim: (read, outputs)})

    own, out = axis.transfers.own, mine[dim][1]
    before = span.side[0] < own[0]
    rest = (own[0], span.read[1]) if before else (span.read[0], own[1])
    _, function = resampling(span.read, span.touched)
    reached, gradient = resampling(span.reached, span.reaching)
    return _Border(
        before=before,
        edge=narrow(span.edge, own),
        rest=narrow(rest, own),
        outputs=narrow(span.touched, out),
        function=function,
        reaching=narrow(span.reaching, out),
        reached=tuple(reached),
        gradient=gradient,
        side_reached=narrow(span.side, span.reached),
        edge_reached=narrow(span.edge, span.reached),
    )
