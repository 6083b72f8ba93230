"""How a rank waits for a collective.

[Note: polling] A process that sleeps until another one's message arrives is woken late: the core has gone idle, and
gloo hands what arrives from thread to thread, each of which has to be woken and scheduled. A small exchange between
kernels costs milliseconds that way, ten times what its bytes take. So on the CPU a rank first asks for a while whether
the collective is complete, and lets other threads run in between, as implementations of MPI do; then it sleeps.
Where a host has more ranks than cores, asking takes time from the ranks that are waited for: there it sleeps sooner,
and inside the transport, which is woken by what arrives. Each rank decides that alone, for what is communicated is the
same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import cache

import torch.distributed as dist
from torch import Tensor

from .failures import check_raised, lost
from .history import check_conflict, conflicts

__all__ = ["observed", "wait_for", "wait_for_message"]

# Seconds. Longer than a kernel that one rank computes and another one does not: beyond that ranks differ in their load.
POLLING = 0.01
# The same where ranks share cores: for small exchanges between ranks that do the same.
POLLING_ON_SHARED_CORES = 0.001
# Seconds after which to look for the first time whether another rank has raised.
LOOKING = 1.0
# How long to sleep without a chance for Python's signal handlers.
_WHILE = timedelta(seconds=0.5)

_observer: Callable[[dist.ProcessGroup], AbstractContextManager[None]] | None = None


@contextmanager
def observed(observer: Callable[[dist.ProcessGroup], AbstractContextManager[None]]) -> Iterator[None]:
    """Inside the block ranks wait inside the context that ``observer`` makes for the group."""
    global _observer
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before


_give_way = os.sched_yield if hasattr(os, "sched_yield") else lambda: time.sleep(0)


def wait_for(work: dist.Work, result: Tensor, group: dist.ProcessGroup) -> None:
    """Wait for a collective of ``group``.

    Not for messages between two ranks: gloo says that they are complete only to whom waits for them.

    Args:
        result: what it writes to. On an accelerator, only its stream waits.

    Raises:
        LostRankError: it has failed, or its timeout is over. See [Note: failures] in failures.py.
    """
    if _observer is not None:
        with _observer(group):
            _wait(work, result, group)
    else:
        _wait(work, result, group)


def _wait(work: dist.Work, result: Tensor, group: dist.ProcessGroup) -> None:
    if result.is_cpu and type(work) is dist.Work:  # other classes, of groups for tests, may never be complete
        is_completed, now = work.is_completed, time.perf_counter
        if not is_completed():
            start = now()
            end = start + (POLLING if _has_own_core(dist.get_world_size()) else POLLING_ON_SHARED_CORES)
            while now() < end and not is_completed():
                _give_way()
            _wait_long(work, start, group)
    _wait_asleep(work, group)


@cache
def _has_own_core(world_size: int) -> bool:
    """Whether this host has a core for each of its ranks, as far as torchrun has said how many these are."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return ranks <= (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def wait_for_message(work: dist.Work, group: dist.ProcessGroup) -> None:
    """Wait for a message between two ranks of ``group``; what is raised is that of :func:`wait_for`."""
    if _observer is not None:
        with _observer(group):
            _wait_asleep(work, group)
    else:
        _wait_asleep(work, group)


def _wait_asleep(work: dist.Work, group: dist.ProcessGroup) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise lost(group, error) from error
    if conflicts:
        check_conflict(group.group_name)


def _wait_long(work: dist.Work, start: float, group: dist.ProcessGroup) -> None:
    """Sleep until a collective that began at ``start`` is complete, and look now and then what others have said."""
    look = start + LOOKING
    while not work.is_completed():
        with suppress(RuntimeError):  # one that is not complete after this time goes on, and can be waited for again
            work.wait(_WHILE)
        check_conflict(group.group_name)
        now = time.perf_counter()
        if now > look and not work.is_completed():
            check_raised(group)
            look = now + min(now - start, 10 * LOOKING)
