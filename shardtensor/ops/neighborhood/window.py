"""Who attends to whom in neighborhood attention, along one dim: integers only.

[Note: windows] natten's rule. A dilation splits the dim into *groups* of every ``dilation``-th index, which do not see
each other; within its group an index has a *position*. ``stride`` consecutive positions share the window of their
leader. A window has ``kernel`` positions; at an end of the dim it is shifted inwards, not shortened. A causal window
ends at the query itself, and is cut off at the beginning of the dim. Windows of several dims make a box.

::

    size 7, kernel 3        dilation 2, kernel 3    stride 2, kernel 3      causal, kernel 3
    0  x x x . . . .        x . x . x . .           x x x . . . .           x . . . . . .
    1  x x x . . . .        . x . x . x .           x x x . . . .           x x . . . . .
    2  . x x x . . .        x . x . x . .           . . x x x . .           x x x . . . .
    3  . . x x x . .        . x . x . x .           . . x x x . .           . x x x . . .
    4  . . . x x x .        . . x . x . x           . . . . x x x           . . x x x . .
    5  . . . . x x x        . x . x . x .           . . . . x x x           . . . x x x .
    6  . . . . x x x        . . x . x . x           . . . . x x x           . . . . x x x
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...layout.geometry import Interval, length


@dataclass(frozen=True, slots=True)
class Tile:
    """Consecutive queries of one dilation group, and the keys that any of them sees.

    Attributes:
        query, key: global index of the first query and of the first key; the next ones follow ``dilation`` apart.
        keys: how many keys.
        windows: per query, the interval of those keys that it sees.
    """

    query: int
    key: int
    keys: int
    windows: tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class Neighborhood:
    """The windows of one dim.

    Attributes:
        size: global length of the dim, at least ``kernel * dilation``.
        kernel: indices in a window.
        stride: queries that share a window, at most ``kernel``.
        dilation: step between the indices of a window.
        causal: whether a query sees nothing behind itself.
    """

    size: int
    kernel: int
    stride: int = 1
    dilation: int = 1
    causal: bool = False

    def window(self, query: int) -> tuple[int, int]:
        """The first and the last index that a query sees; ``dilation`` apart from each other are those between.

        Example:
            >>> [Neighborhood(size=7, kernel=3).window(q) for q in (0, 3, 6)]
            [(0, 2), (2, 4), (4, 6)]
            >>> [Neighborhood(size=7, kernel=3, dilation=2).window(q) for q in (0, 3, 6)]
            [(0, 4), (1, 5), (2, 6)]
        """
        position, group = divmod(query, self.dilation)
        leader = self._leader(position, group)
        if self.causal:
            first, last = max(0, leader - self.kernel + 1), position
        else:
            first = min(max(leader - self.kernel // 2, 0), self._positions(group) - self.kernel)
            last = first + self.kernel - 1
        return first * self.dilation + group, last * self.dilation + group

    def reads(self, queries: Interval) -> Interval:
        """The interval of keys that the windows of some consecutive queries span.

        Example:
            >>> n = Neighborhood(size=16, kernel=5)
            >>> n.reads((0, 2)), n.reads((6, 8)), n.reads((15, 16)), n.reads((3, 3))
            ((0, 5), (4, 10), (11, 16), (0, 0))
        """
        if not length(queries):
            return (0, 0)
        start, stop = queries
        # Within a group windows move on with their queries, so each group's first and last query tell.
        first = min(self.window(q)[0] for q in range(start, min(stop, start + self.dilation)))
        last = max(self.window(q)[1] for q in range(max(start, stop - self.dilation), stop))
        return (first, last + 1)

    def slice_for(self, queries: Interval) -> Interval:
        """An interval that, taken for the global dim, leaves the windows of some queries as they are.

        It begins where groups and strides begin, and holds the leaders, because the end of a dim moves them. It is
        longer than a window, if the dim is: natten takes no shorter one, and one as long for ordinary attention.

        Example:
            >>> Neighborhood(size=16, kernel=4, stride=3).slice_for((7, 8))
            (3, 10)
        """
        if not length(queries):
            return (0, 0)
        start, stop = self.reads(queries)
        for q in range(max(queries[0], queries[1] - self.dilation), queries[1]):
            position, group = divmod(q, self.dilation)
            stop = max(stop, self._leader(position, group) * self.dilation + group + 1)
        least, step = min(self.size, self.kernel * self.dilation + 1), self.stride * self.dilation
        stop = min(self.size, max(stop, start + least))
        start = max(0, min(start, stop - least))
        return (start // step * step, stop)

    def tiles(self, queries: Interval, most: int) -> Iterator[Tile]:
        """The queries in tiles of at most ``most``, group by group."""
        start, stop = queries
        for first in range(start, min(stop, start + self.dilation)):
            for query in range(first, stop, most * self.dilation):
                members = range(query, min(stop, query + most * self.dilation), self.dilation)
                windows = [self.window(q) for q in members]
                key, last = windows[0][0], windows[-1][1]
                seen = tuple(((a - key) // self.dilation, (b - key) // self.dilation + 1) for a, b in windows)
                yield Tile(query, key, (last - key) // self.dilation + 1, seen)

    @property
    def everywhere(self) -> bool:
        """Whether every window is all of its group, so that all queries of a group see the same keys."""
        return not self.causal and self.kernel == self._positions(0)

    def _positions(self, group: int) -> int:
        """How many positions a dilation group has."""
        return -(-(self.size - group) // self.dilation)

    def _leader(self, position: int, group: int) -> int:
        """The position whose window this one shares."""
        begin = position // self.stride * self.stride
        middle = self.stride - 1 if self.causal else self.stride // 2
        return min(begin + middle, self._positions(group) - 1)
