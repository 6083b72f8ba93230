"""Putting together: ``cat`` and ``stack``, along any dims.

Tensors that are joined along a sharded dim keep the global order, so a piece may have to be sent: a rank gets as much
of the result as it had of all the pieces together, and one exchange brings what it has not. Pieces that are replicated
are never sent. Splitting and joining again gives the layout that there was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from ..._compat.c10d import group_along
from ...communication.redistribute import bytes_between
from ...dispatch.planning import AtenCall, AtenPlan, Path, argument, keeps_owners, meta_of
from ...dispatch.registry import DECLINED
from ...dispatch.tensor import redistribute_to
from ...layout.intervals import Interval, boundaries_of, chunk_sizes, intersect, intervals_of, length, resized
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Composed, operator
from ..common.alignment import plain_operands, with_own_parts
from ..common.named_dims import are_much_more_even, coarseness, is_worth_evening
from .view import Assembly, carry, wrap_dim

_aten = torch.ops.aten

# -- geometry ---------------------------------------------------------------------------------------------


def joined_sizes(pieces: Sequence[tuple[int, Sequence[int] | None]], ranks: int) -> tuple[int, ...]:
    """Sizes of what is joined from pieces of ``(length, sizes)``; None for a piece that is replicated.

    Each rank gets as much as it had. A replicated piece goes to the first rank where it comes before all sharded
    pieces, and to the last rank after them, which sends nothing. In between it is spread. So is one where shards are
    much more even then: the mask tokens of an autoencoder behind the few that are encoded.

    Example:
        >>> joined_sizes([(7, (5, 2)), (5, (2, 3))], 2), joined_sizes([(1, None), (8, (5, 3)), (2, None)], 2)
        ((7, 5), (6, 5))
        >>> joined_sizes([(4, (2, 2)), (12, None)], 2)
        (8, 8)
    """
    at_ends, spread = _joined_sizes(pieces, ranks, False), _joined_sizes(pieces, ranks, True)
    return spread if are_much_more_even(spread, at_ends) else at_ends


def _joined_sizes(pieces: Sequence[tuple[int, Sequence[int] | None]], ranks: int, spreads: bool) -> tuple[int, ...]:
    """The same with all replicated pieces spread, or those alone that are in between."""
    places = [i for i, (_, sizes) in enumerate(pieces) if sizes is not None]
    total = [0] * ranks
    for i, (n, sizes) in enumerate(pieces):
        if sizes is None:
            if spreads or not places or places[0] < i < places[-1]:
                sizes = chunk_sizes(n, ranks)
            else:
                sizes = [n if r == (0 if i < places[0] else ranks - 1) else 0 for r in range(ranks)]
        total = [a + b for a, b in zip(total, sizes, strict=True)]
    return tuple(total)


# -- entries of a sharded dim, see [Note: owners] in layout/placements.py --------------------------------------------


@operator(torch.stack, tensors="tensors", partial="tensors")
def _stack_entries(call: Arguments, tensors: Sequence[ShardTensorSpec], dim: int = 0) -> Composed:
    """Each entry is the shard of its owner, and all of them are put together along a sharded dim.

    Where others have elements of an entry as well, all entries are put together first and scattered at once.
    """
    first = tensors[0]
    known = [m for m, axis in enumerate(first.layout) if axis.home is not None]
    alike = all(spec.shape == first.shape and _agree(spec, first, known) for spec in tensors)
    if len(known) != 1 or not alike:
        return DECLINED
    dim, m = wrap_dim(dim, len(first.shape) + 1), known[0]
    homes = [spec.layout[m].home for spec in tensors]
    sizes = tuple(homes.count(rank) for rank in range(first.mesh.size(m)))

    def shard(entries: Tensor, sizes: Sequence[int] | None) -> Tensor:
        spec: ShardTensorSpec = entries._spec  # type: ignore[attr-defined]
        return redistribute_to(
            entries, spec.with_axes({m: AxisLayout(Shard(dim), tuple(sizes or spec.sizes[m] or ()))})
        )

    if all(spec.layout[m].owner is not None for spec in tensors):
        return Composed(lambda entries: torch.cat([shard(entry.unsqueeze(dim), None) for entry in entries], dim))
    return Composed(lambda entries: shard(torch.cat([entry.unsqueeze(dim) for entry in entries], dim), sizes))


def _agree(spec: ShardTensorSpec, first: ShardTensorSpec, known: Sequence[int]) -> bool:
    """Whether two specs differ in the ranks that have the elements on the mesh dims ``known`` at most."""
    pairs = enumerate(zip(spec.layout, first.layout, strict=True))
    return all(a == b or (m in known and a.home is not None) for m, (a, b) in pairs)


def _joined_entries(specs: Sequence[ShardTensorSpec]) -> dict[int, AxisLayout]:
    """Which ranks have the elements of what is joined of entries, on each mesh dim on which most elements are such.

    Each rank joins what it has, and zeros. So nothing is sent until the elements are needed, and then once.
    """
    axes = {}
    for m in range(specs[0].mesh.ndim):
        held, others = [0] * specs[0].mesh.size(m), 0
        for spec in specs:
            axis, n = spec.layout[m], spec.shape.numel()
            if axis.home is None:
                others += n
            elif n:
                held = [a + -(-n * b // sum(axis.sizes or ())) for a, b in zip(held, axis.sizes or (), strict=True)]
        sums = all(spec.placements[m] in (Partial(), Replicate()) for spec in specs)
        if sums and any(held) and others <= sum(held):
            axes[m] = AxisLayout(Partial(), tuple(held if sum(map(bool, held)) > 1 else map(int, map(bool, held))))
    return axes


def _as_entry(spec: ShardTensorSpec, axes: Mapping[int, AxisLayout]) -> dict[int, AxisLayout]:
    """The layout of what is joined to entries like ``axes``: as it is, or of the rank that has the most of them."""
    ranks = {m: range(spec.mesh.size(m)) for m in axes}
    home = {m: AxisLayout(Partial(), tuple(int(r == axis.home) for r in ranks[m])) for m, axis in axes.items()}
    return {m: own if (own := spec.layout[m]).home is not None else home[m] for m in axes}


# -- cat and stack ----------------------------------------------------------------------------------------


@operator(_aten.cat.default, _aten.stack.default)
@keeps_owners
def _join(call: AtenCall) -> AtenPlan:
    stacks = call.func == _aten.stack.default
    ndim = call.meta.ndim
    dim = wrap_dim(argument(call, 1, "dim", 0), ndim)
    plain = plain_operands(call)
    # torch lets a 1-D tensor without elements stand in any list.
    joined = [i for i, t in enumerate(call.args[0]) if len(t.shape) == ndim - stacks]
    entries = {} if plain else _joined_entries([call.tensors[0, i] for i in joined])
    specs = {**plain, **call.reduced()}
    candidates = [specs[0, i] for i in joined if (0, i) not in plain]
    if not candidates:
        raise call.refuse("all tensors to be joined are empty", "leave them out")
    pattern = _pattern(candidates, -1 if stacks else dim)
    m = None if stacks else pattern.sharded_dims().get(dim)
    layouts = {i: _operand_layout(specs[0, i], pattern, dim, m) for i in joined}
    if entries:
        pattern = pattern.with_axes(entries)
        layouts = {i: layout.with_axes(_as_entry(call.tensors[0, i], entries)) for i, layout in layouts.items()}
    if m is not None:
        out, join = _along_sharded(call, pattern, layouts, dim, m)
    else:
        out = carry(call, pattern, call.meta, {d: d + (stacks and d >= dim) for d in range(ndim - stacks)})
        function = torch.stack if stacks else torch.cat

        def join(tensors: Sequence[Tensor], *_: int, **__: int) -> Tensor:
            return function([tensors[i] for i in joined], dim)

    targets: dict[Path, ShardTensorSpec] = {**specs, **{(0, i): layout for i, layout in layouts.items()}}
    parts = {path: targets.pop(path) for path in plain}
    return call.plan(out, targets, call=with_own_parts(join, parts))


def _along_sharded(
    call: AtenCall, pattern: ShardTensorSpec, layouts: Mapping[int, ShardTensorSpec], dim: int, m: int
) -> tuple[ShardTensorSpec, Callable[..., Tensor]]:
    """The spec and the local work of a ``cat`` along ``dim``, which mesh dim ``m`` shards.

    Args:
        layouts: of the tensors that are joined, by their place in the list.
    """
    pieces = [(call.args[0][i].shape[dim], spec.sizes[m]) for i, spec in layouts.items()]
    rank, group = pattern.coordinate[m], group_along(pattern.mesh, m)
    sizes = joined_sizes(pieces, pattern.mesh.size(m))
    out = pattern.with_axes({m: AxisLayout(Shard(dim), sizes)}).replace(meta=meta_of(call.meta))
    need = intervals_of(sizes)
    owned: list[list[Interval]] = []
    narrowed: dict[int, tuple[int, int]] = {}
    shapes = []
    for i, (n, own), at in zip(layouts, pieces, boundaries_of([n for n, _ in pieces])):
        if own is None:  # every rank has what it needs of it
            common = (intersect(each, (at, at + n)) for each in need)
            owned.append([each if length(each) else (0, 0) for each in common])
            a, b = owned[-1][rank]
            narrowed[i] = (a - at if b > a else 0, b - a)
        else:
            owned.append([(at + a, at + b) for a, b in intervals_of(own)])
        a, b = owned[-1][rank]
        shapes.append(resized(out.own_shape, dim, b - a))
    dtype, joined = call.meta.dtype, list(layouts)
    assembly = Assembly(dim, shapes, owned, [need], rank, group, like=call.meta)

    def join(tensors: Sequence[Tensor], *_: int, **__: int) -> Tensor:
        parts = (tensors[i].narrow(dim, *narrowed[i]) if i in narrowed else tensors[i] for i in joined)
        return assembly([part.to(dtype) for part in parts])

    return out, join


def _pattern(specs: Sequence[ShardTensorSpec], dim: int) -> ShardTensorSpec:
    """On each mesh dim the sharding of the first tensor that has one there, or of one with much more even shards.

    Those of ``dim``, along which they are joined, stay as they are; -1: there is no such dim.
    """
    pattern = specs[0]
    for m in range(pattern.mesh.ndim):
        taken = [d for d, k in pattern.sharded_dims().items() if k != m]
        axes = dict.fromkeys(spec.layout[m] for spec in specs)
        free = [a for a in axes if isinstance(a.placement, Shard) and a.placement.dim not in taken]
        if not free:
            continue
        first = free[0].placement
        alike = free[:1] if first.is_shard(dim) else [a for a in free if a.placement == first]
        best, *others = ((coarseness(a.sizes or (0,)), _bytes_to(specs, m, a), a) for a in alike)
        for other in others:
            best = other if is_worth_evening(*other[:2], *best[:2]) else best
        pattern = pattern.with_axes({m: best[2]})
    return pattern


def _bytes_to(specs: Sequence[ShardTensorSpec], m: int, axis: AxisLayout) -> int:
    """What all ranks send to shard these tensors like that on a mesh dim."""
    return sum(bytes_between(spec, spec.with_axes({m: axis})) for spec in specs)


def _operand_layout(spec: ShardTensorSpec, pattern: ShardTensorSpec, dim: int, m: int | None) -> ShardTensorSpec:
    """The layout that a tensor needs to be joined to ``pattern`` along ``dim``, sharded on mesh dim ``m`` or free."""
    axes = dict(enumerate(pattern.layout))
    if m is not None:
        own = spec.layout[m]
        if own.placement == Shard(dim) or own.placement.is_replicate():
            axes[m] = own
        else:
            axes[m] = AxisLayout(Shard(dim), chunk_sizes(spec.shape[dim], spec.mesh.size(m)))
    return spec.with_axes(axes)
