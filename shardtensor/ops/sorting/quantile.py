"""Order statistics: ``median`` and ``nanmedian`` of all elements, ``quantile``, ``nanquantile``.

Nothing is sorted across ranks and no element moves: the elements at the places in question are found by counting, see
[Note: counting] in common/distributed_sort.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._compat import AutogradFunction
from ..._compat.c10d import group_along
from ...dispatch.gradients import once_differentiable
from ...dispatch.planning import AtenCall, AtenPlan, meta_of
from ...dispatch.registry import DECLINED
from ...dispatch.tensor import ShardTensor, as_gradient, wrap
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Composed, operator
from ..common.alignment import as_operand
from ..common.distributed_sort import find_places, sort_keys
from ..common.reduce import check_dtype, mesh_dims_of, reduce_over, reduced_dims
from .sort import place_of_median

_aten = torch.ops.aten


# -- the median of all elements ---------------------------------------------------------------------------------------


@operator(_aten.median.default, _aten.nanmedian.default)
def _median(call: AtenCall) -> AtenPlan:
    spec = call.reduced()[(0,)]
    out = spec.replicated().replace(meta=meta_of(call.meta))
    check_dtype(call)
    count, over = spec.shape.numel(), list(spec.sharded_dims().values())
    groups = [group_along(spec.mesh, m) for m in over]
    if not count:
        return call.plan(out, {(0,): spec})
    ignores = call.func == _aten.nanmedian.default

    def compute(x: Tensor) -> Tensor:
        row = x.reshape(1, -1).sort(-1).values
        missing = reduce_over(row.isnan().sum(-1, keepdim=True), spec, over, "sum")
        found = find_places(sort_keys(row), x.dtype, place_of_median(count, missing, ignores), groups)
        return found.pick(row, groups).reshape(())

    return call.plan(out, {(0,): spec}, call=compute)


# -- quantiles ----------------------------------------------------------------------------------------------------


class _AtPlaces(AutogradFunction):
    """The elements of ``x`` at these places of its rows along ``dims``, which have length 1 in the result.

    ``places`` has one more dim in front, for several places of a row. A gradient goes to the element that was found.
    """

    @staticmethod
    def forward(ctx: Any, x: ShardTensor, places: ShardTensor, dims: list[int]) -> Any:
        spec = x._spec
        groups = [group_along(spec.mesh, m) for m in mesh_dims_of(spec, dims)]
        ends = list(range(-len(dims), 0))
        moved = x._local_tensor.movedim(dims, ends)
        rows = math.prod(moved.shape[: x.ndim - len(dims)])
        columns = math.prod(moved.shape[x.ndim - len(dims) :])
        ordered, order = torch.sort(moved.reshape(rows, columns), dim=-1, stable=True)
        wanted = places._local_tensor
        found = find_places(sort_keys(ordered), x.dtype, wanted.reshape(len(wanted), rows).T.contiguous(), groups)
        ctx.spec, ctx.out, ctx.dims, ctx.moved = spec, places._spec, dims, moved.shape
        ctx.save_for_backward(order, found.before, found.here)
        out = places._spec.with_dtype(x.dtype)
        return wrap(found.pick(ordered, groups).T.reshape(wanted.shape), out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        order, before, here = ctx.saved_tensors
        given = as_gradient(grad, ctx.out)._local_tensor
        given = given.reshape(len(given), -1).T
        result = given.new_zeros(order.shape)
        if order.shape[-1]:
            at = order.gather(-1, before.clamp(max=order.shape[-1] - 1))
            result.scatter_add_(-1, at, torch.where(here, given, 0))
        local = result.view(ctx.moved).movedim(list(range(-len(ctx.dims), 0)), ctx.dims)
        return wrap(local, ctx.spec), None, None


@operator(torch.quantile, Tensor.quantile, torch.nanquantile, Tensor.nanquantile, tensors="input q", partial="input q")
def _plan_quantile(
    call: Arguments,
    input: ShardTensorSpec,
    q: ShardTensorSpec | float,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
) -> Composed:
    if input.is_replicate():
        return DECLINED
    function: Callable[..., Tensor] = getattr(torch, call.name)
    number = 0 if isinstance(q, ShardTensorSpec) else q

    def quantile(x: ShardTensor, points: ShardTensor | None) -> Tensor:
        like = torch.ones([1] * x.ndim, dtype=x.dtype, device=x.device)
        at: Tensor = torch.full((), number, dtype=x.dtype, device=x.device) if points is None else points.full_tensor()
        function(like, at.detach(), dim, keepdim, interpolation=interpolation)  # torch's own errors
        if not x.numel():
            raise RuntimeError("quantile() input tensor must be non-empty")
        dims = reduced_dims(dim, x.ndim)
        x = as_operand(x, x.device_mesh)
        count = math.prod(x.shape[d] for d in dims)
        missing: Tensor = x.detach().isnan().sum(dims, keepdim=True) if dims else x.detach().isnan().to(torch.int64)
        missing = as_operand(missing, x.device_mesh)
        steps = at.reshape(-1, *[1] * x.ndim)
        if function is torch.nanquantile:
            ranks = (steps * (count - missing - 1)).clamp(min=0)
        else:
            ranks = torch.where(missing > 0, count - 1.0, steps * (count - 1))
        if interpolation in ("lower", "higher", "nearest"):
            ranks = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}[interpolation](ranks)
        below, above = ranks.detach().long(), ranks.detach().ceil().long()
        if interpolation in ("linear", "midpoint"):
            low, high = _AtPlaces.apply(x, torch.cat([below, above]), dims).chunk(2)
            result = torch.lerp(low, high, ranks - below if interpolation == "linear" else torch.full_like(ranks, 0.5))
        else:
            result = _AtPlaces.apply(x, below, dims)
        if not keepdim and dims:
            result = result.squeeze([d + 1 for d in dims])
        return result if at.ndim else result.squeeze(0)

    return Composed(quantile)
