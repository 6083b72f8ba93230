"""Parameters that every rank holds whole: their gradients have to be summed over the ranks that share the input.

A plain weight that meets a sharded input gets, on each rank, only the contribution of that rank's shard. The sum over
the domain is done here, in the gradient's own way back, so ``.grad`` is plain and complete and optimizers, DDP and
FSDP see what they see on one device.

[Note: contributions] The gradient of a DTensor that is Replicate on a mesh dim comes back as ``Partial()`` there,
always, however it was used. Where ranks worked on different shards that is what they have. Where they all did the same
work, one keeps the gradient and the others get zeros: nothing is sent. So gradients of several uses add up as they
are, and FSDP2, which sums over the mesh dims it is given without asking for placements, reduces all of them rightly in
its own communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .errors import different_meshes, refuse
from .redistribute import all_reduce
from .spec import ShardTensorSpec
from .tensor import ShardTensor

__all__ = ["local_parameters"]


def local_parameters(op: str, spec: ShardTensorSpec, *parameters: Tensor | None) -> list[Tensor | None]:
    """Plain versions of replicated parameters for local work on an input with ``spec``, gradients seen to.

    Args:
        op: the operator's name, for errors.
        spec: of the sharded input. Gradients are summed over the mesh dims that shard it, in one all-reduce per mesh
            dim for all parameters together.
        parameters: plain tensors (equal on all ranks), replicated DTensors on the same mesh, or None.

    Raises:
        UnsupportedSharding: a parameter that is sharded, or on another mesh.
    """
    mesh_dims = [m for m, p in enumerate(spec.placements) if isinstance(p, Shard) and spec.mesh.size(m) > 1]
    grad_placements = [Partial() if m in mesh_dims else Replicate() for m in range(spec.mesh.ndim)]
    result: list[Tensor | None] = list(parameters)
    plain = []
    for i, p in enumerate(parameters):
        if isinstance(p, DTensor):
            if p.device_mesh != spec.mesh:
                raise different_meshes(op, [spec, p])
            if not all(q.is_replicate() for q in p.placements):
                raise refuse(
                    op, [spec, p], "the parameter is sharded", "redistribute it to Replicate() before the call"
                )
            result[i] = ShardTensor.from_dtensor(p).to_local(grad_placements=grad_placements)
        elif p is not None and p.requires_grad and torch.is_grad_enabled():
            plain.append(i)
    if plain and mesh_dims:
        completed = _SumGradients.apply(spec.mesh, mesh_dims, *(parameters[i] for i in plain))
        for i, p in zip(plain, completed, strict=True):
            result[i] = p
    return result


class _SumGradients(torch.autograd.Function):
    """Identity whose backward sums the gradients over the mesh dims."""

    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, mesh_dims: Sequence[int], *tensors: Tensor) -> Any:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        ctx.mesh, ctx.mesh_dims = mesh, mesh_dims
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        return (None, None, *sum_over_mesh(grads, ctx.mesh, ctx.mesh_dims))


def sum_over_mesh(tensors: Sequence[Tensor | None], mesh: DeviceMesh, mesh_dims: Sequence[int]) -> list[Tensor | None]:
    """Each tensor summed over the mesh dims: one all-reduce per mesh dim and dtype for all of them together.

    Which of them are None must be the same on every rank; it follows from the graph, which is.
    """
    result = list(tensors)
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i, t in enumerate(tensors):
        if t is not None:
            by_dtype.setdefault(t.dtype, []).append(i)
    for members in by_dtype.values():
        parts = [tensors[i] for i in members]
        flat = torch.cat([t.reshape(-1) for t in parts])  # type: ignore[union-attr]
        for m in mesh_dims:
            flat = all_reduce(flat, mesh.get_group(m))
        for i, t, piece in zip(members, parts, flat.split([t.numel() for t in parts]), strict=True):  # type: ignore[union-attr]
            result[i] = piece.view(t.shape)  # type: ignore[union-attr]
    return result
