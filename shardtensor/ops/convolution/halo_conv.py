"""Convolution on one rank: what it does, worked out from specs, and its local work.

Small shards are put together with their halo, and convolved by one call of the kernel: to call it takes longer than to
copy them. Large ones are not copied:

[Note: convolution by parts] What a rank's outputs read is tiled by its own shard and its halo (see "corners" in
halo.py). The shard is convolved among zeros, while the halo travels; then the outputs that read a side of the halo are
computed anew, from that side and the edge of the shard next to it. The backward pass saves the shard and the halo
only. As convolution is linear, the gradients are sums over these parts, each among zeros: those of the halo are
computed and sent first, and travel during the shard's own.

Both ways send the same messages in the same order, so each rank may take either.

[Note: owner computes] The rank that owns the input under the kernel's middle tap computes an output
(``Window.boundary``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...caches import cached
from ...errors import refuse
from ...exchange import Pending, plan_intervals
from ...geometry import Interval, Window, intersect, intervals_of, map_boundaries
from ...halo import Axis, Fetch, Halo, Narrow, Outgoing, Sides
from ...spec import ShardTensorSpec
from ...strides import stride_like
from ..common.half import cast, is_half, widened
from .parts import Common, Geometry, Part, check_arguments

__all__ = ["Convolution", "ConvolutionByParts", "JoinedConvolution", "Pads", "plan_convolution", "stride_of"]

# Elements of a shard from which on it takes longer to copy it, or to compute its gradient, than to call some kernels.
WORTH_OVERLAPPING = 1 << 16

Pads = tuple[tuple[int, int], ...]
Grads = list[Tensor | None]
# Starts the sum over the ranks of the gradients of (input,) weight and bias; what it returns waits for it.
StartSum = Callable[[Sequence[Tensor | None]], Callable[[], list[Tensor | None]]]
# Gradients of the halo on their way to its owners: of the first axis, and what has arrived from the others.
_Returning = tuple[Pending | None, list[list[Tensor]]]


class Convolution:
    """One convolution on one rank: its local work.

    Attributes:
        out_spec: of the result.
        out_shape: of this rank's shard of it.
        saves: which of input and weight (0 and 1) the backward pass needs.
    """

    out_spec: ShardTensorSpec
    out_shape: tuple[int, ...]
    saves: tuple[int, ...]

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """This rank's outputs, and what of other ranks the backward pass needs."""
        raise NotImplementedError

    def fetched(self, x: Tensor) -> tuple[Tensor | None, ...]:
        """What :meth:`forward` returns besides the outputs."""
        raise NotImplementedError

    def backward(
        self, needed: Sequence[bool], grad: Tensor, start_sum: StartSum | None, *saved: Tensor | None
    ) -> Sequence[Tensor | None]:
        """Gradients of the shard, the weight and the bias; without ``start_sum`` this rank's contributions to these.

        Args:
            saved: those of input and weight that :attr:`saves` names, then what :meth:`fetched` returns.
        """
        raise NotImplementedError

    @property
    def exchanges(self) -> bool:
        """Whether other ranks add to the gradient of the shard, or get contributions to theirs from this one."""
        raise NotImplementedError

    def differentiate(
        self, needed: Sequence[bool], grad: Tensor, start_sum: StartSum | None, sums: bool, *saved: Tensor | None
    ) -> Sequence[Tensor | None]:
        """:meth:`backward`, in float32 where ranks sum half precision: see [Note: rounded once] in redistribute.py.

        Args:
            sums: whether they sum the gradients of weight and bias, here or later.
        """
        if not is_half(grad) or not (sums or self.exchanges):
            return self.backward(needed, grad, start_sum, *saved)
        need_x, need_w, need_b = needed
        apart = need_x and not self.exchanges
        wide = widened(grad, *saved)
        found = list(self.backward((need_x and not apart, need_w, need_b), wide[0], start_sum, *wide[1:]))
        if apart:
            found[0] = self.backward((True, False, False), grad, None, *saved)[0]
        return [None if found[0] is None else cast(found[0], grad.dtype), *found[1:]]

    def _without_input(self, like: Tensor, bias: Tensor | None) -> Tensor:
        """The outputs of a rank that reads nothing."""
        y = like.new_zeros(self.out_shape)
        return y if bias is None else y.add_(bias.view(-1, *[1] * (y.ndim - 2)))


def _sum_of_bias(grad: Tensor) -> Tensor:
    return grad.sum(dim=[0, *range(2, grad.ndim)])


@dataclass(frozen=True, slots=True)
class JoinedConvolution(Convolution):
    """Shard and halo in one tensor, and one call of the kernel.

    Attributes:
        fetch: what puts them together.
        part: both; None where there is nothing to compute.
        overlaps: whether the sum of the parameters' gradients travels while the input's is computed. Otherwise one call
            of the kernel computes all, which is faster.
    """

    out_spec: ShardTensorSpec
    out_shape: tuple[int, ...]
    fetch: Fetch
    part: Part | None
    overlaps: bool
    saves: tuple[int, ...]

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        kept = self.fetched(x)
        read = kept[0] if kept else x
        y = self._without_input(x, bias) if self.part is None else self.part.convolve(read, weight, bias)
        return y, kept

    def fetched(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.fetch.forward(x),) if self.fetch else ()

    @property
    def exchanges(self) -> bool:
        return bool(self.fetch)

    def backward(
        self, needed: Sequence[bool], grad: Tensor, start_sum: StartSum | None, *saved: Tensor | None
    ) -> Sequence[Tensor | None]:
        read, weight = saved if 0 in self.saves else saved[::-1]
        assert read is not None and weight is not None
        apart = self.overlaps and needed[0] and start_sum is not None
        grads = self._gradients((needed[0] and not apart, needed[1], needed[2]), grad, read, weight)
        returning = self.fetch.start_backward(grads[0]) if self.fetch and grads[0] is not None else None
        finish = None if start_sum is None else start_sum(grads)
        if apart:
            grad_x = self._gradients((True, False, False), grad, read, weight)[0]
        else:
            grad_x = grads[0] if returning is None else returning()
        _, grad_w, grad_b = grads if finish is None else finish()
        return grad_x, grad_w, grad_b

    def _gradients(self, needed: Sequence[bool], grad: Tensor, read: Tensor, weight: Tensor) -> Sequence[Tensor | None]:
        if self.part is not None:
            return self.part.differentiate(grad, read, weight, needed)
        need_x, need_w, need_b = needed
        return (
            torch.zeros_like(read) if need_x else None,
            torch.zeros_like(weight) if need_w else None,
            _sum_of_bias(grad) if need_b else None,
        )


@dataclass(frozen=True, slots=True)
class Border:
    """The outputs that read one side of the halo.

    Attributes:
        edge: the part of the shard next to it that they read.
        part: both in one.
        dim, before: along which dim, and whether the halo comes before the shard.
    """

    edge: Outgoing
    part: Part
    dim: int
    before: bool

    def compute(self, y: Tensor, side: Tensor, x: Tensor, sides: Sides, weight: Tensor, bias: Tensor | None) -> None:
        """Overwrite these outputs in ``y``."""
        edge = self.edge.assemble(x, sides)
        read = torch.cat((side, edge) if self.before else (edge, side), self.dim)
        self.part.region(y).copy_(self.part.convolve(read, weight, bias))


@dataclass(frozen=True, slots=True)
class ConvolutionByParts(Convolution):
    """The shard while the halo travels, and then the borders. See [Note: convolution by parts].

    Attributes:
        halo: what is exchanged.
        shard: the shard among zeros.
        borders: per axis those before and after the shard; None where there is nothing to compute.
        sides: per axis the sides of the halo before and after the shard, among zeros; None likewise.
        edges: the parts of the shard that others read, by themselves, and their places in it.
    """

    out_spec: ShardTensorSpec
    out_shape: tuple[int, ...]
    halo: Halo
    shard: Part
    borders: tuple[tuple[Border | None, Border | None], ...]
    sides: tuple[tuple[Part | None, Part | None], ...]
    edges: tuple[tuple[Narrow, Part], ...]
    saves: tuple[int, ...] = (0, 1)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        halo, sides = self.halo, self.halo.nothing()
        pending = halo.start(0, x, sides)
        y = self.shard.convolve(x, weight, bias)
        for i, borders in enumerate(self.borders):
            halo.finish(i, pending, sides)
            if i + 1 < len(self.borders):
                pending = halo.start(i + 1, x, sides)
            for side, border in zip(sides[i], borders, strict=True):
                if side is not None and border is not None:
                    border.compute(y, side, x, sides, weight, bias)
        return y, _flat(sides)

    @property
    def exchanges(self) -> bool:
        return True

    def fetched(self, x: Tensor) -> tuple[Tensor | None, ...]:
        sides = self.halo.nothing()
        for i in range(len(self.sides)):
            self.halo.finish(i, self.halo.start(i, x, sides), sides)
        return _flat(sides)

    def backward(
        self, needed: Sequence[bool], grad: Tensor, start_sum: StartSum | None, *saved: Tensor | None
    ) -> Sequence[Tensor | None]:
        """First what travels: the halo's gradients, then the sum of the parameters'; meanwhile the shard's."""
        return self._backward(needed, grad, start_sum, saved)

    def differentiate(
        self, needed: Sequence[bool], grad: Tensor, start_sum: StartSum | None, sums: bool, *saved: Tensor | None
    ) -> Sequence[Tensor | None]:
        if not is_half(grad):
            return self._backward(needed, grad, start_sum, saved)
        wide_grad, *wide = widened(grad, *saved)
        grad_x, grad_w, grad_b = self._backward(needed, wide_grad, start_sum, wide, (grad, saved[0], saved[1]))
        return None if grad_x is None else grad_x.to(grad.dtype), grad_w, grad_b

    def _backward(
        self,
        needed: Sequence[bool],
        grad: Tensor,
        start_sum: StartSum | None,
        saved: Sequence[Tensor | None],
        narrow: tuple[Any, ...] | None = None,
    ) -> Sequence[Tensor | None]:
        """:meth:`backward`.

        Args:
            narrow: output's gradient, input and weight in half precision, if the others are in float32 instead of it.
        """
        x, weight, *kept = saved
        assert x is not None and weight is not None
        need_x, need_w, need_b = needed
        sides = [kept[i : i + 2] for i in range(0, len(kept), 2)]
        from_sides: list[tuple[Part, Tensor]] = []
        side_grads = self._backward_of_sides(grad, weight, sides, (need_x, need_w), from_sides)
        returning = self._start_returns(side_grads, x) if need_x else None
        grad_x = grad_w = grad_b = None
        together = need_x and start_sum is None and narrow is None  # faster, but nothing would travel meanwhile
        if need_w or need_b:
            grad_x, grad_w, grad_b = self.shard.differentiate(grad, x, weight, (together, need_w, need_b))
        for part, contribution in from_sides:
            assert grad_w is not None
            part.reached(grad_w).add_(contribution)
        finish = None if start_sum is None else start_sum([None, grad_w, grad_b])
        if returning is not None:
            if grad_x is None:
                grad_x = self._gradient_of_shard((grad, x, weight), narrow)
            self._add_returned(grad_x, returning, side_grads)
        if finish is not None:
            _, grad_w, grad_b = finish()
        return grad_x, grad_w, grad_b

    def _gradient_of_shard(self, given: tuple[Tensor, Tensor, Tensor], narrow: tuple[Any, ...] | None) -> Tensor:
        """The shard's gradient without what others return, in the dtype of ``given``: output's gradient, input, weight.

        The kernel takes several times as long in float32. So that is left to the edges, to which others add.
        """
        only_x = True, False, False
        grad, x, weight = given if narrow is None else narrow
        found = self.shard.differentiate(grad, x, weight, only_x)[0]
        assert found is not None
        if narrow is None:
            return found
        grad, x, weight = given
        total = found.to(grad.dtype)
        for place, part in self.edges:
            edge = part.differentiate(part.region(grad), x.narrow(*place), weight, only_x)[0]
            assert edge is not None
            total.narrow(*place).copy_(edge)
        return total

    def _start_returns(self, side_grads: Sides, x: Tensor) -> _Returning:
        """Send the halo's gradients to their owners, one axis after the other: see [Note: corners] in halo.py."""
        returned: list[list[Tensor]] = [[] for _ in self.sides]
        pending = None
        for i in reversed(range(len(self.sides))):
            pending = self.halo.start_return(i, side_grads, x)
            if i > 0:
                returned[i] = self.halo.finish_return(i, pending, side_grads)
        return pending, returned

    def _add_returned(self, grad_x: Tensor, returning: _Returning, side_grads: Sides) -> None:
        """Add what :meth:`_start_returns` has under way to the gradient of the shard."""
        pending, returned = returning
        returned[0] = self.halo.finish_return(0, pending, side_grads)
        for i in reversed(range(len(self.sides))):
            self.halo.add_to_shard(i, grad_x, returned[i])

    def _backward_of_sides(
        self, grad: Tensor, weight: Tensor, sides: Sides, needed: tuple[bool, bool], weights: list[tuple[Part, Tensor]]
    ) -> Sides:
        """The gradients of the halo; the contributions to the weight's are added to ``weights``."""
        result = self.halo.nothing()
        need_x, need_w = needed
        for i, parts in enumerate(self.sides if need_x or need_w else ()):
            for k, (side, part) in enumerate(zip(sides[i], parts, strict=True)):
                if side is None:
                    continue
                if part is None:
                    result[i][k] = torch.zeros_like(side) if need_x else None
                    continue
                region = part.region(grad)
                result[i][k], grad_w, _ = part.differentiate(region, side, weight, (need_x, need_w, False))
                if grad_w is not None:
                    weights.append((part, grad_w))
        return result


def _flat(sides: Sides) -> tuple[Tensor | None, ...]:
    return tuple(side for pair in sides for side in pair)


@cached(maxsize=1024)
def plan_convolution(
    spec: ShardTensorSpec,
    weight: tuple[int, ...],
    stride: tuple[int, ...],
    pads: Pads,
    dilation: tuple[int, ...],
    groups: int,
) -> Convolution:
    """Everything about a convolution that follows from specs and arguments; errors here are raised on all ranks."""
    name = f"conv{len(stride)}d"
    shape = spec.shape
    check_arguments(name, tuple(shape), weight, stride, pads, dilation, groups)
    windows = [
        Window(shape[2 + i], weight[2 + i], stride[i], dilation[i], before, after)
        for i, (before, after) in enumerate(pads)
    ]
    sharded = spec.sharded_dims()
    if 1 in sharded:
        raise refuse(
            name, spec, "the channels are sharded", "redistribute to shard a spatial dim or the batch, e.g. Shard(2)"
        )
    sizes = list(spec.sizes)
    axes: list[Axis] = []
    reads: dict[int, Interval] = {}
    outs: dict[int, Interval] = {}
    for dim, m in sharded.items():
        if dim == 0:
            continue
        window, cut = windows[dim - 2], spec.cut(m)
        out_cut = map_boundaries(cut, window.boundary)
        sizes[m] = out_cut
        out = intervals_of(out_cut)
        read = [window.reads(o) for o in out]
        need = [intersect(r, (0, shape[dim])) for r in read]
        rank = spec.coordinate[m]
        plan = plan_intervals(intervals_of(cut), tuple((a, b) if b > a else (0, 0) for a, b in need), rank)
        axes.append(Axis(dim, m, plan))
        reads[dim], outs[dim] = read[rank], out[rank]
    out_global = (shape[0], weight[0], *(w.outputs for w in windows))
    out_spec = ShardTensorSpec.of(
        spec.mesh,
        spec.placements,
        type(spec.tensor_meta)(torch.Size(out_global), stride_of(spec, out_global), spec.tensor_meta.dtype),
        tuple(sizes),
    )
    out_shape = out_spec.local_shape()
    common = Common(weight, stride, dilation, groups)
    return _on_this_rank(spec, out_spec, Geometry(common, spec.local_shape(), out_shape, windows, axes, reads, outs))


def _on_this_rank(spec: ShardTensorSpec, out_spec: ShardTensorSpec, geometry: Geometry) -> Convolution:
    """By parts where that pays, and outputs read no more than one side of the halo."""
    axes, shape = geometry.axes, geometry.shape
    large = math.prod(shape) >= WORTH_OVERLAPPING
    shard = geometry.shard()
    if not large or not any(axis.transfers.active for axis in axes) or shard is None or not geometry.divides():
        part, zeros = geometry.joined()
        fetch = Fetch(axes, spec.mesh, shape, zeros)
        saves = (1,) if fetch else (0, 1)
        # The gradient of a halo is sent before the parameters', see ConvolutionByParts.
        return JoinedConvolution(out_spec, geometry.out_shape, fetch, part, large and not fetch, saves)
    halo = Halo(axes, spec.mesh, shape)

    def border(i: int, k: int) -> Border | None:
        found = geometry.border(i, k)
        return None if found is None else Border(halo.outgoing(i, found[0]), found[1], axes[i].dim, k == 0)

    borders = tuple((border(i, 0), border(i, 1)) for i in range(len(axes)))
    sides = tuple((geometry.side(i, 0), geometry.side(i, 1)) for i in range(len(axes)))
    edges = (geometry.edge(i, part) for i, axis in enumerate(axes) for _, part in axis.transfers.sends)
    read = tuple(edge for edge in edges if edge is not None)
    return ConvolutionByParts(out_spec, geometry.out_shape, halo, shard, borders, sides, read)


def stride_of(spec: ShardTensorSpec, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of an output of ``shape``: channels-last where the input is."""
    meta = spec.tensor_meta
    return stride_like(torch.empty_strided(meta.shape, meta.stride, device="meta"), shape)
