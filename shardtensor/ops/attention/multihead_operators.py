"""Multi-head attention as operators on ShardTensors in a row, for all arguments that torch's function takes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["MultiheadOptions", "by_heads", "multihead_by_operators", "multihead_output"]


class MultiheadOptions(NamedTuple):
    """Arguments that are no tensors, by torch's names."""

    num_heads: int
    dropout_p: float
    is_causal: bool
    add_zero_attn: bool = False
    need_weights: bool = False
    average_attn_weights: bool = False


def multihead_by_operators(
    options: MultiheadOptions,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    q_proj_weight: Tensor | None,
    k_proj_weight: Tensor | None,
    v_proj_weight: Tensor | None,
    static_k: Tensor | None,
    static_v: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The output and the weights, None if they are not asked for. ``key`` None: the query; ``value`` None: the key.

    torch has checked the arguments.
    """
    key = query if key is None else key
    value = key if value is None else value
    weights = (q_proj_weight, k_proj_weight, v_proj_weight) if in_proj_weight is None else in_proj_weight
    q, k, v = _project(query, key, value, weights, in_proj_bias)
    batched = query.ndim == 3
    if not batched:
        q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    heads, batch = options.num_heads, q.shape[1]
    extra = 0
    if bias_k is not None and bias_v is not None:
        k, v = torch.cat([k, bias_k.repeat(1, batch, 1)]), torch.cat([v, bias_v.repeat(1, batch, 1)])
        extra += 1
    q = by_heads(q, heads)
    k = by_heads(k, heads) if static_k is None else static_k.unflatten(0, (batch, heads))  # type: ignore[no-untyped-call]
    v = by_heads(v, heads) if static_v is None else static_v.unflatten(0, (batch, heads))  # type: ignore[no-untyped-call]
    if options.add_zero_attn:
        zero = torch.zeros((batch, heads, 1, q.shape[-1]), dtype=k.dtype, device=k.device)
        k, v = torch.cat([k, zero], dim=2), torch.cat([v, zero], dim=2)
        extra += 1
    if options.is_causal and key_padding_mask is None and not options.need_weights:
        mask = None  # is_causal says as much
    else:
        mask = _mask(attn_mask, key_padding_mask, batch, heads, extra, q.dtype)
        options = options._replace(is_causal=False)
    attended, shares = _attend(options, q, k, v, mask)
    out = F.linear(attended.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    if batched:
        return out, shares
    return out.squeeze(1), None if shares is None else shares.squeeze(0)


def multihead_output(
    options: MultiheadOptions,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    attn_mask: Tensor | None,
    in_weight: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    v_weight: Tensor | None,
) -> Tensor:
    """The output for usual arguments."""
    parameters = in_weight, bias, None, None, out_weight, out_bias
    weights = q_weight, k_weight, v_weight
    return multihead_by_operators(options, query, key, value, *parameters, None, attn_mask, *weights, None, None)[0]


def _attend(
    options: MultiheadOptions, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The attended values, and the weights (of all heads, or their average) if they are asked for."""
    if not options.need_weights:
        return F.scaled_dot_product_attention(q, k, v, mask, options.dropout_p, options.is_causal), None
    scores = q * q.shape[-1] ** -0.5 @ k.mT
    shares = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    shares = F.dropout(shares, options.dropout_p) if options.dropout_p > 0 else shares
    return shares @ v, shares.mean(dim=1) if options.average_attn_weights else shares


def _project(query: Tensor, key: Tensor, value: Tensor, weights: Any, bias: Tensor | None) -> tuple[Any, Any, Any]:
    """Queries, keys and values; in one product where they come from the same tensor."""
    if isinstance(weights, tuple):
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        return tuple(map(F.linear, (query, key, value), weights, biases))  # type: ignore[return-value]
    if query is key and key is value:
        return F.linear(query, weights, bias).chunk(3, dim=-1)  # type: ignore[return-value]
    size = query.shape[-1]
    if key is value:
        q_weight, kv_weight = weights.split([size, 2 * size])
        q_bias, kv_bias = (None, None) if bias is None else bias.split([size, 2 * size])  # type: ignore[no-untyped-call]
        projected_key, projected_value = F.linear(key, kv_weight, kv_bias).chunk(2, dim=-1)
        return F.linear(query, q_weight, q_bias), projected_key, projected_value
    return _project(query, key, value, tuple(weights.chunk(3)), bias)


def by_heads(t: Tensor, heads: int) -> Tensor:
    """(sequence, batch, features) as (batch, heads, sequence, features of a head)."""
    return t.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)  # type: ignore[no-any-return, no-untyped-call]


def _mask(
    attn_mask: Tensor | None, padding: Tensor | None, batch: int, heads: int, extra: int, dtype: torch.dtype
) -> Tensor | None:
    """Both masks as one that is added to the scores; ``extra`` keys at the end are seen by everybody."""
    both = None
    if attn_mask is not None:
        both = attn_mask if attn_mask.ndim == 2 else attn_mask.unflatten(0, (batch, heads))  # type: ignore[no-untyped-call]
        both = _additive(F.pad(both, (0, extra)) if extra else both, dtype)
    if padding is not None:
        padding = _additive(F.pad(padding, (0, extra)) if extra else padding, dtype)[:, None, None]
        both = padding if both is None else both + padding
    return both


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """torch's modules mask out where a bool mask is True."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
