"""Reductions over any dims, exact on unequal shards.

A reduction over a sharded dim leaves a Partial: each rank's contribution to the result, reduced when it is needed. A
mean is a sum over the global count, never a mean of means. Ranks with empty shards contribute the neutral element.
In half precision the kernels give contributions in float32, see [Note: rounded once] in redistribute.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._compat import OpOverload
from ...dispatch import planning
from ...dispatch.planning import AtenCall, argument
from ...dispatch.registry import DECLINED
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, LocalPlan, Plan, operator
from ..common.alignment import wide_dtype
from ..common.reduce import (
    check_dtype,
    count_along,
    kernel_dtype,
    mesh_dims_of,
    neutral_element,
    rank_reduction,
    reduced_dims,
    reduced_spec,
)

_aten = torch.ops.aten


def reduction_plan(
    call: AtenCall,
    dim: int | Sequence[int] | None,
    keepdim: bool,
    op: str,
    local: Callable[..., Tensor] | None = None,
    of_partial: bool = True,
) -> planning.AtenPlan:
    """A plan that reduces locally.

    Args:
        local: replaces the operator where the local part differs from it.
        of_partial: whether a sum of contributions may be taken before they are added up.
    """
    check_dtype(call)
    keep = (lambda p: p.reduce_op == "sum") if op == "sum" and of_partial else (lambda p: False)
    spec = call.reduced(keep=keep)[(0,)]
    dims = reduced_dims(dim, len(spec.shape))
    out = reduced_spec(spec, call.meta, dims, keepdim, op)
    if 0 in spec.own_shape and 0 not in spec.shape:
        shape, value = out.own_shape, neutral_element(op, call.meta.dtype)

        def neutral(x: Tensor, *_: object, **__: object) -> Tensor:
            return torch.full(shape, value, dtype=out.tensor_meta.dtype, device=x.device)

        local = neutral
    elif local is None and out.held_dtype != out.tensor_meta.dtype:
        func, held = call.func, out.held_dtype

        def held_local(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return func(x, *args, **{**kwargs, "dtype": held})  # type: ignore[no-any-return]

        local = held_local
    return call.plan(out, {(0,): spec}, call=local)


# What the ranks' contributions are reduced by.
_OPS: dict[OpOverload, str] = {
    _aten.sum.default: "sum",
    _aten.sum.dim_IntList: "sum",
    _aten.nansum.default: "sum",
    _aten.count_nonzero.default: "sum",
    _aten.count_nonzero.dim_IntList: "sum",
    _aten.prod.default: "product",
    _aten.prod.dim_int: "product",
    _aten.amax.default: "max",
    _aten.amin.default: "min",
    _aten.max.default: "max",
    _aten.min.default: "min",
    _aten.any.default: "max",
    _aten.any.dim: "max",
    _aten.any.dims: "max",
    _aten.all.default: "min",
    _aten.all.dim: "min",
    _aten.all.dims: "min",
    _aten._is_any_true.default: "max",
    _aten._is_all_true.default: "min",
}


@operator(*_OPS)
def plan_reduction(call: AtenCall) -> planning.AtenPlan:
    """Of all elements, or along dims, by torch's own operator on each rank."""
    dim, keepdim = argument(call, 1, "dim", None), argument(call, 2, "keepdim", False)
    # What counts or leaves out elements has to see the sum: NaN in a Partial is none in it.
    of_partial = call.func in (_aten.sum.default, _aten.sum.dim_IntList)
    return reduction_plan(call, dim, keepdim, _OPS[call.func], of_partial=of_partial)


@operator(_aten.mean.default, _aten.mean.dim)
def plan_mean_below(call: AtenCall) -> planning.AtenPlan:
    spec = call.specs[0]
    dims = reduced_dims(argument(call, 1, "dim", None), len(spec.shape))
    count = count_along(spec, dims)
    keepdim = argument(call, 2, "keepdim", False)
    if not any(d in dims for d in spec.sharded_dims()):
        return reduction_plan(call, dims, keepdim, "sum")
    mean = _local_mean(dims, keepdim, count, call.meta.dtype)
    return reduction_plan(call, dims, keepdim, "sum", lambda x, *_, **__: mean(x))


def _local_mean(dims: list[int], keepdim: bool, count: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A rank's contribution to a mean over ``count`` elements."""
    wide = wide_dtype(dtype)
    return lambda x: x.sum(dims, keepdim, dtype=wide) / count


# -- sum and mean above autograd: their gradient is expanded to the shard, never to the global tensor ------------------


@operator(torch.sum, Tensor.sum, torch.mean, Tensor.mean, tensors="input", partial="input")
def plan_sum_or_mean(
    call: Arguments,
    input: ShardTensorSpec,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> LocalPlan:
    """Autograd differentiates the local work: it expands the gradient, which is replicated where the sum is Partial."""
    function: Callable[..., Tensor] = getattr(torch, call.name)
    dims = reduced_dims(dim, len(input.shape))
    dtype = kernel_dtype(call, function, input, dtype=dtype)
    if any(input.placements[m].reduce_op != "sum" for m in input.partial_mesh_dims()):  # type: ignore[attr-defined]
        input = call.redistribute("input", input.for_gradient())
    meta = call.returned(function, input, dims, keepdim, dtype=dtype)
    out = reduced_spec(input, meta, dims, keepdim, "sum")
    if function is torch.mean and mesh_dims_of(input, dims):
        return LocalPlan(_local_mean(dims, keepdim, count_along(input, dims), dtype), out)
    held = out.held_dtype
    return LocalPlan(lambda x: function(x, dims, keepdim, dtype=held), out)


# -- prod above autograd: torch's formula would flatten the shards -----------------------------------------------------


class ProductPlan(Plan):
    """Each factor's gradient is the product of the others: with one zero only that factor has one, with two none."""

    saves = (0,)

    def __init__(self, spec: ShardTensorSpec, out: ShardTensorSpec, dims: list[int], keepdim: bool) -> None:
        self.outputs, self.dims, self.keepdim = out, dims, keepdim
        self.dtype, self.given = wide_dtype(out.tensor_meta.dtype), spec.tensor_meta.dtype
        self.reduce = rank_reduction(spec, mesh_dims_of(spec, dims))

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[()]]:
        return self._product(x, self.keepdim), ()

    def backward(self, needed: Sequence[bool], grads: Sequence[Tensor | None], x: Tensor) -> list[Tensor | None]:
        (grad,) = grads
        if grad is None:
            return [None]
        for d in [] if self.keepdim else self.dims:
            grad = grad.unsqueeze(d)
        x = x.to(self.dtype)
        zero = x == 0
        factors = x.masked_fill(zero, 1)
        zeros = self.reduce(zero.sum(self.dims, keepdim=True), "sum")
        others = self.reduce(self._product(factors, True), "product") / factors
        others = others.masked_fill(zeros != zero.to(zeros.dtype), 0)
        return [(grad * others.conj()).to(self.given)]

    def _product(self, x: Tensor, keepdim: bool) -> Tensor:
        """Of the shard's elements; torch multiplies along one dim, or all."""
        if len(self.dims) == 1:
            return x.prod(self.dims[0], keepdim, dtype=self.dtype)
        product = x.prod(dtype=self.dtype)
        return product.reshape([1] * x.ndim) if keepdim else product


@operator(torch.prod, Tensor.prod, tensors="input")
def plan_prod(
    call: Arguments,
    input: ShardTensorSpec,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Plan:
    """``torch.prod``."""
    if not input.shape:
        return DECLINED
    dims = reduced_dims(dim, len(input.shape))
    dtype = kernel_dtype(call, torch.prod, input, dtype=dtype)
    along = () if dim is None else (dims[0], keepdim)
    meta = call.returned(torch.prod, input, *along, dtype=dtype)
    return ProductPlan(input, reduced_spec(input, meta, dims, keepdim, "product"), dims, keepdim)


# -- trace ---------------------------------------------------------------------------------------------------------


@operator(torch.trace, Tensor.trace, tensors="input")
def plan_trace(call: Arguments, input: ShardTensorSpec) -> LocalPlan:
    """The sum over the part of the diagonal that runs through the shard."""
    meta = call.returned(torch.trace, input)
    starts = {d: input.interval(m)[0] for d, m in input.sharded_dims().items()}
    offset = starts.get(0, 0) - starts.get(1, 0)
    rows, columns = input.own_shape
    outside = not -rows <= offset <= columns  # torch takes no offset beyond an edge

    def trace(x: Tensor) -> Tensor:
        diagonal = x.reshape(-1)[:0] if outside else x.diagonal(offset)
        return diagonal.sum(dtype=out.held_dtype)

    out = reduced_spec(input, meta, [0, 1], False, "sum")
    return LocalPlan(trace, out)
