"""Operators that pick elements along a dim and tell where they were: values, indices and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._compat import AutogradFunction, OpOverload
from ..._compat.c10d import group_along
from ...communication.redistribute import all_gather
from ...dispatch.gradients import once_differentiable
from ...dispatch.registry import DECLINED
from ...dispatch.tensor import ShardTensor, as_gradient, run, wrap
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Composed
from .reduce import reduced_dims

_aten = torch.ops.aten


def plain_tuple(func: Callable[..., Sequence[Tensor]]) -> Callable[..., tuple[Tensor, ...]]:
    """``func`` with a tuple for its result, which is a tuple with names."""
    return lambda *args, **kwargs: tuple(func(*args, **kwargs))


class Selected(AutogradFunction):
    """``(values, indices)`` of an operator that picks elements along ``dim``; each gets its value's gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: ShardTensor, op: OpOverload, dim: int, removed: bool, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        values, indices = run(op, (x, *args), kwargs)
        ctx.spec, ctx.dim, ctx.removed, ctx.out = x._spec, dim, removed, values._spec
        ctx.cumulative = op in (_aten.cummax.default, _aten.cummin.default)
        ctx.save_for_backward(indices)
        ctx.mark_non_differentiable(indices)
        ctx.set_materialize_grads(False)
        return values, indices

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any, _: Any) -> Any:
        if grad is None:
            return (None,) * 6
        spec, dim = ctx.spec, ctx.dim
        (indices,) = ctx.saved_tensors
        local, index = as_gradient(grad, ctx.out)._local_tensor, indices._local_tensor
        if ctx.removed:
            local, index = local.unsqueeze(dim), index.unsqueeze(dim)
        m = spec.sharded_dims().get(dim)
        if m is None:
            result = _scattered(local, index, spec, dim, 0)
        else:
            start, _ = spec.interval(m)
            result = _scattered(local, index, spec, dim, start)
            if ctx.cumulative:
                # A row's elements that point to an earlier rank all point to the same one there.
                earlier = index < start
                row = [1 if d == dim else n for d, n in enumerate(index.shape)]
                sums = torch.where(earlier, local, 0).sum(dim, keepdim=True)
                places = (
                    torch.where(earlier, index, -1).amax(dim, True) if index.shape[dim] else index.new_full(row, -1)
                )
                group = group_along(spec.mesh, m)
                for pair in zip(all_gather(sums, group), all_gather(places, group), strict=True):
                    result += _scattered(*pair, spec, dim, start)
        return wrap(result, spec), None, None, None, None, None


def _scattered(values: Tensor, index: Tensor, spec: ShardTensorSpec, dim: int, start: int) -> Tensor:
    """A shard, which begins at ``start``, of zeros with the values added at their global indices along ``dim``."""
    result = values.new_zeros(spec.local_shape())
    if result.numel():
        inside = (index >= start) & (index < start + result.shape[dim])
        result.scatter_add_(dim, torch.where(inside, index - start, 0), torch.where(inside, values, 0))
    return result


def plan_picking(name: str, op: OpOverload, spec: ShardTensorSpec, dim: int, keepdim: bool | None) -> Composed:
    """The plan of ``torch.<name>``, which picks elements along ``dim``: its aten operator, with a gradient.

    Args:
        keepdim: None where the dim stays in any case.
    """
    if not spec.shape:
        return DECLINED
    (along,) = reduced_dims(dim, len(spec.shape))
    args: tuple[Any, ...] = (dim,) if keepdim is None else (dim, keepdim)
    result: Callable[..., Sequence[Tensor]] = getattr(torch.return_types, name)

    def pick(x: ShardTensor) -> Sequence[Tensor]:
        if torch.is_grad_enabled() and x.requires_grad:
            return result(Selected.apply(x, op, along, keepdim is False, args, {}))
        return result(run(op, (x, *args), {}))

    return Composed(pick)
