"""One rank's work in attention: its queries against all blocks of keys, forward and backward, on local tensors.

Where keys are fetched, they come in one exchange before the first kernel: the rest is as for keys that every rank has.
Backward their gradients return to the owners, who add them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..._compat import AutogradFunction, alias
from ..._compat.c10d import group_along
from ...communication.exchange import plan_intervals
from ...communication.halo import Axis, Fetch
from ...communication.redistribute import all_reduce, swap_blocks, swapped
from ...errors import refuse
from ...layout.caches import cached
from ...layout.intervals import intersect, intervals_of, length, resized
from ...operators.autocast import without_autocast
from ..common.alignment import cast, wide_dtype
from ..common.ring import Form, Trip
from .blockwise import RunningSoftmax, pieces
from .kernels import Block, Dropout, Explicit, Kernel, finite, fused_kernel, has_fused_kernels
from .layout import NAME, AttentionLayout, Parts

_DIMS = 4  # that torch's kernels take
# Of all keys and values: up to here those that are fetched are kept for backward, and larger ones fetched again.
KEPT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class BlockPart:
    """Some rows and columns of one block, as ``(start, length)`` in the tensors at hand; None for all of them.

    Attributes:
        mask_columns: where the columns are in this rank's mask.
        causal: the last row sees all columns, each before it one less.
        at: the part's place, for dropout.
    """

    rows: tuple[int, int] | None
    columns: tuple[int, int] | None
    mask_columns: tuple[int, int]
    causal: bool
    at: tuple[int, int]

    def of_rows(self, t: Tensor, dim: int = -2) -> Tensor:
        """This part's rows of a tensor that has them along ``dim``."""
        return t if self.rows is None else t.narrow(dim, *self.rows)

    def of_columns(self, t: Tensor) -> Tensor:
        """This part's columns of keys or values."""
        return t if self.columns is None else t.narrow(-2, *self.columns)

    def of_mask(self, mask: Tensor | None) -> Tensor | None:
        """This part of the mask, or of something of its shape; dims of length 1 are broadcast."""
        if mask is None:
            return None
        if mask.shape[-2] > 1:
            mask = self.of_rows(mask)
        return mask.narrow(-1, *self.mask_columns) if mask.shape[-1] > 1 else mask

    def of(self, q: Tensor, keys_and_values: Sequence[Tensor], mask: Tensor | None) -> Block:
        """This part of the block."""
        k, v = map(self.of_columns, keys_and_values)
        return Block(self.of_rows(q), k, v, self.of_mask(mask), self.causal, self.at)


class AttentionWork:
    """What a call asks of one rank, from specs alone. Made by :func:`work_of`.

    Attributes:
        layout: who has and computes what.
        query: spec of the queries.
        shift: which keys a query sees, see :func:`~.blockwise.pieces`.
        scale: of the scores.
        exchanges: whether there are blocks on other ranks, so that results have to be put together.
        group: of the ranks that exchange something; None where nothing is exchanged.
        fetch: of keys and values next to each other; None where they are at hand.
        keeps: whether what is fetched is kept for the backward pass. Otherwise it is fetched again there: each rank
            keeps its shard alone, for one more exchange.
        joins: whether keys and values travel as one tensor, next to each other.
        alone: whether one call of a kernel gives the result.
        empty: whether some rank's queries, keys or values are; torch's kernels crash on such.
    """

    def __init__(self, layout: AttentionLayout, shift: int | None, scale: float) -> None:
        query, key, value, _ = layout.targets
        m = layout.mesh_dim
        self.layout, self.query, self.shift, self.scale = layout, query, shift, scale
        self._parts: dict[int, Sequence[BlockPart]] = {}
        self.exchanges = m is not None and layout.head_sizes is None and layout.fetched is None
        self.group = None if m is None else group_along(query.mesh, m)
        self.fetch = _fetch(layout)
        self.keeps = sum(t.shape.numel() * t.held_dtype.itemsize for t in (key, value)) < KEPT_BYTES
        self.joins = (self.fetch is not None or layout.ring is not None) and key.shape[:-1] == value.shape[:-1]
        self._widths = [key.shape[-1], value.shape[-1]]
        first = () if self.exchanges else self._parts_of(0)
        self.alone = len(first) == 1 and first[0].rows is None
        sizes = [spec.sizes_along(axis) for spec in (query, key, value) for axis in spec.sharded_dims().values()]
        shapes = query.shape, key.shape, value.shape
        self.empty = any(0 in n for n in (*shapes, *sizes, *(layout.head_sizes or ())))
        self._trips: dict[Any, Trip] = {}

    @property
    def is_ours(self) -> bool:
        """Whether it takes more than torch's own function on the keys that are at hand, or fetched.

        torch's is not taken after a fetch either if it has a fused kernel (without autograd in between, fetching and
        computing is one step), or if some rank could not take it: all ranks refuse second derivatives alike.
        """
        if self.empty:
            return True
        if self.fetch is not None:
            query = self.query
            on_cpu = query.mesh.device_type == "cpu"
            return self.shift is not None or (
                self.kernel().fused if on_cpu else has_fused_kernels(query.mesh.device_type, query.tensor_meta.dtype)
            )
        splits_rows = len(self.query.shape) - 2 in self.query.sharded_dims()
        return self.exchanges or (self.shift is not None and (splits_rows or self.shift != 0))

    def by_heads(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: Dropout | None) -> Tensor:
        """Shard the heads instead of the sequence, compute, and shard the sequence again."""
        layout = self.layout
        m = layout.mesh_dim
        assert m is not None and layout.head_sizes is not None
        rank = self.query.coordinate[m]
        sequences = [intervals_of(target.sizes_along(m)) for target in layout.targets[:3]]
        heads = [intervals_of(sizes) for sizes in layout.head_sizes]
        dims = -2, -3
        if q.shape == k.shape == v.shape:  # in one tensor, which takes fewer kernels
            (together,) = _Swap.apply(dims, sequences[:1], heads[:1], rank, self.group, torch.stack((q, k, v)))
            q, k, v = together.unbind()
        else:
            q, k, v = _Swap.apply(dims, sequences, heads, rank, self.group, q, k, v)
        target = layout.targets[3]
        if mask is not None and target is not None and target.placements[m].is_replicate():
            if mask.ndim > 2 and mask.shape[-3] > 1:
                mask = mask.narrow(-3, heads[0][rank][0], q.shape[-3])
        out = self.attend(q, k, v, mask, dropout)
        (out,) = _Swap.apply(dims[::-1], heads[:1], sequences[:1], rank, self.group, out)
        return out

    def balanced(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: Dropout | None) -> Tensor:
        """Exchange parts of the sequence, so that each rank computes as much, and back: [Note: balance]."""
        m, balance = self.layout.mesh_dim, self.layout.balance
        assert m is not None and balance is not None
        rank = self.query.coordinate[m]
        q, k, v = _Move.apply(balance.shards, balance.parts, rank, self.group, q, k, v)
        out = self.attend(q, k, v, mask, dropout)
        (out,) = _Move.apply(balance.parts[:1], balance.shards[:1], rank, self.group, out)
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: Dropout | None) -> Tensor:
        """The result for the local queries; blocks of keys come from other ranks where the layout says so."""
        by_torch = not self.is_ours and dropout is None
        missing = 0 if by_torch and self.fetch is None else max(0, _DIMS - q.ndim)  # torch's kernel depends on it
        if missing:
            q, k, v = (t[(None,) * missing] for t in (q, k, v))
        if by_torch:
            k, v = self.split(self.held(k, v))
            groups, causal = any(t.shape[:-2] != q.shape[:-2] for t in (k, v)), self.shift is not None
            out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=self.scale, enable_gqa=groups)
        else:
            out = _Attention.apply(q, k, v, mask, self, self.kernel(dropout))
        return out[(0,) * missing] if missing else out

    def kernel(self, dropout: Dropout | None = None) -> Kernel:
        """One of torch's where it computes this and gives the log-sum-exp; explicit scores elsewhere."""
        query, _, value, mask = self.layout.targets
        on_cpu = query.mesh.device_type == "cpu"
        # Devices compose what has other dims; the CPU's kernel is given further ones of length 1.
        if dropout is not None or len(query.shape) > _DIMS or not (on_cpu or len(query.shape) == _DIMS):
            return Explicit(self.scale, dropout)
        sizes = query.shape[-1], value.shape[-1]
        return fused_kernel(
            query.mesh.device_type, query.tensor_meta.dtype, *sizes, masked=mask is not None, scale=self.scale
        )

    # -- keys and values ----------------------------------------------------------------------------------------------

    def held(self, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        """The keys and values to compute with, as they travel: one tensor where they are joined. Differentiable."""
        if not self.joins:
            return k, v
        both = torch.cat((k, v), -1)
        return (both if self.fetch is None else self.fetch(both),)

    def split(self, held: Sequence[Tensor]) -> Sequence[Tensor]:
        """Keys and values of :meth:`held`, or their gradients."""
        return held[0].split_with_sizes(self._widths, -1) if self.joins else held[:2]

    def returned(self, sums: Sequence[Tensor]) -> Sequence[Tensor]:
        """The gradients of what this rank held, out of the ranks' gradients of what they fetched."""
        if self.fetch is None:
            return sums
        return (self.fetch.backward(cast(sums[0], wide_dtype(sums[0].dtype))),)

    # -- blocks ---------------------------------------------------------------------------------------------------

    def blocks(self, held: Sequence[Tensor], mask: Tensor | None) -> Iterator[tuple[int, Sequence[Tensor]]]:
        """``(index of parts, what is held and the mask that is sent along)`` of all that this rank computes with."""
        if self.layout.ring is None:
            yield 0, held
        else:
            own = self.sent(held, mask)
            yield from self.trip(own).travel(own)

    def sent(self, held: Sequence[Tensor], mask: Tensor | None) -> Sequence[Tensor]:
        """This rank's block, as it is sent around the ring."""
        return [*held, mask] if self.layout.mask_travels and mask is not None else held

    def mask_of(self, block: Sequence[Tensor]) -> Tensor | None:
        """The mask that is sent along with a block."""
        return block[-1] if self.layout.mask_travels and len(block) == 3 - self.joins else None

    def trip(self, own: Sequence[Tensor], gradients: int = 0) -> Trip:
        """The way of all blocks around the ring, and home with gradients of the first tensors of each block."""
        key = gradients, *((t.shape, t.dtype) for t in own)
        found = self._trips.get(key)
        if found is None:
            assert self.layout.ring is not None and self.group is not None
            sizes = [sum(map(length, columns)) for columns in self.layout.columns]
            dims = (-2,) * (2 - self.joins) + (-1,)  # of the keys: in those and the values, and in the mask
            forms = [Form(tuple(t.shape), t.ndim + dim, t.dtype) for t, dim in zip(own, dims)]
            grad_forms = [form._replace(dtype=wide_dtype(own[0].dtype)) for form in forms[:gradients]]
            found = self._trips[key] = Trip(self.layout.ring, sizes, forms, grad_forms, self.group)
        return found

    def parts_for(self, index: int, q: Tensor) -> Sequence[BlockPart]:
        """The parts of block ``index`` that have to be computed."""
        return () if 0 in q.shape[:-1] else self._parts_of(index)  # on no batch or heads torch's kernel crashes

    def _parts_of(self, index: int) -> Sequence[BlockPart]:
        found = self._parts.get(index)
        if found is None:  # when the block comes by: meanwhile the next one is on its way
            found = self._parts[index] = list(_parts(self.layout, index, self.shift))
        return found


work_of = cached(maxsize=1024)(AttentionWork)  # made once


def _fetch(layout: AttentionLayout) -> Fetch | None:
    _, k, v, _ = layout.targets
    m = layout.mesh_dim
    if layout.fetched is None or m is None:
        return None
    *rows, features = (1,) * (_DIMS - len(k.shape)) + k.local_shape()
    transfers = plan_intervals(intervals_of(k.sizes_along(m)), layout.fetched, k.coordinate[m])
    return Fetch([Axis(len(rows) - 1, m, transfers)], k.mesh, (*rows, features + v.shape[-1])) or None


def _parts(layout: AttentionLayout, index: int, shift: int | None) -> Iterator[BlockPart]:
    columns = layout.columns[index]
    rows_here, columns_here = (sum(map(length, parts)) for parts in (layout.rows, columns))
    first_column = 0 if layout.mask_travels else columns[0][0] - layout.mask_start  # in the mask
    for i, piece in enumerate(pieces(layout.rows, columns, shift, layout.squares)):
        all_rows, all_columns = piece.rows == (0, rows_here), piece.columns == (0, columns_here)
        yield BlockPart(
            None if all_rows else (piece.rows[0], length(piece.rows)),
            None if all_columns else (piece.columns[0], length(piece.columns)),
            (first_column + piece.columns[0], length(piece.columns)),
            piece.causal,
            (index, i),
        )


class _Attention(AutogradFunction):
    """Local queries against all blocks of keys. Local tensors in and out."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, work: AttentionWork, kernel: Kernel) -> Any:
        out, kept = forward(work, kernel, q, k, v, mask)
        ctx.work, ctx.kernel = work, kernel
        ctx.save_for_backward(q, k, v, mask, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        needed, saved = ctx.needs_input_grad, ctx.saved_tensors  # once, as checkpointing asks for
        with torch.no_grad(), without_autocast(grad.device.type):
            grads = backward(ctx.work, ctx.kernel, needed, grad, *saved)
        if torch.is_grad_enabled():
            grads = _Once.apply(ctx.work, *grads, grad, *saved[:4])
        return (*(g if n else None for g, n in zip(grads, needed)), None, None)


class _Once(AutogradFunction):
    """First derivatives, four of them, that refuse to be differentiated by what follows, from which they were computed.

    torch's own attention on the CPU refuses that as well.
    """

    @staticmethod
    def forward(ctx: Any, work: AttentionWork, *tensors: Any) -> Any:
        ctx.work = work
        return tuple(None if g is None else alias(g) for g in tensors[:4])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise refuse(
            NAME,
            ctx.work.query,
            "it cannot be differentiated twice",
            "write the attention as products and a softmax, which can be differentiated twice",
        )


def forward(
    work: AttentionWork, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The result for the local queries, and what :func:`backward` needs besides the operands.

    That is the result (as fused kernels keep it, in the dtype of ``q``), the ``finite(lse)``, and what was fetched, if
    that is kept.
    """
    with without_autocast(q.device.type):
        held = work.held(k, v)
        parts = work.parts_for(0, q)
        if work.alone and parts:
            own = cast(q, wide_dtype(q.dtype)) if kernel.wide else q
            out, lse = kernel.attend(parts[0].of(own, work.split(held), mask), alone=True)
            lse = lse if kernel.fused else finite(lse)
        else:
            out, lse = _by_blocks(work, kernel, q, held, v.shape[-1], mask)
            lse = finite(lse) if kernel.hides or mask is not None else lse
        rounded = cast(out, q.dtype)
        # Of fewer dims one device's kernel is never a fused one: its gradient is computed from a result in float32.
        kept = out if len(work.query.shape) < _DIMS else rounded
        return rounded, (kept, lse, *held) if work.fetch is not None and work.keeps else (kept, lse)


def _by_blocks(
    work: AttentionWork, kernel: Kernel, q: Tensor, held: Sequence[Tensor], features: int, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Result and log-sum-exp, put together of those of blocks."""
    wide = wide_dtype(q.dtype)
    q = cast(q, wide) if kernel.wide else q
    running = RunningSoftmax(q, features, wide, kernel.hides or mask is not None)
    for index, block in work.blocks(held, mask):
        of_block = work.mask_of(block)
        of_block = mask if of_block is None else of_block
        for part in work.parts_for(index, q):
            out, lse = kernel.attend(part.of(q, work.split(block), of_block))
            running.add(0 if part.rows is None else part.rows[0], out, lse)
    out, lse = running.result()
    if work.exchanges and work.layout.ring is None:
        out, lse = _over_ranks(out, lse, work.group)
    return out, lse


def _over_ranks(out: Tensor, lse: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """The result of queries that every rank of the group has, of which each has seen its own keys."""
    assert group is not None
    largest = finite(all_reduce(lse, group, "max"))
    weight = (lse - largest).exp().unsqueeze(-1)
    total = all_reduce(torch.cat([out * weight, weight], dim=-1), group)
    out, weight = total[..., :-1], total[..., -1:]
    return torch.where(weight == 0, 0.0, out / weight), weight.squeeze(-1).log() + largest


def backward(
    work: AttentionWork, kernel: Kernel, needed: Sequence[bool], grad: Tensor, *saved: Any
) -> list[Tensor | None]:
    """Gradients of q, k, v and mask; those that are not ``needed`` may be left out.

    Args:
        grad: of the result.
        saved: the operands, and what :func:`forward` returned besides the result.
    """
    q, k, v, mask, out, lse, *fetched = saved
    held = fetched or work.held(k, v)
    wide = wide_dtype(q.dtype)
    keys_needed, mask_needed = needed[1] or needed[2], mask is not None and needed[3]
    if mask_needed and not kernel.of_masks:
        kernel = Explicit(kernel.scale)
    travels = work.layout.mask_travels
    of_mask = torch.zeros_like(mask, dtype=wide) if mask is not None and mask_needed and not travels else None
    own = q
    if kernel.wide:
        grad, own, out = (cast(t, wide) for t in (grad, q, out))
    gradients = _Gradients(work, kernel, wide, grad, own, mask, out, lse, mask_needed, of_mask)
    if work.layout.ring is None:
        sums: Sequence[Tensor] = gradients.contribute(0, held)
        sums = work.returned(sums) if keys_needed else sums
    elif keys_needed or (mask_needed and travels):
        block = work.sent(held, mask)
        to_return = len(block) if mask_needed and travels else len(held)
        sums = work.trip(block, to_return).travel_and_return(block, gradients.contribute)
    else:
        for index, block in work.blocks(held, mask):
            sums = gradients.contribute(index, block)
    of_queries = torch.zeros_like(q) if gradients.of_queries is None else gradients.of_queries
    grads = [of_queries, *work.split(sums), sums[-1] if travels and mask_needed else of_mask]
    return [None if t is None or g is None else cast(g, t.dtype) for g, t in zip(grads, (q, q, q, mask), strict=True)]


@dataclass(slots=True)
class _Gradients:
    """The gradients of one rank's queries and mask, summed up over the blocks that come by.

    Attributes:
        of_queries: None as long as none has come.
        of_mask: None where it is not needed, or travels with the mask.
    """

    work: AttentionWork
    kernel: Kernel
    dtype: torch.dtype  # of sums
    grad: Tensor
    q: Tensor
    mask: Tensor | None
    out: Tensor
    lse: Tensor
    mask_needed: bool
    of_mask: Tensor | None
    of_queries: Tensor | None = None

    def contribute(self, index: int, block: Sequence[Tensor]) -> list[Tensor]:
        """What this rank contributes to the gradients of a block of keys, values and the mask that is sent along."""
        work = self.work
        parts, joins = work.parts_for(index, self.q), work.joins
        travelling = work.mask_of(block)
        if len(parts) == 1 and parts[0].rows is None and parts[0].columns is None and travelling is None:
            of_q, *of_keys = self._differentiate(parts[0], block, self.mask, self.of_mask)  # nothing to add up
            self._add_queries(parts[0], of_q)
            of_keys = [torch.cat(of_keys, -1)] if joins else of_keys
            return of_keys if work.layout.ring is None else [cast(t, self.dtype) for t in of_keys]
        mask_needed = travelling is not None and self.mask_needed
        sums = [torch.zeros_like(t, dtype=self.dtype) for t in (block if mask_needed else block[: 2 - joins])]
        mask, of_mask = (
            (self.mask, self.of_mask) if travelling is None else (travelling, sums[-1] if mask_needed else None)
        )
        for part in parts:
            of_q, of_k, of_v = self._differentiate(part, block, mask, of_mask)
            self._add_queries(part, of_q)
            for total, of_part in zip(work.split(sums), (of_k, of_v), strict=True):
                part.of_columns(total).add_(of_part)
        return sums

    def _add_queries(self, part: BlockPart, of_q: Tensor) -> None:
        if part.rows is None and self.of_queries is None:
            self.of_queries = of_q
            return
        if self.of_queries is None:
            self.of_queries = torch.zeros_like(self.q, dtype=self.dtype)
        self.of_queries = cast(self.of_queries, self.dtype)
        part.of_rows(self.of_queries).add_(of_q)

    def _differentiate(
        self, part: BlockPart, block: Sequence[Tensor], mask: Tensor | None, of_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.kernel.attend_backward(
            part.of_rows(self.grad),
            part.of(self.q, self.work.split(block), mask),
            part.of_rows(self.out),
            part.of_rows(self.lse, -1),
            part.of_mask(of_mask),
        )


class _Swap(AutogradFunction):
    """Shards of one dim to shards of another, for several tensors in one exchange."""

    apply: ClassVar[Callable[..., tuple[Tensor, ...]]]

    @staticmethod
    def forward(ctx: Any, dims: Any, own: Any, blocks: Any, rank: int, group: Any, *tensors: Tensor) -> Any:
        ctx.args = dims[::-1], blocks, own, rank, group
        return tuple(swap_blocks(tensors, dims[0], own, dims[1], blocks, rank, group))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None,) * 5 + _Swap.apply(*ctx.args, *grads)


class _Move(AutogradFunction):
    """Some parts of sequences to others, for several tensors in one exchange; see :class:`.layout.Balance`."""

    apply: ClassVar[Callable[..., tuple[Tensor, ...]]]

    @staticmethod
    def forward(ctx: Any, before: Any, after: Any, rank: int, group: Any, *tensors: Tensor) -> Any:
        ctx.args = after, before, rank, group
        return tuple(_moved(before, after, rank, group, tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None,) * 4 + _Move.apply(*ctx.args, *grads)


def _moved(
    before: Sequence[Sequence[Parts]],
    after: Sequence[Sequence[Parts]],
    rank: int,
    group: dist.ProcessGroup,
    tensors: Sequence[Tensor],
) -> list[Tensor]:
    """Of each tensor the parts ``after[i][rank]`` of its sequence; each rank ``r`` has ``before[i][r]``."""
    sequence = -2
    ranks = range(group.size())
    sent: list[list[Tensor]] = [[] for _ in ranks]
    shapes: list[list[list[int]]] = [[] for _ in ranks]
    for t, held, wanted in zip(tensors, before, after, strict=True):
        for r in ranks:
            sent[r] += [t.narrow(sequence, *place) for _, place in _common(held[rank], wanted[r])]
            shapes[r] += [resized(t.shape, t.ndim + sequence, n) for _, (_, n) in _common(held[r], wanted[rank])]
    arrived = [iter(parts) for parts in swapped(sent, shapes, rank, group, tensors[0])]
    results = []
    for t, held, wanted in zip(tensors, before, after, strict=True):
        parts = [(start, next(arrived[r])) for r in ranks for start, _ in _common(held[r], wanted[rank])]
        parts.sort(key=lambda part: part[0])
        results.append(torch.cat([part for _, part in parts], sequence) if parts else t.narrow(sequence, 0, 0))
    return results


def _common(held: Parts, wanted: Parts) -> list[tuple[int, tuple[int, int]]]:
    """What both have: where it begins in the sequence, and its ``(start, length)`` in what is held."""
    found, offset = [], 0
    for part in held:
        for other in wanted:
            start, stop = intersect(part, other)
            if stop > start:
                found.append((start, (offset + start - part[0], stop - start)))
        offset += length(part)
    return found
