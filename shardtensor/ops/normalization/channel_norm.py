"""The plan of group, batch and instance norm over shards: statistics of all ranks, then torch's kernels.

The kernel of batch norm with given statistics scales every channel in one pass, and its gradient's kernel sums what the
gradients of weight, bias and statistics are made of. Group and instance norm are batch norm of a batch of one, whose
channels are those of all samples. The kernels take contiguous shards; others are computed by elementwise operators,
which know every order of memory. Each rank decides that for itself: what is sent is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..._compat import kernel
from ...operators import Arguments, Operand
from ...parameters import start_sum
from ...redistribute import start_all_reduce
from .geometry import Geometry
from .sharded_norm import ShardedNorm
from .statistics import Merge, centered

__all__ = ["ChannelNorm"]

_sums_of_gradient = kernel(torch.ops.aten.native_batch_norm_backward.default)


class ChannelNorm(ShardedNorm):
    """Normalization over groups of entire channels.

    In what follows a *set* is what shares a mean: a group of a sample, or a channel of the whole batch. Without weight
    and bias a set counts as one channel. Numbers are kept per channel, for all samples that have sets of their own.
    """

    def __init__(self, call: Arguments, geometry: Geometry, dtype: torch.dtype, *parameters: Operand | None) -> None:
        super().__init__(call, geometry, dtype, *parameters)
        view, of_sets = geometry.view, self.statistics.shape
        plain = all(p is None for p in parameters)
        self.inner = geometry.dims if plain else tuple(d for d in geometry.dims if geometry.affine[d] == 1)
        of_channels = tuple(1 if d in self.inner else n for d, n in enumerate(view))
        self.samples = 1 if 0 in geometry.dims else view[0]
        self.per_sample = torch.Size(geometry.affine).numel()
        self.sets, channels = torch.Size(of_sets).numel(), torch.Size(of_channels).numel()
        self.per_set = channels // max(self.sets, 1)
        # Shapes of a contiguous shard: of the kernels' input and of a number per channel there, and the same of sets.
        batch = view[0] if 0 in geometry.dims else 1
        size = torch.Size(view).numel() // max(batch * channels, 1)
        self.of_kernel = (batch, channels, size)
        self.flat = (batch, channels, size), (channels, 1), (batch, self.sets, self.per_set * size), (self.sets, 1)
        self.strided = view, of_channels, view, of_sets
        self.merged = [m for m, _ in geometry.merges]
        self.scale = -1 / max(geometry.count, 1)

    # -- forward ---------------------------------------------------------------------------------------------------

    def _normalized(
        self, x: Tensor, moments: Tensor, weight: Tensor | None, bias: Tensor | None, free: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self.per_set == 1:
            moments = moments.view(2, -1)
        else:
            moments = moments.view(2, -1, 1).expand(2, self.sets, self.per_set).reshape(2, -1)
        mean, var = moments.unbind()
        w, b, eps = self._of_channels(weight, 0), self._of_channels(bias, 1), self.geometry.eps
        if self.statistics.empty:
            return torch.empty_like(x, dtype=self.dtype), (moments,)
        if x.is_contiguous():
            x_view = x.view(self.of_kernel)
            x_view = x_view if x.dtype == self.dtype else x_view.to(self.dtype)
            return torch.native_batch_norm(x_view, w, b, mean, var, False, 0.0, eps)[0].view(x.shape), (moments,)
        view, number, *_ = self.strided
        rstd = (var + eps).rsqrt_()
        y = centered(x.reshape(view), mean.view(number), free).mul_((rstd if w is None else rstd * w).view(number))
        y = y if b is None else y.add_(b.view(number))
        return (y if y.dtype == self.dtype else y.to(self.dtype)).reshape(x.shape), (moments,)

    def _of_channels(self, parameter: Tensor | None, i: int) -> Tensor | None:
        """The part of weight (0) or bias (1) that belongs to the shard, for the channels of all samples."""
        mine = self._own(parameter, i)
        if mine is None:
            return None
        mine = mine if self.samples == 1 else mine.repeat(self.samples)
        return mine if mine.dtype == self.statistics.dtype else mine.to(self.statistics.dtype)

    # -- backward --------------------------------------------------------------------------------------------------

    def backward(
        self,
        needed: Sequence[bool],
        grads: Sequence[Tensor | None],
        x: Tensor,
        weight: Tensor | None,
        moments: Tensor,
    ) -> list[Tensor | None]:
        result: list[Tensor | None] = [None] * len(needed)
        grad, given = grads[0], x.dtype
        if grad is None:
            return result
        x, grad = (t if t.dtype == self.dtype else t.to(self.dtype) for t in (x, grad))
        w = self._of_channels(weight, 0)
        mean, var = moments.unbind()
        rstd = (var + self.geometry.eps).rsqrt_()
        if x.is_contiguous():
            grad, free = grad.contiguous(), None
            local = self._sums(x, grad, mean, var)
        else:
            local, free = self._sums_elementwise(x, grad, mean, rstd)
        finish_sums = self._start_totals(needed, local, w)
        if needed[0]:  # begun while the sums travel
            _, _, sets, of_set = self.strided if free is not None else self.flat
            dx = centered(x.reshape(sets), self._once_per_set(mean).reshape(of_set), free)
        totals, result[1:3] = finish_sums()
        finish = self._start_rest(result)
        if needed[0]:
            dx = self._of_input(dx, grad, rstd, w, totals, free is None)
            result[0] = (dx if dx.dtype == given else dx.to(given)).reshape(x.shape)
        return result if finish is None else [result[0], *finish()[1:]]

    def _sums(self, x: Tensor, grad: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        """The sums of ``grad * xhat`` and of ``grad`` over each channel of this shard, ``(2, channels)``."""
        if self.statistics.empty:
            return mean.new_zeros(2, len(mean))
        given = grad.view(self.of_kernel), x.view(self.of_kernel), None, mean, var, None, None
        _, *sums = _sums_of_gradient(*given, False, self.geometry.eps, [False, True, True])
        return torch.stack(sums)

    def _sums_elementwise(self, x: Tensor, grad: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        """The same in any order of memory; and memory of the shape of ``x`` that is free for use."""
        view, number, *_ = self.strided
        grad = grad.reshape(view).to(mean.dtype)
        products = centered(x.reshape(view), mean.view(number)).mul_(grad)
        sums = [t.sum(self.inner).reshape(-1) for t in (products, grad)]
        return torch.stack([sums[0].mul_(rstd), sums[1]]), products

    def _start_totals(
        self, needed: Sequence[bool], local: Tensor, w: Tensor | None
    ) -> Callable[[], tuple[Tensor, list[Tensor | None]]]:
        """Start the sum over ranks. The function that is returned gives the sums ``(2, sets)`` of ``w * grad * xhat``
        and ``w * grad``, and the gradients of weight and bias, summed over the mesh dims over which statistics are, in
        the same message.
        """
        wanted = [i for i in (0, 1) if needed[i + 1]]
        summed = [i for i in wanted if self.total is not None and self.total.needed[i + 1]]
        if len(summed) == 2 and self.samples == 1:  # they tell the sets' sums, too
            pending = self._start(local)

            def parameters_and_sets() -> tuple[Tensor, list[Tensor | None]]:
                sums = pending()
                return self._of_sets(sums, w), [self._of_parameter(t, i) for i, t in enumerate(sums.unbind())]

            return parameters_and_sets
        of_parameters = local.view(2, self.samples, self.per_sample).sum(1) if wanted else local
        pieces = [self._of_sets(local, w).view(-1) if needed[0] else local[:0, 0], *(of_parameters[i] for i in summed)]
        pending = self._start(torch.cat(pieces))

        def finish() -> tuple[Tensor, list[Tensor | None]]:
            sums, *totals = pending().split_with_sizes([t.numel() for t in pieces])
            found = dict(zip(summed, totals, strict=True))
            gradients = [self._of_parameter(found.get(i, of_parameters[i]), i) if i in wanted else None for i in (0, 1)]
            return sums.view(2, -1), gradients

        return finish

    def _of_sets(self, sums: Tensor, w: Tensor | None) -> Tensor:
        sums = sums if w is None else sums * w
        return sums if self.per_set == 1 else sums.view(2, self.sets, self.per_set).sum(-1)

    def _start(self, sums: Tensor) -> Callable[[], Tensor]:
        """Start the sum over the mesh dims over which statistics are; only the first one's is under way."""
        merges = self.statistics.merges if sums.numel() else ()
        if not merges:
            return lambda: sums
        first = start_all_reduce(sums, merges[0].group, overwrite=True)
        return first if len(merges) == 1 else lambda: self._sum_over(first(), merges[1:])

    def _sum_over(self, sums: Tensor, merges: Sequence[Merge]) -> Tensor:
        for merge in merges:
            sums = start_all_reduce(sums, merge.group, overwrite=True)()
        return sums

    def _start_rest(self, grads: list[Tensor | None]) -> Callable[[], list[Tensor | None]] | None:
        """Start the sum of the parameters' gradients over the mesh dims that shard other dims."""
        total = self.total
        rest = [] if total is None else [m for m in total.mesh_dims if m not in self.merged]
        if not rest or total is None:
            return None
        mine = [g if need else None for g, need in zip(grads, total.needed, strict=True)]
        if all(g is None for g in mine):
            return None
        finish = start_sum(mine, total.mesh, rest)
        return lambda: [g if t is None else t for g, t in zip(grads, finish(), strict=True)]

    def _once_per_set(self, of_channels: Tensor) -> Tensor:
        return of_channels if self.per_set == 1 else of_channels.view(self.sets, self.per_set)[:, :1]

    def _of_input(
        self, centered: Tensor, grad: Tensor, rstd: Tensor, w: Tensor | None, totals: Tensor, flat: bool
    ) -> Tensor:
        """``rstd * (w * grad - mean(w * grad) - xhat * mean(w * grad * xhat))``, in place of ``x - mean``."""
        channels, of_channel, _, of_set = self.flat if flat else self.strided
        rstd_of_sets = self._once_per_set(rstd).reshape(-1)
        means = totals * (rstd_of_sets * self.scale)
        centered.mul_((means[0] * rstd_of_sets).view(of_set)).add_(means[1].view(of_set))
        scale = (rstd if w is None else rstd * w).view(of_channel)
        grad = grad if grad.dtype == centered.dtype else grad.to(centered.dtype)
        return centered.view(channels).addcmul_(grad.reshape(channels), scale)
