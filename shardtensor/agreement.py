"""Ranks that disagree hang; here they find out, and raise alike.

Everything a rank claims about its local tensor fits in one row of integers. The rows of all ranks of the mesh are
gathered, one small all-gather per mesh dim, and every rank judges the same table, so either all go on or all raise
the same error. With ``SHARDTENSOR_DEBUG=1`` this is done even where the caller has given all sizes.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from .debug import debug_enabled
from .spec import ShardTensorSpec, mesh_coordinate, normalize_placements, stride_like

__all__ = ["DTYPES", "MAX_NDIM", "agree_on_local", "check_process_group", "gather_over_mesh"]

MAX_NDIM = 16
DTYPES: list[torch.dtype] = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)


def check_process_group() -> None:
    """RuntimeError with the remedy where ``torch.distributed`` has not been initialized."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "ShardTensor needs a process group: start with torchrun and call torch.distributed.init_process_group() "
            "or init_device_mesh() first"
        )


def gather_over_mesh(row: Sequence[int], mesh: DeviceMesh) -> dict[tuple[int, ...], list[int]]:
    """Every rank's ``row`` of integers (equally long everywhere), by mesh coordinate."""
    table = torch.tensor(row, dtype=torch.int64, device=mesh.device_type)
    for m in range(mesh.ndim):
        parts = [torch.empty_like(table) for _ in range(mesh.size(m))]
        if len(parts) > 1:
            dist.all_gather(parts, table, group=mesh.get_group(m))
        else:
            parts = [table]
        table = torch.stack(parts)
    # The mesh dim gathered last leads.
    rows = table.permute(*reversed(range(mesh.ndim)), mesh.ndim).reshape(-1, len(row)).tolist()
    return dict(zip(product(*(range(n) for n in mesh.shape)), rows, strict=True))


def agree_on_local(
    local: Any,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shard_sizes: Mapping[int, Sequence[int]] | str | None,
) -> ShardTensorSpec:
    """The spec of the ShardTensor whose shards are the ranks' ``local``; raises alike on all ranks where it can."""
    check_process_group()
    mesh_coordinate(mesh)
    if isinstance(placements, Placement):
        raise TypeError(f"placements must be a sequence with one entry per mesh dim, e.g. ({placements},)")
    if isinstance(shard_sizes, Mapping):
        shard_sizes = {(m + mesh.ndim if m < 0 else m): tuple(s) for m, s in shard_sizes.items()}
    elif shard_sizes is not None and not isinstance(shard_sizes, str):
        raise TypeError(f"shard_sizes must be a dict {{mesh_dim: sizes}}, None or 'even', not {shard_sizes!r}")
    problem = _problem(local, mesh)
    if shard_sizes is None or debug_enabled():
        return _from_table(
            _gather_claims(local, mesh, placements, shard_sizes, problem), local, mesh, placements, shard_sizes
        )
    if problem:
        raise _ERRORS[problem](_describe_problem(problem, local, mesh))
    placements = normalize_placements(placements, mesh, local.ndim)
    shape = list(local.shape)
    sizes = {} if isinstance(shard_sizes, str) else shard_sizes
    for m, p in enumerate(placements):
        if isinstance(p, Shard):
            shape[p.dim] = sum(sizes[m]) if m in sizes else shape[p.dim] * mesh.size(m)
    return _checked(local, mesh, placements, shape, sizes if not isinstance(shard_sizes, str) else shard_sizes)


def _checked(local: Tensor, mesh: DeviceMesh, placements: Any, shape: Any, sizes: Any) -> ShardTensorSpec:
    spec = ShardTensorSpec.make(
        mesh, placements, shape, local.dtype, shard_sizes=sizes, stride=stride_like(local, shape)
    )
    for d, (have, expected) in enumerate(zip(local.shape, spec.local_shape(), strict=True)):
        if have != expected:
            m = spec.sharded_dims()[d]
            raise ValueError(
                f"the local tensor has shape {tuple(local.shape)}, but shard_sizes {spec.sizes[m]} of mesh dim {m} say "
                f"that rank {spec.coordinate[m]} along it holds {expected} in tensor dim {d}; pass the true sizes, or "
                "shard_sizes=None to infer them"
            )
    return spec


# -- what a rank claims ------------------------------------------------------------------------------------

_NOT_A_TENSOR, _IS_DTENSOR, _WRONG_DEVICE, _TOO_MANY_DIMS = 1, 2, 3, 4
_ERRORS = {_NOT_A_TENSOR: TypeError, _IS_DTENSOR: TypeError, _WRONG_DEVICE: ValueError, _TOO_MANY_DIMS: ValueError}


def _problem(local: Any, mesh: DeviceMesh) -> int:
    if not isinstance(local, Tensor):
        return _NOT_A_TENSOR
    if isinstance(local, DTensor):
        return _IS_DTENSOR
    if local.device.type != mesh.device_type:
        return _WRONG_DEVICE
    return _TOO_MANY_DIMS if local.ndim > MAX_NDIM else 0


def _describe_problem(problem: int, local: Any, mesh: DeviceMesh) -> str:
    return {
        _NOT_A_TENSOR: "the local tensor must be a torch.Tensor",
        _IS_DTENSOR: "the local tensor is a DTensor already; use ShardTensor.from_dtensor, or pass its to_local()",
        _WRONG_DEVICE: f"the local tensor is not on the mesh's device type {mesh.device_type!r}; move it there first",
        _TOO_MANY_DIMS: f"tensors of more than {MAX_NDIM} dims are not supported",
    }[problem]


def _gather_claims(
    local: Any, mesh: DeviceMesh, placements: Sequence[Placement], shard_sizes: Any, problem: int
) -> dict[tuple[int, ...], list[int]]:
    sizes = sorted((m, tuple(s)) for m, s in shard_sizes.items()) if isinstance(shard_sizes, Mapping) else shard_sizes
    claims = zlib.crc32(repr((tuple(placements), sizes)).encode())
    if problem in (_NOT_A_TENSOR, _TOO_MANY_DIMS):
        row = [problem, claims, -1, -1, *[-1] * MAX_NDIM]
    else:
        shape = [*local.shape, *[-1] * (MAX_NDIM - local.ndim)]
        row = [problem, claims, DTYPES.index(local.dtype), local.ndim, *shape]
    return gather_over_mesh(row, mesh)


def _from_table(
    table: dict[tuple[int, ...], list[int]],
    local: Any,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shard_sizes: Any,
) -> ShardTensorSpec:
    names = {at: int(mesh.mesh[at].item()) for at in table}

    def differ(what: str, column: int, show: Any) -> None:
        values: dict[int, list[int]] = {}
        for at, row in table.items():
            values.setdefault(row[column], []).append(names[at])
        if len(values) > 1:
            seen = ", ".join(f"{show(v)} on ranks {ranks}" for v, ranks in values.items())
            raise ValueError(f"ranks do not agree on the {what}: {seen}; every rank must pass the same")

    for at, row in table.items():
        if row[0]:
            raise _ERRORS[row[0]](f"rank {names[at]}: {_describe_problem(row[0], local, mesh)}")
    differ("dtype", 2, lambda v: DTYPES[v])
    differ("number of dims", 3, lambda v: v)
    differ("placements or shard_sizes", 1, lambda v: f"<{v:08x}>")
    placements = normalize_placements(placements, mesh, local.ndim)
    sharded = {p.dim: m for m, p in enumerate(placements) if isinstance(p, Shard)}
    shape: list[int] = []
    inferred: dict[int, tuple[int, ...]] = {}
    for d in range(local.ndim):
        m = sharded.get(d)
        if m is None:
            differ(f"size of tensor dim {d}, which is not sharded", 4 + d, lambda v: v)
            shape.append(local.shape[d])
            continue
        sizes: list[int] = []
        for k in range(mesh.size(m)):
            along = {names[at]: row[4 + d] for at, row in table.items() if at[m] == k}
            if len(set(along.values())) > 1:
                raise ValueError(
                    f"ranks {list(along)} share position {k} of mesh dim {m}, but their shards of tensor dim {d} have "
                    f"sizes {list(along.values())}; they must be equal"
                )
            sizes.append(next(iter(along.values())))
        inferred[m] = tuple(sizes)
        shape.append(sum(sizes))
    given = shard_sizes if isinstance(shard_sizes, Mapping) else {}
    for m, sizes_given in given.items():
        if sizes_given != inferred.get(m):
            raise ValueError(
                f"shard_sizes {sizes_given} of mesh dim {m} do not match the local tensors, which have sizes "
                f"{inferred.get(m)} there; pass the true sizes, or shard_sizes=None to infer them"
            )
    return _checked(local, mesh, placements, shape, inferred)
