"""Normalization of channels in graphs, by elementwise operators and sums of which a compiler makes loops of its own.

Everything has the shard's own shape. A view by channels in between would have inductor choose an order of memory for
it, and copy what the convolutions around want channels-last. What is one number per channel is :func:`settled` before
the loops that read it.

As in ``plans.py`` numbers are kept for each channel of all samples that have statistics of their own, here as rows
``(rows, channels)``. Without weight and bias a set counts as one channel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...communication.tracing import settled


def moments_in_graph(x: Tensor, samples: int, sets: int) -> Tensor:
    """Mean and variance ``(2, sets)`` of the shard's sets, by two sums.

    Of :func:`torch.var_mean` inductor makes a loop for CPUs that takes several times as long.
    """

    def average(t: Tensor) -> Tensor:
        others = _others(x, samples)
        return (t.mean(others) if others else t).reshape(sets, -1).mean(1)

    mean = average(x)
    (center,) = _along(x, samples, settled(mean.repeat_interleave(samples * x.shape[1] // sets).unsqueeze(0)))
    return torch.stack((mean, average((x - center).square())))


def normalized_in_graph(
    x: Tensor, samples: int, moments: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The normalized shard ``(N, C, ...)`` in the dtype of the moments, and what its gradient needs besides.

    Args:
        samples: how many have statistics of their own: one, or all.
        moments: mean and variance of each channel, and how many elements they are of where only the batches know that.
    """
    mean, var, *counts = moments.unbind()
    rstd = (var + eps).rsqrt()
    rows = [mean, rstd, rstd if weight is None else rstd * weight, *counts]
    kept = settled(torch.stack(rows if bias is None else [*rows, bias]))
    mean, _, scale = _along(x, samples, kept[:3])
    y = (x - mean) * scale
    return y if bias is None else y + _along(x, samples, kept[-1:])[0], kept


def sums_in_graph(x: Tensor, samples: int, grad: Tensor, kept: Tensor) -> Tensor:
    """The sums of ``grad * xhat`` and of ``grad`` over each channel, ``(2, channels)``."""
    (mean,) = _along(x, samples, kept[:1])
    others = _others(x, samples)
    found = [t.sum(others) if others else t for t in ((x - mean) * grad, grad)]
    with_x, alone = (t.reshape(kept.shape[1], -1).sum(1) for t in found)
    return torch.stack((with_x * kept[1], alone))


def of_input_in_graph(x: Tensor, samples: int, grad: Tensor, kept: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
    """``rstd * w * grad + slope * xhat + offset``.

    Args:
        slope, offset: one number for each set.
    """
    each = kept.shape[1] // len(slope)
    slope, offset = torch.stack((slope, offset)).repeat_interleave(each, 1).unbind()
    slope, offset = _along(x, samples, settled(torch.stack((slope * kept[1], offset))))
    mean, _, scale = _along(x, samples, kept[:3])
    return (x - mean) * slope + offset + grad * scale


def _along(x: Tensor, samples: int, rows: Tensor) -> tuple[Tensor, ...]:
    """Each row, to be broadcast against the shard."""
    channels = x.shape[1]
    each = samples * channels // rows.shape[1]
    rows = rows.repeat_interleave(each, 1) if each > 1 else rows
    return rows.view(-1, samples, channels, *[1] * (x.ndim - 2)).unbind()


def _others(x: Tensor, samples: int) -> list[int]:
    """The dims that are no part of the number of a channel."""
    return [d for d in range(x.ndim) if d > 1 or (d == 0 and samples == 1)]
