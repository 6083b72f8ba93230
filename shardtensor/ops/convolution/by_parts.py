"""Convolution on one rank by parts: the shard by itself, while its halo travels, and the outputs at its borders.

[Note: convolution by parts] What a rank's outputs read is tiled by its own shard and its halo (see "corners" in
halo.py). The shard is convolved among zeros, while the halo travels; then the outputs that read a side of the halo are
computed anew, from that side and the edge of the shard next to it. The backward pass saves the shard and the halo
only. As convolution is linear, the gradients are sums over these parts, each among zeros: those of the halo are
computed and sent first, and travel during the shard's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...exchange import Pending
from ...halo import Halo, Narrow, Outgoing, Sides
from ...spec import ShardTensorSpec
from ..common.half import is_half, widened
from .joined import Convolution, JoinedConvolution, StartSum
from .parts import Part

__all__ = ["Border", "ConvolutionByParts"]

# Gradients of the halo on their way to its owners: of the first axis, and what has arrived from the others.
_Returning = tuple[Pending | None, list[list[Tensor]]]


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
        joined: the same with shard and halo in one, for second derivatives.
        edges: the parts of the shard that others read, by themselves, and their places in it.
    """

    out_spec: ShardTensorSpec
    out_shape: tuple[int, ...]
    halo: Halo
    shard: Part
    borders: tuple[tuple[Border | None, Border | None], ...]
    sides: tuple[tuple[Part | None, Part | None], ...]
    joined: Callable[[], JoinedConvolution]
    edges: tuple[tuple[Narrow, Part], ...]
    saves: tuple[int, ...] = (0, 1)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        halo, sides = self.halo, self.halo.nothing()
        pending = halo.start(0, x, sides)
        y = self.shard.convolve(x, _meanwhile(pending, weight), bias)
        for i, borders in enumerate(self.borders):
            halo.finish(i, pending, sides, after=y)
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

    def again(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.joined().again(x, weight, bias)

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
        if returning is not None:
            weight = _meanwhile(returning[0], weight)
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
        returned[0] = self.halo.finish_return(0, pending, side_grads, after=grad_x)
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


def _meanwhile(pending: Pending | None, weight: Tensor) -> Tensor:
    return weight if pending is None else pending.meanwhile(weight)


def _flat(sides: Sides) -> tuple[Tensor | None, ...]:
    return tuple(side for pair in sides for side in pair)
