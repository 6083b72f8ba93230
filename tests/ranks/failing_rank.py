"""One rank of a program in which rank 1 fails at step 2: ``python failing_rank.py HOW``, as torchrun starts it.

What the ranks print, and how they end, is read by test_failures.py and test_two_hosts.py.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardtensor import ShardTensor
from shardtensor.data import read

TIMEOUT = 6.0
FAILS_AT = 2


def main(how: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 3, padding=1))
    sizes = {0: tuple(4 + r for r in range(world))}
    for step in range(4 if how != "cable" else 10**6):
        x = ShardTensor.from_local(torch.randn(1, 2, 4 + rank, 8), mesh, (Shard(2),), shard_sizes=sizes)
        matrices = torch.eye(3).expand(2 * world, 3, 3).clone()
        if step == FAILS_AT and rank == 1:
            fail(how, mesh, matrices)
            if how == "skip":
                continue
        if how == "singular":
            factorize(mesh, matrices)
        loss = net(x).square().mean()
        loss.backward()
        print(f"step {step}: {loss.item()}", flush=True)


def fail(how: str, mesh, matrices: torch.Tensor) -> None:
    print(f"fails at {time.time()}", flush=True)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "raise":
        read(np.ma.masked_all(4), mesh)
    if how == "memory":
        raise MemoryError("no more of it")
    if how == "end":
        sys.exit(0)
    if how == "singular":
        matrices[:] = -matrices


def factorize(mesh, matrices: torch.Tensor) -> None:
    """Shards of rows, so that whole matrices are computed on, and the result's rows are exchanged again."""
    rows = ShardTensor.from_local(matrices, mesh, (Shard(0),)).redistribute(placements=(Shard(1),))
    try:
        torch.linalg.cholesky(rows)
    except torch.linalg.LinAlgError as error:
        print("caught", error, flush=True)
        sys.stdin.read()  # a program that goes on with something else, until its input is closed
        sys.exit()


if __name__ == "__main__":
    main(sys.argv[1])
