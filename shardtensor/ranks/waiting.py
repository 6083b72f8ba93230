"""How a rank waits for a collective.

[Note: polling] A process that sleeps until another one's message arrives is woken late: the core has gone idle, and
gloo hands what arrives from thread to thread, each of which has to be woken and scheduled. A small exchange between
kernels costs milliseconds that way, ten times what its bytes take. So on the CPU a rank first asks for a while whether
the collective is complete, and lets other threads run in between, as implementations of MPI do; then it sleeps.
Where a host has more ranks than cores, asking takes time from the ranks that are waited for: there it sleeps sooner,
and inside the transport, which is woken by what arrives. Each rank decides that alone, for what is communicated is the
same.

A rank that is profiled does not ask. A work that is complete notes the end of a profiled event while it holds its lock,
and where a function has Python's hooks for saved tensors, as in activation checkpointing, it then waits for the
interpreter. That is held by who asks, and waits for the lock. ``Work.wait`` lets go of the interpreter.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from threading import get_ident

import torch.distributed as dist
from torch import Tensor

from .._compat import is_profiled
from .failures import check_raised, lost, stop_telling, waiting
from .history import check_conflict, conflicts

# Seconds. Longer than a kernel that one rank computes and another one does not: beyond that ranks differ in their load.
POLLING = 0.01
# The same where ranks share cores: for small exchanges between ranks that do the same.
POLLING_ON_SHARED_CORES = 0.001
# Seconds after which to look for the first time whether another rank has raised.
LOOKING = 1.0
# How long to sleep without a chance for Python's signal handlers.
_WHILE = timedelta(seconds=0.5)

# Told of a group, returns what is to be called afterwards.
Observer = Callable[[dist.ProcessGroup], Callable[[], object]]
_observer: Observer | None = None


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Inside the block ``observer`` is called before a rank waits in a group; what it returns is called afterwards."""
    global _observer
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before


_give_way = os.sched_yield if hasattr(os, "sched_yield") else lambda: time.sleep(0)


def wait_for(work: dist.Work, result: Tensor | None, group: dist.ProcessGroup) -> None:
    """Wait for communication in ``group``.

    Args:
        result: what a collective writes to; on an accelerator, only its stream waits. None for messages between two
            ranks: gloo says that they are complete only to whom waits for them.

    Raises:
        LostRankError: it has failed, or its timeout is over. See [Note: failures] in failures.py.
    """
    waited = _observer(group) if _observer is not None else None
    try:
        # Works of other classes, of groups for tests, may never be complete.
        if result is not None and result.is_cpu and type(work) is dist.Work:
            if is_profiled():
                _wait_long(work, group)
            elif not work.is_completed():
                _poll(work, group)
        try:
            work.wait()
        except RuntimeError as error:
            raise lost(group, error) from error
        if conflicts:
            check_conflict(group.group_name)
    finally:
        if waited is not None:
            waited()


def _poll(work: dist.Work, group: dist.ProcessGroup) -> None:
    """Wait for a collective as [Note: polling] says."""
    is_completed, now = work.is_completed, time.perf_counter
    end = now() + (POLLING if _has_own_core(dist.get_world_size()) else POLLING_ON_SHARED_CORES)
    while now() < end:
        if is_completed():
            return
        _give_way()
    _wait_long(work, group)


def _wait_long(work: dist.Work, group: dist.ProcessGroup) -> None:
    """Wait inside of the transport, and look now and then whether another rank has raised."""
    now = time.perf_counter
    start = now()
    look = start + LOOKING
    waiting.add(get_ident())
    try:
        while not _is_over(work):
            check_conflict(group.group_name)
            if now() > look:
                check_raised(group)
                look = now() + min(now() - start, 10 * LOOKING)
    finally:
        waiting.discard(get_ident())
    if look > start + LOOKING:
        stop_telling(group)


def _is_over(work: dist.Work) -> bool:
    """Whether a work is complete, or has failed, after a while."""
    start = time.perf_counter()
    try:
        work.wait(_WHILE)
    except RuntimeError:  # a work that is not complete after this time can be waited for again
        return time.perf_counter() - start < 0.9 * _WHILE.total_seconds()
    return True


@cache
def _has_own_core(world_size: int) -> bool:
    """Whether this host has a core for each of its ranks, as far as torchrun has said how many these are."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return ranks <= (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
