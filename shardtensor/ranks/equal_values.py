"""Copies of tensors that all ranks hold: compared by their digests, or made equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._compat.c10d import group_along
from ..errors import MOVE_THE_MODEL
from ..layout.placements import check_in_mesh, first_rank, given_mesh
from ..layout.strides import as_bytes
from .agreement import check_same, compare_histories
from .compared_operands import note_held
from .failures import communicating
from .history import MOST_VALUES


class Copy(NamedTuple):
    """A tensor of which other ranks have copies.

    Attributes:
        mesh_dims: along these mesh dims all ranks have one.
    """

    name: str
    local: Tensor
    mesh_dims: tuple[int, ...]


def compare(what: str, copies: Sequence[Copy], mesh: DeviceMesh, *, exactly: bool) -> None:
    """Have the ranks of the mesh compare copies, of which names and mesh dims are the same on all; a small all-gather.

    Args:
        what: what this is called in the history.
        exactly: rounding errors count as differences.

    Raises:
        RanksDiffer: on all ranks of the mesh; the text names the first copy that differs.
    """
    for i in range(0, len(copies), MOST_VALUES):
        for name, local, mesh_dims in copies[i : i + MOST_VALUES]:
            note_held(name, local.contiguous(), mesh, mesh_dims, exactly=exactly)
        compare_histories(what, mesh)


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
