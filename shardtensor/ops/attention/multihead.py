"""``nn.MultiheadAttention`` and what is made of it: the transformer layers.

torch's function merges batch, heads and sequence into one dim and back, which only some shardings survive. Here they
stay apart: (batch, heads, sequence, features).
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
from ...tensor import ShardTensor, from_part
from ..common.alignment import torch_judges
from ..linalg.linear import local_linear
from .blockwise import DTYPES
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
    if need_weights or masks or unusual or query.ndim != 3:
        return _by_operators(
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
            training,
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
        None if key is query else key,
        None if value is key else value,
        embed_dim_to_check,
        num_heads,
        in_proj_bias,
        out_proj_weight,
        out_proj_bias,
        dropout_p if training else 0.0,
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
            q, k, v = (_by_heads(t, self.heads) for t in self._projected(query, key, value, in_weight, weights, bias))
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
        return Composed(partial(_composed, embed_dim, num_heads, dropout_p, is_causal))
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


def _composed(
    embed_dim: int,
    num_heads: int,
    dropout_p: float,
    is_causal: bool,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    attn_mask: Tensor | None,
    in_weight: Tensor | None,
    *weights: Tensor | None,
) -> ShardTensor:
    key = query if key is None else key
    value = key if value is None else value
    separate = in_weight is None
    by_weight = dict(zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), weights, strict=True))
    return _by_operators(
        query,
        key,
        value,
        embed_dim,
        num_heads,
        in_weight,
        bias,
        None,
        None,
        False,
        dropout_p,
        out_weight,
        out_bias,
        need_weights=False,
        attn_mask=attn_mask,
        use_separate_proj_weight=separate,
        is_causal=is_causal,
        **by_weight,
    )[0]


def _by_operators(
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
    """The same as operators on ShardTensors in a row."""
    torch_judges(
        _output_of,
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
    weights = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else in_proj_weight
    q, k, v = _project(query, key, value, weights, in_proj_bias)
    batched = query.ndim == 3
    if not batched:
        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    batch = q.shape[1]
    extra = 0
    if bias_k is not None:
        k = torch.cat([k, bias_k.repeat(1, batch, 1)])
        v = torch.cat([v, bias_v.repeat(1, batch, 1)])
        extra += 1
    q = _by_heads(q, num_heads)
    k = _by_heads(k, num_heads) if static_k is None else static_k.unflatten(0, (batch, num_heads))
    v = _by_heads(v, num_heads) if static_v is None else static_v.unflatten(0, (batch, num_heads))
    if add_zero_attn:
        zero = torch.zeros((batch, num_heads, 1, q.shape[-1]), dtype=k.dtype, device=k.device)
        k, v = torch.cat([k, zero], dim=2), torch.cat([v, zero], dim=2)
        extra += 1
    if is_causal and key_padding_mask is None and not need_weights:
        mask = None
    else:
        mask, is_causal = _mask(attn_mask, key_padding_mask, batch, num_heads, extra, q.dtype), False
    dropout_p = dropout_p if training else 0.0
    if need_weights:
        scores = q * q.shape[-1] ** -0.5 @ k.mT
        shares = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        shares = F.dropout(shares, dropout_p) if dropout_p > 0 else shares
        attended = shares @ v
    else:
        attended = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal)
    out = F.linear(attended.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    out = out if batched else out.squeeze(1)
    if not need_weights:
        return out, None
    shares = shares.mean(dim=1) if average_attn_weights else shares
    return out, shares if batched else shares.squeeze(0)


def _project(query: Any, key: Any, value: Any, weights: Any, bias: Any) -> tuple[Any, Any, Any]:
    """Queries, keys and values; in one product where they come from the same tensor."""
    if isinstance(weights, tuple):
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        return tuple(map(F.linear, (query, key, value), weights, biases))  # type: ignore[return-value]
    if query is key and key is value:
        return F.linear(query, weights, bias).chunk(3, dim=-1)  # type: ignore[return-value]
    size = query.shape[-1]
    if key is value:
        q_weight, kv_weight = weights.split([size, 2 * size])
        q_bias, kv_bias = (None, None) if bias is None else bias.split([size, 2 * size])
        return (F.linear(query, q_weight, q_bias), *F.linear(key, kv_weight, kv_bias).chunk(2, dim=-1))
    return _project(query, key, value, tuple(weights.chunk(3)), bias)


def _by_heads(t: Any, heads: int) -> Any:
    """(sequence, batch, features) as (batch, heads, sequence, features of a head)."""
    return t.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)


def _mask(attn_mask: Any, padding: Any, batch: int, heads: int, extra: int, dtype: torch.dtype) -> Any:
    """Both masks as one that is added to the scores; ``extra`` keys at the end are seen by everybody."""
    both = None
    if attn_mask is not None:
        both = attn_mask if attn_mask.ndim == 2 else attn_mask.unflatten(0, (batch, heads))
        both = _additive(F.pad(both, (0, extra)) if extra else both, dtype)
    if padding is not None:
        padding = _additive(F.pad(padding, (0, extra)) if extra else padding, dtype)[:, None, None]
        both = padding if both is None else both + padding
    return both


def _additive(mask: Any, dtype: torch.dtype) -> Any:
    """torch's modules mask out where a bool mask is True."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


@register(torch.ops.aten._nested_tensor_from_mask_left_aligned.default)
def _not_nested(tensor: Any, mask: Any) -> bool:
    """``nn.TransformerEncoder`` asks whether it may drop the padding. No: shards would become ragged."""
    return False
