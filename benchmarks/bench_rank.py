"""A training step of one rank of many, where communication takes no time: what a device can be kept busy with.

    python benchmarks/bench_rank.py [--device cuda] [--only NAME] [--json FILE]

One process is rank 3 of 8 in torch's fake process group: it runs all the kernels of its rank, on a shard of full size,
and nothing is sent. The other side is plain torch with a tensor of the shard's shape, so the quotient is the efficiency
that is left for communication to reduce. Both are timed in turns, by the host's clock, until the device is done; and
again captured by ``shardtensor.parallel.capture``, which leaves the host out. The note says how many kernels one step
launches, and what torch's profiler adds up as their time. What is received is what the memory held, so the numbers mean
nothing.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from report import Figure, best_and_median, chosen, finish, parser
from timing import Run, device_done, device_type, interleaved, on_rank_of_fake
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from shardtensor import ShardTensor
from shardtensor.parallel import capture

GROUP = "a training step of rank 3 of 8, communication taking no time: how much of plain torch's speed is left"
RANK, RANKS = 3, 8


@dataclass(frozen=True)
class Row:
    """A globe U-Net.

    Attributes:
        width: channels at full size.
        shard: rows and columns of a rank.
        dtype: of the weights and the image.
    """

    width: int
    shard: tuple[int, int]
    dtype: torch.dtype = torch.float32


ROWS = {
    "width 32, 256 x 1024 a rank": Row(32, (256, 1024)),
    "width 64, 256 x 2048 a rank": Row(64, (256, 2048)),
    "width 64, 256 x 2048 a rank, bfloat16": Row(64, (256, 2048), torch.bfloat16),
    "width 64, 1024 x 4096 a rank": Row(64, (1024, 4096)),
    "width 64, 1024 x 4096 a rank, bfloat16": Row(64, (1024, 4096), torch.bfloat16),
}
QUICK = {"width 8, 32 x 64 a rank": Row(8, (32, 64)), "width 8, 32 x 64, bfloat16": Row(8, (32, 64), torch.bfloat16)}


def network(row: Row) -> nn.Module:
    from networks import globe  # which finds the example's model

    torch.manual_seed(0)
    return type(globe())(width=row.width).to(device_type(), row.dtype)


def step_of(module: nn.Module) -> Callable[[Any], None]:
    def step(x: Any) -> None:
        for p in module.parameters():
            p.grad = None
        module(x).square().mean().backward()

    return step


def captured(step: Callable[[Any], None], x: Any) -> Run:
    """Calls of the step as a CUDA graph."""
    run = partial(capture(step, warmup=3), x)
    for _ in range(4):
        run()
    return run


def kernels(step: Run) -> tuple[int, float]:
    """How many kernels a step launches, without copies between host and device, and the seconds that they take."""
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        step()
        device_done()
    found = [e for e in profiler.events() if e.device_type == torch.profiler.DeviceType.CUDA]
    found = [e for e in found if not e.name.startswith(("Memcpy", "Memset"))]
    return len(found), sum(e.device_time for e in found) / 1e6


def measure(mesh: DeviceMesh, row: Row, budget: float) -> dict[str, Any]:
    """Times of each kind of step, one per round, and what is launched."""
    module, on_device = network(row), device_type() == "cuda"
    local = torch.randn(1, 3, *row.shard, device=device_type(), dtype=row.dtype)
    sharded = ShardTensor.from_local(local, mesh, [Shard(2)], shard_sizes={0: (row.shard[0],) * mesh.size()})
    step, inputs = step_of(module), {"plain": local, "sharded": sharded}
    runs: dict[str, Run] = {kind: partial(step, x) for kind, x in inputs.items()}
    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for run in [*runs.values()] * 3:
            run()
        if on_device:
            found["kernels"] = {kind: kernels(run) for kind, run in runs.items()}
            try:
                runs |= {f"{kind}, a graph": captured(step, x) for kind, x in inputs.items()}
            except RuntimeError as error:  # the times without graphs are worth having
                found["not captured"] = str(error).splitlines()[0]
        return found | {"times": interleaved(runs, budget)}


def figures(name: str, found: dict[str, Any]) -> list[Figure]:
    times = best_and_median(found["times"])
    best, note = times["best"], ""
    if "kernels" in found:
        said = (f"{kind} {n} kernels, {t * 1e3:.1f} ms" for kind, (n, t) in found["kernels"].items())
        note = "; ".join(said)
    note += "; not captured: " + found["not captured"] if "not captured" in found else ""
    made = [Figure(GROUP, name, best["plain"] / best["sharded"], **times, note=note)]
    if "plain, a graph" in best:
        made.append(Figure(GROUP, f"{name}, as graphs", best["plain, a graph"] / best["sharded, a graph"]))
    return made


def main() -> None:
    options = parser(__doc__).parse_args()
    rows = QUICK if options.quick or device_type() == "cpu" else ROWS
    made: list[Figure] = []
    for name in chosen(options.only, rows, parser(__doc__).error):
        print(f"measuring {name}", file=sys.stderr)
        budget = 0.2 if options.quick else 2.0
        made += figures(name, on_rank_of_fake(measure, rows[name], budget, rank=RANK, ranks=RANKS))
    finish(made, options)


if __name__ == "__main__":
    import bench_rank  # processes import what they call by its module

    bench_rank.main()
