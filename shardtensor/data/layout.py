"""How the tensors of a batch are cut: placements and sizes for all of them, for each, or made from the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .._compat import TensorMeta, keystr, tree_map_with_path
from ..geometry import sizes_of
from ..spec import ShardTensorSpec, Sizes, contiguous_stride, normalize_placements

__all__ = ["Layout", "Part", "make_spec"]


@dataclass(frozen=True)
class Part:
    """What every rank must know of one tensor: a spec that can be sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[Placement, ...]
    sizes: Sizes

    @staticmethod
    def of(spec: ShardTensorSpec) -> Part:
        return Part(tuple(spec.shape), spec.tensor_meta.dtype, tuple(spec.placements), spec.sizes)

    def spec(self, mesh: DeviceMesh) -> ShardTensorSpec:
        shape = torch.Size(self.shape)
        meta = TensorMeta(shape, contiguous_stride(shape), self.dtype)
        return ShardTensorSpec.of(mesh, self.placements, meta, self.sizes)


@dataclass(frozen=True)
class Layout:
    """Placements and shard sizes as the user gave them.

    Both are one value for all tensors, or nested like the batch (as far down as values differ), or a function that
    makes either from the batch.
    """

    mesh: DeviceMesh
    placements: Any = None
    shard_sizes: Any = None

    def map(self, visit: Callable[[Any, Callable[..., ShardTensorSpec]], Any], batch: Any) -> Any:
        """A tree like ``batch`` of what ``visit(leaf, cut)`` gives, where ``cut`` is :func:`make_spec` for this leaf.

        Raises:
            TypeError, ValueError: as :func:`make_spec`, with the leaf's name in front.
        """
        placements, sizes = (v(batch) if callable(v) else v for v in (self.placements, self.shard_sizes))

        def at(path: tuple[Any, ...], leaf: Any) -> Any:
            def cut(shape: Sequence[int], dtype: torch.dtype, chunks: Sequence[int] | None = None) -> ShardTensorSpec:
                own = _at(placements, path, _is_placements, "placements")
                own_sizes = _at(sizes, path, _is_sizes, "shard_sizes")
                return make_spec(self.mesh, own, own_sizes, shape, dtype, chunks)

            try:
                return visit(leaf, cut)
            except (TypeError, ValueError) as error:
                raise type(error)(f"batch{keystr(path)}: {error}") from error

        return tree_map_with_path(at, batch)


def make_spec(
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    sizes: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    chunks: Sequence[int] | None = None,
) -> ShardTensorSpec:
    """As ``ShardTensorSpec.make``, for data: no Partial, and the sizes may be those of another tensor's cut as well.

    Args:
        placements: None: Replicate everywhere.
        sizes: entries for mesh dims that do not cut this tensor say nothing about it. "chunks": cut between chunks.
        chunks: how long a chunk is in each dim, 0 where nobody knows.

    Raises:
        TypeError, ValueError: as ``ShardTensorSpec.make``; a Partial; "chunks" for a dim that has none.
    """
    placements = normalize_placements([Replicate()] * mesh.ndim if placements is None else placements, mesh, len(shape))
    if any(p.is_partial() for p in placements):
        raise ValueError(f"data cannot be placed as {placements}: only Shard and Replicate")
    if isinstance(sizes, Mapping):
        whole = {k for m, p in enumerate(placements) if p.is_replicate() for k in (m, m - mesh.ndim)}
        sizes = {m: s for m, s in sizes.items() if m not in whole}
    elif sizes == "chunks":
        sizes = {}
        for m, p in enumerate(placements):
            if isinstance(p, Shard):
                if not (chunks and chunks[p.dim]):
                    raise ValueError(f"shard_sizes='chunks': dim {p.dim} has no chunks, or is not read as a whole")
                sizes[m] = _between_chunks(shape[p.dim], chunks[p.dim], mesh.size(m))
    return ShardTensorSpec.make(mesh, placements, shape, dtype, shard_sizes=sizes)


def _between_chunks(n: int, chunk: int, ranks: int) -> tuple[int, ...]:
    """Sizes with every cut at a multiple of ``chunk``, as even as that allows."""
    count = -(-n // chunk)
    return sizes_of([min(n, chunk * (count * r // ranks)) for r in range(ranks + 1)])


def _at(value: Any, path: Sequence[Any], is_value: Callable[[Any], bool], what: str) -> Any:
    """The value for the leaf at ``path`` of the batch."""
    for key in path:
        if is_value(value):
            break
        try:
            value = key.get(value)
        except (LookupError, AttributeError, TypeError):
            raise ValueError(f"{what} {value!r} say nothing about {key}") from None
    if not is_value(value):
        raise ValueError(f"{what} {value!r} do not fit a single tensor")
    return value


def _is_placements(value: Any) -> bool:
    if value is None or isinstance(value, Placement):
        return True
    return isinstance(value, (tuple, list)) and all(isinstance(p, Placement) for p in value)


def _is_sizes(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, int) for key in value)
    return value is None or isinstance(value, str)
