"""Halos: intervals that overlap between ranks, fetched from their owners, and gradients returned to them.

A rank receives what it needs of other ranks' shards, and puts it next to its own. Whoever needs the result again, for a
gradient, keeps what was received, a few rows, and puts them together once more: :meth:`Fetch.read`, :meth:`Fetch.join`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._compat import AutogradFunction
from .._compat.c10d import group_along
from ..layout.intervals import Interval, intersect, intervals_of, length, resized
from ..layout.spec import ShardTensorSpec
from ..layout.strides import CHANNELS_LAST, cat_like, stride_like, with_stride, zeros_like
from .exchange import Exchange, Pending, Transfers, plan_intervals
from .zeros import zeros_of

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
            shape = resized(shape, axis.dim, around[0] + length(transfers.need) + around[1])
        self._steps, self.shape = tuple(steps), tuple(shape)

    @classmethod
    def of(cls, spec: ShardTensorSpec, needs: Mapping[int, Sequence[Interval]], zeros: Interval = (0, 0)) -> Fetch:
        """What ranks need of a tensor's sharded dims: ``{tensor dim: interval per rank of its mesh dim}``.

        The intervals lie within the global tensor; they may overlap, leave gaps and be empty.
        """
        sharded = spec.sharded_dims()
        axes = []
        for dim, need in needs.items():
            m = sharded[dim]
            need = [(a, b) if b > a else (0, 0) for a, b in need]
            axes.append(Axis(dim, m, plan_intervals(intervals_of(spec.sizes_along(m)), need, spec.coordinate[m])))
        return cls(axes, spec.mesh, spec.local_shape(), zeros)

    def __bool__(self) -> bool:
        """Whether there is anything to do on this rank, or to take part in. Otherwise the result is the shard."""
        return bool(self._steps)

    def __call__(self, local: Tensor) -> Tensor:
        """What this rank needs, out of its shard and those of others."""
        if self._steps and torch.is_grad_enabled() and local.requires_grad:
            return _Fetched.apply(local, self)
        return self.read(local)[0]

    def read(self, local: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """The same, not differentiable, and what was received for it: the halo, which :meth:`join` takes."""
        halo = []
        for step in self._steps:
            received = step.receive(local)
            local = step.join(local, received)
            halo.append(received)
        return local, halo

    def join(self, local: Tensor, halo: Sequence[Tensor | None]) -> Tensor:
        """What this rank needs, out of its shard and what it has received before. Nothing is sent."""
        for step, received in zip(self._steps, halo, strict=True):
            local = step.join(local, received)
        return local

    def backward(self, grad: Tensor, *, overwrite: bool = False) -> Tensor:
        """The adjoint, not differentiable: the shard's gradient, out of the ranks' gradients of what they needed.

        Args:
            overwrite: ``grad`` is a new tensor, which nothing else refers to: the result may be a part of it.
        """
        for step in reversed(self._steps):
            grad, overwrite = step.give_back(grad, overwrite=overwrite), True
        return grad

    def received(self, halo: Tensor) -> list[Tensor]:
        """What :meth:`read` has received, ``axes[0].transfers.recvs``, where there is one axis."""
        out = self._steps[0].out
        assert out is not None
        return out.split(halo)

    def start_return(self, pieces: Sequence[Tensor], like: Tensor) -> Pending:
        """Send the gradients of what was :meth:`received` to the owners.

        For :meth:`add_returned`. Both together do what :meth:`backward` does, with the halo's gradient by itself.
        """
        back = self._steps[0].back
        assert back is not None
        return back.start(pieces, like)

    def add_returned(self, total: Tensor, pending: Pending) -> Tensor:
        """Add what other ranks return to the shard's gradient ``total``, in place."""
        return self._steps[0].add_returned(total, pending)


class _FetchedDim:
    """One dim of a :class:`Fetch`; ``out`` sends what others need, ``back`` the gradients of what was received."""

    def __init__(
        self, shape: Sequence[int], dim: int, transfers: Transfers, zeros: Interval, group: dist.ProcessGroup
    ) -> None:
        own, need = transfers.own, (transfers.need[0] - zeros[0], transfers.need[1] + zeros[1])
        self._dim = dim
        self._zeros = [resized(shape, dim, n) if n else None for n in zeros]
        self._own_shape, self._shape = tuple(shape), resized(shape, dim, length(need))
        # Where the pieces are: those that are sent, in the shard; those that are received, in what is needed.
        self._sent = [_place(dim, own, part) for _, part in transfers.sends]
        self._received = [_place(dim, need, part) for _, part in transfers.recvs]
        self.out = self.back = None
        if transfers.active:
            sends = [(peer, resized(shape, dim, length(part))) for peer, part in transfers.sends]
            recvs = [(peer, resized(shape, dim, length(part))) for peer, part in transfers.recvs]
            self.out, self.back = (
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

    def receive(self, local: Tensor) -> Tensor | None:
        """The other ranks' parts of it, one after the other in one dim; None if no rank needs any."""
        if self.out is None:
            return None
        return self.out.start(_pieces(local, self._sent), local).buffer()

    def join(self, local: Tensor, halo: Tensor | None) -> Tensor:
        """What this rank needs, out of its shard and what :meth:`receive` gave."""
        received = () if self.out is None or halo is None else self.out.split(halo)
        before, after = self._zeros
        pieces = [] if before is None else [zeros_of(before, local)]
        for i in self._order:
            if i is not None:
                pieces.append(received[i])
            else:
                pieces.append(local if self._keeps_all or self._kept is None else local.narrow(*self._kept[0]))
        if after is not None:
            pieces.append(zeros_of(after, local))
        if not pieces:
            return zeros_like(local, self._shape)  # nothing, in the shard's memory format
        return cat_like(pieces, self._dim, local, self._shape)

    def give_back(self, grad: Tensor, *, overwrite: bool = False) -> Tensor:
        """The shard's gradient: its own part, and what the others return of theirs, in the order of ranks.

        Args:
            overwrite: see :meth:`Fetch.backward`.
        """
        pending = None
        if self.back is not None:
            pending = self.back.start(_pieces(grad, self._received), grad)
        if self._kept is not None and self._keeps_all:
            total = grad.narrow(*self._kept[1]) if overwrite else _copied(grad, self._kept[1])
        else:
            total = zeros_like(grad, self._own_shape)
            if self._kept is not None:
                total.narrow(*self._kept[0]).copy_(grad.narrow(*self._kept[1]))
        return total if pending is None else self.add_returned(total, pending)

    def add_returned(self, total: Tensor, pending: Pending) -> Tensor:
        """Wait for what the others return, and add it to the shard's own part of the gradient."""
        assert self.back is not None
        for place, piece in zip(self._sent, self.back.split(pending.buffer(total)), strict=True):
            total.narrow(*place).add_(piece)
        return total


class _Fetched(AutogradFunction):
    apply: ClassVar[Callable[[Tensor, Fetch], Tensor]]

    @staticmethod
    def forward(ctx: Any, local: Tensor, fetch: Fetch) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.fetch, ctx.stride = fetch, stride_like(local, local.shape)
        return fetch.read(local)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None
        if torch.is_grad_enabled():  # for second derivatives
            return _GivenBack.apply(grad, ctx.fetch), None
        # What was fetched may be a row or nothing, whose gradient says little of the shard's memory format.
        return with_stride(ctx.fetch.backward(grad), ctx.stride), None


class _GivenBack(AutogradFunction):
    """The adjoint of fetching, whose own is fetching again."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, fetch: Fetch) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.fetch = fetch
        return fetch.backward(grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        return None if grad is None else ctx.fetch(grad), None


def _copied(t: Tensor, place: Narrow) -> Tensor:
    """A part of a tensor in memory of its own: row-major, or channels-last where the tensor is."""
    if t.is_contiguous():
        return torch.narrow_copy(t, *place)
    last = CHANNELS_LAST.get(t.ndim)
    fmt = last if last is not None and t.is_contiguous(memory_format=last) else torch.contiguous_format
    return t.narrow(*place).clone(memory_format=fmt)


def _pieces(t: Tensor, places: Sequence[Narrow]) -> list[Tensor]:
    """Parts of a tensor, to be sent: a single one packed already where that is one call."""
    if len(places) == 1 and t.is_contiguous():
        dim, _, n = places[0]
        return [t if n == t.shape[dim] else torch.narrow_copy(t, *places[0])]
    return [t.narrow(*place) for place in places]


def _place(dim: int, held: Interval, part: Interval) -> Narrow:
    return dim, part[0] - held[0], length(part)
