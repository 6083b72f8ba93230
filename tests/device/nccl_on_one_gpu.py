"""Importing this makes all ranks share one GPU, and communicate by NCCL.

NCCL refuses two ranks on one GPU of one host. So each rank says that it is on a host of its own, and messages travel by
sockets. A collective takes milliseconds: its kernels wait for each other, while the GPU serves one process at a time.
"""

from __future__ import annotations

import os

os.environ["LOCAL_RANK"] = "0"
os.environ["NCCL_HOSTID"] = f"rank{os.environ['RANK']}"
os.environ["NCCL_SOCKET_IFNAME"] = "lo"
os.environ["NCCL_IB_DISABLE"] = "1"

import gloo_threads  # noqa: F401
