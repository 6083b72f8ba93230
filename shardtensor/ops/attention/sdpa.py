"""``scaled_dot_product_attention`` with the sequence, the batch or the heads sharded; see layout.py.

Where queries and keys are both sharded along the sequence, there are three methods, see :func:`attention_method`.
[Note: ring] in common/ring.py describes the ring. layout.py chooses the method.

Sources: H. Liu et al., Ring Attention with Blockwise Transformers for Near-Infinite Context, arXiv:2310.01889; S. A.
Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509 (heads).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate

from ..._compat import TensorMeta, not_in_graphs
from ...context import Setting
from ...dispatch.registry import register
from ...dispatch.tensor import ShardTensor, redistribute_to, wrap
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ...layout.strides import contiguous_stride
from ...operators.arguments import common_mesh
from ...operators.declaration import Arguments, Composed, LocalPlan, Plan, planned
from ..common.alignment import as_operand, broadcast_shape, redistributed, refuse_gathering
from ..elementwise.random import common_draw
from .kernels import DTYPES, Dropout
from .layout import NAME, AttentionLayout, layout_of
from .online_softmax import AttentionWork, backward, forward, work_of

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

_aten = torch.ops.aten
_method = Setting("auto")


@not_in_graphs("call the compiled function inside of shardtensor.attention_method(); it is compiled anew for that")
@contextmanager
def attention_method(name: str) -> Iterator[None]:
    """Choose how attention is computed if queries and keys are both sharded along the sequence.

    Every rank must choose alike. The choice applies to the calling thread. The backward pass uses the method of the
    forward pass. With activation checkpointing, which repeats the forward pass, call ``backward()`` inside this context
    as well.

    Args:
        name: "ring": keys and values are sent around a ring of ranks, in blocks. "heads": an all-to-all shards the
            heads instead of the sequence. "fetch": each rank gets all keys and values that its queries attend to in one
            exchange, and again in the backward pass if they are 1 MiB or more. "auto" (default): "fetch" if keys and
            values are small, and otherwise "ring" or "heads" by an estimate of their times. A call whose heads or mask
            do not allow "heads" or "fetch" uses the ring; see docs/attention.md.

    Raises:
        ValueError: another name.

    Example:
        >>> import shardtensor
        >>> with shardtensor.attention_method("ring"):
        ...     pass  # y = model(x)
    """
    if name not in ("auto", "ring", "heads", "fetch"):
        raise ValueError(f"attention method {name!r}: choose 'auto', 'ring', 'heads' or 'fetch'")
    with _method.set_to(name):
        yield


class AttentionPlan(LocalPlan):
    """Attention on local tensors: one step with a gradient of its own, or local work that autograd differentiates.

    Attributes:
        work: this rank's.
        options: of torch's function.
        by_torch: whether that, on the local tensors, is all of it.
    """

    saves = (0, 1, 2, 3)
    twice = True

    def __init__(self, work: AttentionWork, options: AttentionOptions) -> None:
        layout, (query, _, value, _) = work.layout, work.layout.targets
        out = _result_spec(work, (*query.shape[:-1], value.shape[-1]), query.tensor_meta.dtype)
        gradients = [None if spec is None else gradient_spec(spec, layout) for spec in layout.targets]
        super().__init__(self.attend, out, gradients)
        self.work, self.options = work, options
        self.by_torch = not layout.split and work.shift in (None, 0)
        shared = any(spec is not None for spec in gradients)
        self._by_autograd = self.by_torch or shared or options.dropout_p > 0 or len(query.shape) < 4

    def is_one_step(self) -> bool:
        """Whether :meth:`forward` and :meth:`backward` do it: not where torch's own function does."""
        layout = self.work.layout
        moves = layout.head_sizes is not None or layout.balance is not None
        return not self._by_autograd and not moves and self.work.is_ours

    def run(self, tensors: Sequence[Any]) -> Any:
        return Plan.run(self, tensors) if self.is_one_step() else super().run(tensors)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        if torch.is_grad_enabled():  # to be differentiated twice: refused, in words of its own
            return self.attend(q, k, v, mask), ()
        return forward(self.work, self.work.kernel(), q, k, v, mask)

    def backward(self, needed: Sequence[bool], grads: Sequence[Tensor | None], *saved: Any) -> Sequence[Tensor | None]:
        if grads[0] is None:
            return (None,) * 4
        return backward(self.work, self.work.kernel(), needed, grads[0], *saved)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attention of this rank's queries. Differentiable."""
        p, scale, grouped = self.options
        work = self.work
        if self.by_torch:
            causal = work.shift == 0
            return F.scaled_dot_product_attention(q, k, v, mask, p, causal, scale=scale, enable_gqa=grouped)
        dropout = None
        if p > 0:
            place = tuple(work.query.coordinate[m] for m in work.layout.split)
            dropout = Dropout(p, common_draw(work.query, q.device), place)
        if work.layout.balance is not None:
            return work.balanced(q, k, v, mask, dropout)
        return (work.attend if work.layout.head_sizes is None else work.by_heads)(q, k, v, mask, dropout)


class AttentionOptions(NamedTuple):
    """Dropout probability, scale and grouped queries, as torch's function has them."""

    dropout_p: float
    scale: float | None
    enable_gqa: bool


def plan_attention(
    query: ShardTensorSpec,
    key: ShardTensorSpec,
    value: ShardTensorSpec,
    mask: ShardTensorSpec | None,
    shift: int | None,
    options: AttentionOptions,
    method: str | None = None,
) -> AttentionPlan:
    """The plan for operands with equal batch dims; the layouts that they need are in ``plan.work.layout.targets``.

    Args:
        method: None: the one that :func:`attention_method` has chosen.
    """
    layout = layout_of(query, key, value, mask, shift, method or _method.value)
    scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    return AttentionPlan(work_of(layout, shift, scale), options)


@planned(NAME, tensors="query key value attn_mask")
def _attention(
    call: Arguments,
    query: ShardTensorSpec,
    key: ShardTensorSpec,
    value: ShardTensorSpec,
    attn_mask: ShardTensorSpec | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    shift: int | None,
) -> Plan:
    """Attention; ``shift`` tells which keys a query sees, where the mask was a ``torch.nn.attention.bias``."""
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    call.returned(F.scaled_dot_product_attention, query, key, value, attn_mask=attn_mask, **options)
    if query.tensor_meta.dtype not in DTYPES:
        reason = f"torch's attention does not compute in {query.tensor_meta.dtype}"
        raise call.refuse(reason, "convert the operands")
    for name, spec in list(call.tensors.items()):
        dtype = spec.tensor_meta.dtype
        call.cast(call.autocast() if dtype.is_floating_point and dtype != torch.float64 else None, name)
    tail = 3 if enable_gqa else 2  # with grouped queries, keys and values keep heads of their own
    shapes = {spec.shape[:-tail] for spec in (query, key, value)}
    batch = broadcast_shape(*shapes) if len(shapes) > 1 else None
    if batch is not None or (attn_mask is not None and len(attn_mask.shape) < 2):
        return Composed(partial(_in_common_shapes, batch, tail, (*options.values(), shift)))
    if attn_mask is not None:
        call.tensors["attn_mask"] = _unsharded_where_single(call.tensors["attn_mask"])
    q, k, v, mask = *list(call.tensors.values())[:3], call.tensors.get("attn_mask")
    plan = plan_attention(q, k, v, mask, shift, AttentionOptions(dropout_p, scale, enable_gqa))
    targets = [target for target in plan.work.layout.targets if target is not None]
    refuse_gathering(NAME, list(call.tensors.values()), targets)
    call.tensors.update(zip(call.tensors, targets))
    return plan


# An entry point of its own, because what a CausalBias says is in its class and attributes.
@register(
    F.scaled_dot_product_attention,
    _aten.scaled_dot_product_attention,
)
def global_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> ShardTensor:
    """torch's function on ShardTensors; plain operands count as replicated."""
    shift = 0 if is_causal else None
    if _is_causal_bias(attn_mask):
        shift, attn_mask = _shift_of(attn_mask, query, key, is_causal), None
    return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, shift)  # type: ignore[no-any-return]


def _is_causal_bias(mask: Tensor | None) -> TypeGuard[CausalBias]:
    # Whoever has such a mask has imported its module, which takes half a second, as it imports torch._dynamo.
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(mask, module.CausalBias)


def _shift_of(bias: CausalBias, query: Tensor, key: Tensor, is_causal: bool) -> int:
    """The mask that a ``torch.nn.attention.bias`` represents, as a shift."""
    lengths, wanted = (bias.seq_len_q, bias.seq_len_kv), (query.shape[-2], key.shape[-2])
    if is_causal:
        raise ValueError("CausalBias should not be used with is_causal=True")
    if lengths != wanted:
        raise ValueError(f"a causal bias for (queries, keys) {lengths}, but there are {wanted}")
    return 0 if bias.variant.name == "UPPER_LEFT" else wanted[1] - wanted[0]


def _in_common_shapes(
    batch: torch.Size | None,
    tail: int,
    options: tuple[Any, ...],
    query: ShardTensor,
    key: ShardTensor,
    value: ShardTensor,
    mask: Tensor | None,
) -> ShardTensor:
    """Attention, once the operands have the same batch dims and the mask at least two dims."""
    operands: list[Tensor] = [query, key, value]
    if batch is not None:
        operands = [t.expand(*batch, *t.shape[-tail:]) for t in operands]
    while mask is not None and mask.ndim < 2:
        mask = mask.unsqueeze(0)
    return _attention(*operands, mask, *options)  # type: ignore[no-any-return]


def _unsharded_where_single(mask: ShardTensorSpec) -> ShardTensorSpec:
    """The spec of a mask without shards of dims of length 1, which are broadcast: one rank has all of them."""
    single = [m for d, m in mask.sharded_dims().items() if mask.shape[d] == 1]
    return mask.with_axes({m: AxisLayout(Replicate()) for m in single}) if single else mask


def gradient_spec(spec: ShardTensorSpec, layout: AttentionLayout) -> ShardTensorSpec | None:
    """The layout of an operand's gradient: contributions where ranks do different work with a replicated one."""
    shared = [m for m in layout.split if spec.placements[m].is_replicate()]
    return spec.with_axes({m: AxisLayout(Partial()) for m in shared}) if shared else None


# -- below autograd: what torch's function consists of on the CPU, and autograd's formula for it ----------------------


def _planned(
    query: Any, key: Any, value: Any, attn_mask: Any, is_causal: bool, scale: float | None
) -> tuple[AttentionPlan, list[Any]]:
    """The plan, around the ring, and the local operands."""
    mesh = common_mesh(NAME, [query, key, value, attn_mask])
    assert mesh is not None
    given: Any = [None if t is None else as_operand(t, mesh) for t in (query, key, value, attn_mask)]
    if attn_mask is not None:
        rows = given[3] if given[3].ndim > 1 else given[3].unsqueeze(0)
        given[3] = redistribute_to(rows, _unsharded_where_single(rows._spec))
    specs: list[Any] = [None if t is None else t._spec for t in given]
    q, k, v, mask = specs
    plan = plan_attention(q, k, v, mask, 0 if is_causal else None, AttentionOptions(0.0, scale, False), "plain ring")
    pairs = zip(given, plan.work.layout.targets, strict=True)
    return plan, [None if spec is None else redistributed(NAME, t, spec)._local_tensor for t, spec in pairs]


def _result_spec(work: AttentionWork, shape: Sequence[int], dtype: torch.dtype) -> ShardTensorSpec:
    stride = contiguous_stride(shape)
    if len(shape) == 4 and work.kernel().fused:
        # It writes the heads of a query next to each other. Models join them, with ``transpose(1, 2).contiguous()``.
        batch, rows, heads, last = contiguous_stride([shape[i] for i in (0, 2, 1, 3)])
        stride = (batch, heads, rows, last)
    return work.query.with_layout(work.layout.out, TensorMeta(torch.Size(shape), stride, dtype))


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
    plan, local = _planned(query, key, value, attn_mask, is_causal, scale)
    work = plan.work
    out, (_, lse, *_) = forward(work, work.kernel(), *local)
    return plan.wrapped(out), wrap(lse, _result_spec(work, query.shape[:-1], lse.dtype))


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
    plan, local = _planned(query, key, value, attn_mask, is_causal, scale)
    work = plan.work
    results = [
        redistributed(NAME, as_operand(t, work.query.mesh), _result_spec(work, t.shape, t.dtype))._local_tensor
        for t in (grad_out, out, logsumexp)
    ]
    needed = True, True, True, False
    grads: Sequence[Any] = backward(work, work.kernel(), needed, results[0], *local, *results[1:])
    layouts = [gradient_spec(target, work.layout) or target for target in work.layout.targets[:3]]
    return tuple(map(wrap, grads[:3], layouts))
