"""A ring of ranks along one mesh dim: blocks are sent from neighbour to neighbour, their gradients come home.

[Note: ring] At step ``t`` rank ``r`` has the block of rank ``r - t``. It computes with it while it sends it on and
receives the next one, so a rank holds two blocks at a time, never all. A block travels only as far as somebody needs
it. The gradient of a block is added up along the same way, one step behind, and goes home from its last stop: ``P - 1``
transfers, as many as the block itself needs.

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
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...communication.exchange import Exchange, Pending
from ...layout.caches import cached
from ...layout.strides import as_bytes

Form = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a tensor that is to be sent


@dataclass(frozen=True, slots=True)
class Ring:
    """Who needs whose block, as one rank sees it.

    Attributes:
        rank: this rank's index along the mesh dim.
        hops: for each rank's block, how many ranks it is passed on to.
    """

    rank: int
    hops: tuple[int, ...]

    @property
    def last(self) -> int:
        """The last step of any block."""
        return max(self.hops)

    def block(self, step: int) -> int:
        """Whose block this rank has at ``step``."""
        return (self.rank - step) % len(self.hops)

    def neighbour(self, distance: int) -> int:
        """The rank that stands ``distance`` ranks further along the ring."""
        return (self.rank + distance) % len(self.hops)


def ring_of(rank: int, ranks: int, needs: Callable[[int, int], bool]) -> Ring:
    """The ring in which rank ``r`` has to see the block of rank ``s`` where ``needs(r, s)``.

    Example:
        >>> ring_of(0, 3, lambda r, s: s <= r).hops  # causal: nobody before a block's owner needs it
        (2, 1, 0)
    """

    def hops(owner: int) -> int:
        return max((t for t in range(1, ranks) if needs((owner + t) % ranks, owner)), default=0)

    return Ring(rank, tuple(hops(s) for s in range(ranks)))


@dataclass(frozen=True, slots=True)
class _Step:
    """What one rank sends and gets at one step of a :class:`Trip`.

    Attributes:
        exchange: the messages; None where no rank sends anything.
        sends: "block" or "carried" for what is sent, in the order of its receivers.
        recvs: ``(name, forms)`` of what is received, in the order of its senders.
    """

    exchange: Exchange | None
    sends: tuple[str, ...]
    recvs: tuple[tuple[str, Sequence[Form]], ...]


class Trip:
    """Blocks sent around a ring, and their gradients on the way home: all that is known before there is data.

    Args:
        forms: shapes and dtypes of the block of each rank.
        grad_forms: shapes and dtypes of its gradients; None where none are asked for.
    """

    def __init__(
        self,
        ring: Ring,
        forms: Sequence[Sequence[Form]],
        grad_forms: Sequence[Sequence[Form]] | None,
        group: dist.ProcessGroup,
    ) -> None:
        self.ring, self._forms, self._grad_forms, self._group = ring, forms, grad_forms, group
        self._there = [self._step(step, returning=False) for step in range(ring.last + 1)]
        steps = range(ring.last + 2 if ring.last else 1)
        self._and_back = [] if grad_forms is None else [self._step(step, returning=True) for step in steps]

    def travel(self, own: Sequence[Tensor]) -> Iterator[tuple[int, Sequence[Tensor]]]:
        """``(owner, block)`` for every block that comes by, the own one first; the next is on its way meanwhile."""
        ring, held = self.ring, own
        for i, step in enumerate(self._there):
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
        for i, step in enumerate(self._and_back):
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
        ring = self.ring
        sends: list[tuple[int, str, Sequence[Form]]] = []
        recvs: list[tuple[int, str, Sequence[Form]]] = []
        here, before, following = ring.block(step), ring.block(step - 1), ring.block(step + 1)
        if step < ring.hops[here]:
            sends.append((ring.neighbour(1), "block", self._forms[here]))
        if step < ring.hops[following]:
            recvs.append((ring.neighbour(-1), "block", self._forms[following]))
        if returning and step > 1:
            assert self._grad_forms is not None
            if step <= ring.hops[before] + 1:
                receiver = ring.neighbour(1) if step <= ring.hops[before] else before
                sends.append((receiver, "carried", self._grad_forms[before]))
            if step <= ring.hops[here]:
                recvs.append((ring.neighbour(-1), "carried", self._grad_forms[here]))
            if step == ring.hops[ring.rank] + 1:
                recvs.append((ring.neighbour(step - 1), "home", self._grad_forms[ring.rank]))
        for messages in (sends, recvs):
            messages.sort(key=lambda message: message[0])  # stable: two to one rank keep their order
        # Whether any rank sends anything, which all of them know.
        active = step < ring.last or (returning and step > 1)
        exchange = Exchange(_bytes(sends), _bytes(recvs), self._group, most_peers=2) if active else None
        return _Step(exchange, tuple(name for _, name, _ in sends), tuple((name, forms) for _, name, forms in recvs))

    def _start(self, step: _Step, ready: dict[str, Sequence[Tensor]], like: Tensor) -> Pending | None:
        if step.exchange is None:
            return None
        pieces = [_as_bytes(t) for name in step.sends for t in ready[name]]
        return step.exchange.start(pieces, pieces[0] if pieces else like.new_empty(0, dtype=torch.uint8))

    def _wait(self, step: _Step, pending: Pending | None) -> dict[str, Sequence[Tensor]]:
        if pending is None:
            return {}
        arrived = iter(pending.wait())
        result: dict[str, Sequence[Tensor]] = {}
        for name, forms in step.recvs:
            result[name] = [_from_bytes(next(arrived), *form) for form in forms]
        return result


def _bytes(messages: Sequence[tuple[int, str, Sequence[Form]]]) -> list[tuple[int, Sequence[int]]]:
    """Receivers or senders, and how many bytes: tensors of any dtypes travel in one message."""
    return [(peer, (math.prod(shape) * dtype.itemsize,)) for peer, _, forms in messages for shape, dtype in forms]


def _as_bytes(t: Tensor) -> Tensor:
    """The numbers as bytes, in the tensor's own memory if the last dim lies together: packing copies them once more."""
    return t.view(torch.uint8) if t.ndim and t.stride(-1) == 1 else as_bytes(t)


def _from_bytes(raw: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    aligned = raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()
    return aligned.view(dtype).view(shape)


# The trip with these properties, of which the forms are tuples, made once.
trip = cached(maxsize=1024)(Trip)
