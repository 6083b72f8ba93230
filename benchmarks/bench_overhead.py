"""Host overhead per operator: plain tensors, DTensor and ShardTensor on tiny tensors, interleaved in one run.

    python benchmarks/bench_overhead.py

Runs on the fake process group, in one process, so that nothing but Python and dispatch is timed. Printed: the minimum
over rounds in microseconds, and ShardTensor's ratio to DTensor.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardtensor import ShardTensor

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, w: x + x,
    "relu": lambda x, w: torch.relu(x),
    "gelu": lambda x, w: torch.nn.functional.gelu(x),
    "mul scalar": lambda x, w: x * 2.0,
    "add_": lambda x, w: x.add_(1.0),
    "transpose": lambda x, w: x.transpose(1, 2),
    "view": lambda x, w: x.view(8, 2, 2, 6),
    "cat": lambda x, w: torch.cat([x, x], 1),
    "sum(1)": lambda x, w: x.sum(1),
    "mean, left Partial": lambda x, w: x.mean(),
    "softmax": lambda x, w: x.softmax(-1),
    "x.shape": lambda x, w: x.shape,
}


def best(run: Callable[[], Any], rounds: int, number: int) -> float:
    low = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(number):
            run()
        low = min(low, (time.perf_counter() - start) / number)
    return low * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--number", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    local = torch.randn(4, 4, 6)
    tensors = {
        "plain": torch.randn(8, 4, 6),
        "DTensor": DTensor.from_local(local.clone(), mesh, [Shard(0)]),
        "ShardTensor": ShardTensor.from_local(local.clone(), mesh, [Shard(0)], shard_sizes={0: (4, 4)}),
    }
    print(f"{'operator':24s}{'plain':>9s}{'DTensor':>9s}{'ShardTensor':>13s}{'ratio':>7s}   microseconds")

    def row(name: str, runs: dict[str, Callable[[], Any]]) -> None:
        for run in runs.values():
            run()
        times = {kind: best(run, args.rounds, args.number) for kind, run in runs.items()}
        ratio = times["ShardTensor"] / times["DTensor"]
        print(f"{name:24s}{times['plain']:9.1f}{times['DTensor']:9.1f}{times['ShardTensor']:13.1f}{ratio:7.2f}")

    with torch.no_grad():
        for name, op in OPERATORS.items():
            row(name, {kind: (lambda x=x, op=op: op(x, None)) for kind, x in tensors.items()})
    leaves = {kind: x.detach().requires_grad_() for kind, x in tensors.items()}
    seeds = {kind: torch.ones_like(x) for kind, x in tensors.items()}

    def forward_backward(kind: str) -> Callable[[], Any]:
        x, seed = leaves[kind], seeds[kind]
        return lambda: torch.autograd.grad(torch.tanh(torch.relu(x * 2.0)) + x, x, seed)

    row("pointwise chain fwd+bwd", {kind: forward_backward(kind) for kind in tensors})
    row(
        "from_local, to_local",
        {
            "plain": lambda: local,
            "DTensor": lambda: DTensor.from_local(local, mesh, [Replicate()]).to_local(),
            "ShardTensor": lambda: ShardTensor.from_local(local, mesh, [Shard(0)], shard_sizes={0: (4, 12)}).to_local(),
        },
    )


if __name__ == "__main__":
    main()
