"""The plans of normalizations over shards: those of one rank's own kernel, and those whose ranks communicate.

From which statistics they compute stands in ``statistics.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..._compat import (
    AutogradFunction,
    TensorMeta,
    batch_norm_legit,
    has_kernels_of_sync_batch_norm,
    kernel,
    untraced,
)
from ...communication.redistribute import all_gather, all_reduce, start_sums
from ...communication.tracing import goes_into_graph, is_traced
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Operand, Plan
from ...operators.weight_gradients import GradientSum, contributing
from ..common.alignment import wide_dtype, widened
from .in_graphs import normalized_in_graph, of_input_in_graph, sums_in_graph
from .statistics import Columns, Geometry, Statistics, centered, channels_are_last, columns_of, sums_of_channels

Kept = tuple[Tensor, tuple[Tensor, ...]]  # a local result, and what its gradient needs besides
# Sums of each channel, what weighs them in the sums of sets, and the input's gradient by the sums of all ranks' sets.
Prepared = tuple[Tensor, Tensor | None, Callable[[Tensor], Tensor]]


class Norm(Plan):
    """Normalization of an input, then scaling by a weight and adding a bias.

    Args:
        dtype: of the result.
        parameters: weight and bias; specs for those that are sharded.
    """

    twice = True
    depends = {0: (0, 1), 1: (0,), 2: ()}

    def __init__(self, call: Arguments, geometry: Geometry, dtype: torch.dtype, *parameters: Operand | None) -> None:
        self.geometry, self.dtype, self.outputs = geometry, dtype, geometry.output_spec(dtype)
        self.casts, self.empty = call.autocast() is not None, 0 in geometry.view
        # Which of the parameters this rank uses a part of. Sharded ones arrive as that part.
        self.narrows = [isinstance(p, TensorMeta) and geometry.own_shape(p.shape) != p.shape for p in parameters]
        self.metas = [p.tensor_meta if isinstance(p, ShardTensorSpec) else p for p in parameters]

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *buffers: Tensor | None) -> Kept:
        if self.casts:
            with torch.autocast(x.device.type, enabled=False):
                return self._forward(x, weight, bias, *buffers)
        return self._forward(x, weight, bias, *buffers)

    def _forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *buffers: Tensor | None) -> Kept:
        raise NotImplementedError

    def _own(self, parameter: Tensor | None, i: int) -> Tensor | None:
        """The part of weight (0) or bias (1) that belongs to the shard, contiguous.

        Some of torch's kernels read it as if it were, and leave it to those who call them.
        """
        mine = self.geometry.own_part(parameter) if parameter is not None and self.narrows[i] else parameter
        return None if mine is None else mine.contiguous()

    def _of_parameter(self, contribution: Tensor, i: int) -> Tensor:
        """The gradient of weight (0) or bias (1), from what belongs to the shard; zeros for what other ranks hold."""
        meta, geometry = self.metas[i], self.geometry
        assert meta is not None
        dtype = wide_dtype(meta.dtype) if self.sums else meta.dtype
        mine = contribution if contribution.dtype == dtype else contribution.to(dtype)
        if not self.narrows[i]:
            return mine if mine.ndim == 1 else mine.reshape(geometry.own_shape(meta.shape))
        full = mine.new_zeros(meta.shape)
        geometry.own_part(full).copy_(mine.reshape(geometry.own_shape(meta.shape)))  # type: ignore[union-attr]
        return full


# -- local norm --------------------------------------------------------------------------------------------------------

# The plans of normalizations: those of which each rank computes its part alone, by torch's kernels.

_layer_norm_backward = kernel(torch.ops.aten.native_layer_norm_backward.default)
_group_norm_backward = kernel(torch.ops.aten.native_group_norm_backward.default)
_batch_norm_backward = kernel(torch.ops.aten.native_batch_norm_backward.default)

# Elements of a shard from which on its gradient takes longer than to start a collective.
WORTH_OVERLAPPING = 1 << 16


class LocalNorm(Norm):
    """Normalization of sets of elements that each rank holds entirely, by torch's kernels."""

    # Whether a kernel computes the gradients of the parameters without those of the input in less time.
    divides: ClassVar[bool] = False

    def _kernel(self, x: Tensor, w: Tensor | None, b: Tensor | None, *buffers: Tensor | None) -> Kept:
        """The result, and what its gradient needs besides."""
        raise NotImplementedError

    def _gradient(self, mask: Sequence[bool], grad: Tensor, x: Tensor, w: Tensor | None, *saved: Any) -> Sequence[Any]:
        """The gradients of input, weight and bias; None for those that the mask leaves out."""
        raise NotImplementedError

    def _forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *buffers: Tensor | None) -> Kept:
        if self.empty:
            y = x.to(self.dtype, copy=True)
            for p in (weight, bias):  # of which it is a function, for autograd
                y = y if p is None else y + p.sum().to(self.dtype)
            return y, ()
        x, w, b = self._cast(x), self._cast(self._own(weight, 0), False), self._cast(self._own(bias, 1), False)
        return self._kernel(x, w, b, *map(self.geometry.own_part, buffers))

    def _cast(self, t: Any, is_input: bool = True) -> Any:
        """As autocast does: parameters may be more precise than the input."""
        if t is None or t.dtype == self.dtype or not (is_input or (self.casts and self.dtype == torch.float32)):
            return t
        return t.to(self.dtype)

    def backward(
        self, needed: Sequence[bool], grads: Sequence[Tensor | None], x: Tensor, weight: Tensor | None, *saved: Any
    ) -> list[Tensor | None]:
        result: list[Tensor | None] = [None] * len(needed)
        grad = grads[0]
        if grad is None:
            return result
        given = [self._cast(grad), self._cast(x), self._cast(self._own(weight, 0), False), *saved]
        given = widened(*given) if self.sums else given
        # One call of the kernel takes less time than two, unless the sum travels during the second.
        together = needed[0] and (self.total is None or not self.divides or x.numel() < WORTH_OVERLAPPING)
        result[:3] = self._gradients((together, *needed[1:3]), x.dtype, given)
        finish = None if self.total is None else self.total.start(result, overwrite=True)
        if needed[0] and not together:
            result[0] = self._gradients((True, False, False), x.dtype, given)[0]
        return result if finish is None else [result[0], *finish()[1:]]

    def _gradients(self, mask: Sequence[bool], dtype: torch.dtype, given: Sequence[Any]) -> list[Tensor | None]:
        if self.empty:
            dx, shape = given[0], self.geometry.own_shape
            found = [dx, *(None if m is None else dx.new_zeros(shape(m.shape)) for m in self.metas[:2])]
            found = [g if need else None for g, need in zip(found, mask, strict=True)]
        else:
            found = list(self._gradient(mask, *given))
        dx = found[0]
        result: list[Tensor | None] = [dx if dx is None or dx.dtype == dtype else dx.to(dtype)]
        return result + [
            self._of_parameter(g, i) if g is not None and mask[i + 1] else None for i, g in enumerate(found[1:])
        ]


class LocalLayerNorm(LocalNorm):
    """Layer norm."""

    saves = (0, 1, 2)
    divides = True

    def _kernel(self, x: Tensor, w: Tensor | None, b: Tensor | None, *buffers: Tensor | None) -> Kept:
        y, *kept = torch.native_layer_norm(x, self._normalized_shape, w, b, self.geometry.eps)
        return y, tuple(kept)

    def _gradient(self, mask: Sequence[bool], grad: Tensor, x: Tensor, w: Tensor | None, *saved: Any) -> Sequence[Any]:
        bias, mean, rstd = saved
        b = self._cast(self._own(bias, 1), False)
        found: Sequence[Any] = _layer_norm_backward(grad, x, self._normalized_shape, mean, rstd, w, b, mask)
        return found

    @property
    def _normalized_shape(self) -> tuple[int, ...]:
        return self.geometry.view[self.geometry.first :]


class LocalGroupNorm(LocalNorm):
    """Group norm; instance norm is the one with as many groups as channels."""

    saves = (0, 1)

    def __init__(self, call: Arguments, geometry: Geometry, dtype: torch.dtype, *parameters: Operand | None) -> None:
        super().__init__(call, geometry, dtype, *parameters)
        n, channels, *inner = geometry.spec.own_shape
        self.sizes = n, channels, math.prod(inner), geometry.view[1]
        self.on_cpu = call.device.type == "cpu"

    def _kernel(self, x: Tensor, w: Tensor | None, b: Tensor | None, *buffers: Tensor | None) -> Kept:
        y, *kept = torch.native_group_norm(_channels(x, self._last(x)), w, b, *self.sizes, self.geometry.eps)
        return _with_shape(y, x), tuple(kept)

    def _gradient(self, mask: Sequence[bool], grad: Tensor, x: Tensor, w: Tensor | None, *saved: Any) -> Sequence[Any]:
        given = (_channels(t, self._last(x)) for t in (grad, x))
        dx, *rest = _group_norm_backward(*given, *saved, w, *self.sizes, mask)
        return dx if dx is None else _with_shape(dx, x), *rest

    def _last(self, x: Tensor) -> bool:
        # The kernels of other devices take row-major memory only.
        return self.on_cpu and not x.is_contiguous()


class LocalBatchNorm(LocalNorm):
    """Batch norm with statistics of the input, which is not sharded along normalized dims, or with running ones."""

    saves = (0, 1, 3, 4)

    def __init__(
        self,
        call: Arguments,
        geometry: Geometry,
        dtype: torch.dtype,
        parameters: Sequence[Operand | None],
        use_input: bool,
        momentum: float,
    ) -> None:
        super().__init__(call, geometry, dtype, *parameters)
        self.use_input, self.momentum = use_input, momentum
        if not use_input:
            self.depends = {**self.depends, 0: (1,)}

    def _kernel(self, x: Tensor, w: Tensor | None, b: Tensor | None, *buffers: Tensor | None) -> Kept:
        settings: Any = (self.use_input, self.momentum, self.geometry.eps)
        views = _channels(x, not x.is_contiguous())
        if self.use_input and not torch.is_grad_enabled() and any(t is not None for t in buffers):
            # The one that says that it writes to them.
            y, *kept = batch_norm_legit(views, w, b, *buffers, *settings)  # type: ignore[call-overload]
        else:  # grad is enabled where it is run once more for second derivatives, which is not to count once more
            fixed: Any = (None, None) if self.use_input else buffers
            y, *kept = torch.native_batch_norm(views, w, b, *fixed, *settings)
        return _with_shape(y, x), tuple(kept)

    def _gradient(self, mask: Sequence[bool], grad: Tensor, x: Tensor, w: Tensor | None, *saved: Any) -> Sequence[Any]:
        mean, var, *kept = saved
        running = [None if t is None else t.contiguous() for t in map(self.geometry.own_part, (mean, var))]
        if w is None and mask[2]:  # CUDA's kernel makes the gradient of the bias like the weight
            w = x.new_ones(x.shape[1])
        given = (_channels(t, not x.is_contiguous()) for t in (grad, x))
        dx, *rest = _batch_norm_backward(*given, w, *running, *kept, self.use_input, self.geometry.eps, mask)
        return dx if dx is None else _with_shape(dx, x), *rest


# Kernels tell memory formats by the strides of dims of length 1, too, which say nothing of where elements are; and they
# go wrong where an input's differ from its gradient's. So they get views in which there is no doubt.


def _channels(x: Tensor, last: bool) -> Tensor:
    """``(N, C, size)``, row-major; or ``(N, C, size, 1)`` with the channels last in memory."""
    n, c, *inner = x.shape
    if not last:
        return x.contiguous().view(n, c, math.prod(inner))
    return x.movedim(1, -1).reshape(n, math.prod(inner), 1, c).contiguous().permute(0, 3, 1, 2)


def _with_shape(y: Tensor, x: Tensor) -> Tensor:
    """``y``, the kernel's result of such a view of ``x``, in the shape and the memory format of ``x``."""
    if y.ndim == 3:
        y = y.view(x.shape)
        return y if x.is_contiguous() else torch.empty_like(x).copy_(y)
    return y.permute(0, 2, 3, 1).reshape(x.shape[0], *x.shape[2:], x.shape[1]).movedim(-1, 1)


# -- sharded norm ------------------------------------------------------------------------------------------------------

# The plans of normalizations whose ranks have to communicate: their common part, and that of layer and RMS norm.
#
# Layer and RMS norm have a weight for each normalized element, so torch's kernels cannot be given the statistics of
# all ranks: elementwise operators on the centered shard, most of them in place. The input is centered before it is
# scaled, as ``x * scale + shift`` would lose a large mean's digits.


class ShardedNorm(Norm):
    """Normalization with statistics of all ranks."""

    saves = (0, 1)

    def __init__(self, call: Arguments, geometry: Geometry, dtype: torch.dtype, *parameters: Operand | None) -> None:
        super().__init__(call, geometry, dtype, *parameters)
        self.statistics = Statistics(geometry, call.device)

    def _forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *buffers: Tensor | None) -> Kept:
        if torch.is_grad_enabled():
            return self._differentiable(x, weight, bias), ()
        moments = self.statistics.of(x)
        self._note(moments, *buffers)
        return self._normalized(x, moments, weight, bias)

    def _normalized(self, x: Tensor, moments: Tensor, weight: Tensor | None, bias: Tensor | None) -> Kept:
        """The local result and what backward needs."""
        raise NotImplementedError

    def _note(self, moments: Tensor, *buffers: Tensor | None) -> None:
        """Update running statistics, for a subclass that has them."""

    def _affine(self, parameter: Tensor | None, i: int) -> Tensor | None:
        """The part of weight (0) or bias (1) that belongs to the shard, to broadcast against the view."""
        mine = self._own(parameter, i)
        return None if mine is None else mine.reshape(self.geometry.affine)

    # -- second derivatives ----------------------------------------------------------------------------------------

    def _differentiable(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The same in operators that autograd differentiates."""
        w, b = self._affine(weight, 0), self._affine(bias, 1)
        y = x.reshape(self.geometry.view).to(self.statistics.dtype)
        y = y - self._average(y) if self.geometry.centered else y
        y = y * (self._average(y * y) + self.geometry.eps).rsqrt()
        y = y if w is None else y * w
        return (y if b is None else y + b).to(self.dtype).reshape(x.shape)

    def _average(self, t: Tensor) -> Tensor:
        total = _SumOverRanks.apply(t.sum(self.geometry.dims, keepdim=True), self.statistics)
        count, replicas = max(self.geometry.count, 1), self.statistics.replicas
        return total / (count if replicas is None else replicas.sum(t.new_tensor(count)))  # type: ignore[no-any-return]


class RowNorm(ShardedNorm):
    """Layer norm (or RMS norm, if not centered) over dims of which some are sharded."""

    def _normalized(self, x: Tensor, moments: Tensor, weight: Tensor | None, bias: Tensor | None) -> Kept:
        w, b = self._affine(weight, 0), self._affine(bias, 1)
        moments = moments.view(len(moments), *self.statistics.shape)
        y = centered(x.reshape(self.geometry.view), moments[0] if self.geometry.centered else None)
        y.mul_((moments[-1] + self.geometry.eps).rsqrt_())
        y = y if w is None else y.mul_(w)
        y = y if b is None else y.add_(b)
        return (y if y.dtype == self.dtype else y.to(self.dtype)).reshape(x.shape), (moments,)

    def backward(
        self, needed: Sequence[bool], grads: Sequence[Tensor | None], x: Tensor, weight: Tensor | None, moments: Tensor
    ) -> list[Tensor | None]:
        result: list[Tensor | None] = [None] * len(needed)
        if grads[0] is None:
            return result
        geometry = self.geometry
        grad, x_view, w = grads[0].reshape(geometry.view), x.reshape(geometry.view), self._affine(weight, 0)
        grad = grad if grad.dtype == moments.dtype else grad.to(moments.dtype)
        mean, rstd = moments[0] if geometry.centered else None, (moments[-1] + geometry.eps).rsqrt_()
        with_x = centered(x_view, mean).mul_(grad).mul_(rstd)
        if needed[1]:
            result[1] = self._of_parameter(with_x.sum_to_size(geometry.affine), 0)
        if self.metas[1:] and needed[2]:
            summed = grad.sum_to_size(geometry.affine)
            result[2] = self._of_parameter(summed.clone() if summed.shape == grad.shape else summed, 1)
        finish = None if self.total is None else self.total.start(result)
        local = None
        if needed[0]:
            terms = (with_x,) if mean is None else (with_x, grad)
            sums = [(t if w is None else t * w).sum(geometry.dims, keepdim=True) for t in terms]
            local = self._of_input(grad, x_view, mean, rstd, w, sums)
            local = (local if local.dtype == x.dtype else local.to(x.dtype)).reshape(x.shape)
        result = result if finish is None else finish()
        result[0] = local
        return result

    def _of_input(
        self, grad: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, w: Tensor | None, sums: list[Tensor]
    ) -> Tensor:
        """``rstd * (w * grad - mean(w * grad) - xhat * mean(w * grad * xhat))``.

        Args:
            sums: of ``w * grad * xhat``, and if centered of ``w * grad``, over the normalized dims of this shard.
        """
        means = torch.stack(sums).div_(max(self.geometry.count, 1))
        for merge in self.statistics.merges:
            means = all_reduce(means, merge.group) if means.numel() else means
        means.mul_(rstd)
        local = centered(x, mean).mul_(means[0].mul_(rstd).neg_())
        if mean is not None:
            local.sub_(means[1])
        return local.addcmul_(grad if w is None else grad * w, rstd)


class _SumOverRanks(AutogradFunction):
    """The sum of what the ranks contribute, of which every rank makes use: so its adjoint is such a sum, too."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, statistics: Statistics) -> Tensor:
        ctx.statistics = statistics
        for merge in statistics.merges:
            value = all_reduce(value, merge.group) if value.numel() else value
        if statistics.replicas is not None:
            return statistics.replicas.sum(value)
        return value if statistics.merges else value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _SumOverRanks.apply(grad, ctx.statistics), None


# -- channel norm ------------------------------------------------------------------------------------------------------

# The plan of group, batch and instance norm over shards: statistics of all ranks, then torch's kernels.
#
# The kernel of batch norm with given statistics scales every channel in one pass, and its gradient's kernel sums what
# the gradients of weight, bias and statistics are made of. Group and instance norm are batch norm of a batch of one,
# whose channels are those of all samples. That is for contiguous shards; for those with their channels last see
# ``statistics.py``, and others are copied. Each rank decides that for itself: what is sent is the same.
#
# [Note: kernels of devices] CUDA has kernels for batch norm over processes, which torch's ``nn.SyncBatchNorm`` calls:
# statistics of a shard, merged over ranks, and the gradient, each in one. With them the host launches half as many.
# What ranks send are means and reciprocal standard deviations then, so all of them take this way, or none does: what it
# depends on follows from the spec. ``F.group_norm`` on a device copies a tensor that has its channels last; so do we.


class ChannelNorm(ShardedNorm):
    """Normalization over groups of entire channels.

    In what follows a *set* is what shares a mean: a group of a sample, or a channel of the whole batch. Without weight
    and bias a set counts as one channel. Numbers are kept per channel, for all samples that have sets of their own.
    """

    def __init__(self, call: Arguments, geometry: Geometry, dtype: torch.dtype, *parameters: Operand | None) -> None:
        super().__init__(call, geometry, dtype, *parameters)
        self.columns = self.statistics.columns = columns_of(geometry, self.statistics.on_cpu)
        view, of_sets = geometry.view, self.statistics.shape
        plain = all(p is None for p in parameters)
        inner = geometry.dims if plain else tuple(d for d in geometry.dims if geometry.affine[d] == 1)
        of_channels = tuple(1 if d in inner else n for d, n in enumerate(view))
        self.samples = self.statistics.samples = 1 if 0 in geometry.dims else view[0]
        self.per_sample = torch.Size(geometry.affine).numel()
        self.sets, channels = torch.Size(of_sets).numel(), torch.Size(of_channels).numel()
        self.per_set = channels // max(self.sets, 1)
        batch = view[0] if 0 in geometry.dims else 1
        size = torch.Size(view).numel() // max(batch * channels, 1)
        # Shapes of a contiguous shard as the kernels get it, by channels and by sets.
        self.channels, self.of_sets = (batch, channels, size), (batch, self.sets, self.per_set * size)
        # Parameters that the kernels take as they are.
        alike = (p is None or p.dtype == self.statistics.dtype for p in self.metas)
        self.as_it_is = [
            same and self.samples == 1 and not part for same, part in zip(alike, self.narrows, strict=True)
        ]
        # The gradients of the parameters then travel with the sums that the input's needs.
        merged = [m for m, _ in geometry.merges]
        self.defers = not merged
        # The mesh dims that shard other dims, over which these gradients are summed apart.
        self.rest = tuple(m for m in contributing(geometry.spec)[0] if m not in merged)
        self.counts = self._counts_of_ranks(call.device)

    def _counts_of_ranks(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """How many elements of a set the ranks have that have any: as CUDA's kernels take them, for merging and for the
        gradient. None where these do not serve, see [Note: kernels of devices].
        """
        merges, geometry = self.statistics.merges, self.geometry
        if not has_kernels_of_sync_batch_norm(device.type) or len(merges) != 1 or not merges[0].gathers:
            return None
        # Their indices are in 32 bits; and a part's variance has to be positive with eps for its root.
        if geometry.count >= 1 << 31 or geometry.eps <= 0:
            return None
        with torch.inference_mode(False), untraced():
            counts = (merges[0].weights.view(-1) * geometry.count).round_()
            return counts, counts.to(torch.int32)

    # -- forward ---------------------------------------------------------------------------------------------------

    def _forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *buffers: Tensor | None) -> Kept:
        if not torch.is_grad_enabled() and self._fuses(x):
            return self._fused(x, weight, bias, *buffers)
        if torch.is_grad_enabled() or x.is_contiguous() or goes_into_graph(x) or self._columns(x) is not None:
            return super()._forward(x, weight, bias, *buffers)
        y, kept = super()._forward(x.contiguous(), weight, bias, *buffers)
        return torch.empty_like(x, dtype=y.dtype).copy_(y), kept

    def _columns(self, x: Tensor) -> Columns | None:
        """How to go through a shard that is not contiguous; None if it is to be copied."""
        return self.columns if self.columns is not None and channels_are_last(x) else None

    def _normalized(self, x: Tensor, moments: Tensor, weight: Tensor | None, bias: Tensor | None) -> Kept:
        if self.per_set != 1:
            moments = moments.repeat_interleave(self.per_set, 1)
        mean, var, *_ = moments.unbind()
        w, b, eps = self._of_channels(weight, 0), self._of_channels(bias, 1), self.geometry.eps
        if self.empty:
            return torch.empty_like(x, dtype=self.dtype), (moments,)
        if goes_into_graph(x):
            y, kept = normalized_in_graph(x, self.samples, moments, w, b, eps)
            return y.to(self.dtype), kept
        columns = None if x.is_contiguous() else self.columns
        if columns is None:
            x_view = x.view(self.channels)
            x_view = x_view if x.dtype == self.dtype else x_view.to(self.dtype)
            return torch.native_batch_norm(x_view, w, b, mean, var, False, 0.0, eps)[0].view(x.shape), (moments,)
        y = columns.normalized(x if x.dtype == self.dtype else x.to(self.dtype), mean, var, w, b, eps)
        return y if y.dtype == self.dtype else y.to(self.dtype), (moments,)

    def _of_channels(self, parameter: Tensor | None, i: int) -> Tensor | None:
        """The part of weight (0) or bias (1) that belongs to the shard, for the channels of all samples."""
        if parameter is None or self.as_it_is[i]:
            return parameter
        mine = self._own(parameter, i)
        assert mine is not None
        return (mine if self.samples == 1 else mine.repeat(self.samples)).to(self.statistics.dtype)

    def _fuses(self, x: Tensor) -> bool:
        return self.counts is not None and self.statistics.replicas is None and not is_traced(x)

    def _fused(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *buffers: Tensor | None) -> Kept:
        """By the kernels of devices. Kept are mean and reciprocal standard deviation of each channel."""
        counts, (merge,), eps = self.counts, self.statistics.merges, self.geometry.eps
        assert counts is not None
        given = None if self.empty else (x if x.dtype == self.dtype else x.to(self.dtype)).contiguous()
        if given is None:
            own = x.new_zeros((2, self.sets * self.per_set), dtype=self.statistics.dtype)
        else:
            found = torch.batch_norm_stats(given.view(self.of_sets), eps)
            own = torch.stack([t.unsqueeze(1).expand(-1, self.per_set) for t in found]).view(2, -1)
        means, rstds = merge.of_those_that_have_any(all_gather(own, merge.group)).unbind(1)
        # Relative to one of the means, so that what they have in common is not rounded.
        first, (running, momentum) = means[0], self._running(buffers)
        mean, rstd = torch.batch_norm_gather_stats_with_counts(
            first, means - first, rstds, None, running, momentum, eps, counts[0]
        )
        mean.add_(first)
        self._note_merged(mean, rstd, *buffers)
        if given is None:
            return torch.empty_like(x, dtype=self.dtype), (mean, rstd)
        w, b = self._of_channels(weight, 0), self._of_channels(bias, 1)
        y = torch.batch_norm_elemt(given.view(self.channels), w, b, mean, rstd, eps).view(x.shape)
        return (y if x.is_contiguous() else torch.empty_like(x, dtype=y.dtype).copy_(y)), (mean, rstd)

    def _running(self, buffers: Sequence[Tensor | None]) -> tuple[Tensor | None, float]:
        """The running variance, if the merging kernel is to update it, and the momentum."""
        return None, 0.0

    def _note_merged(self, mean: Tensor, rstd: Tensor, *buffers: Tensor | None) -> None:
        """Update the running statistics that the merging kernel has not."""

    # -- backward --------------------------------------------------------------------------------------------------

    def backward(
        self, needed: Sequence[bool], grads: Sequence[Tensor | None], x: Tensor, weight: Tensor | None, *kept: Tensor
    ) -> list[Tensor | None]:
        result: list[Tensor | None] = [None] * len(needed)
        if grads[0] is None:
            return result
        prepare = self._fused_sums if len(kept) == 2 else self._sums
        sums, w, of_input = prepare(grads[0], x, weight, *kept)
        totals, result[1:3] = self._totals(needed, sums, w)
        if self.statistics.replicas is not None and needed[0]:
            totals = self.statistics.replicas.sum(totals)
        finish = None
        if self.total is not None and self.rest:
            finish = GradientSum(self.total.mesh, self.rest, self.total.needed).start(result)
        if needed[0]:
            dx = torch.empty_like(x) if self.empty else of_input(totals)
            dx = (dx if dx.dtype == x.dtype else dx.to(x.dtype)).reshape(x.shape)
            copied = dx.is_contiguous() and not x.is_contiguous()
            result[0] = torch.empty_like(x).copy_(dx) if copied else dx
        return result if finish is None else [result[0], *finish()[1:]]

    def _sums(self, grad: Tensor, x: Tensor, weight: Tensor | None, moments: Tensor, *more: Tensor) -> Prepared:
        if x.dtype != moments.dtype or grad.dtype != moments.dtype:
            x, grad = x.to(moments.dtype), grad.to(moments.dtype)
        w, columns = self._of_channels(weight, 0), None if x.is_contiguous() else self._columns(x)
        if more:  # of a graph
            given, (scale, rstd, *counts) = (x, self.samples, grad, moments), more
            count = counts[0] if counts else self.geometry.count
            return sums_in_graph(*given, rstd), w, lambda totals: of_input_in_graph(*given, scale, rstd, count, totals)
        if columns is None:
            x, grad = x.contiguous().view(self.channels), grad.contiguous().view(self.channels)
        mean, rstd = moments[0], (moments[1] + self.geometry.eps).rsqrt_()
        if self.empty:
            sums = moments.new_zeros(2, moments.shape[1])
        else:
            sums = (sums_of_channels if columns is None else columns.sums)(x, grad, mean, rstd)
        return sums, w, lambda totals: self._of_input(x, grad, moments, rstd, w, totals, columns)

    def _fused_sums(self, grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor) -> Prepared:
        w = self._of_channels(weight, 0)
        if self.per_set != 1 and x.dtype != mean.dtype:  # the weighted gradient must not be rounded
            x, grad = x.to(mean.dtype), grad.to(mean.dtype)
        grad = grad if grad.dtype == x.dtype else grad.to(x.dtype)
        x, grad = x.contiguous().view(self.channels), grad.contiguous().view(self.channels)
        if self.empty:
            sums = mean.new_zeros(2, len(mean))
        else:
            # Of the weight the kernel takes what its gradient is to be like.
            found = torch.batch_norm_backward_reduce(grad, x, mean, rstd, rstd, True, True, False)
            sums = torch.stack((found[2], found[0]))
        weighs = None if self.per_set == 1 else w  # the kernel of the gradient knows a weight of each set only
        return sums, weighs, lambda totals: self._of_input_fused(x, grad, mean, rstd, w, totals)

    def _of_input_fused(
        self, x: Tensor, grad: Tensor, mean: Tensor, rstd: Tensor, w: Tensor | None, totals: Tensor
    ) -> Tensor:
        assert self.counts is not None
        if self.per_set != 1:
            grad = grad if w is None else grad * w.unsqueeze(1)
            mean, rstd, w = mean[:: self.per_set], rstd[:: self.per_set], None
        views = grad.view(self.of_sets), x.view(self.of_sets)
        return torch.batch_norm_backward_elemt(*views, mean, rstd, w, totals[1], totals[0] / rstd, self.counts[1])

    def _totals(self, needed: Sequence[bool], local: Tensor, w: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
        """Sums ``(2, sets)`` of ``w * grad * xhat`` and ``w * grad`` over all ranks, and the gradients of weight and
        bias, which are summed over the mesh dims over which statistics are, in the same message.
        """
        wanted = [i for i in (0, 1) if needed[i + 1]]
        summed = [i for i in wanted if self.total is not None and self.total.needed[i + 1]]
        if len(summed) == 2 and self.samples == 1:  # they tell the sets' sums, too
            (sums,) = self._over_ranks([local])
            return self._of_sets(sums, w), [self._of_parameter(t, i) for i, t in enumerate(sums.unbind())]
        of_parameters = local.view(2, self.samples, self.per_sample).sum(1) if wanted else local
        of_sets = [self._of_sets(local, w)] if needed[0] else []
        totals = self._over_ranks([*of_sets, *(of_parameters[i] for i in summed)])
        total = totals.pop(0) if needed[0] else local
        found = dict(zip(summed, totals, strict=True))
        gradients = [self._of_parameter(found.get(i, of_parameters[i]), i) if i in wanted else None for i in (0, 1)]
        return total, gradients

    def _of_sets(self, sums: Tensor, w: Tensor | None) -> Tensor:
        sums = sums if w is None else sums * w
        return sums if self.per_set == 1 else sums.view(2, self.sets, self.per_set).sum(-1)

    def _over_ranks(self, sums: list[Tensor]) -> list[Tensor]:
        for merge in self.statistics.merges if any(t.numel() for t in sums) else ():
            sums = start_sums(sums, merge.group, overwrite=True)()
        return sums

    def _of_input(
        self,
        x: Tensor,
        grad: Tensor,
        moments: Tensor,
        rstd: Tensor,
        w: Tensor | None,
        totals: Tensor,
        columns: Columns | None,
    ) -> Tensor:
        """``rstd * (w * grad - mean(w * grad) - xhat * mean(w * grad * xhat))``."""
        scale, rstd_of_sets, view_of_sets = rstd if w is None else rstd * w, rstd, self.of_sets
        if self.per_set != 1:
            # The kernel takes twice the time for strided statistics.
            moments = moments.view(2, self.sets, self.per_set).select(2, 0).contiguous()
            rstd_of_sets = rstd.view(self.sets, self.per_set).select(1, 0)
        mean, var, *counted = moments.unbind()
        slope, offset = (totals * (rstd_of_sets / -(counted[0] if counted else max(self.geometry.count, 1)))).unbind()
        if columns is not None:
            slope = slope * rstd_of_sets
            return columns.combined(x, slope, torch.addcmul(offset, mean, slope, value=-1), grad, scale)
        scaled = slope, offset, mean, var, False, 0.0, self.geometry.eps
        dx = torch.native_batch_norm(x.view(view_of_sets), *scaled)[0].view(self.channels)
        return dx.addcmul_(grad, scale.unsqueeze(-1))
