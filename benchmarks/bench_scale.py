"""Host time of operators by the size of the world, from 8 to 4,096 ranks, and what their plans take in memory.

    python benchmarks/bench_scale.py [--only NAME] [--worlds 8 64 512 4096] [--json FILE]

One process is rank 1 (so it has two neighbours) of a world on the fake process group, where collectives complete
without moving anything; the world grows, the shard stays: each rank has 8 rows of a tensor of 8 * ranks rows. Times
are the CPU time of the calling thread, best of many calls. Three figures of each operator, for the largest world and,
next to it, the largest two-dimensional one (where each rank has 8 x 8 of an image): a repeated call relative to one in
the smallest world; the first call, which makes the plan, in a process that has made such a plan for other sizes before;
and what that call has left allocated from Python, without the shard sizes that specs of other tensors have, too (all
specs share them). The table has the largest of the latter two; the JSON file has all.

Each world has a process of its own. Between calls each times a plain convolution, too, by which its calls are divided
before they are compared, in case the machine has become slower or faster meanwhile.
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
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from report import Figure, chosen, finish, parser
from timing import Run, all_to_all_of_fake, host_time
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardtensor import ShardTensor
from shardtensor.communication import exchange

GROUP = "host time by the size of the world"
ROWS = 8  # of each rank
WORLDS = ["8", "64", "512", "4096", "4x4", "64x64"]
QUICK = ["8", "64", "2x4", "8x8"]
BAR, BAR_FIRST, BAR_KIB = 1.5, 20.0, 16.0

Case = Callable[[ShardTensor], Any]


@cache
def near(ranks: int) -> tuple[int, ...]:
    """Other sizes, whose first boundary is a row further. Made once, as a program would."""
    return ROWS + 1, ROWS - 1, *(ROWS,) * (ranks - 2)


def elsewhere(x: ShardTensor) -> Any:
    """Rows to columns; on a 2-D mesh, whose columns are sharded, to channels."""
    return x.redistribute(placements=[Shard(1), Shard(3)][-x.device_mesh.ndim :])


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
    "redistribute, rows to another dim": elsewhere,
}
# Here a rank exchanges with all others, whatever is done; so what it takes has no bar.
WITH_ALL = {"redistribute, rows to another dim"}


def plain(local: torch.Tensor) -> torch.Tensor:
    return F.conv2d(local, torch.ones(4, 4, 3, 3), padding=1)


def image(mesh: DeviceMesh, extra: int) -> ShardTensor:
    """Of 8 rows a rank; on a 2-D mesh the columns are sharded, too. ``extra`` makes it another layout."""
    shape = [1 + extra, 4, ROWS, ROWS] if mesh.ndim > 1 else [1, 4, ROWS, 8 + extra]
    sizes = {m: (ROWS,) * mesh.size(m) for m in range(mesh.ndim)}
    return ShardTensor.from_local(torch.randn(shape), mesh, [Shard(2), Shard(3)][: mesh.ndim], shard_sizes=sizes)


def repeated(run: Run, reference: Run, groups: int) -> tuple[float, float]:
    """Seconds of a call of each, the best of some groups of calls."""
    best, numbers = [float("inf")] * 2, [1, 1]
    for _ in range(groups):
        for i, timed in enumerate((run, reference)):
            best[i] = min(best[i], host_time(timed, numbers[i]))
            numbers[i] = max(1, min(200, int(0.02 / best[i])))
    return best[0], best[1]


def measure(world: tuple[int, ...], only: str, groups: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    ranks = torch.Size(world).numel()
    dist.init_process_group("fake", rank=1, world_size=ranks, store=FakeStore())
    exchange.c10d_all_to_all = all_to_all_of_fake
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
                call, reference = repeated(partial(case, x), partial(plain, x.to_local()), groups)
                y = image(mesh, 16)
                gc.collect()
                tracemalloc.start()
                case(y)
                gc.collect()
                kept = tracemalloc.get_traced_memory()[0] / 1024
                tracemalloc.stop()
            found = {"call": call, "reference": reference, "first": first, "kept": kept}
            rows.append({"name": name, "world": world} | found)
        except Exception as error:  # refused there
            rows.append({"name": name, "world": world, "error": f"{type(error).__name__}: {error}"})
    return rows


def measure_apart(worlds: list[str], only: str, calls: int) -> dict[str, dict[str, dict[str, Any]]]:
    """What :func:`measure` finds in a process for each world: by operator, then by world."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for world in worlds:
        print(f"measuring a world of {world}", file=sys.stderr)
        command = [sys.executable, __file__, "--measure", world, "--only", only, "--calls", str(calls)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        for row in json.loads(output.splitlines()[-1]):
            found.setdefault(row["name"], {})[world] = row
    return found


def label(row: dict[str, Any]) -> str:
    return "x".join(map(str, row["world"])) + " ranks"


def calls(name: str, rows: list[dict[str, Any]]) -> Figure:
    """Of one operator in worlds of one kind, from the smallest to the largest."""
    good = [row for row in rows if "call" in row]
    if len(good) < 2:
        refused = [row["error"] for row in rows if "error" in row]
        return Figure(GROUP, f"{name}, {label(rows[-1])}", None, note=refused[0] if refused else "one world only")
    first, last = good[0], good[-1]
    title = f"{name}, {label(last)}: of a call at {label(first)}"
    times = {label(row): row["call"] for row in good}
    relative = [row["call"] / row["reference"] for row in (first, last)]
    details = {key: last[key] for key in ("first", "kept")} | {"operator": name, "worlds": times}
    bar = None if name in WITH_ALL else BAR
    return Figure(GROUP, title, relative[1] / relative[0], bar=bar, best=times, details=details)


def largest(rows: list[dict[str, Any]], key: str, what: str, unit: str, bar: float) -> Figure:
    """The operator whose first call in the largest world takes most, and all others in the note."""
    ordered = sorted(rows, key=lambda row: -row[key])
    note = ", ".join(f"{row['name']} {row[key]:.1f}" for row in ordered)
    title = f"{what}, the largest of {len(rows)} operators, {label(rows[0])}"
    return Figure(GROUP, title, ordered[0][key], unit, bar, note=note)


def figures(found: dict[str, dict[str, dict[str, Any]]]) -> list[Figure]:
    made = []
    for dims in (1, 2):
        rows = {name: [r for r in of.values() if len(r["world"]) == dims] for name, of in found.items()}
        rows = {name: of for name, of in rows.items() if of}
        made += [calls(name, of) for name, of in rows.items()]
        last = [of[-1] for name, of in rows.items() if "call" in of[-1] and name not in WITH_ALL]
        if last:
            made.append(largest(last, "first", "first call", "ms", BAR_FIRST))
            made.append(largest(last, "kept", "what it leaves allocated", "KiB", BAR_KIB))
    return made


def main() -> None:
    warnings.filterwarnings("ignore")
    made = parser(__doc__)
    made.add_argument("--worlds", nargs="+", help="from small to large, such as 8 or 64x64")
    made.add_argument("--calls", type=int, default=12, help="groups of calls, of which the best counts")
    made.add_argument("--measure", help=argparse.SUPPRESS)
    options = made.parse_args()
    chosen(options.only, CASES, made.error)
    if options.measure:
        print(json.dumps(measure(tuple(map(int, options.measure.split("x"))), options.only, options.calls)))
        return
    worlds = options.worlds or (QUICK if options.quick else WORLDS)
    found = measure_apart(worlds, options.only, 2 if options.quick else options.calls)
    finish(figures(found), options)


if __name__ == "__main__":
    main()
