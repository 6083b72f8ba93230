"""The plan of normalizations whose ranks have to communicate: one for "normalize over a set of dims".

Elementwise operators on the centered shard, most of them in place: torch's kernels compute statistics of their own, and
cannot be given others for less than this costs. The input is centered before it is scaled, as ``x * scale + shift``
would lose a large mean's digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._compat import AutogradFunction
from ...operators import Arguments, Operand, Plan
from ...redistribute import all_reduce
from ...spec import ShardTensorSpec
from .geometry import Geometry
from .statistics import Statistics, centered

__all__ = ["ShardedNorm"]


class ShardedNorm(Plan):
    """Normalization of an input, then scaling by a weight and adding a bias.

    Args:
        dtype: of the result.
        parameters: weight and bias; specs for those that are sharded.
    """

    saves = (0, 1)
    twice = True

    def __init__(self, call: Arguments, geometry: Geometry, dtype: torch.dtype, *parameters: Operand | None) -> None:
        self.geometry, self.dtype, self.outputs = geometry, dtype, geometry.output_spec(dtype)
        self.statistics = Statistics(geometry, call.device)
        self.casts = call.autocast() is not None
        # Sharded parameters arrive as this rank's part.
        self.narrows = [bool(geometry.intervals) and not isinstance(p, ShardTensorSpec) for p in parameters]
        self.metas = [p.tensor_meta if isinstance(p, ShardTensorSpec) else p for p in parameters]
        # Sums go over the inner dims first, then, with the weight applied, over the other normalized ones.
        self.inner = tuple(d for d in geometry.dims if geometry.affine[d] == 1)
        self.others = tuple(d for d in geometry.dims if d not in self.inner)

    # -- forward ---------------------------------------------------------------------------------------------------

    def forward(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *buffers: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        if self.casts:
            with torch.autocast(x.device.type, enabled=False):
                return self._forward(x, weight, bias, *buffers)
        return self._forward(x, weight, bias, *buffers)

    def _forward(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *buffers: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        x, w, b = x.reshape(self.geometry.view), self._affine(weight, 0), self._affine(bias, 1)
        if torch.is_grad_enabled():
            return self._result(self._differentiable(x, w, b)), ()
        mean, var, free = self.statistics.of(x)
        self._note(mean, var, *buffers)
        rstd = var.add_(self.geometry.eps).rsqrt_()
        return self._result(self._scaled(centered(x, mean, free), w, b, rstd)), (mean, rstd)

    def _scaled(self, y: Tensor, w: Tensor | None, b: Tensor | None, rstd: Tensor) -> Tensor:
        """``y * rstd * w + b``, in place of ``y``."""
        if w is None:
            y.mul_(rstd)
        elif self.inner:
            y.mul_(rstd * w)
        else:
            y.mul_(rstd).mul_(w)
        return y if b is None else y.add_(b)

    def _note(self, mean: Tensor | None, var: Tensor, *buffers: Tensor | None) -> None:
        """Update running statistics, for a subclass that has them."""

    def _affine(self, parameter: Tensor | None, i: int) -> Tensor | None:
        """The part of weight (0) or bias (1) that belongs to the shard, to broadcast against the view."""
        if parameter is None:
            return None
        mine = self.geometry.own_part(parameter) if self.narrows[i] else parameter
        return mine.reshape(self.geometry.affine)

    def _result(self, y: Tensor) -> Tensor:
        y = y if y.dtype == self.dtype else y.to(self.dtype)
        return y.reshape(self.geometry.spec.own_shape)

    # -- backward --------------------------------------------------------------------------------------------------

    def backward(
        self,
        needed: Sequence[bool],
        grads: Sequence[Tensor | None],
        x: Tensor,
        weight: Tensor | None,
        mean: Tensor | None,
        rstd: Tensor,
    ) -> list[Tensor | None]:
        result: list[Tensor | None] = [None] * len(needed)
        if grads[0] is None:
            return result
        grad, x_view = grads[0].reshape(self.geometry.view), x.reshape(self.geometry.view)
        grad = grad if grad.dtype == rstd.dtype else grad.to(rstd.dtype)
        w = self._affine(weight, 0)
        with_x, plain, free = centered(x_view, mean).mul_(grad), grad, None
        if self.inner:
            # Of the shard's size there is one new tensor, which becomes the gradient.
            free, with_x = with_x, with_x.sum(self.inner, keepdim=True)
            plain = plain.sum(self.inner, keepdim=True)
        with_x = with_x * rstd
        if needed[1]:
            result[1] = self._of_parameter(with_x, 0)
        if self.metas[1:] and needed[2]:
            result[2] = self._of_parameter(plain, 1)
        finish = None if self.total is None else self.total.start(result)
        local = None
        if needed[0]:
            sums = [self._sum(t, w) for t in ((with_x,) if mean is None else (with_x, plain))]
            local = self._of_input(grad, x_view, mean, rstd, w, sums, free)
            local = (local if local.dtype == x.dtype else local.to(x.dtype)).reshape(x.shape)
        result = result if finish is None else finish()
        result[0] = local
        return result

    def _of_input(
        self,
        grad: Tensor,
        x: Tensor,
        mean: Tensor | None,
        rstd: Tensor,
        w: Tensor | None,
        sums: list[Tensor],
        free: Tensor | None,
    ) -> Tensor:
        """``rstd * (w * grad - mean(w * grad) - xhat * mean(w * grad * xhat))``.

        Args:
            sums: of ``w * grad * xhat``, and if centered of ``w * grad``, over the normalized dims of this shard.
            free: memory for the result, if there is any.
        """
        means = torch.stack(sums).div_(max(self.geometry.count, 1))
        for merge in self.statistics.merges:
            means = all_reduce(means, merge.group) if means.numel() else means
        means.mul_(rstd)
        local = centered(x, mean, free).mul_(means[0].mul_(rstd).neg_())
        if mean is not None:
            local.sub_(means[1])
        if self.inner:
            return local.addcmul_(grad, rstd if w is None else rstd * w)
        return local.addcmul_(grad if w is None else grad * w, rstd)

    def _sum(self, t: Tensor, w: Tensor | None) -> Tensor:
        t = t if w is None else t * w
        return t.sum(self.others, keepdim=True) if self.others else t

    def _of_parameter(self, contribution: Tensor, i: int) -> Tensor:
        """The gradient of weight (0) or bias (1), from what sums to it; zeros for what other ranks hold."""
        meta, geometry = self.metas[i], self.geometry
        assert meta is not None
        mine = contribution.sum_to_size(geometry.affine).to(meta.dtype)
        shape = geometry.spec.own_shape[geometry.first : geometry.first + len(meta.shape)]
        if not self.narrows[i]:
            return mine.reshape(shape)
        full = mine.new_zeros(meta.shape)
        geometry.own_part(full).copy_(mine.reshape(shape))  # type: ignore[union-attr]
        return full

    # -- second derivatives ----------------------------------------------------------------------------------------

    def _differentiable(self, x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        """The same in operators that autograd differentiates."""
        y = x.to(self.statistics.dtype)
        y = y - self._average(y) if self.geometry.centered else y
        y = y * (self._average(y * y) + self.geometry.eps).rsqrt()
        y = y if w is None else y * w
        return y if b is None else y + b

    def _average(self, t: Tensor) -> Tensor:
        total = _SumOverRanks.apply(t.sum(self.geometry.dims, keepdim=True), self.statistics)
        return total / max(self.geometry.count, 1)


class _SumOverRanks(AutogradFunction):
    """The sum of what the ranks contribute, of which every rank makes use: so its adjoint is such a sum, too."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, statistics: Statistics) -> Tensor:  # type: ignore[override]
        ctx.statistics = statistics
        for merge in statistics.merges:
            value = all_reduce(value, merge.group) if value.numel() else value
        return value if statistics.merges else value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _SumOverRanks.apply(grad, ctx.statistics), None
