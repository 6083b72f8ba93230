"""How benchmarks time: calls of several kinds one after the other in each round, on ranks that this module starts.

A machine that is slower for a while slows all kinds of a round down alike, so ratios within one run keep their meaning.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardtensor._compat.c10d import c10d_all_to_all
from shardtensor.communication import exchange

Run = Callable[[], Any]
# An environment variable, which the processes that are started inherit: the type of the ranks' devices.
DEVICE = "SHARDTENSOR_BENCH_DEVICE"

# glibc gives large freed blocks back to the system, which zeroes the pages of every operator's result again; where many
# processes have it do so at once, they wait for each other. What is timed keeps its memory, as on a device.
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}


def device_type() -> str:
    return os.environ.get(DEVICE, "cpu")


def take_device(rank: int) -> None:
    """Make the rank's device torch's default, and use one thread."""
    torch.set_num_threads(1)
    if device_type() != "cpu":
        device = torch.device(device_type(), rank)
        torch.set_default_device(device)
        torch.get_device_module(device).set_device(device)


def device_done() -> None:
    """Wait for what the device has been given; the CPU has done it."""
    if device_type() != "cpu":
        torch.accelerator.synchronize()


def on_ranks(work: Callable[..., Any], *arguments: Any, ranks: int = 2, keep_memory: bool = True) -> Any:
    """What ``work(mesh, *arguments)`` returns on rank 0 of new processes of one thread and one device each."""
    with tempfile.TemporaryDirectory() as folder:
        return _spawned(_enter, ranks, keep_memory, f"{folder}/store", ranks, work, arguments)


def _spawned(entry: Callable[..., None], processes: int, keep_memory: bool, *arguments: Any) -> Any:
    """What one of new processes, each of which runs ``entry(index, results, *arguments)``, puts into ``results``."""
    results = mp.get_context("spawn").SimpleQueue()
    with mock.patch.dict(os.environ, KEPT_MEMORY if keep_memory else {}):
        started = mp.spawn(entry, (results, *arguments), nprocs=processes, join=False)
    ended = False
    while results.empty() and not ended:  # a large result has to be read before its process can end
        ended = started.join(timeout=0.2)
    if results.empty():
        raise RuntimeError("the processes ended without a result")
    result = results.get()
    while not ended:
        ended = started.join()
    return result


def _enter(rank: int, results: Any, store: str, ranks: int, work: Callable[..., Any], arguments: Any) -> None:
    take_device(rank)
    backend = "gloo"
    if device_type() != "cpu":
        backend = f"cpu:gloo,{device_type()}:{dist.get_default_backend_for_device(device_type())}"
    dist.init_process_group(backend, f"file://{store}", timedelta(minutes=10), world_size=ranks, rank=rank)
    result = work(init_device_mesh(device_type(), (ranks,)), *arguments)
    if rank == 0:
        results.put(result)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort the interpreter's own clean-up


def on_rank_of_fake(work: Callable[..., Any], *arguments: Any, rank: int = 0, ranks: int = 2) -> Any:
    """What ``work(mesh, *arguments)`` returns in a new process, one rank of a fake group where nothing is sent."""
    return _spawned(_pretend, 1, True, rank, ranks, work, arguments)


def _pretend(_: int, results: Any, rank: int, ranks: int, work: Callable[..., Any], arguments: Any) -> None:
    take_device(0)
    torch.set_flush_denormal(True)  # what would have been received is what the memory held
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    exchange.c10d_all_to_all = all_to_all_of_fake
    results.put(work(init_device_mesh(device_type(), (ranks,)), *arguments))


def all_to_all_of_fake(out: torch.Tensor, inp: torch.Tensor, *rest: Any) -> Any:
    """The fake group's, which refuses a rank that only receives."""
    return c10d_all_to_all(out, inp, *rest) if inp.numel() else _Done()


class _Done:
    def wait(self) -> None:
        pass


def slowest(run: Run, together: bool = True) -> float:
    """Seconds of ``run`` on the slowest rank; without ``together`` rank 0 runs it alone and the others wait."""
    dist.barrier()
    device_done()
    start = time.perf_counter()
    if together or dist.get_rank() == 0:
        run()
        device_done()
    spent = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return float(spent)


def interleaved(
    runs: dict[str, Run], budget: float, least: int = 3, most: int = 60, alone: Collection[str] = ()
) -> dict[str, list[float]]:
    """The times of each kind on the slowest rank, one per round.

    As many rounds as fit into ``budget`` seconds, from ``least`` to ``most``, after two that fill the caches (one,
    where one round is longer than the budget). Kinds in ``alone`` run on rank 0 while the others wait.
    """

    def turn() -> dict[str, float]:
        return {kind: slowest(run, kind not in alone) for kind, run in runs.items()}

    first = sum(turn().values())
    length = sum(turn().values()) if first < budget else first  # the same on all ranks, so they agree on the rounds
    rounds = [turn() for _ in range(max(least, min(most, int(budget / length))))]
    return {kind: [taken[kind] for taken in rounds] for kind in runs}


def host_time(run: Run, number: int) -> float:
    """Seconds of the host's CPU time per call, over ``number`` calls."""
    # With a device, backward passes run in a thread of autograd's.
    clock = time.thread_time if device_type() == "cpu" else time.process_time
    device_done()
    start = clock()
    for _ in range(number):
        run()
    return (clock() - start) / number
