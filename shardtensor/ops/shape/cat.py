"""Putting together: ``cat`` and ``stack``, along any dims.

Tensors that are joined along a sharded dim keep the global order, so a piece may have to move: a rank gets as much of
the result as it had of all the pieces together, and one exchange brings what it has not. Pieces that are whole on every
rank never travel. Splitting and joining again gives the cut that there was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard

from ...exchange import plan_intervals, start_swap
from ...geometry import Interval, chunk_sizes, cuts_of, intersect, intervals_of, length
from ...operators import operator
from ...planning import Call, Path, Plan, meta_of
from ...spec import ShardTensorSpec
from .view import carry, wrap_dim

__all__ = ["assemble", "joined_cut"]

_aten = torch.ops.aten

# -- geometry ---------------------------------------------------------------------------------------------


def joined_cut(pieces: Sequence[tuple[int, Sequence[int] | None]], ranks: int) -> tuple[int, ...]:
    """Sizes of what is joined from pieces of ``(length, sizes)``; None for a piece that is whole on every rank.

    Each rank gets as much as it had. A whole piece goes to the first rank where it stands before all sharded pieces,
    to the last rank after them, and is spread in between.

    Example:
        >>> joined_cut([(7, (5, 2)), (5, (2, 3))], 2), joined_cut([(1, None), (8, (5, 3)), (2, None)], 2)
        ((7, 5), (6, 5))
    """
    places = [i for i, (_, sizes) in enumerate(pieces) if sizes is not None]
    total = [0] * ranks
    for i, (n, sizes) in enumerate(pieces):
        if sizes is None:
            if not places or places[0] < i < places[-1]:
                sizes = chunk_sizes(n, ranks)
            else:
                sizes = [n if r == (0 if i < places[0] else ranks - 1) else 0 for r in range(ranks)]
        total = [a + b for a, b in zip(total, sizes, strict=True)]
    return tuple(total)


# -- exchange ---------------------------------------------------------------------------------------------


def assemble(
    parts: Sequence[tuple[Tensor, Sequence[Interval]]],
    dim: int,
    need: Sequence[Interval],
    rank: int,
    group: dist.ProcessGroup,
) -> Tensor:
    """The interval ``need[rank]`` of a dim that several tensors make up together, in one exchange.

    Args:
        parts: each a local tensor and, for every rank, which interval of the result that rank's local tensor is.
    """
    plans = [plan_intervals(tuple(own), tuple(need), rank) for _, own in parts]
    kept: list[tuple[int, Tensor]] = []
    for (local, _), plan in zip(parts, plans, strict=True):
        a, b = intersect(plan.own, plan.need)
        if b > a:
            kept.append((a, local.narrow(dim, a - plan.own[0], b - a)))
    first = parts[0][0]
    if any(plan.active for plan in plans):
        send: list[list[Tensor]] = [[] for _ in need]
        shapes: list[list[list[int]]] = [[] for _ in need]
        starts: list[list[int]] = [[] for _ in need]
        for (local, _), plan in zip(parts, plans, strict=True):
            for r, (a, b) in plan.sends:
                send[r].append(local.narrow(dim, a - plan.own[0], b - a))
            for s, (a, b) in plan.recvs:
                shapes[s].append([b - a if d == dim else n for d, n in enumerate(local.shape)])
                starts[s].append(a)
        received = start_swap(send, shapes, group, first).wait()
        kept += zip((a for row in starts for a in row), received, strict=True)
    if not kept:
        return first.new_empty([0 if d == dim else n for d, n in enumerate(first.shape)])
    return torch.cat([piece for _, piece in sorted(kept, key=lambda item: item[0])], dim)


# -- cat and stack ----------------------------------------------------------------------------------------


@operator(_aten.cat.default, _aten.stack.default)
def _join(call: Call) -> Plan:
    stacks = call.func == _aten.stack.default
    ndim = call.meta.ndim
    dim = wrap_dim(call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0), ndim)
    specs = call.reduced()
    # torch lets a 1-D tensor without elements stand in any list.
    joined = [i for i, t in enumerate(call.args[0]) if len(t.shape) == ndim - stacks]
    candidates = [specs[0, i] for i in joined if (0, i) in specs]
    if not candidates:
        raise call.refuse("nothing but empty tensors is joined", "leave them out")
    pattern = _pattern(candidates)
    m = None if stacks else pattern.sharded_dims().get(dim)
    targets: dict[Path, ShardTensorSpec] = dict(specs)
    for i in joined:
        if (0, i) in specs:
            targets[0, i] = _beside(specs[0, i], pattern, dim, m)
    dims = {d: d + (stacks and d >= dim) for d in range(ndim - stacks)}
    cuts = [(d, *pattern.interval(k)) for d, k in pattern.sharded_dims().items() if k != m]
    plain = {i for i in joined if (0, i) not in specs}
    dtype = call.meta.dtype

    def cut(i: int, t: Tensor) -> Tensor:
        """A plain tensor is the same on every rank: its part beside the shards."""
        for d, a, b in cuts if i in plain else ():
            t = t.narrow(d, a, b - a)
        return t

    if m is None:
        func, out = call.func, carry(call, pattern, call.meta, dims)
        return call.plan(out, targets, call=lambda ts, *_, **__: func([cut(i, ts[i]) for i in joined], dim))
    pieces = [(call.args[0][i].shape[dim], None if i in plain else targets[0, i].sizes[m]) for i in joined]
    ranks = pattern.mesh.size(m)
    sizes = list(pattern.sizes)
    sizes[m] = joined_cut(pieces, ranks)
    out = pattern.replace(meta=meta_of(call.meta), sizes=tuple(sizes))
    need = intervals_of(out.cut(m))
    owned: list[Sequence[Interval]] = []
    at = 0
    for n, own in pieces:
        if own is None:  # everybody has what it needs of it
            owned.append([_or_empty(intersect(each, (at, at + n))) for each in need])
        else:
            owned.append([(at + a, at + b) for a, b in intervals_of(own)])
        at += n
    starts = _starts(pieces)
    rank, group = pattern.coordinate[m], pattern.mesh.get_group(m)

    def join(tensors: Sequence[Tensor], *_: Any, **__: Any) -> Tensor:
        parts = []
        for i, (_n, own), start, where in zip(joined, pieces, starts, owned, strict=True):
            t = cut(i, tensors[i]).to(dtype)
            if own is None:
                a, b = where[rank]
                t = t.narrow(dim, a - start if b > a else 0, b - a)
            parts.append((t, where))
        return assemble(parts, dim, need, rank, group)

    return call.plan(out, targets, call=join)


def _pattern(specs: Sequence[ShardTensorSpec]) -> ShardTensorSpec:
    """On each mesh dim the sharding of the first tensor that has one there."""
    placements: list[Any] = list(specs[0].placements)
    sizes = list(specs[0].sizes)
    for m in range(len(placements)):
        taken = [p.dim for k, p in enumerate(placements) if k != m and isinstance(p, Shard)]
        for spec in specs:
            p = spec.placements[m]
            if isinstance(p, Shard) and p.dim not in taken:
                placements[m], sizes[m] = p, spec.sizes[m]
                break
    return specs[0].replace(placements=placements, sizes=tuple(sizes))


def _or_empty(interval: Interval) -> Interval:
    return interval if length(interval) else (0, 0)


def _starts(pieces: Sequence[tuple[int, Any]]) -> list[int]:
    return list(cuts_of([n for n, _ in pieces]))[:-1]


def _beside(spec: ShardTensorSpec, pattern: ShardTensorSpec, dim: int, m: int | None) -> ShardTensorSpec:
    """How a tensor has to lie to be joined to one like ``pattern`` along ``dim``, sharded on mesh dim ``m`` or not."""
    placements, sizes = list(pattern.placements), list(pattern.sizes)
    if m is not None:
        if spec.placements[m] == Shard(dim) or spec.placements[m].is_replicate():
            placements[m], sizes[m] = spec.placements[m], spec.sizes[m]
        else:
            sizes[m] = chunk_sizes(spec.shape[dim], spec.mesh.size(m))
    return spec.replace(placements=placements, sizes=tuple(sizes))
