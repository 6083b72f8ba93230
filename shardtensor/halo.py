"""Halos: intervals that overlap between ranks, borrowed from their owners, and gradients returned to them.

Two levels, one plan (``exchange.plan_intervals``):

- :func:`borrow` gives a rank the interval that it needs as one tensor, differentiably. Simple, but it copies the
  shard; for operators where that does not matter.
- :class:`Halo` keeps what was received apart from the shard, for operators that work on the shard while the halo
  travels and add the halo's part afterwards (convolution).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ._compat import AutogradFunction
from .exchange import Exchange, Pending, Transfers, plan_intervals
from .geometry import Interval, intersect, length
from .redistribute import move_intervals

__all__ = ["Axis", "Halo", "Sides", "borrow"]


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


class _Borrow(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, own: Any, need: Any, rank: int, group: Any) -> Any:  # type: ignore[override]
        ctx.args = dim, own, need, rank, group
        return move_intervals(local, dim, own, need, rank, group)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return _Return.apply(grad, *ctx.args), None, None, None, None, None


class _Return(AutogradFunction):
    """The adjoint of borrowing: each rank's gradient over what it needed, summed at the owners."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, dim: int, own: Any, need: Any, rank: int, group: Any) -> Any:  # type: ignore[override]
        ctx.args = dim, own, need, rank, group
        plan = plan_intervals(own, need, rank)
        shape = list(grad.shape)
        shape[dim] = length(plan.own)
        pending = None
        if plan.active:
            sends = [(peer, _resized(shape, dim, length(part))) for peer, part in plan.recvs]
            recvs = [(peer, _resized(shape, dim, length(part))) for peer, part in plan.sends]
            pieces = [grad.narrow(dim, a - plan.need[0], b - a) for _, (a, b) in plan.recvs]
            pending = Exchange(sends, recvs, group).start(pieces, grad)
        a, b = max(plan.own[0], plan.need[0]), min(plan.own[1], plan.need[1])
        if (a, b) == plan.own:
            total = grad.narrow(dim, a - plan.need[0], b - a).clone(memory_format=torch.contiguous_format)
        else:
            total = grad.new_zeros(shape)
            if b > a:
                total.narrow(dim, a - plan.own[0], b - a).copy_(grad.narrow(dim, a - plan.need[0], b - a))
        for (_, (a, b)), piece in zip(plan.sends, pending.wait() if pending else ()):
            total.narrow(dim, a - plan.own[0], b - a).add_(piece)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return borrow(grad, *ctx.args), None, None, None, None, None


@dataclass(frozen=True, slots=True)
class Axis:
    """One sharded tensor dim of an operator that reads beyond its shard, as one rank sees it.

    Attributes:
        dim, mesh_dim: the tensor dim, and the mesh dim that shards it.
        transfers: who sends what; ``transfers.own`` is the shard, ``transfers.need`` what this rank reads.
    """

    dim: int
    mesh_dim: int
    transfers: Transfers

    @property
    def main(self) -> Interval:
        """The part of its own shard that this rank reads."""
        a, b = intersect(self.transfers.own, self.transfers.need)
        return (a, b) if b > a else (self.transfers.own[0], self.transfers.own[0])

    @property
    def sides(self) -> tuple[Interval, Interval]:
        """The intervals of its halo before and after its shard, in global indices."""
        (a, b), (lo, hi) = self.transfers.own, self.transfers.need
        return (lo, max(lo, min(hi, a))), (max(lo, b), max(hi, lo, b))


Narrow = tuple[int, int, int]  # (dim, start, length)
Sides = list[list[Tensor | None]]  # [axis][0 before the shard, 1 after it]


def _narrowed(t: Tensor, places: Sequence[Narrow]) -> Tensor:
    for dim, start, n in places:
        t = t.narrow(dim, start, n)
    return t


@dataclass(frozen=True, slots=True)
class _Outgoing:
    """How a piece for a peer is put together: a part of the shard, between parts of the halo along earlier axes.

    Attributes:
        shard: the shard's part.
        layers: per earlier axis, its dim and the part of each of its two sides.
    """

    shard: tuple[Narrow, ...]
    layers: tuple[tuple[int, tuple[tuple[Narrow, ...], ...]], ...]

    def assemble(self, x: Tensor, sides: Sides) -> Tensor:
        """The piece, out of the shard ``x`` and the halo received so far."""
        piece = _narrowed(x, self.shard)
        for (dim, places), (before, after) in zip(self.layers, sides):
            parts = [piece]
            if before is not None:
                parts.insert(0, _narrowed(before, places[0]))
            if after is not None:
                parts.append(_narrowed(after, places[1]))
            piece = piece if len(parts) == 1 else torch.cat(parts, dim=dim)
        return piece

    def add_returned(self, piece: Tensor, grads: Sides, lengths: Sequence[tuple[int, int, int]]) -> Tensor:
        """The adjoint for the halo: add its part of a returned gradient to ``grads``; what is left is the shard's."""
        for (dim, places), strips, parts in reversed(list(zip(self.layers, grads, lengths))):
            before, piece, after = piece.split(parts, dim=dim)
            for strip, place, extra in zip(strips, places, (before, after)):
                if strip is not None:
                    _narrowed(strip, place).add_(extra)
        return piece


@dataclass(frozen=True, slots=True)
class _Exchanged:
    """The two exchanges of one axis, and where their pieces come from and go to.

    Attributes:
        out, back: the exchange of the halo, and that of its gradient.
        outgoing: how each piece of ``out`` is put together; the gradients of ``back`` arrive in the same order.
        sources: for each side, the received pieces that make it up, in the order of their indices.
        returns: for each piece of ``back``: the side and the part of it.
        targets: for each piece that arrives by ``back``: where in the shard it belongs.
        lengths: ``(before, main, after)`` of each earlier axis.
    """

    out: Exchange
    back: Exchange
    outgoing: tuple[_Outgoing, ...]
    sources: tuple[tuple[int, ...], tuple[int, ...]]
    returns: tuple[tuple[int, Narrow], ...]
    targets: tuple[tuple[Narrow, ...], ...]
    lengths: tuple[tuple[int, int, int], ...]


class Halo:
    """The halo of one tensor along several dims, kept apart from the shard: all that is known before there is data.

    [Note: corners] The dims are exchanged one after the other, and the pieces of a later dim include the halo along the
    earlier ones; so corners arrive without messages of their own. The halo of axis ``i`` therefore spans what is needed
    along the axes before it and the shard along the axes after it. Together with the shard its sides tile what this
    rank reads.

    ::

        # one axis           # two axes (axis 0 downwards, axis 1 sideways)
          before_0             before_1 | before_0 | after_1
          shard                before_1 |  shard   | after_1
          after_0              before_1 | after_0  | after_1

    Args:
        axes: the sharded dims, in the order in which they are exchanged.
        shape: of the shard.
    """

    def __init__(self, axes: Sequence[Axis], mesh: DeviceMesh, shape: Sequence[int]) -> None:
        self.axes, self._shape = tuple(axes), tuple(shape)
        self._exchanged = [
            self._plan(i, mesh.get_group(axis.mesh_dim)) if axis.transfers.active else None
            for i, axis in enumerate(self.axes)
        ]

    def nothing(self) -> Sides:
        """No halo yet: what :meth:`start` and :meth:`finish` fill."""
        return [[None, None] for _ in self.axes]

    def start(self, i: int, x: Tensor, sides: Sides) -> Pending | None:
        """Send what others need along axis ``i``; the axes before it must be complete."""
        planned = self._exchanged[i]
        if planned is None:
            return None
        return planned.out.start([piece.assemble(x, sides) for piece in planned.outgoing], x)

    def finish(self, i: int, pending: Pending | None, sides: Sides) -> None:
        """Wait for the halo of axis ``i``, and put it into ``sides``."""
        planned = self._exchanged[i]
        if pending is None or planned is None:
            return
        received = pending.wait()
        for k, indices in enumerate(planned.sources):
            if len(indices) == 1:
                sides[i][k] = received[indices[0]]
            elif indices:
                sides[i][k] = torch.cat([received[at] for at in indices], dim=self.axes[i].dim)

    def start_return(self, i: int, grads: Sides, like: Tensor) -> Pending | None:
        """Send the gradients of axis ``i``'s sides to their owners; the axes after it must be done."""
        planned = self._exchanged[i]
        if planned is None:
            return None
        pieces = []
        for k, place in planned.returns:
            grad = grads[i][k]
            assert grad is not None
            pieces.append(grad.narrow(*place))
        return planned.back.start(pieces, like)

    def finish_return(self, i: int, pending: Pending | None, grads: Sides) -> list[Tensor]:
        """Wait for the gradients that the others return along axis ``i``.

        What belongs to sides of earlier axes is added to ``grads``; what belongs to the shard is returned, for
        :meth:`add_to_shard`.
        """
        planned = self._exchanged[i]
        if pending is None or planned is None:
            return []
        return [
            piece.add_returned(grad, grads, planned.lengths)
            for piece, grad in zip(planned.outgoing, pending.wait(), strict=True)
        ]

    def add_to_shard(self, i: int, total: Tensor, returned: Sequence[Tensor]) -> None:
        """Add what :meth:`finish_return` returned to the shard's gradient ``total``, in place."""
        planned = self._exchanged[i]
        if planned is not None:
            for place, piece in zip(planned.targets, returned, strict=True):
                _narrowed(total, place).add_(piece)

    # -- made once ----------------------------------------------------------------------------------------------------

    def _plan(self, i: int, group: dist.ProcessGroup) -> _Exchanged:
        axis, earlier = self.axes[i], self.axes[:i]
        transfers, own = axis.transfers, axis.transfers.own
        sent = [(peer, self._piece_shape(i, part)) for peer, part in transfers.sends]
        got = [(peer, self._piece_shape(i, part)) for peer, part in transfers.recvs]
        overlapping = [
            [(part[0], at) for at, (_, part) in enumerate(transfers.recvs) if length(intersect(part, side))]
            for side in axis.sides
        ]
        returns = []
        for _, part in transfers.recvs:
            k = next(k for k, side in enumerate(axis.sides) if length(intersect(part, side)))
            returns.append((k, (axis.dim, part[0] - axis.sides[k][0], length(part))))
        main = [_place(before.dim, before.transfers.own, before.main) for before in earlier]
        return _Exchanged(
            out=Exchange(sent, got, group),
            back=Exchange(got, sent, group),
            outgoing=tuple(self._outgoing(i, part) for _, part in transfers.sends),
            sources=tuple(tuple(at for _, at in sorted(found)) for found in overlapping),  # type: ignore[arg-type]
            returns=tuple(returns),
            targets=tuple((_place(axis.dim, own, part), *main) for _, part in transfers.sends),
            lengths=tuple((length(a.sides[0]), length(a.main), length(a.sides[1])) for a in earlier),
        )

    def _outgoing(self, i: int, part: Interval) -> _Outgoing:
        here = _place(self.axes[i].dim, self.axes[i].transfers.own, part)
        earlier = self.axes[:i]
        layers = []
        for j, axis in enumerate(earlier):
            # Of a side of axis j: the part along axis i, and what is read along the axes between them.
            between = [_place(a.dim, a.transfers.own, a.main) for a in earlier[j + 1 :]]
            layers.append((axis.dim, ((here, *between),) * 2))
        return _Outgoing((here, *(_place(a.dim, a.transfers.own, a.main) for a in earlier)), tuple(layers))

    def _piece_shape(self, i: int, part: Interval) -> list[int]:
        """Shape of a piece along axis ``i``: what is needed along earlier axes, the shard along later ones."""
        result = list(self._shape)
        result[self.axes[i].dim] = length(part)
        for earlier in self.axes[:i]:
            result[earlier.dim] = length(earlier.transfers.need)
        return result


def _place(dim: int, held: Interval, part: Interval) -> Narrow:
    return dim, part[0] - held[0], length(part)


def _resized(shape: Sequence[int], dim: int, size: int) -> list[int]:
    return [size if d == dim else n for d, n in enumerate(shape)]
