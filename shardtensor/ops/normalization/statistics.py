"""Mean and variance over sharded dims.

[Note: statistics] Each rank takes mean and variance of its own shard, in two passes or by Welford's method (on CPUs by
the kernel of layer norm, whose result is dropped: it takes a tenth of the time of torch.var_mean). E[x²] - E[x]² takes
a quarter of that, and is used on CPUs where the mean is no greater than the standard deviation, so that the difference
costs at most a factor of two in precision. Channels that are last in memory are added up by a kernel of batch norm,
block by block (``columns.py``), where no mean is far from zero. The ranks' pairs are gathered and merged, weighted with
the share of elements that the spec says each rank has. A large mean so costs no more precision than on one device,
unequal and empty shards are exact, and every rank merges the same numbers in the same order, so running statistics stay
equal. That is one small all-gather in forward per mesh dim that shards a normalized dim (two small all-reduces on a
large one), and one small all-reduce in backward.

Source: T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances" (1979).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ..._compat import constant_like, is_traced, untraced
from ..._compat.c10d import group_along
from ...communication.redistribute import all_gather, all_reduce
from ...dispatch.tensor import wrap
from ...layout.spec import ShardTensorSpec
from ..common.alignment import wide_dtype
from .columns import Columns, channels_are_last
from .geometry import Geometry

# Elements of a shard up to which torch.var_mean, which is slow on CPUs, takes less time than several operators.
_FEW = 1 << 11
# Ranks up to which all of them get all moments.
GATHERING = 16
# Elements of a row from which the kernel of layer norm takes less time.
_ROW = 16
# Bounds of how many squares are added up one after the other: more lose precision, fewer take time.
_PIECE = range(64, 513)


class Statistics:
    """Mean and variance of one geometry's sets of elements, and what they can be computed with: made once.

    Attributes:
        columns: how to go through a shard that has its channels last; None where there is another way only.
        replicas: what merges them with those of other meshes, if there are any.
    """

    columns: Columns | None = None
    replicas: Replicas | None = None

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        view, dims = geometry.view, geometry.dims
        self.dims, self.centered = dims, geometry.centered
        self.dtype = wide_dtype(geometry.spec.tensor_meta.dtype)
        self.shape = _reduced(view, dims)
        self.sets, self.empty, self.smallest = math.prod(self.shape), 0 in view, torch.finfo(self.dtype).tiny
        self.on_cpu, self.few = device.type == "cpu", math.prod(view) <= _FEW
        # Rows: the last dims, as far as they are normalized over.
        last = max((d + 1 for d in range(len(view)) if d not in dims), default=0)
        self.row, self.row_shape = math.prod(view[last:]), _reduced(view, range(last, len(view)))
        # Dims that are reduced first where memory is in another order: not channels.
        self.first = tuple(d for d in dims if geometry.affine[d] == 1) or dims
        self.view, self.in_rows = view, self.on_cpu and self.row >= _ROW
        self.piece = max((n for n in _PIECE if self.row % n == 0), default=0)
        self.merges = [Merge(geometry.spec.mesh, m, sizes, self.dtype, device) for m, sizes in geometry.merges]

    def of(self, x: Tensor) -> Tensor:
        """Mean and biased variance ``(2, sets)`` of the global sets of elements, in float32 at least.

        Not centered, the mean square alone ``(1, sets)``. With :attr:`replicas`, the number of elements, too: ``(3,
        sets)``.
        """
        moments = self._of_shard(x)
        for merge in self.merges:
            moments = merge(moments)
        return moments if self.replicas is None else self.replicas(moments)

    def _of_shard(self, x: Tensor) -> Tensor:
        if self.empty:
            return x.new_zeros((1 + self.centered, self.sets), dtype=self.dtype)
        if not self.centered:
            x = x.reshape(self.view)
            squares = x.square() if x.dtype == self.dtype else x.to(self.dtype).square_()
            return squares.mean(self.dims).view(1, -1)
        x = x if x.dtype == self.dtype else x.to(self.dtype)
        if self.in_rows and x.is_contiguous() and not is_traced(x):
            return self._of_rows(x)
        if not self.on_cpu or self.few or is_traced(x):
            var, mean = torch.var_mean(x.reshape(self.view), self.dims, correction=0)
            return torch.stack((mean, var)).view(2, -1)
        if self.columns is not None and channels_are_last(x):
            moments = self.columns.moments(x, self.sets)
            if moments is not None:
                return moments
        return self._in_passes(x.reshape(self.view))

    def _of_rows(self, x: Tensor) -> Tensor:
        moments = None if self.few or not self.piece else self._by_squares(x)
        return self._joined((self._by_layer_norm(x) if moments is None else moments).view(2, *self.row_shape))

    def _by_squares(self, x: Tensor) -> Tensor | None:
        mean = x.view(-1, self.row).mean(1)
        norms = torch.linalg.vector_norm(x.view(-1, self.piece), dim=1)
        squares = norms.square_().view(-1, self.row // self.piece).mean(1).div_(self.piece)
        var = torch.addcmul(squares, mean, mean, value=-1)
        return torch.stack((mean, var)) if bool((squares <= 2 * var).all()) else None

    def _by_layer_norm(self, x: Tensor) -> Tensor:
        # So small an eps that the reciprocal standard deviation gives any variance back, and is finite for zero.
        _, mean, rstd = torch.native_layer_norm(x.view(-1, self.row), (self.row,), None, None, self.smallest)
        return torch.stack((mean, rstd.pow_(-2)))

    def _in_passes(self, x: Tensor) -> Tensor:
        dims = self.first
        mean = x.mean(dims, keepdim=True)
        deviations = centered(x, mean)
        # What rounding the mean has left; the second pass is of numbers around zero, so it is known exactly.
        rest = deviations.mean(dims, keepdim=True)
        var = deviations.square_().mean(dims, keepdim=True).addcmul_(rest, rest, value=-1).clamp_(min=0)
        return self._joined(torch.stack((mean.add_(rest), var)))

    def _joined(self, moments: Tensor) -> Tensor:
        """Mean and variance of sets of elements, from those of equally large parts of them, in the view's dims."""
        if moments[0].numel() != self.sets:
            mean, var = moments.unbind()
            of_means, mean = torch.var_mean(mean, self.dims, correction=0)
            moments = torch.stack((mean, var.mean(self.dims).add_(of_means)))
        return moments.view(2, -1)


def _reduced(shape: Sequence[int], dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(1 if d in dims else n for d, n in enumerate(shape))


def centered(x: Tensor, mean: Tensor | None) -> Tensor:
    """``x - mean`` (or ``x``, if there is no mean) in float32 at least, as a new tensor."""
    if mean is not None and x.dtype == mean.dtype:
        return torch.sub(x, mean)
    # Operators on tensors of two dtypes take several times as long as a conversion.
    copy = x.to(wide_dtype(x.dtype), copy=True)
    return copy if mean is None else copy.sub_(mean)


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
            with torch.inference_mode(False), untraced():
                self.weights = torch.tensor(self.shares, dtype=dtype, device=device).view(-1, 1)

    def __call__(self, moments: Tensor) -> Tensor:
        """Means and variances ``(2, sets)`` of parts, or mean squares ``(1, sets)``, to those of all elements."""
        if not self.gathers:
            return self._summed(moments)
        parts = all_gather(moments, self.group)
        if self.partly:
            parts = torch.stack([parts[rank] for rank in self.held])
        if len(self.held) == 1:
            return parts[0]
        return self._merge_two(*parts.unbind()) if len(self.held) == 2 else self._merge(parts)

    def _summed(self, moments: Tensor) -> Tensor:
        if moments.shape[0] == 1:
            return all_reduce(moments * self.share, self.group)
        mean, var = moments.unbind()
        total = all_reduce(mean * self.share, self.group)
        offsets = mean - total
        return torch.stack((total, all_reduce(torch.addcmul(var, offsets, offsets).mul_(self.share), self.group)))

    def _merge_two(self, a: Tensor, b: Tensor) -> Tensor:
        """The most frequent case in fewer operators."""
        total = torch.lerp(a, b, self.shares[1])
        if a.shape[0] > 1:
            offset = b[0] - a[0]
            total[1].addcmul_(offset, offset, value=self.shares[0] * self.shares[1])
        return total

    def _merge(self, parts: Tensor) -> Tensor:
        weights = constant_like(self.weights, parts)
        if parts.shape[1] == 1:
            return (weights * parts[:, 0]).sum(0, keepdim=True)
        means, variances = parts.unbind(1)
        return _merged(means, variances, weights)


def _merged(means: Tensor, variances: Tensor, weights: Tensor) -> Tensor:
    """Mean and variance of everything, from those of parts with these shares."""
    # Relative to one of the means, so that what they have in common is not rounded.
    first = means[0]
    offsets = means - first
    shift = (weights * offsets).sum(0)
    variances = torch.addcmul(variances, offsets.sub_(shift), offsets)
    return torch.stack([first + shift, (weights * variances).sum(0)])


class Replicas:
    """The batches of several meshes, as the ranks of a process group have them.

    How many elements another mesh has, only its ranks know: the numbers travel with the moments. Where the group has
    several ranks of a mesh, each of them contributes its part of what they all have.

    Args:
        ranks: how many ranks of this mesh are in the group.
        count: how many elements of this mesh's tensor share a mean.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: int, count: int) -> None:
        self._group, self._ranks, self._count = group, ranks, count

    def __call__(self, moments: Tensor) -> Tensor:
        """Means, variances and numbers of elements ``(3, sets)`` of all meshes, from the moments of this one."""
        own = moments.new_full((1, moments.shape[1]), self._count / self._ranks)
        means, variances, counts = all_gather(torch.cat([moments, own]), self._group).unbind(1)
        total = counts.sum(0, keepdim=True)
        return torch.cat([_merged(means, variances, counts / total), total])

    def sum(self, value: Tensor) -> Tensor:
        """The sum over meshes of a value that the ranks of each have alike."""
        return all_reduce(value / self._ranks, self._group)


def moments_of(x: Tensor, geometry: Geometry, shape: Sequence[int], dims: Mapping[int, int]) -> list[Tensor]:
    """Mean and reciprocal standard deviation as ShardTensors, as torch's operators return them with their result.

    Args:
        x: the local shard.
        shape: theirs.
        dims: ``{dim of the input: their dim}``.
    """
    source, sizes = geometry.spec, {}
    placements: list[Placement] = [Replicate()] * source.mesh.ndim
    for d, m in source.sharded_dims().items():
        if d in dims:
            placements[m], sizes[m] = Shard(dims[d]), source.sizes_along(m)
    with torch.no_grad():
        mean, var = Statistics(geometry, x.device).of(x).unbind()
        spec = ShardTensorSpec.make(source.mesh, placements, shape, mean.dtype, shard_sizes=sizes)
        return [wrap(t.reshape(spec.local_shape()), spec) for t in (mean, (var + geometry.eps).rsqrt())]
