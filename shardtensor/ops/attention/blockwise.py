"""Which parts of a block of attention have to be computed, and how the results of blocks are put together.

With ``lse = log(sum(exp(scores)))`` of each block, a softmax over all keys is the mean of the softmaxes over the
blocks, weighted by ``exp(lse)``. The backward pass needs only the lse of the whole row: the probabilities in a block
are ``exp(scores - lse)``, so blocks are independent of each other. A row that sees nothing has lse -inf, and its result
is zero, as torch's is.

This is the online softmax of M. Milakov and N. Gimelshein, arXiv:1805.02867, and of FlashAttention, arXiv:2205.14135.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..._compat import recomputed
from ...layout.intervals import Interval, length
from ..common.alignment import cast
from .kernels import finite

_INF = float("inf")


class Piece(NamedTuple):
    """Rows and columns of a block that see each other, counted from the beginning of its rows and columns.

    Attributes:
        causal: the last row sees all of the columns, each before it one less; otherwise all rows see all.
    """

    rows: Interval
    columns: Interval
    causal: bool

    @property
    def scores(self) -> float:
        """How many there are."""
        rows, columns = length(self.rows), length(self.columns)
        return rows * (columns - (rows - 1) / 2 if self.causal else columns)


def pieces(
    rows: Sequence[Interval], columns: Sequence[Interval], shift: int | None, squares: bool = False
) -> list[Piece]:
    """What of a block has to be computed.

    Args:
        rows, columns: intervals of the sequences, in ascending order, that lie next to each other here.
        shift: row ``r`` sees the columns up to ``r + shift``; None: all of them.
        squares: what is causal has as many rows as columns.

    Example:
        >>> pieces([(3, 6)], [(0, 5)], 0)  # rows 3, 4, 5 see the columns up to their own
        [Piece(rows=(0, 2), columns=(0, 5), causal=True), Piece(rows=(2, 3), columns=(0, 5), causal=False)]
    """
    if shift is None:
        sizes = [sum(map(length, intervals)) for intervals in (rows, columns)]
        return [Piece((0, sizes[0]), (0, sizes[1]), False)] if all(sizes) else []
    found: list[Piece] = []
    for piece in _stairs(rows, columns, shift):
        wide = length(piece.columns) - length(piece.rows)
        if squares and piece.causal and wide:
            found.append(Piece(piece.rows, (0, wide), False))
            piece = piece._replace(columns=(wide, piece.columns[1]))
        found.append(piece)
    return found


def _stairs(rows: Sequence[Interval], columns: Sequence[Interval], shift: int) -> list[Piece]:
    """Rows that see equally many columns, or each one more than that before it; none sees one that a later does not."""
    found: list[Piece] = []
    start = 0
    for a, b in rows:
        first, stop = a + shift + 1, b + shift + 1  # how many columns of the whole sequence the rows see
        ends = {end + 1 for interval in columns for end in interval}
        points = sorted({first, stop, *(end for end in ends if first < end < stop)})
        for begin, end in zip(points, points[1:]):
            grows = any(c < begin <= d for c, d in columns)
            seen = [sum(max(0, min(n - c, d - c)) for c, d in columns) for n in (begin, end - 1)]
            at = start + begin - first, start + end - first
            if not seen[1]:
                continue
            piece = Piece(at, (0, seen[1]), grows and end - begin > 1)
            before = found[-1] if found else None
            if before is None or before.rows[1] != at[0]:
                found.append(piece)
            elif seen[0] == before.columns[1] and not before.causal and not piece.causal:
                found[-1] = before._replace(rows=(before.rows[0], at[1]))
            elif grows and seen[0] == before.columns[1] + 1 and (before.causal or length(before.rows) == 1):
                found[-1] = Piece((before.rows[0], at[1]), piece.columns, True)
            else:
                found.append(piece)
        start += b - a
    return found


class RunningSoftmax:
    """The sum of the results of blocks, weighted by their log-sum-exps, as they come.

    Args:
        query: of this rank.
        features: of a value.
        dtype: of sums.
        hides: whether rows of blocks may see nothing.
    """

    def __init__(self, query: Tensor, features: int, dtype: torch.dtype, hides: bool) -> None:
        self._query, self._features, self._dtype, self._hides = query, features, dtype, hides
        self._sums: tuple[Tensor, Tensor] | None = None

    def result(self) -> tuple[Tensor, Tensor]:
        """Result and log-sum-exp of all blocks."""
        if self._sums is None:
            *lead, rows, _ = self._query.shape
            # In memory as kernels give it, with the heads of a row next to each other.
            out = self._query.new_zeros((*lead[:-1], rows, *lead[-1:], self._features), dtype=self._dtype)
            lse = self._query.new_full((*lead, rows), -_INF, dtype=self._dtype)
            self._sums = out.transpose(-2, -3) if lead else out, lse
        return self._sums

    @recomputed(apart=True)
    def add(self, start: int, out: Tensor, lse: Tensor, *, apart: bool = False) -> None:
        """Take in a block's result for the rows from ``start`` on.

        Args:
            apart: the block's result is used elsewhere, so that it must not become the sum.
        """
        n, out = lse.shape[-1], cast(out, self._dtype)
        if self._sums is None and n == self._query.shape[-2]:
            self._sums = (out.clone(), lse.clone()) if apart else (out, lse)
            return
        sums = self.result()
        mine, total = sums[0].narrow(-2, start, n), sums[1].narrow(-1, start, n)
        both = torch.logaddexp(total, lse)
        mine.lerp_(out, (lse - (finite(both) if self._hides else both)).exp_().unsqueeze(-1))
        if total.shape == sums[1].shape:
            self._sums = sums[0], both
        else:
            total.copy_(both)
