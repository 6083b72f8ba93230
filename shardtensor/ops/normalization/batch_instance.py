"""Batch and instance normalization, which keep running statistics.

Where nothing has to be sent, torch's own kernel works on the shard; else see ``plans.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..._compat import TensorMeta, batch_norm_legit, batch_norm_legit_no_training, hidden_from_program
from ..._compat.c10d import process_group
from ...dispatch.registry import register
from ...dispatch.tensor import ShardTensor, promote
from ...layout.caches import cached
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Composed, Operand, Plan, operator, planned
from .geometry import Geometry, geometry_of_channels, prepare_parameters, result_dtype
from .plans import LocalBatchNorm, LocalGroupNorm, ShardedNorm
from .statistics import Replicas, RunningStatistics, moments_of

_aten = torch.ops.aten

PARAMETERS: Any = {"parameters": "weight bias running_mean running_var", "sharded": "weight bias"}


# -- plans -----------------------------------------------------------------------------------------------------------


def plan_channels(
    call: Arguments,
    geometry: Geometry,
    parameters: Sequence[Operand | None],
    use_input: bool,
    momentum: float,
    replicas: Replicas | None = None,
) -> Plan:
    """Batch norm (dim 0 is normalized) or instance norm.

    Args:
        parameters: weight, bias, running mean and running variance.
        replicas: other meshes, whose batches count, too.
    """
    spec, (weight, bias, *running) = geometry.spec, parameters
    prepare_parameters(call, geometry, weight=weight, bias=bias)
    dtype = result_dtype(
        call,
        lambda t, w, b, mean, var: torch.batch_norm(t, w, b, mean, var, True, 0.1, 1e-5, False),
        spec,
        *parameters,
    )
    updates = any(s is not None for s in running)
    # torch's kernel would update the running statistics with what this rank alone has.
    alone = bool(spec.sharded_dims()) or 0 not in geometry.dims
    if use_input and (geometry.merges or (updates and alone) or replicas):
        statistics = RunningStatistics(geometry, momentum) if updates else None
        return ShardedNorm(call, geometry, dtype, weight, bias, running=statistics, replicas=replicas)
    if use_input and 0 not in geometry.dims:
        return LocalGroupNorm(call, geometry, dtype, weight, bias)
    return LocalBatchNorm(call, geometry, dtype, parameters, use_input, momentum)


# -- entry points ----------------------------------------------------------------------------------------------------


def _declare(function: Callable[..., Tensor]) -> None:
    of_samples = function in (F.instance_norm, torch.instance_norm)

    # Each on its own, for torch's checks: the ones in torch.nn.functional refuse channels of one value.
    @operator(function, tensors="input", **PARAMETERS)
    def plan_norm(
        call: Arguments,
        input: ShardTensorSpec,
        weight: Operand | None = None,
        bias: Operand | None = None,
        running_mean: TensorMeta | None = None,
        running_var: TensorMeta | None = None,
        training: bool = False,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Plan:
        """Batch norm, which has ``training``, or instance norm, which has ``use_input_stats``."""
        use_input = use_input_stats if of_samples else training
        parameters = weight, bias, running_mean, running_var
        if function in (F.batch_norm, F.instance_norm):
            call.returned(function, input, running_mean, running_var, weight, bias, use_input, momentum, eps)
        else:
            call.returned(function, input, *parameters, use_input, momentum, eps, False)
        if of_samples:
            geometry = geometry_of_channels("instance_norm", input, range(2, len(input.shape)), eps)
        else:
            geometry = geometry_of_batches(call, input, eps)
        return plan_channels(call, geometry, parameters, use_input, momentum)


def geometry_of_batches(call: Arguments, spec: ShardTensorSpec, eps: float) -> Geometry:
    n = len(spec.shape)
    if n < 2:
        raise call.refuse("an input of one dim has no channels", "give it the shape (N, C)")
    return geometry_of_channels("batch_norm", spec, [d for d in range(n) if d != 1], eps)


for _function in (F.batch_norm, torch.batch_norm, F.instance_norm, torch.instance_norm):
    _declare(_function)


# -- called by the operators' names: they return the statistics, too ---------------------------------------------------


@operator(
    *(torch.native_batch_norm, _aten.native_batch_norm),
    *(batch_norm_legit_no_training, _aten._native_batch_norm_legit_no_training, _aten._batch_norm_with_update),
    tensors="input",
    **PARAMETERS,
)
def plan_native_batch_norm(
    call: Arguments,
    input: ShardTensorSpec,
    weight: Operand | None,
    bias: Operand | None,
    running_mean: TensorMeta | None,
    running_var: TensorMeta | None,
    momentum: float,
    eps: float,
    training: bool | None = None,
) -> Plan:
    """Batch norm with mean and reciprocal standard deviation, whose gradients torch ignores."""
    with_update = call.name == "_batch_norm_with_update"
    training = with_update if training is None else training
    geometry = geometry_of_batches(call, input, eps)
    kernel: Any = torch.native_batch_norm
    parameters = weight, bias, running_mean, running_var
    dtype = result_dtype(call, lambda t, *p: kernel(t, *p, True, momentum, eps)[1], input, *parameters)

    options: Any = training, momentum, eps, False

    def compute(x: ShardTensor, *tensors: Any) -> tuple[Any, ...]:
        y = torch.batch_norm(x, *tensors, *options)
        if training:
            saved = [t.squeeze(geometry.dims) for t in moments_of(x.detach(), geometry.dims, eps, dtype)]
        else:  # as empty as torch returns them
            one = torch.ones(1, dtype=y.dtype)
            empty = kernel(one[None].expand(2, 1), None, None, one, one, False, momentum, eps)[1:]
            saved = [promote(t.to(x.device), x.device_mesh) for t in empty]
        if with_update:  # what a GPU's kernel keeps for its backward comes last
            saved.append(promote(torch.empty(0, dtype=torch.uint8, device=x.device), x.device_mesh))
        return y, *saved

    return Composed(compute)


# Not declared, because its overloads have the running statistics or do not have them, in the middle.
@register(batch_norm_legit, _aten._native_batch_norm_legit)
def _native_batch_norm_legit(input: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> tuple[Any, ...]:
    statistics = rest if len(rest) == 5 else (None, None, *rest)
    return torch.native_batch_norm(input, weight, bias, *statistics)


# -- sync batch norm ---------------------------------------------------------------------------------------------------

# ``nn.SyncBatchNorm``: batch norm of the global batch, and of those of other meshes in the module's process group.


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
    with hidden_from_program():
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
