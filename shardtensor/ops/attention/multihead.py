"""``nn.MultiheadAttention`` and what is made of it: the transformer layers.

torch's function merges batch, heads and sequence into one dim and back, which only some shardings survive. Here they
stay apart: (batch, heads, sequence, features).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...registry import register
from ..common.alignment import torch_judges


def _output_of(*args: Any, **kwargs: Any) -> Tensor:
    return F.multi_head_attention_forward(*args, **kwargs)[0]


@register(F.multi_head_attention_forward)
def _multi_head_attention(
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Any,
    training: bool = True,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Any = None,
    static_v: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Any, Any]:
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
