"""Mean and variance over sharded dims.

Each rank takes mean and variance of its own shard, in two passes or by Welford's method (see ``kernels.py``). The
ranks' pairs are gathered and merged, weighted with the share of elements that the spec says each rank has. So a large
mean costs no more precision than on one device, and unequal and empty shards are exact. Every rank merges the same
numbers in the same order, so running statistics stay equal. That takes one small all-gather in forward per mesh dim
that shards a normalized dim (two small all-reduces on a large mesh dim), and one small all-reduce in backward. Without
centering (RMS norm), the mean square is the only moment.

Source: T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances" (1979).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from ..._compat import TensorMeta, constant_like, counting_writes
from ..._compat.c10d import group_along
from ...communication.redistribute import all_gather, all_reduce, redistribute_local
from ...dispatch.tensor import redistribute_to
from ...layout.placements import AxisLayout
from ...ranks.history import calling
from ..common.alignment import wide_dtype
from .geometry import Geometry

# Ranks up to which all of them get all moments.
GATHERING = 16

Moments = Sequence[Tensor]  # mean and biased variance of each set, or mean square alone; of replicas their count, too


class Merge:
    """The ranks' moments along one mesh dim, merged.

    Few ranks gather all moments: one message. Among many ranks that would take time and memory in proportion to their
    number, so these sum the means first, and then, with the global mean known, the squares of deviations from it.
    """

    def __init__(
        self, mesh: DeviceMesh, mesh_dim: int, sizes: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.group: dist.ProcessGroup = group_along(mesh, mesh_dim)
        total = sum(sizes)
        self.share = sizes[mesh.get_local_rank(mesh_dim)] / total
        self.gathers = len(sizes) <= GATHERING
        if self.gathers:
            self.held = [rank for rank, size in enumerate(sizes) if size]
            self.partly = len(self.held) < len(sizes)
            self.shares = [sizes[rank] / total for rank in self.held]
            self.weights = torch.tensor(self.shares, dtype=dtype, device=device).view(-1, 1)

    def __call__(self, moments: Moments) -> Moments:
        if not self.gathers:
            return self._summed(*moments)
        parts = all_gather(torch.stack(list(moments)), self.group)
        parts = self.of_those_that_have_any(parts) if self.partly else parts
        if len(self.held) == 1:
            return parts[0].unbind()
        if len(self.held) == 2:
            return self._merge_two(*parts.flatten(0, 1).unbind())
        weights = constant_like(self.weights, parts)
        if len(moments) == 1:
            return [(weights * parts[:, 0]).sum(0)]
        means, variances = parts.unbind(1)
        return _merged(means, variances, weights)

    def of_those_that_have_any(self, parts: Tensor, dim: int = 0) -> Tensor:
        """What was gathered, one entry of ``dim`` from each rank, without what ranks sent whose shard is empty."""
        return torch.stack([parts.select(dim, rank) for rank in self.held], dim) if self.partly else parts

    def _summed(self, mean: Tensor, var: Tensor | None = None) -> Moments:
        total = all_reduce(mean * self.share, self.group)
        if var is None:
            return [total]
        offset = mean - total
        return [total, all_reduce(torch.addcmul(var, offset, offset).mul_(self.share), self.group)]

    def _merge_two(self, *parts: Tensor) -> Moments:
        """The most frequent case in fewer operators."""
        share = self.shares[1]
        if len(parts) == 2:
            return [torch.lerp(*parts, share)]
        mean, var, other, of_other = parts
        offset, var = other - mean, torch.lerp(var, of_other, share)
        return [mean.add(offset, alpha=share), var.addcmul_(offset, offset, value=self.shares[0] * share)]


def _merged(means: Tensor, variances: Tensor, weights: Tensor) -> Moments:
    """Mean and variance of everything, from those of parts with these shares."""
    # Relative to one of the means, so that what they have in common is not rounded.
    first = means[0]
    offsets = means - first
    shift = (weights * offsets).sum(0)
    variances = torch.addcmul(variances, offsets.sub_(shift), offsets)
    return [first + shift, (weights * variances).sum(0)]


class Replicas:
    """The batches of several meshes, as the ranks of a process group have them.

    How many elements another mesh has, only its ranks know: the numbers travel with the moments. Where the group has
    several ranks of a mesh, each of them contributes its part of what they all have. Layouts of the meshes may differ,
    so what is communicated does not name this one's.

    Args:
        ranks: how many ranks of this mesh are in the group.
        count: how many elements of this mesh's tensor share a mean.
    """

    _NAME = "SyncBatchNorm over the meshes of its process group"

    def __init__(self, group: dist.ProcessGroup, ranks: int, count: int) -> None:
        self._group, self._ranks, self._count = group, ranks, count

    def __call__(self, moments: Moments) -> Moments:
        """Means, variances and numbers of elements of all meshes, from the moments of this one."""
        own = torch.full_like(moments[0], self._count / self._ranks)
        with calling(self._NAME, whoever_calls=True):
            means, variances, counts = all_gather(torch.stack([*moments, own]), self._group).unbind(1)
        total = counts.sum(0)
        return [*_merged(means, variances, counts / total), total]

    def sum(self, value: Tensor) -> Tensor:
        """The sum over meshes of a value that the ranks of each have alike."""
        with calling(self._NAME, whoever_calls=True):
            return all_reduce(value / self._ranks, self._group)


class RunningStatistics:
    """The running mean and variance of batch norm (dim 0 is normalized) or instance norm."""

    def __init__(self, geometry: Geometry, momentum: float) -> None:
        spec, sharded = geometry.spec, geometry.spec.sharded_dims()
        self.momentum, self._dtype = momentum, wide_dtype(spec.tensor_meta.dtype)
        self._shape = 2, geometry.samples, spec.own_shape[1]
        self._unbiased = geometry.count / (geometry.count - 1) if geometry.count != 1 else float("nan")
        # Instance norm keeps the mean over the batch.
        self._batch = None if 0 in geometry.dims else spec.shape[0]
        self._group = group_along(spec.mesh, sharded[0]) if self._batch is not None and 0 in sharded else None
        # A graph that has saved the buffers goes on after torch's batch norm, and not after its instance norm.
        self._write = counting_writes(Tensor.lerp_, counts=self._batch is not None)
        self._channels = None
        if 1 in sharded:
            m = sharded[1]
            both = TensorMeta(torch.Size((2, spec.shape[1])), (spec.shape[1], 1), self._dtype)
            whole = spec.replicated().replace(meta=both)
            self._channels = whole.with_axes({m: AxisLayout(Shard(1), spec.sizes[m])})

    def may_be_updated(self, var: Tensor | None) -> bool:
        """Whether a kernel may update the variance, which has the rank's own channels and all that they need."""
        return var is not None and var.dtype == self._dtype and self._batch is None and self._channels is None

    def update(self, buffers: Sequence[Tensor | None], moments: Moments) -> None:
        """Update the buffers with the moments of all ranks; the second one is not, where there are no variances."""
        mean, *others = moments
        values: Moments = [mean]
        if others:
            var, *count = others
            values = [mean, var * (count[0] / (count[0] - 1) if count else self._unbiased)]
        if self._batch is not None or self._channels is not None:
            values = self._of_all_channels(torch.stack(list(values)))
        for buffer, value in zip(buffers, values, strict=False):
            if buffer is not None:
                self._write(buffer, value if buffer.dtype == value.dtype else value.to(buffer.dtype), self.momentum)

    def _of_all_channels(self, new: Tensor) -> Sequence[Tensor]:
        """Mean and variance of each channel of the global tensor, from those of this shard's samples and channels."""
        if self._batch is not None:
            new = new.view(self._shape).sum(1) / self._batch
            if self._group is not None:
                new = all_reduce(new, self._group)
        if self._channels is not None:
            new = redistribute_local(new, self._channels, self._channels.replicated())
        return new.unbind()


def moments_of(x: Any, dims: Sequence[int], eps: float, dtype: torch.dtype) -> list[Tensor]:
    """Mean and reciprocal standard deviation of a ShardTensor, as torch's operators return them with their result.

    Args:
        dims: of the input, which are normalized over and stay with length 1.
    """
    x = x.to(wide_dtype(x.dtype))  # squares overflow in half precision
    mean = x.mean(dims, keepdim=True)
    mean = redistribute_to(mean, mean._spec.for_gradient())
    var = (x - mean).square().mean(dims, keepdim=True)
    return [t.to(dtype) for t in (mean, (var + eps).rsqrt())]
