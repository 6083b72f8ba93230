"""CUDA's kernels of attention, as products and a softmax: their layouts, and how torch chooses between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from device import contracts

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_ROWS = 32  # of which the efficient kernel pads the log-sum-exp to a multiple


def _visible(q: Tensor, k: Tensor) -> Tensor:
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    scores = (q.float() @ k.float().transpose(-2, -1)) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if bias is not None:
        scores = scores + bias.float()
    return scores.masked_fill(~_visible(q, k), -math.inf) if causal else scores


def _operand(t: Tensor, q: Tensor) -> Tensor:
    """``t`` as an operand of the tensor cores: rounded to the dtype of ``q``; the products are added up in float32."""
    return t.to(q.dtype).float()


def _forward(q, k, v, bias, causal, scale, of_none):
    scores = _scores(q, k, bias, causal, scale)
    lse = scores.logsumexp(-1)
    lse = lse.masked_fill(lse == -math.inf, of_none)
    return (_operand((scores - lse.unsqueeze(-1)).exp(), q) @ v.float()).to(q.dtype), lse


def _backward(grad, q, k, v, bias, out, lse, causal, scale):
    weights = (_scores(q, k, bias, causal, scale) - lse.unsqueeze(-1)).exp()
    grad = grad.float()
    d_scores = weights * (grad @ v.float().transpose(-2, -1) - (grad * out.float()).sum(-1, keepdim=True))
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    products = _operand(d_scores, q)
    dq, dk = (products @ k.float()) * factor, (products.transpose(-2, -1) @ q.float()) * factor
    dv = _operand(weights, q).transpose(-2, -1) @ grad
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_scores


def _no_state(q: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(2 if dtype == torch.uint64 else (), dtype=dtype, device=q.device)


def _heads_last(t: Tensor) -> Tensor:
    """(N, H, L, E) in the memory of (N, L, H, E), which both kernels return."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    out, lse = _forward(q, k, v, None, is_causal, scale, of_none=math.inf)
    seed, none = _no_state(q, torch.uint64), torch.empty(0, dtype=torch.uint64, device=q.device)
    return _heads_last(out), lse, None, None, q.shape[-2], k.shape[-2], seed, none, q.new_empty(0)


def flash_backward(
    grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset, *, scale=None
):
    return _backward(grad, q, k, v, None, out, lse, is_causal, scale)[:3]


def efficient(q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    out, lse = _forward(q, k, v, attn_bias, is_causal, scale, of_none=0.0)
    rows = math.ceil(q.shape[-2] / _ROWS) * _ROWS if compute_log_sumexp else 0
    padded = lse.new_full((*lse.shape[:-1], rows), math.inf)
    if compute_log_sumexp:
        padded[..., : q.shape[-2]] = lse
    return _heads_last(out), padded, _no_state(q, torch.int64), _no_state(q, torch.int64)


def efficient_backward(
    grad, q, k, v, attn_bias, out, lse, seed, offset, dropout_p, mask, is_causal=False, *, scale=None
):
    dq, dk, dv, d_scores = _backward(grad, q, k, v, attn_bias, out, lse[..., : q.shape[-2]], is_causal, scale)
    d_bias = None
    if attn_bias is not None and mask[3]:
        d_bias = d_scores.sum_to_size(attn_bias.shape).to(attn_bias.dtype)
    return tuple(g if needed else None for g, needed in zip((dq, dk, dv, d_bias), mask))


def choose(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """What torch's ``scaled_dot_product_attention`` does on CUDA; dropout is left to the plain form."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, -math.inf)
    fits = (
        q.dim() == k.dim() == v.dim() == 4
        and not enable_gqa
        and not dropout_p
        and 0 not in (*q.shape, *k.shape, *v.shape)
    )
    fits = fits and q.shape[:2] == k.shape[:2] == v.shape[:2] and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    if fits and q.dtype in _HALF and attn_mask is None and q.shape[-1] == v.shape[-1]:
        size = q.shape[-1]
        scale = 1 / math.sqrt(size) if scale is None else scale
        q, k, v = (F.pad(t, (0, -size % 8)) for t in (q, k, v))
        return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[0][..., :size]
    aligned = all(t.shape[-1] * t.element_size() % 16 == 0 for t in (q, v))
    if fits and aligned and q.dtype in (*_HALF, torch.float32):
        if attn_mask is not None:
            n = k.shape[-2]
            attn_mask = F.pad(attn_mask.expand(*attn_mask.shape[:-1], n), (0, -n % 16))[..., :n]  # its rows are aligned
            attn_mask = attn_mask.expand(*q.shape[:-1], n)
        keeps = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v) if t is not None)
        return _aten._scaled_dot_product_efficient_attention(q, k, v, attn_mask, keeps, 0.0, is_causal, scale=scale)[0]
    return _aten._scaled_dot_product_attention_math(
        q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


_library = torch.library.Library("aten", "IMPL")


def _checked(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, which demands what CUDA's does."""
    if name not in contracts.NAMES:
        return kernel
    operator = getattr(_aten, name.removeprefix("aten::")).default

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip((a.name for a in operator._schema.arguments), args)), **kwargs}
        contracts.check(name, tuple(given.get(a.name, a.default_value) for a in operator._schema.arguments))
        return kernel(*args, **kwargs)

    return call


def register() -> None:
    """Put these in place of the kernels that a build without CUDA does not have."""
    for name, kernel in {
        "_scaled_dot_product_flash_attention": flash,
        "_scaled_dot_product_flash_attention_backward": flash_backward,
        "_scaled_dot_product_efficient_attention": efficient,
        "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    }.items():
        _library.impl(name, _checked(f"aten::{name}", kernel), "CUDA")
    for key in ("AutogradCUDA", "CUDA"):
        _library.impl("scaled_dot_product_attention", choose, key)
