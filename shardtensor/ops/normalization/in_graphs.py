"""Normalization of channels in graphs, by elementwise operators and sums of which a compiler makes loops of its own.

Everything has the shard's own shape. A view by channels in between would have inductor choose an order of memory for
it, and copy what the convolutions around want channels-last. What is one number per channel is :func:`materialized`
before the loops that read it, and nothing that backward needs is a view of another such thing: torch's compiler may
have the one overwritten while the other is in use.

As in ``plans.py`` numbers are kept for each channel of all samples that have statistics of their own. Without weight
and bias a set counts as one channel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...communication.tracing import materialized


def moments_in_graph(x: Tensor, samples: int, sets: int) -> Tensor:
    """Mean and variance ``(2, sets)`` of the shard's sets, by two sums.

    Of :func:`torch.var_mean` inductor makes a loop for CPUs that takes several times as long.
    """

    def average(t: Tensor) -> Tensor:
        others = _others(x, samples)
        return (t.mean(others) if others else t).reshape(sets, -1).mean(1)

    mean = average(x)
    (center,) = materialized([_along(x, samples, mean)])
    return torch.stack((mean, average((x - center).square())))


def normalized_in_graph(
    x: Tensor, samples: int, moments: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The normalized shard ``(N, C, ...)`` in the dtype of the moments, and what its gradient needs besides.

    Args:
        samples: how many have statistics of their own: one, or all.
        moments: mean and variance of each channel, and how many elements they are of where only the batches know that.
    """
    mean, var, *counts = moments.unbind()
    rstd = (var + eps).rsqrt()
    of_channels = [mean, rstd if weight is None else rstd * weight, *(() if bias is None else (bias,))]
    mean, scale, *shift, rstd = materialized([*(_along(x, samples, t) for t in of_channels), rstd])
    y = (x - mean) * scale
    return y + shift[0] if shift else y, (mean, scale, rstd, *counts)


def sums_in_graph(x: Tensor, samples: int, grad: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """The sums of ``grad * xhat`` and of ``grad`` over each channel, ``(2, channels)``."""
    others = _others(x, samples)
    found = [t.sum(others) if others else t for t in ((x - mean) * grad, grad)]
    with_x, alone = (t.reshape(len(rstd), -1).sum(1) for t in found)
    return torch.stack((with_x * rstd, alone))


def of_input_in_graph(
    x: Tensor,
    samples: int,
    grad: Tensor,
    mean: Tensor,
    scale: Tensor,
    rstd: Tensor,
    slope: Tensor,
    offset: Tensor,
) -> Tensor:
    """``rstd * w * grad + slope * xhat + offset``.

    Args:
        mean, scale, rstd: what :func:`normalized_in_graph` kept.
        slope, offset: one number for each set.
    """
    each = len(rstd) // len(slope)
    slope, offset = (t.repeat_interleave(each) if each > 1 else t for t in (slope, offset))
    slope, offset = materialized([_along(x, samples, t) for t in (slope * rstd, offset)])
    return (x - mean) * slope + offset + grad * scale


def _along(x: Tensor, samples: int, numbers: Tensor) -> Tensor:
    """Numbers of channels, to be broadcast against the shard."""
    channels = x.shape[1]
    each = samples * channels // len(numbers)
    numbers = numbers.repeat_interleave(each) if each > 1 else numbers
    return numbers.view(samples, channels, *[1] * (x.ndim - 2))


def _others(x: Tensor, samples: int) -> list[int]:
    """The dims that are no part of the number of a channel."""
    return [d for d in range(x.ndim) if d > 1 or (d == 0 and samples == 1)]
