"""Dims of equal blocks, each of them sharded alike, as reshapes make and take them apart.

``(B, N)`` with ``N`` sharded, flattened, is a dim of ``B`` blocks, and every rank has an interval of each. One exchange
makes a sharding of it, where a rank has one interval, and the other way round.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...exchange import Exchange
from ...geometry import Interval, boundaries_of, resized

__all__ = ["BlockExchange", "Blocks"]


class Blocks(NamedTuple):
    """A dim of ``number`` equal blocks; rank ``r`` has ``sizes[r]`` indices of each. A sharded dim is one block."""

    number: int
    sizes: tuple[int, ...]

    def intervals(self, rank: int) -> list[Interval]:
        """What a rank has of the dim, in ascending order.

        Example:
            >>> Blocks(2, (5, 3)).intervals(1)
            [(5, 8), (13, 16)]
        """
        n, start = sum(self.sizes), sum(self.sizes[:rank])
        return [(block * n + start, block * n + start + self.sizes[rank]) for block in range(self.number)]

    def owners(self, interval: Interval) -> Iterator[tuple[int, Interval]]:
        """Which rank has which part of an interval, in ascending order.

        Example:
            >>> list(Blocks(2, (5, 3)).owners((4, 10)))
            [(0, (4, 5)), (1, (5, 8)), (0, (8, 10))]
        """
        boundaries = boundaries_of(self.sizes)
        at, stop = interval
        while at < stop:
            begin = at - at % boundaries[-1]  # of the block
            rank = bisect_right(boundaries, at - begin) - 1
            end = min(stop, begin + boundaries[rank + 1])
            yield rank, (at, end)
            at = end


class BlockExchange:
    """Brings every rank what it has of a dim in one layout from where it is in another. Planned once.

    Args:
        dim: the tensor dim.
        shape: of this rank's local tensor.
        old, new: the layouts.
    """

    def __init__(
        self, dim: int, shape: tuple[int, ...], old: Blocks, new: Blocks, rank: int, group: dist.ProcessGroup
    ) -> None:
        self._dim = dim
        self._shape = resized(shape, dim, new.number * new.sizes[rank])
        held = [(r, piece) for own in old.intervals(rank) for r, piece in new.owners(own)]
        needed = [(r, piece) for need in new.intervals(rank) for r, piece in old.owners(need)]
        # Where each piece begins in the local tensor: they follow each other in it.
        at = dict(zip((piece for _, piece in held), boundaries_of([b - a for _, (a, b) in held]), strict=False))
        # By peer, for each in the order of the dim.
        sends, recvs = (sorted((r, a, b) for r, (a, b) in pieces if r != rank) for pieces in (held, needed))
        self._kept = [(at[piece], piece[1] - piece[0]) for r, piece in needed if r == rank]
        self._sent = [(at[a, b], b - a) for _, a, b in sends]
        self._exchange = Exchange(
            [(r, resized(shape, dim, b - a)) for r, a, b in sends],
            [(r, resized(shape, dim, b - a)) for r, a, b in recvs],
            group,
            group.size() - 1,
        )
        starts = [piece[0] for r, piece in needed if r == rank] + [a for _, a, _ in recvs]
        self._order = sorted(range(len(starts)), key=starts.__getitem__)

    def __call__(self, local: Tensor) -> Tensor:
        """A new local tensor."""
        sent = [local.narrow(self._dim, *run) for run in self._sent]
        pending = self._exchange.start(sent, local)
        pieces = [*(local.narrow(self._dim, *run) for run in self._kept), *pending.wait()]
        if not pieces:
            return local.new_empty(self._shape)
        return torch.cat([pieces[i] for i in self._order], self._dim)
