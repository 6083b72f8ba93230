"""Batch and instance normalization, which keep running statistics; how it is done stands in
``statistics.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..._compat import alias
from ...errors import refuse
from ...redistribute import all_reduce, redistribute_local
from ...registry import register
from ...spec import ShardTensorSpec
from ...strides import CHANNELS_LAST
from ...tensor import ShardTensor, promote
from ..common.alignment import torch_judges
from .statistics import (
    NormalizationPlan,
    channel_kernel,
    locally,
    moments,
    normalize,
    own_part,
    parameters_of,
    plan_over,
    result_dtype,
    settled_input,
    statistics,
)

_aten = torch.ops.aten


def _plain(buffer: Any) -> Any:
    if not isinstance(buffer, DTensor):
        return buffer
    if not all(p.is_replicate() for p in buffer.placements):
        raise refuse("batch_norm", buffer, "a running statistic is not whole on every rank", "redistribute it first")
    return buffer._local_tensor


def _channel_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, plan: NormalizationPlan, use_input: bool, momentum: float
) -> Any:
    """Batch norm (``plan.dims`` hold dim 0) or instance norm, with statistics of the input or running ones."""
    running = [_plain(mean), _plain(var)]
    if not use_input:
        plan = replace(plan, merges=(), fixed=True)
    # torch's kernel would update the running statistics with what this rank alone has.
    updates = use_input and any(s is not None for s in running) and bool(plan.spec.sharded_dims())
    if not updates and not plan.needs_kernel:
        w, b = parameters_of(plan, weight, bias)
        rm, rv = (own_part(s, plan) for s in running)
        function = torch.batch_norm if 0 in plan.dims else torch.instance_norm


        def run(local: Tensor) -> Tensor:
            y = function(_PlainStrides.apply(local), w, b, rm, rv, use_input, momentum, plan.eps, False)
            return _PlainStrides.apply(y)

        return locally(x, plan, run)
    dtype = result_dtype(channel_kernel, x, weight, bias, *running)
    with torch.no_grad():
        if use_input:
            stats: Any = statistics(x._local_tensor, plan)
            _update(running, stats, plan, momentum)
        else:
            stats = tuple(own_part(s, plan).reshape(plan.affine) for s in running)  # type: ignore[union-attr]
    return normalize(x, weight, bias, plan, dtype, stats)


class _PlainStrides(torch.autograd.Function):
    """Identity with the usual strides along dims of length 1, for a tensor and for its gradient.

    A shard may have dims of length 1 where the whole tensor has none, and torch's CPU kernel of the gradient goes wrong
    where one operand's strides there say channels-last and the other's do not.
    """

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:  # type: ignore[override]
        return _with_usual_strides(t)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return _PlainStrides.apply(grad)


def _with_usual_strides(t: Tensor) -> Tensor:
    """An alias of ``t`` with the strides that a new tensor of its memory format has."""
    for memory_format in (torch.contiguous_format, *([CHANNELS_LAST[t.ndim]] if t.ndim in CHANNELS_LAST else [])):
        if t.is_contiguous(memory_format=memory_format):
            usual = torch.empty(t.shape, device="meta").to(memory_format=memory_format)
            return t.as_strided(t.shape, usual.stride())
    return alias(t)


def _update(running: list[Any], stats: tuple[Any, Tensor], plan: NormalizationPlan, momentum: float) -> None:
    """Move running mean and variance ``(C,)`` towards the batch's, whose variance is made unbiased, as torch does."""
    if all(s is None for s in running):
        return
    mean, var = stats
    spec = plan.spec
    sharded = spec.sharded_dims()
    unbiased = var * plan.count / (plan.count - 1) if plan.count != 1 else torch.full_like(var, float("nan"))
    new = torch.stack([mean, unbiased]).reshape(2, *mean.shape[:2])  # (2, N or 1, C)
    if 0 not in plan.dims:  # instance norm keeps the mean over the batch
        new = new.sum(1, keepdim=True) / spec.shape[0]
        if 0 in sharded:
            new = all_reduce(new, spec.mesh.get_group(sharded[0]))
    new = new[:, 0]
    if 1 in sharded:
        m = sharded[1]
        sizes = spec.sizes[m] or ()
        placements = [Shard(1) if i == m else Replicate() for i in range(spec.mesh.ndim)]
        cut = ShardTensorSpec.make(spec.mesh, placements, (2, spec.shape[1]), new.dtype, shard_sizes={m: sizes})
        new = redistribute_local(new, cut, cut.replicated())
    for buffer, value in zip(running, new, strict=True):
        if buffer is not None:
            buffer.copy_(momentum * value + (1 - momentum) * buffer)


def _judge(check: Callable[..., Any], x: Any, mean: Any, var: Any, weight: Any, bias: Any, *options: Any) -> None:
    """Torch's own errors; what stands below ``torch.nn.functional`` takes its arguments in another order."""
    if check in (F.batch_norm, F.instance_norm):
        torch_judges(check, x, mean, var, weight, bias, *options)
    else:
        torch_judges(check, x, weight, bias, mean, var, *options, False)


def _batch_norm(
    check: Callable[..., Any],
    x: Any,
    mean: Any,
    var: Any,
    weight: Any,
    bias: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    if not isinstance(x, ShardTensor):
        return NotImplemented
    _judge(check, x, mean, var, weight, bias, training, momentum, eps)
    if x.ndim < 2:
        raise refuse("batch_norm", x, "an input of one dim has no channels", "give it the shape (N, C)")
    x = settled_input(x)
    over = [d for d in range(x.ndim) if d != 1]
    plan = plan_over("batch_norm", x._spec, over, 1, 2, eps)
    return _channel_norm(x, weight, bias, mean, var, plan, training, momentum)


@register(F.batch_norm)
def _functional_batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    return _batch_norm(F.batch_norm, input, running_mean, running_var, weight, bias, training, momentum, eps)


@register(torch.batch_norm)
def _torch_batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    return _batch_norm(torch.batch_norm, input, running_mean, running_var, weight, bias, training, momentum, eps)


def _instance_norm(
    check: Callable[..., Any],
    x: Any,
    mean: Any,
    var: Any,
    weight: Any,
    bias: Any,
    use_input_stats: bool,
    momentum: float,
    eps: float,
) -> Any:
    if not isinstance(x, ShardTensor):
        return NotImplemented
    _judge(check, x, mean, var, weight, bias, use_input_stats, momentum, eps)
    x = settled_input(x)
    plan = plan_over("instance_norm", x._spec, range(2, x.ndim), 1, 2, eps)
    return _channel_norm(x, weight, bias, mean, var, plan, use_input_stats, momentum)


@register(F.instance_norm)
def _functional_instance_norm(
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    return _instance_norm(
        F.instance_norm, input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
    )


@register(torch.instance_norm)
def _torch_instance_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    return _instance_norm(
        torch.instance_norm, input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
    )


# -- called by the operators' names: they return the statistics, too ---------------------------------------------------


def _native_batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    if not isinstance(input, ShardTensor):
        return NotImplemented
    y = _batch_norm(torch.batch_norm, input, running_mean, running_var, weight, bias, training, momentum, eps)
    if not training:
        # As empty as torch returns them.
        one = torch.ones(1, dtype=y.dtype)
        saved = torch.native_batch_norm(one[None].expand(2, 1), None, None, one, one, False, momentum, eps)[1:]
        return y, *(promote(t.to(input.device), input.device_mesh) for t in saved)
    x = settled_input(input)
    plan = plan_over("batch_norm", x._spec, [d for d in range(x.ndim) if d != 1], 1, 2, eps)
    return (y, *moments(x, plan, x.shape[1:2], {1: (0, 1)}))


def _native_batch_norm_legit(input: Any, weight: Any, bias: Any, *rest: Any) -> Any:
    """With running statistics, or (three arguments less two) without."""
    statistics = rest if len(rest) == 5 else (None, None, *rest)
    return _native_batch_norm(input, weight, bias, *statistics)


def _native_batch_norm_legit_no_training(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
) -> Any:
    return _native_batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps)


@register(_aten._batch_norm_with_update)
def _batch_norm_with_update(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, momentum: float, eps: float
) -> Any:
    if not isinstance(input, ShardTensor):
        return NotImplemented
    results = _native_batch_norm(input, weight, bias, running_mean, running_var, True, momentum, eps)
    reserved = torch.empty(0, dtype=torch.uint8, device=input.device)  # what a GPU's kernel keeps for its backward
    return *results, promote(reserved, input.device_mesh)


for _home in (torch, _aten):
    register(_home.native_batch_norm)(_native_batch_norm)
    register(_home._native_batch_norm_legit)(_native_batch_norm_legit)
    register(_home._native_batch_norm_legit_no_training)(_native_batch_norm_legit_no_training)
