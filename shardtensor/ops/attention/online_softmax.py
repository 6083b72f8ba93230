"""One rank's work in attention: its queries against all blocks of keys, forward and backward, on local tensors.

Where keys are fetched, they come in one exchange before the first kernel: the rest is as for keys that every rank has.
Backward their gradients return to the owners, who add them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..._compat import AutogradFunction, alias
from ..._compat.c10d import group_along
from ...communication.exchange import plan_intervals
from ...communication.halo import Axis, Fetch
from ...communication.redistribute import all_reduce, swap_blocks
from ...errors import refuse
from ...layout.caches import cached
from ...layout.geometry import Interval, intervals_of, length
from ..common.alignment import cast, wide_dtype
from ..common.ring import Form, Trip
from .blockwise import Dropout, Kernel, RunningSoftmax, attend, attend_backward, finite, pieces
from .layout import NAME, AttentionLayout

_DIMS = 4  # that torch's kernels take


@dataclass(frozen=True, slots=True)
class BlockPart:
    """Some rows and columns of one block, as ``(start, length)`` in the tensors at hand; None for all of them.

    Attributes:
        mask_columns: where the columns are in this rank's mask.
        square: a key is seen by the rows from its own on.
        at: the part's place, for dropout.
    """

    rows: tuple[int, int] | None
    columns: tuple[int, int] | None
    mask_columns: tuple[int, int]
    square: bool
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


class AttentionWork:
    """What a call asks of one rank, from specs alone. Made by :func:`work_of`.

    Attributes:
        layout: who has and computes what.
        query: spec of the queries.
        shift: which keys a query sees, see :func:`~.blockwise.pieces`.
        scale: of the scores.
        parts: for each block of keys what has to be computed of it.
        exchanges: whether there are blocks on other ranks, so that results have to be put together.
        group: of the ranks that exchange something; None where nothing is exchanged.
        fetch: of keys and values next to each other; None where they are at hand.
        alone: whether one call of a kernel gives the result.
        flash: torch's flash kernel, where it takes the operands.
        empty: whether some rank's queries, keys or values are; torch's kernels crash on such.
    """

    def __init__(self, layout: AttentionLayout, shift: int | None, scale: float) -> None:
        query, key, value, _ = layout.targets
        m = layout.mesh_dim
        self.layout, self.query, self.shift, self.scale = layout, query, shift, scale
        self.parts = [list(_parts(layout, index, shift)) for index in range(len(layout.columns))]
        self.exchanges = m is not None and layout.head_sizes is None and layout.fetched is None
        self.group = None if m is None else group_along(query.mesh, m)
        self.fetch = _fetch(layout)
        first = self.parts[0]
        self.alone = not self.exchanges and len(first) == 1 and first[0].rows is None and first[0].columns is None
        takes_flash = query.mesh.device_type == "cpu" and len(query.shape) <= _DIMS
        takes_flash = takes_flash and query.shape[-1] == value.shape[-1] > 0
        self.flash = Kernel(scale, fused=True) if takes_flash else None
        sizes = [spec.sizes_along(axis) for spec in (query, key, value) for axis in spec.sharded_dims().values()]
        shapes = query.shape, key.shape, value.shape
        self.empty = any(0 in n for n in (*shapes, *sizes, *(layout.head_sizes or ())))
        self._trips: dict[Any, Trip] = {}

    @property
    def is_ours(self) -> bool:
        """Whether it takes more than torch's own function on the keys that are at hand, or fetched.

        torch's is not taken after a fetch either if it is the flash kernel (without autograd in between, fetching and
        computing is one step), or if some rank could not take it: all ranks refuse second derivatives alike.
        """
        if self.empty:
            return True
        if self.fetch is not None:
            return self.shift is not None or self.kernel().fused
        return self.exchanges or (self.shift is not None and self.layout.rows[0] + self.shift != 0)

    def by_heads(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: Dropout | None) -> Tensor:
        """Shard the heads instead of the sequence, compute, and shard the sequence again."""
        layout = self.layout
        m = layout.mesh_dim
        assert m is not None and layout.head_sizes is not None
        rank = self.query.coordinate[m]
        sequences = [intervals_of(target.sizes_along(m)) for target in layout.targets[:3]]
        heads = [intervals_of(sizes) for sizes in layout.head_sizes]
        dims = q.ndim - 2, q.ndim - 3
        q, k, v = _Swap.apply(dims, sequences, heads, rank, self.group, q, k, v)
        target = layout.targets[3]
        if mask is not None and target is not None and target.placements[m].is_replicate():
            if mask.ndim > 2 and mask.shape[-3] > 1:
                mask = mask.narrow(-3, heads[0][rank][0], q.shape[-3])
        out = self.attend(q, k, v, mask, dropout)
        (out,) = _Swap.apply(dims[::-1], heads[:1], sequences[:1], rank, self.group, out)
        return out  # type: ignore[no-any-return]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: Dropout | None) -> Tensor:
        """The result for the local queries; blocks of keys come from other ranks where the layout says so."""
        by_torch = not self.is_ours and dropout is None
        missing = 0 if by_torch and self.fetch is None else max(0, _DIMS - q.ndim)  # torch's kernel depends on it
        if missing:
            q, k, v = (t[(None,) * missing] for t in (q, k, v))
        if by_torch:
            k, v = self.fetched(k, v)
            groups, causal = any(t.shape[:-2] != q.shape[:-2] for t in (k, v)), self.shift is not None
            out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=self.scale, enable_gqa=groups)
        else:
            out = _Attention.apply(q, k, v, mask, self, self.kernel(dropout))
        return out[(0,) * missing] if missing else out

    def kernel(self, dropout: Dropout | None = None) -> Kernel:
        """Flash where torch has it and gives the log-sum-exp, for the CPU; explicit scores elsewhere."""
        if dropout is None and self.flash is not None and torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]
            return self.flash  # its switch is that of every device, in spite of the name
        return Kernel(self.scale, False, dropout)

    # -- keys and values that are fetched ---------------------------------------------------------------------------

    def fetched(self, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        """The keys and values to compute with. Differentiable."""
        if self.fetch is None:
            return k, v
        return self.fetch(torch.cat((k, v), -1)).split_with_sizes((k.shape[-1], v.shape[-1]), -1)

    def returned(self, of_k: Tensor, of_v: Tensor) -> Sequence[Tensor]:
        """The gradients of this rank's keys and values, out of the ranks' gradients of what they fetched."""
        if self.fetch is None:
            return of_k, of_v
        both = self.fetch.backward(torch.cat((of_k, of_v), -1))
        return both.split_with_sizes((of_k.shape[-1], of_v.shape[-1]), -1)

    # -- blocks ---------------------------------------------------------------------------------------------------

    def blocks(self, k: Tensor, v: Tensor, mask: Tensor | None) -> Iterator[tuple[int, Sequence[Tensor]]]:
        """``(index of parts, [k, v, mask that is sent along])`` of every block that this rank computes with."""
        if self.layout.ring is None:
            yield 0, (k, v)
        else:
            own = self.sent(k, v, mask)
            yield from self.trip(own).travel(own)

    def sent(self, k: Tensor, v: Tensor, mask: Tensor | None) -> list[Tensor]:
        """This rank's block, as it is sent around the ring."""
        return [k, v] + ([mask] if self.layout.mask_travels and mask is not None else [])

    def trip(self, own: Sequence[Tensor], gradients: int = 0) -> Trip:
        """The way of all blocks around the ring, and home with gradients of the first tensors of each block."""
        key = gradients, *((t.shape, t.dtype) for t in own)
        found = self._trips.get(key)
        if found is None:
            assert self.layout.ring is not None and self.group is not None
            forms = [self._forms(own, columns) for columns in self.layout.columns]
            wide = wide_dtype(own[0].dtype)
            grad_forms = [[(shape, wide) for shape, _ in row[:gradients]] for row in forms] if gradients else None
            found = self._trips[key] = Trip(self.layout.ring, forms, grad_forms, self.group)
        return found

    def _forms(self, own: Sequence[Tensor], columns: Interval) -> tuple[Form, ...]:
        """Shapes and dtypes of a block: like the own one but for the number of keys."""
        n = columns[1] - columns[0]
        shapes = [(*t.shape[:-2], n, t.shape[-1]) for t in own[:2]] + [(*t.shape[:-1], n) for t in own[2:]]
        return tuple((shape, t.dtype) for shape, t in zip(shapes, own, strict=True))

    def parts_for(self, index: int, q: Tensor) -> Sequence[BlockPart]:
        """The parts of block ``index`` that have to be computed."""
        return () if 0 in q.shape[:-1] else self.parts[index]  # no batch or heads here, on which torch's kernel crashes


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
    first_row, first_column = layout.rows[0], layout.columns[index][0]
    mask_start = first_column if layout.mask_travels else layout.mask_start
    for i, (rows, columns, square) in enumerate(pieces(layout.rows, layout.columns[index], shift)):
        yield BlockPart(
            None if rows == layout.rows else (rows[0] - first_row, length(rows)),
            None if columns == layout.columns[index] else (columns[0] - first_column, length(columns)),
            (columns[0] - mask_start, length(columns)),
            square,
            (index, i),
        )


def _no_autocast(kind: str) -> AbstractContextManager[Any]:
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


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
        needed = ctx.needs_input_grad
        q, k, v, mask, *kept = ctx.saved_tensors
        with torch.no_grad(), _no_autocast(grad.device.type):
            grads = backward(ctx.work, ctx.kernel, needed, grad, q, mask, *kept)
        if torch.is_grad_enabled():
            grads = _Once.apply(ctx.work, q, k, v, mask, *grads)
        return (*(g if n else None for g, n in zip(grads, needed)), None, None)


class _Once(AutogradFunction):
    """First derivatives that refuse to be differentiated, which torch's own attention on the CPU does as well."""

    @staticmethod
    def forward(ctx: Any, work: AttentionWork, q: Tensor, k: Tensor, v: Tensor, mask: Any, *grads: Any) -> Any:
        ctx.work = work
        return tuple(None if g is None else alias(g) for g in grads)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise refuse(
            NAME,
            ctx.work.query,
            "it cannot be differentiated twice",
            "write the attention out as products and a softmax, whose derivatives have derivatives",
        )


def forward(
    work: AttentionWork, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The result for the local queries, and what :func:`backward` needs besides them and the mask.

    That is keys, values, the result (as fused kernels keep it, in the dtype of ``q``), and the ``finite(lse)``.
    """
    with _no_autocast(q.device.type):
        k, v = work.fetched(k, v)
        wide = cast(q, wide_dtype(q.dtype))
        parts = work.parts_for(0, q)
        if work.alone and parts:
            of_mask = parts[0].of_mask(mask)
            out, lse = attend(wide, k, v, of_mask, kernel, parts[0].square, parts[0].at, alone=True)
            lse = lse if kernel.fused else finite(lse)
        else:
            out, lse = _by_blocks(work, kernel, wide, k, v, mask)
            lse = finite(lse)
        rounded = cast(out, q.dtype)
        # Of fewer dims one device's kernel is never a fused one: its gradient is computed from a result in float32.
        return rounded, (k, v, out if len(work.query.shape) < _DIMS else rounded, lse)


def _by_blocks(
    work: AttentionWork, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Result and log-sum-exp, put together of those of blocks."""
    running = RunningSoftmax(q, v.shape[-1])
    for index, block in work.blocks(k, v, mask):
        of_block = block[2] if len(block) > 2 else mask
        for part in work.parts_for(index, q):
            rows, keys, values = part.of_rows(q), part.of_columns(block[0]), part.of_columns(block[1])
            out, lse = attend(rows, keys, values, part.of_mask(of_block), kernel, part.square, part.at)
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
    work: AttentionWork,
    kernel: Kernel,
    needed: Sequence[bool],
    grad: Tensor,
    q: Tensor,
    mask: Tensor | None,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> list[Tensor | None]:
    """Gradients of q, k, v and mask; those that are not ``needed`` may be left out.

    Args:
        grad: of the result.
        k, v, out, lse: what :func:`forward` returned.
    """
    wide = wide_dtype(q.dtype)
    keys_needed, mask_needed = needed[1] or needed[2], mask is not None and needed[3]
    if mask_needed and kernel.fused:  # which does not give the gradient of a mask
        kernel = Kernel(kernel.scale, fused=False)
    travels = work.layout.mask_travels
    of_mask = torch.zeros_like(mask, dtype=wide) if mask is not None and mask_needed and not travels else None
    grad, wide_q, out = (cast(t, wide) for t in (grad, q, out))
    gradients = _Gradients(work, kernel, grad, wide_q, mask, out, lse, mask_needed, of_mask)
    if work.layout.ring is None:
        sums: Sequence[Tensor] = gradients.contribute(0, (k, v))
        sums = work.returned(sums[0], sums[1]) if keys_needed else sums
    elif keys_needed or (mask_needed and travels):
        own = work.sent(k, v, mask)
        to_return = 3 if mask_needed and travels else 2
        sums = work.trip(own, to_return).travel_and_return(own, gradients.contribute)
    else:
        for index, block in work.blocks(k, v, mask):
            sums = gradients.contribute(index, block)
    of_queries = torch.zeros_like(wide_q) if gradients.of_queries is None else gradients.of_queries
    grads = [of_queries, sums[0], sums[1], sums[2] if travels and mask_needed else of_mask]
    return [None if t is None or g is None else cast(g, t.dtype) for g, t in zip(grads, (q, k, v, mask), strict=True)]


@dataclass(slots=True)
class _Gradients:
    """The gradients of one rank's queries and mask, summed up over the blocks that come by.

    Attributes:
        of_queries: None as long as none has come.
        of_mask: None where it is not needed, or travels with the mask.
    """

    work: AttentionWork
    kernel: Kernel
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
        parts = self.work.parts_for(index, self.q)
        travels = len(block) > 2
        if len(parts) == 1 and parts[0].rows is None and parts[0].columns is None and not travels:  # nothing to add up
            of_q, of_k, of_v = self._differentiate(parts[0], block, self.mask, self.of_mask)
            self.of_queries = of_q if self.of_queries is None else self.of_queries.add_(of_q)
            return [of_k, of_v]
        self.of_queries = torch.zeros_like(self.q) if self.of_queries is None else self.of_queries
        sums = [torch.zeros_like(t, dtype=self.q.dtype) for t in block[: 3 if self.mask_needed else 2]]
        mask, of_mask = (block[2], sums[2] if self.mask_needed else None) if travels else (self.mask, self.of_mask)
        for part in parts:
            of_q, of_k, of_v = self._differentiate(part, block, mask, of_mask)
            part.of_rows(self.of_queries).add_(of_q)
            part.of_columns(sums[0]).add_(of_k)
            part.of_columns(sums[1]).add_(of_v)
        return sums

    def _differentiate(
        self, part: BlockPart, block: Sequence[Tensor], mask: Tensor | None, of_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return attend_backward(
            part.of_rows(self.grad),
            part.of_rows(self.q),
            part.of_columns(block[0]),
            part.of_columns(block[1]),
            part.of_mask(mask),
            part.of_rows(self.out),
            part.of_rows(self.lse, -1),
            self.kernel,
            part.square,
            part.at,
            part.of_mask(of_mask),
        )


class _Swap(AutogradFunction):
    """Shards of one dim to shards of another, for several tensors in one exchange."""

    @staticmethod
    def forward(ctx: Any, dims: Any, own: Any, blocks: Any, rank: int, group: Any, *tensors: Tensor) -> Any:
        ctx.args = dims[::-1], blocks, own, rank, group
        return tuple(swap_blocks(tensors, dims[0], own, dims[1], blocks, rank, group))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None,) * 5 + _Swap.apply(*ctx.args, *grads)
