"""``DTensor.from_local`` of shards that are not as large as each other.

[Note: local results] torch makes DTensors of what was computed from local tensors by ``DTensor.from_local``: in
``local_map``, in ``PrepareModuleOutput`` and the other styles, and in programs. This function takes every shard to be
as large as this rank's, and a local tensor does not tell that it comes from a ShardTensor. Once a tensor is sharded
unevenly along an axis of ranks, which all of these know, they therefore compare the sizes of shards along that axis. If
these differ, the result is a ShardTensor. Along other axes, and before that, nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from .._compat import wrap_from_local
from .._compat.c10d import group_along
from ..errors import refuse
from ..layout.intervals import chunk_sizes
from ..layout.placements import given_mesh, mesh_coordinate
from ..layout.spec import SizedPlacements, is_uneven, uneven_axes
from ..ranks.agreement import gather_with_history
from ..ranks.cuda_graphs import check_has_values
from .tensor import ShardTensor


def _from_local(
    original: Callable[..., DTensor],
    local: Tensor,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    options: dict[str, Any],
) -> DTensor:
    shape = options.get("shape")
    if shape is not None and isinstance(placements, SizedPlacements):
        sizes = {m: along for m, along in enumerate(placements.sizes) if along is not None}
        if all(sum(along) == shape[placements[m].dim] for m, along in sizes.items()):  # type: ignore[attr-defined]
            return ShardTensor.from_local(local, mesh, placements, shard_sizes=sizes)
    dims: dict[int, int] = {}
    if uneven_axes and placements is not None and isinstance(local, Tensor) and local.ndim:
        mesh = given_mesh(mesh)
        shards = {m: p.dim % local.ndim for m, p in enumerate(placements) if isinstance(p, Shard)}
        dims = {m: d for m, d in shards.items() if is_uneven(mesh, m)}
    if mesh is None or not dims:
        return original(local, mesh, placements, **options)
    if shape is not None:  # what the caller says is not compared
        _check_own(local, mesh, dims, shape)
        return original(local, mesh, placements, **options)
    sizes = {m: _gathered(local, local.shape[d], mesh, m) for m, d in dims.items()}
    if all(len(set(along)) == 1 for along in sizes.values()):
        return original(local, mesh, placements, **options)
    if options.get("grad_placements") is not None:
        reason, remedy = f"the shards have the sizes {sizes}", "leave out grad_placements"
        raise refuse("DTensor.from_local", local, reason, remedy)
    return ShardTensor.from_local(local, mesh, placements, shard_sizes=sizes)


def _gathered(local: Tensor, size: int, mesh: DeviceMesh, m: int) -> tuple[int, ...]:
    """Every rank's size, along a mesh dim."""
    check_has_values("DTensor.from_local", local)
    own = torch.tensor(size, device=local.device)
    return tuple(gather_with_history(own, group_along(mesh, m)).view(-1).tolist())


def _check_own(local: Tensor, mesh: DeviceMesh, dims: dict[int, int], shape: Sequence[int]) -> None:
    """ValueError on a rank whose local tensor is not what torch.chunk gives it of a tensor of this shape."""
    for m, d in dims.items():
        sizes = chunk_sizes(shape[d], mesh.size(m))
        if local.shape[d] != sizes[mesh_coordinate(mesh)[m]]:
            raise ValueError(
                f"DTensor.from_local: the local tensor has size {local.shape[d]} in dim {d}, but a DTensor of shape "
                f"{tuple(shape)} has shards of sizes {sizes} along mesh dim {m}. Use ShardTensor.from_local(..., "
                "shard_sizes=...), which takes shards of any sizes"
            )


wrap_from_local(_from_local)
