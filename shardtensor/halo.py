"""Halos: intervals that overlap between ranks, fetched from their owners, and gradients returned to them.

Two levels, one plan (``exchange.plan_intervals``):

- :class:`Fetch` gives a rank the intervals that it needs as one tensor, differentiably. Simple, but it copies the
  shard; for operators where that does not matter.
- :class:`Halo` keeps what was received apart from the shard, for operators that work on the shard while the halo
  travels and add the halo's part afterwards (convolution).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ._compat import AutogradFunction
from ._compat.c10d import group_along
from .exchange import Exchange, Pending, Transfers, plan_intervals
from .geometry import Interval, intersect, intervals_of, length
from .spec import ShardTensorSpec
from .strides import CHANNELS_LAST, cat_like, stride_like, with_stride, zeros_like

__all__ = ["Axis", "Fetch", "Halo", "Outgoing", "Sides"]

Narrow = tuple[int, int, int]  # (dim, start, length)


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


class Fetch:
    """The intervals that this rank needs of sharded dims, as one tensor: all that is known before there is data.

    Called, it is differentiable, any number of times: the gradient is added up at the owners. Dims are fetched one
    after the other, a later one with what was fetched along the earlier ones; so corners need no messages of their own.

    Args:
        axes: the sharded dims, in the order in which they are fetched.
        shape: of the shard.
        zeros: how many to put before and after what is needed along the last axis.

    Attributes:
        axes, shape: the axes as given, and the shape of the result.
    """

    __slots__ = ("_steps", "axes", "shape")

    def __init__(self, axes: Sequence[Axis], mesh: DeviceMesh, shape: Sequence[int], zeros: Interval = (0, 0)) -> None:
        self.axes = axes
        steps: list[_FetchedDim] = []
        for axis in axes:
            transfers, around = axis.transfers, zeros if axis is axes[-1] else (0, 0)
            if transfers.active or transfers.own != transfers.need or any(around):
                steps.append(_FetchedDim(shape, axis.dim, transfers, around, group_along(mesh, axis.mesh_dim)))
            shape = _resized(shape, axis.dim, around[0] + length(transfers.need) + around[1])
        self._steps, self.shape = tuple(steps), tuple(shape)

    @classmethod
    def of(cls, spec: ShardTensorSpec, needs: Mapping[int, Sequence[Interval]]) -> Fetch:
        """What ranks need of a tensor's sharded dims: ``{tensor dim: interval per rank of its mesh dim}``.

        The intervals lie within the global tensor; they may overlap, leave gaps and be empty.
        """
        sharded = spec.sharded_dims()
        axes = []
        for dim, need in needs.items():
            m = sharded[dim]
            axes.append(Axis(dim, m, _transfers(intervals_of(spec.cut(m)), need, spec.coordinate[m])))
        return cls(axes, spec.mesh, spec.local_shape())

    def __bool__(self) -> bool:
        """Whether there is anything to do on this rank, or to take part in. Otherwise the result is the shard."""
        return bool(self._steps)

    def __call__(self, local: Tensor) -> Tensor:
        """What this rank needs, out of its shard and those of others."""
        for step in self._steps:
            local = step(local)
        return local

    def forward(self, local: Tensor) -> Tensor:
        """The same, not differentiable."""
        for step in self._steps:
            local = step.fetch(local)
        return local

    def backward(self, grad: Tensor) -> Tensor:
        """The adjoint, not differentiable: the shard's gradient, out of the ranks' gradients of what they needed."""
        return self.start_backward(grad)()

    def start_backward(self, grad: Tensor) -> Callable[[], Tensor]:
        """Start :meth:`backward`; the function that is returned waits for the last exchange, and gives the result."""
        if not self._steps:
            return lambda: grad
        for step in self._steps[:0:-1]:
            grad = step.give_back(grad)
        first = self._steps[0]
        return partial(first.finish, grad, first.start_back(grad))


class _FetchedDim:
    """One dim of a :class:`Fetch`."""

    def __init__(
        self, shape: Sequence[int], dim: int, transfers: Transfers, zeros: Interval, group: dist.ProcessGroup
    ) -> None:
        own, need = transfers.own, (transfers.need[0] - zeros[0], transfers.need[1] + zeros[1])
        self._dim = dim
        self._zeros = [_resized(shape, dim, n) if n else None for n in zeros]
        self._own_shape, self._shape = tuple(shape), _resized(shape, dim, length(need))
        # Where the pieces are: those that are sent, in the shard; those that are received, in what is needed.
        self._sent = [_place(dim, own, part) for _, part in transfers.sends]
        self._received = [_place(dim, need, part) for _, part in transfers.recvs]
        self._out = self._back = None
        if transfers.active:
            sends = [(peer, _resized(shape, dim, length(part))) for peer, part in transfers.sends]
            recvs = [(peer, _resized(shape, dim, length(part))) for peer, part in transfers.recvs]
            self._out, self._back = (
                Exchange(*ways, group, transfers.most_peers) for ways in ((sends, recvs), (recvs, sends))
            )
        kept = intersect(own, need)
        # What the shard itself has of it: where in the shard, and where in what is needed.
        self._kept = (_place(dim, own, kept), _place(dim, need, kept)) if length(kept) else None
        self._keeps_all = length(kept) > 0 and kept == own
        # The received pieces (by number) and the shard's own (None), by their indices in the global tensor.
        starts: list[tuple[int, int | None]] = [(part[0], i) for i, (_, part) in enumerate(transfers.recvs)]
        if self._kept is not None:
            starts.append((kept[0], None))
        self._order = [i for _, i in sorted(starts, key=lambda start: start[0])]

    def __call__(self, local: Tensor) -> Tensor:
        if torch.is_grad_enabled() and local.requires_grad:
            return _Fetched.apply(local, self)  # type: ignore[no-any-return]
        return self.fetch(local)

    def fetch(self, local: Tensor) -> Tensor:
        """What this rank needs, in the shard's memory format."""
        received: Sequence[Tensor] = ()
        if self._out is not None:
            received = self._out.start([_piece(local, place) for place in self._sent], local).wait()
        own = local if self._keeps_all or self._kept is None else local.narrow(*self._kept[0])
        pieces = [own if i is None else received[i] for i in self._order]
        before, after = self._zeros
        if before is not None:
            pieces.insert(0, local.new_zeros(*before))
        if after is not None:
            pieces.append(local.new_zeros(*after))
        if not pieces:
            return zeros_like(local, self._shape)  # nothing, in the shard's memory format
        return cat_like(pieces, self._dim, local, self._shape)

    def give_back(self, grad: Tensor) -> Tensor:
        """The shard's gradient: its own part, and what the others return of theirs, in the order of ranks."""
        return self.finish(grad, self.start_back(grad))

    def start_back(self, grad: Tensor) -> Pending | None:
        """Send the other ranks their parts of the gradient."""
        if self._back is None:
            return None
        return self._back.start([_piece(grad, place) for place in self._received], grad)

    def finish(self, grad: Tensor, pending: Pending | None) -> Tensor:
        """Wait for what the others return, and add it to the shard's own part of the gradient."""
        if self._kept is not None and self._keeps_all:
            total = _copied(grad, self._kept[1])
        else:
            total = zeros_like(grad, self._own_shape)
            if self._kept is not None:
                total.narrow(*self._kept[0]).copy_(grad.narrow(*self._kept[1]))
        for place, piece in zip(self._sent, pending.wait() if pending is not None else ()):
            total.narrow(*place).add_(piece)
        return total


class _Fetched(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, local: Tensor, step: _FetchedDim) -> Tensor:
        ctx.step, ctx.stride = step, stride_like(local, local.shape)
        return step.fetch(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():  # for second derivatives
            return _GivenBack.apply(grad, ctx.step), None
        # What was fetched may be a row or nothing, whose gradient says little of the shard's memory format.
        return with_stride(ctx.step.give_back(grad), ctx.stride), None


class _GivenBack(AutogradFunction):
    """The adjoint of fetching, whose own is fetching again."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, step: _FetchedDim) -> Tensor:
        ctx.step = step
        return step.give_back(grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        again = torch.is_grad_enabled()
        return _Fetched.apply(grad, ctx.step) if again else ctx.step.fetch(grad), None


def _transfers(own: Sequence[Interval], need: Sequence[Interval], rank: int) -> Transfers:
    return plan_intervals(tuple(own), tuple((a, b) if b > a else (0, 0) for a, b in need), rank)


Sides = list[list[Tensor | None]]  # [axis][0 before the shard, 1 after it]


def _narrowed(t: Tensor, places: Sequence[Narrow]) -> Tensor:
    for dim, start, n in places:
        t = t.narrow(dim, start, n)
    return t


@dataclass(frozen=True, slots=True)
class Outgoing:
    """How a piece, such as for a peer, is put together: a part of the shard, between parts of the halo on earlier axes.

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
            before, piece, after = piece.split_with_sizes(parts, dim=dim)
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
    outgoing: tuple[Outgoing, ...]
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
            self._plan(i, group_along(mesh, axis.mesh_dim)) if axis.transfers.active else None
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

    def finish(self, i: int, pending: Pending | None, sides: Sides, after: Tensor | None = None) -> None:
        """Wait for the halo of axis ``i``, and put it into ``sides``; for ``after`` see :meth:`Pending.wait`."""
        planned = self._exchanged[i]
        if pending is None or planned is None:
            return
        received = pending.wait(after)
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

    def finish_return(self, i: int, pending: Pending | None, grads: Sides, after: Tensor | None = None) -> list[Tensor]:
        """Wait for the gradients that the others return along axis ``i``; for ``after`` see :meth:`Pending.wait`.

        What belongs to sides of earlier axes is added to ``grads``; what belongs to the shard is returned, for
        :meth:`add_to_shard`.
        """
        planned = self._exchanged[i]
        if pending is None or planned is None:
            return []
        return [
            piece.add_returned(grad, grads, planned.lengths)
            for piece, grad in zip(planned.outgoing, pending.wait(after), strict=True)
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
            out=Exchange(sent, got, group, transfers.most_peers),
            back=Exchange(got, sent, group, transfers.most_peers),
            outgoing=tuple(self.outgoing(i, part) for _, part in transfers.sends),
            sources=tuple(tuple(at for _, at in sorted(found)) for found in overlapping),  # type: ignore[arg-type]
            returns=tuple(returns),
            targets=tuple((_place(axis.dim, own, part), *main) for _, part in transfers.sends),
            lengths=tuple((length(a.sides[0]), length(a.main), length(a.sides[1])) for a in earlier),
        )

    def outgoing(self, i: int, part: Interval) -> Outgoing:
        """How a part of the shard along axis ``i`` is put together with the halo along the axes before it."""
        here = _place(self.axes[i].dim, self.axes[i].transfers.own, part)
        earlier = self.axes[:i]
        layers = []
        for j, axis in enumerate(earlier):
            # Of a side of axis j: the part along axis i, and what is read along the axes between them.
            between = [_place(a.dim, a.transfers.own, a.main) for a in earlier[j + 1 :]]
            layers.append((axis.dim, ((here, *between),) * 2))
        return Outgoing((here, *(_place(a.dim, a.transfers.own, a.main) for a in earlier)), tuple(layers))

    def _piece_shape(self, i: int, part: Interval) -> list[int]:
        """Shape of a piece along axis ``i``: what is needed along earlier axes, the shard along later ones."""
        result = list(self._shape)
        result[self.axes[i].dim] = length(part)
        for earlier in self.axes[:i]:
            result[earlier.dim] = length(earlier.transfers.need)
        return result


def _copied(t: Tensor, place: Narrow) -> Tensor:
    """A part of a tensor in memory of its own: row-major, or channels-last where the tensor is."""
    if t.is_contiguous():
        return torch.narrow_copy(t, *place)
    last = CHANNELS_LAST.get(t.ndim)
    fmt = last if last is not None and t.is_contiguous(memory_format=last) else torch.contiguous_format
    return t.narrow(*place).clone(memory_format=fmt)


def _piece(t: Tensor, place: Narrow) -> Tensor:
    """A part of a tensor, to be sent: packed already where that is one call."""
    return torch.narrow_copy(t, *place) if t.is_contiguous() else t.narrow(*place)


def _place(dim: int, held: Interval, part: Interval) -> Narrow:
    return dim, part[0] - held[0], length(part)


def _resized(shape: Sequence[int], dim: int, size: int) -> list[int]:
    return [size if d == dim else n for d, n in enumerate(shape)]
