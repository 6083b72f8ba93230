"""``ShardTensorSpec``: a DTensor spec that holds the size of every rank's shard.

Specs are made for every call and serve as keys, and DTensor's constructor is slow. So :meth:`ShardTensorSpec.of`, which
makes the specs that are derived from others, returns the same object for equal properties. That takes a tenth of the
time, keeps what the object has computed, and makes comparisons by identity succeed. Specs also get the first one of
equal meshes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .._compat import DTensorSpec, TensorMeta, replaced
from .._compat.c10d import group_along
from ..context import settings
from ..errors import refuse
from .caches import cached, check_world, forgets
from .dtypes import held_dtype
from .intervals import Interval, chunk_sizes, intervals_of
from .placements import (
    AxisLayout,
    ShardSizes,
    Sizes,
    are_integers,
    by_mesh_dim,
    check_order,
    first_equal,
    mesh_coordinate,
    normalize_placements,
    normalize_sizes,
)
from .strides import contiguous_stride

_numbers = count()


class ShardTensorSpec(DTensorSpec):
    """Mesh, placements, global shape, and for every sharded mesh dim the size of each rank's shard.

    Every rank knows the shards of all ranks from the spec, without communication. The sizes are part of equality and
    hash, so a plan that is cached by spec is never used for another layout.

    Attributes:
        mesh, placements, tensor_meta: as in DTensor's spec. ``tensor_meta`` describes the global tensor.
        sizes: one entry per mesh dim: a tuple of shard sizes along that mesh dim, or None if it is not a Shard.
        layout: placement and sizes together, one :class:`AxisLayout` per mesh dim.
        number: a number of this object, unique in this process. Keys of plans contain this number, because a spec takes
            longer to hash and compare. Equal specs are usually one object.

    Raises:
        ValueError: sizes that do not fit the placements or the global shape.
    """

    tensor_meta: TensorMeta
    sizes: Sizes
    number: int
    _hash: int | None
    shard_order: Any

    def __init__(
        self,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        tensor_meta: TensorMeta | None = None,
        sizes: Sizes | None = None,
    ) -> None:
        if replaced.waiting:
            replaced.begin()
        super().__init__(mesh, tuple(placements), tensor_meta)
        if sizes is None:
            sizes = normalize_sizes(None, self.placements, self.shape, mesh)
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "number", next(_numbers))
        self.shard_order = _SizedShardOrder.of(self.shard_order, sizes)
        self.placements = SizedPlacements(self.placements, sizes)

    @staticmethod
    def of(mesh: DeviceMesh, placements: Sequence[Placement], meta: TensorMeta, sizes: Sizes) -> ShardTensorSpec:
        """Return the spec with these properties, without checks; for equal properties it is the same object."""
        try:
            return _known(id(mesh), mesh, tuple(mesh.get_coordinate() or ()), tuple(placements), meta, tuple(sizes))
        except TypeError:  # sizes that cannot be hashed, such as the symbolic integers of torch.compile
            return ShardTensorSpec(mesh, placements, meta, sizes)

    @classmethod
    def make(
        cls,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        shard_sizes: ShardSizes = None,
        stride: Sequence[int] | None = None,
    ) -> ShardTensorSpec:
        """Build and validate a spec from public arguments.

        Args:
            shard_sizes: each rank's size, where one mesh dim shards; or ``{mesh_dim or its name: sizes}``. Default:
                torch.chunk's sizes, also for mesh dims that are left out.

        Raises:
            TypeError, ValueError: placements or sizes that do not fit the mesh or the shape.
        """
        check_order(mesh)
        mesh = first_equal(mesh)
        shape = torch.Size(shape)
        placements = normalize_placements(placements, mesh, len(shape))
        sizes = normalize_sizes(shard_sizes, placements, shape, mesh)
        stride = tuple(stride) if stride is not None else contiguous_stride(shape)
        return cls.of(mesh, placements, TensorMeta(shape, stride, dtype), sizes)

    def target(self, placements: Sequence[Placement] | None, shard_sizes: ShardSizes) -> ShardTensorSpec:
        """Return the spec with other placements or shard sizes, as passed to ``redistribute``.

        Mesh dims without new sizes keep theirs if their placement does not change.

        Raises:
            TypeError, ValueError: as :meth:`make` does.
        """
        if type(placements) is list:
            placements = tuple(placements)
        if isinstance(shard_sizes, Mapping):
            shard_sizes = {m: tuple(sizes) for m, sizes in shard_sizes.items()}
        elif isinstance(shard_sizes, list):
            shard_sizes = tuple(shard_sizes)
        asked = placements, shard_sizes
        # Compared with the last ones: that takes no time for sizes that are the same tuple, which hashing does. Of a
        # redistribute() that takes 52 us, or 68 us on 2048 ranks, it saves 35 us, or 240 us.
        answers = _answers(self)
        for question, answer in answers:
            if question == asked:
                return answer
        answer = self._target(placements, shard_sizes)
        given = shard_sizes.values() if isinstance(shard_sizes, dict) else ()
        if all(map(are_integers, given)):
            answers.insert(0, (asked, answer))
            del answers[4:]
        return answer

    def _target(self, placements: Sequence[Placement] | None, shard_sizes: ShardSizes) -> ShardTensorSpec:
        meta, ndim = self.tensor_meta, self.mesh.ndim
        placements = self.placements if placements is None else placements
        shard_sizes = by_mesh_dim(shard_sizes, placements, self.mesh)
        new = ShardTensorSpec.make(
            self.mesh,
            placements,
            meta.shape,
            meta.dtype,
            shard_sizes=shard_sizes,
            stride=meta.stride,
        )
        if isinstance(shard_sizes, str):
            return new
        keep = [m for m in range(ndim) if self.placements[m] == new.placements[m] and m not in (shard_sizes or {})]
        return new.replace(sizes=tuple(self.sizes[m] if m in keep else new.sizes[m] for m in range(ndim)))

    def replace(
        self,
        *,
        placements: Sequence[Placement] | None = None,
        sizes: Sizes | None = None,
        meta: TensorMeta | None = None,
    ) -> ShardTensorSpec:
        """Return the spec with other placements, sizes or tensor meta.

        If a placement changes, pass its sizes as well; :meth:`with_axes` keeps the two together.
        """
        return ShardTensorSpec.of(
            self.mesh,
            self.placements if placements is None else placements,
            self.tensor_meta if meta is None else meta,
            self.sizes if sizes is None else sizes,
        )

    def with_layout(self, layout: Sequence[AxisLayout], meta: TensorMeta | None = None) -> ShardTensorSpec:
        """Return the spec with these placements and sizes, one entry per mesh dim, and with ``meta`` if given."""
        return self.replace(placements=[a.placement for a in layout], sizes=tuple(a.sizes for a in layout), meta=meta)

    def with_axes(self, axes: Mapping[int, AxisLayout]) -> ShardTensorSpec:
        """Return the spec with another layout on the given mesh dims."""
        layout = list(self.layout)
        for m, axis in axes.items():
            layout[m] = axis
        return self.with_layout(layout)

    def replicated(self) -> ShardTensorSpec:
        """The spec of the same tensor replicated on every mesh dim."""
        return self.with_layout([AxisLayout(Replicate())] * self.mesh.ndim)

    def with_dtype(self, dtype: torch.dtype) -> ShardTensorSpec:
        """The spec of a tensor of another dtype and the same layout."""
        meta = self.tensor_meta
        return self if meta.dtype == dtype else self.replace(meta=meta._replace(dtype=dtype))

    def for_gradient(self) -> ShardTensorSpec:
        """The spec of this tensor's gradient: the same, but the gradient of a Partial is Replicate.

        The derivative of a sum is the same with respect to each summand.
        """
        return self._reduced or self

    @cached_property
    def _reduced(self) -> ShardTensorSpec | None:
        """This spec without Partial, where there is any."""
        partial = self.partial_mesh_dims()
        return self.with_axes({m: AxisLayout(Replicate()) for m in partial}) if partial else None

    def for_contributions(self) -> ShardTensorSpec:
        """Return the spec of this tensor's gradient if each rank has a contribution: Partial instead of Replicate."""
        # On a mesh dim of one rank there is nothing to reduce.
        shared = [m for m, p in enumerate(self.placements) if p.is_replicate() and self.mesh.size(m) > 1]
        return self.for_gradient().with_axes({m: AxisLayout(Partial()) for m in shared})

    def gathered_for(self, target: ShardTensorSpec | Sequence[Placement]) -> int | None:
        """Return the first mesh dim on which shards would have to be gathered for ``target``, or None.

        A sharded dim of length 1 does not count: the rank that has it broadcasts it.
        """
        new = target.placements if isinstance(target, ShardTensorSpec) else target
        for m, (p, q) in enumerate(zip(self.placements, new, strict=True)):
            if isinstance(p, Shard) and q.is_replicate() and self.shape[p.dim] > 1:
                return m
        return None

    def lies_like(self, other: ShardTensorSpec) -> bool:
        """Whether both have the same layout."""
        return self is other or (self.placements == other.placements and self.sizes == other.sizes)

    # -- which rank holds what ----------------------------------------------------------------------------

    @cached_property
    def layout(self) -> tuple[AxisLayout, ...]:
        """Placement and sizes of each mesh dim."""
        return tuple(map(AxisLayout, self.placements, self.sizes))

    @property
    def shard_sizes(self) -> dict[int, tuple[int, ...]]:
        """``{mesh_dim: sizes}`` for the sharded mesh dims."""
        return {m: self.sizes_along(m) for m in self.sharded_dims().values()}

    def sharding_shapes(self) -> dict[int, tuple[torch.Size, ...]]:
        """``{mesh_dim: shapes}``: the shape of each rank's shard along a sharded mesh dim.

        On the other mesh dims the ranks have this rank's coordinate.
        """
        here = self.local_shape()
        return {
            m: tuple(torch.Size((*here[:d], n, *here[d + 1 :])) for n in self.sizes_along(m))
            for d, m in self.sharded_dims().items()
        }

    def sharded_dims(self) -> dict[int, int]:
        """``{tensor dim: mesh dim}`` for the sharded tensor dims, in mesh order."""
        return {p.dim: m for m, p in enumerate(self.placements) if isinstance(p, Shard)}

    def partial_mesh_dims(self) -> list[int]:
        """Mesh dims on which the tensor is Partial."""
        return [m for m, p in enumerate(self.placements) if p.is_partial()]

    def is_replicate(self) -> bool:
        """Whether the tensor is replicated on every mesh dim."""
        return all(p.is_replicate() for p in self.placements)

    @cached_property
    def coordinate(self) -> tuple[int, ...]:
        """This rank's position in the mesh."""
        return mesh_coordinate(self.mesh)

    @cached_property
    def held_dtype(self) -> torch.dtype:
        """The dtype in which ranks hold their parts; a wider one than the tensor's for contributions."""
        return held_dtype(self.placements, self.tensor_meta.dtype)

    def is_wide(self, local: torch.Tensor) -> bool:
        """Whether a local tensor is a contribution in that wider dtype."""
        return local.dtype is not self.tensor_meta.dtype and local.dtype is self.held_dtype

    def sizes_along(self, mesh_dim: int) -> tuple[int, ...]:
        """The shard sizes along a mesh dim that shards the tensor."""
        sizes = self.sizes[mesh_dim]
        assert sizes is not None, f"mesh dim {mesh_dim} does not shard {self}"
        return sizes

    def interval(self, mesh_dim: int) -> Interval:
        """The interval that this rank holds of the tensor dim sharded on ``mesh_dim``."""
        return intervals_of(self.sizes_along(mesh_dim))[self.coordinate[mesh_dim]]

    def own_interval(self, dim: int) -> Interval:
        """The interval of a tensor dim that this rank holds: the complete dim if no mesh dim shards it."""
        dim %= len(self.shape)
        m = self.sharded_dims().get(dim)
        return (0, self.shape[dim]) if m is None else self.interval(m)

    def local_shape(self, coordinate: Sequence[int] | None = None) -> tuple[int, ...]:
        """Shape of the shard at ``coordinate`` (default: this rank's)."""
        if coordinate is None:
            return self.own_shape
        shape = list(self.shape)
        for d, m in self.sharded_dims().items():
            shape[d] = self.sizes_along(m)[coordinate[m]]
        return tuple(shape)

    @cached_property
    def own_shape(self) -> tuple[int, ...]:
        """Shape of this rank's shard."""
        return self.local_shape(self.coordinate)

    @property
    def num_shards_map(self) -> list[int]:
        """How many shards each tensor dim has, as in DTensor's spec.

        FSDP2 calls this when it makes DTensors of a parameter, which have no sizes. So other sizes are refused here.

        Raises:
            UnsupportedSharding: shard sizes other than torch.chunk's.
        """
        for d, m in self.sharded_dims().items():
            if self.sizes_along(m) != chunk_sizes(self.shape[d], self.mesh.size(m)):
                raise refuse(
                    "fully_shard",
                    self,
                    "FSDP2 cannot keep the sizes of a parameter's shards",
                    "shard the parameter evenly (shard_sizes='even'), or keep it out (ignored_params=) and reduce its "
                    "gradient over the data axis yourself",
                )
        return super().num_shards_map

    # -- equality, hash, text -----------------------------------------------------------------------------

    def _key(self) -> tuple[Any, ...]:
        # The coordinate, too: plans are made for one rank, and a process may be several (simulation, saved caches).
        return (self.mesh, self.placements, self.sizes, self.tensor_meta, self.coordinate)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(self._key())
        return self._hash

    def __eq__(self, other: object, /) -> bool:
        return self is other or self._check_equals(other)

    def _check_equals(self, other: object, skip_shapes: bool = False) -> bool:
        if not isinstance(other, ShardTensorSpec):
            return False
        if self.mesh != other.mesh or self.placements != other.placements or self.sizes != other.sizes:
            return False
        if self.coordinate != other.coordinate:
            return False
        if skip_shapes and isinstance(other, _Guard) and other.settings != settings():
            return False
        return self.tensor_meta == other.tensor_meta

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensorSpec:
        """torch.compile copies the specs that it has traced, to compare later ones with."""
        return _Guard(self.mesh, self.placements, self.tensor_meta, self.sizes)

    def __reduce__(self) -> Any:
        # Without what was computed for this rank and this process.
        return ShardTensorSpec, (self.mesh, tuple(self.placements), self.tensor_meta, self.sizes)

    def _stable_hash(self) -> str:
        # For caches on disk: equal in every process and every run, which hash() is not.
        mesh = (tuple(self.mesh.mesh.flatten().tolist()), tuple(self.mesh.shape), self.mesh.device_type)
        text = repr((mesh, *self._key()[1:]))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def shallow_copy_with_tensor_meta(self, tensor_meta: TensorMeta | None) -> ShardTensorSpec:
        return self.replace(meta=tensor_meta)

    def __str__(self) -> str:
        placed = ", ".join(f"{p}{list(sizes)}" if sizes is not None else str(p) for p, sizes in self.layout)
        shape = tuple(self.shape) if self.tensor_meta is not None else "?"
        dtype = str(self.tensor_meta.dtype).removeprefix("torch.") if self.tensor_meta is not None else "?"
        return f"ShardTensor{shape} {dtype} on mesh {tuple(self.mesh.shape)} as ({placed})"

    __repr__ = __str__

    @cached_property
    def in_short(self) -> str:
        """Shape, dtype and layout, short also in a large world."""
        dtype = str(self.tensor_meta.dtype).removeprefix("torch.")
        return f"{tuple(self.shape)} {dtype} as ({', '.join(axis.in_short() for axis in self.layout)})"


class SizedPlacements(tuple[Placement, ...]):
    """Placements with the sizes attached, and equal to them without.

    Programs of torch take a tensor's placements to make another tensor of this layout, by ``DTensor.from_local``. The
    stages of its pipelines send them to each other, next to local tensors.
    """

    sizes: Sizes

    def __new__(cls, placements: Sequence[Placement], sizes: Sizes) -> SizedPlacements:
        self = super().__new__(cls, placements)
        self.sizes = sizes
        return self

    def __reduce__(self) -> Any:
        return SizedPlacements, (tuple(self), self.sizes)


class _SizedShardOrder(tuple[Any, ...]):
    """DTensor's shard order with the sizes attached.

    torch.compile flattens a DTensor to parts of its spec, the shard order among them, and makes a new one of these. No
    part has room for sizes, but this one may be any tuple.
    """

    sizes: Sizes

    @staticmethod
    def of(order: Sequence[Any], sizes: Sizes) -> _SizedShardOrder:
        result = _SizedShardOrder(order)
        result.sizes = sizes
        return result

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, other) and self.sizes == getattr(other, "sizes", None)

    def __hash__(self) -> int:
        return hash((tuple(self), self.sizes))

    def __reduce__(self) -> Any:
        return _SizedShardOrder.of, (tuple(self), self.sizes)


class _Guard(ShardTensorSpec):
    """A spec that torch.compile has traced, with which it compares those of later calls.

    A graph is valid for one layout of the tensor, and for the settings, which our code also read while it was traced.
    torch would compare specs without shapes, since its graphs may be valid for any shape. Our graphs hold the size of
    every rank's shard.
    """

    def __init__(
        self, mesh: DeviceMesh, placements: Sequence[Placement], tensor_meta: TensorMeta | None, sizes: Sizes
    ) -> None:
        super().__init__(mesh, placements, tensor_meta, sizes)
        self.settings = settings()


@cached(maxsize=8192)
def _known(
    identity: int,
    mesh: DeviceMesh,
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
    meta: TensorMeta,
    sizes: Sizes,
) -> ShardTensorSpec:
    for m, along in enumerate(sizes):
        if along is not None and len(set(along)) > 1:
            uneven_axes.add(_axis(mesh, m))
    return ShardTensorSpec(mesh, placements, meta, sizes)


# The ranks of each axis along which a tensor has been sharded unevenly; see [Note: local results] in uneven.py.
uneven_axes: set[tuple[int, ...]] = set()
forgets(uneven_axes.clear)


def is_uneven(mesh: DeviceMesh, mesh_dim: int) -> bool:
    """Whether a tensor has been sharded unevenly along this axis, of this mesh or of another one."""
    check_world()
    return _axis(mesh, mesh_dim) in uneven_axes


def _axis(mesh: DeviceMesh, mesh_dim: int) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group_along(mesh, mesh_dim)))


@cached(maxsize=1024)
def _answers(spec: ShardTensorSpec) -> list[tuple[Any, ShardTensorSpec]]:
    """What :meth:`ShardTensorSpec.target` was asked lately, and what it returned."""
    return []
