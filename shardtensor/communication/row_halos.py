"""Rows of a sharded dim that ranks read, and add to, by position: the halo is where an index says.

[Note: row halos] A sharded index reads rows of other ranks, and an index that comes from a graph reads most of them
many times. Each rank looks at its own part of the index and asks every owner for the rows that it lacks, each once: an
exchange of counts, which all ranks see, and one of positions. If every rank holds the index whole, each finds out all
of that by itself, once all know that they hold the same one (:func:`check_same_on_ranks`). After that rows travel
without another look at the index, in one exchange, and are put behind the shard. :attr:`RowHalo.places` says for each
entry of the index where its row is in the two. In the other direction a rank first adds up, in the same places, what it
has for rows of others, and sends each row once.

Looking at an index takes the host; what was found is therefore kept with the index, see [Note: found] in
dispatch/index_findings.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._compat import AutogradFunction
from .._compat.c10d import device_of
from ..errors import RanksDiffer
from ..layout.intervals import boundaries_of
from ..ranks.agreement import gather_with_history
from ..ranks.differences import by_rank
from ..ranks.history import SAME_VALUES
from ..ranks.summaries import digest
from .exchange import Exchange
from .redistribute import all_gather, reduced

_WRITTEN = (
    "this rank's local tensor of an index was written to. Other ranks cannot know it, and would exchange the rows that "
    "it named before. Remedy: write to the ShardTensor (index.copy_(new)) or make a new one (from_local), on all ranks."
)
_PLAIN_WRITTEN = (
    "an index, or the indices of a sparse matrix, were changed by something that raises no version (numpy, .data, a "
    "collective, the tensors that a matrix was made of), and the rows that it named before would be exchanged. Remedy: "
    "make a new one, on all ranks."
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one rank's part of an index asks for.

    Attributes:
        places: for each entry of the index, where its row is among the shard's rows and, behind them, ``positions``.
        positions: the rows that other ranks own, ascending, each once.
        claim: how many of them each rank owns; then whether an entry is negative, and whether one is out of range.
    """

    places: Tensor
    positions: Tensor
    claim: Tensor


def wanted(index: Tensor, sizes: Sequence[int], rank: int) -> Wanted:
    """What rank ``rank`` asks for, whose part of the index is ``index``; negative entries count from the end.

    Args:
        sizes: of the shards of the dim that is indexed.

    Example:
        >>> found = wanted(torch.tensor([4, 0, 3, 4, -1]), (3, 2), rank=0)
        >>> found.places.tolist(), found.positions.tolist(), found.claim.tolist()
        ([4, 0, 3, 4, 4], [3, 4], [0, 2, 1, 0])
    """
    bounds = boundaries_of(sizes)
    n, start, stop = bounds[-1], bounds[rank], bounds[rank + 1]
    part = each_once(index)
    entries = part.long()
    negative, beyond = entries < 0, (entries < -n) | (entries >= n)
    entries = torch.where(negative, entries + n, entries)
    outside = (entries < start) | (entries >= stop)
    positions, order = torch.unique(entries[outside], return_inverse=True)
    places = entries - start
    places[outside] = order + (stop - start)
    counts = torch.searchsorted(positions, torch.tensor(bounds, device=index.device)).diff()
    claim = torch.cat([counts, torch.stack([negative.any(), beyond.any()]).long()])
    return Wanted(places.to(index.dtype).expand(index.shape), positions, claim)


def each_once(index: Tensor) -> Tensor:
    """The part of an expanded index that has all its values."""
    for d, (n, stride) in enumerate(zip(index.shape, index.stride(), strict=True)):
        if n > 1 and stride == 0:
            index = index.narrow(d, 0, 1)
    return index


def check_unwritten(now: Tensor, before: Tensor, text: str = _PLAIN_WRITTEN) -> None:
    """Raise RuntimeError with ``text`` where values differ; devices other than the CPU report it later."""
    if now.device.type != "cpu":
        torch.ops.aten._assert_async.msg((now == before).all(), text)
    elif not torch.equal(now, before):
        raise RuntimeError(text)


def check_same_on_ranks(
    name: object, indices: Sequence[Tensor], group: dist.ProcessGroup, what: str = "the index", says: bool = False
) -> bool:
    """Check that all ranks of ``group`` hold the same indices, which are not sharded; one all-gather of integers.

    Ranks with other indices would wait for other rows than are sent. Nothing is compared where nothing travels, as in
    a simulation.

    Args:
        name: of the operator.
        what: the indices are, for the error.
        says: what this rank says besides.

    Returns:
        Whether any rank says so.

    Raises:
        RanksDiffer: on all ranks of the group.
    """
    if device_of(group) is None:
        return says
    row = torch.tensor([int(says), *map(digest, indices)], device=indices[0].device)
    table = gather_with_history(row, group, "comparison of indices", others=False).tolist()
    said = [row.pop(0) for row in table]
    rows = dict(zip(dist.get_process_group_ranks(group), table, strict=True))
    if len(set(map(tuple, rows.values()))) > 1:
        shown = by_rank({rank: " ".join(f"{n % 2**64:016x}" for n in theirs) for rank, theirs in rows.items()})
        raise RanksDiffer(
            f"{name}: {what} is not sharded, but differs between ranks: it has the digest {shown}. {SAME_VALUES}."
        )
    return any(said)


class RowHalo:
    """The exchange of the rows that an index reads, and its adjoint. Collective on ``group``, as what is called on it.

    Args:
        index, sizes, rank: as those of :func:`wanted`; ``rank`` is that of ``group``.
        split: ``index`` is the whole one, the same on every rank; along which dim it is divided, and the ranks'
            lengths. Making it communicates nothing then.

    Attributes:
        places, positions: as those of :class:`Wanted`.
        total: how many rows are sent between all ranks; the same on all, as the two that follow.
        negative, beyond: whether any rank's part of the index has an entry that is negative, or out of range. In the
            latter case nothing can be exchanged.
    """

    def __init__(
        self,
        index: Tensor,
        sizes: Sequence[int],
        rank: int,
        group: dist.ProcessGroup,
        split: tuple[int, Sequence[int]] | None = None,
    ) -> None:
        if split is None:
            mine = wanted(index, sizes, rank)
            table = all_gather(mine.claim, group).cpu()
            table[rank] = mine.claim.cpu()  # as it is in any case, but in a preview, which receives nothing
        else:
            dim, lengths = split
            asked = [wanted(part, sizes, r) for r, part in enumerate(index.split_with_sizes(list(lengths), dim))]
            mine, table = asked[rank], torch.stack([a.claim for a in asked]).cpu()
        counts, (self.negative, self.beyond) = table[:, :-2], table[:, -2:].amax(0).bool().tolist()
        self.places, self.positions, self.total = mine.places, mine.positions, int(counts.sum())
        own = index if split is None else index.split_with_sizes(list(split[1]), split[0])[rank]
        self._own, self._group, self._entries = sizes[rank], group, each_once(own).clone()
        self._written = _WRITTEN if split is None else _PLAIN_WRITTEN
        self._gets = [(s, n) for s, n in enumerate(counts[rank].tolist()) if n]
        self._gives = [(r, n) for r, n in enumerate(counts[:, rank].tolist()) if n]
        self._most_peers = int(max((counts > 0).sum(d).max() for d in (0, 1)))
        self._exchanges: dict[int, tuple[Exchange, Exchange]] = {}
        self._given: tuple[Tensor, ...] = ()  # where in the shard the rows are that each peer gets
        if self.total and not self.beyond:
            start = boundaries_of(sizes)[rank]
            if split is None:
                given = self._exchange(1)[1].start([mine.positions], mine.positions).buffer() - start
                self._given = given.split_with_sizes([n for _, n in self._gives])
            else:
                owned = [(asked[r].positions, counts[r].tolist()) for r, _ in self._gives]
                self._given = tuple(positions.split_with_sizes(n)[rank] - start for positions, n in owned)

    def check(self, part: Tensor) -> None:
        """Raise where these are not the values that this rank's part of the index had. No host waits for a device.

        Raises:
            RuntimeError: on the CPU. Other devices report it as an index out of range.
        """
        check_unwritten(each_once(part), self._entries, self._written)

    def _exchange(self, width: int) -> tuple[Exchange, Exchange]:
        """Of rows of this many elements: from their owners, and back to them."""
        if width not in self._exchanges:
            gives, gets = ([(peer, (n * width,)) for peer, n in ways] for ways in (self._gives, self._gets))
            self._exchanges[width] = (
                Exchange(gives, gets, self._group, self._most_peers),
                Exchange(gets, gives, self._group, self._most_peers),
            )
        return self._exchanges[width]

    def fetch(self, local: Tensor, dim: int) -> Tensor:
        """The shard and, behind it along ``dim``, the rows at :attr:`positions`."""
        if not self.total:
            return local
        rows = local.movedim(dim, 0)
        out, _ = self._exchange(math.prod(rows.shape[1:]))
        sent = [rows.index_select(0, torch.cat(self._given))] if self._given else []
        received = out.start(sent, local).buffer().view(len(self.positions), *rows.shape[1:])
        return torch.cat([local, received.movedim(0, dim)], dim)

    def give_back(self, room: Tensor, dim: int, op: str = "sum") -> Tensor:
        """The adjoint: the shard's part of ``room``, which is like what :meth:`fetch` gives, with what all others have.

        What a rank has behind its shard goes to the owners, who reduce it in the order of ranks, in place.
        """
        own = room.narrow(dim, 0, self._own)
        if not self.total:
            return own
        rows, halo = own.movedim(dim, 0), room.narrow(dim, self._own, len(self.positions)).movedim(dim, 0)
        _, back = self._exchange(math.prod(rows.shape[1:]))
        for places, piece in zip(self._given, back.start([halo], room).wait(own), strict=True):
            piece = piece.view(len(places), *rows.shape[1:])
            if op == "sum":
                rows.index_add_(0, places, piece)
            else:
                rows.index_copy_(0, places, reduced([rows.index_select(0, places), piece], op))
        return own

    def fetched(self, local: Tensor, dtype: torch.dtype) -> Tensor:
        """:meth:`fetch` along dim 0 in ``dtype``, in which gradients are added up, too. Differentiable."""
        wide: Tensor = local.to(dtype) if not self.total else _Fetched.apply(local, self, dtype)
        return wide


class _Fetched(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, local: Tensor, halo: RowHalo, dtype: torch.dtype) -> Tensor:
        ctx.halo, ctx.dtype = halo, local.dtype
        return halo.fetch(local, 0).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _GivenBack.apply(grad, ctx.halo, ctx.dtype), None, None


class _GivenBack(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, room: Tensor, halo: RowHalo, dtype: torch.dtype) -> Tensor:
        ctx.halo, ctx.dtype = halo, room.dtype
        return halo.give_back(room.clone(), 0).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Fetched.apply(grad, ctx.halo, ctx.dtype), None, None
