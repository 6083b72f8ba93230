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

from ..._compat import constant_like, untraced
from ...layout.geometry import Interval, length
from ..common.alignment import wide_dtype
from .window import Neighborhood, Tile

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
    everything = key_value.flatten(1, len(dims))
    if additional is not None:
        everything = torch.cat([everything, additional], 1)
    plan = _plan(dims, 0 if additional is None else additional.shape[1], len(query), query.device)
    boxes = [query]
    for i, (order, widths) in enumerate(zip(plan.order, plan.widths), 1):
        ordered = boxes if order is None else [box.index_select(i, constant_like(order, box)) for box in boxes]
        boxes = [part for box in ordered for part in box.split_with_sizes(widths, i)]
    keys = constant_like(plan.keys, query)
    # All copies at once: their gradients are added up in one go, too.
    gathered = everything.flatten(0, 1).index_select(0, keys).split_with_sizes([kind.keys for kind in plan.kinds])
    results = [_attend(*of_kind, scale, return_lse) for of_kind in zip(boxes, gathered, plan.kinds)]
    return tuple(_joined(parts, plan) for parts in zip(*results))


@dataclass(frozen=True, slots=True)
class _Kind:
    """Tiles that look alike, a box of them.

    Attributes:
        tiles, length: per dim, how many tiles there are, and how many queries a tile has.
        keys: how many keys are copied for all of them.
        mask: ``(queries of a tile, keys of a tile)``, True where the query sees the key; None where all see all.
    """

    tiles: tuple[int, ...]
    length: tuple[int, ...]
    keys: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """Everything about the tiles that follows from the dims.

    Attributes:
        order: per dim, the queries in the order of the kinds; None where that is their own.
        back: per dim, the inverse.
        widths: per dim, how many queries each kind has.
        kinds: those of all dims together, the last dim's varying fastest.
        keys: for each kind, batch entry, tile and key, its index in the flattened keys.
    """

    order: tuple[Tensor | None, ...]
    back: tuple[Tensor | None, ...]
    widths: tuple[list[int], ...]
    kinds: tuple[_Kind, ...]
    keys: Tensor


@lru_cache(maxsize=32)  # few, as the indices of a large map take memory
@untraced()
@torch.inference_mode(False)  # a plan that inference makes first must serve training, too
def _plan(dims: tuple[Dim, ...], additional: int, batch: int, device: torch.device) -> _Plan:
    of_dims = [_tiles_of(dim, _tile_length(dim, len(dims))) for dim in dims]
    sizes = [length(dim.keys) for dim in dims]
    extra = math.prod(sizes) + torch.arange(additional)
    entries = torch.arange(batch)[:, None, None] * (math.prod(sizes) + additional)
    kinds, keys = [], []
    for of_kind in itertools.product(*of_dims):
        at = _flat_indices([of_dim.keys for of_dim in of_kind], sizes)
        at = (entries + torch.cat([at, extra.expand(len(at), -1)], 1)).flatten()
        mask = F.pad(_outer([of_dim.mask for of_dim in of_kind]), (0, additional), value=True)
        keys.append(at)
        kinds.append(
            _Kind(
                tiles=tuple(of_dim.number for of_dim in of_kind),
                length=tuple(len(of_dim.mask) for of_dim in of_kind),
                keys=at.numel(),
                mask=None if mask.all() else mask.to(device),
            )
        )
    orders = [torch.cat([of_kind.queries for of_kind in of_dim]) for of_dim in of_dims]
    identity = [bool((order.diff() == 1).all()) for order in orders]
    return _Plan(
        order=tuple(None if same else order.to(device) for same, order in zip(identity, orders)),
        back=tuple(None if same else order.argsort().to(device) for same, order in zip(identity, orders)),
        widths=tuple([of_kind.queries.numel() for of_kind in of_dim] for of_dim in of_dims),
        kinds=tuple(kinds),
        keys=torch.cat(keys).to(device),
    )


class _KindOfDim(NamedTuple):
    """Tiles of one dim that look alike.

    Attributes:
        number: of the tiles.
        queries: the places of all their queries among this rank's.
        keys: ``(tiles, keys of a tile)``, the places of their keys among those at hand.
        mask: ``(queries of a tile, keys of a tile)``, True where the query sees the key.
    """

    number: int
    queries: Tensor
    keys: Tensor
    mask: Tensor


def _tiles_of(dim: Dim, most: int) -> list[_KindOfDim]:
    """The tiles of one dim, of at most ``most`` queries, by kind."""
    return [
        _KindOfDim(
            number=len(tiles),
            queries=_places([t.query for t in tiles], len(tiles[0].windows), dim, dim.queries).flatten(),
            keys=_places([t.key for t in tiles], tiles[0].keys, dim, dim.keys),
            mask=_mask(tiles[0]),
        )
        for tiles in _kinds(dim, most)
    ]


def _tile_length(dim: Dim, ndim: int) -> int:
    """Queries per tile: short tiles copy each key more often, long ones compute more products that are masked."""
    window = dim.neighborhood
    if window.everywhere:
        return length(dim.queries)
    most = max((32, 8, 4)[ndim - 1], 3 * window.kernel // 4)
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
    """The outputs of one kind of tiles: its box of the queries, the keys that are copied for it."""
    n, batch, (heads, head_dim) = len(kind.tiles), len(query), query.shape[-2:]
    split = [entry for pair in zip(kind.tiles, kind.length) for entry in pair]
    tiles_first = [0, *range(1, 2 * n, 2), *range(2, 2 * n + 1, 2), 2 * n + 1, 2 * n + 2]
    tiles = query.reshape(batch, *split, heads, head_dim).permute(tiles_first)
    q = tiles.reshape(-1, math.prod(kind.length), heads, head_dim)
    widths = [head_dim, key_value.shape[-1] - head_dim]
    k, v = key_value.view(len(q), -1, *key_value.shape[1:]).split_with_sizes(widths, -1)
    attention = _with_lse if return_lse else _without_lse
    mask = None if kind.mask is None else constant_like(kind.mask, q)
    results = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, scale)
    dims_first = [0, *(d for i in range(n) for d in (1 + i, 1 + n + i)), 2 * n + 1, 2 * n + 2]
    return tuple(
        r.transpose(1, 2)
        .reshape(batch, *kind.tiles, *kind.length, heads, r.shape[-1])
        .permute(dims_first)
        .reshape(*query.shape[:-1], r.shape[-1])
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


def _joined(parts: Sequence[Tensor], plan: _Plan) -> Tensor:
    """The boxes of all kinds as one tensor, the queries in their own order."""
    for i, (back, widths) in reversed(list(enumerate(zip(plan.back, plan.widths), 1))):
        rows = [parts[at : at + len(widths)] for at in range(0, len(parts), len(widths))]
        joined = [row[0] if len(row) == 1 else torch.cat(list(row), i) for row in rows]
        parts = joined if back is None else [part.index_select(i, constant_like(back, part)) for part in joined]
    (result,) = parts
    return result


def _nothing(query: Tensor, key_value: Tensor, additional: Tensor | None, return_lse: bool) -> tuple[Tensor, ...]:
    """No outputs, but part of the graph: this rank takes part in the communication of the backward pass."""
    inputs = [query, key_value] if additional is None else [query, key_value, additional]
    zero = sum((t.sum(dtype=torch.float32) for t in inputs), query.new_zeros((), dtype=torch.float32))
    out = zero.to(query.dtype).expand(*query.shape[:-1], key_value.shape[-1] - query.shape[-1])
    if not return_lse:
        return (out,)
    return out, zero.to(wide_dtype(query.dtype)).expand(*query.shape[:-1], 1)
