"""Whether copies of tensors are equal on all ranks: digests are compared, no values are sent."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .agreement import gather_over_mesh
from .strides import as_bytes

__all__ = ["Copy", "digest", "not_equal", "unequal"]

_CHUNK = 1 << 20  # integers; what is computed on the way has their size
_SPREAD = 0x5851F42D4C957F2D  # odd, so that every bit of a number counts
_BYTES = 8


def digest(tensor: Tensor) -> int:
    """64 bits that follow from a tensor's numbers, bit by bit: NaN equals itself, and 0.0 differs from -0.0.

    Computed where the tensor is; shape and dtype do not count.

    Example:
        >>> import torch
        >>> digest(torch.tensor([1.0, 2.0])) == digest(torch.tensor([2.0, 1.0]))
        False
    """
    with torch.no_grad():
        data = as_bytes(tensor.detach().resolve_conj().resolve_neg())
        missing = -len(data) % _BYTES
        if missing or data.storage_offset() % _BYTES:
            data = torch.cat([data, data.new_zeros(missing)])
        total = torch.zeros((), dtype=torch.int64, device=data.device)
        for i, numbers in enumerate(torch.split(data.view(torch.int64), _CHUNK)):
            places = torch.arange(i * _CHUNK, i * _CHUNK + len(numbers), device=data.device)
            total += ((numbers ^ (numbers >> 29)) * (places * (2 * _SPREAD % 2**63) + _SPREAD)).sum()
        return int(total)


class Copy(NamedTuple):
    """A tensor of which other ranks have copies.

    Attributes:
        mesh_dims: along these mesh dims all ranks have one.
    """

    name: str
    local: Tensor
    mesh_dims: tuple[int, ...]


def unequal(copies: Sequence[Copy], mesh: DeviceMesh) -> list[str]:
    """Which of the copies are not equal on all ranks that have one; the same on every rank of the mesh.

    One all-gather per mesh dim of a few integers, and another one of an integer for each copy where they differ.
    Names and mesh dims must be the same on all ranks.
    """
    digests = [digest(copy.local) for copy in copies]
    kinds = list(dict.fromkeys(copy.mesh_dims for copy in copies))
    together = [
        zlib.crc32(repr([d for d, copy in zip(digests, copies) if copy.mesh_dims == k]).encode()) for k in kinds
    ]
    table = gather_over_mesh(together, mesh, "comparison of values")
    if all(_equal({at: row[i] for at, row in table.items()}, kind) for i, kind in enumerate(kinds)):
        return []
    table = gather_over_mesh(digests, mesh, "comparison of values")
    return [
        copy.name
        for i, copy in enumerate(copies)
        if not _equal({at: row[i] for at, row in table.items()}, copy.mesh_dims)
    ]


def not_equal(names: Sequence[str], mesh: DeviceMesh) -> str:
    """What errors say of the copies that :func:`unequal` names: the first ones."""
    shown = ", ".join(names[:8]) + f" and {len(names) - 8} more" * (len(names) > 8)
    return f"not equal on all ranks of the mesh {mesh.mesh.tolist()}: {shown}"


def _equal(numbers: Mapping[tuple[int, ...], int], mesh_dims: Sequence[int]) -> bool:
    """Whether the numbers of ranks that differ in these mesh dims only are equal."""
    seen: dict[tuple[int, ...], int] = {}
    for at, number in numbers.items():
        others = tuple(k for m, k in enumerate(at) if m not in mesh_dims)
        if seen.setdefault(others, number) != number:
            return False
    return True
