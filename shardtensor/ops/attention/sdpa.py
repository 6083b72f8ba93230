"""``scaled_dot_product_attention`` with the sequence, the batch or the heads sharded; see layout.py.

Where queries and keys are both sharded along the sequence, there are two methods. *ring*: blocks of keys and values
travel from rank to rank and are computed with as they come, see [Note: ring]. *heads*: an all-to-all cuts the heads
instead of the sequence, and another one puts the result back. [Note: choice] says which is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn.attention.bias import CausalBias, CausalVariant

from ..._compat import TensorMeta, not_in_graphs
from ...context import Setting
from ...errors import refuse
from ...registry import register
from ...spec import ShardTensorSpec, contiguous_stride
from ...tensor import from_part, redistribute_to, wrap
from ..common.alignment import as_operand, common_mesh, moved, torch_judges
from ..elementwise.random import common_draw
from .blockwise import DTYPES, Dropout, Kernel
from .layout import Layout, layout_of
from .online_softmax import Work, backward, forward

__all__ = ["attention_method", "global_attention"]

_aten = torch.ops.aten
_NAME = "scaled_dot_product_attention"

_method = Setting("auto")


@not_in_graphs("call the compiled function inside of shardtensor.attention_method(); it is compiled anew for that")
@contextmanager
def attention_method(name: str) -> Iterator[None]:
    """Choose how attention is computed where queries and keys are both sharded along the sequence.

    Every rank has to choose alike. The backward pass follows the forward pass; where activation checkpointing
    repeats that, call ``backward()`` inside of this context, too.

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
    if name not in ("auto", "ring", "heads"):
        raise ValueError(f"attention method {name!r}: choose 'auto', 'ring' or 'heads'")
    with _method.set_to(name):
        yield


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
    shift = 0 if is_causal else None
    if isinstance(attn_mask, CausalBias):
        attn_mask, shift = None, _shift_of(attn_mask, query, key, is_causal)
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
    if query.dtype not in DTYPES:
        raise refuse(_NAME, given, f"torch's attention does not compute in {query.dtype}", "convert the operands")
    operands = [as_operand(t, mesh) for t in given]
    if torch.is_autocast_enabled(mesh.device_type):
        operands = [_cast(t) for t in operands]
    mask = operands.pop() if attn_mask is not None else None
    mask = None if mask is None else _broadcastable(mask)
    q, k, v = _same_batch(operands, enable_gqa)
    layout = layout_of(_NAME, q._spec, k._spec, v._spec, None if mask is None else mask._spec, shift, _method.value)
    places = zip((q, k, v, mask), layout.targets, strict=True)
    local_q, local_k, local_v, local_mask = (
        None if target is None else _local_part(moved(_NAME, t, target), layout) for t, target in places
    )
    if not layout.split and shift in (None, 0):
        is_causal = shift == 0
        out = F.scaled_dot_product_attention(
            local_q, local_k, local_v, local_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    else:
        dropout = None
        if dropout_p > 0:
            place = tuple(q._spec.coordinate[m] for m in layout.split)
            dropout = Dropout(dropout_p, common_draw(q._spec, q.device), place)
        work = Work(_NAME, layout, q._spec, shift, q.shape[-1] ** -0.5 if scale is None else scale, dropout)
        compute = work.attend if layout.head_cuts is None else work.by_heads
        out = compute(local_q, local_k, local_v, local_mask)
    return from_part(out, _result_spec(layout.out, mesh, judged.shape, out.dtype))


def _shift_of(bias: CausalBias, query: Any, key: Any, is_causal: bool) -> int:
    """The mask that a ``torch.nn.attention.bias`` stands for, as a shift."""
    lengths, wanted = (bias.seq_len_q, bias.seq_len_kv), (query.shape[-2], key.shape[-2])
    if is_causal:
        raise ValueError("CausalBias should not be used with is_causal=True")
    if lengths != wanted:
        raise ValueError(f"a causal bias for (queries, keys) {lengths}, but there are {wanted}")
    return 0 if bias.variant == CausalVariant.UPPER_LEFT else wanted[1] - wanted[0]


def _cast(t: Any) -> Any:
    """What autocast does to an operand."""
    casts = t.is_floating_point() and t.dtype != torch.float64
    return t.to(torch.get_autocast_dtype(t.device.type)) if casts else t


def _same_batch(operands: Sequence[Any], grouped: bool) -> list[Any]:
    """The operands with equal batch dims; with grouped queries, keys and values keep heads of their own."""
    tail = 3 if grouped else 2
    shapes = [t.shape[:-tail] for t in operands]
    if shapes.count(shapes[0]) == len(shapes):
        return list(operands)
    batch = torch.broadcast_shapes(*shapes)
    return [t if shape == batch else t.expand(*batch, *t.shape[-tail:]) for t, shape in zip(operands, shapes)]


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
    placements = t._spec.placements
    if not any(placements[m].is_replicate() for m in layout.split):
        return t.to_local()
    return t.to_local(
        grad_placements=[Partial() if m in layout.split and p.is_replicate() else p for m, p in enumerate(placements)]
    )


# -- below autograd: what torch's function consists of on the CPU, and autograd's formula for it ----------------------


def _prepared(
    query: Any, key: Any, value: Any, attn_mask: Any, is_causal: bool, scale: float | None
) -> tuple[Work, Kernel, list[Any]]:
    mesh = common_mesh(_NAME, [query, key, value, attn_mask])
    assert mesh is not None
    given = [None if t is None else as_operand(t, mesh) for t in (query, key, value, attn_mask)]
    given[3] = None if attn_mask is None else _broadcastable(given[3])
    shift = 0 if is_causal else None
    layout = layout_of(_NAME, *(None if t is None else t._spec for t in given), shift, "ring")  # type: ignore[arg-type]
    local = [
        None if target is None else moved(_NAME, t, target)._local_tensor
        for t, target in zip(given, layout.targets, strict=True)
    ]
    queries = layout.targets[0]
    assert queries is not None
    work = Work(_NAME, layout, queries, shift, query.shape[-1] ** -0.5 if scale is None else scale, None)
    return work, work.kernel(*local), local


def _result_spec(out: Any, mesh: Any, shape: Sequence[int], dtype: torch.dtype) -> ShardTensorSpec:
    meta = TensorMeta(torch.Size(shape), contiguous_stride(shape), dtype)
    return ShardTensorSpec.of(mesh, [p for p, _ in out], meta, tuple(sizes for _, sizes in out))


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
        wrap(t, _result_spec(work.layout.out, mesh, s, t.dtype)) for t, s in ((out, shape), (lse, shape[:-1]))
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
        moved(_NAME, as_operand(t, mesh), _result_spec(work.layout.out, mesh, t.shape, t.dtype))._local_tensor
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
