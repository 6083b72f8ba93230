"""Neighborhood attention on shards against natten's CPU path, and against the same tiles without any halo.

    python benchmarks/bench_neighborhood.py                              # starts two ranks itself
    torchrun --standalone --nproc-per-node 4 benchmarks/bench_neighborhood.py --rounds 20

First, on rank 0 alone: the forward pass of the whole map, by natten's own CPU kernel on plain tensors and as a
ShardTensor on one rank. Then, on all ranks, forward and backward of a shard of that size each: the tiles on plain
tensors (which take the shard for the whole: wrong at the border, but as many queries), and a ShardTensor. The two are
interleaved; printed are minimum and median over rounds of the slowest rank, and the ratio.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable

import natten
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from shardtensor import ShardTensor
from shardtensor.ops.neighborhood.tiled import Dim, tiled_attention
from shardtensor.ops.neighborhood.window import Neighborhood


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def against_natten(size: int, kernel: int, tensors: list[Tensor], mesh: DeviceMesh) -> None:
    """Forward on one rank, ``mesh``."""
    spread = [ShardTensor.from_local(t, mesh, (Shard(1),), shard_sizes={0: (size,)}) for t in tensors]
    with torch.no_grad():
        ours = [seconds(lambda: natten.na2d(*spread, kernel_size=kernel)) for _ in range(10)]
        theirs = [seconds(lambda: natten.na2d(*tensors, kernel_size=kernel)) for _ in range(2)]
        difference = natten.na2d(*spread, kernel_size=kernel).to_local() - natten.na2d(*tensors, kernel_size=kernel)
    print(f"na2d, {size} x {size}, kernel {kernel}, forward on one rank")
    print(f"  natten on CPU min {min(theirs) * 1e3:8.1f} ms")
    print(f"  shardtensor   min {min(ours) * 1e3:8.1f} ms, {min(theirs) / min(ours):.0f} times as fast")
    print(f"  largest difference {difference.abs().max():.0e}")


def against_tiles(size: int, kernel: int, tensors: list[Tensor], rounds: int) -> None:
    """Forward and backward on all ranks, a whole map on each."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    sizes = {0: (size,) * ranks}
    plain = [t.clone().requires_grad_() for t in tensors]
    spread = [ShardTensor.from_local(t, mesh, (Shard(1),), shard_sizes=sizes).requires_grad_() for t in tensors]
    grad = torch.randn_like(tensors[0])
    spread_grad = ShardTensor.from_local(grad, mesh, (Shard(1),), shard_sizes=sizes)
    dims = (Dim(Neighborhood(size, kernel), (0, size), (0, size)),) * 2

    def local() -> object:
        query, key, value = plain
        scale = query.shape[-1] ** -0.5
        (out,) = tiled_attention(query, torch.cat([key, value], -1), dims, None, scale, False)
        return torch.autograd.grad(out, plain, grad)

    def sharded() -> object:
        return torch.autograd.grad(natten.na2d(*spread, kernel_size=kernel), spread, spread_grad)

    runs = {"local": local, "shardtensor": sharded}
    times: dict[str, list[float]] = {kind: [] for kind in runs}
    for turn in range(rounds + 3):
        for kind, run in runs.items():
            dist.barrier()
            slowest = torch.tensor(seconds(run))
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if turn >= 3:
                times[kind].append(float(slowest))
    if dist.get_rank() == 0:
        print(f"na2d, {size} x {size} on each of {ranks} ranks, kernel {kernel}, forward + backward")
        for kind, row in times.items():
            print(f"  {kind:11s} min {min(row) * 1e3:8.1f} ms  median {sorted(row)[len(row) // 2] * 1e3:8.1f} ms")
        ratios = sorted(a / b for a, b in zip(times["shardtensor"], times["local"]))
        print(
            f"  ratio of minima {min(times['shardtensor']) / min(times['local']):.2f}, "
            f"median of ratios {ratios[len(ratios) // 2]:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--kernel", type=int, default=7)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # natten's CPU kernel is flex attention, which warns that it is slow
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    tensors = list(torch.randn(3, 1, args.size, args.size, args.heads, args.head_dim))
    alone = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("apart", "alone"))["alone"]
    if dist.get_rank() == 0:
        against_natten(args.size, args.kernel, tensors, alone)
    dist.barrier()
    against_tiles(args.size, args.kernel, tensors, args.rounds)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *sys.argv]
        os.execv(sys.executable, [sys.executable, *launch])
    main()
