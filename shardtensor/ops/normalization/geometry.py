"""Which elements share statistics, and which of them this rank holds: all that tells one normalization from another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..._compat import TensorMeta
from ...dispatch.tensor import ShardTensor, redistribute_to
from ...layout.intervals import map_boundaries
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Operand
from ..common.alignment import local_part, redistributed
from ..common.named_dims import free_dims


@dataclass(frozen=True)
class Geometry:
    """Which elements share statistics, as one rank sees it.

    A *set* is what shares a mean, a *channel* is the part of a set that shares weight and bias, too. Numbers belong to
    channels: to those of one sample after those of the other, where samples have sets of their own.

    Attributes:
        name: of the operator, for errors.
        spec: of the input.
        view: local shape, of as many dims as it takes to make the normalized elements entire dims of it.
        dims: dims of the view that are normalized over.
        affine: shape of weight and bias that broadcasts against the view; ones where there are none.
        first: the input's dim that the first dim of weight and bias belongs to.
        merges: ``(mesh dim, its shard sizes)`` for the mesh dims that shard a normalized dim.
        count: how many elements of the global tensor share a mean.
        eps: added to the variance.
        elementwise: whether each element of a set has a weight and a bias of its own. A set is one channel then.
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
    elementwise: bool = False
    centered: bool = True

    @cached_property
    def intervals(self) -> tuple[tuple[int, int, int], ...]:
        """``(dim, start, length)`` of what belongs to this rank's shard of a weight and bias, where that is a part."""
        held = ((d - self.first, self.spec.interval(m)) for d, m in self.spec.sharded_dims().items())
        return tuple((d, start, stop - start) for d, (start, stop) in held if d >= 0)

    @cached_property
    def sets(self) -> int:
        return math.prod(n for d, n in enumerate(self.view) if d not in self.dims)

    @cached_property
    def per_set(self) -> int:
        """How many channels make a set."""
        return 1 if self.elementwise else math.prod(self.affine[d] for d in self.dims)

    @cached_property
    def samples(self) -> int:
        """How many have sets of their own: one, or all."""
        return 1 if 0 in self.dims else self.view[0]

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """``(batch, channels, size)`` of a contiguous shard, as batch norm's kernels take it."""
        batch, channels = self.view[0] if 0 in self.dims and self.sets != 1 else 1, self.sets * self.per_set
        return batch, channels, math.prod(self.view) // max(batch * channels, 1)

    @cached_property
    def of_sets(self) -> tuple[int, int, int]:
        """The same with sets for channels."""
        batch, _, size = self.shape
        return batch, self.sets, self.per_set * size

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
        meta = torch.empty_like(torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device="meta"))
        return spec.replace(meta=TensorMeta(meta.shape, meta.stride(), dtype))


def _merges(spec: ShardTensorSpec, dims: Sequence[int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    shared = [m for d, m in spec.sharded_dims().items() if d in dims and spec.mesh.size(m) > 1 and spec.shape[d]]
    return tuple((m, spec.sizes_along(m)) for m in shared)


def geometry_of_channels(name: str, spec: ShardTensorSpec, dims: Sequence[int], eps: float) -> Geometry:
    """Batch and instance norm: over all dims but the channels', or those behind it."""
    view, count = spec.local_shape(), torch.Size(spec.shape[d] for d in dims).numel()
    affine = tuple(n if d == 1 else 1 for d, n in enumerate(view))
    return Geometry(name, spec, view, tuple(dims), affine, 1, _merges(spec, dims), count, eps)


def geometry_of_last_dims(name: str, spec: ShardTensorSpec, k: int, eps: float, centered: bool = True) -> Geometry:
    """Layer and RMS norm: over the last ``k`` dims, which weight and bias have."""
    view, n = spec.local_shape(), len(spec.shape)
    over, affine = tuple(range(n - k, n)), (*[1] * (n - k), *view[n - k :])
    count = spec.shape[n - k :].numel()
    return Geometry(name, spec, view, over, affine, n - k, _merges(spec, over), count, eps, True, centered)


def geometry_of_groups(name: str, spec: ShardTensorSpec, groups: int, eps: float) -> Geometry:
    """Group norm: over groups of channels, of which none is sharded, and all spatial dims."""
    per_group = spec.shape[1] // groups
    n, channels, *spatial = spec.local_shape()
    view = (n, channels // per_group, per_group, *spatial)
    affine = (1, *view[1:3], *(1 for _ in spatial))
    over, count = range(2, len(spec.shape)), per_group * spec.shape[2:].numel()
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
    small = [None if meta is None else torch.ones(1, dtype=meta.dtype, device=call.device) for meta in metas]
    return kernel(torch.ones(2, 1, 1, dtype=x.tensor_meta.dtype, device=call.device), *small).dtype
