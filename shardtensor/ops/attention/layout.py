"""The layouts that the operands of attention need, and which ranks exchange what. From specs alone.

For each mesh dim one of these kinds (dims counted from the end: -3 heads and before it the batch, -2 the sequence):

| kind | query | key, value | result | sent |
|---|---|---|---|---|
| batch | batch or heads | alike | alike | nothing |
| rows | sequence | replicated | as the query | nothing |
| keys | replicated | sequence | replicated | two all-reduces: a number per row, and the result |
| both | sequence | sequence | as the query | keys and values around a ring, or an all-to-all each way |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from torch.distributed.tensor import Replicate, Shard

from ...errors import refuse
from ...geometry import Interval, intervals_of, length
from ...spec import ShardTensorSpec
from ..common.ring import Ring, ring_of
from ..shape.view import whole_blocks
from .blockwise import pieces

__all__ = ["Layout", "layout_of"]

_FEATURES, _SEQUENCE, _HEADS = -1, -2, -3

Cut = tuple[int, tuple[int, ...]] | None  # tensor dim, counted from the end, and sizes; None: replicated


@dataclass(frozen=True, slots=True)
class Layout:
    """The layouts of operands and result of one call, and who computes what.

    Attributes:
        targets: specs of query, key, value and mask (None without one).
        out: placement and sizes of the result, per mesh dim.
        split: mesh dims whose ranks do different work.
        rows: the queries that this rank has.
        columns: the keys of each block: this rank's alone, or every rank's if they are sent around the ring.
        mask_start: the key to which the first column of this rank's mask belongs.
        mask_travels: the mask is sharded like the keys, has one row for all queries, and is sent along with them.
        mesh_dim: the one along which the kind is "keys" or "both".
        ring: set where keys are sent around.
        head_cuts: set where the heads are sharded instead: shard sizes of query, key and value along them.
    """

    targets: tuple[ShardTensorSpec | None, ...]
    out: tuple[tuple[Any, tuple[int, ...] | None], ...]
    split: tuple[int, ...]
    rows: Interval
    columns: tuple[Interval, ...]
    mask_start: int = 0
    mask_travels: bool = False
    mesh_dim: int | None = None
    ring: Ring | None = None
    head_cuts: tuple[tuple[int, ...], ...] | None = None


@lru_cache(maxsize=4096)
def layout_of(
    name: str,
    query: ShardTensorSpec,
    key: ShardTensorSpec,
    value: ShardTensorSpec,
    mask: ShardTensorSpec | None,
    shift: int | None,
    method: str,
) -> Layout:
    """The layout of a call; batch dims are equal except that keys and values may have fewer heads.

    Args:
        mask: of at least two dims.
        shift: which keys a query sees, see :func:`~.blockwise.pieces`.
        method: "auto", "ring" or "heads".

    Raises:
        UnsupportedSharding: sharded features, or two mesh dims that would have to shard the same dim.
    """
    operands = [query, key, value, mask]
    specs = [s for s in operands if s is not None]
    cuts: list[list[Cut]] = [[] for _ in operands]  # [operand][mesh dim]
    split = []
    both = mesh_dim = None
    for m in range(query.mesh.ndim):
        given = [None if s is None else _cut_of(s, m) for s in operands]
        if any(cut is not None and cut[0] == _FEATURES for cut in given[:3]):
            raise refuse(
                name,
                specs,
                f"mesh dim {m} shards the features, which every score needs unsharded",
                "redistribute to shard the sequence, the heads or the batch",
            )
        if any(given):
            split.append(m)
        for row, cut in zip(cuts, _one_mesh_dim(operands, given), strict=True):
            row.append(cut)
        if cuts[1][m] is not None and cuts[1][m][0] == _SEQUENCE:  # type: ignore[index]
            mesh_dim = m
            both = None if cuts[0][m] is None else m
    targets = [None if s is None else _with(s, row) for s, row in zip(operands, cuts, strict=True)]
    for target in targets:
        dims = [] if target is None else [p.dim for p in target.placements if isinstance(p, Shard)]
        if len(set(dims)) < len(dims):
            raise refuse(
                name,
                specs,
                "two mesh dims would have to shard the same dim of an operand",
                "redistribute the operands so that each mesh dim shards one and the same of their dims",
            )
    q, k, _, bias = targets
    assert q is not None and k is not None
    layout = Layout(
        targets=tuple(targets),
        out=tuple((Replicate(), None) if c is None else (Shard(c[0] + len(query.shape)), c[1]) for c in cuts[0]),
        split=tuple(split),
        rows=_held(q, _SEQUENCE),
        columns=(_held(k, _SEQUENCE),),
        mask_start=0 if bias is None else _held(bias, -1)[0],
        mesh_dim=mesh_dim,
    )
    return layout if both is None else _exchanging(layout, both, shift, method, mask)


def _one_mesh_dim(operands: Sequence[ShardTensorSpec | None], given: Sequence[Cut]) -> list[Cut]:
    """What one mesh dim has to shard of query, key, value and mask, given what it shards now."""
    mask = operands[3]
    query_cut, key_cut, value_cut, mask_cut = given
    decide = [i for i in range(3) if given[i] is not None] or [i for i in (3,) if given[i] is not None]
    batch = next((i for i in decide if given[i][0] <= _HEADS), None)  # type: ignore[index]
    if batch is not None:
        return _batch_cut(operands, batch, given[batch])
    if decide == [3]:
        assert mask_cut is not None
        rows, keys = (mask_cut[1] if mask_cut[0] == dim else None for dim in (_SEQUENCE, -1))
    else:
        rows = None if query_cut is None else query_cut[1]
        keys = key_cut[1] if key_cut is not None else None if value_cut is None else value_cut[1]
    q: Cut = None if rows is None else (_SEQUENCE, rows)
    k: Cut = None if keys is None else (_SEQUENCE, keys)
    bias: Cut = None
    if mask is not None and rows is not None and mask.shape[_SEQUENCE] > 1:
        bias = q
    elif mask is not None and keys is not None and mask.shape[-1] > 1:
        # With sharded queries, one row for all of them is sent along with the keys, unless every rank has it anyway.
        bias = (-1, keys) if rows is None or mask_cut is not None else None
    return [q, k, k, bias]


def _batch_cut(operands: Sequence[ShardTensorSpec | None], pattern: int, cut: Cut) -> list[Cut]:
    """All operands sharded along a batch dim or the heads, as operand ``pattern`` is.

    Heads of queries stay with the keys that they share: no boundary goes through such a group.
    """
    assert cut is not None
    dim, sizes = cut
    counts = [1 if s is None or len(s.shape) < -dim else s.shape[dim] for s in operands]
    units = math.gcd(*counts[:3])
    if units:
        of_pattern = counts[pattern] // units
        sizes = tuple(n // of_pattern for n in whole_blocks(sizes, of_pattern))
    per_unit = [count // units if units else 1 for count in counts[:3]]
    cuts: list[Cut] = [(dim, tuple(n * per for n in sizes)) for per in per_unit]
    return [*cuts, cuts[0] if counts[3] > 1 else None]


def _cut_of(spec: ShardTensorSpec, m: int) -> Cut:
    p = spec.placements[m]
    return (p.dim - len(spec.shape), spec.cut(m)) if isinstance(p, Shard) else None


def _held(spec: ShardTensorSpec, dim: int) -> Interval:
    """What this rank has of a dim that is counted from the end."""
    at = dim + len(spec.shape)
    m = spec.sharded_dims().get(at)
    return (0, spec.shape[at]) if m is None else spec.interval(m)


def _with(spec: ShardTensorSpec, cuts: Sequence[Cut]) -> ShardTensorSpec:
    n = len(spec.shape)
    placements = [Replicate() if cut is None else Shard(cut[0] + n) for cut in cuts]
    return spec.replace(placements=placements, sizes=tuple(None if cut is None else cut[1] for cut in cuts))


# -- kind "both": ring or heads -----------------------------------------------------------------------------------


def _exchanging(layout: Layout, m: int, shift: int | None, method: str, mask: ShardTensorSpec | None) -> Layout:
    """The layout for the method that is taken along mesh dim ``m``."""
    q, k, v, bias = layout.targets
    assert q is not None and k is not None and v is not None
    ranks = q.mesh.size(m)
    rows, columns = intervals_of(q.cut(m)), intervals_of(k.cut(m))

    def needs(r: int, s: int) -> bool:
        return bool(pieces(rows[r], columns[s], shift))

    bias_cut = None if bias is None else _cut_of(bias, m)
    ring = replace(
        layout,
        columns=columns,
        mask_travels=bias_cut is not None and bias_cut[0] == -1,
        ring=ring_of(q.coordinate[m], ranks, needs),
    )
    # Groups of heads that share keys; where another mesh dim shards the heads too, those that are left.
    heads = [s.local_shape()[_HEADS] if len(s.shape) > 2 else 1 for s in (q, k, v)]
    units = math.gcd(*heads)
    if method == "ring" or units < 2:
        return ring
    parts = [units // ranks + (r < units % ranks) for r in range(ranks)]
    head_cuts = tuple(tuple(n * (count // units) for n in parts) for count in heads)
    if bias is not None and mask is not None:
        if _cut_of(mask, m) is None:
            cuts = [None if i == m else _cut_of(bias, i) for i in range(bias.mesh.ndim)]
        elif len(bias.shape) > 2 and bias.shape[_HEADS] > 1 and heads[0] == q.shape[_HEADS]:
            cuts = [(_HEADS, head_cuts[0]) if i == m else _cut_of(bias, i) for i in range(bias.mesh.ndim)]
        else:
            return ring  # a mask without heads, of which each rank has a part, would have to be gathered
        bias = _with(bias, cuts)
    if method == "auto" and not _heads_are_faster(q, k, v, m, shift, max(parts) / units):
        return ring
    return replace(
        layout,
        targets=(q, k, v, bias),
        rows=(0, q.shape[_SEQUENCE]),
        columns=((0, k.shape[_SEQUENCE]),),
        mask_start=0,
        head_cuts=head_cuts,
    )


# [Note: choice] What a forward pass is estimated to take, in bytes: a transfer of n bytes takes n, and a constant for
# each exchange; f floating-point operations count as f / rate bytes. In the ring, a step takes as long as its transfer
# or as the slowest rank's computation, whichever is longer. With heads, the exchanges (of query, key, value; of the
# result) stand before and after the computation, which is even but for the rounding of heads to ranks. The rates are
# those of a core with the loopback network, and of a current GPU with links to its neighbours.
_RATES = {"cpu": (50.0, 1 << 18)}
_OTHER_RATES = (1000.0, 1 << 22)


def _heads_are_faster(
    q: ShardTensorSpec, k: ShardTensorSpec, v: ShardTensorSpec, m: int, shift: int | None, largest_share: float
) -> bool:
    rate, constant = _RATES.get(q.mesh.device_type, _OTHER_RATES)
    rows, columns = intervals_of(q.cut(m)), intervals_of(k.cut(m))
    ranks = len(rows)
    if largest_share * ranks >= 2:
        return False  # some rank would hold twice its share of the keys, or more
    meta = q.tensor_meta
    assert meta is not None
    widths = [math.prod(s.shape[:-2]) * s.shape[-1] * meta.dtype.itemsize for s in (q, k, v)]
    per_query = widths[0] + math.prod(q.shape[:-2]) * v.shape[-1] * meta.dtype.itemsize
    per_key = widths[1] + widths[2]
    per_score = 2 * math.prod(q.shape[:-2]) * (q.shape[-1] + v.shape[-1]) / rate

    def work(r: int, s: int) -> float:
        parts = pieces(rows[r], columns[s], shift)
        return per_score * sum(length(a) * length(b) / (2 if square else 1) for a, b, square in parts)

    ring = 0.0
    for step in range(ranks):
        slowest = max(work(r, (r - step) % ranks) for r in range(ranks))
        ring += max(slowest, max(map(length, columns)) * per_key + constant if step < ranks - 1 else 0)
    sent = (max(map(length, rows)) * per_query + max(map(length, columns)) * per_key) * (ranks - 1) / ranks
    total = sum(work(r, s) for r in range(ranks) for s in range(ranks))
    return sent + 2 * constant + total * largest_share < ring
