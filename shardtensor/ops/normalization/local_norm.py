"""The plans of normalizations: those of which each rank computes its part alone, by torch's kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..._compat import batch_norm_legit, kernel
from ...operators.declaration import Arguments, Operand
from ..common.half import widened
from .geometry import Geometry
from .norm import Kept, Norm

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
