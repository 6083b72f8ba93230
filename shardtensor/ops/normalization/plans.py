"""The plans of normalizations over shards: those of one rank's own kernel, and that of ranks that communicate.

They are told apart by a :class:`Geometry` alone. Half precision: a norm computes in float32 what its kernels do not
compute in it themselves, and rounds what it returns, but not what it sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..._compat import AutogradFunction, TensorMeta, batch_norm_legit, constant_like, kernel, recomputed, result_is_kept
from ...communication.redistribute import all_reduce, start_sums
from ...communication.tracing import goes_into_graph, is_traced
from ...communication.weight_gradients import GradientSum, contributing
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Operand, Plan
from ..common.alignment import wide_dtype, widened
from .geometry import Geometry
from .kernels import ChannelsLast, InGraph, Kernels, Synchronized
from .statistics import Merge, Moments, Replicas, RunningStatistics

Kept = tuple[Tensor, Sequence[Tensor]]  # a local result, and what its gradient needs besides


class Norm(Plan):
    """Normalization of an input, then scaling by a weight and adding a bias.

    Args:
        dtype: of the result.
        parameters: weight and bias; specs for those that are sharded.
    """

    twice = True
    depends = {0: (0, 1), 1: (0,), 2: ()}
    # Whether running statistics are updated, which follow weight and bias.
    updates = False

    def __init__(self, call: Arguments, geometry: Geometry, dtype: torch.dtype, *parameters: Operand | None) -> None:
        self.geometry, self.dtype, self.outputs = geometry, dtype, geometry.output_spec(dtype)
        self.casts, self.empty = call.autocast() is not None, 0 in geometry.view
        # Which of the parameters this rank uses a part of. Sharded ones arrive as that part.
        self.narrows = [isinstance(p, TensorMeta) and geometry.own_shape(p.shape) != p.shape for p in parameters]
        self.metas = [p.tensor_meta if isinstance(p, ShardTensorSpec) else p for p in parameters]

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *buffers: Tensor | None) -> Kept:
        if self.updates and not torch.is_grad_enabled():
            # Where selective checkpointing keeps one device's result, its kernel updates the statistics once. What is
            # computed here is computed again.
            if result_is_kept(torch.batch_norm, lambda: self._of_one_device(x, weight, bias, *buffers)):
                buffers = ()
        if self.casts:
            with torch.autocast(x.device.type, enabled=False):
                return self._forward(x, weight, bias, *buffers)
        return self._forward(x, weight, bias, *buffers)

    def _forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *buffers: Tensor | None) -> Kept:
        raise NotImplementedError

    def _of_one_device(self, x: Tensor, *parameters: Tensor | None) -> Sequence[Any]:
        """The arguments of ``torch.batch_norm`` on one device, in shape; their elements share memory."""
        shape = self.geometry.spec.shape
        given = [None if p is None else p.new_empty(1).expand(shape[1]) for p in parameters]
        return x.new_empty(1).expand(shape), *given, True, 0.1, self.geometry.eps, torch.backends.cudnn.enabled

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
        dtype = wide_dtype(meta.dtype) if self.widens else meta.dtype
        mine = contribution if contribution.dtype == dtype else contribution.to(dtype)
        if not self.narrows[i]:
            return mine if mine.ndim == len(meta.shape) == 1 else mine.reshape(geometry.own_shape(meta.shape))
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
        given = widened(*given) if self.widens else given
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
        if torch.is_grad_enabled():  # to be differentiated twice and more often: torch's third derivatives are wrong
            wide, dims = x.to(wide_dtype(x.dtype)), list(range(-len(self._normalized_shape), 0))
            var, mean = torch.var_mean(wide, dims, correction=0, keepdim=True)
            normal = (wide - mean) * (var + self.geometry.eps).rsqrt()
            scaled = normal if w is None else normal * w
            return (scaled if b is None else scaled + b).to(x.dtype), ()
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
        # Of small maps with the channels last, torch's kernel writes the input's gradient also if it is not asked for.
        last = self._last(x) and mask[0]
        given = (_channels(t, last) for t in (grad, x))
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
        self.updates = use_input and any(p is not None for p in parameters[2:])
        if not use_input:
            self.depends = {**self.depends, 0: (1,)}

    @recomputed()
    def _kernel(self, x: Tensor, w: Tensor | None, b: Tensor | None, *buffers: Tensor | None) -> Kept:
        settings: Any = (self.use_input, self.momentum, self.geometry.eps)
        views = _channels(x, not x.is_contiguous())
        if self.updates and not torch.is_grad_enabled() and buffers:
            # The one that says that it writes to them.
            y, *kept = batch_norm_legit(views, w, b, *buffers, *settings)
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


@recomputed()
def _with_shape(y: Tensor, x: Tensor) -> Tensor:
    """``y``, the kernel's result of such a view of ``x``, in the shape and the memory format of ``x``."""
    if y.ndim == 3:
        y = y.view(x.shape)
        return y if x.is_contiguous() else torch.empty_like(x).copy_(y)
    return y.permute(0, 2, 3, 1).reshape(x.shape[0], *x.shape[2:], x.shape[1]).movedim(-1, 1)


# -- sharded norm ------------------------------------------------------------------------------------------------------

# The plan of normalizations whose ranks have to communicate: statistics of all ranks, then kernels, see ``kernels.py``.

# Elements of weight and bias up to which the gradients of an elementwise norm's travel with the sums that the input's
# waits for; larger ones rather travel while the backward pass goes on.
_SMALL_WEIGHT = 1 << 17


class ShardedNorm(Norm):
    """Normalization with statistics of all ranks.

    Args:
        running: what updates the running statistics, if there are any.
        replicas: what merges the statistics with those of other meshes, if there are any.
    """

    saves = (0, 1)
    new = True

    def __init__(
        self,
        call: Arguments,
        geometry: Geometry,
        dtype: torch.dtype,
        *parameters: Operand | None,
        running: RunningStatistics | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        if all(p is None for p in parameters):
            geometry = replace(geometry, affine=(1,) * len(geometry.view))
        super().__init__(call, geometry, dtype, *parameters)
        spec, device, self.running, self.replicas = geometry.spec, call.device, running, replicas
        self.updates = running is not None
        self.wide = wide_dtype(spec.tensor_meta.dtype)
        self.merges = [Merge(spec.mesh, m, sizes, self.wide, device) for m, sizes in geometry.merges]
        self.kernels = Kernels(geometry, device)
        self.channels_last = ChannelsLast.of(geometry, device)
        self.in_graph = None if geometry.elementwise else InGraph(geometry, device)
        self.synchronized = None if replicas is not None else Synchronized.of(geometry, device, self.merges)
        # Whether kernels take the parameters as they are; those of devices do in the dtype of the result, too.
        metas = [m for m in self.metas if m is not None]
        entire = geometry.samples == 1 and not any(self.narrows)
        self.as_they_are = entire and all(m.dtype == self.wide for m in metas)
        self.in_half = entire and all(m.dtype == dtype for m in metas)
        # The gradients of the parameters may travel with the sums that the input's needs; those over the mesh dims that
        # shard other dims go apart.
        merged = [m for m, _ in geometry.merges]
        small = not geometry.elementwise or sum(m.shape.numel() for m in metas) <= _SMALL_WEIGHT
        self.defers = not merged or not small
        self.rest = tuple(m for m in contributing(spec)[0] if m not in merged)
        # Zeros around this rank's part of elementwise weight and bias, where both are small and it is some of the rows.
        self.around: list[Tensor] = []
        if geometry.elementwise and small and len(metas) == 2 and all(self.narrows):
            (d, start, n), *others = geometry.intervals
            if d == 0 and not others:
                rows, *row = metas[0].shape
                zero = torch.zeros((), dtype=self.wide, device=device)
                self.around = [zero.expand(k, *row) for k in (start, rows - start - n)]

    def _kernels(self, x: Tensor) -> Kernels:
        """Those for a shard in this order of memory."""
        if self.synchronized is not None and not is_traced(x):
            return self.synchronized
        if self.in_graph is not None and goes_into_graph(x):
            return self.in_graph
        if self.channels_last is not None and not x.is_contiguous() and x.movedim(1, -1).is_contiguous():
            return self.channels_last
        return self.kernels

    @recomputed()
    def _forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *buffers: Tensor | None) -> Kept:
        if torch.is_grad_enabled():
            return self._differentiable(x, weight, bias), ()
        kernels, elementwise = self._kernels(x), self.geometry.elementwise
        own = x.contiguous() if kernels.contiguous else x
        kept = self._statistics(kernels, own, buffers)
        moments = kept[0], kept[1]
        if self.synchronized is not None and kernels is not self.synchronized:
            # Whatever the backward pass runs in, it finds what these keep.
            kept = [kept[0], (kept[1] + self.geometry.eps).rsqrt()]
        if self.empty:
            return torch.empty_like(x, dtype=self.dtype), kept
        weighs = elementwise and not (weight is None and bias is None)
        dtype = self.wide if weighs or (elementwise and not kernels.takes_half) else self.dtype
        own = own if own.dtype == dtype else own.to(dtype)
        if elementwise:
            y = kernels.normalized(own, *moments)
            y = self._weighted(y, weight, bias) if weighs else y
        elif kernels.takes_half and self.in_half:
            y = kernels.normalized(own, *moments, weight, bias)
        else:
            y = kernels.normalized(own, *moments, self._of_channels(weight, 0), self._of_channels(bias, 1))
        y = y if y.dtype == self.dtype else y.to(self.dtype)
        # torch composes RMS norm of operators that keep the order of memory; its kernel of layer norm does not.
        keeps = not elementwise or not self.geometry.centered
        copied = keeps and kernels.contiguous and not x.is_contiguous()
        return torch.empty_like(x, dtype=y.dtype).copy_(y) if copied else y, kept

    def _statistics(self, kernels: Kernels, x: Tensor, buffers: Sequence[Tensor | None]) -> list[Tensor]:
        """Mean and variance of all ranks for each channel, and with replicas how many elements they are of.

        Those of :class:`Synchronized` are mean and reciprocal standard deviation.
        """
        running = self.running if buffers else None
        if isinstance(kernels, Synchronized):
            if running is None:
                return kernels.statistics(x)
            by_kernel = running.may_be_updated(buffers[1])
            mean, rstd = kernels.statistics(x, buffers[1] if by_kernel else None, running.momentum)
            running.update(buffers, [mean] if by_kernel else [mean, rstd.pow(-2).sub_(self.geometry.eps)])
            return [mean, rstd]
        if self.empty:
            zeros = x.new_zeros((1 + self.geometry.centered, self.geometry.sets), dtype=self.wide)
            moments: Moments = zeros.unbind()
        else:
            moments = kernels.moments(x)
        for merge in self.merges:
            moments = merge(moments)
        if self.replicas is not None:
            moments = self.replicas(moments)
        if running is not None:
            running.update(buffers, moments)
        if not self.geometry.centered:
            return [torch.zeros_like(moments[0]), *moments]
        return list(moments) if self.geometry.per_set == 1 else kernels.of_channels(*moments)

    # -- weight and bias -------------------------------------------------------------------------------------------

    def wide_for_free(self, device: str) -> bool:
        """The kernels add up in the dtype of the statistics."""
        return True

    def _of_channels(self, parameter: Tensor | None, i: int) -> Tensor | None:
        """The part of weight (0) or bias (1) that belongs to the shard, for the channels of all samples."""
        mine, samples = self._own(parameter, i), self.geometry.samples
        if mine is None or self.as_they_are:
            return mine
        return (mine if samples == 1 else mine.repeat(samples)).to(self.wide)

    def _affine(self, parameter: Tensor | None, i: int) -> Tensor | None:
        """The part of weight (0) or bias (1) that belongs to the shard, to broadcast against the view."""
        mine = self._own(parameter, i)
        return None if mine is None else mine.reshape(self.geometry.affine)

    def _weighted(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Weighted by elements, in place."""
        y, w, b = x.view(self.geometry.view), self._affine(weight, 0), self._affine(bias, 1)
        if w is not None:
            y = y.mul_(w) if b is None else torch.addcmul(b, y, w, out=y)
        elif b is not None:
            y.add_(b)
        return y.view(x.shape)

    def _of_elements(
        self, needed: Sequence[bool], grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor
    ) -> list[Tensor | None]:
        """The gradients of elementwise weight and bias that belong to this shard, in the shape of all of them."""
        sets, row = self.geometry.sets, math.prod(self.geometry.affine)
        mask = [need and m is not None for need, m in zip(needed[1:], self.metas, strict=False)]
        if self.empty or not any(mask):
            found: list[Any] = [x.new_zeros(row, dtype=self.wide) if need else None for need in mask]
        else:
            x, grad = (t.view(sets, row).to(self.wide) for t in (x, grad))
            w = self._own(weight, 0)
            w = None if w is None else w.reshape(-1).to(self.wide)
            # Of the bias the kernel takes what its gradient is to be like.
            given = grad, x, (row,), mean, rstd, w, x[0] if w is None else w
            found = _layer_norm_backward(*given, (False, *mask, False)[:3])[1:]
        if self.around and all(mask) and self.widens:  # by one operator
            before, after = (constant_like(zeros, grad) for zeros in self.around)
            w, b = (t.view(-1, *before.shape[1:]) for t in found)
            return list(torch.cat([before, w, after, before, b, after]).chunk(2))
        return [self._of_parameter(found[i], i) if need else None for i, need in enumerate(mask)]

    # -- backward --------------------------------------------------------------------------------------------------

    def backward(
        self,
        needed: Sequence[bool],
        grads: Sequence[Tensor | None],
        x: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        spread: Tensor,
        *counts: Tensor,
    ) -> list[Tensor | None]:
        result: list[Tensor | None] = [None] * len(needed)
        grad, geometry, kernels = grads[0], self.geometry, self._kernels(x)
        if grad is None:
            return result
        if self.synchronized is not None and kernels is not self.synchronized:
            spread = spread.pow(-2) - geometry.eps
        own, wide = x, self.wide
        if not kernels.takes_half or x.dtype != grad.dtype or (geometry.elementwise and weight is not None):
            own, grad = own if own.dtype == wide else own.to(wide), grad if grad.dtype == wide else grad.to(wide)
        if kernels.contiguous:
            own, grad = own.contiguous(), grad.contiguous()
        w, weighted, summed = None, grad, (False,) * 3 if self.total is None else self.total.needed
        if not geometry.elementwise:
            w = self._of_channels(weight, 0)
        elif (affine := self._affine(weight, 0)) is not None:
            weighted = (grad.view(geometry.view) * affine).view(x.shape)
        several, count = geometry.per_set != 1, counts[0] if counts else max(geometry.count, 1)
        together = several and geometry.samples == 1 and all((*needed[1:3], *summed[1:3]))
        given = own, weighted, mean, spread, w, count, together, self.exact
        sums, of_weight, of_bias, of_input = kernels.gradients(*given)
        if geometry.elementwise:
            rstd = spread if kernels is self.synchronized else (spread + geometry.eps).rsqrt_()
            gradients = self._of_elements(needed, grad, own, weight, mean, rstd)
        else:
            gradients = [self._of_samples(g) if need else None for g, need in zip((of_weight, of_bias), needed[1:])]
        totals = self._totals(sums if needed[0] else (), gradients, summed[1:])
        for i, g in enumerate(gradients):
            result[i + 1] = g if g is None or geometry.elementwise else self._of_parameter(g, i)
        finish = None
        if self.total is not None and self.rest:
            finish = GradientSum(self.total.mesh, self.rest, summed, self.widens).start(result)
        if needed[0]:
            dx = torch.empty_like(x) if self.empty else of_input(*totals)
            dx = dx if dx.dtype == x.dtype else dx.to(x.dtype)
            copied = kernels.contiguous and not x.is_contiguous()
            result[0] = torch.empty_like(x).copy_(dx) if copied else dx
        return result if finish is None else [result[0], *finish()[1:]]

    def _of_samples(self, gradient: Tensor) -> Tensor:
        """A gradient of weight or bias, from those for the channels of all samples."""
        samples = self.geometry.samples
        return gradient if samples == 1 else gradient.view(samples, math.prod(self.geometry.affine)).sum(0)

    def _totals(
        self, sums: Sequence[Tensor], gradients: list[Tensor | None], summed: Sequence[bool]
    ) -> Sequence[Tensor]:
        """The sums over all ranks; put in place are, from the same message, the gradients of parameters that are
        ``summed`` over the mesh dims over which statistics are. They may be some of ``sums``.
        """
        totals, places = list(sums), {}
        for i, g in enumerate(gradients):
            if g is None:
                continue
            place = 0
            while place < len(totals) and totals[place] is not g:
                place += 1
            if summed[i]:
                places[i] = place
                totals += [g][: place == len(totals)]
            elif place < len(totals):  # a contribution, where the sums are made in place
                gradients[i] = g.clone()
        if totals and (totals[0].numel() or any(t.numel() for t in totals)):
            for merge in self.merges:
                totals = start_sums(totals, merge.group, overwrite=True)()
        for i, place in places.items():
            gradients[i] = totals[place]
        totals = totals[: len(sums)]
        return totals if self.replicas is None or not sums else self.replicas.sum(torch.stack(totals)).unbind()

    # -- second derivatives ----------------------------------------------------------------------------------------

    def _differentiable(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The same in operators that autograd differentiates."""
        w, b = self._affine(weight, 0), self._affine(bias, 1)
        y = x.reshape(self.geometry.view).to(self.wide)
        y = y - self._average(y) if self.geometry.centered else y
        y = y * (self._average(y * y) + self.geometry.eps).rsqrt()
        y = y if w is None else y * w
        return (y if b is None else y + b).to(self.dtype).reshape(x.shape)

    def _average(self, t: Tensor) -> Tensor:
        total = _SumOverRanks.apply(t.sum(self.geometry.dims, keepdim=True), self.merges, self.replicas)
        count, replicas = max(self.geometry.count, 1), self.replicas
        return total / (count if replicas is None else replicas.sum(t.new_tensor(count)))


class _SumOverRanks(AutogradFunction):
    """The sum of the ranks' contributions. Every rank uses it, so its adjoint is a sum as well."""

    apply: ClassVar[Callable[[Tensor, Sequence[Merge], Replicas | None], Tensor]]

    @staticmethod
    def forward(ctx: Any, value: Tensor, merges: Sequence[Merge], replicas: Replicas | None) -> Tensor:
        ctx.given = merges, replicas
        for merge in merges:
            value = all_reduce(value, merge.group) if value.numel() else value
        if replicas is not None:
            return replicas.sum(value)
        return value if merges else value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _SumOverRanks.apply(grad, *ctx.given), None, None
