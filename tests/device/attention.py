"""CUDA's kernels of attention, as products and a softmax: their layouts, and how torch chooses between them.

They are put in place for the CPU: the emulated device runs them as it does any other, each as one kernel.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_ROWS = 32  # of which the efficient kernel pads the log-sum-exp to a multiple


# What hides later keys: nothing, or a diagonal from the upper left or to the lower right corner.
_NOTHING, _UPPER_LEFT, _LOWER_RIGHT = range(3)


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: int, scale: float | None) -> Tensor:
    scores = (q.float() @ k.float().transpose(-2, -1)) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if bias is not None:
        scores = scores + bias.float()
    if not causal:
        return scores
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool)
    visible = visible.tril(k.shape[-2] - q.shape[-2] if causal == _LOWER_RIGHT else 0)
    return scores.masked_fill(~visible, -math.inf)


def _shared(t: Tensor, q: Tensor) -> Tensor:
    """Keys or values, one head for each of the queries'."""
    return t.repeat_interleave(q.shape[1] // t.shape[1], 1)


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
    causal = _LOWER_RIGHT if is_causal else _NOTHING
    out, lse = _forward(q, _shared(k, q), _shared(v, q), None, causal, scale, of_none=math.inf)
    seed, none = _no_state(q, torch.uint64), torch.empty(0, dtype=torch.uint64, device=q.device)
    return _heads_last(out), lse, None, None, q.shape[-2], k.shape[-2], seed, none, q.new_empty(0)


def flash_backward(
    grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset, *, scale=None
):
    causal = _LOWER_RIGHT if is_causal else _NOTHING
    dq, dk, dv, _ = _backward(grad, q, _shared(k, q), _shared(v, q), None, out, lse, causal, scale)
    return dq, *(g.unflatten(1, (t.shape[1], -1)).sum(2) for g, t in ((dk, k), (dv, v)))


def efficient(q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    """(N, H, L, E)."""
    tensors = (t.transpose(1, 2) for t in (q, k, v))
    causal = _UPPER_LEFT if is_causal else _NOTHING
    nothing = (None,) * 4
    out, *kept = efficient_forward(*tensors, attn_bias, *nothing, dropout_p, causal, compute_log_sumexp, scale=scale)
    return out.transpose(1, 2), *kept[:3]


def efficient_forward(
    q, k, v, bias, cum_q, cum_k, max_q, max_k, dropout_p, causal, compute_log_sumexp=False, *, scale=None,
    seqlen_k=None, window_size=None
):  # fmt: skip
    """(N, L, H, E)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out, lse = _forward(q, k, v, bias, causal, scale, of_none=0.0)
    rows = math.ceil(q.shape[-2] / _ROWS) * _ROWS if compute_log_sumexp else 0
    padded = lse.new_full((*lse.shape[:-1], rows), math.inf)
    if compute_log_sumexp:
        padded[..., : q.shape[-2]] = lse
    state = _no_state(q, torch.int64), _no_state(q, torch.int64)
    return out.transpose(1, 2).contiguous(), padded, *state, q.shape[-2], k.shape[-2]


def efficient_backward(
    grad, q, k, v, attn_bias, out, lse, seed, offset, dropout_p, mask, is_causal=False, *, scale=None
):
    dq, dk, dv, d_scores = _backward(grad, q, k, v, attn_bias, out, lse[..., : q.shape[-2]], int(is_causal), scale)
    d_bias = None
    if attn_bias is not None and mask[3]:
        d_bias = d_scores.sum_to_size(attn_bias.shape).to(attn_bias.dtype)
    return tuple(g if needed else None for g, needed in zip((dq, dk, dv, d_bias), mask))


def efficient_backward_of_rows(
    grad, q, k, v, bias, out, cum_q, cum_k, max_q, max_k, lse, dropout_p, seed, offset, causal, bias_requires_grad, *,
    scale=None, num_splits_key=None, window_size=None, shared_storage_dqdkdv=False
):  # fmt: skip
    """(N, L, H, E)."""
    given = [t.transpose(1, 2) for t in (grad, q, k, v)]
    *grads, d_scores = _backward(*given, bias, out.transpose(1, 2), lse[..., : q.shape[1]], causal, scale)
    grads = [g.transpose(1, 2).contiguous() for g in grads]
    if not bias_requires_grad:
        return *grads, None
    padded = bias.new_empty((*bias.shape[:-1], math.ceil(bias.shape[-1] / 16) * 16))
    return *grads, padded[..., : bias.shape[-1]].copy_(d_scores)


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
    square = not is_causal or q.shape[-2] == k.shape[-2]  # flash has its diagonal elsewhere
    if fits and square and q.dtype in _HALF and attn_mask is None and q.shape[-1] == v.shape[-1]:
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


def register() -> None:
    """Put these in place of the kernels that a build without CUDA does not have."""
    for name, kernel in {
        "_scaled_dot_product_flash_attention": flash,
        "_scaled_dot_product_flash_attention_backward": flash_backward,
        "_scaled_dot_product_efficient_attention": efficient,
        "_scaled_dot_product_efficient_attention_backward": efficient_backward,
        "_efficient_attention_forward": efficient_forward,
        "_efficient_attention_backward": efficient_backward_of_rows,
    }.items():
        _library.impl(name, kernel, "CPU")
    for key in ("AutogradCUDA", "CUDA"):
        _library.impl("scaled_dot_product_attention", choose, key)
