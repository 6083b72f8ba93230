"""Halos: intervals that overlap between ranks, borrowed from their owners, and gradients returned to them.

Two levels, one plan (``exchange.plan_intervals``):

- :func:`borrow` gives a rank the interval that it needs as one tensor, differentiably. Simple, but it copies the
  shard; for operators where that does not matter.
- :class:`Strips` keeps what was received apart from the shard, for operators that work on the shard while the strips
  travel and add the strips' part afterwards (convolution).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import Pending, Plan, plan_intervals, start_swap
from .geometry import Interval, length
from .redistribute import move_intervals

__all__ = ["Strips", "borrow"]


def borrow(
    local: Tensor, dim: int, own: Sequence[Interval], need: Sequence[Interval], rank: int, group: dist.ProcessGroup
) -> Tensor:
    """The interval ``need[rank]`` of tensor dim ``dim``; every rank ``s`` of ``group`` holds ``own[s]``. Differentiable.

    Args:
        local: this rank's shard; its dim ``dim`` has the length of ``own[rank]``.
        own: per rank; together they cover the dim without overlap.
        need: per rank, within ``0..n``; they may overlap, leave gaps and be empty.

    Returns:
        A plain tensor whose dim ``dim`` has the length of ``need[rank]``. Its gradient is added up at the owners.
    """
    own, need = tuple(own), tuple((a, b) if b > a else (0, 0) for a, b in need)
    plan = plan_intervals(own, need, rank)
    if plan.own == plan.need and not plan.active:
        return local
    return _Borrow.apply(local, dim, own, need, rank, group)


class _Borrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, own: Any, need: Any, rank: int, group: Any) -> Any:  # type: ignore[override]
        ctx.args = dim, own, need, rank, group
        return move_intervals(local, dim, own, need, rank, group)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return _Return.apply(grad, *ctx.args), None, None, None, None, None


class _Return(torch.autograd.Function):
    """The adjoint of borrowing: each rank's gradient over what it needed, summed at the owners."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, dim: int, own: Any, need: Any, rank: int, group: Any) -> Any:  # type: ignore[override]
        ctx.args = dim, own, need, rank, group
        plan = plan_intervals(own, need, rank)
        shape = list(grad.shape)
        shape[dim] = length(plan.own)
        total = grad.new_zeros(shape)
        a, b = max(plan.own[0], plan.need[0]), min(plan.own[1], plan.need[1])
        if b > a:
            total.narrow(dim, a - plan.own[0], b - a).copy_(grad.narrow(dim, a - plan.need[0], b - a))
        if plan.active:
            send = [[grad.narrow(dim, a - plan.need[0], b - a)] if b > a else [] for a, b in plan.recvs]
            shapes = [[[*shape[:dim], b - a, *shape[dim + 1 :]]] if b > a else [] for a, b in plan.sends]
            received = start_swap(send, shapes, group, dtype=grad.dtype, device=grad.device).wait()
            for (a, b), row in zip(plan.sends, received, strict=True):
                if b > a:
                    total.narrow(dim, a - plan.own[0], b - a).add_(row[0])
        return total

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return borrow(grad, *ctx.args), None, None, None, None, None
