"""Weights that all ranks have a copy of: made equal, and compared."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._compat.c10d import group_along
from ..layout.placements import given_mesh
from ..layout.strides import as_bytes
from .agreement import check_same
from .equal_values import Copy, not_equal, unequal
from .failures import communicating


def synchronize(model: nn.Module, mesh: DeviceMesh, *, source: int | None = None) -> None:
    """Give all ranks of ``mesh`` the parameters and buffers of one of them, in place.

    DDP and FSDP2 over a data axis do not make weights equal along the domain axis: with different seeds the results
    would be silently wrong. Call this before you wrap the model. A DTensor that is sharded on a mesh dim has one owner
    of each shard there, and is left unchanged.

    Args:
        source: the *global* rank whose values all get; default: the mesh's first.

    Raises:
        ValueError: on every rank of the mesh, before any value is sent: names, shapes, dtypes, placements or the order
            of parameters and buffers differ between ranks; a tensor on the meta device, which has no values yet; a
            source outside the mesh.

    Example::

        synchronize(model, mesh["domain"])
    """
    mesh = given_mesh(mesh)
    source = int(mesh.mesh.flatten()[0]) if source is None else source
    _check_alike(model, mesh, f"source={source}")
    found = (mesh.mesh == source).nonzero().tolist()
    if not found:
        raise ValueError(f"source={source} is not in the mesh {mesh.mesh.tolist()}; name a global rank of the mesh")
    for name, tensor in _tensors(model):
        copy = copy_of(name, tensor, mesh)
        for m in copy.mesh_dims:
            # On the mesh's device and as bytes: backends lack devices, dtypes and memory formats.
            sent = copy.local.to(mesh.device_type).resolve_conj().resolve_neg().contiguous()
            with communicating(group_along(mesh, m)):
                dist.broadcast(as_bytes(sent), group=group_along(mesh, m), group_src=found[0][m])
            if sent is not copy.local:
                copy.local.copy_(sent)


def verify(model: nn.Module, mesh: DeviceMesh) -> None:
    """Check that parameters and buffers are bitwise equal on all ranks of ``mesh``.

    Raises:
        RuntimeError: on every rank of the mesh, naming those that are not.
        ValueError: on every rank, as with :func:`synchronize`.

    Example::

        verify(model, mesh["domain"])
    """
    mesh = given_mesh(mesh)
    _check_alike(model, mesh)
    wrong = unequal([copy_of(name, tensor, mesh) for name, tensor in _tensors(model)], mesh)
    if wrong:
        raise RuntimeError(
            f"{not_equal(wrong, mesh)}. Call shardtensor.parallel.synchronize(model, mesh) before wrapping the model"
        )


def copy_of(name: str, tensor: Tensor, mesh: DeviceMesh) -> Copy:
    """This rank's part of a tensor, and the mesh dims of ``mesh`` along which all ranks have the same part."""
    owners = _owners(tensor)
    groups = [set(dist.get_process_group_ranks(group_along(mesh, m))) for m in range(mesh.ndim)]
    alike = tuple(m for m, members in enumerate(groups) if not any(len(members & others) > 1 for others in owners))
    return Copy(name, tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach(), alike)


def line_of(name: str, tensor: Tensor) -> str:
    """A tensor's name and all that must be the same on every rank before its values can be compared."""
    placed = f", {tensor.placements}" if isinstance(tensor, DTensor) else ""
    return f"{name} ({tuple(tensor.shape)}, {tensor.dtype}, {tensor.device.type}{placed})"


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device and has no values yet; initialise the model first")
        yield name, tensor


def _check_alike(model: nn.Module, mesh: DeviceMesh, *asked: str) -> None:
    """ValueError on every rank where the ranks' models do not have the same tensors in the same order."""
    lines = [line_of(name, tensor) for name, tensor in chain(model.named_parameters(), model.named_buffers())]
    check_same("model's parameters and buffers", [*asked, *lines], mesh)


def _owners(tensor: Tensor) -> list[set[int]]:
    """For each mesh dim on which a DTensor is not replicated, the ranks of this rank's group."""
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    owned = [m for m, p in enumerate(tensor.placements) if not p.is_replicate()]
    return [set(dist.get_process_group_ranks(group_along(mesh, m))) for m in owned]
