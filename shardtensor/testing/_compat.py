"""The private torch API that the test tools need, in one place; see ``shardtensor/_compat.py`` for why."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
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


def group_of(reference: Any) -> dist.ProcessGroup:
    """The process group that a c10d operator was given: boxed, by name, or as it is."""
    if isinstance(reference, str):
        return _resolve_process_group(reference)
    if isinstance(reference, torch.ScriptObject):
        return dist.ProcessGroup.unbox(reference)  # type: ignore[attr-defined]
    return reference


def init_fake_process_group(rank: int, world_size: int) -> None:
    """Become ``rank`` of a world that communicates nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def clear_dtensor_caches() -> None:
    """Forget what DTensor worked out for earlier operators; it may hold for this process's earlier rank only."""
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()
    propagate = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    if hasattr(propagate, "cache_clear"):
        propagate.cache_clear()
