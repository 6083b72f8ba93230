"""``nn.SyncBatchNorm``: batch norm of the global batch, and of those of other meshes in the module's process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..._compat import TensorMeta, untraced
from ..._compat.c10d import process_group
from ...dispatch.registry import register
from ...dispatch.tensor import ShardTensor
from ...layout.caches import cached
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Operand, Plan, planned
from .batch_instance import PARAMETERS, geometry_of_batches, plan_channels
from .statistics import Replicas


@register(nn.SyncBatchNorm.forward)
def _sync_batch_norm(module: Any, input: ShardTensor) -> Any:
    # A mesh is one device to the module, whatever is sharded. There is no need for a GPU.
    group: Any = module.process_group or dist.group.WORLD
    if not module.training or not _ranks_of(input.device_mesh, group.group_name):
        return nn.BatchNorm1d.forward(module, input)
    if input.ndim < 2:
        raise ValueError(f"expected at least 2D input (got {input.ndim}D input)")
    momentum, running = module.momentum or 0.0, (None, None)
    if module.track_running_stats:
        running = module.running_mean, module.running_var
        module.num_batches_tracked.add_(1)
        if module.momentum is None:
            momentum = 1.0 / module.num_batches_tracked.item()
    return _synchronized(input, module.weight, module.bias, *running, momentum, module.eps, group.group_name)


@cached(maxsize=256)
def _ranks_of(mesh: DeviceMesh, group: str) -> int:
    """How many ranks of a mesh are in a process group; 0 if it has no others."""
    members = set(dist.get_process_group_ranks(process_group(group)))
    with untraced():
        held = len(members.intersection(mesh.mesh.flatten().tolist()))
    return held if held < len(members) else 0


@planned("SyncBatchNorm", tensors="input", **PARAMETERS)
def _synchronized(
    call: Arguments,
    input: ShardTensorSpec,
    weight: Operand | None,
    bias: Operand | None,
    running_mean: TensorMeta | None,
    running_var: TensorMeta | None,
    momentum: float,
    eps: float,
    group: str,
) -> Plan:
    parameters = weight, bias, running_mean, running_var
    call.returned(torch.batch_norm, input, *parameters, True, momentum, eps, False)
    geometry, ranks = geometry_of_batches(call, input, eps), _ranks_of(input.mesh, group)
    if ranks > 1 and 1 in input.sharded_dims():
        reason = "the ranks of its process group have different channels, and some of them belong to another mesh"
        raise call.refuse(reason, "shard the batch or spatial dims, or give the module the process group of the mesh")
    replicas = Replicas(process_group(group), ranks, geometry.count)
    return plan_channels(call, geometry, parameters, True, momentum, replicas)
