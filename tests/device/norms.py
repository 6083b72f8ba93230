"""CUDA's kernels of batch norm over several processes, which the CPU does not have.

They are put in place for the CPU: the emulated device runs them as it does any other, each as one kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("aten", "IMPL")


def _wide(t: Tensor) -> Tensor:
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def _others(t: Tensor) -> list[int]:
    return [d for d in range(t.ndim) if d != 1]


def _over_channels(numbers: Tensor, x: Tensor) -> Tensor:
    return numbers.view(1, -1, *[1] * (x.ndim - 2))


def stats(input, eps):
    var, mean = torch.var_mean(_wide(input), _others(input), correction=0)
    return mean, (var + eps).rsqrt()


def elemt(input, weight, bias, mean, invstd, eps):
    y = (_wide(input) - _over_channels(mean, input)) * _over_channels(invstd, input)
    y = y if weight is None else y * _over_channels(weight, input)
    return (y if bias is None else y + _over_channels(bias, input)).to(input.dtype)


def gather_stats_with_counts(input, mean, invstd, running_mean, running_var, momentum, eps, counts):
    """Rank by rank, as the kernel does."""
    total, sum_of_squares, average = 0.0, torch.zeros_like(mean[0]), torch.zeros_like(mean[0])
    for m, s, n in zip(mean, invstd, counts.to(mean.dtype)):
        factor = 1 / (total + n)
        sum_of_squares = sum_of_squares + (s**-2 - eps) * n + (average - m) ** 2 * total * n * factor
        average = total * factor * average + n * factor * m
        total = total + n
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(momentum * average)
    if running_var is not None:
        running_var.mul_(1 - momentum).add_(momentum * (sum_of_squares / (total - 1)))
    return average, (sum_of_squares / total + eps).rsqrt()


def _summed(t, dims, dtype):
    """A thread rounds what it gets from its neighbour to the dtype of the input."""
    own, neighbours = (part.sum(dims) for part in t.tensor_split(2, -1))
    return own + neighbours.to(dtype).to(t.dtype)


def backward_reduce(grad, input, mean, invstd, weight, input_g, weight_g, bias_g):
    dims, wide = _others(input), _wide(grad)
    total = _summed(wide, dims, grad.dtype)
    with_x = _summed(wide * (_wide(input) - _over_channels(mean, input)), dims, grad.dtype)
    of_weight = (with_x * invstd).to(weight.dtype) if weight_g else None
    of_bias = total.to(weight.dtype) if bias_g else None
    return (total, with_x) + (of_weight, of_bias) if input_g else (None, None, of_weight, of_bias)


def backward_elemt(grad, input, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    share = 1 / count.sum().to(sum_dy.dtype)
    rstd, centred = _over_channels(invstd, input), _wide(input) - _over_channels(mean, input)
    slope = centred * rstd.square() * _over_channels(sum_dy_xmu * share, input)
    dx = (_wide(grad) - _over_channels(sum_dy * share, input) - slope) * rstd
    return (dx if weight is None else dx * _over_channels(weight, input)).to(grad.dtype)


def register() -> None:
    for name, kernel in {
        "batch_norm_stats": stats,
        "batch_norm_elemt": elemt,
        "batch_norm_gather_stats_with_counts": gather_stats_with_counts,
        "batch_norm_backward_reduce": backward_reduce,
        "batch_norm_backward_elemt": backward_elemt,
    }.items():
        _library.impl(name, kernel, "CPU")
