"""Attention over a sharded sequence against the same work without communication, interleaved in one run.

    python benchmarks/bench_attention.py                              # starts two ranks itself
    torchrun --standalone --nproc-per-node 4 benchmarks/bench_attention.py --causal

Each rank has its part of the queries, keys and values. Compared are: *local*, torch's kernel for the rank's queries and
as many keys as the whole sequence has, which happen to be there (the same work, nothing sent); a *hand-written* ring
(isend and irecv to the neighbours, overlapped, and the same kernel); and ShardTensors with each method, *ring*,
*heads* and *fetch*. With ``--causal``, "local" does what the last rank has to, with a mask. Printed: minimum and median
over rounds of the slowest rank, and the ratio to "local".
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor import ShardTensor

_aten = torch.ops.aten


def _start(tensors: list[Tensor], rank: int, ranks: int) -> tuple[list[Tensor], list[Any]]:
    """Send to the right, receive from the left."""
    received = [torch.empty_like(t) for t in tensors]
    ops = [dist.P2POp(dist.isend, t, (rank + 1) % ranks) for t in tensors]
    ops += [dist.P2POp(dist.irecv, t, (rank - 1) % ranks) for t in received]
    return received, dist.batch_isend_irecv(ops)


class HandWritten(torch.autograd.Function):
    """A ring for equal shards, as one writes it by hand."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, rank: int, ranks: int, causal: bool):  # type: ignore[override]
        held = [k, v]
        out = lse = None
        for step in range(ranks):
            received, works = _start(held, rank, ranks) if step < ranks - 1 else ([], [])
            if not causal or step <= rank:
                square = causal and step == 0
                part, part_lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, *held, is_causal=square)
                if out is None:
                    out, lse = part, part_lse
                else:
                    both = torch.logaddexp(lse, part_lse)
                    out = out * (lse - both).exp()[..., None] + part * (part_lse - both).exp()[..., None]
                    lse = both
            for work in works:
                work.wait()
            held = received
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.at = rank, ranks, causal
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        rank, ranks, causal = ctx.at
        grad, dq = grad.contiguous(), torch.zeros_like(q)
        held, sums = [k, v], [torch.zeros_like(k), torch.zeros_like(v)]
        for step in range(ranks):
            received, works = _start(held, rank, ranks) if step < ranks - 1 else ([], [])
            if not causal or step <= rank:
                parts = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    grad, q, *held, out, lse, 0.0, causal and not step
                )
                dq += parts[0]
                for total, part in zip(sums, parts[1:], strict=True):
                    total += part
            for work in works:
                work.wait()
            held = received
            sums, works = _start(sums, rank, ranks)  # the sums follow their block, and are home after the last step
            for work in works:
                work.wait()
        return dq, *sums, None, None, None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="1x8x1024x64", help="of each rank's part: batch x heads x tokens x features")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    batch, heads, tokens, features = (int(n) for n in args.shape.split("x"))
    torch.manual_seed(0)
    mine = [torch.randn(batch, heads, tokens, features).requires_grad_() for _ in range(3)]
    grad = torch.randn(batch, heads, tokens, features)
    sizes = {0: (tokens,) * ranks}
    spread = [
        ShardTensor.from_local(t.detach(), mesh, (Shard(2),), shard_sizes=sizes).requires_grad_() for t in mine
    ]
    spread_grad = ShardTensor.from_local(grad, mesh, (Shard(2),), shard_sizes=sizes)
    everything = [mine[0], *(torch.randn(batch, heads, tokens * ranks, features).requires_grad_() for _ in range(2))]
    seen = None
    if args.causal:
        last = tokens * (ranks - 1) + torch.arange(tokens)
        seen = torch.arange(tokens * ranks) <= last[:, None]

    def local() -> Tensor:
        return F.scaled_dot_product_attention(*everything, attn_mask=seen)

    def by_hand() -> Tensor:
        return HandWritten.apply(*mine, rank, ranks, args.causal)

    def ours(method: str) -> Callable[[], Any]:
        def run() -> Any:
            with shardtensor.attention_method(method):
                return F.scaled_dot_product_attention(*spread, is_causal=args.causal)

        return run

    calls = {
        "local": (local, everything, grad),
        "hand-written": (by_hand, mine, grad),
        "ring": (ours("ring"), spread, spread_grad),
        "heads": (ours("heads"), spread, spread_grad),
        "fetch": (ours("fetch"), spread, spread_grad),
    }
    for backward in (False, True):
        times: dict[str, list[float]] = {kind: [] for kind in calls}
        for turn in range(args.rounds + 3):
            for kind, (call, inputs, cotangent) in calls.items():
                dist.barrier()
                start = time.perf_counter()
                with torch.set_grad_enabled(backward):
                    y = call()
                if backward:
                    torch.autograd.grad(y, inputs, cotangent)
                seconds = torch.tensor(time.perf_counter() - start)
                dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
                if turn >= 3:
                    times[kind].append(float(seconds))
        if rank == 0:
            title = "forward + backward" if backward else "forward"
            print(f"attention, {args.shape} per rank, {ranks} ranks{', causal' if args.causal else ''}, {title}")
            for kind, taken in times.items():
                ordered = sorted(taken)
                ratios = sorted(a / b for a, b in zip(taken, times["local"], strict=True))
                print(
                    f"  {kind:13s} min {ordered[0] * 1e3:8.2f} ms  median {ordered[len(ordered) // 2] * 1e3:8.2f} ms"
                    f"  ratio of minima {ordered[0] / min(times['local']):.2f}"
                    f", median of ratios {ratios[len(ratios) // 2]:.2f}"
                )
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    if "RANK" not in os.environ:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *sys.argv]
        os.execv(sys.executable, [sys.executable, *launch])
    main()
