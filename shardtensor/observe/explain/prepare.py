"""What a preview is asked for, checked and completed: layouts and sizes of inputs, and which ranks to run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ..._compat import tree_leaves
from ...layout.geometry import chunk_sizes

FEW = 8  # up to so many ranks are all run

Sizes = Mapping[int, Sequence[int]]


class UnfitArguments(ValueError):
    """Arguments of a preview that do not fit each other or the inputs, as opposed to what a model raises."""


@dataclass(frozen=True)
class Job:
    """What is run: see :func:`shardtensor.explain`.

    Attributes:
        inputs: the arguments, of which some may be dicts or lists of tensors.
        layouts: for each leaf of the inputs one placement per mesh dim, or None for one that stays plain.
        sizes: for each leaf of the inputs its shard sizes by mesh dim.
        device: the type of the device that tensors are on, or say that they are.
    """

    model: Callable[..., Any]
    inputs: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    mesh: tuple[int, ...]
    layouts: tuple[tuple[Placement, ...] | None, ...]
    sizes: tuple[Sizes, ...]
    backward: bool | Callable[[Any], Tensor]
    replicate: bool
    device: str

    @property
    def world_size(self) -> int:
        return math.prod(self.mesh)

    def held(self, rank: int) -> int:
        """How many bytes of the inputs a rank holds."""
        at = [int(k) for k in torch.unravel_index(torch.tensor(rank), self.mesh)]
        total = 0
        for value, layout, sizes in zip(tree_leaves(self.inputs), self.layouts, self.sizes):
            if isinstance(value, Tensor):
                shape = list(value.shape)
                for m, placement in enumerate(layout or ()):
                    if isinstance(placement, Shard):
                        shape[placement.dim] = sizes[m][at[m]]
                total += math.prod(shape) * value.element_size()
        return total


def prepared(
    model: Callable[..., Any],
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mesh: int | Sequence[int],
    shard: Any,
    shard_sizes: Sizes | None,
    backward: bool | Callable[[Any], Tensor],
    replicate: bool,
) -> Job:
    """The job of :func:`shardtensor.explain`'s arguments, or the errors that it documents."""
    shape = (mesh,) if isinstance(mesh, int) else tuple(mesh)
    if not shape or min(shape) < 1:
        raise UnfitArguments(
            f"mesh={mesh!r}: give a number of ranks, or the mesh's shape, such as (2, 2); all at least 1"
        )
    given = {m % len(shape): tuple(sizes) for m, sizes in (shard_sizes or {}).items() if -len(shape) <= m < len(shape)}
    if len(given) != len(shard_sizes or {}):
        raise UnfitArguments(f"shard_sizes={shard_sizes!r} names mesh dims beyond those of {shape}")
    if isinstance(shard, list) and len(shard) != len(inputs):
        raise UnfitArguments(f"shard has {len(shard)} entries for {len(inputs)} inputs")
    by_input = shard if isinstance(shard, list) else [shard] * len(inputs)
    leaves = [(leaf, each) for value, each in zip(inputs, by_input) for leaf in tree_leaves(value)]
    layouts, sizes = [], []
    for value, each in leaves:
        layout = _layout(each, shape, value.ndim) if isinstance(value, Tensor) and each is not None else None
        layouts.append(layout)
        sharded = {m: p.dim for m, p in enumerate(layout or ()) if isinstance(p, Shard)}
        sizes.append({m: _chosen(given.get(m), value.shape[d], shape[m]) for m, d in sharded.items()})
    if shard is None and shape != (1,):
        raise UnfitArguments(f"shard=None is the model on one rank, without shards; mesh={mesh!r} has more")
    if shard is not None and all(layout is None for layout in layouts):
        raise UnfitArguments(f"shard={shard!r}: none of the inputs is a tensor that has these dims")
    devices = {t.device.type for t, _ in leaves if isinstance(t, Tensor)} - {"meta"}
    if isinstance(model, nn.Module):
        devices |= {t.device.type for t in model.parameters()} - {"meta"}
    if len(devices) > 1:
        raise UnfitArguments(f"model and inputs are on different devices: {sorted(devices)}")
    device = devices.pop() if devices else "cpu"
    return Job(model, inputs, kwargs, shape, tuple(layouts), tuple(sizes), backward, replicate, device)


def sample_of(job: Job) -> tuple[int, ...]:
    """The ranks to run: all of a small world, otherwise those that differ most."""
    world = range(job.world_size)
    if job.world_size <= FEW:
        return tuple(world)
    return tuple(
        sorted({0, job.world_size // 2, job.world_size - 1, max(world, key=job.held), min(world, key=job.held)})
    )


def _layout(shard: Any, mesh: tuple[int, ...], ndim: int) -> tuple[Placement, ...] | None:
    """One placement per mesh dim of what a caller gives; None where the tensor does not have the dims."""
    given = shard if isinstance(shard, (tuple, list)) else (shard,)
    if len(given) != len(mesh):
        raise UnfitArguments(f"shard={shard!r} does not have one tensor dim for each dim of the mesh {mesh}")
    placements: list[Placement] = []
    for each in given:
        if isinstance(each, Shard):
            each = each.dim
        if each is None or each == Replicate():
            placements.append(Replicate())
        elif isinstance(each, int):
            if not -ndim <= each < ndim:
                return None
            placements.append(Shard(each % ndim))
        else:
            raise TypeError(f"shard={shard!r}: for each mesh dim the tensor dim that it shards, Shard(dim) or None")
    return tuple(placements)


def _chosen(given: Sequence[int] | None, length: int, ranks: int) -> tuple[int, ...]:
    """The shard sizes of a dim of this length, torch.chunk's where none are given."""
    if given is None:
        return chunk_sizes(length, ranks)
    if len(given) != ranks or sum(given) != length or min(given) < 0:
        raise UnfitArguments(f"shard sizes {tuple(given)} are not {ranks} sizes that add up to {length}")
    return tuple(given)
