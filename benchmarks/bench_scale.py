"""Host time of operators by the size of the world, from 8 to 4,096 ranks, and what their plans take in memory.

    python benchmarks/bench_scale.py [--only NAME] [--worlds 8 64 512 4096] [--json FILE]

One process is rank 1 (so it has two neighbours) of a world on the fake process group, where collectives complete
without moving anything; the world grows, the shard stays: each rank has 8 rows of a tensor of 8 * ranks rows. Each cell
is the CPU time of the calling thread in microseconds, best of many calls; "first" is the first call in milliseconds,
which makes the plan, in a process that has made such a plan for other sizes before; "KiB" is what that call has left
allocated from Python, without the shard sizes that specs of other tensors have, too (all specs share them). "x" is the
largest world's repeated call against the smallest one's.

Bars: repeated calls at most 1.5 times those of the smallest world, first calls at most 20 ms, plans at most 16 KiB.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
import tracemalloc
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardtensor import ShardTensor, exchange
from shardtensor._compat import c10d_all_to_all

ROWS = 8  # of each rank
BAR, BAR_FIRST, BAR_KIB = 1.5, 20.0, 16.0

Case = Callable[[ShardTensor], Any]


@cache
def near(ranks: int) -> tuple[int, ...]:
    """Other sizes, whose first boundary is a row further. Made once, as a program would."""
    return ROWS + 1, ROWS - 1, *(ROWS,) * (ranks - 2)


# Of an image (1, 4, rows, 8), whose rows are sharded.
CASES: dict[str, Case] = {
    "conv2d 3x3": lambda x: F.conv2d(x, torch.ones(4, 4, 3, 3), padding=1),
    "patch embedding 4x4": lambda x: F.conv2d(x, torch.ones(4, 4, 4, 4), stride=4),
    "max pool 3x3": lambda x: F.max_pool2d(x, 3, 2, 1),
    "interpolate, bilinear x 2": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "group norm": lambda x: F.group_norm(x, 2),
    "layer norm, sharded dim": lambda x: F.layer_norm(x, x.shape[1:]),
    "cat": lambda x: torch.cat([x, x], 2),
    "roll": lambda x: x.roll(1, 2),
    "slice": lambda x: x[:, :, 3:],
    "x * 2.0": lambda x: x * 2.0,
    "mean": lambda x: x.mean(),
    "linear": lambda x: F.linear(x, torch.ones(8, x.shape[-1])),
    "redistribute, near sizes": lambda x: x.redistribute(shard_sizes={0: near(x.device_mesh.size(0))}),
    "redistribute, rows to columns": lambda x: x.redistribute(placements=[Shard(3)] * x.device_mesh.ndim),
}


class _Done:
    def wait(self) -> None:
        pass


def all_to_all(out: torch.Tensor, inp: torch.Tensor, *rest: Any) -> Any:
    """The fake group's, which refuses a rank that only receives."""
    return c10d_all_to_all(out, inp, *rest) if inp.numel() else _Done()


def image(mesh: DeviceMesh, extra: int) -> ShardTensor:
    """Of 8 rows a rank; on a 2-D mesh the columns are sharded, too."""
    shape = [1, 4, ROWS, ROWS if mesh.ndim > 1 else 8 + extra]
    sizes = {m: (ROWS,) * mesh.size(m) for m in range(mesh.ndim)}
    return ShardTensor.from_local(torch.randn(shape), mesh, [Shard(2), Shard(3)][: mesh.ndim], shard_sizes=sizes)


def repeated(run: Callable[[], Any]) -> float:
    """Microseconds of a call: the best of some groups of calls."""
    best, number = float("inf"), 1
    for _ in range(12):
        start = time.thread_time()
        for _ in range(number):
            run()
        spent = time.thread_time() - start
        best = min(best, spent / number)
        number = max(1, min(200, int(0.02 / best)))
    return best * 1e6


def measure(world: tuple[int, ...], only: str) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    ranks = torch.Size(world).numel()
    dist.init_process_group("fake", rank=1, world_size=ranks, store=FakeStore())
    exchange.c10d_all_to_all = all_to_all
    mesh = init_device_mesh("cpu", world)
    rows = []
    for name, case in CASES.items():
        if only.lower() not in name.lower():
            continue
        try:
            with torch.no_grad():
                case(image(mesh, 8))
                x = image(mesh, 0)
                gc.collect()
                start = time.thread_time()
                case(x)
                first = (time.thread_time() - start) * 1e3
                best = repeated(partial(case, x))
                y = image(mesh, 16)
                gc.collect()
                tracemalloc.start()
                case(y)
                gc.collect()
                kept = tracemalloc.get_traced_memory()[0] / 1024
                tracemalloc.stop()
            rows.append({"name": name, "world": world, "call": best, "first": first, "kept": kept})
        except Exception as error:  # refused there
            rows.append({"name": name, "world": world, "error": f"{type(error).__name__}: {error}"[:80]})
    return rows


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--worlds", nargs="+", default=["8", "64", "512", "4096", "64x64"], help="e.g. 8 or 64x64")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(tuple(map(int, options.measure.split("x"))), options.only)))
        return
    found: dict[str, dict[str, Any]] = {}
    for world in options.worlds:
        command = [sys.executable, __file__, "--measure", world, "--only", options.only]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        for row in json.loads(output.splitlines()[-1]):
            found.setdefault(row["name"], {})[world] = row
    print(f"{'microseconds a call':30}" + "".join(f"{w:>9}" for w in options.worlds) + "     x   first ms      KiB")
    for name, by_world in found.items():
        cells = [by_world[w] for w in options.worlds]
        print(f"{name:30}" + "".join(f"{c['call']:9.0f}" if "call" in c else f"{'-':>9}" for c in cells), end=" ")
        good = [c for c in cells if "call" in c and len(c["world"]) == 1]
        if len(good) < 2:
            print(next(c["error"] for c in cells if "error" in c))
            continue
        ratio, first, kept = good[-1]["call"] / good[0]["call"], good[-1]["first"], good[-1]["kept"]
        met = ratio <= BAR and first <= BAR_FIRST and kept <= BAR_KIB
        print(f"{ratio:6.1f} {first:9.1f} {kept:9.0f}  {'met' if met else 'missed'}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
