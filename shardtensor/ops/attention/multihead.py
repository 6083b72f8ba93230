"""``nn.MultiheadAttention`` and what is made of it: the transformer layers.

torch's function merges batch, heads and sequence into one dim and back, which only some shardings survive. Here they
stay apart: (batch, heads, sequence, features). Usual calls are one plan; the others are operators in a row, those of
multihead_operators.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Shard

from ..._compat import TensorMeta
from ...layout import AxisLayout
from ...operators import Arguments, Composed, LocalPlan, Operand, Plan, planned
from ...parameters import GradientSum
from ...registry import register
from ...spec import ShardTensorSpec
from ...strides import contiguous_stride
from ...tensor import from_part
from ..linalg.linear import local_linear
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
    key, value = None if key is query else key, None if value is key else value
    dropout_p = dropout_p if training else 0.0
    in_proj_weight = None if use_separate_proj_weight else in_proj_weight  # torch ignores it then
    if need_weights or masks or unusual or query.ndim != 3:
        return _general_attention(
            query,
            key,
            value,
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
        key,
        value,
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

    Args:
        attention: of the projected tensors, ``(batch, heads, sequence, features)``.
        heads: how many.
        outputs: the result's spec.
    """

    def __init__(self, attention: AttentionPlan, heads: int, outputs: ShardTensorSpec) -> None:
        super().__init__(self.attend, outputs)
        self.attention, self.heads = attention, heads

    def run(self, tensors: Sequence[Any]) -> Any:
        result = self.attend(*self.local_tensors(tensors))
        return from_part(result, self.outputs)  # type: ignore[arg-type]

    @cached_property
    def _sums(self) -> dict[str, GradientSum | None]:
        """The sums of the gradients of each projection's ``(input, weight, bias)``."""
        if self.total is None:
            return dict.fromkeys(("in", "q", "k", "v", "out"))
        _, _, _, bias, out_weight, out_bias, _, *weights = self.total.needed
        of = {"out": (False, out_weight, out_bias)}
        of |= {name: (False, plain, bias) for name, plain in zip(("in", "q", "k", "v"), weights, strict=False)}
        return {name: GradientSum(self.total.mesh, self.total.mesh_dims, needed) for name, needed in of.items()}

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
            packed = local_linear(query, in_weight, bias, self._sums["in"])
            apart = (*packed.shape[:2], 3, self.heads, packed.shape[2] // (3 * self.heads))
            q, k, v = packed.reshape(apart).permute(2, 1, 3, 0, 4).unbind(0)
        else:
            q, k, v = (by_heads(t, self.heads) for t in self._projected(query, key, value, in_weight, weights, bias))
        attended = self.attention.attend(q, k, v)  # the mask says no more than is_causal
        return local_linear(attended.permute(2, 0, 1, 3).flatten(2), out_weight, out_bias, self._sums["out"])

    def _projected(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        in_weight: Tensor | None,
        weights: Sequence[Tensor | None],
        bias: Tensor | None,
    ) -> Sequence[Tensor]:
        """Queries, keys and values, the latter two in one product where they come from the same tensor."""
        size, sums = query.shape[-1], self._sums
        if in_weight is not None and key is not None and value is None:
            of_q, of_kv = in_weight.split([size, 2 * size])
            q_bias, kv_bias = (None, None) if bias is None else bias.split([size, 2 * size])
            q, kv = local_linear(query, of_q, q_bias, sums["in"]), local_linear(key, of_kv, kv_bias, sums["in"])
            return q, *kv.chunk(2, dim=-1)
        key = query if key is None else key
        inputs = query, key, key if value is None else value
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        names = ("q", "k", "v") if in_weight is None else ("in",) * 3
        of_each = weights if in_weight is None else in_weight.chunk(3)
        return [local_linear(t, w, b, sums[n]) for t, w, b, n in zip(inputs, of_each, biases, names, strict=True)]  # type: ignore[arg-type]


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
    plan = plan_attention(*by_heads, None, 0 if is_causal else None, AttentionOptions(dropout_p, None, False))
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
