"""``scaled_dot_product_attention`` with the sequence, the batch or the heads sharded; see attention_layout.py.

Where queries and keys are both sharded along the sequence, there are two methods. *ring*: blocks of keys and values
travel from rank to rank and are computed with as they come, see [Note: ring]. *heads*: an all-to-all cuts the heads
instead of the sequence, and another one puts the result back. [Note: choice] says which is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from .._compat import TensorMeta
from ..dispatch import meta_of, wrap
from ..errors import refuse
from ..geometry import intervals_of
from ..redistribute import all_reduce, swap_blocks
from ..registry import register
from ..spec import ShardTensorSpec, contiguous_stride
from ..tensor import _FromLocal, redistribute_to
from .attention_blocks import Dropout, Kernel, RunningSoftmax, attend, attend_backward, finite, pieces
from .attention_layout import Layout, layout_of
from .operands import as_operand, common_mesh, moved, torch_judges, wide_dtype
from .random import common_draw
from .ring import Form, travel, travel_and_return

__all__ = ["attention_method", "global_attention"]

_aten = torch.ops.aten
_NAME = "scaled_dot_product_attention"
_FUSED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_method = "auto"


@contextmanager
def attention_method(name: str) -> Iterator[None]:
    """Choose how attention is computed where queries and keys are both sharded along the sequence.

    Every rank has to choose alike. The backward pass follows the forward pass.

    Args:
        name: "ring": keys and values travel round a ring of ranks, in blocks. "heads": an all-to-all cuts the heads
            instead of the sequence; where the heads or the mask of a call do not allow it, the ring is taken. "auto"
            (default): what is estimated to be faster, see docs/attention.md.

    Raises:
        ValueError: another name.

    Example:
        >>> import shardtensor
        >>> with shardtensor.attention_method("ring"):
        ...     pass  # y = model(x)
    """
    global _method
    if name not in ("auto", "ring", "heads"):
        raise ValueError(f"attention method {name!r}: choose 'auto', 'ring' or 'heads'")
    previous, _method = _method, name
    try:
        yield
    finally:
        _method = previous


@register(
    F.scaled_dot_product_attention,
    _aten.scaled_dot_product_attention,
    _aten.scaled_dot_product_attention.default,
)
def global_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """torch's function on ShardTensors; plain operands count as replicated."""
    given = [query, key, value] + ([] if attn_mask is None else [attn_mask])
    mesh = common_mesh(_NAME, given)
    if mesh is None:
        return NotImplemented
    judged = torch_judges(
        F.scaled_dot_product_attention,
        query,
        key,
        value,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    operands = [_cast(as_operand(t, mesh)) for t in given]
    mask = operands.pop() if attn_mask is not None else None
    mask = None if mask is None else _broadcastable(mask)
    q, k, v = _same_batch(operands, enable_gqa)
    layout = layout_of(_NAME, q._spec, k._spec, v._spec, None if mask is None else mask._spec, is_causal, _method)
    places = zip((q, k, v, mask), layout.targets, strict=True)
    local_q, local_k, local_v, local_mask = (
        None if target is None else _local_part(moved(_NAME, t, target), layout) for t, target in places
    )
    if not layout.split:
        out = F.scaled_dot_product_attention(
            local_q, local_k, local_v, local_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    else:
        dropout = None
        if dropout_p > 0:
            place = tuple(q._spec.coordinate[m] for m in layout.split)
            dropout = Dropout(dropout_p, common_draw(q._spec, q.device), place)
        work = _Work(layout, q._spec, is_causal, q.shape[-1] ** -0.5 if scale is None else scale, dropout)
        compute = work.attend if layout.head_cuts is None else work.by_heads
        out = compute(local_q, local_k, local_v, local_mask)
    spec = _result_spec(layout, mesh, judged.shape, out.dtype)
    if not layout.split:  # views of a whole tensor are taken as its strides allow
        spec = spec.replace(meta=meta_of(out))
    return _FromLocal.apply(out, spec)


def _cast(t: Any) -> Any:
    """What autocast does to an operand."""
    device = t.device.type
    if torch.is_autocast_enabled(device) and t.is_floating_point() and t.dtype != torch.float64:
        return t.to(torch.get_autocast_dtype(device))
    return t


def _same_batch(operands: Sequence[Any], grouped: bool) -> list[Any]:
    """The operands with equal batch dims; with grouped queries, keys and values keep heads of their own."""
    tail = 3 if grouped else 2
    batch = torch.broadcast_shapes(*(t.shape[:-tail] for t in operands))
    return [t if t.shape[:-tail] == batch else t.expand(*batch, *t.shape[-tail:]) for t in operands]


def _broadcastable(mask: Any) -> Any:
    """A mask with at least two dims, of which those of length 1 are not sharded."""
    while mask.ndim < 2:
        mask = mask.unsqueeze(0)
    spec = mask._spec
    single = [isinstance(p, Shard) and mask.shape[p.dim] == 1 for p in spec.placements]
    placements = [Replicate() if s else p for s, p in zip(single, spec.placements, strict=True)]
    sizes = tuple(None if s else n for s, n in zip(single, spec.sizes, strict=True))
    return redistribute_to(mask, spec.replace(placements=placements, sizes=sizes))


def _local_part(t: Any, layout: Layout) -> Tensor:
    """The local tensor. Where ranks do different work with a whole one, its gradient is a contribution, a Partial."""
    pairs = enumerate(t._spec.placements)
    return t.to_local(
        grad_placements=[Partial() if m in layout.split and not isinstance(p, Shard) else p for m, p in pairs]
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """One call's local work."""

    layout: Layout
    query: ShardTensorSpec
    causal: bool
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
        empty = 0 in (q.numel(), k.numel(), v.numel())
        if not (exchanges or empty or self.dropout is not None or (self.causal and layout.rows[0])):
            return F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=self.causal, scale=self.scale, enable_gqa=q.shape[:-2] != k.shape[:-2]
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
            and q.dtype in _FUSED_DTYPES
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
        for i, (rows, columns, square) in enumerate(pieces(layout.rows, layout.columns[index], self.causal)):
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
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, work: _Work, kernel: Kernel) -> Any:  # type: ignore[override]
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
            grads = _Once.apply(ctx.work.query, q, k, v, *grads)
        return (*(g if n else None for g, n in zip(grads, needed)), None, None)


class _Once(torch.autograd.Function):
    """First derivatives that refuse to be differentiated, which torch's own attention on the CPU does as well."""

    @staticmethod
    def forward(ctx: Any, query: ShardTensorSpec, q: Tensor, k: Tensor, v: Tensor, *grads: Any) -> Any:  # type: ignore[override]
        ctx.query = query
        return tuple(None if g is None else g.view_as(g) for g in grads)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:  # type: ignore[override]
        raise refuse(
            _NAME,
            ctx.query,
            "it cannot be differentiated twice",
            "write the attention out as products and a softmax, whose derivatives have derivatives",
        )


def forward(
    work: _Work, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
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
    work: _Work,
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


# -- below autograd: what torch's function consists of on the CPU, and autograd's formula for it ----------------------


def _prepared(
    query: Any, key: Any, value: Any, attn_mask: Any, is_causal: bool, scale: float | None
) -> tuple[_Work, Kernel, list[Any]]:
    mesh = common_mesh(_NAME, [query, key, value, attn_mask])
    assert mesh is not None
    given = [None if t is None else as_operand(t, mesh) for t in (query, key, value, attn_mask)]
    given[3] = None if attn_mask is None else _broadcastable(given[3])
    layout = layout_of(_NAME, *(None if t is None else t._spec for t in given), is_causal, "ring")  # type: ignore[arg-type]
    local = [
        None if target is None else moved(_NAME, t, target)._local_tensor
        for t, target in zip(given, layout.targets, strict=True)
    ]
    queries = layout.targets[0]
    assert queries is not None
    work = _Work(layout, queries, is_causal, query.shape[-1] ** -0.5 if scale is None else scale, None)
    return work, work.kernel(*local), local


def _result_spec(layout: Layout, mesh: Any, shape: Sequence[int], dtype: torch.dtype) -> ShardTensorSpec:
    meta = TensorMeta(torch.Size(shape), contiguous_stride(shape), dtype)
    return ShardTensorSpec(mesh, [p for p, _ in layout.out], meta, tuple(sizes for _, sizes in layout.out))


@register(_aten._scaled_dot_product_flash_attention_for_cpu.default)
def _flash(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> Any:
    if dropout_p:
        return NotImplemented
    work, kernel, local = _prepared(query, key, value, attn_mask, is_causal, scale)
    out, lse = forward(work, kernel, *local)
    shape, mesh = (*query.shape[:-1], value.shape[-1]), work.query.mesh
    return tuple(
        wrap(t, _result_spec(work.layout, mesh, s, t.dtype)) for t, s in ((out, shape), (lse, shape[:-1]))
    )


@register(_aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _flash_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> Any:
    work, kernel, local = _prepared(query, key, value, attn_mask, is_causal, scale)
    mesh = work.query.mesh
    results = [
        moved(_NAME, as_operand(t, mesh), _result_spec(work.layout, mesh, t.shape, t.dtype))._local_tensor
        for t in (grad_out, out, logsumexp)
    ]
    grads = backward(work, kernel, results[0], *local, *results[1:], keys_needed=True, mask_needed=False)
    wrapped = []
    for grad, target in zip(grads, work.layout.targets[:3]):
        assert target is not None and grad is not None
        pairs = enumerate(target.placements)
        whole = [Partial() if m in work.layout.split and not isinstance(p, Shard) else p for m, p in pairs]
        wrapped.append(wrap(grad, target.replace(placements=whole)))
    return tuple(wrapped)


class _Swap(torch.autograd.Function):
    """Shards of one dim to shards of another, for several tensors in one exchange."""

    @staticmethod
    def forward(ctx: Any, dims: Any, own: Any, blocks: Any, rank: int, group: Any, *tensors: Tensor) -> Any:  # type: ignore[override]
        ctx.args = dims[::-1], blocks, own, rank, group
        return tuple(swap_blocks(tensors, dims[0], own, dims[1], blocks, rank, group))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        return (None,) * 5 + _Swap.apply(*ctx.args, *grads)
