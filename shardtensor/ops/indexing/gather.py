"""Looking up by index, above autograd: ``gather``, ``index_select``, and what indices and tables need of them.

[Note: gradients of lookups] torch's formulas add the gradient into zeros that know the shape of what was looked into,
but not how it was cut; they would be whole on every rank. So where a dim that is looked into is cut, the gradient is
written into zeros that are cut alike: each rank keeps what belongs to its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...registry import register
from ...tensor import ShardTensor, run, wrap
from ..common.alignment import is_cut
from ..shape.view import dim_of

__all__ = ["flat_cumsum", "look_up", "looks_into_a_shard"]

_aten = torch.ops.aten

Read = Callable[..., Any]


class LookUp(torch.autograd.Function):
    """``read(x, indices)``, whose gradient is ``write(zeros, indices, gradient)``."""

    @staticmethod
    def forward(ctx: Any, x: Any, read: Read, write: Read, *indices: Tensor) -> Any:  # type: ignore[override]
        ctx.save_for_backward(*indices)
        ctx.write, ctx.spec = write, x._spec.for_gradient()
        return read(x, indices)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        zeros = wrap(torch.zeros(ctx.spec.local_shape(), dtype=grad.dtype, device=grad.device), ctx.spec)
        return ctx.write(zeros, ctx.saved_tensors, grad), None, None, *(None for _ in ctx.saved_tensors)


def looks_into_a_shard(x: Any, dims: Sequence[int]) -> bool:
    """Whether one of these dims of ``x``, which are to be looked into, is sharded."""
    return isinstance(x, ShardTensor) and any(d in x._spec.sharded_dims() for d in dims)


def look_up(x: Any, indices: Sequence[Tensor | None]) -> Any:
    """``x[indices]``, one index or None for each of the first dims of ``x``; negative ones count from the end."""
    dims = [d for d, index in enumerate(indices) if index is not None]
    given = list(indices)
    if not looks_into_a_shard(x, dims):
        return _aten.index.Tensor(x, given)

    def placed(found: Sequence[Tensor]) -> list[Tensor | None]:
        rest = iter(found)
        return [None if index is None else next(rest) for index in given]

    given = [None if index is None else True for index in given]  # type: ignore[misc]  # the tensors are saved
    return LookUp.apply(
        x,
        lambda t, found: run(_aten.index.Tensor, (t, placed(found)), {}),
        lambda zeros, found, grad: _aten.index_put.default(zeros, placed(found), grad, True),
        *(index for index in indices if index is not None),
    )


@register(torch.gather, Tensor.gather)
def _gather(input: Any, dim: Any, index: Any, *, sparse_grad: bool = False, out: Any = None) -> Any:
    if out is None and is_cut(input, index) and {input.ndim, index.ndim} == {0, 1}:
        return torch.gather(input.reshape(-1), dim, index.reshape(-1)).reshape(index.shape)
    d = None if out is not None else dim_of(input, dim)
    if d is None or not looks_into_a_shard(input, [d]):
        return NotImplemented
    return LookUp.apply(
        input,
        lambda t, found: run(_aten.gather.default, (t, d, *found), {}),
        lambda zeros, found, grad: torch.scatter_add(zeros, d, *found, grad),
        index,
    )


@register(torch.index_select, Tensor.index_select)
def _index_select(input: Any, dim: Any, index: Any, *, out: Any = None) -> Any:
    d = None if out is not None else dim_of(input, dim)
    if d is None or not looks_into_a_shard(input, [d]):
        return NotImplemented
    return LookUp.apply(
        input,
        lambda t, found: run(_aten.index_select.default, (t, d, *found), {}),
        lambda zeros, found, grad: torch.index_add(zeros, d, *found, grad),
        index if index.ndim else index.reshape(1),
    )


def flat_cumsum(x: Any) -> Any:
    """The running sum over all dims, the last one fastest."""
    if not x.ndim:
        return x
    sums = x.cumsum(-1)
    if x.ndim == 1:
        return sums
    rows = x.sum(-1)
    return sums + (flat_cumsum(rows) - rows).unsqueeze(-1)
