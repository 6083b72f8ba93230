"""What workers of the pool import first: all process groups of a process share one thread that waits for messages, and
communication is late where the suite runs so.

By default each group of gloo's has a device of its own, whose thread wakes a hundred times a second. The ranks of four
are in seventy groups when the suite ends: their threads took a seventh of its CPU time.
"""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed import distributed_c10d

_device = distributed_c10d.ProcessGroupGloo.create_default_device()


class OfOneDevice(distributed_c10d.ProcessGroupGloo):
    def __init__(self, store, rank: int, size: int, timeout: timedelta, **others):
        options = self._Options()
        options._devices, options._threads, options._timeout = [_device], 2, timeout
        super().__init__(store, rank, size, options)


distributed_c10d.ProcessGroupGloo = OfOneDevice
if os.environ.get("SHARDTENSOR_TEST_PROCESS_GROUP") == "late":
    from late import stay_late

    stay_late()
