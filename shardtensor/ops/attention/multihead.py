"""``nn.MultiheadAttention`` and what is made of it: the transformer layers.

torch's function merges batch, heads and sequence into one dim and back, which only some shardings survive. Here they
stay apart: (batch, heads, sequence, features). Usual calls are one plan; the others are operators in a row, those of
multihead_operators.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Shard

from ..._compat import TensorMeta
from ...layout import AxisLayout
from ...operators import Arguments, Composed, LocalPlan, Operand, Plan, planned
from ...registry import register
from ...spec import ShardTensorSpec
from ...strides import contiguous_stride
from ..common.alignment import wide_dtype
from ..common.half import cast, product
from .blockwise import DTYPES
from .multihead_operators import MultiheadOptions, by_heads, multihead_by_operators, multihead_output
from .sdpa import AttentionOptions, AttentionPlan, plan_attention


def _output_of(*args: Any, **kwargs: Any) -> Tensor:
    return F.multi_head_attention_forward(*args, **kwargs)[0]


@register(F.multi_head_attention_forward)
def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Any, Any]:
    """torch's function on ShardTensors; which of its tensors are the same one is not in a plan's key."""
    masks = key_padding_mask is not None or (attn_mask is not None and not is_causal)
    unusual = add_zero_attn or any(t is not None for t in (bias_k, bias_v, static_k, static_v))
    other_key, other_value = None if key is query else key, None if value is key else value
    dropout_p = dropout_p if training else 0.0
    in_proj_weight = None if use_separate_proj_weight else in_proj_weight  # torch ignores it then
    if need_weights or masks or unusual or query.ndim != 3:
        return _general_attention(  # type: ignore[no-any-return]
            query,
            other_key,
            other_value,
            embed_dim_to_check,
            num_heads,
            in_proj_weight,
            in_proj_bias,
            bias_k,
            bias_v,
            add_zero_attn,
            dropout_p,
            out_proj_weight,
            out_proj_bias,
            key_padding_mask,
            need_weights,
            attn_mask,
            use_separate_proj_weight,
            q_proj_weight,
            k_proj_weight,
            v_proj_weight,
            static_k,
            static_v,
            average_attn_weights,
            is_causal,
        )
    weights = (None, q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else (in_proj_weight,)
    attended = _self_or_cross_attention(
        query,
        other_key,
        other_value,
        embed_dim_to_check,
        num_heads,
        in_proj_bias,
        out_proj_weight,
        out_proj_bias,
        dropout_p,
        attn_mask,
        is_causal,
        *weights,
    )
    return attended, None


class MultiheadPlan(LocalPlan):
    """Projections, attention by heads and the output's projection, all on local tensors.

    Self-attention is one step with a gradient of its own where the attention in it is; all else is local work that
    autograd differentiates.

    Args:
        attention: of the projected tensors, ``(batch, heads, sequence, features)``.
        heads: how many.
        outputs: the result's spec.
    """

    saves = (0, 4, 7)
    twice = True
    outputs: ShardTensorSpec

    def __init__(self, attention: AttentionPlan, heads: int, outputs: ShardTensorSpec) -> None:
        super().__init__(self.attend, outputs)
        self.attention, self.heads = attention, heads

    def run(self, tensors: Sequence[Any]) -> Any:
        _, key, value, *_, in_weight, _, _, _ = tensors
        one_step = key is None and value is None and in_weight is not None and self.attention.is_one_step()
        return Plan.run(self, tensors) if one_step else super().run(tensors)

    # -- self-attention ---------------------------------------------------------------------------------------------

    def forward(self, *tensors: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Of the tensors that :meth:`attend` gets."""
        if torch.is_grad_enabled():  # to be differentiated twice
            return self.attend(*tensors), ()
        query, _, _, bias, out_weight, out_bias, _, in_weight, *_ = tensors
        q, k, v = self._by_heads(F.linear(query, in_weight, bias))
        attended, kept = self.attention.forward(q, k, v, None)
        return F.linear(_merged(attended), out_weight, out_bias), (q, *kept)

    def backward(self, needed: Sequence[bool], grads: Sequence[Tensor | None], *saved: Any) -> Sequence[Tensor | None]:
        """The sum of all weights' gradients travels while the query's is computed."""
        found: list[Tensor | None] = [None] * len(needed)
        if grads[0] is None:
            return found
        query, out_weight, in_weight, q, *kept = saved
        grad, attended = grads[0].flatten(0, 1), kept[2]
        found[4], found[5] = self._of_parameters(grad, _merged(attended), needed[4:6], out_weight)
        of_attended = torch.mm(grad, cast(out_weight, grad.dtype)).view(*query.shape[:2], *q.shape[1::2])
        of_each = self.attention.backward((True, True, True, False), [of_attended.permute(1, 2, 0, 3)], q, None, *kept)
        packed = torch.stack([g.permute(2, 0, 1, 3) for g in of_each[:3]], 2).view(grad.shape[0], in_weight.shape[0])  # type: ignore[union-attr]
        found[7], found[3] = self._of_parameters(packed, query, (needed[7], needed[3]), in_weight)
        finish = None if self.total is None else self.total.start(found, overwrite=True)
        of_query = torch.mm(packed, cast(in_weight, packed.dtype)).view(query.shape) if needed[0] else None
        found = found if finish is None else finish()
        found[0] = None if of_query is None else cast(of_query, query.dtype)
        return found

    def _of_parameters(
        self, grad: Tensor, x: Tensor, needed: Sequence[bool], weight: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of weight and bias of a projection of ``x``; ``grad`` has rows."""
        dtype = wide_dtype(weight.dtype) if self.sums else weight.dtype
        of_weight = of_bias = None
        if needed[0]:
            x = cast(x.flatten(0, 1), grad.dtype)
            of_weight = cast(product(grad, x) if self.sums else torch.mm(grad.t(), x), dtype)
        if needed[1]:
            of_bias = cast(grad.sum(0, dtype=wide_dtype(grad.dtype)), dtype)
        return of_weight, of_bias

    def _by_heads(self, packed: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values of each head, out of what they were projected to in one product."""
        apart = (*packed.shape[:2], 3, self.heads, packed.shape[2] // (3 * self.heads))
        return packed.reshape(apart).permute(2, 1, 3, 0, 4).unbind(0)

    # -- all other kinds --------------------------------------------------------------------------------------------

    def attend(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        bias: Tensor | None,
        out_weight: Tensor,
        out_bias: Tensor | None,
        mask: Tensor | None,
        in_weight: Tensor | None,
        *weights: Tensor | None,
    ) -> Tensor:
        """``(sequence, batch, features)`` of this rank's queries. ``key`` None: the query; ``value`` None: the key."""
        if in_weight is not None and key is None and value is None:
            q, k, v = self._by_heads(F.linear(query, in_weight, bias))
        else:
            q, k, v = (by_heads(t, self.heads) for t in _projected(query, key, value, in_weight, weights, bias))
        attended = self.attention.attend(q, k, v)  # the mask says no more than is_causal
        return F.linear(_merged(attended), out_weight, out_bias)


def _projected(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    in_weight: Tensor | None,
    weights: Sequence[Tensor | None],
    bias: Tensor | None,
) -> Sequence[Tensor]:
    """Queries, keys and values, the latter two in one product where they come from the same tensor."""
    if in_weight is not None and key is not None and value is None:
        parts = [query.shape[-1], 2 * query.shape[-1]]
        of_q, of_kv = in_weight.split(parts)  # type: ignore[no-untyped-call]
        q_bias, kv_bias = (None, None) if bias is None else bias.split(parts)  # type: ignore[no-untyped-call]
        return F.linear(query, of_q, q_bias), *F.linear(key, of_kv, kv_bias).chunk(2, dim=-1)
    key = query if key is None else key
    inputs = query, key, key if value is None else value
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    of_each = weights if in_weight is None else in_weight.chunk(3)
    return [F.linear(t, w, b) for t, w, b in zip(inputs, of_each, biases, strict=True)]  # type: ignore[arg-type]


def _merged(attended: Tensor) -> Tensor:
    """(batch, heads, sequence, features of a head) as (sequence, batch, features)."""
    return attended.permute(2, 0, 1, 3).flatten(2)


@planned(
    "multi_head_attention_forward",
    tensors="query key value attn_mask",
    parameters="in_proj_bias out_proj_weight out_proj_bias in_proj_weight q_proj_weight k_proj_weight v_proj_weight",
    sharded="in_proj_bias out_proj_weight out_proj_bias in_proj_weight q_proj_weight k_proj_weight v_proj_weight",
)
def _self_or_cross_attention(
    call: Arguments,
    query: ShardTensorSpec,
    key: ShardTensorSpec | None,
    value: ShardTensorSpec | None,
    embed_dim: int,
    num_heads: int,
    in_proj_bias: Operand | None,
    out_proj_weight: Operand,
    out_proj_bias: Operand | None,
    dropout_p: float,
    attn_mask: ShardTensorSpec | None,
    is_causal: bool,
    in_proj_weight: Operand | None,
    q_proj_weight: Operand | None = None,
    k_proj_weight: Operand | None = None,
    v_proj_weight: Operand | None = None,
) -> Plan:
    """Attention without weights returned or masks. A mask that ``is_causal`` makes superfluous is only checked."""
    given = [query, key or query, value or key or query]
    separate = in_proj_weight is None
    parameters = [in_proj_bias, out_proj_weight, out_proj_bias]
    parameters += [q_proj_weight, k_proj_weight, v_proj_weight] if separate else [in_proj_weight]
    call.returned(
        _output_of,
        *given,
        embed_dim,
        num_heads,
        in_proj_weight,
        in_proj_bias,
        None,
        None,
        False,
        0.0,
        out_proj_weight,
        out_proj_bias,
        need_weights=False,
        attn_mask=attn_mask,
        use_separate_proj_weight=separate,
        q_proj_weight=q_proj_weight,
        k_proj_weight=k_proj_weight,
        v_proj_weight=v_proj_weight,
        is_causal=is_causal,
    )
    attention = None
    if not any(isinstance(p, ShardTensorSpec) for p in parameters):
        attention = _local_attention(call, given, num_heads, dropout_p, is_causal)
    if attention is None:
        return Composed(partial(multihead_output, MultiheadOptions(num_heads, dropout_p, is_causal)))
    meta = query.tensor_meta
    shape = (*query.shape[:2], out_proj_weight.shape[0])
    out = TensorMeta(torch.Size(shape), contiguous_stride(shape), call.autocast() or meta.dtype)
    return MultiheadPlan(attention, num_heads, query.replace(meta=out))


def _local_attention(
    call: Arguments, given: Sequence[ShardTensorSpec], heads: int, dropout_p: float, is_causal: bool
) -> AttentionPlan | None:
    """The plan of the attention by heads, if all projections are local and their weights' gradients are sums.

    So it is where query, key and value are sharded over the same mesh dims, along batch or sequence.
    """
    if any(2 in spec.sharded_dims() for spec in given) or given[0].tensor_meta.dtype not in DTYPES:
        return None
    dtype = call.autocast()
    if dtype is not None and given[0].tensor_meta.dtype == torch.float64:
        return None
    by_heads = [_spec_by_heads(spec, given[0].shape[2], heads, dtype) for spec in given]
    q, k, v = by_heads
    plan = plan_attention(q, k, v, None, 0 if is_causal else None, AttentionOptions(dropout_p, None, False))
    layout = plan.work.layout
    for spec, target in zip(by_heads, layout.targets):
        assert target is not None
        if not spec.lies_like(target) or set(spec.sharded_dims().values()) != set(layout.split):
            return None
    return plan


def _spec_by_heads(spec: ShardTensorSpec, features: int, heads: int, dtype: torch.dtype | None) -> ShardTensorSpec:
    """(sequence, batch, features) once it is projected and is (batch, heads, sequence, features of a head)."""
    dims = {0: 2, 1: 0}
    axes = [AxisLayout(Shard(dims[p.dim]), n) if isinstance(p, Shard) else AxisLayout(p) for p, n in spec.layout]
    shape = (spec.shape[1], heads, spec.shape[0], features // heads)
    meta = TensorMeta(torch.Size(shape), contiguous_stride(shape), dtype or spec.tensor_meta.dtype)
    return spec.with_layout(axes, meta)


_GIVEN = (
    "in_proj_weight in_proj_bias bias_k bias_v out_proj_weight out_proj_bias key_padding_mask attn_mask "
    "q_proj_weight k_proj_weight v_proj_weight static_k static_v"
)


@planned(
    "multi_head_attention_forward",
    tensors="query key value",
    partial="query key value",
    parameters=_GIVEN,
    sharded=_GIVEN,
)
def _general_attention(
    call: Arguments,
    query: ShardTensorSpec,
    key: ShardTensorSpec | None,
    value: ShardTensorSpec | None,
    embed_dim: int,
    num_heads: int,
    in_proj_weight: Operand | None,
    in_proj_bias: Operand | None,
    bias_k: Operand | None,
    bias_v: Operand | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Operand,
    out_proj_bias: Operand | None,
    key_padding_mask: Operand | None,
    need_weights: bool,
    attn_mask: Operand | None,
    use_separate_proj_weight: bool,
    q_proj_weight: Operand | None,
    k_proj_weight: Operand | None,
    v_proj_weight: Operand | None,
    static_k: Operand | None,
    static_v: Operand | None,
    average_attn_weights: bool,
    is_causal: bool,
) -> Plan:
    """Attention with whatever torch's function takes: operators in a row, once torch has checked the arguments."""
    call.returned(
        _output_of,
        query,
        key or query,
        value or key or query,
        embed_dim,
        num_heads,
        in_proj_weight,
        in_proj_bias,
        bias_k,
        bias_v,
        add_zero_attn,
        0.0,
        out_proj_weight,
        out_proj_bias,
        key_padding_mask=key_padding_mask,
        need_weights=need_weights,
        attn_mask=attn_mask,
        use_separate_proj_weight=use_separate_proj_weight,
        q_proj_weight=q_proj_weight,
        k_proj_weight=k_proj_weight,
        v_proj_weight=v_proj_weight,
        static_k=static_k,
        static_v=static_v,
        is_causal=is_causal,
    )
    options = MultiheadOptions(num_heads, dropout_p, is_causal, add_zero_attn, need_weights, average_attn_weights)
    return Composed(partial(multihead_by_operators, options))


@register(torch.ops.aten._nested_tensor_from_mask_left_aligned.default)
def _not_nested(tensor: Any, mask: Any) -> bool:
    """``nn.TransformerEncoder`` asks whether it may drop the padding. No: shards would become ragged."""
    return False
