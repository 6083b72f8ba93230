"""A ring of ranks along one mesh dim: blocks travel from neighbour to neighbour, their gradients come home.

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

from ...exchange import Pending, start_swap

__all__ = ["Ring", "ring_of", "travel", "travel_and_return"]

Form = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a tensor that is to come


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

    def beside(self, distance: int) -> int:
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


def travel(
    own: Sequence[Tensor], forms: Callable[[int], Sequence[Form]], ring: Ring, group: dist.ProcessGroup
) -> Iterator[tuple[int, Sequence[Tensor]]]:
    """``(owner, block)`` for every block that comes by, the own one first; the next is on its way meanwhile.

    Args:
        own: this rank's block, any tensors.
        forms: shapes and dtypes of the block of a rank.
    """
    held: Sequence[Tensor] = own
    for step in range(ring.last + 1):
        message = _Message(group, own[0].device)
        _pass_on(message, held, forms, ring, step)
        message.start(active=step < ring.last)
        if step <= ring.hops[ring.block(step)]:
            yield ring.block(step), held
        held = message.wait().get("block", ())


def travel_and_return(
    own: Sequence[Tensor],
    forms: Callable[[int], Sequence[Form]],
    grad_forms: Callable[[int], Sequence[Form]],
    ring: Ring,
    group: dist.ProcessGroup,
    contribute: Callable[[int, Sequence[Tensor]], Sequence[Tensor]],
) -> Sequence[Tensor]:
    """The sum over all ranks of ``contribute(owner, block)`` for this rank's own block.

    Args:
        grad_forms: shapes and dtypes of what ``contribute`` returns.
    """
    held: Sequence[Tensor] = own
    home: Sequence[Tensor] = ()
    carried: Sequence[Tensor] = ()
    for step in range(ring.last + 2 if ring.last else 1):
        message = _Message(group, own[0].device)
        _pass_on(message, held, forms, ring, step)
        here, before = ring.block(step), ring.block(step - 1)
        if step > 1:
            if step <= ring.hops[before] + 1:
                message.send(ring.beside(1) if step <= ring.hops[before] else before, carried)
            if step <= ring.hops[here]:
                message.expect("carried", ring.beside(-1), grad_forms(here))
            if step == ring.hops[ring.rank] + 1:
                message.expect("home", ring.beside(step - 1), grad_forms(ring.rank))
        message.start(active=step < ring.last or step > 1)
        carried = contribute(here, held) if step <= ring.hops[here] else ()
        if step == 0:
            home, carried = carried, ()
        received = message.wait()
        for sums, arrived in ((carried, received.get("carried", ())), (home, received.get("home", ()))):
            for total, part in zip(sums, arrived):
                total += part
        held = received.get("block", ())
    return home


def _pass_on(
    message: _Message, held: Sequence[Tensor], forms: Callable[[int], Sequence[Form]], ring: Ring, step: int
) -> None:
    following = ring.block(step + 1)
    if step < ring.hops[ring.block(step)]:
        message.send(ring.beside(1), held)
    if step < ring.hops[following]:
        message.expect("block", ring.beside(-1), forms(following))


class _Message:
    """Tensors of any dtypes to and from some ranks, in one exchange."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        ranks = dist.get_world_size(group)
        self._sent: list[list[Tensor]] = [[] for _ in range(ranks)]
        self._expected: list[list[tuple[str, Form]]] = [[] for _ in range(ranks)]
        self._pending: Pending | None = None

    def send(self, rank: int, tensors: Sequence[Tensor]) -> None:
        self._sent[rank] += [t.reshape(-1).view(torch.uint8) for t in tensors]

    def expect(self, name: str, rank: int, forms: Sequence[Form]) -> None:
        self._expected[rank] += [(name, form) for form in forms]

    def start(self, *, active: bool) -> None:
        """``active``: whether any rank sends anything; the same on all of them."""
        if not active:
            return
        shapes = [[[math.prod(shape) * dtype.itemsize] for _, (shape, dtype) in row] for row in self._expected]
        like = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._pending = start_swap(self._sent, shapes, self.group, like)

    def wait(self) -> dict[str, list[Tensor]]:
        result: dict[str, list[Tensor]] = {}
        if self._pending is None:
            return result
        expected = [item for row in self._expected for item in row]
        for (name, (shape, dtype)), raw in zip(expected, self._pending.wait(), strict=True):
            aligned = raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()
            result.setdefault(name, []).append(aligned.view(dtype).view(shape))
        return result
