"""Process groups of this package's own, made when they are first needed, by their ranks alone.

torch names such a group after its ranks and a count of the process's groups. Some ranks are in more groups than others,
so their counts differ, and they would look for each other under different names until the timeout. So these groups are
counted here, and named after a number that their ranks agree on: the largest of theirs.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence

import torch
import torch.distributed as dist

from .._compat.c10d import c10d_all_reduce, make_group, process_group

_world: dist.ProcessGroup | None = None  # to which these belong
_connected: set[tuple[str, torch.device]] = set()
_made: dict[tuple[str, tuple[int, ...]], str] = {}
_number = 0


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
) -> dist.ProcessGroup:
    """The group of these ranks that is used for ``purpose`` and nothing else. All of them call this.

    Args:
        ranks: global ranks, in ascending order.
        groups: in which the ranks reach each other so far, as those of a mesh's dims.
        device: for tensors on which. Its communication goes by the backend of ``groups``.
    """
    _check_world()
    key = purpose, tuple(ranks)
    if key not in _made:
        most = torch.tensor([number_of_groups()], device=device)
        for group in groups:
            c10d_all_reduce(most, dist.ReduceOp.MAX, group).wait()
        _made[key] = new_group(purpose, ranks, int(most), device, groups[0]).group_name
    return process_group(_made[key])


def number_of_groups() -> int:
    """How many of these groups this rank has made, or the number after the last one's."""
    return _number


def new_group(
    purpose: str, ranks: Sequence[int], number: int, device: torch.device, like: dist.ProcessGroup | None = None
) -> dist.ProcessGroup:
    """As :func:`make_group`, with the largest of the ranks' :func:`number_of_groups`."""
    global _number
    _number = number + 1
    return make_group(ranks, number, device, purpose, like)
