"""Neighborhood attention of plain tensors in tiles: for every device and floating-point dtype, with gradients.

The queries of a dilation group that lie side by side see nearly the same keys. So they are taken in tiles of a few per
dim. The keys that any query of a tile sees are copied side by side, and torch's attention works on the tile, with a
mask that leaves each query its own window. Almost all tiles look alike, and those at the ends fall into few kinds. Each
kind is one call with one mask.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._compat import constant_like, hidden_from_program
from ...layout.intervals import Interval, length
from ..common.alignment import wide_dtype

# -- window ------------------------------------------------------------------------------------------------------------

# Who attends to whom in neighborhood attention, along one dim: integers only.
#
# The rule is natten's. A dilation splits the dim into *groups* of every ``dilation``-th index, which do not see each
# other. Within its group an index has a *position*. ``stride`` consecutive positions share the window of their leader.
# A window has ``kernel`` positions; at an end of the dim it is shifted inwards, not shortened. A causal window ends at
# the query itself, and is cut off at the beginning of the dim. Windows of several dims make a box.
#
# ::
#
#     size 7, kernel 3        dilation 2, kernel 3    stride 2, kernel 3      causal, kernel 3
#     0  x x x . . . .        x . x . x . .           x x x . . . .           x . . . . . .
#     1  x x x . . . .        . x . x . x .           x x x . . . .           x x . . . . .
#     2  . x x x . . .        x . x . x . .           . . x x x . .           x x x . . . .
#     3  . . x x x . .        . x . x . x .           . . x x x . .           . x x x . . .
#     4  . . . x x x .        . . x . x . x           . . . . x x x           . . x x x . .
#     5  . . . . x x x        . x . x . x .           . . . . x x x           . . . x x x .
#     6  . . . . x x x        . . x . x . x           . . . . x x x           . . . . x x x


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
        """The first and the last index that a query attends to; those between are ``dilation`` apart.

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


# -- tiled -------------------------------------------------------------------------------------------------------------


class Dim(NamedTuple):
    """One dim of the tensors at hand.

    Attributes:
        neighborhood: its windows.
        queries: the global interval of the queries.
        keys: the global interval of the keys and values, which holds what those queries see.
    """

    neighborhood: Neighborhood
    queries: Interval
    keys: Interval


def tiled_attention(
    query: Tensor, key_value: Tensor, dims: tuple[Dim, ...], additional: Tensor | None, scale: float, return_lse: bool
) -> tuple[Tensor, ...]:
    """Neighborhood attention of some queries. Differentiable.

    Args:
        query: ``(batch, *queries, heads, head_dim)``.
        key_value: ``(batch, *keys, heads_kv, head_dim + head_dim_v)``, keys and values side by side; ``heads_kv``
            divides ``heads``.
        dims: which queries and keys these are.
        additional: ``(batch, any, heads_kv, head_dim + head_dim_v)``, keys and values that every query sees besides.
        scale: of the products of queries and keys.
        return_lse: return the logarithm of each softmax's denominator as well.

    Returns:
        ``(batch, *queries, heads, head_dim_v)``, and, if asked for, ``(batch, *queries, heads, 1)``.
    """
    if 0 in query.shape:
        return _nothing(query, key_value, additional, return_lse)
    everything = key_value.flatten(1, len(dims))
    if additional is not None:
        everything = torch.cat([everything, additional], 1)
    plan = _plan(dims, 0 if additional is None else additional.shape[1], len(query), query.device)
    queries, keys = constant_like(plan.queries, query), constant_like(plan.keys, query)
    boxes = query.flatten(0, len(dims)).index_select(0, queries).split_with_sizes([kind.queries for kind in plan.kinds])
    # All copies at once: their gradients are added up in one go, too.
    gathered = everything.flatten(0, 1).index_select(0, keys).split_with_sizes([kind.keys for kind in plan.kinds])
    results = [_attend(*of_kind, scale, return_lse) for of_kind in zip(boxes, gathered, plan.kinds)]
    back = constant_like(plan.back, query)
    return tuple(torch.cat(parts).index_select(0, back).view(*query.shape[:-1], -1) for parts in zip(*results))


@dataclass(frozen=True, slots=True)
class _Kind:
    """Tiles that look alike.

    Attributes:
        length: how many queries a tile has.
        queries, keys: how many are copied for all of them.
        mask: ``(queries of a tile, keys of a tile)``, True where the query sees the key; None where all see all.
    """

    length: int
    queries: int
    keys: int
    mask: Tensor | None


class _Plan(NamedTuple):
    """Everything about the tiles that follows from the dims.

    Attributes:
        kinds: those of all dims together, the last dim's varying fastest.
        queries: for each kind, batch entry, tile and query, its index in the flattened queries.
        back: the inverse.
        keys: for each kind, batch entry, tile and key, its index in the flattened keys.
    """

    kinds: list[_Kind]
    queries: Tensor
    back: Tensor
    keys: Tensor


@lru_cache(maxsize=32)  # few, as the indices of a large map take memory
@hidden_from_program()
def _plan(dims: tuple[Dim, ...], additional: int, batch: int, device: torch.device) -> _Plan:
    of_dims = [_tiles_of(dim, _tile_length(dim, len(dims))) for dim in dims]
    query_sizes, sizes = [length(dim.queries) for dim in dims], [length(dim.keys) for dim in dims]
    extra = math.prod(sizes) + torch.arange(additional)
    entries = torch.arange(batch)[:, None, None]
    kinds, queries, keys = [], [], []
    for of_kind in itertools.product(*of_dims):
        at = _flat_indices([of_dim.queries for of_dim in of_kind], query_sizes)
        queries.append((entries * math.prod(query_sizes) + at).flatten())
        rows, at = at.shape[1], _flat_indices([of_dim.keys for of_dim in of_kind], sizes)
        at = torch.cat([at, extra.expand(len(at), -1)], 1)
        keys.append((entries * (math.prod(sizes) + additional) + at).flatten())
        mask = _outer(torch.logical_and, [of_dim.mask for of_dim in of_kind])
        mask = F.pad(mask, (0, additional), value=True)
        kinds.append(_Kind(rows, len(queries[-1]), len(keys[-1]), None if mask.all() else mask.to(device)))
    order = torch.cat(queries)
    return _Plan(kinds, order.to(device), order.argsort().to(device), torch.cat(keys).to(device))


class _KindOfDim(NamedTuple):
    """Tiles of one dim that look alike.

    Attributes:
        queries: ``(tiles, queries of a tile)``, the places of their queries among this rank's.
        keys: ``(tiles, keys of a tile)``, the places of their keys among those at hand.
        mask: ``(queries of a tile, keys of a tile)``, True where the query sees the key.
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor


def _tiles_of(dim: Dim, most: int) -> list[_KindOfDim]:
    """The tiles of one dim, of at most ``most`` queries, by kind."""
    found: dict[object, list[Tile]] = {}
    for tile in dim.neighborhood.tiles(dim.queries, most):
        found.setdefault((tile.keys, tile.windows), []).append(tile)
    return [
        _KindOfDim(
            queries=_places([t.query for t in tiles], len(tiles[0].windows), dim, dim.queries),
            keys=_places([t.key for t in tiles], tiles[0].keys, dim, dim.keys),
            mask=_mask(tiles[0]),
        )
        for tiles in found.values()
    ]


def _tile_length(dim: Dim, ndim: int) -> int:
    """Queries per tile: short tiles copy each key more often, long ones compute more products that are masked."""
    window = dim.neighborhood
    if window.everywhere:
        return length(dim.queries)
    most = max((32, 8, 4)[ndim - 1], 3 * window.kernel // 4)
    return -(-most // window.stride) * window.stride  # so that all tiles begin alike


def _places(firsts: Sequence[int], count: int, dim: Dim, held: Interval) -> Tensor:
    """``(tiles, count)``: places, in what is held, of the ``count`` indices of each tile."""
    return torch.tensor(firsts)[:, None] - held[0] + dim.neighborhood.dilation * torch.arange(count)


def _mask(tile: Tile) -> Tensor:
    key = torch.arange(tile.keys)
    first, stop = torch.tensor(tile.windows).unbind(1)
    return (first[:, None] <= key) & (key < stop[:, None])


def _flat_indices(places: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """From the places in each dim to those in the flattened tensor."""
    steps = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    return _outer(torch.add, [at * step for at, step in zip(places, steps)])


def _outer(function: Callable[[Tensor, Tensor], Tensor], of_dims: Sequence[Tensor]) -> Tensor:
    """From a matrix for each dim to one for all dims together, whose rows and columns are all pairs of theirs."""
    result = of_dims[0]
    for t in of_dims[1:]:
        result = function(result[:, None, :, None], t[:, None, :]).flatten(2).flatten(0, 1)
    return result


def _attend(query: Tensor, key_value: Tensor, kind: _Kind, scale: float, return_lse: bool) -> tuple[Tensor, ...]:
    """The outputs of one kind of tiles, row by row: of the queries and the keys that are copied for it."""
    q = query.view(-1, kind.length, *query.shape[1:])
    widths = [q.shape[-1], key_value.shape[-1] - q.shape[-1]]
    k, v = key_value.view(len(q), -1, *key_value.shape[1:]).split_with_sizes(widths, -1)
    attention = _with_lse if return_lse else _without_lse
    mask = None if kind.mask is None else constant_like(kind.mask, q)
    results = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, scale)
    return tuple(r.transpose(1, 2).flatten(0, 1) for r in results)


def _without_lse(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, ...]:
    grouped = q.shape[1] != k.shape[1]
    return (F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped),)


def _with_lse(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, ...]:
    """The same written out, as torch's attention does not tell."""
    dtype, wide = q.dtype, wide_dtype(q.dtype)
    group = q.shape[1] // k.shape[1]
    k, v = (t.to(wide).repeat_interleave(group, 1) for t in (k, v))
    scores = q.to(wide) @ k.mT * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    return ((scores - lse).exp() @ v).to(dtype), lse


def _nothing(query: Tensor, key_value: Tensor, additional: Tensor | None, return_lse: bool) -> tuple[Tensor, ...]:
    """No outputs, but part of the graph: this rank takes part in the communication of the backward pass."""
    inputs = [query, key_value] if additional is None else [query, key_value, additional]
    zero = sum((t.sum(dtype=torch.float32) for t in inputs), query.new_zeros((), dtype=torch.float32))
    out = zero.to(query.dtype).expand(*query.shape[:-1], key_value.shape[-1] - query.shape[-1])
    if not return_lse:
        return (out,)
    return out, zero.to(wide_dtype(query.dtype)).expand(*query.shape[:-1], 1)
