"""The plans of normalizations over shards: those of one rank's own kernel, and those whose ranks communicate.

From which statistics they compute stands in ``statistics.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..._compat import AutogradFunction, TensorMeta, batch_norm_legit, constant_like, kernel, untraced
from ...communication.redistribute import all_reduce, start_sums
from ...communication.tracing import goes_into_graph, is_traced
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Operand, Plan
from ...operators.weight_gradients import GradientSum, contributing
from ..common.alignment import wide_dtype, widened
from .in_graphs import normalized_in_graph, of_input_in_graph, sums_in_graph
from .statistics import (
    Columns,
    DeviceKernels,
    Geometry,
    Statistics,
    centered,
    channels_are_last,
    columns_of,
    sums_of_channels,
)

Kept = tuple[Tensor, tuple[Tensor, ...]]  # a local result, and what its gradient needs besides
OfSums = Callable[..., Tensor]
# Sums over a shard's sets, its gradients of weight and bias, and the input's gradient by those sums over all ranks.
Prepared = tuple[list[Tensor], list[Tensor | None], OfSums]


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
# The kernel of batch norm with given statistics scales every channel in one pass, and its gradient's kernel sums what
# the gradients of weight, bias and statistics are made of. Layer and RMS norm, which have a weight for each normalized
# element, are batch norm of a batch of one, whose channels are what shares a mean, and weighing is another operator.

# Elements of weight and bias up to which their gradients travel with the sums that the input's waits for.
_SMALL_WEIGHT = 1 << 17


class ShardedNorm(Norm):
    """Normalization with statistics of all ranks.

    In what follows a *set* is what shares a mean.
    """

    saves = (0, 1)

    def __init__(
        self, call: Arguments, geometry: Geometry, dtype: torch.dtype, *parameters: Operand | None, per_set: int = 1
    ) -> None:
        super().__init__(call, geometry, dtype, *parameters)
        self.statistics = Statistics(geometry, call.device)
        self.sets, self.per_set = self.statistics.sets, per_set
        self.kernels = DeviceKernels.of(geometry, self.statistics, call.device, per_set)
        # The gradients of the parameters may travel with the sums that the input's needs; those over the mesh dims that
        # shard other dims go apart.
        merged = [m for m, _ in geometry.merges]
        self.defers = not merged
        self.rest = tuple(m for m in contributing(geometry.spec)[0] if m not in merged)

    def _forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *buffers: Tensor | None) -> Kept:
        if torch.is_grad_enabled():
            return self._differentiable(x, weight, bias), ()
        if self.kernels is not None and self.statistics.replicas is None and not is_traced(x):
            return self._by_kernels(self.kernels, x, weight, bias, *buffers)
        moments = self.statistics.of(x)
        self._note(moments, *buffers)
        return self._normalized(x, moments, weight, bias)

    def _by_kernels(
        self, kernels: DeviceKernels, x: Tensor, weight: Tensor | None, bias: Tensor | None, *buffers: Tensor | None
    ) -> Kept:
        """The local result and what backward needs: mean and reciprocal standard deviation of each channel."""
        raise NotImplementedError

    def _normalized(self, x: Tensor, moments: Tensor, weight: Tensor | None, bias: Tensor | None) -> Kept:
        """The local result and what backward needs."""
        raise NotImplementedError

    def _note(self, moments: Tensor, *buffers: Tensor | None) -> None:
        """Update running statistics, for a subclass that has them."""

    def _affine(self, parameter: Tensor | None, i: int) -> Tensor | None:
        """The part of weight (0) or bias (1) that belongs to the shard, to broadcast against the view."""
        mine = self._own(parameter, i)
        return None if mine is None else mine.reshape(self.geometry.affine)

    # -- backward --------------------------------------------------------------------------------------------------

    def backward(
        self, needed: Sequence[bool], grads: Sequence[Tensor | None], x: Tensor, weight: Tensor | None, *kept: Tensor
    ) -> list[Tensor | None]:
        result: list[Tensor | None] = [None] * len(needed)
        if grads[0] is None:
            return result
        prepare = self._sums_by_kernels if kept[0].ndim == 1 else self._sums
        sums, of_parameters, of_input = prepare(needed, grads[0], x, weight, *kept)
        totals = self._totals(needed, sums, of_parameters)
        if self.statistics.replicas is not None and needed[0]:
            totals = list(self.statistics.replicas.sum(torch.stack(totals)).unbind())
        for i, g in enumerate(of_parameters):
            result[i + 1] = g if g is None else self._complete(g, i)
        finish = None
        if self.total is not None and self.rest:
            finish = GradientSum(self.total.mesh, self.rest, self.total.needed).start(result)
        if needed[0]:
            dx = torch.empty_like(x) if self.empty else of_input(*totals)
            dx = (dx if dx.dtype == x.dtype else dx.to(x.dtype)).reshape(x.shape)
            copied = not x.is_contiguous() and dx.is_contiguous()
            result[0] = torch.empty_like(x).copy_(dx) if copied else dx
        return result if finish is None else [result[0], *finish()[1:]]

    def _sums(self, needed: Sequence[bool], grad: Tensor, x: Tensor, weight: Tensor | None, *kept: Tensor) -> Prepared:
        raise NotImplementedError

    def _sums_by_kernels(
        self, needed: Sequence[bool], grad: Tensor, x: Tensor, weight: Tensor | None, *kept: Tensor
    ) -> Prepared:
        raise NotImplementedError

    def _totals(self, needed: Sequence[bool], sums: list[Tensor], of_parameters: list[Tensor | None]) -> list[Tensor]:
        """The sums over all ranks; put in place are, from the same message, those gradients of parameters that are
        summed over the mesh dims over which statistics are, which may be some of ``sums``, and None for what is not
        needed.
        """
        send, places = list(sums) if needed[0] else [], {}
        for i, g in enumerate(of_parameters):
            if g is None or not needed[i + 1]:
                of_parameters[i] = None
                continue
            place = 0
            while place < len(send) and send[place] is not g:
                place += 1
            if self.total is not None and self.total.needed[i + 1]:
                places[i] = place
                if place == len(send):
                    send.append(g)
            elif place < len(send):  # a contribution, where the sums are made in place
                of_parameters[i] = g.clone()
        if send and (send[0].numel() or any(t.numel() for t in send)):
            for merge in self.statistics.merges:
                send = start_sums(send, merge.group, overwrite=True)()
        for i, place in places.items():
            of_parameters[i] = send[place]
        return send[: len(sums)]

    def _complete(self, gradient: Tensor, i: int) -> Tensor:
        """The gradient of weight (0) or bias (1) as it is returned, from how it travels."""
        return gradient

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
    """Layer norm (or RMS norm, if not centered) over the last dims, of which some are sharded: a set is a row."""

    def __init__(self, call: Arguments, geometry: Geometry, dtype: torch.dtype, *parameters: Operand | None) -> None:
        super().__init__(call, geometry, dtype, *parameters)
        self.row = math.prod(geometry.view[geometry.first :])
        self.rows, self.eps = (1, self.sets, self.row), geometry.eps
        # Large ones rather travel while the backward pass goes on.
        small = sum(m.shape.numel() for m in self.metas if m is not None) <= _SMALL_WEIGHT
        self.defers = self.defers or not small
        # Zeros around this rank's part of weight and bias, where both are small and it is some of their rows.
        intervals, (weight, *_) = geometry.intervals, self.metas
        self.around: list[Tensor] = []
        if small and len(self.metas) == 2 and all(self.narrows) and len(intervals) == 1 and intervals[0][0] == 0:
            assert weight is not None
            ((_, start, n),) = intervals
            with torch.inference_mode(False), untraced():
                zero = torch.zeros((), dtype=self.statistics.dtype, device=call.device)
                self.around = [zero.expand(k, *weight.shape[1:]) for k in (start, weight.shape[0] - start - n)]

    def _by_kernels(
        self, kernels: DeviceKernels, x: Tensor, weight: Tensor | None, bias: Tensor | None, *buffers: Tensor | None
    ) -> Kept:
        given = None if self.empty else x.contiguous().view(self.rows)
        kept = kernels.moments(given)
        if given is None:
            return torch.empty_like(x, dtype=self.dtype), tuple(kept)
        return self._weighted(x, lambda t: kernels.normalized(t, *kept), weight, bias), tuple(kept)

    def _normalized(self, x: Tensor, moments: Tensor, weight: Tensor | None, bias: Tensor | None) -> Kept:
        if self.empty:
            return torch.empty_like(x, dtype=self.dtype), (moments,)
        mean, rstd = self._of_rows(moments)
        return self._weighted(x, lambda t: centered(t, mean).mul_(rstd), weight, bias), (moments,)

    def _of_rows(self, moments: Tensor) -> tuple[Tensor | None, Tensor]:
        """Mean and reciprocal standard deviation, to broadcast against rows."""
        mean = moments[0].unsqueeze(1) if self.geometry.centered else None
        return mean, (moments[-1] + self.eps).rsqrt_().unsqueeze(1)

    def _weighted(
        self, x: Tensor, normalized: Callable[[Tensor], Tensor], weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """The result, rounded once."""
        dtype = self.dtype if weight is None and bias is None else self.statistics.dtype
        y = normalized((x if x.dtype == dtype else x.to(dtype)).contiguous().view(self.rows)).view(self.geometry.view)
        w, b = self._affine(weight, 0), self._affine(bias, 1)
        if w is not None:
            y = y.mul_(w) if b is None else torch.addcmul(b, y, w, out=y)
        elif b is not None:
            y.add_(b)
        y = (y if y.dtype == self.dtype else y.to(self.dtype)).reshape(x.shape)
        # torch composes RMS norm of operators that keep the order of memory; its kernel of layer norm does not.
        kept = self.geometry.centered or x.is_contiguous()
        return y if kept else torch.empty_like(x, dtype=y.dtype).copy_(y)

    def _sums(self, needed: Sequence[bool], grad: Tensor, x: Tensor, weight: Tensor | None, *kept: Tensor) -> Prepared:
        (moments,) = kept
        mean, rstd = self._of_rows(moments)
        means = moments.new_zeros(self.sets) if mean is None else moments[0]
        rstds = rstd.view(-1)
        grad, x, weighted = self._in_rows(grad, x, weight)
        if self.empty:
            sums: Sequence[Tensor] = moments.new_zeros(2, self.sets).unbind()
        else:
            sums = sums_of_channels(x, weighted, means, rstds)

        def of_input(*totals: Tensor) -> Tensor:
            slope, *offset = (t.mul_(rstds).div_(-max(self.geometry.count, 1)).unsqueeze(1) for t in totals)
            dx = centered(x, mean).mul_(slope * rstd)
            return (dx.add_(offset[0]) if offset else dx).addcmul_(weighted, rstd)

        of_elements = self._of_elements(needed, grad, x, weight, means, rstds)
        return list(sums if self.geometry.centered else sums[:1]), of_elements, of_input

    def _sums_by_kernels(
        self, needed: Sequence[bool], grad: Tensor, x: Tensor, weight: Tensor | None, *kept: Tensor
    ) -> Prepared:
        kernels, (mean, rstd) = self.kernels, kept
        assert kernels is not None
        grad, x, weighted = self._in_rows(grad, x, weight)
        if self.empty:
            sums: Sequence[Tensor] = mean.new_zeros(2, self.sets).unbind()
        else:
            sums = kernels.sums(weighted, x, mean, rstd)[:2]
        of_elements = self._of_elements(needed, grad, x, weight, mean, rstd)
        sums = list(sums if self.geometry.centered else sums[1:])
        return sums, of_elements, partial(kernels.of_input, weighted, x, mean, rstd, None)

    def _in_rows(self, grad: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient and input in rows, and the weighted gradient, in one dtype."""
        if x.dtype != grad.dtype or weight is not None:
            x, grad = (t if t.dtype == self.statistics.dtype else t.to(self.statistics.dtype) for t in (x, grad))
        grad, w = grad.contiguous(), self._affine(weight, 0)
        weighted = grad if w is None else grad.view(self.geometry.view) * w
        return grad.view(self.rows), x.contiguous().view(self.rows), weighted.view(self.rows)

    def _of_elements(
        self, needed: Sequence[bool], grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor
    ) -> list[Tensor | None]:
        """The gradients of weight and bias that belong to this shard, in the shape of all of them."""
        mask = [need and m is not None for need, m in zip(needed[1:], self.metas, strict=False)]
        if self.empty or not any(mask):
            found: list[Any] = [x.new_zeros(self.row, dtype=mean.dtype) if need else None for need in mask]
        else:
            x, grad = (t[0] if t.dtype == mean.dtype else t[0].to(mean.dtype) for t in (x, grad))
            w = self._own(weight, 0)
            w = None if w is None else w.reshape(-1).to(mean.dtype)
            # Of the bias the kernel takes what its gradient is to be like.
            given = grad, x, (self.row,), mean, rstd, w, x[0] if w is None else w
            found = _layer_norm_backward(*given, (False, *mask, False)[:3])[1:]
        if self.around and all(mask) and self.sums:  # by one operator
            assert self.metas[0] is not None
            before, after = (constant_like(zeros, grad) for zeros in self.around)
            w, b = (t.view(self.geometry.own_shape(self.metas[0].shape)) for t in found)
            return list(torch.cat([before, w, after, before, b, after]).chunk(2))
        return [None if not need else self._of_parameter(found[i], i) for i, need in enumerate(mask)]


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
# On devices that have them these are other kernels, see [Note: kernels of devices] in ``statistics.py``. They know
# weights of whole sets only, so a group's gradient is weighted before, if it is small, or its sums are divided by the
# weights.

# Elements of a shard up to which launching a kernel takes as long as going through it.
_LAUNCH = 1 << 20
# Stands for a weight of zero, which nothing can be divided by.
_NEXT_TO_ZERO = 1.7e-20


class ChannelNorm(ShardedNorm):
    """Normalization over groups of entire channels.

    Without weight and bias a set counts as one channel. Numbers are kept per channel, for all samples that have sets of
    their own.
    """

    def __init__(self, call: Arguments, geometry: Geometry, dtype: torch.dtype, *parameters: Operand | None) -> None:
        view, plain = geometry.view, all(p is None for p in parameters)
        inner = geometry.dims if plain else tuple(d for d in geometry.dims if geometry.affine[d] == 1)
        sets = math.prod(n for d, n in enumerate(view) if d not in geometry.dims)
        channels = math.prod(n for d, n in enumerate(view) if d not in inner)
        super().__init__(call, geometry, dtype, *parameters, per_set=channels // max(sets, 1))
        self.columns = self.statistics.columns = columns_of(geometry, self.statistics.on_cpu)
        self.samples = self.statistics.samples = 1 if 0 in geometry.dims else view[0]
        self.per_sample = torch.Size(geometry.affine).numel()
        batch = view[0] if 0 in geometry.dims else 1
        size = torch.Size(view).numel() // max(batch * channels, 1)
        # Shapes of a contiguous shard as the kernels get it, by channels and by sets.
        self.channels, self.of_sets = (batch, channels, size), (batch, sets, self.per_set * size)
        # Parameters that the kernels take as they are; those of devices do in the dtype of the input, too.
        given, entire = [m.dtype for m in self.metas if m is not None], self.samples == 1 and not any(self.narrows)
        self.as_they_are = entire and all(d == self.statistics.dtype for d in given)
        self.in_half = entire and all(d == dtype for d in given)

    # -- forward ---------------------------------------------------------------------------------------------------

    def _by_kernels(
        self, kernels: DeviceKernels, x: Tensor, weight: Tensor | None, bias: Tensor | None, *buffers: Tensor | None
    ) -> Kept:
        given = None if self.empty else (x if x.dtype == self.dtype else x.to(self.dtype)).contiguous()
        running, momentum = self._running(buffers)
        mean, rstd = kernels.moments(None if given is None else given.view(self.of_sets), running, momentum)
        self._note_merged(mean, rstd, running, *buffers)
        if given is None:
            return torch.empty_like(x, dtype=self.dtype), (mean, rstd)
        w, b = (weight, bias) if self.in_half else (self._of_channels(weight, 0), self._of_channels(bias, 1))
        y = kernels.normalized(given.view(self.channels), mean, rstd, w, b).view(x.shape)
        return (y if x.is_contiguous() else torch.empty_like(x, dtype=y.dtype).copy_(y)), (mean, rstd)

    def _running(self, buffers: Sequence[Tensor | None]) -> tuple[Tensor | None, float]:
        """A running variance that the merging kernel is to update, if any, and with which momentum."""
        return None, 0.0

    def _note_merged(self, mean: Tensor, rstd: Tensor, updated: Tensor | None, *buffers: Tensor | None) -> None:
        """Update the running statistics that the merging kernel has not."""

    def _normalized(self, x: Tensor, moments: Tensor, weight: Tensor | None, bias: Tensor | None) -> Kept:
        of_sets = moments
        if self.per_set != 1:
            moments = moments.repeat_interleave(self.per_set, 1)
        kept = moments, of_sets
        mean, var, *_ = moments.unbind()
        w, b, eps = self._of_channels(weight, 0), self._of_channels(bias, 1), self.geometry.eps
        if self.empty:
            return torch.empty_like(x, dtype=self.dtype), kept
        if goes_into_graph(x):
            y, kept_in_graph = normalized_in_graph(x, self.samples, moments, w, b, eps)
            return y.to(self.dtype), kept_in_graph
        columns = self._columns(x)
        given = x if x.dtype == self.dtype else x.to(self.dtype)
        if columns is not None:
            y = columns.normalized(given, mean, var, w, b, eps)
            return y if y.dtype == self.dtype else y.to(self.dtype), kept
        given = given.contiguous().view(self.channels)
        y = torch.native_batch_norm(given, w, b, mean, var, False, 0.0, eps)[0].view(x.shape)
        return y if x.is_contiguous() else torch.empty_like(x, dtype=y.dtype).copy_(y), kept

    def _columns(self, x: Tensor) -> Columns | None:
        """How to go through a shard that is not contiguous; None if it is to be copied."""
        usable = self.columns is not None and not x.is_contiguous() and channels_are_last(x)
        return self.columns if usable else None

    def _of_channels(self, parameter: Tensor | None, i: int) -> Tensor | None:
        """The part of weight (0) or bias (1) that belongs to the shard, for the channels of all samples."""
        if parameter is None or self.as_they_are:
            return parameter
        mine = self._own(parameter, i)
        assert mine is not None
        return (mine if self.samples == 1 else mine.repeat(self.samples)).to(self.statistics.dtype)

    # -- backward --------------------------------------------------------------------------------------------------

    def _complete(self, gradient: Tensor, i: int) -> Tensor:
        return self._of_parameter(gradient, i)

    def _of_weights(self, needed: Sequence[bool], sums: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of weight and bias, from those for the channels of all samples."""
        if self.samples == 1:
            return list(sums)
        pairs = zip(sums, needed[1:3], strict=True)
        return [t.view(self.samples, self.per_sample).sum(0) if t is not None and need else None for t, need in pairs]

    def _sums(self, needed: Sequence[bool], grad: Tensor, x: Tensor, weight: Tensor | None, *kept: Tensor) -> Prepared:
        in_graph, dtype = len(kept) > 2, self.statistics.dtype
        if x.dtype != dtype or grad.dtype != dtype:
            x, grad = x.to(dtype), grad.to(dtype)
        columns = None if in_graph else self._columns(x)
        if in_graph:
            mean, scaled_by, rstd, *counts = kept
            sums: Sequence[Tensor] = sums_in_graph(x, self.samples, grad, mean, rstd).unbind()
        else:
            moments, of_sets = kept
            if columns is None:
                x, grad = x.contiguous().view(self.channels), grad.contiguous().view(self.channels)
            mean, rstd = moments[0], (moments[1] + self.geometry.eps).rsqrt_()
            counts = [of_sets[2]] if len(of_sets) > 2 else []
            if self.empty:
                sums = moments.new_zeros(2, moments.shape[1]).unbind()
            else:
                sums = (sums_of_channels if columns is None else columns.sums)(x, grad, mean, rstd)
        w = self._of_channels(weight, 0)
        scale = rstd if w is None else rstd * w
        # Those of channels tell those of sets, unless they are summed over samples, or not over the ranks.
        total, apart = self.total, False
        if self.per_set != 1:
            both = total is not None and total.needed[1] and total.needed[2] and needed[1] and needed[2]
            apart = self.samples != 1 or not both
        found = [self._of_sets(sums, scale)] if apart else list(sums)

        def of_input(*totals: Tensor) -> Tensor:
            if self.per_set != 1:
                weighted = totals[0] if apart else self._of_sets(totals, scale)
                slope, offset = weighted.mul_(-1 / max(self.geometry.count, 1)).unbind()
            else:
                factor = scale / -(counts[0] if counts else max(self.geometry.count, 1))
                slope, offset = totals[0] * factor, totals[1] * factor
            if in_graph:
                return of_input_in_graph(x, self.samples, grad, mean, scaled_by, rstd, slope, offset)
            return self._of_input(x, grad, of_sets, scale, slope, offset, columns)

        return found, self._of_weights(needed, sums), of_input

    def _of_sets(self, sums: Sequence[Tensor], scale: Tensor) -> Tensor:
        """The sums over sets of what is summed over channels, weighted, ``(2, sets)``."""
        return torch.stack(list(sums)).mul_(scale).view(2, self.sets, self.per_set).sum(-1)

    def _of_input(
        self,
        x: Tensor,
        grad: Tensor,
        of_sets: Tensor,
        scale: Tensor,
        slope: Tensor,
        offset: Tensor,
        columns: Columns | None,
    ) -> Tensor:
        """``rstd * (w * grad - mean(w * grad) - xhat * mean(w * grad * xhat))``.

        Args:
            scale: ``rstd * w`` of the channels.
            slope, offset: of ``xhat``, by sets.
        """
        mean, var, eps = of_sets[0], of_sets[1], self.geometry.eps
        if columns is not None:
            slope = slope * (var + eps).rsqrt_()
            return columns.combined(x, slope, torch.addcmul(offset, mean, slope, value=-1), grad, scale)
        given = x.view(self.of_sets)
        dx = torch.native_batch_norm(given, slope, offset, mean, var, False, 0.0, eps)[0].view(self.channels)
        return dx.addcmul_(grad, scale.unsqueeze(-1))

    def _sums_by_kernels(
        self, needed: Sequence[bool], grad: Tensor, x: Tensor, weight: Tensor | None, *kept: Tensor
    ) -> Prepared:
        kernels, (mean, rstd), w, k = self.kernels, kept, self._of_channels(weight, 0), self.per_set
        assert kernels is not None
        if self.empty:
            dy, with_x = mean.new_zeros(2, self.sets).unbind()
            of_weight, of_bias = mean.new_zeros(2, len(mean)).unbind()
            of_bias = dy if k == 1 else of_bias
            of_input: OfSums = partial(kernels.of_input, grad, x, mean, rstd, w)  # not called
        else:
            if x.dtype != grad.dtype:
                x, grad = x.to(mean.dtype), grad.to(mean.dtype)
            x, grad = x.contiguous().view(self.channels), grad.contiguous().view(self.channels)
            if k == 1:
                dy, with_x, of_weight = kernels.sums(grad, x, mean, rstd, weight=needed[1])
                of_bias, of_input = dy, partial(kernels.of_input, grad, x, mean, rstd, w)
            elif w is None or (x.numel() <= _LAUNCH and x.dtype == mean.dtype):
                of_bias, _, of_weight = kernels.sums(grad, x, mean, rstd, sets=False, weight=needed[1])
                weighted = (grad if w is None else grad * w.unsqueeze(1)).view(self.of_sets)
                by_sets = weighted, x.view(self.of_sets), mean[::k], rstd[::k]
                dy, with_x, _ = kernels.sums(*by_sets)
                of_input = partial(kernels.of_input, *by_sets, None)
            else:
                of_bias, with_x, of_weight = kernels.sums(grad, x, mean, rstd, weight=needed[1])
                dy, with_x = self._of_sets((of_bias, with_x), w).unbind()
                of_input = partial(self._by_weights, kernels, grad, x, mean, rstd, w + _NEXT_TO_ZERO)
        return [dy, with_x], self._of_weights(needed, (of_weight, of_bias)), of_input

    def _by_weights(
        self,
        kernels: DeviceKernels,
        grad: Tensor,
        x: Tensor,
        mean: Tensor,
        rstd: Tensor,
        w: Tensor,
        *totals: Tensor,
    ) -> Tensor:
        """The input's gradient by a kernel that multiplies all by the weights, of which none is zero."""
        of_channels = ((t.unsqueeze(1) / w.view(self.sets, self.per_set)).view(-1) for t in totals)
        return kernels.of_input(grad, x, mean, rstd, w, *of_channels)
