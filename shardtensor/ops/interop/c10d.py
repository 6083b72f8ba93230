"""``torch.distributed.all_reduce`` on a ShardTensor, which training frameworks call for losses and metrics.

It reduces the values that the ranks of the group hold, in place, and leaves the layout as it is: a Partial is resolved,
reduced over the group, and made Partial again, so that other views of the memory stay right. A sharded tensor may be
reduced over ranks that hold the same part of other tensors (those along a data axis), not over ranks of its own.

The operator has a handler, not a plan: it gets a process group, and returns the work under way next to the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from ..._compat.c10d import group_along
from ...communication.redistribute import redistribute_local
from ...dispatch.planning import spec_of
from ...dispatch.registry import register
from ...errors import refuse
from ...layout.spec import ShardTensorSpec

_all_reduce = torch.ops.c10d.allreduce_.default


@register(_all_reduce)
def _reduce_values(
    tensors: Sequence[Tensor],
    process_group: torch.ScriptObject,
    reduce_op: torch.ScriptObject,
    *options: Any,
    **named: Any,
) -> tuple[Sequence[Tensor], torch.ScriptObject]:
    ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(process_group))
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            _check_same_part(spec_of(tensor), set(ranks))
    values = [_value(t) for t in tensors]
    _, work = _all_reduce(values, process_group, reduce_op, *options, **named)
    for tensor, value in zip(tensors, values, strict=True):
        if isinstance(tensor, DTensor) and value is not tensor._local_tensor:
            dist.Work.unbox(work).wait()
            spec = spec_of(tensor)
            tensor._local_tensor.copy_(redistribute_local(value, spec.for_gradient(), spec))
    return tensors, work


def _value(tensor: Tensor) -> Tensor:
    """What the ranks reduce: the local tensor itself unless it is a contribution."""
    if not isinstance(tensor, DTensor):
        return tensor
    spec = spec_of(tensor)
    local = tensor._local_tensor
    return redistribute_local(local, spec, spec.for_gradient()) if spec.partial_mesh_dims() else local


def _check_same_part(spec: ShardTensorSpec, ranks: set[int]) -> None:
    for m, placement in enumerate(spec.placements):
        along = dist.get_process_group_ranks(group_along(spec.mesh, m))
        if isinstance(placement, Shard) and len(ranks.intersection(along)) > 1:
            raise refuse(
                "all_reduce",
                spec,
                f"the group's ranks hold different shards of it (mesh dim {m})",
                "reduce to a number first (mean, sum), or pass the group of the data axis",
            )
