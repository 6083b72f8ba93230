"""Reductions over any dims, exact on unequal shards.

A reduction over a sharded dim leaves a Partial: each rank's contribution to the result, reduced when it is needed. A
mean is a sum over the global count, never a mean of means. Ranks with empty shards contribute the neutral element.
In half precision the kernels give contributions in float32, see [Note: rounded once] in redistribute.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..._compat import OpOverload, decomposition
from ..._compat.c10d import group_along
from ...communication.redistribute import all_reduce
from ...dispatch import planning
from ...dispatch.planning import AtenCall, AtenPlan, argument
from ...dispatch.registry import DECLINED, register
from ...layout.spec import ShardTensorSpec
from ...layout.strides import contiguous_stride
from ...operators.declaration import Arguments, Composed, LocalPlan, Operand, Plan, operator
from ..common.alignment import cast, wide_dtype
from ..common.reduce import (
    check_dtype,
    count_along,
    kernel_dtype,
    maximum_over,
    mesh_dims_of,
    neutral_element,
    plain_tuple,
    plan_picking,
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
    if 0 in spec.own_shape and all(spec.shape[d] for d in dims):
        shape, value = out.own_shape, neutral_element(op, call.meta.dtype)

        def neutral(x: Tensor, *_: object, **__: object) -> Tensor:
            return torch.full(shape, value, dtype=out.tensor_meta.dtype, device=x.device)

        local = neutral
    elif local is None and out.held_dtype != out.tensor_meta.dtype:
        func: Callable[..., Tensor] = call.func
        held = out.held_dtype

        def held_local(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return func(x, *args, **{**kwargs, "dtype": held})

        local = held_local
    return call.plan(out, {(0,): spec}, call=local)


# What the ranks' contributions are reduced by.
_OPS: dict[OpOverload, str] = {
    _aten.sum.default: "sum",
    _aten.sum.dim_IntList: "sum",
    _aten.nansum.default: "sum",
    _aten.count_nonzero.default: "sum",
    _aten.count_nonzero.dim_IntList: "sum",
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


def _local_mean(dims: list[int], keepdim: bool, count: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A rank's contribution to a mean over ``count`` elements."""
    wide = wide_dtype(dtype)
    return lambda x: x.sum(dims, keepdim, dtype=wide) / count


# -- sum and mean above autograd: their gradient is expanded to the shard, never to the global tensor ------------------


@operator(torch.sum, Tensor.sum, torch.mean, Tensor.mean, _aten.mean, tensors="input", partial="input")
def plan_sum_or_mean(
    call: Arguments,
    input: ShardTensorSpec,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Plan:
    """The gradient of a shard is expanded from that of the result, which is replicated where the sum is Partial."""
    function: Callable[..., Tensor] = getattr(torch, call.name)
    dims = reduced_dims(dim, len(input.shape))
    dtype = kernel_dtype(call, function, input, dtype=dtype)
    if any(input.placements[m].reduce_op != "sum" for m in input.partial_mesh_dims()):  # type: ignore[attr-defined]
        input = call.redistribute("input", input.for_gradient())
    meta = call.returned(function, input, dims, keepdim, dtype=dtype)
    out = reduced_spec(input, meta, dims, keepdim, "sum")
    count = count_along(input, dims)
    local: Callable[[Tensor], Tensor] = partial(function, dim=dims, keepdim=keepdim, dtype=out.held_dtype)
    if function is torch.mean and mesh_dims_of(input, dims):
        local = _local_mean(dims, keepdim, count, dtype)
    if input.partial_mesh_dims() or meta.is_complex() != input.tensor_meta.dtype.is_complex:
        return LocalPlan(local, out)
    return SumPlan(input, out, local, [] if keepdim else dims, count if function is torch.mean else None)


class SumPlan(Plan):
    """The sum of a shard's elements along dims, or their part of a mean.

    Args:
        local: computes it.
        lost: the dims that the result has no more, in ascending order.
        count: of a mean, the number of elements of the global tensor for each of the result.
    """

    linear = twice = new = True

    def __init__(
        self,
        input: ShardTensorSpec,
        out: ShardTensorSpec,
        local: Callable[[Tensor], Tensor],
        lost: Sequence[int],
        count: int | None,
    ) -> None:
        self.outputs, self.local, self.lost, self.count = out, local, lost, count
        self.shape, self.dtype = input.own_shape, input.tensor_meta.dtype

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[()]]:
        return self.local(x), ()

    def backward(self, needed: Sequence[bool], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        (grad,) = grads
        if grad is None:
            return [None]
        if self.count is not None:
            grad = grad / self.count
        for d in self.lost if grad.ndim else ():
            grad = grad.unsqueeze(d)
        return [cast(grad, self.dtype).expand(self.shape)]


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


@operator(torch.prod, Tensor.prod, _aten.prod, tensors="input")
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
    out = reduced_spec(input, call.returned(torch.prod, input, *along, dtype=dtype), dims, keepdim, "product")
    if not mesh_dims_of(input, dims):  # each rank has all factors, so autograd's gradient can be differentiated again
        return LocalPlan(lambda x: x.prod(*along, dtype=dtype), out)
    return ProductPlan(input, out, dims, keepdim)


# -- trace ---------------------------------------------------------------------------------------------------------


@operator(torch.trace, Tensor.trace, tensors="input")
def plan_trace(call: Arguments, input: ShardTensorSpec) -> Composed:
    """The sum over the part of the diagonal that runs through the shard."""
    call.returned(torch.trace, input)
    return Composed(lambda x: x.diagonal().sum())


# -- var ---------------------------------------------------------------------------------------------------------------

# Variance and standard deviation: two passes, so that a large mean costs no precision.
#
# Welford's update would need one pass, but merging the ranks' moments would send as much: two sums per row.


@operator(_aten.var.correction, _aten.std.correction, _aten.var_mean.correction, _aten.std_mean.correction)
def plan_var(call: AtenCall) -> AtenPlan:
    """The mean, all-reduce, the sum of squared distances from it, all-reduce."""
    spec = call.reduced()[(0,)]
    dims = reduced_dims(argument(call, 1, "dim", None), len(spec.shape))
    keepdim, correction = call.kwargs.get("keepdim", False), call.kwargs.get("correction")
    with_mean = isinstance(call.meta, tuple)
    metas = call.meta if with_mean else [call.meta]
    outs = [reduced_spec(spec, meta, dims, keepdim, "sum").for_gradient() for meta in metas]
    over = mesh_dims_of(spec, dims)
    dtype, wide = spec.tensor_meta.dtype, wide_dtype(spec.tensor_meta.dtype)
    count = count_along(spec, dims)
    degrees = count - (1 if correction is None else correction)
    check_dtype(call, correction=1 - degrees)  # so that torch warns of too few degrees of freedom, where they are
    freedom = max(0, degrees)
    of_std = call.func in (_aten.std.correction, _aten.std_mean.correction)
    reduce = rank_reduction(spec, over)

    def moments(x: Tensor, *_: object, **__: object) -> Tensor | tuple[Tensor, Tensor]:
        x = x.to(wide)
        mean = reduce(x.sum(dims, keepdim=True) / count, "sum")
        squares = (x - mean).abs().square()
        var = reduce(squares.sum(dims, keepdim), "sum") / freedom
        result = (var.sqrt() if of_std else var).to(dtype.to_real())
        if not with_mean:
            return result
        return result, (mean if keepdim else mean.squeeze(dims)).to(dtype)

    return call.plan(outs if with_mean else outs[0], {(0,): spec}, call=moments)


# -- logsumexp ---------------------------------------------------------------------------------------------------------

# ``logsumexp``: the maximum over all ranks first, so that no exponential overflows.


@operator(_aten.logsumexp.default)
def plan_logsumexp(call: AtenCall) -> AtenPlan:
    spec = call.reduced()[(0,)]
    dims = reduced_dims(call.args[1], len(spec.shape))
    keepdim = argument(call, 2, "keepdim", False)
    out = reduced_spec(spec, call.meta, dims, keepdim, "sum").for_gradient()
    over = mesh_dims_of(spec, dims)
    if not over:
        return call.plan(out, {(0,): spec})
    dtype, wide = call.meta.dtype, wide_dtype(call.meta.dtype)
    reduce = rank_reduction(spec, over)

    def compute(x: Tensor, *_: object) -> Tensor:
        x = x.to(wide)
        peak = reduce(maximum_over(x.real if x.is_complex() else x, dims), "max of numbers")
        peak = peak.masked_fill(peak.isinf(), 0)
        total = reduce((x - peak).exp().sum(dims, keepdim=True), "sum")
        result = (total.log() + peak).to(dtype)
        return result if keepdim else result.squeeze(dims)

    return call.plan(out, {(0,): spec}, call=compute)


# -- extremum ----------------------------------------------------------------------------------------------------------

# Extremes along a dim, and positions: ``max``, ``min``, ``aminmax``, ``argmax``, ``argmin``. Others are reductions.
#
# Indices are global. Among equal values the first one wins, as it does on one device: the ranks agree on the extreme by
# one all-reduce, and on the smallest index that holds it by another.

_NOWHERE = torch.iinfo(torch.int64).max


def _agreed(value: Tensor, index: Tensor, spec: ShardTensorSpec, over: Sequence[int], op: str) -> tuple[Tensor, Tensor]:
    """The extreme over ranks along the mesh dims ``over``, and the smallest index where it is."""
    for m in over:
        group = group_along(spec.mesh, m)
        best = all_reduce(value, group, op)
        index = torch.where((value == best) | (value != value), index, _NOWHERE)
        index = all_reduce(index, group, "min")
        value = best
    return value, index


def _nothing(x: Tensor, shape: Sequence[int], op: str) -> tuple[Tensor, Tensor]:
    """What an empty shard contributes."""
    value = x.new_full(shape, neutral_element(op, x.dtype))
    return value, torch.full(shape, _NOWHERE, dtype=torch.int64, device=x.device)


@operator(_aten.argmax.default, _aten.argmin.default, _aten.max.dim, _aten.min.dim)
def plan_position(call: AtenCall) -> AtenPlan:
    """The position of an extreme, of all elements or along a dim; of ``max`` and ``min`` with the extreme itself."""
    func, position_only = call.func, isinstance(call.meta, Tensor)
    spec = call.reduced()[(0,)]
    dim, keepdim = argument(call, 1, "dim", None), argument(call, 2, "keepdim", False)
    dims = reduced_dims(dim, len(spec.shape))
    metas = [call.meta] if position_only else call.meta
    outputs = [reduced_spec(spec, meta, dims, keepdim, "sum").for_gradient() for meta in metas]
    returned, over = outputs[0] if position_only else outputs, mesh_dims_of(spec, dims)
    if not over:
        return call.plan(returned, {(0,): spec}, call=None if position_only else plain_tuple(func))
    check_dtype(call)
    op = "max" if func in (_aten.argmax.default, _aten.max.dim) else "min"
    along = getattr(_aten, op).dim
    starts = [0] * len(spec.shape)
    for d, m in spec.sharded_dims().items():
        starts[d] = spec.interval(m)[0] if d in dims else 0
    strides = contiguous_stride(spec.shape)
    row = [1 if d in dims else n for d, n in enumerate(spec.local_shape())]
    shape, empty = outputs[0].local_shape(), any(spec.local_shape()[d] == 0 for d in dims)

    def compute(x: Tensor, *_: object, **__: object) -> Tensor | tuple[Tensor, Tensor]:
        if empty:
            value, index = _nothing(x, row, op)
        elif dim is None:
            index = func(x)
            value = x.reshape(-1)[index].reshape(row)
            places = torch.unravel_index(index, x.shape)
            index = sum(((i + a) * s for i, a, s in zip(places, starts, strides, strict=True)), 0 * index).reshape(row)
        else:
            value, index = along(x, dims[0], True)
            index = index + starts[dims[0]]
        value, index = _agreed(value, index, spec, over, op)
        return index.reshape(shape) if position_only else (value.reshape(shape), index.reshape(shape))

    return call.plan(returned, {(0,): spec}, call=compute)


# Two Partials, reduced when they are needed.
register(_aten.aminmax.default)(decomposition(_aten.aminmax.default, __name__))


@operator(torch.max, Tensor.max, torch.min, Tensor.min, tensors="input")
def plan_extremum(
    call: Arguments,
    input: ShardTensorSpec,
    dim: int | Operand | None = None,
    keepdim: bool = False,
    *,
    other: Operand | None = None,
) -> Composed:
    """Along a dim. Of all elements, and of two tensors, the aten operators have plans."""
    if not isinstance(dim, int) or other is not None:
        return DECLINED
    return plan_picking(call.name, getattr(_aten, call.name).dim, input, dim, keepdim)
