"""Redistribution on one mesh: from every layout to every other one, on local tensors.

Nothing here is differentiable; ``tensor.py`` adds autograd. Each mesh dim is one step. Steps that shrink the local
tensor come first, so that later ones send less.

| from \\ to | Shard(j), sizes' | Replicate | Partial(sum) |
|---|---|---|---|
| Shard(i), sizes | exchange of what differs, or all-to-all (i != j) | exchange of shards | own shard among zeros |
| Replicate | own slice, nothing sent | - | the value on rank 0, zeros elsewhere |
| Partial(op) | exchange of slices, reduced in rank order | all-reduce | - |

Where one rank is known to have all of a Partial ([Note: owners] in layout/placements.py), nothing is sent to make it
that rank's shard, or a Partial of which that is not known.

[Note: rounded once] One device rounds a sum once. Contributions to a sum or a product in half precision are therefore
held and sent in float32, and rounded when they have been reduced. So contributions that cancel leave no error of their
own size. The local tensor of a Partial may be float32 where its dtype is not. What an operator computes in float32 is
rounded by :func:`rounded` where it is no contribution. Gradients of weights are rounded in another way, see
[Note: rounded contributions] in weight_gradients.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from operator import mul

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from .._compat import hidden_from_program, recomputed
from .._compat.c10d import (
    c10d_all_gather,
    c10d_all_gather_coalesced,
    c10d_all_reduce,
    c10d_all_reduce_coalesced,
    group_along,
    process_group,
)
from ..layout.caches import cached
from ..layout.dtypes import wide_dtype
from ..layout.intervals import Interval, boundaries_of, intervals_of, length, resized
from ..layout.placements import AxisLayout
from ..layout.spec import ShardTensorSpec
from ..layout.strides import cat_like, lies_dense, with_stride
from ..ranks.history import calling, here, record
from ..ranks.waiting import wait_for
from .exchange import Exchange
from .halo import Fetch
from .tracing import goes_into_graph, graph_operator, no_ticket, ticket_for
from .tracing import wait as wait_in_graph

# For each reduction of a Partial: the collective's name of it, and the same between two tensors.
_REDUCE: dict[str, tuple[dist.ReduceOp.RedOpType, Callable[[Tensor, Tensor], Tensor]]] = {
    "sum": (dist.ReduceOp.SUM, torch.add),
    "product": (dist.ReduceOp.PRODUCT, torch.mul),
    "max": (dist.ReduceOp.MAX, torch.maximum),
    # NaN may be left out, so it takes no other kernel: for what a NaN makes NaN in any case.
    "max of numbers": (dist.ReduceOp.MAX, torch.maximum),
    "min": (dist.ReduceOp.MIN, torch.minimum),
}
# Dtypes that backends cannot reduce are sent as one that they can.
_WIDENED = {torch.bool: torch.uint8, torch.int16: torch.int32}
# Dtypes that travel as they are, and are summed by every backend.
_SUMMABLE = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


def redistribute_local(local: Tensor, src: ShardTensorSpec, dst: ShardTensorSpec) -> Tensor:
    """This rank's local tensor under ``dst``, given the one under ``src``. Collective over mesh dims that change."""
    label, steps = _steps(src, dst)
    if not steps:
        return local
    caller = here.operator
    here.operator = caller or label
    try:
        for step in steps:
            local = step(local)
    finally:
        here.operator = caller
    return local


@cached(maxsize=4096)
def _steps(src: ShardTensorSpec, dst: ShardTensorSpec) -> tuple[str, tuple[Callable[[Tensor], Tensor], ...]]:
    """What is done with a local tensor, one mesh dim after the other, and what it is called: all that is known before
    there is data.
    """
    if src.mesh != dst.mesh:
        raise ValueError(f"cannot redistribute from mesh {src.mesh} to {dst.mesh}; only the same mesh is possible")
    steps = [_step(before, after, m) for before, after, m in _stages(src, dst)]
    wide = src.held_dtype
    if steps and wide != src.tensor_meta.dtype:  # contributions that the caller gave may be narrow
        steps = [lambda local: local.to(wide), *steps, partial(rounded, spec=dst)]
    if steps and dst.is_replicate() and lies_dense(dst.shape, dst.stride):  # views take a whole tensor as it lies
        steps.append(partial(with_stride, stride=dst.stride))
    return f"redistribute {src.in_short} to {dst.in_short}" if steps else "", tuple(steps)


@cached(maxsize=4096)
def bytes_between(src: ShardTensorSpec, dst: ShardTensorSpec) -> int:
    """How many bytes all ranks of the mesh together send for a redistribution, a few of reductions aside."""
    return sum(_bytes_of_stage(*stage) for stage in _stages(src, dst))


@cached(maxsize=4096)
def slices_between(src: ShardTensorSpec, dst: ShardTensorSpec) -> tuple[tuple[int, int, int], ...] | None:
    """The slices of a replicated tensor that are this rank's shard: dim, start and length. None for other layouts."""
    if not src.is_replicate() or dst.partial_mesh_dims() or dst.is_replicate():
        return None
    own = ((d, dst.interval(m)) for d, m in dst.sharded_dims().items())
    return tuple((d, start, stop - start) for d, (start, stop) in own)


def _bytes_of_stage(src: ShardTensorSpec, dst: ShardTensorSpec, m: int) -> int:
    """Of a step of :func:`bytes_between`: the specs differ on mesh dim ``m`` only."""
    old, new, ranks = src.placements[m], dst.placements[m], src.mesh.size(m)
    copies = math.prod(src.mesh.size(n) for n, p in enumerate(src.placements) if n != m and not isinstance(p, Shard))
    size = src.shape.numel() * src.held_dtype.itemsize * copies
    if not size or old.is_replicate() or isinstance(new, Partial):
        return 0
    if isinstance(old, Partial):
        return size * (ranks - 1) * (1 if isinstance(new, Shard) else 2)
    assert isinstance(old, Shard)
    if not isinstance(new, Shard):
        return size * (ranks - 1)
    before, after = src.sizes_along(m), dst.sizes_along(m)
    if old.dim == new.dim:
        bounds, others = boundaries_of(before), boundaries_of(after)
        starts, stops = map(max, bounds, others), map(min, bounds[1:], others[1:])
        entries = src.shape[old.dim]
        kept = sum(b - a for a, b in zip(starts, stops) if a < b)
    else:
        entries = src.shape[old.dim] * src.shape[new.dim]
        kept = sum(map(mul, before, after))
    return size // entries * (entries - kept)


def rounded(local: Tensor, spec: ShardTensorSpec) -> Tensor:
    """What was computed in float32 in the half precision of its spec; contributions as they are."""
    dtype = spec.tensor_meta.dtype
    if local.dtype in (dtype, spec.held_dtype) or local.dtype != wide_dtype(dtype):
        return local
    return local.to(dtype)


def _stages(src: ShardTensorSpec, dst: ShardTensorSpec) -> Iterator[tuple[ShardTensorSpec, ShardTensorSpec, int]]:
    """The specs before and after each step, and the mesh dim on which they differ."""
    while (step := _next_step(src, dst)) is not None:
        m, axis = step
        after = src.with_axes({m: axis})
        yield src, after, m
        src = after


def _next_step(src: ShardTensorSpec, dst: ShardTensorSpec) -> tuple[int, AxisLayout] | None:
    """The next mesh dim to change, and its layout after that step."""
    differing = [m for m in range(src.mesh.ndim) if src.layout[m] != dst.layout[m]]
    if not differing:
        return None
    sharded = src.sharded_dims()

    def blocked(m: int) -> bool:
        """Whether another mesh dim still shards the tensor dim that ``m`` is to shard."""
        p = dst.placements[m]
        return isinstance(p, Shard) and sharded.get(p.dim, m) != m

    def cost(m: int) -> int:
        """First what shrinks the local tensor (a new Shard), then what keeps its size, then what enlarges it."""
        if not isinstance(dst.placements[m], Shard):
            return 2
        return 1 if isinstance(src.placements[m], Shard) else 0

    free = [m for m in differing if not blocked(m)]
    if free:
        m = min(free, key=cost)
        owner, p = dst.layout[m].owner, src.placements[m]
        if owner is not None and isinstance(p, Shard) and not _is_of_owner(owner, src.sizes_along(m)):
            return m, AxisLayout(p, tuple(src.shape[p.dim] * (r == owner) for r in range(src.mesh.size(m))))
        return m, dst.layout[m]
    # Mesh dims that trade tensor dims with each other: one of them has to be replicated in between.
    return differing[0], AxisLayout(Replicate())


def _step(src: ShardTensorSpec, dst: ShardTensorSpec, m: int) -> Callable[[Tensor], Tensor]:
    """One cell of the table above: the specs differ on mesh dim ``m`` only."""
    old, new = src.placements[m], dst.placements[m]
    rank, ranks = src.coordinate[m], src.mesh.size(m)
    group = group_along(src.mesh, m)
    if isinstance(old, Shard):
        length_of_all = src.shape[old.dim]
        if isinstance(new, Shard) and new.dim != old.dim:
            own, blocks = [intervals_of(src.sizes_along(m))], [intervals_of(dst.sizes_along(m))]
            before, after = old.dim, new.dim
            with hidden_from_program():
                like = torch.empty_strided(src.shape, src.stride, device="meta")
            return lambda local: swap_blocks([local], before, own, after, blocks, rank, group, like)[0]
        if isinstance(new, Partial):
            return partial(_own_among_zeros, old.dim, src.interval(m), length_of_all, new)
        need = intervals_of(dst.sizes_along(m)) if isinstance(new, Shard) else ((0, length_of_all),) * ranks
        fetch = Fetch.of(src, {old.dim: need})
        return lambda local: fetch.read(local)[0]
    if isinstance(old, Partial):
        if isinstance(new, Shard):
            if _is_of_owner(src.layout[m].owner, dst.sizes_along(m)):
                dim, size = new.dim, dst.sizes_along(m)[rank]
                return lambda local: local.narrow(dim, 0, size)
            return partial(reduce_scatter, old, new.dim, intervals_of(dst.sizes_along(m)), rank, group)
        reduced = partial(all_reduce, group=group, op=old.reduce_op)
        if not isinstance(new, Partial):
            return reduced
        if new == old and dst.layout[m].owner is None:
            return lambda local: local
        other, has_it = new, rank == (dst.layout[m].owner or 0)
        return lambda local: _replicate_to_partial(other, has_it, reduced(local))
    if isinstance(new, Shard):
        start, stop = dst.interval(m)
        dim = new.dim
        # A copy, so that the shard does not keep the memory of the replicated tensor alive.
        return lambda local: local.narrow(dim, start, stop - start).clone(memory_format=torch.preserve_format)
    assert isinstance(new, Partial)
    return partial(_replicate_to_partial, new, rank == (dst.layout[m].owner or 0))


# -- collectives --------------------------------------------------------------------------------------------


def all_reduce(local: Tensor, group: dist.ProcessGroup, op: str = "sum") -> Tensor:
    """The reduction of all ranks' ``local``, in a new tensor."""
    return start_all_reduce(local, group, op)()


@recomputed(overwrite=False)
def start_all_reduce(
    local: Tensor, group: dist.ProcessGroup, op: str = "sum", *, overwrite: bool = False
) -> Callable[[], Tensor]:
    """Start an :func:`all_reduce`; the function that is returned waits for it and returns the result.

    Args:
        overwrite: ``local`` is not used elsewhere, so that it may become the result.
    """
    if group.size() == 1:
        return lambda: local if overwrite else local.clone()
    if goes_into_graph(local):
        ticket = _all_reduce(local, op, group.group_name, here.operator)
        return lambda: wait_in_graph(ticket, local, local.shape, None)
    record(group.group_name, f"all-reduce {op}", local.dtype, local.numel())
    via = _WIDENED.get(local.dtype)
    if via is not None:
        value = local.to(via)
    else:
        kept = overwrite and local.is_contiguous()
        value = local if kept else local.clone(memory_format=torch.contiguous_format)
    if value.is_complex() and op == "product":  # no backend multiplies complex numbers
        return all_gather(value, group).prod(0).clone
    if value.is_complex() and op != "sum":
        raise ValueError(f"Partial({op!r}) of complex numbers is not defined")
    wire = torch.view_as_real(value) if value.is_complex() else value  # a sum can be taken part by part
    extreme = op in ("max", "min") and value.is_floating_point()
    if extreme:
        wire = _ordered(value, op)
    work = c10d_all_reduce(wire, _REDUCE[op][0], group)

    def finish() -> Tensor:
        wait_for(work, wire, group)
        return _unordered(wire, local.dtype) if extreme else value if via is None else value.to(local.dtype)

    return finish


@recomputed(overwrite=False)
def start_sums(
    tensors: Sequence[Tensor],
    group: dist.ProcessGroup,
    *,
    overwrite: bool = False,
    via: dist.ProcessGroup | None = None,
) -> Callable[[], list[Tensor]]:
    """Start the sum over the ranks of each of several tensors of one dtype: one collective for all of them.

    Args:
        overwrite: they are not used elsewhere, so that they may become the sums.
        via: a group of the same ranks that carries it in place of ``group``, which it is recorded for.
    """
    dtype = tensors[0].dtype
    if dtype not in _SUMMABLE or group.size() == 1 or (type(tensors[0]) is not Tensor and goes_into_graph(tensors[0])):
        finish = start_all_reduce(torch.cat([t.detach().reshape(-1) for t in tensors]), group, overwrite=True)

        def split() -> list[Tensor]:
            pieces = finish().split_with_sizes([t.numel() for t in tensors])
            return [piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True)]

        return split
    elements = sum(map(Tensor.numel, tensors))
    record(group.group_name, "all-reduce sum", dtype, elements)
    # Every rank's numbers have to be in one order in memory, whatever the memory formats. Flat, because strides of dims
    # of length 1 may be any, and gloo takes those that it has not made itself for overlapping memory. Detached, because
    # the transport's thread may hold them longer than this one waits, and autograd copies gradients that others hold.
    totals = [
        t if overwrite and t.is_contiguous() else t.detach().clone(memory_format=torch.contiguous_format)
        for t in tensors
    ]
    summing = c10d_all_reduce_coalesced([t.detach().view(-1) for t in totals], via or group)

    def wait() -> list[Tensor]:
        wait_for(summing, totals[0], group)
        return totals

    return wait


@graph_operator("all_reduce(Tensor local, str op, str group, str operator) -> Tensor", no_ticket)
def _all_reduce(local: Tensor, op: str, group: str, operator: str) -> Tensor:
    """See [Note: start and wait] in tracing.py."""
    with calling(operator):
        finish = start_all_reduce(local, process_group(group), op)
    return ticket_for(lambda: finish().contiguous())


# The integers of the same width, as which max and min compare floating-point numbers.
_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def _ordered(value: Tensor, op: str) -> Tensor:
    """Integers in the order of the numbers, with NaN beyond all of them.

    torch's max and min return NaN where there is one; those of backends may return any of the numbers.
    """
    bits = value.view(_BITS[value.dtype])
    info = torch.iinfo(bits.dtype)
    ordered = bits ^ ((bits >> (info.bits - 1)) & info.max)  # the magnitude of negative numbers counts backwards
    ordered = torch.where(value.isnan(), info.max if op == "max" else info.min, ordered)
    return ordered.to(_WIDENED.get(ordered.dtype, ordered.dtype))


def _unordered(ordered: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of :func:`_ordered`: flipping the magnitude of negative numbers twice restores it."""
    bits = ordered.to(_BITS[dtype])
    info = torch.iinfo(bits.dtype)
    return (bits ^ ((bits >> (info.bits - 1)) & info.max)).view(dtype)


@recomputed()
def all_gather(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's ``local`` (of one shape), stacked in rank order. For small tensors: each rank gets all of them."""
    ranks = group.size()
    if ranks == 1 or not local.numel():  # equal shapes: no rank of the group has any element
        return local.expand(ranks, *local.shape)
    if type(local) is not Tensor and goes_into_graph(local):
        return _all_gather(local, ranks, group.group_name, here.operator)
    record(group.group_name, "all-gather", local.dtype, local.numel())
    gathered = local.new_empty((ranks, *local.shape))
    wire = gathered
    if local.is_complex():
        wire, local = torch.view_as_real(gathered), torch.view_as_real(local.resolve_conj())
    wait_for(c10d_all_gather(wire.view(-1), local.contiguous().view(-1), group), gathered, group)
    return gathered


@recomputed()
def all_gather_each(locals_: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
    """What :func:`all_gather` gives of each of several tensors of one shape and dtype: ``(tensors, ranks, *shape)``.

    One collective, into which devices need not pack them.
    """
    first, ranks = locals_[0], group.size()
    if ranks == 1 or not first.numel() or first.is_complex() or type(first) is not Tensor:
        return all_gather(torch.stack(list(locals_)), group).movedim(0, 1)
    record(group.group_name, "all-gather", first.dtype, len(locals_) * first.numel())
    gathered = first.new_empty((len(locals_), ranks, *first.shape))
    flat = list(gathered.view(len(locals_), -1).unbind())
    sent = [t.contiguous().view(-1) for t in locals_]
    wait_for(c10d_all_gather_coalesced(flat, sent, group), gathered, group)
    return gathered


@graph_operator(
    "all_gather(Tensor local, int ranks, str group, str operator) -> Tensor",
    lambda local, ranks, group, operator: local.new_empty((ranks, *local.shape)),
)
def _all_gather(local: Tensor, ranks: int, group: str, operator: str) -> Tensor:
    """See [Note: communication in graphs] in tracing.py."""
    with calling(operator):
        return all_gather(local, process_group(group))


# -- exchanges ----------------------------------------------------------------------------------------------


def swap_blocks(
    locals_: Sequence[Tensor],
    old_dim: int,
    owns: Sequence[Sequence[Interval]],
    new_dim: int,
    blocks: Sequence[Sequence[Interval]],
    rank: int,
    group: dist.ProcessGroup,
    like: Tensor | None = None,
) -> list[Tensor]:
    """From shards of ``old_dim`` to shards of ``new_dim``, for several tensors of one dtype in one all-to-all.

    Rank ``r`` gets the block ``blocks[i][r]`` (along ``new_dim``) of every rank's shard of tensor ``i``; the shards are
    ``owns[i]`` along ``old_dim``. What comes to an empty shard, whose memory format says little, gets that of ``like``.
    """
    pieces = [
        [t.narrow(new_dim, block[r][0], length(block[r])) for t, block in zip(locals_, blocks, strict=True)]
        for r in range(group.size())
    ]
    mine = pieces[rank]
    if len(pieces) == 1:
        return mine
    shapes = [
        [resized(part.shape, old_dim, length(own[r])) for part, own in zip(mine, owns, strict=True)]
        for r in range(len(pieces))
    ]
    arrived = zip(*swapped(pieces, shapes, rank, group), strict=True)
    whole = [resized(part.shape, old_dim, sum(map(length, own))) for part, own in zip(mine, owns, strict=True)]
    return [
        cat_like(list(parts), old_dim, t if like is None or t.numel() else like, shape)
        for parts, t, shape in zip(arrived, locals_, whole, strict=True)
    ]


def swapped(
    pieces: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[Sequence[int]]],
    rank: int,
    group: dist.ProcessGroup,
    like: Tensor | None = None,
) -> list[Sequence[Tensor]]:
    """``pieces[r]`` sent to every rank ``r``; returns what comes from each, of ``shapes[r]``. The own ones stay.

    Args:
        like: has their dtype and device, which otherwise an own piece tells.
    """
    if len(pieces) == 1:
        return list(pieces)
    others = [r for r in range(len(pieces)) if r != rank]
    sent = [(r, piece) for r in others for piece in pieces[r]]
    expected = [(r, shape) for r in others for shape in shapes[r]]
    exchange = Exchange([(r, piece.shape) for r, piece in sent], expected, group, len(others))
    like = pieces[rank][0] if like is None else like
    received = iter(exchange.start([piece for _, piece in sent], like).wait())
    return [pieces[rank] if r == rank else [next(received) for _ in row] for r, row in enumerate(shapes)]


def reduce_scatter(
    partial: Partial, dim: int, blocks: Sequence[Interval], rank: int, group: dist.ProcessGroup, local: Tensor
) -> Tensor:
    """The slice ``blocks[rank]`` of the reduced value. Contributions are reduced in rank order, so runs repeat exactly.

    An exchange rather than the backends' reduce-scatter, whose order of additions may differ from run to run.
    """
    pieces = [[local.narrow(dim, a, b - a)] for a, b in blocks]
    (mine,) = pieces[rank]
    if len(blocks) == 1:
        return mine.clone()
    contributions = [piece for (piece,) in swapped(pieces, [[mine.shape]] * len(blocks), rank, group)]
    return reduced(contributions, partial.reduce_op)


def reduced(contributions: Sequence[Tensor], op: str) -> Tensor:
    """The reduction of contributions that are here, one after the other."""
    return reduce(_REDUCE[op][1], contributions)


# -- to Partial, without communication ------------------------------------------------------------------------


def _own_among_zeros(dim: int, own: Interval, total: int, partial: Partial, local: Tensor) -> Tensor:
    # Zero is the neutral element of a sum only.
    if partial.reduce_op != "sum":
        raise ValueError(f"cannot redistribute a Shard to {partial}; only to Partial('sum')")
    out = local.new_zeros(resized(local.shape, dim, total))
    out.narrow(dim, own[0], own[1] - own[0]).copy_(local)
    return out


def _replicate_to_partial(partial: Partial, has_it: bool, local: Tensor) -> Tensor:
    op = partial.reduce_op
    if op in ("max", "min") or has_it:  # the extreme of equal values is the value
        return local
    return torch.zeros_like(local) if op == "sum" else torch.ones_like(local)


# -- to a Shard of what is on one rank, without communication ---------------------------------------------------


def _is_of_owner(owner: int | None, sizes: Sequence[int]) -> bool:
    """Whether the rank that has all of a Partial has all of what it becomes the shards of."""
    return owner is not None and not any(n for rank, n in enumerate(sizes) if rank != owner)
