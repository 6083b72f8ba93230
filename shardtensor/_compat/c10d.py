"""torch.distributed's collectives, process groups and store, by their private ways."""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from inspect import unwrap
from traceback import walk_stack
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllreduceCoalescedOptions,
    _get_default_store,
    _resolve_process_group,
    _world,
)


def _asynchronous(options: Any) -> Any:
    options.asyncOp = True
    return options


# ``torch.distributed``'s functions spend two thirds of their time on checks of what our plans have made sure of. These
# call the process group as they do, and like them return a handle to wait for.
_ALL_TO_ALL = _asynchronous(dist.AllToAllOptions())
_ALL_GATHER = _asynchronous(AllgatherOptions())
_ALL_REDUCE_COALESCED = _asynchronous(AllreduceCoalescedOptions())
_ALL_TO_ALL_METHOD = "all_to_all_single" if hasattr(dist.ProcessGroup, "all_to_all_single") else "alltoall_base"
_ALL_GATHER_METHOD = "all_gather_single" if hasattr(dist.ProcessGroup, "all_gather_single") else "_allgather_base"


def c10d_all_to_all(
    out: torch.Tensor, inp: torch.Tensor, out_splits: list[int], in_splits: list[int], group: dist.ProcessGroup
) -> dist.Work:
    """``dist.all_to_all_single(..., async_op=True)``."""
    work: dist.Work = getattr(group, _ALL_TO_ALL_METHOD)(out, inp, out_splits, in_splits, _ALL_TO_ALL)
    return work


def c10d_all_gather_coalesced(
    outs: list[torch.Tensor], inps: list[torch.Tensor], group: dist.ProcessGroup
) -> dist.Work:
    """All ranks' tensors, of each of several contiguous ones, in one collective."""
    return group.allgather_into_tensor_coalesced(outs, inps, _ALL_GATHER)


def c10d_all_reduce(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> dist.Work:
    """``dist.all_reduce(..., async_op=True)`` of a tensor of real numbers."""
    return group.allreduce([tensor], _all_reduce_options(op))


def c10d_all_reduce_coalesced(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> dist.Work:
    """Sums of several contiguous tensors of one dtype, each in place, in one collective."""
    return group.allreduce_coalesced(tensors, _ALL_REDUCE_COALESCED)


def c10d_messages(
    recvs: Sequence[tuple[int, torch.Tensor]], sends: Sequence[tuple[int, torch.Tensor]], group: dist.ProcessGroup
) -> list[dist.Work]:
    """``dist.batch_isend_irecv`` of ``(rank of the group, contiguous tensor)``. The group's ranks are connected."""
    if not recvs and not sends:
        return []
    # Backends of the CPU have nothing to coalesce.
    if (recvs or sends)[0][1].device.type == "cpu":
        return [group.recv([t], peer, 0) for peer, t in recvs] + [group.send([t], peer, 0) for peer, t in sends]
    ops = [dist.P2POp(dist.irecv, t, group=group, group_peer=peer) for peer, t in recvs]
    ops += [dist.P2POp(dist.isend, t, group=group, group_peer=peer) for peer, t in sends]
    works: list[dist.Work] = dist.batch_isend_irecv(ops)
    return works


@cache
def _all_reduce_options(op: dist.ReduceOp.RedOpType) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = op  # type: ignore[assignment]
    return _asynchronous(options)


def c10d_all_gather(out: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """``dist.all_gather_into_tensor(..., async_op=True)`` of contiguous tensors of real numbers."""
    work: dist.Work = getattr(group, _ALL_GATHER_METHOD)(out, tensor, _ALL_GATHER)
    return work


def c10d_gather(outs: list[torch.Tensor], tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """``dist.gather(..., async_op=True)`` to the group's first rank, on which alone there are ``outs``."""
    return group.gather([outs] if outs else [], [tensor])


def c10d_scatter(out: torch.Tensor, tensors: list[torch.Tensor], group: dist.ProcessGroup) -> dist.Work:
    """``dist.scatter(..., async_op=True)`` from the group's first rank, on which alone there are ``tensors``."""
    return group.scatter([out], [tensors] if tensors else [])


def group_along(mesh: DeviceMesh, mesh_dim: int) -> dist.ProcessGroup:
    """The process group of a mesh dim.

    Raises:
        RuntimeError: it has been destroyed.
    """
    try:
        return mesh.get_group(mesh_dim)
    except RuntimeError as error:
        explain_what_is_gone(error)
        raise


def process_group(name: str) -> dist.ProcessGroup:
    """The process group of this name. Operators of a graph get names, as a group cannot be a constant of a graph."""
    try:
        group: dist.ProcessGroup = _resolve_process_group(name)  # type: ignore[arg-type]  # its NewType is not in 2.11
    except RuntimeError as error:
        explain_what_is_gone(error)
        raise
    return group


def explain_what_is_gone(error: RuntimeError) -> None:
    """Raise what torch raises of a process group that has been destroyed in words for users; otherwise nothing."""
    if "Could not resolve the process group" in str(error):
        raise RuntimeError(
            "the process group of this mesh has been destroyed (torch.distributed.destroy_process_group), so its "
            "ShardTensors cannot communicate any more: destroy it at the end of the program, or make a new mesh and "
            "new ShardTensors"
        ) from error


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend by which the group's ranks communicate tensors on ``device``."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return backends.get(device.type, "gloo")


def is_eager() -> bool:
    """Whether the default process group was made for a device, so that its ranks are connected from the start."""
    return dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None


def make_group(
    ranks: Sequence[int], number: int, device: torch.device, purpose: str, like: dist.ProcessGroup | None = None
) -> dist.ProcessGroup:
    """A new process group for tensors on ``device``. Its ranks call this, and no others.

    Where torch connects ranks from the start it splits ``like``, which must have the same ranks then.

    Args:
        number: what the ranks have agreed on, for the group's name: see ranks/groups.py.
        like: its backend is taken; otherwise gloo.
    """
    name = hashlib.sha1(f"shardtensor {list(ranks)} {number}".encode(), usedforsecurity=False).hexdigest()
    options: dict[str, Any] = {"timeout": program_timeout(), "group_desc": f"shardtensor {purpose}"}
    torchs = _naming(name)
    group: dist.ProcessGroup
    if like is not None and is_eager() and like._get_backend(device).supports_splitting:
        group = torchs["split_group"](like, [list(range(like.size()))], **options)
    else:
        backend = f"{device.type}:{backend_of(like, device) if like else 'gloo'}"
        group = torchs["new_group"](list(ranks), backend=backend, use_local_synchronization=True, **options)
    assert group.group_name == name, "this version of torch names groups in another function"
    return group


def _naming(name: str) -> dict[str, Any]:
    """torch's functions that make a group, as they are but for its name. Other threads make theirs meanwhile."""
    found = dict(vars(distributed_c10d))
    for chain in ("new_group", "_new_group_with_tag", "split_group", "_process_group_name"):
        torchs: Any = unwrap(found[chain])
        found[chain] = FunctionType(torchs.__code__, found, chain, torchs.__defaults__, torchs.__closure__)
        found[chain].__kwdefaults__ = torchs.__kwdefaults__
    found["_hash_ranks_to_str"] = lambda ranks: name
    return found


def device_of(group: Any) -> torch.device | None:
    """On which devices' tensors a process group works, the host's where it can; None: nothing travels, as it is fake.

    Its type need not be that of the tensors in question: a group of gloo and NCCL takes small rows from the host.
    """
    return next(iter(devices_of(group)), None)


def devices_of(group: Any) -> list[torch.device]:
    """All of them, the host first."""
    fake = dist.get_backend(group) == "fake"
    return [] if fake else sorted(group._device_types, key=lambda device: device.type != "cpu")


def never_destroy_groups() -> None:
    """Let the process groups live as long as the process."""
    for group in list(_world.pg_map):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


# What holds the default process group, as ``_default_pg``, which torch's own names for it take two calls to find.
world: Any = _world

# The store by which the ranks have found each other.
default_store: Callable[[], Any] = _get_default_store


def program_timeout() -> timedelta | None:
    """The timeout of the default process group; None where none of its backends has such an option."""
    world: Any = dist.group.WORLD
    options = (getattr(world._get_backend(device), "options", None) for device in world._device_types)
    return next((timeout for o in options if (timeout := getattr(o, "_timeout", None)) is not None), None)


_ASYNC_SAVE = "async_save", "torch.distributed.checkpoint.state_dict_saver"


def group_of_async_save() -> dist.ProcessGroup | None:
    """In what ``dcp.async_save`` calls, before it starts its thread: the group in which that will communicate."""
    for frame, _ in walk_stack(sys._getframe(1)):
        if (frame.f_code.co_name, frame.f_globals["__name__"]) == _ASYNC_SAVE:
            given = frame.f_locals
            in_thread = given["async_checkpointer_type"].name == "THREAD" and not given["no_dist"]
            return given["process_group"] or dist.group.WORLD if in_thread else None
    return None
