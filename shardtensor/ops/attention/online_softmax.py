"""One rank's work in attention: its queries against all blocks of keys, forward and backward, on local tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._compat import alias
from ...errors import refuse
from ...geometry import intervals_of
from ...redistribute import all_reduce, swap_blocks
from ...spec import ShardTensorSpec
from ..common.alignment import wide_dtype
from ..common.ring import Form, travel, travel_and_return
from .blockwise import DTYPES, Dropout, Kernel, RunningSoftmax, attend, attend_backward, finite, pieces
from .layout import Layout

__all__ = ["Work", "backward", "forward"]


@dataclass(frozen=True, slots=True)
class Work:
    """What a call asks of this rank.

    Attributes:
        name: of the operator, for errors.
        layout: who has and computes what.
        query: spec of the queries.
        shift: which keys a query sees, see :func:`~.attention_blocks.pieces`.
        scale: of the scores.
        dropout: None where nothing is dropped.
    """

    name: str
    layout: Layout
    query: ShardTensorSpec
    shift: int | None
    scale: float
    dropout: Dropout | None

    def by_heads(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Cut the heads instead of the sequence, compute, and cut the sequence again."""
        layout = self.layout
        m = layout.mesh_dim
        assert m is not None and layout.head_cuts is not None
        group, rank = self.query.mesh.get_group(m), self.query.coordinate[m]
        sequences = [intervals_of(target.cut(m)) for target in layout.targets[:3] if target is not None]
        heads = [intervals_of(cut) for cut in layout.head_cuts]
        dims = q.ndim - 2, q.ndim - 3
        q, k, v = _Swap.apply(dims, sequences, heads, rank, group, q, k, v)
        target = layout.targets[3]
        if mask is not None and target is not None and target.placements[m].is_replicate():
            if mask.ndim > 2 and mask.shape[-3] > 1:
                mask = mask.narrow(-3, heads[0][rank][0], q.shape[-3])
        out = self.attend(q, k, v, mask)
        (out,) = _Swap.apply(dims[::-1], heads[:1], sequences[:1], rank, group, out)
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """The result for the local queries; blocks of keys come from other ranks where the layout says so."""
        layout = self.layout
        exchanges = layout.mesh_dim is not None and layout.head_cuts is None
        empty = 0 in (q.numel(), k.numel(), v.numel())  # on which torch's kernels crash
        grouped = any(t.shape[:-2] != q.shape[:-2] for t in (k, v))
        causal = self.shift is not None
        shifted = self.shift is not None and layout.rows[0] + self.shift != 0
        if not (exchanges or empty or shifted or self.dropout is not None):
            return F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=causal, scale=self.scale, enable_gqa=grouped
            )
        while mask is not None and mask.ndim < q.ndim:
            mask = mask.unsqueeze(0)
        missing = max(0, 4 - q.ndim)
        q, k, v = (t[(None,) * missing] for t in (q, k, v))
        mask = None if mask is None else mask[(None,) * missing]
        out = _Attention.apply(q, k, v, mask, self, self.kernel(q, k, v, mask))
        return out[(0,) * missing]

    def kernel(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Kernel:
        """Flash where torch has it and gives the log-sum-exp, for the CPU; explicit scores elsewhere."""
        fused = (
            q.device.type == "cpu"
            and q.ndim == 4
            and q.dtype in DTYPES
            and q.shape[-1] == v.shape[-1] > 0
            and self.dropout is None
            and torch.backends.cuda.flash_sdp_enabled()  # the switch of every device, in spite of its name
            and not (mask is not None and mask.requires_grad and torch.is_grad_enabled())
        )
        return Kernel(self.scale, fused, self.dropout)

    # -- blocks ---------------------------------------------------------------------------------------------------

    def blocks(self, k: Tensor, v: Tensor, mask: Tensor | None) -> Iterator[tuple[int, Sequence[Tensor]]]:
        """``(index of columns, [k, v, travelling mask])`` of every block that this rank computes with."""
        ring = self.layout.ring
        if ring is None:
            yield 0, (k, v)
        else:
            own = self.travelling(k, v, mask)
            yield from travel(own, lambda s: self.forms(own, s), ring, self.group())

    def travelling(self, k: Tensor, v: Tensor, mask: Tensor | None) -> list[Tensor]:
        return [k, v] + ([mask] if self.layout.mask_travels and mask is not None else [])

    def forms(self, own: Sequence[Tensor], owner: int) -> list[Form]:
        """Shapes and dtypes of a rank's block: like the own one but for the number of keys."""
        a, b = self.layout.columns[owner]
        shapes = [(*t.shape[:-2], b - a, t.shape[-1]) for t in own[:2]] + [(*t.shape[:-1], b - a) for t in own[2:]]
        return [(shape, t.dtype) for shape, t in zip(shapes, own, strict=True)]

    def group(self) -> Any:
        assert self.layout.mesh_dim is not None
        return self.query.mesh.get_group(self.layout.mesh_dim)

    def parts(self, index: int, q: Tensor, block: Sequence[Tensor], mask: Tensor | None) -> Iterator[_Part]:
        """The parts of block ``index`` that have to be computed."""
        layout = self.layout
        if 0 in q.shape[:-1]:  # no batch or no heads here, on which torch's kernel crashes
            return
        first_row, first_column = layout.rows[0], layout.columns[index][0]
        mask_start = layout.mask_start
        if len(block) > 2:
            mask, mask_start = block[2], first_column
        for i, (rows, columns, square) in enumerate(pieces(layout.rows, layout.columns[index], self.shift)):
            yield _Part(
                (rows[0] - first_row, rows[1] - rows[0]),
                (columns[0] - first_column, columns[1] - columns[0]),
                None if mask is None else (columns[0] - mask_start, columns[1] - columns[0]),
                mask,
                square,
                (index, i),
            )


@dataclass(frozen=True, slots=True)
class _Part:
    """Some rows and columns of one block, as ``(start, length)`` in the tensors at hand."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    mask_columns: tuple[int, int] | None
    mask: Tensor | None
    square: bool
    at: tuple[int, int]

    def of_mask(self, mask: Tensor | None) -> Tensor | None:
        """This part of the mask, or of something of its shape; dims of length 1 are broadcast."""
        if mask is None or self.mask_columns is None:
            return None
        if mask.shape[-2] > 1:
            mask = mask.narrow(-2, *self.rows)
        return mask.narrow(-1, *self.mask_columns) if mask.shape[-1] > 1 else mask


class _Attention(torch.autograd.Function):
    """Local queries against all blocks of keys. Local tensors in and out."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, work: Work, kernel: Kernel) -> Any:  # type: ignore[override]
        with torch.autocast(q.device.type, enabled=False):
            out, lse = forward(work, kernel, q, k, v, mask)
        ctx.work, ctx.kernel = work, kernel
        ctx.save_for_backward(q, k, v, mask, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        needed = ctx.needs_input_grad
        q, k, v, mask, out, lse = ctx.saved_tensors
        with torch.no_grad(), torch.autocast(grad.device.type, enabled=False):
            grads = backward(
                ctx.work, ctx.kernel, grad, q, k, v, mask, out, lse, keys_needed=any(needed[1:3]), mask_needed=needed[3]
            )
        if torch.is_grad_enabled():
            grads = _Once.apply(ctx.work, q, k, v, *grads)
        return (*(g if n else None for g, n in zip(grads, needed)), None, None)


class _Once(torch.autograd.Function):
    """First derivatives that refuse to be differentiated, which torch's own attention on the CPU does as well."""

    @staticmethod
    def forward(ctx: Any, work: Work, q: Tensor, k: Tensor, v: Tensor, *grads: Any) -> Any:  # type: ignore[override]
        ctx.work = work
        return tuple(None if g is None else alias(g) for g in grads)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:  # type: ignore[override]
        raise refuse(
            ctx.work.name,
            ctx.work.query,
            "it cannot be differentiated twice",
            "write the attention out as products and a softmax, whose derivatives have derivatives",
        )


def forward(
    work: Work, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Result and log-sum-exp of the local queries."""
    dtype, q = q.dtype, q.to(wide_dtype(q.dtype))
    running = RunningSoftmax(q, v.shape[-1])
    for index, block in work.blocks(k, v, mask):
        for part in work.parts(index, q, block, mask):
            out, lse = attend(
                q.narrow(-2, *part.rows),
                block[0].narrow(-2, *part.columns),
                block[1].narrow(-2, *part.columns),
                part.of_mask(part.mask),
                kernel,
                part.square,
                part.at,
            )
            running.add(part.rows[0], out, lse)
    out, lse = running.out, running.lse
    if work.layout.ring is None and work.layout.mesh_dim is not None and work.layout.head_cuts is None:
        out, lse = _over_ranks(out, lse, work.group())
    return out.to(dtype), lse


def _over_ranks(out: Tensor, lse: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """The result of queries that every rank of the group has, of which each has seen its own keys."""
    largest = finite(all_reduce(lse, group, "max"))
    weight = (lse - largest).exp().unsqueeze(-1)
    total = all_reduce(torch.cat([out * weight, weight], dim=-1), group)
    out, weight = total[..., :-1], total[..., -1:]
    return torch.where(weight == 0, 0.0, out / weight), weight.squeeze(-1).log() + largest


def backward(
    work: Work,
    kernel: Kernel,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    keys_needed: bool,
    mask_needed: bool,
) -> list[Tensor | None]:
    """Gradients of q, k, v and mask; those that are not needed may be left out."""
    dtypes = [None if t is None else t.dtype for t in (q, k, v, mask)]
    wide = wide_dtype(q.dtype)
    grad, q, out = grad.to(wide), q.to(wide), out.to(wide)
    dq = torch.zeros_like(q)
    travels = work.layout.mask_travels
    d_mask = torch.zeros_like(mask, dtype=wide) if mask is not None and mask_needed and not travels else None

    def contribute(index: int, block: Sequence[Tensor]) -> list[Tensor]:
        sums = [torch.zeros_like(t, dtype=wide) for t in block[: 3 if mask_needed else 2]]
        for part in work.parts(index, q, block, mask):
            of_q, of_k, of_v = attend_backward(
                grad.narrow(-2, *part.rows),
                q.narrow(-2, *part.rows),
                block[0].narrow(-2, *part.columns),
                block[1].narrow(-2, *part.columns),
                part.of_mask(part.mask),
                out.narrow(-2, *part.rows),
                lse.narrow(-1, *part.rows),
                kernel,
                part.square,
                part.at,
                part.of_mask(sums[2] if len(sums) > 2 else d_mask),
            )
            dq.narrow(-2, *part.rows).add_(of_q)
            sums[0].narrow(-2, *part.columns).add_(of_k)
            sums[1].narrow(-2, *part.columns).add_(of_v)
        return sums

    ring = work.layout.ring
    if ring is None:
        sums: Sequence[Tensor] = contribute(0, (k, v))
    elif keys_needed or (mask_needed and travels):
        own = work.travelling(k, v, mask)

        def grad_forms(owner: int) -> list[Form]:
            return [(shape, wide) for shape, _ in work.forms(own, owner)][: 3 if mask_needed else 2]

        sums = travel_and_return(own, lambda s: work.forms(own, s), grad_forms, ring, work.group(), contribute)
    else:
        for index, block in work.blocks(k, v, mask):
            sums = contribute(index, block)
    grads = [dq, sums[0], sums[1], sums[2] if travels and mask_needed else d_mask]
    return [None if g is None else g.to(dtype) for g, dtype in zip(grads, dtypes, strict=True)]


class _Swap(torch.autograd.Function):
    """Shards of one dim to shards of another, for several tensors in one exchange."""

    @staticmethod
    def forward(ctx: Any, dims: Any, own: Any, blocks: Any, rank: int, group: Any, *tensors: Tensor) -> Any:  # type: ignore[override]
        ctx.args = dims[::-1], blocks, own, rank, group
        return tuple(swap_blocks(tensors, dims[0], own, dims[1], blocks, rank, group))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        return (None,) * 5 + _Swap.apply(*ctx.args, *grads)
