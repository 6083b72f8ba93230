"""Which points travel to which ranks, so that every query sees all that matter to it.

[Note: boxes] Each rank divides its queries and its points into runs of neighbours and puts a box around each. All ranks
gather the boxes, and how far the queries of each box look. From that all of them know more: a query looks no farther
than the farthest corners of boxes that hold k points. Then the owners of points send those that are near enough to a
box of queries, and tell all ranks before how many. No rank gets all points at once. If many points matter to many
ranks, as with points in random order, they travel in rounds, in which no rank gets more than the largest shard has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..communication.exchange import Exchange
from ..communication.redistribute import all_gather
from ..layout.intervals import boundaries_of
from .bisection import Boxes, bisected, even_sizes
from .search import Nearest, Within, blocks

_BOXES = 64  # of each rank, and of all of them together:
_ALL_BOXES = 1024
_TOGETHER = 1 << 12  # points that a rank may get in one round, where the largest shard has fewer


def search_all(search: Nearest | Within, points: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> bool:
    """Have every rank's ``search`` find what it looks for among the points of all ranks. Collective over the group.

    Args:
        points: this rank's, ``(n, d)``, of any floating-point dtype.
        sizes: how many each rank has; a point's number is its place among all of them.

    Returns:
        Whether all coordinates are finite. If not, on all ranks, nothing is sent but that.
    """
    rank, coordinates = dist.get_rank(group), points.double()
    count = min(_BOXES, max(1, _ALL_BOXES // len(sizes)))
    finite = bool(coordinates.isfinite().all() & search.queries.isfinite().all())
    first = boundaries_of(sizes)[rank]
    numbers = torch.arange(first, first + len(points), device=points.device)
    if finite:
        search.add(coordinates, numbers)
        runs = bisected(coordinates, even_sizes(len(points), count))
        known = _gathered(search, coordinates, runs, count, group)
    else:
        nothing = coordinates.new_full((count + 4 * count * points.shape[1],), torch.nan)  # as many numbers
        known = all_gather(nothing, group)
    if bool(known[:, 0].isnan().any()):
        return False
    interest = _Interest(known, sizes, count, search.k if isinstance(search, Nearest) else None)
    if not interest.between_ranks():
        return True
    chosen = [interest.chosen(coordinates, runs, rank, r) if r != rank else runs[:0] for r in range(len(sizes))]
    counts = all_gather(torch.tensor([len(c) for c in chosen], device=points.device), group).tolist()
    for steps in _rounds(counts, max(*sizes, _TOGETHER)):
        search.add(*_exchanged(points, numbers, chosen, counts, steps, rank, group))
    return True


# -- who is interested in what ----------------------------------------------------------------------------------------


def _gathered(search: Nearest | Within, points: Tensor, runs: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
    """What all ranks have to tell: how far the queries of each box look, boxes of queries, and boxes of points."""
    sizes, queries = even_sizes(len(search.queries), count), search.queries
    same = points.shape == queries.shape and torch.equal(points, queries)
    order = runs if same else bisected(queries, sizes)
    limits = search.limits()[order]
    farthest = [run.max() if len(run) else run.new_zeros(()) for run in limits.split_with_sizes(list(sizes))]
    ours = Boxes.around(queries[order], sizes)
    theirs = ours if same else Boxes.around(points[runs], even_sizes(len(points), count))
    row = [torch.stack(farthest), ours.low, ours.high, theirs.low, theirs.high]
    # A box of no points has infinite corners, and a query may look as far; only what is not a number says no.
    return all_gather(torch.cat([t.flatten() for t in row]), group)


class _Interest:
    """Which boxes of queries look as far as which boxes of points.

    Attributes:
        queries: boxes ``(ranks, count, d)``.
        limits: how far they look, ``(ranks, count)``.
        near: ``(ranks of queries, count, ranks of points, count)``.
    """

    def __init__(self, known: Tensor, sizes: Sequence[int], count: int, k: int | None) -> None:
        """From what all ranks have told; so it is the same on all of them.

        Args:
            k: how many points a query looks for, if it does not look for all.
        """
        ranks = len(sizes)
        d = (known.shape[1] // count - 1) // 4
        self.limits = known[:, :count]
        low, high, *of_points = known[:, count:].view(ranks, 4, count, d).unbind(1)
        self.queries, points = Boxes(low, high), Boxes(*(t.reshape(1, ranks * count, d) for t in of_points))
        each = self.queries.at((slice(None), slice(None), None)).flat()
        if k is not None:
            held = torch.tensor([n for size in sizes for n in even_sizes(size, count)], device=known.device)
            reaches, order = each.reaches(points).sort(1)
            enough = (held[order].cumsum(1) >= k).int().argmax(1, keepdim=True)
            self.limits = torch.minimum(self.limits, reaches.gather(1, enough).sqrt().view_as(self.limits))
        near = each.gaps(points).sqrt() <= self.limits.reshape(-1, 1)
        self.near = near.view(ranks, count, ranks, count)

    def between_ranks(self) -> bool:
        """Whether anybody is interested in points of another rank."""
        pairs = self.near.any(1).any(2)
        return bool((pairs & ~torch.eye(len(pairs), dtype=torch.bool, device=pairs.device)).any())

    def chosen(self, points: Tensor, runs: Tensor, owner: int, reader: int) -> Tensor:
        """The places, in order, of those of the owner's points that a rank is interested in."""
        near = self.near[reader, :, owner]
        count = near.shape[1]
        held = torch.tensor(even_sizes(len(points), count), device=points.device)
        some = runs[near.any(0).repeat_interleave(held)]
        looking = near.any(1)
        boxes, limits = self.queries.at((reader, looking)), self.limits[reader, looking]
        if not len(some) or not len(limits):
            return runs[:0]
        hit = []
        for block in blocks(len(some), len(limits)):
            here = points[some[block]].unsqueeze(1)
            hit.append((Boxes(here, here).gaps(boxes).sqrt() <= limits).any(1))
        return some[torch.cat(hit)].sort().values


# -- on the way -------------------------------------------------------------------------------------------------------


def _rounds(counts: Sequence[Sequence[int]], most: int) -> Iterator[list[int]]:
    """Steps around a ring, ``t`` from each rank to the ``t``-th after it, in rounds in which no rank gets too much.

    Args:
        counts: ``counts[s][r]`` points go from rank ``s`` to rank ``r``, none more than ``most``.

    Example:
        >>> list(_rounds([[0, 3, 0], [2, 0, 2], [0, 1, 0]], most=4)), list(_rounds([[0, 3], [0, 0]], most=4))
        ([[1, 2]], [[1]])
    """
    ranks = len(counts)
    steps: list[int] = []
    gets = [0] * ranks
    for t in range(1, ranks):
        more = [counts[(r - t) % ranks][r] for r in range(ranks)]
        if not any(more):
            continue
        if steps and max(a + b for a, b in zip(gets, more)) > most:
            yield steps
            steps, gets = [], [0] * ranks
        steps, gets = [*steps, t], [a + b for a, b in zip(gets, more)]
    if steps:
        yield steps


def _exchanged(
    points: Tensor,
    numbers: Tensor,
    chosen: Sequence[Tensor],
    counts: Sequence[Sequence[int]],
    steps: Sequence[int],
    rank: int,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """The points, in float64, and their numbers, that this rank gets in a round: a row of bytes for each point."""
    ranks = len(counts)
    coordinates = points.shape[1] * points.dtype.itemsize
    width = coordinates + numbers.dtype.itemsize

    table = [[n if (r - s) % ranks in steps else 0 for r, n in enumerate(row)] for s, row in enumerate(counts)]
    sends = [(r, (n, width)) for r, n in enumerate(table[rank]) if n]
    recvs = [(s, (row[rank], width)) for s, row in enumerate(table) if row[rank]]
    most_peers = max(sum(map(bool, line)) for line in (*table, *zip(*table)))
    pieces = [
        torch.cat([t[chosen[r]].contiguous().view(torch.uint8) for t in (points, numbers.unsqueeze(1))], 1)
        for r, _ in sends
    ]
    like = points.new_empty(0, dtype=torch.uint8)
    arrived = Exchange(sends, recvs, group, most_peers).start(pieces, like).wait()
    rows = torch.cat([like.view(0, width), *arrived])
    there, named = (t.clone(memory_format=torch.contiguous_format) for t in rows.tensor_split([coordinates], 1))
    return there.view(points.dtype).double(), named.view(numbers.dtype).squeeze(1)
