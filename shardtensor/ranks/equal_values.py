"""Whether copies of tensors are equal on all ranks: digests are compared, no values are sent."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._compat.c10d import group_along
from ..errors import MOVE_THE_MODEL
from ..layout.placements import check_in_mesh, first_rank, given_mesh
from ..layout.strides import as_bytes
from .agreement import check_same, gather_over_mesh, show
from .failures import communicating
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


# -- equal weights -----------------------------------------------------------------------------------------------------


def synchronize(model: nn.Module, mesh: DeviceMesh, *, source: int | None = None, offloaded: bool = False) -> None:
    """Send the parameters and buffers of one rank to all ranks of ``mesh``, in place.

    DDP and FSDP2 over a data axis do not make weights equal along the domain axis. Call this before you wrap the model.
    DTensors do not change on mesh dims on which they are sharded.

    Args:
        source: the *global* rank whose values are sent; default: the first rank of the mesh.
        offloaded: whether parameters may be on another device than the mesh's, as those that FSDP2 offloads.

    Raises:
        ValueError: on every rank of the mesh, before any value is sent: names, shapes, dtypes, placements or the order
            of parameters and buffers differ between ranks; a tensor on the meta device, which has no values yet; a
            parameter on another device than the mesh's; a source outside the mesh.

    Example::

        synchronize(model, mesh["domain"])
    """
    mesh = given_mesh(mesh)
    source = first_rank(mesh) if source is None else source
    tensors = [*model.named_parameters(), *model.named_buffers()]
    lines = [line_of(name, tensor) for name, tensor in tensors]
    check_same("model's parameters and buffers", [f"source={source}", *lines], mesh)
    check_in_mesh("source", source, mesh)
    found = (mesh.mesh == source).nonzero().tolist()
    copies = [copy_of(name, tensor, mesh) for name, tensor in tensors]
    for name, parameter in model.named_parameters():
        if not offloaded and parameter.device.type != mesh.device_type:
            raise ValueError(
                f"{name} is on {parameter.device.type!r}, and the mesh on {mesh.device_type!r}; {MOVE_THE_MODEL}"
            )
    for copy in copies:
        for m in copy.mesh_dims:
            # On the mesh's device and as bytes: backends lack devices, dtypes and memory formats.
            sent = copy.local.to(mesh.device_type).resolve_conj().resolve_neg().contiguous()
            with communicating(group_along(mesh, m)):
                dist.broadcast(as_bytes(sent), group=group_along(mesh, m), group_src=found[0][m])
            if sent is not copy.local:
                copy.local.copy_(sent)


def copy_of(name: str, tensor: Tensor, mesh: DeviceMesh) -> Copy:
    """This rank's part of a tensor, and the mesh dims of ``mesh`` along which all ranks have the same part."""
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device and has no values yet; initialise the model first")
    owners = _owners(tensor)
    groups = [set(dist.get_process_group_ranks(group_along(mesh, m))) for m in range(mesh.ndim)]
    alike = tuple(m for m, members in enumerate(groups) if not any(len(members & others) > 1 for others in owners))
    return Copy(name, tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach(), alike)


def line_of(name: str, tensor: Tensor) -> str:
    """A tensor's name and all that must be the same on every rank before its values can be compared."""
    placed = f", {tensor.placements}" if isinstance(tensor, DTensor) else ""
    return f"{name} ({tuple(tensor.shape)}, {tensor.dtype}, {tensor.device.type}{placed})"


def _owners(tensor: Tensor) -> list[set[int]]:
    """For each mesh dim on which a DTensor is not replicated, the ranks of this rank's group."""
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    owned = [m for m, p in enumerate(tensor.placements) if not p.is_replicate()]
    return [set(dist.get_process_group_ranks(group_along(mesh, m))) for m in owned]
