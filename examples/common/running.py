"""What the programs do around their own work: start, repeat a step, measure, compare, and leave."""

import argparse
import itertools
import json
import math
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from layout import Layout
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

TOLERANCE = {"float32": 1e-4, "float64": 1e-9}  # relative, of what --check compares
ROUNDS = 5  # of --compare


# -- start and leave ---------------------------------------------------------------------------------------------------


def add_world(args: argparse.Namespace) -> None:
    """Sets `rank`, `world_size`, and `sharded`: whether torchrun has started this process."""
    args.rank, args.world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    args.sharded = "RANK" in os.environ


def refuse(args: argparse.Namespace, error: ValueError) -> NoReturn:
    """Leave with status 2, on all ranks; one of them says why."""
    if args.rank == 0:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
    if dist.is_initialized():
        dist.barrier()  # a rank that is not as far yet would be told that another one is gone
        dist.destroy_process_group()
    sys.exit(2)


def start(args: argparse.Namespace, minutes: int = 10) -> torch.device:
    """The device of this process, and, under torchrun, the process group, whose ranks wait so long for each other."""
    from shardtensor import parallel  # here: --help does not wait for it

    device = parallel.device(args.device)
    if device.type != "cpu":
        torch.backends.cudnn.allow_tf32 = False  # float32 that means it; --check could not tell an error from rounding
    if args.sharded:
        dist.init_process_group(dist.get_default_backend_for_device(device), timeout=timedelta(minutes=minutes))
    return device


def scatter(tensors: Sequence[Tensor | None], device: torch.device, layout: Layout) -> list[Tensor]:
    """Rank 0's tensors (N, C, ...), which the others give as None, to all ranks. Every rank receives its own part only;
    the layout's dims are those after the channels."""
    from torch.distributed.tensor import Shard

    from shardtensor import scatter_tensor

    names = tuple(layout.sizes)[: len(layout.mesh)]
    mesh = dist.init_device_mesh(device.type, layout.mesh, mesh_dim_names=names)
    placements = [Shard(2 + axis) for axis in range(mesh.ndim)]
    return [scatter_tensor(each, mesh, placements, shard_sizes=layout.shard_sizes) for each in tensors]


def leave(args: argparse.Namespace, passed: bool = True) -> None:
    """The end of the program."""
    if args.sharded:
        dist.destroy_process_group()
        # torch's gloo threads now and then abort the interpreter's own clean-up, after all work is done.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if passed else 1)
    sys.exit(0 if passed else 1)


# -- training ----------------------------------------------------------------------------------------------------------


@dataclass
class History:
    """What the steps of a training gave.

    Attributes:
        losses: of all steps.
        seconds: that each step took.
        messages, sent: that this rank sent in the last step, and their bytes, operands of all-reduces included.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    messages: int = 0
    sent: int = 0

    @property
    def step_time(self) -> float:
        """In the median; the first step makes plans."""
        return statistics.median(self.seconds[1:] or self.seconds)


def repeat(step: Callable[[], float], steps: int, label: str, quiet: bool, count: bool) -> History:
    """Take so many steps, with a progress bar; count what the last one communicates."""
    history = History()
    with tqdm(total=steps, desc=label, unit="step", disable=quiet) as bar:
        for i in range(steps):
            start = time.perf_counter()
            with counting() if count and i == steps - 1 else nullcontext() as counted:
                history.losses.append(step())
            history.seconds.append(time.perf_counter() - start)
            bar.set_postfix(loss=f"{history.losses[-1]:.4f}", refresh=False)
            bar.update()
    if counted is not None:
        history.messages, history.sent = counted.messages, counted.bytes_sent + counted.collective_bytes
    return history


def counting() -> Any:
    from shardtensor.testing import count_communication

    return count_communication()


# -- measuring ---------------------------------------------------------------------------------------------------------


def peak_memory(device: torch.device) -> float:
    """GiB: what the accelerator held at most, or, on the CPU, what the whole process did."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def most_at_once(run: Callable[[], object], device: torch.device) -> float:
    """GiB of tensors that a call makes, as many of them as there are at one time. What kernels use for themselves does
    not count, nor what the heap keeps of freed memory, so this is the same in each run."""
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        run()
        return (torch.accelerator.max_memory_allocated() - before) / 2**30
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler writes when it starts and stops
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    changes = [event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])]
    return max(itertools.accumulate(changes, initial=0)) / 2**30


def of_all_ranks(value: Any) -> list[Any]:
    """This value of every rank, on all of them."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()


def take_turns(runs: Mapping[str, Callable[[], object] | None], rounds: int) -> dict[str, list[float]]:
    """Seconds of each of some runs, one after the other in each round; the first round does not count. A run that is
    None is one that only other ranks take part in."""
    seconds: dict[str, list[float]] = {kind: [] for kind in runs}
    for _ in range(rounds + 1):
        for kind, run in runs.items():
            wait_for_all()
            start = time.perf_counter()
            if run is not None:
                run()
            wait_for_all()
            seconds[kind].append(time.perf_counter() - start)
    return {kind: taken[1:] for kind, taken in seconds.items()}


def compare_times(args: argparse.Namespace, sharded: Callable[[], object], plain: Callable[[], object] | None) -> float:
    """Print how long a step takes on all ranks, and on rank 0 alone in plain PyTorch, which the other ranks give as
    None; return how many times as long the first one takes."""
    seconds = take_turns({f"{args.world_size} ranks": sharded, "one process": plain}, ROUNDS)
    best = [min(taken) for taken in seconds.values()]
    if args.rank == 0:
        for kind, taken in seconds.items():
            print(f"{kind}: {min(taken):.3f} s per step at best, {statistics.median(taken):.3f} s in the median")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        shared = f"; they share {cores} cores" if dist.get_backend() == "gloo" and args.world_size > cores else ""
        print(f"{args.world_size} ranks take {best[0] / best[1]:.2f} times as long as one process{shared}")
    return best[0] / best[1]


# -- comparing ---------------------------------------------------------------------------------------------------------


def same_losses(sharded: Sequence[float], plain: Sequence[float], dtype: str) -> bool:
    """Print two loss curves next to each other; True if they agree."""
    print(f"\n{'step':>4}  {'sharded':>18}  {'plain PyTorch':>18}  {'relative difference':>19}")
    differences = [abs(a - b) / abs(b) for a, b in zip(sharded, plain)]
    for step, (a, b, difference) in enumerate(zip(sharded, plain, differences), start=1):
        print(f"{step:>4}  {a:>18.15f}  {b:>18.15f}  {difference:>19.1e}")
    return verdict("relative difference of the losses", differences, TOLERANCE[dtype], dtype)


def verdict(what: str, differences: Iterable[float], allowed: float, dtype: str) -> bool:
    """Print whether differences are as small as they are to be, which nan is not."""
    worst = max(differences, key=lambda d: math.inf if math.isnan(d) else d)
    passed = worst <= allowed
    print(f"\n{'PASS' if passed else 'FAIL'}: largest {what} {worst:.1e}, allowed for {dtype}: {allowed:.0e}")
    return passed
