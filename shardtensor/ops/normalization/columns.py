"""Shards that have their channels last in memory, as rows of columns, of which several belong to one channel.

The kernels of CPUs that go through such a shard position by position take twice the time where it has few channels, and
add up all positions one after the other, which costs digits. Here a row is several positions next to each other, long
enough for vector instructions, and a column is short enough to be added up. To batch norm's kernels a block of rows is
a batch of vectors.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..._compat import kernel
from .geometry import Geometry

_batch_norm_backward = kernel(torch.ops.aten.native_batch_norm_backward.default)

# Lengths of rows with which elementwise operators are at their fastest.
_WIDTH = range(256, 2049)
# Lengths of columns that are added up, and how many elements a block of columns has at most: a cache holds it.
_LENGTH = range(64, 513)
_BLOCK = 1 << 17
# How far from zero, in standard deviations, the mean of a column may be whose variance is computed like that.
_FAR = 16.0
# Elements of a sample for which a kernel is called, rather than for all samples in another order of memory.
_SAMPLE = 1 << 12


class Columns:
    """How a shard is divided into rows, and these into blocks, whose columns are added up.

    In what follows, numbers belong to channels, or to sets of as many consecutive ones: of all samples that have
    statistics of their own, one after the other.

    Args:
        samples: how many have statistics of their own.
        channels: of the shard.
        repeats: how many positions are next to each other in a row.
        length: of the columns of a block.
    """

    def __init__(self, samples: int, channels: int, repeats: int, length: int) -> None:
        self.samples, self.channels, self.repeats, self.length = samples, channels, repeats, length
        self.width = repeats * channels

    def moments(self, x: Tensor, sets: int) -> Tensor | None:
        """Mean and variance ``(2, sets)`` of so many sets; None where a column's mean is far from zero.

        Its rounding errors would then be too much of the deviations from it.
        """
        found = [torch.batch_norm_update_stats(block, None, None, 0.0) for block in self._blocks(x)]
        mean, var = found[0] if len(found) == 1 else map(torch.stack, zip(*found, strict=True))
        if not bool(torch.addcmul(var, mean, mean, value=-(_FAR**-2)).min() >= 0):
            return None
        if mean.numel() != sets:
            shape = self.samples, -1, sets // self.samples, self.samples * self.channels // sets
            of_columns, var = mean.view(shape), var.view(shape)
            mean = of_columns.mean((1, 3), keepdim=True)
            offset = of_columns - mean
            var = torch.addcmul(var, offset, offset).mean((1, 3))
        return torch.stack((mean.view(-1), var.view(-1)))

    def sums(self, x: Tensor, grad: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
        """Numbers for those of ``mean`` and ``rstd``: the sums of ``grad * xhat`` and of ``grad``, stacked."""
        given, each = [self._repeated(t) for t in (mean, rstd)], x.numel() // (self.length * self.width * self.samples)
        means, rstds = (t.view(self.samples, -1).unbind() for t in given)
        blocks = enumerate(zip(self._blocks(x), self._blocks(grad), strict=True))
        found = [sums_of_channels(t, g, means[i // each], rstds[i // each]) for i, (t, g) in blocks]
        sums = found[0] if len(found) == 1 else torch.stack(found, 1)
        per_sample = len(mean) // self.samples
        return sums.view(2, self.samples, -1, per_sample, self.channels // per_sample).sum((2, 4)).view(2, -1)

    def normalized(
        self, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        """``(x - mean) / sqrt(var + eps) * weight + bias``."""
        if self.samples == 1 and (x.dtype != mean.dtype or x.device.type != "cpu"):
            numbers = [None if t is None else self._repeated(t) for t in (weight, bias, mean, var)]
            settings: Any = (*numbers, False, 0.0, eps)
            return _in_shape(torch.native_batch_norm(self._rows(x)[0], *settings)[0], x)
        # What that kernel does on CPUs, in half the time.
        rstd = (var + eps).rsqrt_()
        scale = rstd if weight is None else rstd * weight
        shift = mean * -scale if bias is None else torch.addcmul(bias, mean, scale, value=-1)
        return _in_shape(self._scaled(x, scale, shift), x)

    def combined(self, x: Tensor, scale: Tensor, shift: Tensor, other: Tensor, scale_of_other: Tensor) -> Tensor:
        """``x * scale + shift + other * scale_of_other``."""
        y = self._scaled(x, scale, shift)
        return _in_shape(y.addcmul_(self._rows(other), self._repeated(scale_of_other)), x)

    def _scaled(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        rows, scale, shift = self._rows(x), *(self._repeated(t) for t in (scale, shift))
        return torch.addcmul(shift, rows if rows.dtype == scale.dtype else rows.to(scale.dtype), scale)

    def _rows(self, x: Tensor) -> Tensor:
        """``(samples, rows, columns)``; a copy of a tensor that has its channels elsewhere."""
        return x.movedim(1, -1).reshape(self.samples, -1, self.width)

    def _blocks(self, x: Tensor) -> Tensor:
        """``(blocks, rows, columns)``."""
        return x.movedim(1, -1).reshape(-1, self.length, self.width)

    def _repeated(self, numbers: Tensor) -> Tensor:
        """Numbers for each column, ``(columns,)``, or of several samples ``(samples, 1, columns)``."""
        per_set = self.samples * self.channels // len(numbers)
        numbers = numbers if per_set == 1 else numbers.repeat_interleave(per_set)
        if self.samples == 1:
            return numbers.repeat(self.repeats)
        return numbers.view(self.samples, 1, self.channels).repeat(1, 1, self.repeats)


def _in_shape(rows: Tensor, x: Tensor) -> Tensor:
    return rows.view(x.shape[0], *x.shape[2:], x.shape[1]).movedim(-1, 1)


def sums_of_channels(x: Tensor, grad: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """The sums of ``grad * xhat`` and of ``grad`` over each channel, ``(2, channels)``."""
    # Told to train, the kernels of all devices use the statistics that they are given as saved ones. CUDA's takes from
    # the weight what its results are to be like, and nothing else.
    given = grad, x, rstd, None, None, mean, rstd, True, 0.0, (False, True, True)
    return torch.stack(_batch_norm_backward(*given)[1:])


def channels_are_last(x: Tensor) -> bool:
    """Whether a tensor ``(N, C, ...)`` has its channels last in memory, and the other dims in order."""
    return x.movedim(1, -1).is_contiguous()


def columns_of(geometry: Geometry, on_cpu: bool) -> Columns | None:
    """For a normalization over entire channels, or groups of them; None where shards that have them last are better
    put in another order: they have many small samples, or their positions do not make columns of equal length.
    """
    n, channels, *spatial = geometry.spec.own_shape
    samples, positions = (1, n * math.prod(spatial)) if 0 in geometry.dims else (n, math.prod(spatial))
    if 0 in (samples, positions, channels) or (samples > 1 and positions * channels < _SAMPLE):
        return None
    if not on_cpu:  # the kernels of other devices add up in parallel
        return Columns(samples, channels, 1, positions)
    wide = range(-(-_WIDTH[0] // channels), _WIDTH[-1] // channels + 1)
    repeats = next((k for k in wide if positions % k == 0), 1)
    rows, longest = positions // repeats, max(_LENGTH[0], min(_LENGTH[-1], _BLOCK // (repeats * channels)))
    length = next(k for k in range(min(rows, longest), 0, -1) if rows % k == 0)
    return Columns(samples, channels, repeats, length) if length >= min(rows, _LENGTH[0]) else None
