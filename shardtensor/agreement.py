"""What ranks claim about their local tensors, compared: ranks that disagreed would hang later.

Everything a rank claims about its local tensor fits in one row of integers. The rows of all ranks of the mesh are
gathered, one small all-gather per mesh dim, and every rank checks the same table, so either all go on or all raise the
same error. With ``SHARDTENSOR_DEBUG=1`` this is done even where the caller has given all sizes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from .debug import debug_enabled
from .layout import ShardSizes, as_integers, mesh_coordinate, normalize_placements
from .spec import ShardTensorSpec
from .strides import stride_like

__all__ = ["DTYPES", "MAX_NDIM", "agree_on_local", "check_process_group", "gather_over_mesh"]

MAX_NDIM = 16
# In the same order on every rank, so that a dtype can be sent as its index.
DTYPES: list[torch.dtype] = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)

# Every rank's row, by its coordinate in the mesh.
Table = dict[tuple[int, ...], list[int]]


def check_process_group() -> None:
    """RuntimeError with the remedy where ``torch.distributed`` has not been initialized."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "ShardTensor needs a process group: start with torchrun and call torch.distributed.init_process_group() "
            "or init_device_mesh() first"
        )


def gather_over_mesh(row: Sequence[int], mesh: DeviceMesh) -> Table:
    """Every rank's ``row`` of integers (equally long everywhere), by mesh coordinate."""
    table = torch.tensor(row, dtype=torch.int64, device=mesh.device_type)
    for m in range(mesh.ndim):
        parts = [torch.empty_like(table) for _ in range(mesh.size(m))]
        if len(parts) > 1:
            dist.all_gather(parts, table, group=mesh.get_group(m))
        else:
            parts = [table]
        table = torch.stack(parts)
    # Each gather has put its mesh dim in front, so the dims are those of the mesh in reverse, and the row.
    rows = table.permute(*reversed(range(mesh.ndim)), mesh.ndim).reshape(-1, len(row)).tolist()
    return dict(zip(product(*(range(n) for n in mesh.shape)), rows, strict=True))


def agree_on_local(
    local: object, mesh: DeviceMesh, placements: Sequence[Placement], shard_sizes: ShardSizes
) -> ShardTensorSpec:
    """The spec of the ShardTensor whose shards are the ranks' ``local``; raises alike on all ranks where it can.

    With sizes given nothing is compared, so that nothing is communicated: a rank whose local tensor does not fit them
    then raises alone.
    """
    check_process_group()
    mesh_coordinate(mesh)
    if isinstance(placements, Placement):
        raise TypeError(f"placements must be a sequence with one entry per mesh dim, e.g. ({placements},)")
    if isinstance(shard_sizes, Mapping):
        shard_sizes = {(m + mesh.ndim if m < 0 else m): as_integers(tuple(s)) for m, s in shard_sizes.items()}
    elif shard_sizes is not None and not isinstance(shard_sizes, str):
        raise TypeError(f"shard_sizes must be a dict {{mesh_dim: sizes}}, None or 'even', not {shard_sizes!r}")
    problem = _problem(local, mesh)
    if shard_sizes is None or debug_enabled():
        table = gather_over_mesh(_claims(local, placements, shard_sizes, problem), mesh)
        return _from_table(table, local, mesh, placements, shard_sizes)
    if problem:
        raise _ERRORS[problem](_describe_problem(problem, mesh))
    assert isinstance(local, Tensor)
    placements = normalize_placements(placements, mesh, local.ndim)
    shape = list(local.shape)
    sizes = {} if isinstance(shard_sizes, str) else shard_sizes
    for m, p in enumerate(placements):
        if isinstance(p, Shard):
            shape[p.dim] = sum(sizes[m]) if m in sizes else shape[p.dim] * mesh.size(m)
    return _checked(local, mesh, placements, shape, shard_sizes)


def _checked(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], sizes: ShardSizes
) -> ShardTensorSpec:
    """The spec with these properties, checked against this rank's local tensor."""
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

# The columns of a row: a problem or 0, a checksum of placements and sizes, an index of DTYPES, the number of dims, and
# the sizes of the dims, padded to MAX_NDIM.
_PROBLEM, _CHECKSUM, _DTYPE, _NDIM, _SHAPE = range(5)


def _problem(local: object, mesh: DeviceMesh) -> int:
    """What is wrong with a local tensor by itself, or 0."""
    if not isinstance(local, Tensor):
        return _NOT_A_TENSOR
    if isinstance(local, DTensor):
        return _IS_DTENSOR
    if local.device.type != mesh.device_type:
        return _WRONG_DEVICE
    return _TOO_MANY_DIMS if local.ndim > MAX_NDIM else 0


def _describe_problem(problem: int, mesh: DeviceMesh) -> str:
    return {
        _NOT_A_TENSOR: "the local tensor must be a torch.Tensor",
        _IS_DTENSOR: "the local tensor is a DTensor already; use ShardTensor.from_dtensor, or pass its to_local()",
        _WRONG_DEVICE: f"the local tensor is not on the mesh's device type {mesh.device_type!r}; move it there first",
        _TOO_MANY_DIMS: f"tensors of more than {MAX_NDIM} dims are not supported",
    }[problem]


def _claims(local: object, placements: Sequence[Placement], shard_sizes: ShardSizes, problem: int) -> list[int]:
    """This rank's row."""
    sizes = sorted((m, tuple(s)) for m, s in shard_sizes.items()) if isinstance(shard_sizes, Mapping) else shard_sizes
    checksum = zlib.crc32(repr((tuple(placements), sizes)).encode())
    if problem == _TOO_MANY_DIMS or not isinstance(local, Tensor):
        return [problem, checksum, -1, -1, *[-1] * MAX_NDIM]
    shape = [*local.shape, *[-1] * (MAX_NDIM - local.ndim)]
    return [problem, checksum, DTYPES.index(local.dtype), local.ndim, *shape]


# -- what the table of all claims says -----------------------------------------------------------------------


def _from_table(
    table: Table, local: object, mesh: DeviceMesh, placements: Sequence[Placement], shard_sizes: ShardSizes
) -> ShardTensorSpec:
    ranks = {at: int(mesh.mesh[at].item()) for at in table}
    for at, row in table.items():
        if row[_PROBLEM]:
            raise _ERRORS[row[_PROBLEM]](f"rank {ranks[at]}: {_describe_problem(row[_PROBLEM], mesh)}")
    assert isinstance(local, Tensor)
    _check_equal(table, ranks, _DTYPE, "dtype", lambda v: str(DTYPES[v]))
    _check_equal(table, ranks, _NDIM, "number of dims")
    _check_equal(table, ranks, _CHECKSUM, "placements or shard_sizes", lambda v: f"<{v:08x}>")
    placements = normalize_placements(placements, mesh, local.ndim)
    sharded = {p.dim: m for m, p in enumerate(placements) if isinstance(p, Shard)}
    shape = list(local.shape)
    inferred: dict[int, tuple[int, ...]] = {}
    for d in range(local.ndim):
        m = sharded.get(d)
        if m is None:
            _check_equal(table, ranks, _SHAPE + d, f"size of tensor dim {d}, which is not sharded")
        else:
            inferred[m] = _sizes_along(table, ranks, mesh, m, d)
            shape[d] = sum(inferred[m])
    for m, given in shard_sizes.items() if isinstance(shard_sizes, Mapping) else ():
        if given != inferred.get(m):
            raise ValueError(
                f"shard_sizes {given} of mesh dim {m} do not match the local tensors, which have sizes "
                f"{inferred.get(m)} there; pass the true sizes, or shard_sizes=None to infer them"
            )
    return _checked(local, mesh, placements, shape, inferred)


def _check_equal(
    table: Table, ranks: Mapping[tuple[int, ...], int], column: int, what: str, show: Callable[[int], str] = str
) -> None:
    """ValueError where a column has several values, which names the ranks that have each."""
    values: dict[int, list[int]] = {}
    for at, row in table.items():
        values.setdefault(row[column], []).append(ranks[at])
    if len(values) > 1:
        seen = ", ".join(f"{show(v)} on ranks {some}" for v, some in values.items())
        raise ValueError(f"ranks do not agree on the {what}: {seen}; every rank must pass the same")


def _sizes_along(
    table: Table, ranks: Mapping[tuple[int, ...], int], mesh: DeviceMesh, m: int, d: int
) -> tuple[int, ...]:
    """The shard sizes of tensor dim ``d`` on mesh dim ``m``, on which ranks that share a position must agree."""
    sizes: list[int] = []
    for k in range(mesh.size(m)):
        along = {ranks[at]: row[_SHAPE + d] for at, row in table.items() if at[m] == k}
        if len(set(along.values())) > 1:
            raise ValueError(
                f"ranks {list(along)} share position {k} of mesh dim {m}, but their shards of tensor dim {d} have "
                f"sizes {list(along.values())}; they must be equal"
            )
        sizes.append(next(iter(along.values())))
    return tuple(sizes)
