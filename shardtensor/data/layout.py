"""The layouts of a batch's tensors: given for all of them, for each, or as functions of the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .._compat import KeyEntry, PyTree, TensorMeta, keystr, tree_map_with_path
from ..layout.intervals import aligned_sizes
from ..layout.placements import ShardSizes, Sizes, mesh_dim_of, normalize_placements
from ..layout.spec import ShardTensorSpec
from ..layout.strides import contiguous_stride

# :func:`make_spec` for one leaf of a batch, whose layout is known: of its shape, dtype and, if it has any, chunks.
MakeSpec = Callable[..., ShardTensorSpec]


@dataclass(frozen=True)
class MeshlessSpec:
    """What every rank must know of one tensor: a spec without its mesh, which can be sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[Placement, ...]
    sizes: Sizes

    @staticmethod
    def of(spec: ShardTensorSpec) -> MeshlessSpec:
        return MeshlessSpec(tuple(spec.shape), spec.tensor_meta.dtype, tuple(spec.placements), spec.sizes)

    def spec(self, mesh: DeviceMesh) -> ShardTensorSpec:
        shape = torch.Size(self.shape)
        meta = TensorMeta(shape, contiguous_stride(shape), self.dtype)
        return ShardTensorSpec.of(mesh, self.placements, meta, self.sizes)


@dataclass(frozen=True)
class Layout:
    """Placements and shard sizes as the user gave them.

    Each is one value for all tensors, or nested like the batch (as deeply as values differ), or a function of the batch
    that returns either.
    """

    mesh: DeviceMesh
    placements: PyTree = None
    shard_sizes: PyTree = None

    def map(self, visit: Callable[[Any, MakeSpec], Any], batch: PyTree) -> PyTree:
        """A tree like ``batch`` of the results of ``visit(leaf, spec)``, where ``spec`` is :func:`make_spec` for it.

        Raises:
            TypeError, ValueError: as :func:`make_spec`, with the leaf's name in front.
        """
        placements, sizes = (v(batch) if callable(v) else v for v in (self.placements, self.shard_sizes))

        def is_sizes(value: object) -> bool:
            if isinstance(value, Mapping):  # rather than a dict like the batch, whose keys could be anything
                return all(isinstance(key, int) or key in (self.mesh.mesh_dim_names or ()) for key in value)
            alone = isinstance(value, (tuple, list)) and all(isinstance(n, int) for n in value)
            return alone or value is None or isinstance(value, str)

        def at(path: tuple[KeyEntry, ...], leaf: Any) -> Any:
            def spec(shape: Sequence[int], dtype: torch.dtype, chunks: Sequence[int] | None = None) -> ShardTensorSpec:
                own = _at(placements, path, _is_placements, "placements")
                own_sizes = _at(sizes, path, is_sizes, "shard_sizes")
                return make_spec(self.mesh, own, own_sizes, shape, dtype, chunks)

            try:
                return visit(leaf, spec)
            except (TypeError, ValueError) as error:
                raise type(error)(f"batch{keystr(path)}: {error}") from error

        return tree_map_with_path(at, batch)


def make_spec(
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    sizes: ShardSizes,
    shape: Sequence[int],
    dtype: torch.dtype,
    chunks: Sequence[int] | None = None,
) -> ShardTensorSpec:
    """As ``ShardTensorSpec.make``, for data: no Partial, and ``sizes`` may have entries for other tensors of the batch.

    Args:
        placements: None: Replicate everywhere.
        sizes: entries for mesh dims that do not shard this tensor are ignored. "chunks": boundaries between chunks.
        chunks: the length of a chunk in each dim, 0 where it is unknown.

    Raises:
        TypeError, ValueError: as ``ShardTensorSpec.make``; a Partial; "chunks" for a dim that has none.
    """
    placements = normalize_placements([Replicate()] * mesh.ndim if placements is None else placements, mesh, len(shape))
    if any(p.is_partial() for p in placements):
        raise ValueError(f"data cannot be placed as {placements}: only Shard and Replicate")
    if isinstance(sizes, Mapping):
        sizes = {mesh_dim_of(key, mesh): each for key, each in sizes.items()}
        sizes = {m: each for m, each in sizes.items() if m >= mesh.ndim or not placements[m].is_replicate()}
    elif not isinstance(sizes, str) and all(p.is_replicate() for p in placements):
        sizes = None
    elif sizes == "chunks":
        between: dict[int, tuple[int, ...]] = {}
        for m, p in enumerate(placements):
            if isinstance(p, Shard):
                if not (chunks and chunks[p.dim]):
                    raise ValueError(f"shard_sizes='chunks': dim {p.dim} has no chunks, or is only read in part")
                between[m] = aligned_sizes(shape[p.dim], chunks[p.dim], mesh.size(m))
        sizes = between
    return ShardTensorSpec.make(mesh, placements, shape, dtype, shard_sizes=sizes)


def _at(value: PyTree, path: Sequence[KeyEntry], is_value: Callable[[object], bool], what: str) -> Any:
    """The value for the leaf at ``path`` of the batch: the first one on the way down."""
    for key in path:
        if is_value(value):
            break
        try:
            value = key.get(value)  # the entry of this key, as pytree reads it from the batch
        except (LookupError, AttributeError, TypeError):
            raise ValueError(f"{what} {value!r} have no entry for {key}") from None
    if not is_value(value):
        raise ValueError(f"{what} {value!r} do not fit a single tensor")
    return value


def _is_placements(value: object) -> bool:
    if value is None or isinstance(value, Placement):
        return True
    return isinstance(value, (tuple, list)) and all(isinstance(p, Placement) for p in value)
