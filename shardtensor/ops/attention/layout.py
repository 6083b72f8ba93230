"""The layouts that the operands of attention need, and which ranks exchange what. From specs alone.

For each mesh dim one of these kinds (dims counted from the end: -3 heads and before it the batch, -2 the sequence):

| kind | query | key, value | result | sent |
|---|---|---|---|---|
| batch | batch or heads | alike | alike | nothing |
| rows | sequence | replicated | as the query | nothing |
| keys | replicated | sequence | replicated | two all-reduces: a number per row, and the result |
| both | sequence | sequence | as the query | keys and values, fetched or around a ring; or all-to-alls |

[Note: balance] If a row sees the keys before it, the last rank of a ring has most to do. So the sequence is divided
into twice as many parts as there are ranks, and rank ``r`` of ``P`` gets parts ``r`` and ``2 P - 1 - r``, by an
exchange before the ring. Another exchange brings the result back. Then each step of the ring is equally long on all
ranks, whatever the shards are: both parts of a rank see the early part of a rank before it, or its late part sees both
parts of a rank after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.distributed.tensor import Replicate, Shard

from ...errors import refuse
from ...layout.caches import cached
from ...layout.intervals import Interval, chunk_sizes, intervals_of, length
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ..common.alignment import cost_of_exchange
from ..common.ring import Ring, ring_of
from ..shape.view import whole_blocks
from .blockwise import pieces

NAME = "scaled_dot_product_attention"
_FEATURES, _SEQUENCE, _HEADS = -1, -2, -3


class ShardedDim(NamedTuple):
    """A tensor dim, counted from the end, that a mesh dim shards, and the shard sizes."""

    dim: int
    sizes: tuple[int, ...]


Parts = tuple[Interval, ...]  # of a sequence, that a rank has next to each other


class Balance(NamedTuple):
    """Which parts of the sequences each rank has, as the shards are and as it computes.

    Both are of queries, keys and values, for each rank.
    """

    shards: tuple[tuple[Parts, ...], ...]
    parts: tuple[tuple[Parts, ...], ...]


# Of query, key, value and mask, None without one.
Targets = tuple[ShardTensorSpec, ShardTensorSpec, ShardTensorSpec, ShardTensorSpec | None]


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """The layouts of operands and result of one call, and who computes what.

    Attributes:
        targets: specs of the operands.
        out: of the result, per mesh dim.
        split: mesh dims whose ranks do different work.
        rows: the queries that this rank computes.
        columns: the keys of each block: those that this rank has or fetches, or every rank's if they are sent around
            the ring.
        squares: blocks that are seen in part are computed in squares: no kernel aligns them at the lower right.
        mask_start: the key to which the first column of this rank's mask belongs.
        mask_travels: the mask is sharded like the keys, has one row for all queries, and is sent along with them.
        mesh_dim: the one along which the kind is "keys" or "both".
        ring: set where keys are sent around.
        fetched: set where they are fetched: the keys that each rank along the mesh dim needs, its own ones included.
        head_sizes: set where the heads are sharded instead: shard sizes of query, key and value along them.
        balance: set where ranks compute with other parts of the sequences than they have.
    """

    targets: Targets
    out: tuple[AxisLayout, ...]
    split: tuple[int, ...]
    rows: Parts
    columns: tuple[Parts, ...]
    squares: bool = True
    mask_start: int = 0
    mask_travels: bool = False
    mesh_dim: int | None = None
    ring: Ring | None = None
    fetched: tuple[Interval, ...] | None = None
    head_sizes: tuple[tuple[int, ...], ...] | None = None
    balance: Balance | None = None


@cached(maxsize=4096)
def layout_of(
    query: ShardTensorSpec,
    key: ShardTensorSpec,
    value: ShardTensorSpec,
    mask: ShardTensorSpec | None,
    shift: int | None,
    method: str,
) -> AttentionLayout:
    """The layout of a call; batch dims are equal except that keys and values may have fewer heads.

    Args:
        mask: of at least two dims.
        shift: which keys a query sees, see :func:`~.blockwise.pieces`.
        method: "auto", "ring", "heads" or "fetch"; or "plain ring", in which each rank computes with its own shards.

    Raises:
        UnsupportedSharding: sharded features, or two mesh dims that would have to shard the same dim.
    """
    operands: Targets = (query, key, value, mask)
    held = [_held(operands, m) for m in range(query.mesh.ndim)]
    wanted = [_wanted(operands, dims) for dims in held]
    q, k, v = (_with(spec, [dims[i] for dims in wanted]) for i, spec in enumerate((query, key, value)))
    bias = None if mask is None else _with(mask, [dims[3] for dims in wanted])
    targets = (q, k, v, bias)
    _check_targets(operands, targets)
    mesh_dim = k.sharded_dims().get(_SEQUENCE + len(k.shape))
    layout = AttentionLayout(
        targets=targets,
        out=tuple(_axis(dims[0], len(query.shape)) for dims in wanted),
        split=tuple(m for m, dims in enumerate(held) if any(dims)),
        rows=(q.own_interval(_SEQUENCE),),
        columns=((k.own_interval(_SEQUENCE),),),
        squares=query.mesh.device_type == "cpu" or torch.version.hip is not None,
        mask_start=0 if bias is None else bias.own_interval(-1)[0],
        mesh_dim=mesh_dim,
    )
    if mesh_dim is None or wanted[mesh_dim][0] is None:
        return layout
    return _exchanging(layout, mesh_dim, shift, method, mask)


def _held(operands: Targets, m: int) -> list[ShardedDim | None]:
    """What mesh dim ``m`` shards of each operand."""
    held = [None if spec is None else _sharded_dim(spec, m) for spec in operands]
    if any(sharded is not None and sharded.dim == _FEATURES for sharded in held[:3]):
        raise refuse(
            NAME,
            [spec for spec in operands if spec is not None],
            f"mesh dim {m} shards the features, which every score needs unsharded",
            "redistribute to shard the sequence, the heads or the batch",
        )
    return held


def _check_targets(operands: Targets, targets: Targets) -> None:
    """A tensor dim is sharded on one mesh dim only."""
    for target in targets:
        dims = [] if target is None else [p.dim for p in target.placements if isinstance(p, Shard)]
        if len(set(dims)) < len(dims):
            raise refuse(
                NAME,
                [spec for spec in operands if spec is not None],
                "two mesh dims would have to shard the same dim of an operand",
                "redistribute the operands so that each mesh dim shards the same dim of all of them",
            )


def _wanted(operands: Targets, held: Sequence[ShardedDim | None]) -> list[ShardedDim | None]:
    """What one mesh dim has to shard of query, key, value and mask, given what it shards now."""
    # The mask decides only where it alone is sharded.
    decide = [i for i in range(3) if held[i] is not None] or [3]
    for i in decide:
        sharded = held[i]
        if sharded is not None and sharded.dim <= _HEADS:
            return _along_batch(operands, i, sharded)
    # Shard sizes of the queries' sequence and of the keys', None where it is replicated.
    of_queries, of_keys, of_mask = held[0], held[1] or held[2], held[3]
    rows = None if of_queries is None else of_queries.sizes
    keys = None if of_keys is None else of_keys.sizes
    if rows is None and keys is None and of_mask is not None:
        rows, keys = (of_mask.sizes, None) if of_mask.dim == _SEQUENCE else (None, of_mask.sizes)
    mask = operands[3]
    k = None if keys is None else ShardedDim(_SEQUENCE, keys)
    return [
        None if rows is None else ShardedDim(_SEQUENCE, rows),
        k,
        k,
        None if mask is None else _of_mask(mask, of_mask is not None, rows, keys),
    ]


def _of_mask(
    mask: ShardTensorSpec, is_sharded: bool, rows: tuple[int, ...] | None, keys: tuple[int, ...] | None
) -> ShardedDim | None:
    """What a mesh dim that shards queries and keys so has to shard of the mask."""
    if rows is not None and mask.shape[_SEQUENCE] > 1:
        return ShardedDim(_SEQUENCE, rows)
    if keys is None or mask.shape[-1] <= 1:
        return None
    # With sharded queries, one row for all of them is sent along with the keys, unless every rank has it anyway.
    return ShardedDim(-1, keys) if rows is None or is_sharded else None


def _along_batch(operands: Targets, pattern: int, sharded: ShardedDim) -> list[ShardedDim | None]:
    """All operands sharded along a batch dim or the heads, as operand ``pattern`` is.

    Heads of queries stay with the keys that they share: no boundary goes through such a group.
    """
    dim, sizes = sharded
    counts = [1 if s is None or len(s.shape) < -dim else s.shape[dim] for s in operands]
    units = math.gcd(*counts[:3])
    if units:
        of_pattern = counts[pattern] // units
        sizes = tuple(n // of_pattern for n in whole_blocks(sizes, of_pattern))
    per_unit = [count // units if units else 1 for count in counts[:3]]
    wanted: list[ShardedDim | None] = [ShardedDim(dim, tuple(n * per for n in sizes)) for per in per_unit]
    return [*wanted, wanted[0] if counts[3] > 1 else None]


def _sharded_dim(spec: ShardTensorSpec, m: int) -> ShardedDim | None:
    p = spec.placements[m]
    return ShardedDim(p.dim - len(spec.shape), spec.sizes_along(m)) if isinstance(p, Shard) else None


def _is_along_keys(mask: ShardTensorSpec | None, m: int) -> bool:
    return mask is not None and mask.sharded_dims().get(len(mask.shape) - 1) == m


def _axis(sharded: ShardedDim | None, ndim: int) -> AxisLayout:
    return AxisLayout(Replicate()) if sharded is None else AxisLayout(Shard(sharded.dim + ndim), sharded.sizes)


def _with(spec: ShardTensorSpec, dims: Sequence[ShardedDim | None]) -> ShardTensorSpec:
    return spec.with_layout([_axis(sharded, len(spec.shape)) for sharded in dims])


# -- kind "both": fetch, ring or heads ----------------------------------------------------------------------------


def _exchanging(
    layout: AttentionLayout, m: int, shift: int | None, method: str, mask: ShardTensorSpec | None
) -> AttentionLayout:
    """The layout for the method that is taken along mesh dim ``m``."""
    found = None
    if method == "fetch" or (method == "auto" and _is_small(layout)):
        found = _by_fetch(layout, m, shift)
    elif method not in ("ring", "plain ring"):
        found = _by_heads(layout, m, mask)
        found = None if found and method == "auto" and not _heads_are_faster(found, m, shift) else found
    if found is not None:
        return found
    balance = None if shift is None or method == "plain ring" else _balance(layout, m)
    if balance is not None and _time_of_ring(layout, m, shift, balance) >= _time_of_ring(layout, m, shift, None):
        balance = None
    return _by_ring(layout, m, shift, balance)


def _by_ring(layout: AttentionLayout, m: int, shift: int | None, balance: Balance | None) -> AttentionLayout:
    """Keys and values sent around the ranks of mesh dim ``m``."""
    q, _, _, bias = layout.targets
    rank = q.coordinate[m]
    rows, columns, _ = _shards(layout, m) if balance is None else balance.parts

    def needs(r: int, s: int) -> bool:
        return bool(pieces(rows[r], columns[s], shift))

    return replace(
        layout,
        rows=rows[rank],
        columns=columns,
        mask_travels=_is_along_keys(bias, m),
        ring=ring_of(rank, q.mesh.size(m), needs),
        balance=balance,
    )


def _shards(layout: AttentionLayout, m: int) -> tuple[tuple[Parts, ...], ...]:
    """Which queries, keys and values each rank along mesh dim ``m`` has."""
    return tuple(tuple((own,) for own in intervals_of(spec.sizes_along(m))) for spec in layout.targets[:3])


def _balance(layout: AttentionLayout, m: int) -> Balance:
    """An early and a late part of each sequence for every rank."""
    ranks = layout.targets[0].mesh.size(m)

    def parts_of(length_of_all: int) -> tuple[Parts, ...]:
        parts = intervals_of(chunk_sizes(length_of_all, 2 * ranks))
        return tuple((parts[r], parts[-1 - r]) for r in range(ranks))

    return Balance(_shards(layout, m), tuple(parts_of(spec.shape[_SEQUENCE]) for spec in layout.targets[:3]))


def _by_fetch(layout: AttentionLayout, m: int, shift: int | None) -> AttentionLayout | None:
    """Each rank fetches all keys that its queries see.

    None where keys and values do not fit next to each other, or a part of the mask would have to come with them.
    """
    q, k, v, bias = layout.targets
    if k.shape[:-1] != v.shape[:-1] or _is_along_keys(bias, m):
        return None
    keys = (0, k.shape[_SEQUENCE])
    seen = [pieces([rows], [keys], shift) for rows in intervals_of(q.sizes_along(m))]
    fetched = tuple((0, max((piece.columns[1] for piece in found), default=0)) for found in seen)
    return replace(layout, columns=((fetched[q.coordinate[m]],),), fetched=fetched)


def _by_heads(layout: AttentionLayout, m: int, mask: ShardTensorSpec | None) -> AttentionLayout | None:
    """Mesh dim ``m`` shards the heads instead of the sequence; None where heads or mask do not allow it."""
    q, k, v, bias = layout.targets
    ranks = q.mesh.size(m)
    # Groups of heads that share keys; where another mesh dim shards the heads too, those that are left.
    heads = [s.local_shape()[_HEADS] if len(s.shape) > 2 else 1 for s in (q, k, v)]
    units = math.gcd(*heads)
    if units < 2:
        return None
    parts = [units // ranks + (r < units % ranks) for r in range(ranks)]
    head_sizes = tuple(tuple(n * (count // units) for n in parts) for count in heads)
    if bias is not None and mask is not None:
        has_all_heads = heads[0] == q.shape[_HEADS]
        if _sharded_dim(mask, m) is None:
            bias = bias.with_axes({m: AxisLayout(Replicate())})
        elif len(bias.shape) > 2 and bias.shape[_HEADS] > 1 and has_all_heads:
            bias = bias.with_axes({m: _axis(ShardedDim(_HEADS, head_sizes[0]), len(bias.shape))})
        else:
            return None  # a mask without heads, of which each rank has a part, would have to be gathered
    return replace(
        layout,
        targets=(q, k, v, bias),
        rows=((0, q.shape[_SEQUENCE]),),
        columns=(((0, k.shape[_SEQUENCE]),),),
        mask_start=0,
        head_sizes=head_sizes,
    )


# Keys and values are small, and fetched, if sending all of them takes no longer than the constant of an exchange. Then
# the number of exchanges and kernels that the host starts counts, and neither memory nor overlap matter.
#
# Otherwise the choice is by what a forward pass is estimated to take, in bytes: a transfer of n bytes takes n, and a
# constant for each exchange; f floating-point operations count as f / rate bytes. In the ring, a step takes as long as
# its transfer or as the slowest rank's computation, whichever is longer. With heads, the exchanges (of query, key,
# value; of the result) stand before and after the computation, which is even but for the rounding of heads to ranks. In
# a balanced ring they stand there, too, next to the transfers of its steps.
# The rates are those of a core with the loopback network, and of a current GPU with links to its neighbours.
_RATES = {"cpu": 50.0}
_OTHER_RATES = 1000.0


def _is_small(layout: AttentionLayout) -> bool:
    _, k, v, _ = layout.targets
    constant = cost_of_exchange(k.mesh.device_type)
    sequence, held = len(k.shape) + _SEQUENCE, k.sharded_dims()
    # By the largest shard of the other dims, so that ranks with others decide alike.
    lead = [max(k.sizes_along(held[d])) if d in held and d != sequence else n for d, n in enumerate(k.shape[:-1])]
    return math.prod(lead) * (k.shape[-1] + v.shape[-1]) * k.tensor_meta.dtype.itemsize <= constant


def _time_of_ring(layout: AttentionLayout, m: int, shift: int | None, balance: Balance | None) -> float:
    q = layout.targets[0]
    rows, columns, _ = _shards(layout, m) if balance is None else balance.parts
    ranks = len(rows)
    constant = cost_of_exchange(q.mesh.device_type)
    per_query, per_key, per_score = _costs(layout)
    transfer = max(sum(map(length, parts)) for parts in columns) * per_key + constant
    time = 0.0
    for step in range(ranks):
        slowest = max(_scores(rows[r], columns[(r - step) % ranks], shift) for r in range(ranks)) * per_score
        time += max(slowest, transfer if step < ranks - 1 else 0)
    if balance is None:
        return time
    largest = [max(length(own) for (own,) in shards) for shards in balance.shards[:2]]
    return time + 2 * constant + largest[0] * per_query + largest[1] * per_key


def _heads_are_faster(layout: AttentionLayout, m: int, shift: int | None) -> bool:
    q = layout.targets[0]
    assert layout.head_sizes is not None
    largest_share = max(layout.head_sizes[0]) / sum(layout.head_sizes[0])
    rows, columns, _ = _shards(layout, m)
    ranks = len(rows)
    if largest_share * ranks >= 2:
        return False  # some rank would hold twice its share of the keys, or more
    constant = cost_of_exchange(q.mesh.device_type)
    per_query, per_key, per_score = _costs(layout)
    largest = [max(length(own) for (own,) in shards) for shards in (rows, columns)]
    sent = (largest[0] * per_query + largest[1] * per_key) * (ranks - 1) / ranks
    total = sum(_scores(r, s, shift) for r in rows for s in columns) * per_score
    balances = [None] if shift is None else [None, _balance(layout, m)]
    return sent + 2 * constant + total * largest_share < min(_time_of_ring(layout, m, shift, b) for b in balances)


def _costs(layout: AttentionLayout) -> tuple[float, float, float]:
    """Of a query and its result, of a key and its value, and of a score."""
    q, k, v, _ = layout.targets
    rate = _RATES.get(q.mesh.device_type, _OTHER_RATES)
    itemsize, lead = q.tensor_meta.dtype.itemsize, math.prod(q.shape[:-2])
    widths = [math.prod(s.shape[:-2]) * s.shape[-1] * itemsize for s in (q, k, v)]
    per_query = widths[0] + lead * v.shape[-1] * itemsize
    return per_query, widths[1] + widths[2], 2 * lead * (q.shape[-1] + v.shape[-1]) / rate


def _scores(rows: Parts, columns: Parts, shift: int | None) -> float:
    return sum(piece.scores for piece in pieces(rows, columns, shift))
