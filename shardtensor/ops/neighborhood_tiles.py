"""Neighborhood attention of plain tensors in tiles: for every device and floating-point dtype, with gradients.

[Note: tiles] The queries of a dilation group that lie side by side see nearly the same keys. So they are taken in tiles
of a few per dim; the keys that any query of a tile sees are copied side by side, and torch's attention works on the
tile, with a mask that leaves each query its own window. Almost all tiles look alike, and those at the ends fall into
few kinds; each kind is one call with one mask.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..geometry import Interval, length
from .neighborhood_geometry import Neighborhood, Tile
from .operands import wide_dtype

__all__ = ["Dim", "tiled_attention"]


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
    n = len(dims)
    everything = key_value.flatten(1, n)
    if additional is not None:
        everything = torch.cat([everything, additional], 1)
    plan = _plan(dims, 0 if additional is None else additional.shape[1], query.device)
    for i, order in enumerate(plan.order):
        query = query if order is None else query.index_select(1 + i, order)
    results = [_attend(query, everything, kind, scale, return_lse) for kind in plan.kinds]
    return tuple(_joined(pieces, plan) for pieces in zip(*results))


@dataclass(frozen=True, slots=True)
class _Kind:
    """Tiles that look alike.

    Attributes:
        start, tiles, length: per dim, where their queries begin among the ordered ones, how many tiles there are, and
            how many queries a tile has.
        keys: ``(tiles, keys of a tile)``, indices into the flattened keys.
        mask: ``(queries of a tile, keys of a tile)``, True where the query sees the key; None where all see all.
    """

    start: tuple[int, ...]
    tiles: tuple[int, ...]
    length: tuple[int, ...]
    keys: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """Everything about the tiles that follows from the dims.

    Attributes:
        order: per dim, the queries in the order of the kinds; None where that is their own.
        back: per dim, the inverse.
        counts: per dim, how many kinds of tiles there are.
        kinds: those of all dims together, the last dim's varying fastest.
    """

    order: tuple[Tensor | None, ...]
    back: tuple[Tensor | None, ...]
    counts: tuple[int, ...]
    kinds: tuple[_Kind, ...]


@lru_cache(maxsize=256)
def _plan(dims: tuple[Dim, ...], additional: int, device: torch.device) -> _Plan:
    kinds_of = [_kinds(dim, _tile_length(dim, len(dims))) for dim in dims]
    orders, starts = [], []
    for dim, kinds in zip(dims, kinds_of):
        rows = [_places([t.query for t in kind], len(kind[0].windows), dim, dim.queries).flatten() for kind in kinds]
        starts.append(list(itertools.accumulate((row.numel() for row in rows[:-1]), initial=0)))
        orders.append(torch.cat(rows))
    keys_at = [
        [_places([t.key for t in kind], kind[0].keys, dim, dim.keys) for kind in kinds]
        for dim, kinds in zip(dims, kinds_of)
    ]
    masks = [[_mask(kind[0]) for kind in kinds] for kinds in kinds_of]
    sizes = [length(dim.keys) for dim in dims]
    combined = []
    for choice in itertools.product(*(range(len(kinds)) for kinds in kinds_of)):
        chosen = [kinds_of[i][c] for i, c in enumerate(choice)]
        keys = _flat_indices([keys_at[i][c] for i, c in enumerate(choice)], sizes)
        extra = math.prod(sizes) + torch.arange(additional)
        keys = torch.cat([keys, extra.expand(len(keys), -1)], 1)
        mask = _outer([masks[i][c] for i, c in enumerate(choice)])
        mask = F.pad(mask, (0, additional), value=True)
        combined.append(
            _Kind(
                start=tuple(starts[i][c] for i, c in enumerate(choice)),
                tiles=tuple(len(kind) for kind in chosen),
                length=tuple(len(kind[0].windows) for kind in chosen),
                keys=keys.to(device),
                mask=None if mask.all() else mask.to(device),
            )
        )
    identity = [bool((order.diff() == 1).all()) for order in orders]
    return _Plan(
        order=tuple(None if same else order.to(device) for same, order in zip(identity, orders)),
        back=tuple(None if same else order.argsort().to(device) for same, order in zip(identity, orders)),
        counts=tuple(len(kinds) for kinds in kinds_of),
        kinds=tuple(combined),
    )


def _tile_length(dim: Dim, ndim: int) -> int:
    """Queries per tile: short tiles copy each key more often, long ones compute more products that are masked."""
    window = dim.neighborhood
    if window.everywhere:
        return length(dim.queries)
    most = max((32, 8, 4)[ndim - 1], window.kernel // 2)
    return -(-most // window.stride) * window.stride  # so that all tiles begin alike


def _kinds(dim: Dim, most: int) -> list[list[Tile]]:
    found: dict[object, list[Tile]] = {}
    for tile in dim.neighborhood.tiles(dim.queries, most):
        found.setdefault((tile.keys, tile.windows), []).append(tile)
    return list(found.values())


def _places(firsts: Sequence[int], count: int, dim: Dim, held: Interval) -> Tensor:
    """``(tiles, count)``: places, in what is held, of the ``count`` indices of each tile."""
    return torch.tensor(firsts)[:, None] - held[0] + dim.neighborhood.dilation * torch.arange(count)


def _mask(tile: Tile) -> Tensor:
    key = torch.arange(tile.keys)
    first, stop = torch.tensor(tile.windows).unbind(1)
    return (first[:, None] <= key) & (key < stop[:, None])


def _flat_indices(places: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """From ``(tiles, keys)`` of places in each dim to those of all dims together, in the flattened tensor."""
    result = places[0]
    for at, size in zip(places[1:], sizes[1:]):
        result = (result[:, None, :, None] * size + at[:, None, :]).flatten(2).flatten(0, 1)
    return result


def _outer(masks: Sequence[Tensor]) -> Tensor:
    result = masks[0]
    for mask in masks[1:]:
        result = (result[:, None, :, None] & mask[:, None, :]).flatten(2).flatten(0, 1)
    return result


def _attend(query: Tensor, key_value: Tensor, kind: _Kind, scale: float, return_lse: bool) -> tuple[Tensor, ...]:
    """The outputs of one kind of tiles, as a box of the ordered queries."""
    n, batch, (heads, head_dim) = len(kind.tiles), query.shape[0], query.shape[-2:]
    for i, (start, tiles, size) in enumerate(zip(kind.start, kind.tiles, kind.length)):
        query = query.narrow(1 + i, start, tiles * size)
    split = [entry for pair in zip(kind.tiles, kind.length) for entry in pair]
    tiles_first = [0, *range(1, 2 * n, 2), *range(2, 2 * n + 1, 2), 2 * n + 1, 2 * n + 2]
    query = query.reshape(batch, *split, heads, head_dim).permute(tiles_first)
    q = query.reshape(-1, math.prod(kind.length), heads, head_dim)
    gathered = key_value.index_select(1, kind.keys.flatten())
    kv = gathered.view(len(q), -1, *key_value.shape[2:])
    k, v = kv[..., :head_dim], kv[..., head_dim:]
    attention = _with_lse if return_lse else _without_lse
    results = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), kind.mask, scale)
    dims_first = [0, *(d for i in range(n) for d in (1 + i, 1 + n + i)), 2 * n + 1, 2 * n + 2]
    box = [tiles * size for tiles, size in zip(kind.tiles, kind.length)]
    return tuple(
        r.transpose(1, 2)
        .reshape(batch, *kind.tiles, *kind.length, heads, r.shape[-1])
        .permute(dims_first)
        .reshape(batch, *box, heads, r.shape[-1])
        for r in results
    )


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


def _joined(pieces: Sequence[Tensor], plan: _Plan) -> Tensor:
    """The boxes of all kinds as one tensor, the queries in their own order."""
    for i in reversed(range(len(plan.counts))):
        count = plan.counts[i]
        pieces = [torch.cat(list(pieces[at : at + count]), 1 + i) for at in range(0, len(pieces), count)]
    (result,) = pieces
    for i, back in enumerate(plan.back):
        result = result if back is None else result.index_select(1 + i, back)
    return result


def _nothing(query: Tensor, key_value: Tensor, additional: Tensor | None, return_lse: bool) -> tuple[Tensor, ...]:
    """No outputs, but part of the graph: this rank takes part in the communication of the backward pass."""
    inputs = [query, key_value] if additional is None else [query, key_value, additional]
    zero = sum((t.sum() for t in inputs), query.new_zeros(()))
    out = zero.expand(*query.shape[:-1], key_value.shape[-1] - query.shape[-1])
    if not return_lse:
        return (out,)
    return out, zero.to(wide_dtype(query.dtype)).expand(*query.shape[:-1], 1)
