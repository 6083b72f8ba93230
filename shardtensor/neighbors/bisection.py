"""Points in runs of neighbours, boxes around them, and distances that are the same numbers wherever they are computed.

[Note: exact distances] Which point is nearer is decided by squared distances in float64, summed coordinate by
coordinate in their order, each step rounded by itself. So a pair has one squared distance, on every rank, device and by
every method, and equal ones are ties. Rounding is monotone. So the number that is computed in the same way for the gap
between two boxes is no greater than that of any pair of points in them, and the number for their farthest corners is no
less. What boxes rule out is ruled out exactly, ties included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

# Values by which points are ordered, given their numbers, their coordinates, and how many come first.
Order = Callable[[Tensor, Tensor, int], Tensor]


def even_sizes(n: int, parts: int) -> tuple[int, ...]:
    """Sizes that differ by one at most, the larger ones first.

    Example:
        >>> even_sizes(7, 3)
        (3, 2, 2)
    """
    return tuple(n // parts + (i < n % parts) for i in range(parts))


def squares(differences: Iterable[Tensor]) -> Tensor:
    """The sum of the squares of some tensors, in their order, see [Note: exact distances]."""
    first, *others = differences
    total = first * first
    for difference in others:
        total = total + difference * difference
    return total


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Of points ``(..., d)`` in float64 that broadcast against each other: ``(...)``. Differentiable.

    Example:
        >>> squared_distances(torch.zeros(2), torch.tensor([[3.0, 4.0], [1.0, 0.0]])).tolist()
        [25.0, 1.0]
    """
    return squares(x - y for x, y in zip(a.unbind(-1), b.unbind(-1), strict=True))


class Boxes:
    """Boxes ``(..., d)`` in float64 by their corners; those of no points have infinite ones the other way round."""

    def __init__(self, low: Tensor, high: Tensor) -> None:
        self.low, self.high = low, high

    @staticmethod
    def around(points: Tensor, sizes: Sequence[int]) -> Boxes:
        """Around runs of points of these sizes, ``(runs, d)``."""
        low = points.new_full((len(sizes), points.shape[1]), torch.inf)
        high = -low
        for i, run in enumerate(points.split_with_sizes(list(sizes))):
            if len(run):
                low[i], high[i] = run.aminmax(dim=0)
        return Boxes(low, high)

    def at(self, index: Any) -> Boxes:
        """Some of the boxes, or all with further dims."""
        return Boxes(self.low[index], self.high[index])

    def flat(self) -> Boxes:
        """The first two dims as one."""
        return Boxes(self.low.flatten(0, 1), self.high.flatten(0, 1))

    def gaps(self, other: Boxes) -> Tensor:
        """The least squared distances between points in the boxes; infinite for those of no points."""
        pairs = zip(*(t.unbind(-1) for t in (self.low, self.high, other.low, other.high)), strict=True)
        return squares(torch.maximum(a - d, c - b).clamp(min=0) for a, b, c, d in pairs)

    def reaches(self, other: Boxes) -> Tensor:
        """The greatest squared distances between points in the boxes; infinite for those of no points."""
        pairs = zip(*(t.unbind(-1) for t in (self.low, self.high, other.low, other.high)), strict=True)
        return squares(torch.maximum(b - c, d - a) for a, b, c, d in pairs)


def bisected(points: Tensor, sizes: Sequence[int], order: Order | None = None, start: Tensor | None = None) -> Tensor:
    """Points ``(n, d)`` divided into runs of neighbours: their numbers, run after run. Deterministic.

    They are divided in two again and again, by default where they are widest. Where there is an odd number of runs the
    two sides get the proportions of their runs.

    Args:
        sizes: of the runs; they add up to ``n``.
        order: the values by which they are divided, if not by the coordinate in which they are widest. Of equal values
            the first ones come first.
        start: in which order the points are at first, and within the runs at last.

    Example:
        >>> bisected(torch.tensor([[3.0], [0.0], [2.0], [1.0]]), (2, 2)).tolist()
        [1, 3, 0, 2]
    """
    result = torch.arange(len(points), device=points.device) if start is None else start.clone()
    waiting = [(0, tuple(sizes))]
    while waiting:
        begin, parts = waiting.pop()
        left, right = parts[: len(parts) // 2], parts[len(parts) // 2 :]
        length, first = sum(parts), sum(left)
        if not left or not length:
            continue
        if 0 < first < length:
            here = result[begin : begin + length]
            some = points[here]
            chosen = smallest(widest(some) if order is None else order(here, some, first), first)
            here.copy_(torch.cat([here[chosen], here[~chosen]]))
        waiting += [(begin, left), (begin + first, right)]
    return result


def smallest(values: Tensor, k: int) -> Tensor:
    """Which are the ``k`` smallest along the last dim, of equal ones the first: exactly ``k`` times True in each row.

    Example:
        >>> smallest(torch.tensor([2, 0, 2, 1, 2]), 3).tolist()
        [True, True, False, True, False]
    """
    last = values.topk(k, -1, largest=False, sorted=False).values.amax(-1, keepdim=True)
    smaller, equal = values < last, values == last
    left = k - smaller.sum(-1, keepdim=True)
    return smaller | (equal & (equal.cumsum(-1) <= left))


def lexicographic(columns: Tensor) -> Tensor:
    """The order of rows by the first column, where it is equal by the second, and then by the third."""
    order = torch.arange(len(columns), device=columns.device)
    for column in reversed(columns.unbind(1)[:3]):
        order = order[column[order].argsort(stable=True)]
    return order


def widest(points: Tensor) -> Tensor:
    """The coordinate in which the points lie farthest apart."""
    low, high = points.aminmax(dim=0)
    return points[:, int((high - low).argmax())]
