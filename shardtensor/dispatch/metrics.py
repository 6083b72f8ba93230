"""Warnings where a metric would add up what every rank has already: torchmetrics' own synchronization.

A metric's state that was updated from ShardTensors is the value of the whole mesh, on each of its ranks. ``compute()``
gathers the states of all ranks and adds them up, so sums and counts get too large by the number of ranks; ratios,
means and extremes do not. Only arguments of the metric tell torchmetrics what its state is. So a program that has not
given them is warned, on all ranks alike: where the state is written to, if it is plain, as nobody sees who reads it;
and where it is gathered, if it is a ShardTensor.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..ranks.callers import calling_frame

# What to do where ranks of a mesh would be counted one by one.
REMEDY = (
    "A metric of torchmetrics needs sync_on_compute=False, or the process group of the data axis "
    '(process_group=mesh["dp"].get_group())'
)

_warned: set[str] = set()


def warn_of_state(written: Tensor, mesh: DeviceMesh) -> None:
    """Warn once for each class of metrics of which a plain state gets the value of a ShardTensor."""
    module: Any = sys.modules.get("torchmetrics")
    frame = calling_frame() if hasattr(module, "Metric") else None
    metric: Any = None if frame is None else frame.f_locals.get("self")
    if metric is None or not isinstance(metric, module.Metric):
        return
    if not any(state is written for state in metric.metric_state.values()):
        return
    synchronizes = (metric.sync_on_compute or metric.dist_sync_on_step) and metric.dist_sync_fn is None
    if synchronizes and metric.distributed_available_fn():
        warn_of_copies(f"the synchronization of {type(metric).__name__}", metric.process_group, mesh)


def warn_of_copies(what: str, group: dist.ProcessGroup | None, mesh: DeviceMesh) -> None:
    """Warn once if several ranks of the mesh are in the group; None: that of all ranks."""
    ranks = set(dist.get_process_group_ranks(group or dist.group.WORLD)).intersection(mesh.mesh.flatten().tolist())
    if len(ranks) < 2 or what in _warned:
        return
    _warned.add(what)
    warnings.warn(
        f"{what} takes the values of ranks {', '.join(map(str, sorted(ranks)))}, which all have the one of their mesh: "
        f"a sum counts it {len(ranks)} times. {REMEDY}",
        stacklevel=2,
    )
