"""A dim put together of what ranks hold of it: of tensors that are joined, and of the blocks that reshapes make.

``(B, N)`` with ``N`` sharded, flattened, is a dim of ``B`` blocks, and every rank has an interval of each. One exchange
makes a sharding of it, where a rank has one interval, and the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from ...communication.exchange import Exchange, plan_intervals
from ...layout.geometry import Interval, intersect, length, resized
from ...layout.strides import cat_like


class _Run(NamedTuple):
    """A run of a part's local tensor: where it begins in the result, and its narrowing."""

    at: int
    part: int
    start: int
    length: int

    def of(self, tensors: Sequence[Tensor], dim: int) -> Tensor:
        return tensors[self.part].narrow(dim, self.start, self.length)


class Assembly:
    """What one rank needs of a dim that several tensors make up together. Planned once; a call is one exchange.

    Args:
        dim: the tensor dim.
        shapes: of this rank's local tensor of each part.
        owned: for each part and rank, which interval of the dim that rank's local tensor is.
        needs: for each block of the result and rank, which interval it gets; those of a rank in ascending order.
        like: of the memory format that the result has; None where it has that of the first local tensor.
    """

    def __init__(
        self,
        dim: int,
        shapes: Sequence[Sequence[int]],
        owned: Sequence[Sequence[Interval]],
        needs: Sequence[Sequence[Interval]],
        rank: int,
        group: dist.ProcessGroup,
        *,
        like: Tensor | None = None,
    ) -> None:
        self._dim, self._like = dim, like
        self._shape = resized(shapes[0], dim, sum(length(need[rank]) for need in needs))
        plans = [(i, plan_intervals(own, need, rank)) for i, own in enumerate(owned) for need in needs]
        common = ((i, plan.own[0], *intersect(plan.own, plan.need)) for i, plan in plans)
        self._kept = [_Run(a, i, a - begin, b - a) for i, begin, a, b in common if b > a]
        # The messages of the peers in their order, in each the pieces in the order of the dim.
        sends = sorted((r, a, b, i) for i, plan in plans for r, (a, b) in plan.sends)
        recvs = sorted((s, a, b, i) for i, plan in plans for s, (a, b) in plan.recvs)
        self._sent = [_Run(a, i, a - owned[i][rank][0], b - a) for _, a, b, i in sends]
        self._exchange = None
        most_peers = sum(plan.most_peers for _, plan in plans)  # or fewer, where parts have the same ones
        if most_peers:  # some rank has any, so all of them take part
            self._exchange = Exchange(
                [(r, resized(shapes[i], dim, b - a)) for r, a, b, i in sends],
                [(s, resized(shapes[i], dim, b - a)) for s, a, b, i in recvs],
                group,
                most_peers,
            )
        # Where the pieces, the own ones and then what was received, come in the result.
        starts = [run.at for run in self._kept] + [a for _, a, _, _ in recvs]
        self._order = sorted(range(len(starts)), key=starts.__getitem__)

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """A new tensor: this rank's intervals, one after the other."""
        dim, first = self._dim, tensors[0]
        pieces = [run.of(tensors, dim) for run in self._kept]
        if self._exchange is not None:
            pieces += self._exchange.start([run.of(tensors, dim) for run in self._sent], first).wait()
        if not pieces:
            return first.new_empty(self._shape)
        ordered = [pieces[i] for i in self._order]
        return cat_like(ordered, dim, first if self._like is None else self._like, self._shape)
