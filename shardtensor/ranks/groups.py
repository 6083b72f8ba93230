"""Process groups of this package's own, made when they are first needed, by their ranks alone.

[Note: own groups] torch names such a group after its ranks and a number of groups of the process. Ranks whose
numbers differ would look for each other under different names until the timeout. So they compare these numbers first,
and where they differ, all ranks do without the group.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence

import torch
import torch.distributed as dist

from .._compat.c10d import c10d_all_reduce, make_group, number_of_groups, process_group

_world: dist.ProcessGroup | None = None  # to which these belong
_connected: set[tuple[str, torch.device]] = set()
_made: dict[tuple[str, tuple[int, ...]], str | None] = {}


def forget_groups() -> None:
    """Make them anew where they are needed again."""
    global _world
    _world = None
    _connected.clear()
    _made.clear()


atexit.register(forget_groups)  # process groups are to go before the interpreter does


def _check_world() -> None:
    """The groups of another world have gone with it; those of this one stay when caches are emptied."""
    global _world
    if _world is not dist.group.WORLD:
        forget_groups()
        _world = dist.group.WORLD


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Let messages between some ranks of ``group`` be its first communication. All of its ranks call this.

    NCCL connects the ranks in the first call, which all of them have to take part in; but where messages go to some of
    the ranks, the others call nothing. On the CPU there is nothing to do.
    """
    _check_world()
    if device.type != "cpu" and (group.group_name, device) not in _connected:
        c10d_all_reduce(torch.zeros(1, device=device), dist.ReduceOp.SUM, group).wait()
        _connected.add((group.group_name, device))


def own_group(
    purpose: str, ranks: Sequence[int], groups: Sequence[dist.ProcessGroup], device: torch.device
) -> dist.ProcessGroup | None:
    """The group of these ranks that is used for ``purpose`` and nothing else; on all of them, which call this, or none.

    Args:
        ranks: global ranks, in ascending order.
        groups: in which the ranks reach each other so far, as those of a mesh's dims.
        device: for tensors on which. Its communication goes by the backend of ``groups``.
    """
    _check_world()
    key = purpose, tuple(ranks)
    if key not in _made:
        number = number_of_groups()
        extremes = torch.tensor([number, -number], device=device)
        for group in groups:
            c10d_all_reduce(extremes, dist.ReduceOp.MAX, group).wait()
        most, least = extremes.tolist()
        made = make_group(key[1], groups[0], device, f"shardtensor {purpose}") if most == -least else None
        _made[key] = made.group_name if made is not None else None
    name = _made[key]
    return None if name is None else process_group(name)
