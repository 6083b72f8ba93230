"""Halos: intervals that overlap between ranks, borrowed from their owners, and gradients returned to them.

Two levels, one plan (``exchange.plan_intervals``):

- :func:`borrow` gives a rank the interval that it needs as one tensor, differentiably. Simple, but it copies the
  shard; for operators where that does not matter.
- :class:`Strips` keeps what was received apart from the shard, for operators that work on the shard while the strips
  travel and add the strips' part afterwards (convolution).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .exchange import Pending, Plan, plan_intervals, start_swap
from .geometry import Interval, intersect, length
from .redistribute import move_intervals

__all__ = ["Axis", "Strips", "borrow"]


def borrow(
    local: Tensor, dim: int, own: Sequence[Interval], need: Sequence[Interval], rank: int, group: dist.ProcessGroup
) -> Tensor:
    """The interval ``need[rank]`` of tensor dim ``dim``; rank ``s`` of ``group`` holds ``own[s]``. Differentiable.

    Args:
        local: this rank's shard; its dim ``dim`` has the length of ``own[rank]``.
        own: per rank; together they cover the dim without overlap.
        need: per rank, within ``0..n``; they may overlap, leave gaps and be empty.

    Returns:
        A plain tensor whose dim ``dim`` has the length of ``need[rank]``. Its gradient is added up at the owners.
    """
    own, need = tuple(own), tuple((a, b) if b > a else (0, 0) for a, b in need)
    plan = plan_intervals(own, need, rank)
    if plan.own == plan.need and not plan.active:
        return local
    return _Borrow.apply(local, dim, own, need, rank, group)


class _Borrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, own: Any, need: Any, rank: int, group: Any) -> Any:  # type: ignore[override]
        ctx.args = dim, own, need, rank, group
        return move_intervals(local, dim, own, need, rank, group)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return _Return.apply(grad, *ctx.args), None, None, None, None, None


class _Return(torch.autograd.Function):
    """The adjoint of borrowing: each rank's gradient over what it needed, summed at the owners."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, dim: int, own: Any, need: Any, rank: int, group: Any) -> Any:  # type: ignore[override]
        ctx.args = dim, own, need, rank, group
        plan = plan_intervals(own, need, rank)
        shape = list(grad.shape)
        shape[dim] = length(plan.own)
        pending = None
        if plan.active:
            send = [[grad.narrow(dim, a - plan.need[0], b - a)] if b > a else [] for a, b in plan.recvs]
            shapes = [[[*shape[:dim], b - a, *shape[dim + 1 :]]] if b > a else [] for a, b in plan.sends]
            pending = start_swap(send, shapes, group, dtype=grad.dtype, device=grad.device)
        a, b = max(plan.own[0], plan.need[0]), min(plan.own[1], plan.need[1])
        if (a, b) == plan.own:
            total = grad.narrow(dim, a - plan.need[0], b - a).clone(memory_format=torch.contiguous_format)
        else:
            total = grad.new_zeros(shape)
            if b > a:
                total.narrow(dim, a - plan.own[0], b - a).copy_(grad.narrow(dim, a - plan.need[0], b - a))
        for (a, b), row in zip(plan.sends, pending.wait() if pending else ()):
            if b > a:
                total.narrow(dim, a - plan.own[0], b - a).add_(row[0])
        return total

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return borrow(grad, *ctx.args), None, None, None, None, None


@dataclass(frozen=True, slots=True)
class Axis:
    """One sharded tensor dim of an operator that reads beyond its shard, as one rank sees it.

    Attributes:
        dim, mesh_dim: the tensor dim, and the mesh dim that shards it.
        plan: who sends what; ``plan.own`` is the shard, ``plan.need`` what this rank reads of the tensor.
    """

    dim: int
    mesh_dim: int
    plan: Plan

    @property
    def main(self) -> Interval:
        """The part of its own shard that this rank reads."""
        a, b = intersect(self.plan.own, self.plan.need)
        return (a, b) if b > a else (self.plan.own[0], self.plan.own[0])

    @property
    def sides(self) -> tuple[Interval, Interval]:
        """The intervals that it borrows before and after its shard, in global indices."""
        (a, b), (lo, hi) = self.plan.own, self.plan.need
        return (lo, max(lo, min(hi, a))), (max(lo, b), max(hi, lo, b))


class Strips:
    """Halos of one tensor along several dims, kept apart from it.

    [Note: corners] The dims are exchanged one after the other, and the pieces of a later dim include what was borrowed
    along the earlier ones; so corners arrive without messages of their own. The strips of axis ``i`` therefore span
    what is needed along the axes before it and the shard along the axes after it. Together with the shard they tile
    what this rank reads.

    ::

        # one axis           # two axes (axis 0 downwards, axis 1 sideways)
          before_0             before_1 | before_0 | after_1
          shard                before_1 |  shard   | after_1
          after_0              before_1 | after_0  | after_1
    """

    def __init__(self, axes: Sequence[Axis], mesh: DeviceMesh) -> None:
        self.axes, self.mesh = tuple(axes), mesh
        self.sides: list[list[Tensor | None]] = [[None, None] for _ in axes]

    def start(self, i: int, x: Tensor) -> Pending | None:
        """Send what others need along axis ``i``; the axes before it must be complete."""
        axis = self.axes[i]
        if not axis.plan.active:
            return None
        send = [[self._assemble(i, x, part)] if length(part) else [] for part in axis.plan.sends]
        shapes = [[self._shape(i, x.shape, part)] if length(part) else [] for part in axis.plan.recvs]
        return start_swap(send, shapes, self.mesh.get_group(axis.mesh_dim), dtype=x.dtype, device=x.device)

    def finish(self, i: int, pending: Pending | None) -> None:
        """Wait for the strips of axis ``i``."""
        if pending is None:
            return
        axis = self.axes[i]
        received = pending.wait()
        for k, side in enumerate(axis.sides):
            pieces = [
                (part[0], row[0])
                for part, row in zip(axis.plan.recvs, received, strict=True)
                if length(intersect(part, side))
            ]
            if pieces:
                ordered = [piece for _, piece in sorted(pieces, key=lambda item: item[0])]
                self.sides[i][k] = ordered[0] if len(ordered) == 1 else torch.cat(ordered, dim=axis.dim)

    def start_return(self, i: int, grads: Sequence[Sequence[Tensor | None]], x: Tensor) -> Pending | None:
        """Send the gradients of axis ``i``'s strips to their owners; the axes after it must be done.

        Args:
            grads: ``[axis][side]``, shaped like :attr:`sides`.
            x: the shard (for its shape, dtype and device).
        """
        axis = self.axes[i]
        if not axis.plan.active:
            return None
        send: list[list[Tensor]] = []
        for part in axis.plan.recvs:
            row = []
            for side, grad in zip(axis.sides, grads[i], strict=True):
                if grad is not None and length(intersect(part, side)):
                    row.append(grad.narrow(axis.dim, part[0] - side[0], length(part)))
            send.append(row)
        shapes = [[self._shape(i, x.shape, part)] if length(part) else [] for part in axis.plan.sends]
        return start_swap(send, shapes, self.mesh.get_group(axis.mesh_dim), dtype=x.dtype, device=x.device)

    def finish_return(
        self, i: int, pending: Pending | None, grads: Sequence[Sequence[Tensor | None]]
    ) -> list[tuple[Interval, Tensor]]:
        """Wait for the gradients that the others return along axis ``i``.

        What belongs to strips of earlier axes is added to ``grads``; what belongs to the shard is returned as
        ``(global interval along axis i, gradient)``. It spans :attr:`Axis.main` along the earlier axes.
        """
        if pending is None:
            return []
        axis = self.axes[i]
        mine = []
        for part, row in zip(axis.plan.sends, pending.wait(), strict=True):
            if not row:
                continue
            piece = row[0]
            for j in reversed(range(i)):
                earlier = self.axes[j]
                lengths = [length(earlier.sides[0]), length(earlier.main), length(earlier.sides[1])]
                before, piece, after = piece.split(lengths, dim=earlier.dim)
                for k, extra in ((0, before), (1, after)):
                    strip = grads[j][k]
                    if strip is not None:
                        self._window(strip, i, j, part).add_(extra)
            mine.append((part, piece))
        return mine

    def add_to_shard(self, i: int, total: Tensor, mine: Sequence[tuple[Interval, Tensor]]) -> None:
        """Add what :meth:`finish_return` returned to the shard's gradient ``total``, in place."""
        axis = self.axes[i]
        for part, piece in mine:
            target = total.narrow(axis.dim, part[0] - axis.plan.own[0], length(part))
            for earlier in self.axes[:i]:
                target = _narrow_to(target, earlier.dim, earlier.plan.own, earlier.main)
            target.add_(piece)

    def _shape(self, i: int, shape: Sequence[int], part: Interval) -> list[int]:
        """Shape of a piece along axis ``i``: what is needed along earlier axes, the shard along later ones."""
        result = list(shape)
        result[self.axes[i].dim] = length(part)
        for earlier in self.axes[:i]:
            result[earlier.dim] = length(earlier.plan.need)
        return result

    def _assemble(self, i: int, x: Tensor, part: Interval) -> Tensor:
        """The piece ``part`` of axis ``i`` out of the shard and the strips of earlier axes."""
        piece = _narrow_to(x, self.axes[i].dim, self.axes[i].plan.own, part)
        for earlier in self.axes[:i]:
            piece = _narrow_to(piece, earlier.dim, earlier.plan.own, earlier.main)
        for j in range(i):
            before, after = (None if s is None else self._window(s, i, j, part) for s in self.sides[j])
            parts = [t for t in (before, piece, after) if t is not None]
            piece = parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.axes[j].dim)
        return piece

    def _window(self, strip: Tensor, i: int, j: int, part: Interval) -> Tensor:
        """Of a strip of axis ``j``: ``part`` along axis ``i``, and what is read along the axes between."""
        view = _narrow_to(strip, self.axes[i].dim, self.axes[i].plan.own, part)
        for between in self.axes[j + 1 : i]:
            view = _narrow_to(view, between.dim, between.plan.own, between.main)
        return view


def _narrow_to(t: Tensor, dim: int, held: Interval, part: Interval) -> Tensor:
    return t.narrow(dim, part[0] - held[0], length(part))
