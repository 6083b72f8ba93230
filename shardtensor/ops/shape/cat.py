"""Putting together: cat, stack, roll and repeat, along any dims.

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

from ...dispatch import Call, Path, Plan, meta_of, rule, wrap
from ...exchange import plan_intervals, start_swap
from ...geometry import Interval, chunk_sizes, cuts_of, intersect, intervals_of, length
from ...registry import register
from ...spec import ShardTensorSpec
from ...tensor import ShardTensor
from .view import carry, wrap_dim

__all__ = ["assemble", "joined_cut", "rolled"]

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


def rolled(own: Interval, shift: int, n: int) -> tuple[Interval, Interval]:
    """Where an interval of a dim of length ``n`` comes to lie when the dim is rolled: what stays below ``n``, the rest.

    Example:
        >>> rolled((2, 6), 5, 8)
        ((7, 8), (0, 3))
    """
    a, b = own[0] + shift, own[1] + shift
    stays, wraps = intersect((a, b), (0, n)), intersect((a - n, b - n), (0, n))
    return (stays if length(stays) else (0, 0)), (wraps if length(wraps) else (0, 0))


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


@rule(_aten.cat.default, _aten.stack.default)
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


# -- roll -------------------------------------------------------------------------------------------------


@register(_aten.roll.default)
def _roll(x: Any, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    """A sharded dim is rolled by one exchange, and keeps its sizes."""
    spec = x._spec
    sharded = spec.sharded_dims()
    if not sharded:
        return wrap(x._local_tensor.roll(shifts, dims), spec)
    if len(shifts) != len(dims):
        if dims or len(shifts) != 1:
            return _aten.roll.default(_meta(spec), shifts, dims)  # raises torch's own error
        return x.reshape(-1).roll(shifts, 0).reshape(x.shape)
    amounts: dict[int, int] = {}
    for d, shift in zip(dims, shifts, strict=True):
        d = wrap_dim(d, len(spec.shape))
        amounts[d] = amounts.get(d, 0) + shift
    local = x._local_tensor
    for d, shift in amounts.items():
        n = spec.shape[d]
        if d not in sharded:
            local = local.roll(shift, d)
        if d not in sharded or not n or not shift % n:
            continue
        m = sharded[d]
        rank = spec.coordinate[m]
        own = intervals_of(spec.cut(m))
        stays, wraps = zip(*(rolled(each, shift % n, n) for each in own), strict=True)
        k = length(stays[rank])
        parts = [(local.narrow(d, 0, k), stays), (local.narrow(d, k, local.shape[d] - k), wraps)]
        local = assemble(parts, d, own, rank, spec.mesh.get_group(m))
    # A copy in any case, as torch makes one.
    return wrap(local.clone() if local is x._local_tensor else local, spec)


def _meta(spec: ShardTensorSpec) -> Tensor:
    meta = spec.tensor_meta
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")


# -- repeat -----------------------------------------------------------------------------------------------


@register(Tensor.repeat)
def _repeat_function(self: Any, *repeats: Any, **kwargs: Any) -> Any:
    """A sharded dim is joined to itself; the others are repeated in place."""
    given = kwargs.get("repeats", repeats[0] if len(repeats) == 1 and not isinstance(repeats[0], int) else repeats)
    counts = [int(n) for n in given]
    if not isinstance(self, ShardTensor) or len(counts) < self.ndim or min(counts, default=0) < 0:
        return NotImplemented
    x, new = self, len(counts) - self.ndim
    for d in self._spec.sharded_dims():
        if counts[d + new] != 1:
            x = torch.cat([x] * counts[d + new], d) if counts[d + new] else x.narrow(d, 0, 0)
            counts[d + new] = 1
    if x is self:
        return NotImplemented
    return x.repeat(counts) if any(n != 1 for n in counts) or new else x


@register(torch.tile, Tensor.tile)
def _tile(input: Any, *dims: Any, **kwargs: Any) -> Any:
    given = kwargs.get("dims", dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims)
    counts = [int(n) for n in given]
    if not isinstance(input, ShardTensor):
        return NotImplemented
    return input.repeat([1] * (input.ndim - len(counts)) + counts)


@rule(_aten.repeat.default)
def _repeat(call: Call) -> Plan:
    spec = call.specs[0]
    new = call.meta.ndim - len(spec.shape)
    counts = call.args[1]
    return Plan(carry(call, spec, call.meta, {d: d + new for d in range(len(spec.shape)) if counts[d + new] == 1}))
