"""A model of the machine that turns counts of collectives and bytes into a predicted time of a step on several ranks.

    time = time of the local work on all ranks at once + sum over collectives (latency + bytes / bandwidth)

Latency and bandwidth are those of the backend, measured in the same run between the same processes, for all-reduce and
for all-to-all; collectives of other kinds count as all-reduces, messages from point to point as all-to-alls. The model
knows no overlap, no waiting for a slower rank, no host time of ours, and no work that half of the input alone does not
have (queries of attention see the keys of all ranks). So a measured time above the predicted one is one of these.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from timing import device_done
from torch.distributed.device_mesh import DeviceMesh

from shardtensor.testing import Communication

SMALL, LARGE = 64, 4 * 2**20  # bytes


@dataclass(frozen=True)
class Link:
    """What a collective takes: seconds, and bytes per second of each rank's operand."""

    latency: float
    bandwidth: float

    def time(self, calls: int, size: int) -> float:
        return calls * self.latency + size / self.bandwidth


# An assumption, not a measurement: ranks on fast devices of one machine.
ASSUMED = {"all_reduce": Link(20e-6, 100e9), "all_to_all": Link(20e-6, 100e9)}


def measured_links(mesh: DeviceMesh, rounds: int) -> dict[str, Link]:
    """Of all-reduce and all-to-all, from their best times with few and with many bytes."""
    group = mesh.get_group()
    collectives: dict[str, Callable[[torch.Tensor], Any]] = {
        "all_reduce": lambda t: dist.all_reduce(t, group=group),
        "all_to_all": lambda t: dist.all_to_all_single(torch.empty_like(t), t, group=group),
    }
    links = {}
    for kind, run in collectives.items():
        # Of an all-to-all, the part that stays on its rank is no message.
        sizes = [n * mesh.size() // (mesh.size() - 1) if kind == "all_to_all" else n for n in (SMALL, LARGE)]
        small, large = (best_time(run, torch.zeros(size // 4), rounds) for size in sizes)
        links[kind] = Link(small, LARGE / max(large - small, 1e-9))
    return links


def best_time(run: Callable[[torch.Tensor], Any], operand: torch.Tensor, rounds: int) -> float:
    """Of one call among several in a row."""
    best, calls = float("inf"), 5
    for _ in range(rounds):
        dist.barrier()
        device_done()
        start = time.perf_counter()
        for _ in range(calls):
            run(operand)
        device_done()
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def communication_time(links: dict[str, Link], counted: Communication) -> float:
    """Predicted seconds of what was counted."""
    exchanges = counted.collectives["all_to_all"]
    sums = sum(counted.collectives.values()) - exchanges
    alone = counted.messages if not exchanges else 0  # from point to point
    return links["all_to_all"].time(exchanges + alone, counted.bytes_sent) + links["all_reduce"].time(
        sums, counted.collective_bytes
    )
