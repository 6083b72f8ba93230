"""Convolution on shards against the same convolution without any halo, interleaved in one run.

    python benchmarks/bench_convolution.py                              # starts two ranks itself
    torchrun --standalone --nproc-per-node 4 benchmarks/bench_convolution.py

Each rank convolves its own shard: once as a plain local convolution (no halo: wrong at the border, but the same
work), once as a ShardTensor, and once with a hand-written halo (send, receive, concatenate). Forward and backward run
up to the weight's own contribution; the all-reduce of the weight gradient, which every data-parallel form has too, is
left out of all three. Printed: minimum and median over rounds of the slowest rank, and the ratio to the local one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardtensor import ShardTensor


class HandWritten(torch.autograd.Function):
    """Concatenate one fetched row on each side; the gradient of the fetched rows goes back."""

    @staticmethod
    def forward(ctx, x: Tensor, rank: int, ranks: int) -> Tensor:  # type: ignore[override]
        ctx.at = rank, ranks
        up, down = _neighbours(x[:, :, :1].contiguous(), x[:, :, -1:].contiguous(), rank, ranks)
        return torch.cat([up, x, down], dim=2)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        up, down = _neighbours(grad[:, :, :1].contiguous(), grad[:, :, -1:].contiguous(), *ctx.at)
        own = grad[:, :, 1:-1].clone()
        own[:, :, :1] += up
        own[:, :, -1:] += down
        return own, None, None


def _neighbours(first: Tensor, last: Tensor, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    up, down = torch.zeros_like(first), torch.zeros_like(last)
    ops = []
    if rank > 0:
        ops += [dist.P2POp(dist.isend, first, rank - 1), dist.P2POp(dist.irecv, up, rank - 1)]
    if rank < ranks - 1:
        ops += [dist.P2POp(dist.isend, last, rank + 1), dist.P2POp(dist.irecv, down, rank + 1)]
    for work in dist.batch_isend_irecv(ops) if ops else []:
        work.wait()
    return up, down


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="1x16x512x256", help="of each rank's shard, NxCxHxW")
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    shape = tuple(int(n) for n in args.shape.split("x"))
    torch.manual_seed(0)
    weight = torch.randn(shape[1], shape[1], 3, 3)
    local = torch.randn(shape)
    grad = torch.randn(shape)
    sizes = {0: (shape[2],) * ranks}
    spread = ShardTensor.from_local(local, mesh, (Shard(2),), shard_sizes=sizes)
    spread_grad = ShardTensor.from_local(grad, mesh, (Shard(2),), shard_sizes=sizes)
    # A DTensor weight keeps its contribution, so that no all-reduce is timed.
    spread_weight = DTensor.from_local(weight.clone(), mesh, (Replicate(),)).requires_grad_()
    plain_weight = weight.clone().requires_grad_()
    plain = local.clone().requires_grad_()
    sharded = spread.detach().requires_grad_()

    def without_grad(kind: str) -> Callable[[], object]:
        def run() -> object:
            with torch.no_grad():
                if kind == "local":
                    return F.conv2d(local, weight, padding=1)
                if kind == "shardtensor":
                    return F.conv2d(spread, weight, padding=1)
                return F.conv2d(HandWritten.apply(local, rank, ranks), weight, padding=(0, 1))

        return run

    def with_grad(kind: str) -> Callable[[], object]:
        def run() -> object:
            if kind == "local":
                return torch.autograd.grad(F.conv2d(plain, plain_weight, padding=1), (plain, plain_weight), grad)
            if kind == "shardtensor":
                y = F.conv2d(sharded, spread_weight, padding=1)
                return torch.autograd.grad(y, (sharded, spread_weight), spread_grad)
            y = F.conv2d(HandWritten.apply(plain, rank, ranks), plain_weight, padding=(0, 1))
            return torch.autograd.grad(y, (plain, plain_weight), grad)

        return run

    kinds = ("local", "shardtensor", "hand-written")
    for title, make in (("forward", without_grad), ("forward + backward", with_grad)):
        runs = {kind: make(kind) for kind in kinds}
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for turn in range(args.rounds + 5):
            for kind in kinds:
                dist.barrier()
                start = time.perf_counter()
                runs[kind]()
                seconds = torch.tensor(time.perf_counter() - start)
                dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
                if turn >= 5:
                    times[kind].append(float(seconds))
        if rank == 0:
            print(f"conv2d 3x3, {args.shape} per rank, {ranks} ranks, {title}")
            base = sorted(times["local"])
            for kind in kinds:
                ordered = sorted(times[kind])
                low, middle = ordered[0], ordered[len(ordered) // 2]
                ratios = sorted(a / b for a, b in zip(times[kind], times["local"], strict=True))
                print(
                    f"  {kind:13s} min {low * 1e3:7.2f} ms  median {middle * 1e3:7.2f} ms"
                    f"  ratio of minima {low / base[0]:.2f}, median of ratios {ratios[len(ratios) // 2]:.2f}"
                )
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *sys.argv]
        os.execv(sys.executable, [sys.executable, *launch])
    main()
