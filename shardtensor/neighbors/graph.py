"""Graphs on one process: who is next to whom, how far apart nodes are, and where to divide them.

A graph without positions gets coordinates: each node's distances, in edges, from a few nodes that lie far apart. On a
grid the distances from two corners add up to the one coordinate, and their difference is the other. On other meshes
these are nearly straight, too. So all columns, sums and differences are tried, and the order is taken that cuts the
fewest edges. Then columns are added to it as long as that cuts fewer. At last nodes on the two sides change places,
those first that gain most by it. Everything is counted in whole numbers, so all machines come to the same partition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from .bisection import Order, smallest

_PIVOTS = 8


def adjacency(edge_index: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Each node's neighbours in either direction, without itself: where they start, ``(n + 1,)``, and which they are.

    Example:
        >>> [t.tolist() for t in adjacency(torch.tensor([[0, 1, 1], [1, 0, 2]]), 3)]
        [[0, 1, 3, 4], [1, 0, 2, 1]]
    """
    a, b = edge_index[:, edge_index[0] != edge_index[1]]
    pairs: Tensor = torch.unique(torch.cat([a * n + b, b * n + a]))
    starts = torch.searchsorted(pairs, torch.arange(n + 1, device=pairs.device) * n)
    return starts, pairs % n


def distances_from(start: int, starts: Tensor, neighbors: Tensor) -> Tensor:
    """The distance of each node from one, in edges; twice the largest distance for nodes that cannot be reached."""
    unseen = torch.iinfo(torch.int64).max
    n, level = len(starts) - 1, 0
    found = torch.full((n,), unseen, device=starts.device)
    here = torch.tensor([start], device=starts.device)
    while len(here):
        found[here] = level
        level += 1
        degrees = starts[here + 1] - starts[here]
        first = starts[here].repeat_interleave(degrees)
        within = torch.arange(len(first), device=first.device)
        within = within - (degrees.cumsum(0) - degrees).repeat_interleave(degrees)
        following = neighbors[first + within]
        here = torch.unique(following[found[following] == unseen])
    return found.masked_fill(found == unseen, 2 * level)


def graph_coordinates(starts: Tensor, neighbors: Tensor) -> Tensor:
    """Coordinates of the nodes, their distances from a few of them: ``(n, columns)``, int64."""
    columns: list[Tensor] = []
    nearest = distances_from(0, starts, neighbors)
    while len(columns) < _PIVOTS:
        column = distances_from(int(nearest.argmax()), starts, neighbors)
        nearest = column if not columns else torch.minimum(nearest, column)
        columns.append(column)
        if not bool(nearest.any()):
            break
    return torch.stack(columns, 1)


def directions(columns: Tensor) -> Iterator[Tensor]:
    """The columns, and sums and differences of two of them."""
    several = columns.unbind(1)
    yield from several
    for a, b in combinations(several, 2):
        yield a + b
        yield a - b


class _Division(NamedTuple):
    """Nodes on two sides.

    Attributes:
        values: by which they were divided, ``(n,)``.
        side: True for those on the second one.
        cut: how many edges are between the sides.
    """

    values: Tensor
    side: Tensor
    cut: int


def smallest_cut(edge_index: Tensor, n: int) -> Order:
    """For :func:`bisected`: the division that cuts few edges."""
    place = torch.empty(n, dtype=torch.int64, device=edge_index.device)

    def order(members: Tensor, columns: Tensor, first: int) -> Tensor:
        place.fill_(-1)
        place[members] = torch.arange(len(members), device=place.device)
        ends = place[edge_index]
        a, b = ends[:, (ends >= 0).all(0)]

        def fewest(divisions: Iterable[Tensor], best: _Division | None = None) -> _Division:
            for values in divisions:
                side = ~smallest(values, first)
                cut = int((side[a] != side[b]).sum())
                if best is None or cut < best.cut:
                    best = _Division(values, side, cut)
            assert best is not None
            return best

        best, before = fewest(directions(columns)), None
        while best is not before:
            before, values = best, best.values
            tilted = (t for column in columns.unbind(1) for t in (values + column, values - column))
            best = fewest(tilted, best)
        return _swapped(best, a, b).long()

    return order


def _swapped(division: _Division, a: Tensor, b: Tensor) -> Tensor:
    """The sides, after nodes have changed places in pairs, all at once that seem to gain, or the better half of them.

    Args:
        a, b: the nodes at the two ends of each edge.
    """
    side, cut = division.side, division.cut
    most = len(side)
    while most:
        between = (side[a] != side[b]).long() * 2 - 1  # what both ends gain where one of them changes sides
        gain = torch.zeros_like(side, dtype=torch.int64).index_add_(0, a, between).index_add_(0, b, between)
        each = ((side == which).nonzero().squeeze(1) for which in (False, True))
        left, right = (t[gain[t].argsort(descending=True, stable=True)] for t in each)
        pairs = min(len(left), len(right))
        count = min(most, int((gain[left[:pairs]] + gain[right[:pairs]] > 0).sum()))
        changed = side.clone()
        changed[left[:count]], changed[right[:count]] = True, False
        fewer = int((changed[a] != changed[b]).sum())
        if fewer < cut:
            side, cut = changed, fewer
        else:  # neighbours gain by it only if the other one stays
            most = count // 2
    return side
