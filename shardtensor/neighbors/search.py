"""Searches among the points that are here: the k nearest of each query, or all within a distance. Exact.

Points are added in parts, in any order, and each part is forgotten when it has been searched. The results are the same
by every method and for every division into parts, see [Note: exact distances]: ties go to the point with the lower
number. So the method may be any rank's own choice: SciPy's trees on the CPU, where it is installed, and elsewhere runs
of neighbours with boxes, of which those are compared that are near enough. A tree only names candidates: it rounds in
its own way, so they are taken from a little farther than it says, and their distances are computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .bisection import Boxes, bisected, even_sizes, smallest, squared_distances

NOBODY = torch.iinfo(torch.int64).max  # stands where a query has fewer than k points yet

_BLOCK = 1 << 21  # distances that are held at a time
_RUN = 64  # points in a run, or more where there would be more runs than
_RUNS = 2048
_TREE_DIMS = 12  # in more coordinates a tree visits most points anyway
_TREE_POINTS = 64
# How much a distance of a tree may be off, several times over: a sum of d squares in any order, and a root.
_SLACK = 1e-13
_TINY = 1e-150  # below it squares lose digits
_HUGE = 1e150  # above it they overflow


@cache
def _trees() -> Any:
    """SciPy's class of trees, or None. Imported when it is first needed."""
    try:
        from scipy.spatial import cKDTree
    except ImportError:
        return None
    return cKDTree


def _tree_of(points: Tensor, queries: Tensor) -> Any:
    """A tree of the points, or None where it is of no use."""
    if points.device.type != "cpu" or points.shape[1] > _TREE_DIMS or len(points) < _TREE_POINTS:
        return None
    if _trees() is None or max(points.abs().max(), queries.abs().max()) > _HUGE:
        return None
    return _trees()(points.numpy())


def blocks(rows: int, columns: int) -> Iterator[slice]:
    """Slices of the rows of a matrix, of a limited number of elements."""
    step = max(1, _BLOCK // max(1, columns))
    return (slice(i, min(i + step, rows)) for i in range(0, rows, step))


class Nearest:
    """The ``k`` nearest points of each query.

    Args:
        queries: float64 ``(m, d)``.

    Attributes:
        squares, numbers: of those found so far, ``(m, k)`` in order: squared distances, and the points' numbers.
    """

    def __init__(self, queries: Tensor, k: int) -> None:
        self.queries, self.k = queries, k
        self.squares = queries.new_full((len(queries), k), torch.inf)
        self.numbers = torch.full((len(queries), k), NOBODY, device=queries.device)

    def limits(self) -> Tensor:
        """For each query the distance within which its nearest points are, ``(m,)``."""
        return self.squares[:, -1].sqrt()

    def add(self, points: Tensor, numbers: Tensor) -> None:
        """Search among further points, float64 ``(n, d)``, whose ``numbers`` ascend."""
        box = Boxes.around(points, [len(points)])
        near = Boxes(self.queries, self.queries).gaps(box) <= self.squares[:, -1]
        rows = near.nonzero().squeeze(1)
        if not len(points) or not len(rows):
            return
        tree = _tree_of(points, self.queries)
        if tree is None:
            self._add_by_runs(rows, points, numbers)
            return
        rows = rows[_by_cells(self.queries[rows])]
        for block in blocks(len(rows), 2 * self.k):
            some = rows[block]
            self._merge(some, *_nearest_by_tree(tree, self.queries[some], points, self.k), numbers)

    def _add_by_runs(self, rows: Tensor, points: Tensor, numbers: Tensor) -> None:
        """The runs of points are compared with those of queries from near to far, until they are too far."""
        of_points, of_queries = _Runs(points), _Runs(self.queries[rows])
        gaps, order = of_queries.gaps(of_points).sort(1)
        for part, gap, runs in zip(of_queries.parts, gaps, order.tolist(), strict=True):
            some = rows[part]
            queries, start, step = self.queries[some], 0, 2 + self.k // _RUN
            while start < len(runs) and bool(gap[start] <= self.squares[some, -1].max()):
                places = of_points.members(runs[start : start + step])
                squares, found = _nearest_of_all(queries, points[places], self.k)
                self._merge(some, squares, places[found], numbers)
                start, step = start + step, min(2 * step, max(1, _BLOCK // (len(some) * of_points.longest)))

    def _merge(self, rows: Tensor, squares: Tensor, places: Tensor, numbers: Tensor) -> None:
        """Take in what was found for some queries: places among the ``numbers``, in order."""
        found = numbers[places]
        if found.shape[1] < self.k or bool((self.numbers[rows, 0] != NOBODY).any()):
            squares = torch.cat([self.squares[rows], squares], 1)
            found = torch.cat([self.numbers[rows], found], 1)
            order = _in_order(squares, found)[:, : self.k]
            squares, found = squares.gather(1, order), found.gather(1, order)
        self.squares[rows], self.numbers[rows] = squares, found


def _by_cells(points: Tensor) -> Tensor:
    """The order of the cells of a grid over the first three coordinates.

    A tree takes half the time for queries in it: what it reads for one was read for the one before.
    """
    some = points[:, :3]
    low, high = some.aminmax(dim=0)
    cells = ((some - low) / (high - low).clamp(min=_TINY) * 31).long()
    places = torch.tensor([1024, 32, 1])[: some.shape[1]]
    return (cells * places).sum(1).argsort()


def _in_order(squares: Tensor, numbers: Tensor) -> Tensor:
    """The order of each row by distance, and where these are equal, by number."""
    by_number = numbers.argsort(dim=1)
    return by_number.gather(1, squares.gather(1, by_number).argsort(dim=1, stable=True))


def _nearest_by_tree(tree: Any, queries: Tensor, points: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The nearest ``min(k, n)`` points: squared distances and places, in order.

    Queries whose last candidate may be as near as their k-th point are asked again for twice as many.
    """
    n, m = len(points), len(queries)
    width = min(k, n)
    squares = queries.new_empty(m, width)
    places = torch.empty(m, width, dtype=torch.int64)
    rows, count = torch.arange(m), min(n, k + 1)
    while len(rows):
        again = [rows[:0]]
        for block in blocks(len(rows), count):
            some = rows[block]
            asked = queries[some]
            distances, found = (torch.from_numpy(t).view(-1, count) for t in tree.query(asked.numpy(), k=count))
            exact = squared_distances(asked.unsqueeze(1), points[found])
            ties = (exact.diff(dim=1) <= 0).any(1).nonzero().squeeze(1)  # or in another order than the tree says
            order = _in_order(exact[ties], found[ties])
            exact[ties], found[ties] = exact[ties].gather(1, order), found[ties].gather(1, order)
            squares[some], places[some] = exact[:, :width], found[:, :width]
            if count < n:
                again.append(some[distances[:, -1] <= distances[:, width - 1] * (1 + _SLACK) + _TINY])
        rows, count = torch.cat(again), min(n, 2 * count)
    return squares, places


def _nearest_of_all(queries: Tensor, points: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The same by all distances. Of the points that are as far as the k-th the first ones are taken."""
    squares = squared_distances(queries.unsqueeze(1), points)
    places = torch.arange(len(points), device=points.device).expand_as(squares)
    if len(points) > k:
        places = smallest(squares, k).nonzero()[:, 1].view(-1, k)
        squares = squares.gather(1, places)
    order = squares.argsort(dim=1, stable=True)
    return squares.gather(1, order), places.gather(1, order)


class Within:
    """The points within a distance of each query, that distance included.

    Args:
        queries: float64 ``(m, d)``.
        most: of them for each query, the nearest ones; None: all.
        but: for each query the number of a point that is none of them; or None.
    """

    def __init__(self, queries: Tensor, r: float, most: int | None, but: Tensor | None = None) -> None:
        self.queries, self.r, self.most, self.but = queries, r, most, but
        none = torch.empty(0, dtype=torch.int64, device=queries.device)
        self._rows, self._numbers, self._squares = [none], [none], [queries.new_empty(0)]

    def limits(self) -> Tensor:
        """For each query the distance within which the points are, ``(m,)``."""
        return self.queries.new_full((len(self.queries),), self.r)

    def add(self, points: Tensor, numbers: Tensor) -> None:
        """Search among further points, float64 ``(n, d)``, whose ``numbers`` ascend."""
        box = Boxes.around(points, [len(points)])
        rows = (Boxes(self.queries, self.queries).gaps(box).sqrt() <= self.r).nonzero().squeeze(1)
        if not len(points) or not len(rows):
            return
        tree = _tree_of(points, self.queries)
        pairs = _pairs_by_runs(self.queries[rows], points, self.r) if tree is None else self._pairs_by_tree(rows, tree)
        for at, places in pairs:
            at = rows[at]
            squares = squared_distances(self.queries[at], points[places])
            near = squares.sqrt() <= self.r
            if self.but is not None:
                near &= self.but[at] != numbers[places]
            found = _sorted(at[near], numbers[places[near]], squares[near], self.most)
            for parts, part in zip((self._rows, self._numbers, self._squares), found, strict=True):
                parts.append(part)

    def _pairs_by_tree(self, rows: Tensor, tree: Any) -> Iterator[tuple[Tensor, Tensor]]:
        farthest = self.r * (1 + _SLACK) + _TINY
        for block in blocks(len(rows), 512):  # as many as a query may have, for all that is known
            other = _trees()(self.queries[rows[block]].numpy())
            pairs = other.sparse_distance_matrix(tree, farthest, output_type="ndarray")
            yield torch.from_numpy(pairs["i"].copy()) + block.start, torch.from_numpy(pairs["j"].copy())

    def found(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, numbers of points, and squared distances of all pairs, by query, distance and number."""
        return _sorted(torch.cat(self._rows), torch.cat(self._numbers), torch.cat(self._squares), self.most)


def _sorted(rows: Tensor, numbers: Tensor, squares: Tensor, most: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs by query, distance and number; of each query at most so many."""
    order = numbers.argsort(stable=True)
    order = order[squares[order].argsort(stable=True)]
    order = order[rows[order].argsort(stable=True)]
    if most is not None:
        ordered = rows[order]
        places = torch.arange(len(order), device=order.device)
        order = order[places - torch.searchsorted(ordered, ordered) < most]
    return rows[order], numbers[order], squares[order]


def _pairs_by_runs(queries: Tensor, points: Tensor, r: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Queries and places of points that may be within ``r``: a run of queries with all points of the runs near it."""
    of_points, of_queries = _Runs(points), _Runs(queries)
    near = of_queries.gaps(of_points).sqrt() <= r
    for part, row in zip(of_queries.parts, near, strict=True):
        places = of_points.members(row.nonzero().squeeze(1).tolist())
        for block in blocks(len(places), len(part)):
            some = places[block]
            squares = squared_distances(queries[part].unsqueeze(1), points[some])
            at, found = (squares.sqrt() <= r).nonzero().unbind(1)
            yield part[at], some[found]


class _Runs:
    """Points in runs of neighbours.

    Attributes:
        parts: the places of each run's points.
        longest: how many the longest run has.
    """

    def __init__(self, points: Tensor) -> None:
        sizes = even_sizes(len(points), max(1, min(_RUNS, len(points) // _RUN)))
        order = bisected(points, sizes)
        self.parts, self.longest = order.split_with_sizes(list(sizes)), sizes[0]
        self._boxes = Boxes.around(points[order], sizes)

    def gaps(self, others: _Runs) -> Tensor:
        """The least squared distances between these runs and others, ``(runs, others)``."""
        return self._boxes.at((slice(None), None)).gaps(others._boxes)

    def members(self, runs: Sequence[int]) -> Tensor:
        """The places of the points of some runs, in order."""
        places = torch.cat([self.parts[i] for i in runs]) if runs else self.parts[0][:0]
        return places.sort().values
