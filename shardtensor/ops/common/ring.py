"""A ring of ranks along one mesh dim: blocks are sent from neighbour to neighbour, their gradients come home.

[Note: ring] At step ``t`` rank ``r`` has the block of rank ``r - t``. The rank computes with this block while it sends
it on and receives the next one, so it holds two blocks at a time, never all. A block travels only as far as some rank
needs it. The gradient of a block is added up along the same way, one step behind, and goes home from its last stop:
``P - 1`` transfers, as many as the block itself needs.

::

    step        0     1     2     3
    rank 0      b0    b3    b2    b1        block b0:  0 -> 1 -> 2 -> 3
    rank 1      b1    b0    b3    b2        its gradient:   1 -> 2 -> 3 -> 0
    rank 2      b2    b1    b0    b3
    rank 3      b3    b2    b1    b0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..._compat import AutogradFunction
from ..._compat.c10d import group_along
from ...communication.exchange import Exchange, Pending
from ...dispatch.gradients import needed_gradients
from ...layout.caches import cached
from ...layout.intervals import Interval, resized
from ...layout.strides import as_bytes
from .alignment import wide_dtype, widened


class Form(NamedTuple):
    """A tensor of each rank's block: they differ in the size of ``dim`` alone."""

    shape: tuple[int, ...]
    dim: int
    dtype: torch.dtype

    def sized(self, size: int) -> tuple[int, ...]:
        """The shape with this size of ``dim``."""
        return tuple(resized(self.shape, self.dim, size))


_Message = tuple[int, str, int]  # a peer, what it sends or gets, and the size of that block


@dataclass(frozen=True, slots=True)
class Ring:
    """Who needs whose block, as one rank sees it.

    Attributes:
        rank: this rank's index along the mesh dim.
        hops: for each rank's block, how many ranks it is passed on to.
        last: the last step of any block.
    """

    rank: int
    hops: tuple[int, ...]
    last: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "last", max(self.hops))  # once: every step asks for it

    def block(self, step: int) -> int:
        """Whose block this rank has at ``step``."""
        return (self.rank - step) % len(self.hops)

    def neighbour(self, distance: int) -> int:
        """The rank that stands ``distance`` ranks further along the ring."""
        return (self.rank + distance) % len(self.hops)


@dataclass(frozen=True, slots=True)
class _Step:
    """What one rank sends and gets at a step of a :class:`Trip`.

    Attributes:
        exchange: the messages; None where no rank sends anything.
        sends: "block" or "carried" for what is sent, in the order of its receivers.
        recvs: what is received, in the order of its senders, and shapes and dtypes of its tensors.
    """

    exchange: Exchange | None
    sends: list[str]
    recvs: list[tuple[str, list[tuple[tuple[int, ...], torch.dtype]]]]


class Trip:
    """Blocks sent around a ring, and their gradients on the way home: all that is known before there is data.

    Args:
        sizes: of each rank's block, along the dim in which they differ.
        forms: of the tensors of a block.
        grad_forms: of its gradients that come home.
    """

    def __init__(
        self,
        ring: Ring,
        sizes: Sequence[int],
        forms: Sequence[Form],
        grad_forms: Sequence[Form],
        group: dist.ProcessGroup,
    ) -> None:
        self.ring, self._sizes, self._group = ring, sizes, group
        self._forms = {"block": forms, "carried": grad_forms, "home": grad_forms}
        self._steps: dict[Any, _Step] = {}  # by their messages; most are alike

    def travel(self, own: Sequence[Tensor]) -> Iterator[tuple[int, Sequence[Tensor]]]:
        """``(owner, block)`` for every block that comes by, the own one first; the next is on its way meanwhile."""
        ring, held = self.ring, own
        for i in range(ring.last + 1):
            step = self._step(i, returning=False)
            pending = self._start(step, {"block": held}, own[0])
            if i <= ring.hops[ring.block(i)]:
                yield ring.block(i), held
            held = self._wait(step, pending).get("block", ())

    def travel_and_return(
        self, own: Sequence[Tensor], contribute: Callable[[int, Sequence[Tensor]], Sequence[Tensor]]
    ) -> Sequence[Tensor]:
        """The sum over all ranks of ``contribute(owner, block)`` for this rank's own block.

        What ``contribute`` returns has the trip's ``grad_forms``, and is added to.
        """
        ring, held = self.ring, own
        home: Sequence[Tensor] = ()
        carried: Sequence[Tensor] = ()
        for i in range(ring.last + 2 if ring.last else 1):
            step = self._step(i, returning=True)
            pending = self._start(step, {"block": held, "carried": carried}, own[0])
            here = ring.block(i)
            carried = contribute(here, held) if i <= ring.hops[here] else ()
            if i == 0:
                home, carried = carried, ()
            received = self._wait(step, pending)
            for sums, arrived in ((carried, received.get("carried", ())), (home, received.get("home", ()))):
                for total, part in zip(sums, arrived):
                    total += part
            held = received.get("block", ())
        return home

    def _step(self, step: int, *, returning: bool) -> _Step:
        ring, sizes = self.ring, self._sizes
        sends: list[_Message] = []
        recvs: list[_Message] = []
        here, before, following = ring.block(step), ring.block(step - 1), ring.block(step + 1)
        if step < ring.hops[here]:
            sends.append((ring.neighbour(1), "block", sizes[here]))
        if step < ring.hops[following]:
            recvs.append((ring.neighbour(-1), "block", sizes[following]))
        if returning and step > 1:
            if step <= ring.hops[before] + 1:
                receiver = ring.neighbour(1) if step <= ring.hops[before] else before
                sends.append((receiver, "carried", sizes[before]))
            if step <= ring.hops[here]:
                recvs.append((ring.neighbour(-1), "carried", sizes[here]))
            if step == ring.hops[ring.rank] + 1:
                recvs.append((ring.neighbour(step - 1), "home", sizes[ring.rank]))
        # Whether any rank sends anything, which all of them know.
        active = step < ring.last or (returning and step > 1)
        key = tuple(sends), tuple(recvs), active
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = self._made(sends, recvs, active)
        return found

    def _made(self, sends: list[_Message], recvs: list[_Message], active: bool) -> _Step:
        for messages in (sends, recvs):
            messages.sort(key=lambda message: message[0])  # stable: two to one rank keep their order
        exchange = Exchange(self._bytes(sends), self._bytes(recvs), self._group, most_peers=2) if active else None
        received = [(name, [(form.sized(size), form.dtype) for form in self._forms[name]]) for _, name, size in recvs]
        return _Step(exchange, [name for _, name, _ in sends], received)

    def _bytes(self, messages: Sequence[_Message]) -> list[tuple[int, Sequence[int]]]:
        """Receivers or senders, and how many bytes: tensors of any dtypes travel in one message."""
        return [
            (peer, (math.prod(form.sized(size)) * form.dtype.itemsize,))
            for peer, name, size in messages
            for form in self._forms[name]
        ]

    def _start(self, step: _Step, ready: dict[str, Sequence[Tensor]], like: Tensor) -> Pending | None:
        if step.exchange is None:
            return None
        tensors = [t for name in step.sends for t in ready[name]]
        # In their own memory if the last dim lies together: packing copies them once more.
        pieces = [t.view(torch.uint8) if t.ndim and t.stride(-1) == 1 else as_bytes(t) for t in tensors]
        return step.exchange.start(pieces, pieces[0] if pieces else like.new_empty(0, dtype=torch.uint8))

    def _wait(self, step: _Step, pending: Pending | None) -> dict[str, Sequence[Tensor]]:
        if pending is None:
            return {}
        arrived = iter(pending.wait())
        result: dict[str, Sequence[Tensor]] = {}
        for name, forms in step.recvs:
            result[name] = [_from_bytes(next(arrived), *form) for form in forms]
        return result


def _from_bytes(raw: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    aligned = raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()
    return aligned.view(dtype).view(shape)


# The trip with these properties, of which all are tuples, made once.
trip = cached(maxsize=1024)(Trip)


# -- part by part ------------------------------------------------------------------------------------------------------

# A function of an operand that is sent around a ring: computed with each rank's shard in turn, and put together.
#
# The gradient of an operand that travels comes home part by part, too. In the backward pass the shards go round once
# more, and what was computed with each is computed again, but for products, whose gradients do not need them. No shard
# that has come by is saved.
#
# So a gradient is again a function of what travels (the shards, and gradients of what came home) and of what stays, and
# its results come home or stay. Derivatives of every order are such rounds.
#
# Sums over the parts are computed in float32, and rounded once: see [Note: rounded once] in redistribute.py.


@dataclass(frozen=True, slots=True)
class Tour:
    """The way of an operand's shards along a mesh dim, and where their results belong.

    Attributes:
        dim: of the travelling operand, the one that is sharded.
        into: the dim of the result along which the parts' results stand side by side; None where they are summed.
        intervals: each rank's of ``dim``, and so of ``into``.
    """

    mesh: DeviceMesh
    mesh_dim: int
    rank: int
    dim: int
    into: int | None
    intervals: tuple[Interval, ...]


def part_by_part(
    function: Callable[..., Tensor], graph: Callable[..., Tensor], tour: Tour, part: Tensor, *others: Tensor
) -> Tensor:
    """``function(owner, that rank's part, *others)`` for every rank's part, put together. Differentiable.

    Every rank of the mesh dim calls it. ``function`` has no effects, and may get a tensor in another memory format.

    Args:
        graph: the same for the backward pass, which needs the graph of the result, but no values.
    """

    def work(function: Callable[..., Tensor], owner: int, *tensors: Tensor) -> Sequence[Tensor]:
        return (function(owner, *(tensors if tour.into is not None else widened(*tensors))),)

    kind = part.device.type
    autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    works = partial(work, function), partial(work, graph)
    (result,) = _Round.apply(_Work(*works, 1, 0, tour.into, autocast), tour, part, *others)
    summed: Tensor = result
    return summed.to(part.dtype) if tour.into is None and summed.dtype == wide_dtype(part.dtype) else summed


@dataclass(frozen=True, slots=True)
class _Work:
    """What is computed with each part that comes by.

    Attributes:
        function: of the owner's index, of what comes by and of what stays; gives results for the owner, and others for
            this rank.
        graph: the same for the backward pass, see :func:`part_by_part`.
        travelling, returning: how many tensors come by, and how many results are the owner's.
        into: of this rank's one result, the dim along which the parts' stand side by side; otherwise they are summed.
        autocast: device, dtype, and whether it is on.
    """

    function: Callable[..., Sequence[Tensor]]
    graph: Callable[..., Sequence[Tensor]]
    travelling: int
    returning: int
    into: int | None
    autocast: tuple[str, torch.dtype, bool]

    def gradient(self, needs: Sequence[bool], intervals: Sequence[Interval]) -> _Work:
        """The work of the gradients by the tensors that are needed, of which those that came by go home.

        The gradients of what has come home come by with the tensors.
        """
        first, last = self.travelling + self.returning, len(needs) + self.returning

        def function(owner: int, *tensors: Tensor) -> Sequence[Tensor]:
            again = torch.is_grad_enabled()
            grads = [*tensors[self.travelling : first], *tensors[last:]]
            with torch.enable_grad():
                if self.into is not None:
                    a, b = intervals[owner]
                    grads = [g.narrow(self.into, a, b - a) for g in grads]
                operands = widened(*tensors[: self.travelling], *tensors[first:last])
                for i, need in enumerate(needs):
                    if not (again and operands[i].requires_grad):
                        operands[i] = operands[i].detach().requires_grad_(need)
                results = self.graph(owner, *operands)
                pairs = [(y, g.to(y.dtype)) for y, g in zip(results, grads, strict=True) if y.requires_grad]
            wanted = list(compress(operands, needs))
            if not pairs:
                return [torch.zeros_like(t) for t in wanted]
            ys, gs = zip(*pairs, strict=True)
            found: Sequence[Tensor] = torch.autograd.grad(ys, wanted, gs, create_graph=again, materialize_grads=True)
            return found

        return _Work(function, function, first, sum(needs[: self.travelling]), None, self.autocast)


class _Round(AutogradFunction):
    """One round of the shards. Gives what has come home, and what stays."""

    @staticmethod
    def forward(ctx: Any, work: _Work, tour: Tour, *tensors: Tensor) -> Any:
        ctx.work, ctx.tour = work, tour
        ctx.save_for_backward(*tensors)
        own, others = list(map(_plain, tensors[: work.travelling])), tensors[work.travelling :]
        parts: dict[int, Tensor] = {}
        sums: list[Tensor] = []

        def compute(owner: int, blocks: Sequence[Tensor]) -> list[Tensor]:
            kind, dtype, enabled = work.autocast
            with torch.autocast(kind, dtype, enabled=enabled):
                results = work.function(owner, *blocks, *others)
            mine = results[work.returning :]
            if work.into is not None:
                (parts[owner],) = mine
            else:
                sums[:] = [a + b for a, b in zip(sums, mine, strict=True)] if sums else mine
            return [_plain(t).clone() for t in results[: work.returning]]

        trip = _trip(tour, own, work.returning)
        if work.returning:
            return *trip.travel_and_return(own, compute), *sums
        for owner, blocks in trip.travel(own):
            compute(owner, blocks)
        return tuple(sums) if work.into is None else (torch.cat([parts[i] for i in sorted(parts)], dim=work.into),)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        work, tensors, needs = ctx.work, ctx.saved_tensors, needed_gradients(ctx, 2)
        n, home = work.travelling, work.returning
        gradient = work.gradient(needs, ctx.tour.intervals)
        found = iter(_Round.apply(gradient, ctx.tour, *tensors[:n], *grads[:home], *tensors[n:], *grads[home:]))
        return None, None, *(next(found) if need else None for need in needs)


def _trip(tour: Tour, own: Sequence[Tensor], returning: int) -> Trip:
    """The way of the parts around the ring; what comes home are gradients of such parts."""
    ranks = len(tour.intervals)
    ring = Ring(tour.rank, (ranks - 1,) * ranks)  # every rank needs every part
    sizes = tuple(b - a for a, b in tour.intervals)
    forms = tuple(Form(tuple(own[0].shape), tour.dim, t.dtype) for t in own)
    gradients = (forms[0]._replace(dtype=wide_dtype(forms[0].dtype)),) * returning
    return trip(ring, sizes, forms, gradients, group_along(tour.mesh, tour.mesh_dim))


def _plain(t: Tensor) -> Tensor:
    """Contiguous, and without pending conjugation: what may travel and be added to."""
    return t.resolve_conj().resolve_neg().contiguous()
