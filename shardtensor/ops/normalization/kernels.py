"""What a rank computes of its own shard: moments, the normalized shard, and gradients by the sums of all ranks.

The kernel of batch norm with given statistics scales every channel in one pass, and its gradient's kernel sums what
the gradients of weight, bias and statistics are made of. Group and instance norm are batch norm of a batch of one,
whose channels are those of all samples; layer and RMS norm, which have a weight for each normalized element, are one
whose channels are what shares a mean, and weighing is another operator. That is for contiguous shards, and others are
copied, but for those with their channels last on CPUs, for graphs, and for devices with kernels of their own. Each rank
decides that for itself, but for the last: what is sent is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..._compat import constant_like, has_kernels_of_sync_batch_norm, is_traced, kernel
from ...communication.redistribute import all_gather, all_gather_each
from ...communication.tracing import materialized
from ..common.alignment import wide_dtype, widened
from .geometry import Geometry
from .statistics import Merge, Moments

_batch_norm_backward = kernel(torch.ops.aten.native_batch_norm_backward.default)

# Sums of a shard, the gradients of weight and bias for each channel, and the input's gradient by the sums of all ranks.
Gradients = tuple[Sequence[Tensor], Tensor, Tensor, Callable[..., Tensor]]

# Elements of a shard up to which the number of operators is what takes time.
_FEW = 1 << 11


class Kernels:
    """Those for contiguous shards, of all devices. See :class:`Geometry` for channels and their numbers.

    Attributes:
        contiguous: whether shards have to be, and gradients like them.
        takes_half: whether half precision is computed as it is, in float32 inside.
    """

    contiguous: ClassVar[bool] = True
    takes_half: ClassVar[bool] = False

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self.geometry, self.eps, self.shape = geometry, geometry.eps, geometry.shape
        self.dtype = wide_dtype(geometry.spec.tensor_meta.dtype)
        self._set_of = torch.arange(geometry.sets, device=device).repeat_interleave(geometry.per_set)

    def of_channels(self, *of_sets: Tensor) -> list[Tensor]:
        """Numbers of sets for each of their channels."""
        index = constant_like(self._set_of, of_sets[0])
        return [t.index_select(0, index) for t in of_sets]

    def moments(self, x: Tensor) -> Moments:
        """Mean and biased variance of the shard's sets, in float32 at least; the mean square if it is not centered."""
        x = (x if x.dtype == self.dtype else x.to(self.dtype)).view(self.geometry.of_sets)
        if not self.geometry.centered:
            return [x.square().mean((0, 2))]
        if not x.is_cpu or is_traced(x):
            var, mean = torch.var_mean(x, (0, 2), correction=0)
            return [mean, var]
        if x.numel() <= _FEW:
            return torch.batch_norm_update_stats(x, None, None, 0.0)
        # By the kernel of layer norm, which takes a tenth of the time of torch.var_mean. With so small an eps the
        # reciprocal standard deviation gives any variance back, and is finite for zero.
        batch, sets, size = x.shape
        _, mean, rstd = torch.native_layer_norm(x, (size,), None, None, torch.finfo(self.dtype).tiny)
        mean, var = mean.view(batch, sets), rstd.pow_(-2).view(batch, sets)
        if batch == 1:
            return [mean[0], var[0]]
        of_means, total = torch.var_mean(mean, 0, correction=0)
        return [total, of_means.add_(var.mean(0))]

    def normalized(
        self, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """``(x - mean) / sqrt(var + eps) * weight + bias``, of the shape of ``x``."""
        if self.geometry.elementwise:  # the mean first, as in torch's own: no digits are lost where it is large
            rows, rstd = x.view(self.shape), (var + self.eps).rsqrt_().unsqueeze(1)
            y = torch.sub(rows, mean.unsqueeze(1)).mul_(rstd) if self.geometry.centered else rows * rstd
            return y.view(x.shape)
        y = torch.native_batch_norm(x.view(self.shape), weight, bias, mean, var, False, 0.0, self.eps)[0]
        return y.view(x.shape)

    def sums(self, x: Tensor, grad: Tensor, mean: Tensor, rstd: Tensor) -> Sequence[Tensor]:
        """The sums of ``grad * xhat`` and of ``grad`` over each channel."""
        return sums_of_channels(x.view(self.shape), grad.view(self.shape), mean, rstd)

    def combined(
        self, x: Tensor, grad: Tensor, scale: Tensor, slope: Tensor, offset: Tensor | None, *moments: Tensor
    ) -> Tensor:
        """``grad * scale + xhat * slope + offset``, of the shape of ``x``.

        Args:
            moments: mean, variance and reciprocal standard deviation.
        """
        mean, var, _ = moments
        dx = torch.native_batch_norm(x.view(self.shape), slope, offset, mean, var, False, 0.0, self.eps)[0]
        return dx.addcmul_(grad.view(self.shape), scale.unsqueeze(-1)).view(x.shape)

    def gradients(
        self,
        x: Tensor,
        grad: Tensor,
        mean: Tensor,
        var: Tensor,
        weight: Tensor | None,
        count: Any,
        together: bool,
        exact: bool,
    ) -> Gradients:
        """What the gradients are made of.

        Args:
            count: of the elements that share a mean.
            together: whether the gradients of weight and bias are summed over the ranks with what is returned, so that
                the sums of channels tell those of sets.
            exact: whether operands are converted to float32 where the kernel would round.
        """
        rstd = (var + self.eps).rsqrt_()
        scale, several = rstd if weight is None else rstd * weight, self.geometry.per_set != 1
        sums = self.sums(x, grad, mean, rstd) if x.numel() else rstd.new_zeros(2, len(rstd)).unbind()
        sent = (
            [self._of_sets(sums, scale)] if several and not together else sums if self.geometry.centered else sums[:1]
        )

        def of_input(*totals: Tensor) -> Tensor:
            if several:
                weighted = (self._of_sets(totals, scale) if together else totals[0]).div_(-count)
                slope, *offset = self.of_channels(*weighted.unbind())
            else:
                share = scale / -count
                slope, *offset = [t * share for t in totals]
            return self.combined(x, grad, scale, slope, offset[0] if offset else None, mean, var, rstd)

        of_weight, of_bias = sums
        return sent, of_weight, of_bias, of_input

    def _of_sets(self, sums: Sequence[Tensor], scale: Tensor) -> Tensor:
        """The sums over sets of what is summed over channels, weighted, ``(2, sets)``."""
        weighted = torch.stack(list(sums)).mul_(scale)
        return weighted.view(2, self.geometry.sets, self.geometry.per_set).sum(-1)


def sums_of_channels(x: Tensor, grad: Tensor, mean: Tensor, rstd: Tensor) -> Sequence[Tensor]:
    """The sums of ``grad * xhat`` and of ``grad`` over each channel."""
    # Told to train, the kernels of all devices use the statistics that they are given as saved ones. CUDA's takes from
    # the weight what its results are to be like, and nothing else.
    given = grad, x, rstd, None, None, mean, rstd, True, 0.0, (False, True, True)
    found: Sequence[Tensor] = _batch_norm_backward(*given)[1:]
    return found


# -- channels last -----------------------------------------------------------------------------------------------------

# Shards that have their channels last in memory, as rows of columns, of which several belong to one channel.
#
# The kernels of CPUs that go through such a shard position by position take twice the time where it has few channels,
# and add up all positions one after the other, which costs digits. Here a row is several positions next to each other,
# long enough for vector instructions, and a column is short enough to be added up. To batch norm's kernels a block of
# rows is a batch of vectors.

# Lengths of rows with which elementwise operators are at their fastest.
_WIDTH = range(256, 2049)
# Lengths of columns that are added up, and how many elements a block of columns has at most: a cache holds it.
_LENGTH = range(64, 513)
_BLOCK = 1 << 17
# How far from zero, in standard deviations, the mean of a column may be whose variance is computed like that.
_FAR = 16.0
# Elements of a sample for which a kernel is called, rather than for all samples in another order of memory.
_SAMPLE = 1 << 12


class ChannelsLast(Kernels):
    """Those for shards on CPUs that have their channels last: in rows, and these in blocks, whose columns are added up.

    Args:
        repeats: how many positions are next to each other in a row.
        length: of the columns of a block.
    """

    contiguous = False

    def __init__(self, geometry: Geometry, device: torch.device, repeats: int, length: int) -> None:
        super().__init__(geometry, device)
        self.samples, self.channels = geometry.samples, geometry.spec.own_shape[1]
        self.repeats, self.length, self.width = repeats, length, repeats * self.channels

    @classmethod
    def of(cls, geometry: Geometry, device: torch.device) -> ChannelsLast | None:
        """None where such shards are better put in another order: they are not on a CPU, have many small samples, or
        their positions do not make columns of equal length; or channels have nothing in common.
        """
        if device.type != "cpu" or geometry.elementwise:
            return None
        n, channels, *spatial = geometry.spec.own_shape
        samples, positions = geometry.samples, math.prod(spatial) * (n if 0 in geometry.dims else 1)
        if 0 in (samples, positions, channels) or (samples > 1 and positions * channels < _SAMPLE):
            return None
        wide = range(-(-_WIDTH[0] // channels), _WIDTH[-1] // channels + 1)
        repeats = next((k for k in wide if positions % k == 0), 1)
        rows, longest = positions // repeats, max(_LENGTH[0], min(_LENGTH[-1], _BLOCK // (repeats * channels)))
        length = next(k for k in range(min(rows, longest), 0, -1) if rows % k == 0)
        return cls(geometry, device, repeats, length) if length >= min(rows, _LENGTH[0]) else None

    def moments(self, x: Tensor) -> Moments:
        x = x if x.dtype == self.dtype else x.to(self.dtype)
        if x.numel() > _FEW and not is_traced(x):
            found = [torch.batch_norm_update_stats(block, None, None, 0.0) for block in self._blocks(x)]
            mean, var = found[0] if len(found) == 1 else map(torch.stack, zip(*found, strict=True))
            # Rounding errors of a mean far from zero would be too much of the deviations from it.
            if bool(torch.addcmul(var, mean, mean, value=-(_FAR**-2)).min() >= 0):
                return self._of_columns(mean, var)
        return super().moments(x.contiguous())

    def _of_columns(self, mean: Tensor, var: Tensor) -> Moments:
        """The sets' moments from those of all blocks' columns."""
        per_sample = self.geometry.sets // self.samples
        shape = self.samples, -1, per_sample, self.channels // per_sample
        mean, var = mean.view(shape), var.view(shape)
        total = mean.mean((1, 3), keepdim=True)
        offset = mean - total
        return [total.view(-1), torch.addcmul(var, offset, offset).mean((1, 3)).view(-1)]

    def sums(self, x: Tensor, grad: Tensor, mean: Tensor, rstd: Tensor) -> Sequence[Tensor]:
        each = x.numel() // (self.length * self.width * self.samples)
        means, rstds = (self._repeated(t).view(self.samples, -1).unbind() for t in (mean, rstd))
        blocks = enumerate(zip(self._blocks(x), self._blocks(grad), strict=True))
        found = [sums_of_channels(t, g, means[i // each], rstds[i // each]) for i, (t, g) in blocks]
        stacked = torch.stack([t for kind in zip(*found, strict=True) for t in kind])
        per_sample = len(mean) // self.samples
        sums = stacked.view(2, self.samples, -1, per_sample, self.channels // per_sample).sum((2, 4))
        return sums.view(2, -1).unbind()

    def normalized(
        self, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        # What batch norm's kernel does on CPUs, in half the time.
        rstd = (var + self.eps).rsqrt_()
        return self._in_shape(self._scaled(x, mean, rstd if weight is None else rstd * weight, bias), x)

    def combined(
        self, x: Tensor, grad: Tensor, scale: Tensor, slope: Tensor, offset: Tensor | None, *moments: Tensor
    ) -> Tensor:
        mean, _, rstd = moments
        dx = self._scaled(x, mean, slope * rstd, offset)
        return self._in_shape(dx.addcmul_(self._rows(grad), self._repeated(scale)), x)

    def _scaled(self, x: Tensor, mean: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
        """The rows of ``(x - mean) * scale + shift``."""
        shift = mean * -scale if shift is None else torch.addcmul(shift, mean, scale, value=-1)
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
        per_number = self.samples * self.channels // len(numbers)
        numbers = numbers if per_number == 1 else numbers.repeat_interleave(per_number)
        if self.samples == 1:
            return numbers.repeat(self.repeats)
        return numbers.view(self.samples, 1, self.channels).repeat(1, 1, self.repeats)

    @staticmethod
    def _in_shape(rows: Tensor, x: Tensor) -> Tensor:
        return rows.view(x.shape[0], *x.shape[2:], x.shape[1]).movedim(-1, 1)


# -- graphs ------------------------------------------------------------------------------------------------------------

# Elementwise operators and sums, of which a compiler makes loops of its own.
#
# Everything has the shard's own shape. A view by channels in between would have inductor choose an order of memory for
# it, and copy what the convolutions around want channels-last. What is one number per channel is :func:`materialized`
# before the loops that read it, and nothing that backward needs is a view of another such thing: torch's compiler may
# have the one overwritten while the other is in use.


class InGraph(Kernels):
    """Those for shards of graphs, whose weights belong to channels."""

    contiguous = False

    def moments(self, x: Tensor) -> Moments:
        x = x if x.dtype == self.dtype else x.to(self.dtype)
        if not x.is_cpu:
            geometry = self.geometry
            var, mean = torch.var_mean(x.reshape(geometry.view), geometry.dims, correction=0)
            return [mean.reshape(-1), var.reshape(-1)]
        # By two sums, as of torch.var_mean inductor makes a loop for CPUs that takes several times as long.
        mean = self._average(x)
        (center,) = materialized([self._along(x, mean)])
        return [mean, self._average((x - center).square())]

    def normalized(
        self, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        rstd = (var + self.eps).rsqrt()
        numbers = [mean, rstd if weight is None else rstd * weight, *(() if bias is None else (bias,))]
        mean, scale, *shift = materialized([self._along(x, t) for t in numbers])
        y = (x - mean) * scale
        return y + shift[0] if shift else y

    def sums(self, x: Tensor, grad: Tensor, mean: Tensor, rstd: Tensor) -> Sequence[Tensor]:
        # What the forward pass keeps is read as it is, but not what has to be repeated.
        entire, mean = len(mean) == self.geometry.samples * x.shape[1], self._along(x, mean)
        mean = mean if entire else materialized([mean])[0]
        with_x, alone = (self._reduced(torch.sum, t, len(rstd)) for t in ((x - mean) * grad, grad))
        return [with_x * rstd, alone]

    def combined(
        self, x: Tensor, grad: Tensor, scale: Tensor, slope: Tensor, offset: Tensor | None, *moments: Tensor
    ) -> Tensor:
        assert offset is not None
        mean, _, rstd = moments
        numbers = scale, slope * rstd, offset, mean
        scale, slope, offset, mean = materialized([self._along(x, t) for t in numbers])
        return (x - mean) * slope + offset + grad * scale

    def _average(self, x: Tensor) -> Tensor:
        return self._reduced(torch.mean, x, self.geometry.sets)

    def _reduced(self, how: Callable[..., Tensor], x: Tensor, numbers: int) -> Tensor:
        """Sums or averages of so many sets of channels."""
        over = [d for d in range(x.ndim) if d > 1 or (d == 0 and self.geometry.samples == 1)]
        return how((how(x, over) if over else x).reshape(numbers, -1), 1)

    def _along(self, x: Tensor, numbers: Tensor) -> Tensor:
        """Numbers of channels, to be broadcast against the shard."""
        samples, channels = self.geometry.samples, x.shape[1]
        each = samples * channels // len(numbers)
        numbers = numbers.repeat_interleave(each) if each > 1 else numbers
        return numbers.view(samples, channels, *[1] * (x.ndim - 2))


# -- devices -----------------------------------------------------------------------------------------------------------

# Elements of a shard up to which launching a kernel takes as long as going through it.
_LAUNCH = 1 << 20
# Stands for a weight of zero, which nothing can be divided by.
_NEXT_TO_ZERO = 1.7e-20


class Synchronized(Kernels):
    """CUDA's kernels of batch norm over processes.

    [Note: kernels of devices] torch's ``nn.SyncBatchNorm`` calls these kernels: one for the statistics of a shard, one
    that merges them over ranks, and one for the gradient. With them the host launches half as many. The ranks then send
    means and reciprocal standard deviations, so all of them take this way, or none does; the spec decides.
    ``F.group_norm`` on a device copies a tensor that has its channels last, and so does this package. The kernels know
    weights of whole sets only. So a group's gradient is weighted before, if it is small, or its sums are divided by the
    weights.
    """

    takes_half = True

    def __init__(self, geometry: Geometry, device: torch.device, merge: Merge) -> None:
        self.geometry, self._merge, self._share = geometry, merge, 1 / geometry.count
        counts = self._counts = (merge.weights.view(-1) * geometry.count).round_()
        self._integers = counts.to(torch.int32)
        # Of means and reciprocal standard deviations, what is taken relative to a mean.
        self._shifted = counts.new_tensor((1.0, 0.0)).view(2, 1, 1, 1).repeat(1, 1, 1, geometry.per_set)
        self._eps, self._zeros = counts.new_tensor(geometry.eps), counts.new_zeros(geometry.sets)

    @classmethod
    def of(cls, geometry: Geometry, device: torch.device, merges: Sequence[Merge]) -> Synchronized | None:
        """None where they do not serve."""
        if not has_kernels_of_sync_batch_norm(device.type) or len(merges) != 1 or not merges[0].gathers:
            return None
        # Their indices are in 32 bits; and a part's variance has to be positive with eps for its root.
        return cls(geometry, device, merges[0]) if 0 < geometry.count < 1 << 31 and geometry.eps > 0 else None

    def statistics(self, x: Tensor, running_var: Tensor | None = None, momentum: float = 0.0) -> list[Tensor]:
        """Mean and reciprocal standard deviation for each channel, of all ranks. The running variance is updated."""
        if not self.geometry.sets:  # nor has any rank that it would be merged with
            return [self._zeros] * 2
        given = x.view(self.geometry.of_sets) if x.numel() else None
        if not self.geometry.centered:
            return self._of_squares(given)
        own = [self._zeros] * 2 if given is None else torch.batch_norm_stats(given, self.geometry.eps)
        parts = self._merge.of_those_that_have_any(all_gather_each(own, self._merge.group), 1).unsqueeze(-1)
        # Relative to one of the means, so that what they have in common is not rounded; and repeated.
        first = parts[0, 0]
        means, rstds = torch.addcmul(parts, first, self._shifted, value=-1).flatten(2).unbind()
        numbers = None, running_var, momentum, self.geometry.eps, self._counts
        mean, rstd = torch.batch_norm_gather_stats_with_counts(means, means, rstds, *numbers)
        mean.view(self.geometry.sets, -1).add_(first)
        return [mean, rstd]

    def _of_squares(self, x: Tensor | None) -> list[Tensor]:
        dtype = self._zeros.dtype
        norm = self._zeros if x is None else torch.linalg.vector_norm(x, dim=(0, 2), dtype=dtype)
        norm = torch.linalg.vector_norm(all_gather(norm, self._merge.group), dim=0)
        return [self._zeros, torch.addcmul(self._eps, norm, norm, value=self._share).rsqrt_()]

    def normalized(
        self, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        given = x.view(self.geometry.shape)
        return torch.batch_norm_elemt(given, weight, bias, mean, rstd, self.geometry.eps).view(x.shape)

    def gradients(
        self,
        x: Tensor,
        grad: Tensor,
        mean: Tensor,
        rstd: Tensor,
        weight: Tensor | None,
        count: Any,
        together: bool,
        exact: bool,
    ) -> Gradients:
        geometry, k, reduced = self.geometry, self.geometry.per_set, partial(self._reduced, exact)
        if not x.numel():
            dy, with_x = mean.new_zeros(2, geometry.sets).unbind()
            of_weight, of_bias = mean.new_zeros(2, len(mean)).unbind()
            return self._sent(dy, with_x), of_weight, dy if k == 1 else of_bias, partial(torch.empty_like, x)
        shape, of_sets = x.shape, geometry.of_sets
        x, grad = x.view(geometry.shape), grad.view(geometry.shape)
        if k == 1:
            dy, with_x, of_weight = reduced(grad, x, mean, rstd)
            of_bias, of_input = dy, partial(self._of_input, grad, x, mean, rstd, weight)
        elif weight is None or (x.numel() <= _LAUNCH and x.dtype == mean.dtype):
            of_bias, _, of_weight = reduced(grad, x, mean, rstd, of_sums=False)
            weighted = (grad if weight is None else grad * weight.unsqueeze(1)).view(of_sets)
            by_sets = weighted, x.view(of_sets), mean[::k], rstd[::k]
            dy, with_x, _ = reduced(*by_sets)
            of_input = partial(self._of_input, *by_sets, None)
        else:
            of_bias, with_x, of_weight = reduced(grad, x, mean, rstd)
            dy, with_x = self._of_sets((of_bias, with_x), weight).unbind()
            of_input = partial(self._by_weights, grad, x, mean, rstd, weight + _NEXT_TO_ZERO)
        return self._sent(dy, with_x), of_weight, of_bias, lambda *totals: of_input(*totals).view(shape)

    def _by_weights(
        self, grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, *totals: Tensor
    ) -> Tensor:
        """By a kernel that multiplies all by the weights, of which none is zero."""
        of_channels = ((t.unsqueeze(1) / weight.view(-1, self.geometry.per_set)).view(-1) for t in totals)
        return self._of_input(grad, x, mean, rstd, weight, *of_channels)

    def _sent(self, total: Tensor, with_x: Tensor) -> list[Tensor]:
        return [total, with_x] if self.geometry.centered else [with_x]

    def _reduced(
        self, exact: bool, grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, of_sums: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The sums over each channel of the gradient, of the gradient by the centered input, which may be left out, and
        of this scaled, which is a weight's gradient.
        """
        if exact:  # CUDA's kernel rounds to half precision what a thread adds to its neighbour's sum.
            grad, x = widened(grad, x)
        # Of the weight, here ``rstd``, the kernel takes what its gradient is to be like.
        options = of_sums, True, not of_sums
        total, with_x, scaled, alone = torch.batch_norm_backward_reduce(grad, x, mean, rstd, rstd, *options)
        return (total if of_sums else alone), with_x, scaled

    def _of_input(
        self, grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, *totals: Tensor
    ) -> Tensor:
        total, with_x = totals if self.geometry.centered else (self._zeros, *totals)
        return torch.batch_norm_backward_elemt(grad, x, mean, rstd, weight, total, with_x, self._integers)
