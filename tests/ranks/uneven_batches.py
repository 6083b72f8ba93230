"""One rank of a program that evaluates 3 batches on one dp rank and 2 on the other: ``python uneven_batches.py AFTER``.

The world has two or four ranks, half of them along dp. What they print is read by test_blocked.py.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardtensor import scatter_tensor
from shardtensor.parallel import parallelize

TIMEOUT = 20.0


def main(after: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "domain"))
    model = nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv1d(4, 2, 3, padding=1))
    parallelize(model, mesh, reshard_after_forward=True)

    def loss() -> torch.Tensor:
        batch = torch.randn(1, 2, 16) if mesh["domain"].get_local_rank() == 0 else None
        return model(scatter_tensor(batch, mesh["domain"], (Shard(2),))).square().mean()

    loss().backward()
    with torch.no_grad():
        total = sum(loss().full_tensor() for _ in range(3 - mesh["dp"].get_local_rank()))
    if after == "barrier":
        dist.barrier()
    elif after == "sum along dp":
        dist.all_reduce(total, group=mesh.get_group("dp"))
    loss().backward()


if __name__ == "__main__":
    main(sys.argv[1])
