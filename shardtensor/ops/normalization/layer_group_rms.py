"""Group, layer, RMS and local response normalization, whatever is sharded; how it is done stands in
``statistics.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import refuse
from ...parameters import Kernel, run_kernel
from ...registry import register
from ...tensor import ShardTensor, redistribute_to
from ..common.alignment import torch_judges, wide_dtype
from .statistics import (
    group_kernel,
    layer_kernel,
    like,
    locally,
    moments,
    normalize,
    parameters_of,
    plan_groups,
    plan_last,
    result_dtype,
    rms_kernel,
    settled_input,
    unsummed_parameters_of,
    whole_groups,
)

_aten = torch.ops.aten


def _group_norm(check: Callable[..., Any], x: Any, num_groups: int, weight: Any, bias: Any, eps: float) -> Any:
    if not isinstance(x, ShardTensor):
        return NotImplemented
    torch_judges(check, x, num_groups, weight, bias, eps)
    given = settled_input(x)
    x = redistribute_to(given, whole_groups("group_norm", given._spec, num_groups))
    plan = plan_groups("group_norm", x._spec, num_groups, eps)
    if plan.needs_kernel:
        y = normalize(x, weight, bias, plan, result_dtype(group_kernel, x, weight, bias))
    else:
        w, b = parameters_of(plan, weight, bias)
        y = locally(x, plan, lambda local: torch.group_norm(local, plan.view[1], w, b, eps))
    return redistribute_to(y, y._spec.replace(placements=given._spec.placements, sizes=given._spec.sizes))


@register(F.group_norm)
def _functional_group_norm(input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    return _group_norm(F.group_norm, input, num_groups, weight, bias, eps)


@register(torch.group_norm)
def _torch_group_norm(
    input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True
) -> Any:
    return _group_norm(torch.group_norm, input, num_groups, weight, bias, eps)


@register(F.layer_norm, torch.layer_norm)
def _layer_norm(
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    if not isinstance(input, ShardTensor):
        return NotImplemented
    shape = tuple(normalized_shape)
    torch_judges(torch.layer_norm, input, shape, weight, bias, eps)
    x = settled_input(input)
    plan = plan_last("layer_norm", x._spec, len(shape), eps)
    if plan.needs_kernel:
        return normalize(x, weight, bias, plan, result_dtype(layer_kernel, x, weight, bias))
    (w, b), total = unsummed_parameters_of(plan, weight, bias)
    if any(total.needed):
        out = like(plan.spec, x._local_tensor.dtype)
        return run_kernel(_layer_norm_kernel(shape, eps), x, w, b, total, out)
    return locally(x, plan, lambda local: torch.layer_norm(local, shape, w, b, eps))


@lru_cache(maxsize=1024)
def _layer_norm_kernel(shape: tuple[int, ...], eps: float) -> Kernel:
    def backward(
        mask: Sequence[bool], grad: Tensor, x: Tensor, weight: Any, bias: Any, mean: Tensor, rstd: Tensor
    ) -> Any:
        given = (x, weight, bias)
        if grad.dtype != x.dtype:  # autocast's
            x, weight, bias = (None if t is None else t.to(grad.dtype) for t in given)
        grads = _aten.native_layer_norm_backward(grad, x, shape, mean, rstd, weight, bias, mask)
        if x is given[0]:
            return grads
        return [g if g is None else g.to(t.dtype) for g, t in zip(grads, given, strict=True)]

    return Kernel(lambda x, weight, bias: torch.native_layer_norm(x, shape, weight, bias, eps), backward)


@register(F.rms_norm, torch.rms_norm)
def _rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    if not isinstance(input, ShardTensor):
        return NotImplemented
    shape = tuple(normalized_shape)
    torch_judges(torch.rms_norm, input, shape, weight, eps)
    x = settled_input(input)
    dtype = x._local_tensor.dtype
    if dtype.is_complex:
        raise refuse("rms_norm", x, "complex numbers are not supported", "normalize real and imaginary parts")
    smallest = torch.finfo(wide_dtype(dtype)).eps if eps is None else eps
    plan = plan_last("rms_norm", x._spec, len(shape), smallest, centered=False)
    if plan.needs_kernel:
        return normalize(x, weight, None, plan, result_dtype(rms_kernel, x, weight))
    (w,) = parameters_of(plan, weight)
    return locally(x, plan, lambda local: torch.rms_norm(local, shape, w, eps))


def _local_response_norm(input: Any, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Any:
    """Torch's own composition: the mean over a window of channels is an average pooling."""
    if not isinstance(input, ShardTensor):
        return NotImplemented
    if input.ndim < 3:
        raise ValueError(f"Expected 3D or higher dimensionality input (got {input.ndim} dimensions)")
    if input.numel() == 0:
        return input
    squares, around = input * input, (size // 2, (size - 1) // 2)
    if input.ndim == 3:
        mean = F.avg_pool2d(F.pad(squares.unsqueeze(1), (0, 0, *around)), (size, 1), stride=1).squeeze(1)
    else:
        images = squares.flatten(3).unsqueeze(1)
        mean = F.avg_pool3d(F.pad(images, (0, 0, 0, 0, *around)), (size, 1, 1), stride=1).squeeze(1)
        mean = mean.unflatten(3, input.shape[3:])
    return input / (mean * alpha + k).pow(beta)


register(F.local_response_norm)(_local_response_norm)


# -- called by the operators' names: they return mean and reciprocal standard deviation, too ---------------------------


@register(torch.native_layer_norm, _aten.native_layer_norm)
def _native_layer_norm(input: Any, normalized_shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    y = _layer_norm(input, normalized_shape, weight, bias, eps)
    if y is NotImplemented:
        return NotImplemented
    x, k = settled_input(input), len(tuple(normalized_shape))
    kept = range(x.ndim - k)
    shape = [n if d in kept else 1 for d, n in enumerate(x.shape)]
    return (y, *moments(x, plan_last("layer_norm", x._spec, k, eps), shape, {d: (d, 1) for d in kept}))


@register(torch.native_group_norm, _aten.native_group_norm)
def _native_group_norm(
    input: Any, weight: Any, bias: Any, N: int, C: int, HxW: int, group: int, eps: float
) -> Any:
    if not isinstance(input, ShardTensor):
        return NotImplemented
    if tuple(input.shape[:2]) != (N, C) or N * C * HxW != input.numel():
        raise RuntimeError(f"native_group_norm: sizes {N}, {C}, {HxW} do not fit an input of {tuple(input.shape)}")
    y = _group_norm(torch.group_norm, input, group, weight, bias, eps)
    # Unlike those of the other normalizations, torch differentiates these two.
    x = settled_input(input)
    x = redistribute_to(x, whole_groups("group_norm", x._spec, group)).unflatten(1, (group, C // group))
    over = list(range(2, x.ndim))
    mean = x.mean(over, keepdim=True)
    rstd = ((x - mean).square().mean(over) + eps).rsqrt()
    return y, mean.squeeze(over), rstd
