"""The private torch API that the test tools use, in one place; see ``shardtensor/_compat`` for why."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = [
    "TorchDispatchMode",
    "clear_dtensor_caches",
    "group_of",
    "init_fake_process_group",
    "tree_flatten",
    "tree_unflatten",
]


def group_of(reference: str | torch.ScriptObject | dist.ProcessGroup) -> dist.ProcessGroup:
    """The process group that a c10d operator was given: by name, boxed, or itself."""
    group: dist.ProcessGroup
    if isinstance(reference, str):
        group = _resolve_process_group(reference)  # type: ignore[arg-type]  # its NewType is not in 2.11
    elif isinstance(reference, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(reference)
    else:
        group = reference
    return group


def init_fake_process_group(rank: int, world_size: int) -> None:
    """Make this process ``rank`` of a world in which nothing is communicated."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def clear_dtensor_caches() -> None:
    """Clear what DTensor has cached for earlier operators; it may be valid for this process's earlier rank only."""
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()
    propagate = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    if hasattr(propagate, "cache_clear"):
        propagate.cache_clear()  # type: ignore[no-untyped-call]
