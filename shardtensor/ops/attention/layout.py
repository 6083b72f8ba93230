"""The layouts that the operands of attention need, and which ranks exchange what. From specs alone.

For each mesh dim one of these kinds (dims counted from the end: -3 heads and before it the batch, -2 the sequence):

| kind | query | key, value | result | sent |
|---|---|---|---|---|
| batch | batch or heads | alike | alike | nothing |
| rows | sequence | replicated | as the query | nothing |
| keys | replicated | sequence | replicated | two all-reduces: a number per row, and the result |
| both | sequence | sequence | as the query | keys and values, fetched or around a ring; or all-to-alls |

[Note: divided] With a result that all ranks have, they repeat all that follows. So kind "keys" is for small results.
For large ones another kind is taken, if it moves fewer bytes than what sum and repeated work count as: keys and values
are moved to shard the batch or the heads, once, or the queries are sliced along their sequence.

[Note: balance] If a row sees the keys before it, the last rank of a ring has most to do. So the sequence is divided
into twice as many parts as there are ranks, and rank ``r`` of ``P`` gets parts ``r`` and ``2 P - 1 - r``, by an
exchange before the ring. Another exchange brings the result back. Then each step of the ring is equally long on all
ranks, whatever the shards are: both parts of a rank see the early part of a rank before it, or its late part sees both
parts of a rank after it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.distributed.tensor import Replicate, Shard

from ...errors import UnsupportedSharding, refuse
from ...layout.caches import cached
from ...layout.intervals import Interval, chunk_sizes, intervals_of
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ..common.alignment import cost_of_exchange
from ..common.named_dims import Axis, Choice, Form, Labels, Option, arrange, shared
from ..common.ring import Ring
from .blockwise import pieces

NAME = "scaled_dot_product_attention"
_SEQUENCE, _HEADS = -2, -3


Parts = tuple[Interval, ...]  # of a sequence, that a rank has next to each other
Sequences = tuple[tuple[Parts, ...], ...]  # of queries, keys and values, the parts of each rank


class Balance(NamedTuple):
    """Which parts of the sequences each rank has, as the shards are and as it computes."""

    shards: Sequences
    parts: Sequences


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
    operands = [spec for spec in (query, key, value, mask) if spec is not None]
    _check_features(operands)
    operands[1:3] = _sharded_alike(key, value)
    try:
        how = arrange(NAME, _form(operands), tuple(operands))
    except UnsupportedSharding as error:
        raise refuse(
            NAME,
            operands,
            "two mesh dims would have to shard the same dim of an operand",
            "redistribute the operands so that each mesh dim shards the same dim of all of them",
        ) from error
    q, k, v, *masks = how.targets
    k, v = _sharded_alike(k, v)  # of which one may have got its sequence whole only now
    bias = masks[0] if masks else None
    mesh_dim = k.sharded_dims().get(_SEQUENCE + len(k.shape))
    layout = AttentionLayout(
        targets=(q, k, v, bias),
        out=q.layout,
        split=tuple(m for m, axis in enumerate(how.axes) if axis is not None),
        rows=(q.own_interval(_SEQUENCE),),
        columns=((k.own_interval(_SEQUENCE),),),
        squares=query.mesh.device_type == "cpu" or torch.version.hip is not None,
        mask_start=0 if bias is None else bias.own_interval(-1)[0],
        mesh_dim=mesh_dim,
    )
    if mesh_dim is None or q.placements[mesh_dim].is_replicate():
        return layout
    return _exchanging(layout, mesh_dim, shift, method, mask)


def _form(operands: Sequence[ShardTensorSpec]) -> Form:
    """The labels of query, key, value and mask: batch dims and heads by number, from the end."""
    lead = tuple(range(-len(operands[0].shape), _SEQUENCE))
    terms: list[Labels] = [(*lead, "rows", "features"), (*lead, "keys", "features"), (*lead, "keys", "width")]
    for mask in operands[3:]:  # which is broadcast
        labels = [*range(-len(mask.shape), _SEQUENCE), "rows", "keys"]
        terms.append(tuple(label if n > 1 else None for label, n in zip(labels, mask.shape, strict=True)))
    whole, heads = frozenset({"features", "width"}), frozenset({_HEADS})
    out = operands[0].shape[:-1].numel() * operands[2].shape[-1] * operands[0].tensor_meta.dtype.itemsize
    device, repeated = operands[0].mesh.device_type, _cost_of_repeating(operands[2])
    ways = (_keys_alike, _divided, _keys_sent) if out * repeated > cost_of_exchange(device) else (shared, _keys_sent)
    return Form(tuple(terms), (*lead, "rows", "width"), whole, ways, 3, heads, repeated)


def _cost_of_repeating(value: ShardTensorSpec) -> float:
    """Of a result that all ranks have, per byte: of its sum, by an all-reduce, and of what they do with it alike.

    The latter is taken to be a layer of a transformer, whose weights are 12 matrices of the result's width.
    """
    width = value.shape[-1] * (value.shape[_HEADS] if len(value.shape) > -_HEADS else 1)
    return 2 + 24 * width / (_rate(value) * value.tensor_meta.dtype.itemsize)


def _keys_alike(choice: Choice) -> Iterator[Option]:
    """A label that all have. Where it is that of the keys, all ranks get the result, by a sum."""
    for option in shared(choice):
        yield replace(option, sums=option.axis.labels() == ["keys"])


def _divided(choice: Choice) -> Iterator[Option]:
    """Where all ranks have the queries: batch or heads are sharded instead of the keys, or queries: [Note: divided]."""
    held = choice.leading().values()
    if {own.label for own in held} != {"keys"}:
        return
    free = [x for x in choice.form.out if choice.may_shard(x) and x not in choice.later]
    free = [x for x in free if choice.lengths[x] >= choice.ranks * choice.blocks.get(x, 1)]
    lead = [x for x in free if x != "rows"]
    if lead:
        yield Option(Axis(choice.evenly(max(lead, key=lambda x: (x != _HEADS, choice.lengths[x])))))
    if "rows" in free:
        yield Option(Axis(choice.evenly("rows"), next(iter(held))))


def _keys_sent(choice: Choice) -> Iterator[Option]:
    """Keys and values that are sent to the queries' ranks, by one of the methods of kind "both"."""
    for along in choice.offered():
        sent = choice.lacking(along.label)
        if along.label == "rows" and {own.label for own in sent.values()} == {"keys"} and choice.may_shard("keys"):
            yield Option(Axis(along, next(iter(sent.values()))))


def _check_features(operands: Sequence[ShardTensorSpec]) -> None:
    """UnsupportedSharding where queries, keys or values are sharded along their last dim."""
    for spec in operands[:3]:
        m = spec.sharded_dims().get(len(spec.shape) - 1)
        if m is not None:
            raise refuse(
                NAME,
                operands,
                f"mesh dim {m} shards the features, which every score needs unsharded",
                "redistribute to shard the sequence, the heads or the batch",
            )


def _sharded_alike(key: ShardTensorSpec, value: ShardTensorSpec) -> Sequence[ShardTensorSpec]:
    """Keys and values, of which a replicated one counts as sharded along the sequence where the other one is."""

    def like(spec: ShardTensorSpec, other: ShardTensorSpec) -> ShardTensorSpec:
        m = other.sharded_dims().get(len(other.shape) + _SEQUENCE)
        if m is None or not spec.placements[m].is_replicate() or len(spec.shape) + _SEQUENCE in spec.sharded_dims():
            return spec
        return spec.with_axes({m: other.layout[m]})

    return like(key, value), like(value, key)


def _is_along_keys(mask: ShardTensorSpec | None, m: int) -> bool:
    return mask is not None and mask.sharded_dims().get(len(mask.shape) - 1) == m


# -- kind "both": fetch, ring or heads ----------------------------------------------------------------------------


def _exchanging(
    layout: AttentionLayout, m: int, shift: int | None, method: str, mask: ShardTensorSpec | None
) -> AttentionLayout:
    """The layout for the method that is taken along mesh dim ``m``."""
    small = method == "fetch" or (method == "auto" and _is_small(layout))
    if small and (found := _by_fetch(layout, m, shift)):
        return found
    heads = None if small or method in ("ring", "plain ring") else _by_heads(layout, m, mask)
    if heads and method == "heads":
        return heads
    shards = _shards(layout, m)
    balances = [None] if shift is None or method == "plain ring" else [None, _balance(layout, shards)]
    times = [_time_of_ring(layout, shards, shift, balance) for balance in balances]
    if heads and _time_of_heads(heads, shards, shift) < min(times):
        return heads
    return _by_ring(layout, m, shards, shift, balances[times.index(min(times))])


def _by_ring(
    layout: AttentionLayout, m: int, shards: Sequences, shift: int | None, balance: Balance | None
) -> AttentionLayout:
    """Keys and values sent around the ranks of mesh dim ``m``."""
    q, _, _, bias = layout.targets
    rank = q.coordinate[m]
    rows, columns, _ = shards if balance is None else balance.parts
    return replace(
        layout,
        rows=rows[rank],
        columns=columns,
        mask_travels=_is_along_keys(bias, m),
        ring=Ring(rank, _hops(rows, columns, shift)),
        balance=balance,
    )


def _hops(rows: Sequence[Parts], columns: Sequence[Parts], shift: int | None) -> tuple[int, ...]:
    """How many ranks the columns of each rank are passed on to, until the last of those whose rows see any of them.

    Example:
        >>> _hops([((0, 4),), ((4, 8),), ((8, 12),)], [((0, 4),), ((4, 8),), ((8, 12),)], 0)  # no earlier row sees them
        (2, 1, 0)
    """
    beyond = math.inf if shift is None else shift
    # A rank sees the columns before this; they begin at that.
    seen = [own[-1][1] + beyond if own else -math.inf for own in _filled(rows)]
    begins = [own[0][0] if own else math.inf for own in _filled(columns)]
    most = list(accumulate(seen, max))  # so that a search of all ranks before the owner, in vain, is not made
    hops = []
    for owner, begin in enumerate(begins):
        last = len(rows) - 1 if most[-1] > begin else owner
        if owner and most[owner - 1] > begin:
            last = owner - 1
        while last != owner and seen[last] <= begin:
            last -= 1
        hops.append((last - owner) % len(rows))
    return tuple(hops)


def _filled(sequence: Sequence[Parts]) -> list[list[Interval]]:
    """Each rank's parts without empty ones."""
    return [[part for part in own if part[0] < part[1]] for own in sequence]


def _shards(layout: AttentionLayout, m: int) -> Sequences:
    """Which queries, keys and values each rank along mesh dim ``m`` has."""
    sizes = [spec.sizes_along(m) for spec in layout.targets[:3]]
    parts = {of_ranks: tuple((own,) for own in intervals_of(of_ranks)) for of_ranks in set(sizes)}
    return tuple(parts[of_ranks] for of_ranks in sizes)


def _balance(layout: AttentionLayout, shards: Sequences) -> Balance:
    """An early and a late part of each sequence for every rank."""
    ranks = len(shards[0])

    def parts_of(length_of_all: int) -> tuple[Parts, ...]:
        parts = intervals_of(chunk_sizes(length_of_all, 2 * ranks))
        return tuple((parts[r], parts[-1 - r]) for r in range(ranks))

    lengths = [spec.shape[_SEQUENCE] for spec in layout.targets[:3]]
    parts = {n: parts_of(n) for n in set(lengths)}
    return Balance(shards, tuple(parts[n] for n in lengths))


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
        if not isinstance(mask.placements[m], Shard):
            bias = bias.with_axes({m: AxisLayout(Replicate())})
        elif len(bias.shape) > 2 and bias.shape[_HEADS] > 1 and has_all_heads:
            bias = bias.with_axes({m: AxisLayout(Shard(len(bias.shape) + _HEADS), head_sizes[0])})
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
_SAMPLE = 16  # so many steps of so many ranks stand for all of a larger world


def _rate(spec: ShardTensorSpec) -> float:
    return _RATES.get(spec.mesh.device_type, _OTHER_RATES)


def _is_small(layout: AttentionLayout) -> bool:
    _, k, v, _ = layout.targets
    constant = cost_of_exchange(k.mesh.device_type)
    sequence, held = len(k.shape) + _SEQUENCE, k.sharded_dims()
    # By the largest shard of the other dims, so that ranks with others decide alike.
    lead = [max(k.sizes_along(held[d])) if d in held and d != sequence else n for d, n in enumerate(k.shape[:-1])]
    return math.prod(lead) * (k.shape[-1] + v.shape[-1]) * k.tensor_meta.dtype.itemsize <= constant


def _time_of_ring(layout: AttentionLayout, shards: Sequences, shift: int | None, balance: Balance | None) -> float:
    rows, columns, _ = shards if balance is None else balance.parts
    ranks = len(rows)
    constant = cost_of_exchange(layout.targets[0].mesh.device_type)
    per_query, per_key, per_score = _costs(layout)
    transfer = _largest(columns) * per_key + constant
    some = range(0, ranks, -(-ranks // _SAMPLE))
    time = 0.0
    for step in some:
        slowest = max(_scores(rows[r], columns[(r - step) % ranks], shift) for r in some) * per_score
        time += max(slowest, transfer if step < ranks - 1 else 0) * ranks / len(some)
    if balance is None:
        return time
    return time + 2 * constant + _largest(shards[0]) * per_query + _largest(shards[1]) * per_key


def _time_of_heads(layout: AttentionLayout, shards: Sequences, shift: int | None) -> float:
    q, k, _, _ = layout.targets
    assert layout.head_sizes is not None
    largest_share = max(layout.head_sizes[0]) / sum(layout.head_sizes[0])
    ranks = len(shards[0])
    if largest_share * ranks >= 2:
        return math.inf  # some rank would hold twice its share of the keys, or more
    per_query, per_key, per_score = _costs(layout)
    sent = (_largest(shards[0]) * per_query + _largest(shards[1]) * per_key) * (ranks - 1) / ranks
    total = _scores(((0, q.shape[_SEQUENCE]),), ((0, k.shape[_SEQUENCE]),), shift) * per_score
    return sent + 2 * cost_of_exchange(q.mesh.device_type) + total * largest_share


def _largest(sequence: Sequence[Parts]) -> int:
    """How much of a sequence the rank has that has most of it."""
    return max(sum([stop - start for start, stop in own]) for own in sequence)


def _costs(layout: AttentionLayout) -> tuple[float, float, float]:
    """Of a query and its result, of a key and its value, and of a score."""
    q, k, v, _ = layout.targets
    itemsize, lead = q.tensor_meta.dtype.itemsize, math.prod(q.shape[:-2])
    widths = [math.prod(s.shape[:-2]) * s.shape[-1] * itemsize for s in (q, k, v)]
    per_query = widths[0] + lead * v.shape[-1] * itemsize
    return per_query, widths[1] + widths[2], 2 * lead * (q.shape[-1] + v.shape[-1]) / _rate(q)


def _scores(rows: Parts, columns: Parts, shift: int | None) -> float:
    return sum(piece.scores for piece in pieces(rows, columns, shift))
