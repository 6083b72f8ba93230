"""How a rank waits for a collective.

[Note: polling] A process that sleeps until another one's message arrives is woken late: the core has gone idle, and
gloo hands what arrives from thread to thread, each of which has to be woken and scheduled. A small exchange between
kernels costs milliseconds that way, ten times what its bytes take. So on the CPU a rank first asks for a while whether
the collective is complete, and lets other threads run in between, as implementations of MPI do; then it sleeps.
"""

from __future__ import annotations

import os
import time

import torch.distributed as dist
from torch import Tensor

__all__ = ["wait_for"]

# Seconds. Longer than a kernel that one rank computes and another one does not: beyond that ranks differ in their load.
POLLING = 0.01

_give_way = os.sched_yield if hasattr(os, "sched_yield") else lambda: time.sleep(0)


def wait_for(work: dist.Work, result: Tensor) -> None:
    """Wait for a collective; raises what went wrong in it.

    Not for messages between two ranks: gloo says that they are complete only to whom waits for them.

    Args:
        result: what it writes to. On an accelerator, only its stream waits.
    """
    if result.is_cpu and type(work) is dist.Work:  # other classes, of groups for tests, may never be complete
        is_completed, now = work.is_completed, time.perf_counter
        end = now() + POLLING
        while not is_completed() and now() < end:
            _give_way()
    work.wait()
