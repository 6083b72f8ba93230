"""Mean and variance over sharded dims: which elements share them, and which of those this rank holds.

[Note: statistics] Each rank takes mean and variance of its own shard, in two passes or by Welford's method (on CPUs by
the kernel of layer norm, whose result is dropped: it takes a tenth of the time of torch.var_mean). Channels that are
last in memory are added up by a kernel of batch norm, block by block (:class:`Columns`), where no mean is far from
zero. The ranks' pairs are gathered and merged, weighted with the share of elements that the spec says each rank has. A
large mean so costs no more precision than on one device, unequal and empty shards are exact, and every rank merges the
same numbers in the same order, so running statistics stay equal. That is one small all-gather in forward per mesh dim
that shards a normalized dim (two small all-reduces on a large one), and one small all-reduce in backward.

Source: T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances" (1979).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..._compat import TensorMeta, constant_like, has_kernels_of_sync_batch_norm, is_traced, kernel, untraced
from ..._compat.c10d import group_along
from ...communication.redistribute import all_gather, all_gather_each, all_reduce
from ...communication.tracing import goes_into_graph
from ...dispatch.tensor import ShardTensor, redistribute_to
from ...layout.geometry import map_boundaries
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Operand
from ..common.alignment import free_dims, local_part, redistributed, wide_dtype
from .in_graphs import moments_in_graph

# -- geometry ----------------------------------------------------------------------------------------------------------

# What a normalization over shards follows from: which elements share statistics, and which of them this rank holds.


@dataclass(frozen=True)
class Geometry:
    """Which elements share statistics, as one rank sees it.

    Attributes:
        name: of the operator, for errors.
        spec: of the input.
        view: local shape, of as many dims as it takes to make the normalized elements entire dims of it.
        dims: dims of the view that are normalized over.
        affine: shape of weight and bias that broadcasts against the view.
        first: the input's dim that the first dim of weight and bias belongs to.
        merges: ``(mesh dim, its shard sizes)`` for the mesh dims that shard a normalized dim.
        count: how many elements of the global tensor share a mean.
        eps: added to the variance.
        centered: False where the mean is not subtracted (RMS norm).
    """

    name: str
    spec: ShardTensorSpec
    view: tuple[int, ...]
    dims: tuple[int, ...]
    affine: tuple[int, ...]
    first: int
    merges: tuple[tuple[int, tuple[int, ...]], ...]
    count: int
    eps: float
    centered: bool = True

    @cached_property
    def intervals(self) -> tuple[tuple[int, int, int], ...]:
        """``(dim, start, length)`` of what belongs to this rank's shard of a weight and bias, where that is a part."""
        held = ((d - self.first, self.spec.interval(m)) for d, m in self.spec.sharded_dims().items())
        return tuple((d, start, stop - start) for d, (start, stop) in held if d >= 0)

    @property
    def has_empty_shards(self) -> bool:
        """Whether any rank's shard is empty: all ranks use the same kernel, so that their second derivatives
        communicate alike.
        """
        sizes = [self.spec.sizes_along(m) for m in self.spec.sharded_dims().values()]
        return 0 in self.spec.shape or any(0 in of_dim for of_dim in sizes)

    def own_part(self, parameter: Tensor | None) -> Tensor | None:
        """The part of a parameter (or running statistic) that belongs to this rank's shard. A view."""
        if parameter is not None:
            for d, start, n in self.intervals:
                if d < parameter.ndim:
                    parameter = parameter.narrow(d, start, n)
        return parameter

    def own_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of that part of a parameter of a shape."""
        return self.spec.own_shape[self.first : self.first + len(shape)]

    def output_spec(self, dtype: torch.dtype) -> ShardTensorSpec:
        """The spec of a new tensor of this dtype in the input's layout and memory format."""
        spec = self.spec
        with untraced():
            meta = torch.empty_like(torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device="meta"))
        return spec.replace(meta=TensorMeta(meta.shape, meta.stride(), dtype))


def _merges(spec: ShardTensorSpec, dims: Sequence[int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    shared = [m for d, m in spec.sharded_dims().items() if d in dims and spec.mesh.size(m) > 1 and spec.shape[d]]
    return tuple((m, spec.sizes_along(m)) for m in shared)


def geometry_over(
    name: str, spec: ShardTensorSpec, dims: Sequence[int], first: int, last: int, eps: float, centered: bool = True
) -> Geometry:
    """Normalization over dims of the input; weight and bias belong to its dims ``first`` to ``last``, exclusive."""
    local = spec.local_shape()
    affine = tuple(n if first <= d < last else 1 for d, n in enumerate(local))
    count = torch.Size(spec.shape[d] for d in dims).numel()
    return Geometry(name, spec, local, tuple(dims), affine, first, _merges(spec, dims), count, eps, centered)


def geometry_of_last_dims(name: str, spec: ShardTensorSpec, k: int, eps: float, centered: bool = True) -> Geometry:
    """Normalization over the last ``k`` dims."""
    n = len(spec.shape)
    return geometry_over(name, spec, range(n - k, n), n - k, n, eps, centered)


def geometry_of_groups(name: str, spec: ShardTensorSpec, groups: int, eps: float) -> Geometry:
    """Normalization over groups of channels, of which none is sharded, and all spatial dims."""
    per_group = spec.shape[1] // groups
    n, channels, *spatial = spec.local_shape()
    view = (n, channels // per_group, per_group, *spatial)
    affine = (1, *view[1:3], *(1 for _ in spatial))
    over = range(2, len(spec.shape))
    count = per_group * spec.shape[2:].numel()
    return Geometry(name, spec, view, tuple(range(2, len(view))), affine, 1, _merges(spec, over), count, eps)


def with_unsharded_groups(name: str, spec: ShardTensorSpec, groups: int) -> ShardTensorSpec:
    """The spec of the input with no group of channels sharded: its boundaries moved to the nearest ones of groups, or,
    with fewer groups than ranks, another dim sharded.
    """
    per_group, m = spec.shape[1] // groups, spec.sharded_dims().get(1)
    if m is None or not any(n % per_group for n in spec.sizes_along(m)):
        return spec
    if groups < spec.mesh.size(m):
        return free_dims(name, spec, 1)
    sizes = map_boundaries(spec.sizes_along(m), lambda boundary: (boundary + per_group // 2) // per_group * per_group)
    return spec.with_axes({m: AxisLayout(spec.placements[m], sizes)})


# -- parameters ------------------------------------------------------------------------------------------------------


def prepare_parameters(call: Arguments, geometry: Geometry, **parameters: Operand | None) -> None:
    """Have the sharded ones among a call's parameters resharded like the input, and made plain.

    Their gradients are contributions on the mesh dims where only the input is sharded.
    """
    spec = geometry.spec
    for argument, operand in parameters.items():
        if isinstance(operand, ShardTensorSpec):
            layout = [AxisLayout(Replicate())] * spec.mesh.ndim
            for d, m in spec.sharded_dims().items():
                if 0 <= d - geometry.first < len(operand.shape):
                    layout[m] = AxisLayout(Shard(d - geometry.first), spec.sizes[m])
            call.then_do(argument, partial(_local_part, geometry.name, spec, operand.with_layout(layout)))


def _local_part(name: str, spec: ShardTensorSpec, target: ShardTensorSpec, parameter: DTensor) -> Tensor:
    sharded = ShardTensor.from_dtensor(parameter)
    reduced = redistribute_to(sharded, sharded._spec.for_gradient())
    return local_part(redistributed(name, reduced, target), spec)


# -- what torch would return -----------------------------------------------------------------------------------------


def result_dtype(
    call: Arguments, kernel: Callable[..., Tensor], x: ShardTensorSpec, *others: Operand | None
) -> torch.dtype:
    """The dtype of torch's own result, under autocast too, and its own errors for dtypes that do not go together.

    Args:
        kernel: of an input of shape ``(2, 1, 1)`` and parameters of shape ``(1,)``.
    """
    # Asked of torch on two elements rather than copied from its tables, which differ by device and version.
    metas = [t.tensor_meta if isinstance(t, ShardTensorSpec) else t for t in others]
    with torch.no_grad(), untraced():
        small = [None if meta is None else torch.ones(1, dtype=meta.dtype, device=call.device) for meta in metas]
        return kernel(torch.ones(2, 1, 1, dtype=x.tensor_meta.dtype, device=call.device), *small).dtype


# -- columns -----------------------------------------------------------------------------------------------------------

# Shards that have their channels last in memory, as rows of columns, of which several belong to one channel.
#
# The kernels of CPUs that go through such a shard position by position take twice the time where it has few channels,
# and add up all positions one after the other, which costs digits. Here a row is several positions next to each other,
# long enough for vector instructions, and a column is short enough to be added up. To batch norm's kernels a block of
# rows is a batch of vectors.

_batch_norm_backward = kernel(torch.ops.aten.native_batch_norm_backward.default)

# Lengths of rows with which elementwise operators are at their fastest.
_WIDTH = range(256, 2049)
# Lengths of columns that are added up, and how many elements a block of columns has at most: a cache holds it.
_LENGTH = range(64, 513)
_BLOCK = 1 << 17
# How far from zero, in standard deviations, the mean of a column may be whose variance is computed like that.
_FAR = 16.0
# Elements of a sample for which a kernel is called, rather than for all samples in another order of memory.
_SAMPLE = 1 << 12


class Columns:
    """How a shard is divided into rows, and these into blocks, whose columns are added up.

    In what follows, numbers belong to channels, or to sets of as many consecutive ones: of all samples that have
    statistics of their own, one after the other.

    Args:
        samples: how many have statistics of their own.
        channels: of the shard.
        repeats: how many positions are next to each other in a row.
        length: of the columns of a block.
    """

    def __init__(self, samples: int, channels: int, repeats: int, length: int) -> None:
        self.samples, self.channels, self.repeats, self.length = samples, channels, repeats, length
        self.width = repeats * channels

    def moments(self, x: Tensor, sets: int) -> Tensor | None:
        """Mean and variance ``(2, sets)`` of so many sets; None where a column's mean is far from zero.

        Its rounding errors would then be too much of the deviations from it.
        """
        found = [torch.batch_norm_update_stats(block, None, None, 0.0) for block in self._blocks(x)]
        mean, var = found[0] if len(found) == 1 else map(torch.stack, zip(*found, strict=True))
        if not bool(torch.addcmul(var, mean, mean, value=-(_FAR**-2)).min() >= 0):
            return None
        if mean.numel() != sets:
            shape = self.samples, -1, sets // self.samples, self.samples * self.channels // sets
            of_columns, var = mean.view(shape), var.view(shape)
            mean = of_columns.mean((1, 3), keepdim=True)
            offset = of_columns - mean
            var = torch.addcmul(var, offset, offset).mean((1, 3))
        return torch.stack((mean.view(-1), var.view(-1)))

    def sums(self, x: Tensor, grad: Tensor, mean: Tensor, rstd: Tensor) -> Sequence[Tensor]:
        """Numbers for those of ``mean`` and ``rstd``: the sums of ``grad * xhat`` and of ``grad``."""
        given, each = [self._repeated(t) for t in (mean, rstd)], x.numel() // (self.length * self.width * self.samples)
        means, rstds = (t.view(self.samples, -1).unbind() for t in given)
        blocks = enumerate(zip(self._blocks(x), self._blocks(grad), strict=True))
        found = [sums_of_channels(t, g, means[i // each], rstds[i // each]) for i, (t, g) in blocks]
        stacked = torch.stack([t for kind in zip(*found, strict=True) for t in kind])
        per_sample = len(mean) // self.samples
        sums = stacked.view(2, self.samples, -1, per_sample, self.channels // per_sample).sum((2, 4))
        return sums.view(2, -1).unbind()

    def normalized(
        self, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        """``(x - mean) / sqrt(var + eps) * weight + bias``."""
        # What batch norm's kernel does on CPUs, in half the time.
        rstd = (var + eps).rsqrt_()
        scale = rstd if weight is None else rstd * weight
        shift = mean * -scale if bias is None else torch.addcmul(bias, mean, scale, value=-1)
        return _in_shape(self._scaled(x, scale, shift), x)

    def combined(self, x: Tensor, scale: Tensor, shift: Tensor, other: Tensor, scale_of_other: Tensor) -> Tensor:
        """``x * scale + shift + other * scale_of_other``."""
        y = self._scaled(x, scale, shift)
        return _in_shape(y.addcmul_(self._rows(other), self._repeated(scale_of_other)), x)

    def _scaled(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        rows, scale, shift = self._rows(x), *(self._repeated(t) for t in (scale, shift))
        return torch.addcmul(shift, rows if rows.dtype == scale.dtype else rows.to(scale.dtype), scale)

    def _rows(self, x: Tensor) -> Tensor:
        """``(samples, rows, columns)``; a copy of a tensor that has its channels elsewhere."""
        return x.movedim(1, -1).reshape(self.samples, -1, self.width)

    def _blocks(self, x: Tensor) -> Tensor:
        """``(blocks, rows, columns)``."""
        return x.movedim(1, -1).reshape(-1, self.length, self.width)

    def _repeated(self, numbers: Tensor) -> Tensor:
        """Numbers for each column, ``(columns,)``, or of several samples ``(samples, 1, columns)``."""
        per_set = self.samples * self.channels // len(numbers)
        numbers = numbers if per_set == 1 else numbers.repeat_interleave(per_set)
        if self.samples == 1:
            return numbers.repeat(self.repeats)
        return numbers.view(self.samples, 1, self.channels).repeat(1, 1, self.repeats)


def _in_shape(rows: Tensor, x: Tensor) -> Tensor:
    return rows.view(x.shape[0], *x.shape[2:], x.shape[1]).movedim(-1, 1)


def sums_of_channels(x: Tensor, grad: Tensor, mean: Tensor, rstd: Tensor) -> Sequence[Tensor]:
    """The sums of ``grad * xhat`` and of ``grad`` over each channel."""
    # Told to train, the kernels of all devices use the statistics that they are given as saved ones. CUDA's takes from
    # the weight what its results are to be like, and nothing else.
    given = grad, x, rstd, None, None, mean, rstd, True, 0.0, (False, True, True)
    found: Sequence[Tensor] = _batch_norm_backward(*given)[1:]
    return found


def channels_are_last(x: Tensor) -> bool:
    """Whether a tensor ``(N, C, ...)`` has its channels last in memory, and the other dims in order."""
    return x.movedim(1, -1).is_contiguous()


def columns_of(geometry: Geometry, on_cpu: bool) -> Columns | None:
    """For a normalization over entire channels, or groups of them; None where shards that have them last are better
    put in another order: they are not on a CPU, have many small samples, or their positions do not make columns of
    equal length.
    """
    n, channels, *spatial = geometry.spec.own_shape
    samples, positions = (1, n * math.prod(spatial)) if 0 in geometry.dims else (n, math.prod(spatial))
    if not on_cpu or 0 in (samples, positions, channels) or (samples > 1 and positions * channels < _SAMPLE):
        return None
    wide = range(-(-_WIDTH[0] // channels), _WIDTH[-1] // channels + 1)
    repeats = next((k for k in wide if positions % k == 0), 1)
    rows, longest = positions // repeats, max(_LENGTH[0], min(_LENGTH[-1], _BLOCK // (repeats * channels)))
    length = next(k for k in range(min(rows, longest), 0, -1) if rows % k == 0)
    return Columns(samples, channels, repeats, length) if length >= min(rows, _LENGTH[0]) else None


# -- statistics --------------------------------------------------------------------------------------------------------

# Elements of a shard up to which the number of operators is what takes time.
_FEW = 1 << 11
# Ranks up to which all of them get all moments.
GATHERING = 16


class Statistics:
    """Mean and variance of one geometry's sets of elements, and what they can be computed with: made once.

    Attributes:
        samples: how many have sets of their own, where a set consists of entire channels; 0 where it does not.
        columns: how to go through a shard that has its channels last; None where there is another way only.
        replicas: what merges them with those of other meshes, if there are any.
    """

    samples = 0
    columns: Columns | None = None
    replicas: Replicas | None = None

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        view, dims = geometry.view, geometry.dims
        self.dims, self.centered = dims, geometry.centered
        self.dtype = wide_dtype(geometry.spec.tensor_meta.dtype)
        self.shape = _reduced(view, dims)
        self.sets, self.empty, self.smallest = math.prod(self.shape), 0 in view, torch.finfo(self.dtype).tiny
        self.view, self.on_cpu, self.few = view, device.type == "cpu", math.prod(view) <= _FEW
        # Rows: the last dims, as far as they are normalized over.
        last = max((d + 1 for d in range(len(view)) if d not in dims), default=0)
        self.row, self.row_shape = math.prod(view[last:]), _reduced(view, range(last, len(view)))
        # A view of a contiguous shard that batch norm's kernels take the sets of for channels, if there is one.
        self.as_channels: tuple[int, ...] | None = None
        if math.prod(view[:last]) == self.sets:
            self.as_channels = 1, self.sets, self.row
        elif self.sets == view[1]:
            self.as_channels = view[0], self.sets, math.prod(view[2:])
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
        if self.samples and self.on_cpu and goes_into_graph(x):
            return moments_in_graph(x, self.samples, self.sets)
        if self.few and self.on_cpu and self.as_channels is not None and x.is_contiguous() and not is_traced(x):
            return torch.stack(torch.batch_norm_update_stats(x.view(self.as_channels), None, None, 0.0))
        if not self.on_cpu or self.few or is_traced(x):
            var, mean = torch.var_mean(x.reshape(self.view), self.dims, correction=0)
            return torch.stack((mean, var)).view(2, -1)
        if self.columns is not None and channels_are_last(x):
            moments = self.columns.moments(x, self.sets)
            if moments is not None:
                return moments
        return self._joined(self._of_rows(x.contiguous()).view(2, *self.row_shape))

    def _of_rows(self, x: Tensor) -> Tensor:
        # So small an eps that the reciprocal standard deviation gives any variance back, and is finite for zero.
        _, mean, rstd = torch.native_layer_norm(x.view(-1, self.row), (self.row,), None, None, self.smallest)
        return torch.stack((mean, rstd.pow_(-2)))

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
        parts = self.of_those_that_have_any(all_gather(moments, self.group))
        if len(self.held) == 1:
            return parts[0]
        return self._merge_two(*parts.unbind()) if len(self.held) == 2 else self._merge(parts)

    def of_those_that_have_any(self, parts: Tensor, dim: int = 0) -> Tensor:
        """What was gathered, one entry of ``dim`` from each rank, without what ranks sent whose shard is empty."""
        return torch.stack([parts.select(dim, rank) for rank in self.held], dim) if self.partly else parts

    def _summed(self, moments: Tensor) -> Tensor:
        if moments.shape[0] == 1:
            return all_reduce(moments * self.share, self.group)
        mean, var = moments.unbind()
        total = all_reduce(mean * self.share, self.group)
        offsets = mean - total
        return torch.stack((total, all_reduce(torch.addcmul(var, offsets, offsets).mul_(self.share), self.group)))

    def _merge_two(self, a: Tensor, b: Tensor) -> Tensor:
        """The most frequent case in fewer operators."""
        offsets = b - a
        total = torch.add(a, offsets, alpha=self.shares[1])
        if len(a) > 1:
            offset = offsets[0]
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


class DeviceKernels:
    """CUDA's kernels of batch norm over processes, for the sets of one geometry.

    [Note: kernels of devices] CUDA has kernels for batch norm over processes, which torch's ``nn.SyncBatchNorm`` calls:
    statistics of a shard, merged over ranks, and the gradient, each in one. With them the host launches half as many.
    What ranks send are means and reciprocal standard deviations then, so all of them take this way, or none does: what
    it depends on follows from the spec. ``F.group_norm`` on a device copies a tensor that has its channels last; so do
    we.

    Args:
        repeats: how many consecutive channels get the statistics of one set.

    Attributes:
        eps: added to the variance.
    """

    def __init__(self, merge: Merge, geometry: Geometry, sets: int, repeats: int) -> None:
        self.eps = geometry.eps
        self._merge, self._sets, self._repeats, self._centered = merge, sets, repeats, geometry.centered
        self._share = 1 / geometry.count
        with torch.inference_mode(False), untraced():
            self._counts = (merge.weights.view(-1) * geometry.count).round_()
            self._integers = self._counts.to(torch.int32)
            # Of means and reciprocal standard deviations, what is taken relative to a mean.
            self._shifted = self._counts.new_tensor((1.0, 0.0)).view(2, 1, 1, 1).repeat(1, 1, 1, repeats)
            self._eps, self._zeros = self._counts.new_tensor(geometry.eps), self._counts.new_zeros(sets)

    @classmethod
    def of(cls, geometry: Geometry, statistics: Statistics, device: torch.device, repeats: int) -> DeviceKernels | None:
        """None where they do not serve."""
        merges = statistics.merges
        if not has_kernels_of_sync_batch_norm(device.type) or len(merges) != 1 or not merges[0].gathers:
            return None
        # Their indices are in 32 bits; and a part's variance has to be positive with eps for its root.
        if not 0 < geometry.count < 1 << 31 or geometry.eps <= 0:
            return None
        return cls(merges[0], geometry, statistics.sets, repeats)

    def moments(self, x: Tensor | None, running_var: Tensor | None = None, momentum: float = 0.0) -> list[Tensor]:
        """Mean and reciprocal standard deviation for each channel of the sets, of all ranks.

        Args:
            x: the shard, ``(batch, sets, elements)``; None if it is empty.
            running_var: is updated.
        """
        if not self._centered:
            return self._of_squares(x)
        if x is None:
            own: Sequence[Tensor] = self._zeros, self._zeros
        else:
            own = torch.batch_norm_stats(x, self.eps)
        parts = self._merge.of_those_that_have_any(all_gather_each(own, self._merge.group), 1).unsqueeze(-1)
        # Relative to one of the means, so that what they have in common is not rounded; and repeated.
        first = parts[0, 0]
        means, rstds = torch.addcmul(parts, first, self._shifted, value=-1).flatten(2).unbind()
        numbers = None, running_var, momentum, self.eps, self._counts
        mean, rstd = torch.batch_norm_gather_stats_with_counts(means, means, rstds, *numbers)
        mean.view(self._sets, self._repeats).add_(first)
        return [mean, rstd]

    def _of_squares(self, x: Tensor | None) -> list[Tensor]:
        if x is None:
            norm = self._zeros
        else:
            norm = torch.linalg.vector_norm(x, dim=(0, 2), dtype=self._zeros.dtype)
        norm = torch.linalg.vector_norm(all_gather(norm, self._merge.group), dim=0)
        return [self._zeros, torch.addcmul(self._eps, norm, norm, value=self._share).rsqrt_()]

    def normalized(
        self, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """``(x - mean) * rstd * weight + bias`` of ``(batch, channels, elements)``, in the dtype of ``x``."""
        return torch.batch_norm_elemt(x, weight, bias, mean, rstd, self.eps)

    def sums(
        self, grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, sets: bool = True, weight: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The sums over each channel of the gradient, of the gradient by the centered input, and of this scaled, which
        is a weight's gradient; those that are asked for.
        """
        # Of the weight the kernel takes what its gradient is to be like.
        like = rstd if weight or not sets else None
        total, with_x, of_weight, of_bias = torch.batch_norm_backward_reduce(
            grad, x, mean, rstd, like, sets, weight, not sets
        )
        return (total if sets else of_bias), with_x, of_weight

    def of_input(
        self,
        grad: Tensor,
        x: Tensor,
        mean: Tensor,
        rstd: Tensor,
        weight: Tensor | None,
        *totals: Tensor,
    ) -> Tensor:
        """The input's gradient, in the dtype of ``grad`` and ``x``.

        Args:
            totals: the first two sums of :meth:`sums` over all ranks; not centered, the second alone.
        """
        total, with_x = totals if self._centered else (self._zeros, *totals)
        return torch.batch_norm_backward_elemt(grad, x, mean, rstd, weight, total, with_x, self._integers)


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
