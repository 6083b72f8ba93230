"""Whether copies of tensors are equal on all ranks: digests are compared, no values are sent."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .agreement import check_same, gather_over_mesh, show
from .history import SAME_VALUES
from .summaries import differ, digest, summary, tolerance_of


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


def check_plain(what: str, tensors: Sequence[tuple[str, Tensor]], mesh: DeviceMesh) -> None:
    """Check that the ranks' plain tensors, with their names, are the same, but for rounding; one small all-gather.

    Raises:
        ValueError: on all ranks of the mesh: names, shapes or dtypes differ.
        RuntimeError: on all ranks of the mesh: values differ.
    """
    if not tensors:
        return
    lines = [f"{name} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in tensors]
    held = [number for _, t in tensors for number in summary(t).tolist()]
    table = gather_over_mesh([zlib.crc32(repr((lines, held[::4])).encode())], mesh, "comparison of plain tensors")
    if len({checksum for [checksum] in table.values()}) == 1:
        return
    check_same(what, lines, mesh)
    rows = gather_over_mesh(held, mesh, "comparison of plain tensors").values()
    for i, (line, (_, t)) in enumerate(zip(lines, tensors, strict=True)):
        if differ([row[4 * i : 4 * i + 4] for row in rows], tolerance_of(t.dtype)):
            begins = show(beginning(t), mesh)
            raise RuntimeError(f"the {what} differ between ranks: {line} begins with {begins}. {SAME_VALUES}")


def beginning(tensor: Tensor) -> str:
    """Its first numbers, for errors."""
    return str(tensor.detach().reshape(-1)[:3].tolist())


def _equal(numbers: Mapping[tuple[int, ...], int], mesh_dims: Sequence[int]) -> bool:
    """Whether the numbers of ranks that differ in these mesh dims only are equal."""
    seen: dict[tuple[int, ...], int] = {}
    for at, number in numbers.items():
        others = tuple(k for m, k in enumerate(at) if m not in mesh_dims)
        if seen.setdefault(others, number) != number:
            return False
    return True
