"""The plans of normalizations whose ranks have to communicate: their common part, and that of layer and RMS norm.

Layer and RMS norm have a weight for each normalized element, so torch's kernels cannot be given the statistics of all
ranks: elementwise operators on the centered shard, most of them in place. The input is centered before it is scaled, as
``x * scale + shift`` would lose a large mean's digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._compat import AutogradFunction
from ...communication.redistribute import all_reduce
from ...operators.declaration import Arguments, Operand
from .geometry import Geometry
from .norm import Kept, Norm
from .statistics import Statistics, centered


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
