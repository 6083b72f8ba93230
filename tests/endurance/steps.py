"""The steps that each rank takes, and what it notes down in between."""

from __future__ import annotations

import copy
import functools
import gc
import random
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from seeded import seeded
from torch import nn
from torch.distributed.tensor import Shard

from shardtensor import ShardTensor
from shardtensor.layout import caches
from shardtensor.testing import shard, shared_mesh

ROWS, COLUMNS = 40, 6
STEPS_PER_CUT = 3
CONTAINERS = {dict, list, set, deque, WeakValueDictionary, WeakKeyDictionary, WeakSet}


@dataclass(frozen=True)
class Step:
    """What is drawn for a step: two cuts of the rows, the slice's bounds, and the seed of the data."""

    first: tuple[int, ...]
    second: tuple[int, ...]
    start: int
    stop: int
    seed: int


def drawn(number: int, ranks: int, kinds: int | None, seed: int) -> list[Step]:
    """The same on every rank.

    Args:
        kinds: how many different ones there are, of which each is taken again and again; None: draw until the end.
    """
    numbers = random.Random(seed)
    steps: list[Step] = []
    cuts = ()
    for i in range(number if kinds is None else kinds):
        if i % STEPS_PER_CUT == 0:
            cuts = tuple(_cut(numbers, ranks) for _ in range(2))
        start, stop = sorted(numbers.sample(range(ROWS + 1), 2))
        steps.append(Step(*cuts, start, stop, i))
    return steps if kinds is None else [steps[i % kinds] for i in range(number)]


def _cut(numbers: random.Random, ranks: int) -> tuple[int, ...]:
    """Any cut of the rows, shards without rows included."""
    borders = [0, *sorted(numbers.randint(0, ROWS) for _ in range(ranks - 1)), ROWS]
    return tuple(b - a for a, b in zip(borders, borders[1:]))


class Network(nn.Module):
    """Halos, statistics over all shards, a slice, a pooling and weights that are used after it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.batch_norm, self.group_norm = nn.BatchNorm2d(4), nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x, step):
        x = F.gelu(self.batch_norm(self.first(x)))
        if isinstance(x, ShardTensor):
            x = x.redistribute(x.device_mesh, (Shard(2),), shard_sizes={0: step.second})
        x = x + F.gelu(self.group_norm(self.second(x)))
        return self.head(x[:, :, step.start : step.stop].mean((2, 3)))


@dataclass
class Note:
    """What was there after so many steps, on one rank.

    Attributes:
        seconds: of wall time per step, since the last note.
        mib: resident memory.
        caches: entries by the name of the cached function, or of a container of a module.
        tensors, objects: living ones that the garbage collector knows.
        drift: the largest difference of a weight or statistic from one device's, relative to the largest of its tensor.
    """

    step: int
    seconds: float
    mib: float
    caches: dict[str, int]
    tensors: int
    objects: int
    drift: float


def train(number: int, every: int, kinds: int | None = None, seed: int = 0) -> list[Note]:
    """Notes after each ``every`` of ``number`` steps."""
    mesh = shared_mesh((1, dist.get_world_size()), ("dp", "domain"))
    caches.forget()  # what an earlier use of the process has left
    gc.collect()
    torch.manual_seed(seed)
    alone = Network().double().train()
    model = copy.deepcopy(alone)
    # With these steps rounding errors do not grow: with ten times as long ones, or with weight decay in front of batch
    # norm, two runs on one device whose weights differ by 1e-15 at first part for thousands of steps.
    optimizers = [torch.optim.SGD(m.parameters(), 0.005, momentum=0.9) for m in (alone, model)]
    notes, began = [], time.perf_counter()
    for i, step in enumerate(drawn(number, mesh["domain"].size(), kinds, seed), 1):
        generator = seeded(step.seed)
        x = torch.randn(2, 2, ROWS, COLUMNS, dtype=torch.float64, generator=generator)
        y = torch.randn(2, 3, dtype=torch.float64, generator=generator)
        sharded = shard(x, mesh["domain"], [Shard(2)], {0: step.first})  # a new mesh object each time
        for network, given, optimizer in zip((alone, model), (x, sharded), optimizers):
            optimizer.zero_grad()
            F.mse_loss(network(given, step), y).backward()
            optimizer.step()
        if i % every == 0:
            del x, y, sharded, network, given, optimizer
            seconds = (time.perf_counter() - began) / every
            notes.append(_note(i, seconds, alone, model))
            began = time.perf_counter()
    return notes


def _note(step: int, seconds: float, alone: nn.Module, model: nn.Module) -> Note:
    gc.collect()
    objects = gc.get_objects()
    tensors = sum(issubclass(type(o), torch.Tensor) for o in objects)  # isinstance would run code of lazy objects
    drift = max(map(_difference, alone.state_dict().values(), model.state_dict().values()))
    return Note(step, seconds, _resident(), _caches(objects), tensors, len(objects), drift)


def _difference(expected: torch.Tensor, actual: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def _resident() -> float:
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * 4096 / 2**20 if pages.exists() else float("nan")


def _caches(objects: list[object]) -> dict[str, int]:
    """All that our modules keep: cached functions, wherever they are, and containers at module level."""
    sizes = {
        f"{o.__module__}.{o.__qualname__}": o.cache_info().currsize
        for o in objects
        if type(o) is functools._lru_cache_wrapper and o.__module__.startswith("shardtensor.")
    }
    for name, module in list(sys.modules.items()):
        if name.startswith("shardtensor."):
            for variable, value in vars(module).items():
                if type(value) in CONTAINERS and not variable.startswith("__"):
                    sizes[f"{name}.{variable}"] = _entries(value)
    return sizes


def _entries(container) -> int:
    """Also those of the values' own containers, one level down."""
    values = container.values() if type(container) is dict else ()
    inner = [v for o in values for v in getattr(o, "__dict__", {}).values() if type(v) in CONTAINERS]
    return len(container) + sum(map(len, inner))
