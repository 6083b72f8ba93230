"""Floating-point operations: torch's own table, and what it lacks, attention on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ..._compat import OpOverload

_aten = torch.ops.aten


def flops_of(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Those of an operator's call on local tensors; 0 where none are known, and on the meta device.

    On that plans find out the shapes of results.
    """
    own = _ATTENTION.get(func.overloadpacket)
    if own is not None:
        return own(*args, **kwargs)
    counting = flop_registry.get(func.overloadpacket)
    if counting is None or args[0].device.type == "meta":
        return 0
    return int(counting(*args, **kwargs, out_val=result))


def _attention(q: Tensor, k: Tensor, v: Tensor, *others: Any, is_causal: bool | None = None, **_: Any) -> int:
    """Two products, of queries with keys and of weights with values; causal ones are half as large."""
    causal = others[1] if is_causal is None and len(others) > 1 else is_causal
    both = 2 * q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])
    return both // 2 if causal else both


def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *others: Any, **_: Any
) -> int:
    """Five products of that size: the scores are computed once more."""
    return _attention(q, k, v, *others[:2]) * 5 // 2


_ATTENTION: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    torch.ops.shardtensor.attend: lambda q, k, v, mask, scale, square: _attention(q, k, v, is_causal=square),
}
