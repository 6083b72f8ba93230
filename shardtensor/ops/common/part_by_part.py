"""A function of an operand that is sent around a ring: computed with each rank's shard in turn, and put together.

[Note: part by part] The gradient of an operand that travels comes home part by part, too: backward, the shards go round
once more, and what was computed with each is computed again. Nothing of what came by is saved.

What is added up over the parts is computed in float32, and rounded once: see [Note: rounded once] in redistribute.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..._compat import AutogradFunction
from ..._compat.c10d import group_along
from ...dispatch.gradients import once_differentiable
from ...layout.geometry import Interval, resized
from .alignment import wide_dtype
from .half import widened
from .ring import Trip, ring_of, trip


@dataclass(frozen=True, slots=True)
class Tour:
    """The way of an operand's shards along a mesh dim, and where their results belong.

    Attributes:
        dim: of the travelling operand, the one that is sharded.
        into: the dim of the result along which the parts' results stand side by side; None where they are summed.
        intervals: each rank's of ``dim``, and so of ``into``.
    """

    mesh: DeviceMesh
    mesh_dim: int
    rank: int
    dim: int
    into: int | None
    intervals: tuple[Interval, ...]


def part_by_part(function: Callable[..., Tensor], tour: Tour, part: Tensor, *others: Tensor) -> Tensor:
    """``function(owner, that rank's part, *others)`` for every rank's part, put together. Differentiable once.

    Every rank of the mesh dim calls it. ``function`` has no effects, and may get a tensor in another memory format.
    """
    result: Tensor = _PartByPart.apply(function, tour, part, *others)
    return result


class _PartByPart(AutogradFunction):
    """See [Note: part by part]."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], tour: Tour, part: Tensor, *others: Tensor) -> Tensor:
        ctx.function, ctx.tour = function, tour
        kind = part.device.type
        ctx.autocast = kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        ctx.save_for_backward(part, *others)
        results: dict[int, Tensor] = {}
        total: Tensor | None = None
        dtype = part.dtype
        for owner, (block,) in _trip(tour, part).travel([_plain(part)]):
            if tour.into is not None:
                results[owner] = function(owner, block, *others)
                continue
            result = function(owner, *widened(block, *others))
            total = result if total is None else total + result
        if total is not None:
            return total.to(dtype) if total.dtype == wide_dtype(dtype) else total
        return torch.cat([results[owner] for owner in sorted(results)], dim=tour.into or 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        part, *others = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        tour: Tour = ctx.tour
        kind, enabled, dtype = ctx.autocast
        sums: list[Tensor | None] = [None] * len(others)

        def contribute(owner: int, blocks: Sequence[Tensor]) -> list[Tensor]:
            a, b = tour.intervals[owner]
            mine = grad if tour.into is None else grad.narrow(tour.into, a, b - a)
            with torch.enable_grad(), torch.autocast(kind, dtype, enabled=enabled):
                given = (t.detach() for t in widened(*blocks, *others))
                leaves = [t.requires_grad_(n) for t, n in zip(given, needs, strict=True)]
                result = ctx.function(owner, *leaves)
                mine = mine.to(result.dtype)
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            found = dict(zip(map(id, wanted), torch.autograd.grad(result, wanted, mine, materialize_grads=True)))
            for i, leaf in enumerate(leaves[1:]):
                if leaf.requires_grad:
                    before = sums[i]
                    sums[i] = found[id(leaf)] if before is None else before + found[id(leaf)]
            return [_plain(found[id(leaves[0])]).clone()] if needs[0] else []

        home: Tensor | None = None
        if needs[0]:
            (home,) = _trip(tour, part).travel_and_return([_plain(part)], contribute)
        else:
            for owner, blocks in _trip(tour, part).travel([_plain(part)]):
                contribute(owner, blocks)
        return None, None, home, *sums


def _trip(tour: Tour, part: Tensor) -> Trip:
    """The way of the parts around the ring."""
    ring = ring_of(tour.rank, len(tour.intervals), lambda reader, owner: True)
    shapes = [tuple(resized(part.shape, tour.dim, b - a)) for a, b in tour.intervals]
    forms, gradients = (tuple(((shape, dtype),) for shape in shapes) for dtype in (part.dtype, wide_dtype(part.dtype)))
    return trip(ring, forms, gradients, group_along(tour.mesh, tour.mesh_dim))


def _plain(t: Tensor) -> Tensor:
    """Contiguous, and without pending conjugation: what may travel and be added to."""
    return t.resolve_conj().resolve_neg().contiguous()
