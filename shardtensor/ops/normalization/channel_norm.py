"""The plan of group, batch and instance norm over shards: statistics of all ranks, then torch's kernels.

The kernel of batch norm with given statistics scales every channel in one pass, and its gradient's kernel sums what the
gradients of weight, bias and statistics are made of. Group and instance norm are batch norm of a batch of one, whose
channels are those of all samples. That is for contiguous shards; for those with their channels last see ``columns.py``,
and others are copied. Each rank decides that for itself: what is sent is the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...communication.redistribute import start_sums
from ...communication.tracing import is_traced
from ...operators.declaration import Arguments, Operand
from ...operators.weight_gradients import GradientSum, contributing
from .columns import Columns, channels_are_last, columns_of, sums_of_channels
from .geometry import Geometry
from .norm import Kept
from .sharded_norm import ShardedNorm


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
        self.samples = 1 if 0 in geometry.dims else view[0]
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

    # -- forward ---------------------------------------------------------------------------------------------------

    def _forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *buffers: Tensor | None) -> Kept:
        if torch.is_grad_enabled() or x.is_contiguous() or self._columns(x) is not None:
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
        return mine.repeat(self.samples).to(self.statistics.dtype)  # type: ignore[union-attr]

    # -- backward --------------------------------------------------------------------------------------------------

    def backward(
        self, needed: Sequence[bool], grads: Sequence[Tensor | None], x: Tensor, weight: Tensor | None, moments: Tensor
    ) -> list[Tensor | None]:
        result: list[Tensor | None] = [None] * len(needed)
        grad, given = grads[0], x
        if grad is None:
            return result
        if x.dtype != moments.dtype or grad.dtype != moments.dtype:
            x, grad = x.to(moments.dtype), grad.to(moments.dtype)
        w, columns = self._of_channels(weight, 0), None if x.is_contiguous() else self._columns(x)
        if columns is None:
            x, grad = x.contiguous().view(self.channels), grad.contiguous().view(self.channels)
        mean, rstd = moments[0], (moments[1] + self.geometry.eps).rsqrt_()
        if self.empty:
            sums = moments.new_zeros(2, moments.shape[1])
        else:
            sums = (sums_of_channels if columns is None else columns.sums)(x, grad, mean, rstd)
        totals, result[1:3] = self._totals(needed, sums, w)
        if self.statistics.replicas is not None and needed[0]:
            totals = self.statistics.replicas.sum(totals)
        finish = None
        if self.total is not None and self.rest:
            finish = GradientSum(self.total.mesh, self.rest, self.total.needed).start(result)
        if needed[0]:
            dx = torch.empty_like(x) if self.empty else self._of_input(x, grad, moments, rstd, w, totals, columns)
            dx = (dx if dx.dtype == given.dtype else dx.to(given.dtype)).reshape(given.shape)
            copied = columns is None and not given.is_contiguous()
            result[0] = torch.empty_like(given).copy_(dx) if copied else dx
        return result if finish is None else [result[0], *finish()[1:]]

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
        if self.per_set != 1 and columns is None and is_traced(x):  # compilers fuse what has one view, by channels
            totals = totals.unsqueeze(-1).expand(2, self.sets, self.per_set).reshape(2, -1)
            view_of_sets = self.channels
        elif self.per_set != 1:
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
