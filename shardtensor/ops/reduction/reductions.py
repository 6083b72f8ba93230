"""Reductions over any dims, exact on unequal shards.

A reduction over a sharded dim leaves a Partial: each rank's contribution to the whole, reduced when it is needed. A
mean is a sum over the global count, never a mean of means. Ranks with empty shards contribute the neutral element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._compat import alias
from ...gradients import once_differentiable
from ...operators import operator
from ...planning import Call, Plan, argument
from ...registry import register
from ...spec import ShardTensorSpec
from ...tensor import ShardTensor, as_gradient, redistribute_to, run, wrap
from ..common.alignment import wide_dtype
from ..common.reduce import check_dtype, count_along, neutral_element, opted_dtype, reduced_dims, reduced_spec

_aten = torch.ops.aten


def reduction_plan(
    call: Call,
    dim: Any,
    keepdim: bool,
    op: str,
    local: Callable[..., Tensor] | None = None,
    of_partial: bool = True,
) -> Plan:
    """A plan that reduces locally.

    Args:
        local: replaces the operator where the local part differs from it.
        of_partial: whether a sum of what ranks contribute may be taken before they are added up.
    """
    check_dtype(call)
    keep = (lambda p: p.reduce_op == "sum") if op == "sum" and of_partial else (lambda p: False)
    spec = call.reduced(keep=keep)[(0,)]
    dims = reduced_dims(dim, len(spec.shape))
    out = reduced_spec(spec, call.meta, dims, keepdim, op)
    if 0 in spec.own_shape and 0 not in spec.shape:
        shape, value = out.own_shape, neutral_element(op, call.meta.dtype)

        def neutral(x: Tensor, *_: Any, **__: Any) -> Tensor:
            return torch.full(shape, value, dtype=out.tensor_meta.dtype, device=x.device)

        local = neutral
    return call.plan(out, {(0,): spec}, call=local)


@operator(_aten.sum.default, _aten.sum.dim_IntList)
def _sum(call: Call) -> Plan:
    return reduction_plan(call, argument(call, 1, "dim", None), argument(call, 2, "keepdim", False), "sum")


@operator(_aten.nansum.default)
def _nansum(call: Call) -> Plan:
    # NaN in a Partial is none in the sum.
    return reduction_plan(
        call, argument(call, 1, "dim", None), argument(call, 2, "keepdim", False), "sum", of_partial=False
    )


@operator(_aten.count_nonzero.default, _aten.count_nonzero.dim_IntList)
def _count_nonzero(call: Call) -> Plan:
    return reduction_plan(call, argument(call, 1, "dim", None), False, "sum", of_partial=False)


@operator(_aten.mean.default, _aten.mean.dim)
def _mean(call: Call) -> Plan:
    spec = call.specs[0]
    dims = reduced_dims(argument(call, 1, "dim", None), len(spec.shape))
    count = count_along(spec, dims)
    keepdim, dtype = argument(call, 2, "keepdim", False), call.meta.dtype
    if not any(d in dims for d in spec.sharded_dims()):
        return reduction_plan(call, dims, keepdim, "sum")
    # Divided before it is rounded: the sum of half precision numbers may overflow where their mean does not.
    wide = wide_dtype(dtype)
    return reduction_plan(
        call, dims, keepdim, "sum", lambda x, *_, **__: (x.sum(dims, keepdim, dtype=wide) / count).to(dtype)
    )


@operator(_aten.prod.default, _aten.prod.dim_int)
def _prod(call: Call) -> Plan:
    return reduction_plan(call, argument(call, 1, "dim", None), argument(call, 2, "keepdim", False), "product")


@operator(_aten.any.default, _aten.any.dim, _aten.any.dims, _aten.all.default, _aten.all.dim, _aten.all.dims)
def _logical(call: Call) -> Plan:
    op = "max" if call.func._schema.name == "aten::any" else "min"
    return reduction_plan(call, argument(call, 1, "dim", None), argument(call, 2, "keepdim", False), op)


# -- sum and mean above autograd: their gradient is expanded to the shard, never to the whole tensor -----------


class _SumOrMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: ShardTensor, dims: list[int], keepdim: bool, dtype: Any, mean: bool) -> Any:  # type: ignore[override]
        ctx.spec, ctx.dims, ctx.keepdim = x._spec, dims, keepdim
        ctx.scale = count_along(x._spec, dims) if mean else None
        op = _aten.mean.dim if mean else _aten.sum.dim_IntList
        return run(op, (x, dims, keepdim), {"dtype": dtype})

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        spec: ShardTensorSpec = ctx.spec.for_gradient()
        with torch.no_grad():
            out = reduced_spec(spec, grad, ctx.dims, ctx.keepdim, "sum").for_gradient()
            local = as_gradient(grad, out)._local_tensor
            if ctx.scale is not None:
                local = local / ctx.scale
            if not ctx.keepdim:
                for d in ctx.dims:
                    local = local.unsqueeze(d)
            local = local.expand(spec.local_shape()).to(spec.tensor_meta.dtype)
        expanded = _ExpandedGradient.apply(grad, wrap(local, spec), ctx.dims, ctx.keepdim, ctx.scale)
        return expanded, None, None, None, None


class _ExpandedGradient(torch.autograd.Function):
    """Hands the expanded gradient on; its own gradient is a sum again."""

    @staticmethod
    def forward(ctx: Any, grad: Any, expanded: Any, dims: list[int], keepdim: bool, scale: int | None) -> Any:  # type: ignore[override]
        ctx.args = dims, keepdim, scale, grad.dtype
        return alias(expanded)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        dims, keepdim, scale, dtype = ctx.args
        total = torch.sum(grad, dims, keepdim, dtype=dtype) if dims else grad.to(dtype)
        return total if scale is None else total / scale, None, None, None, None


def _sum_or_mean(x: Any, dim: Any, keepdim: bool, dtype: Any, mean: bool) -> Any:
    if not isinstance(x, ShardTensor) or not torch.is_grad_enabled() or not x.requires_grad:
        return NotImplemented
    dtype = opted_dtype(torch.mean if mean else torch.sum, x, dtype)
    return _SumOrMean.apply(x, reduced_dims(dim, x.ndim), keepdim, dtype, mean)


@register(torch.sum, Tensor.sum)
def _sum_function(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, axis: Any = None) -> Any:
    return _sum_or_mean(input, dim if axis is None else axis, keepdim, dtype, mean=False)


@register(torch.mean, Tensor.mean)
def _mean_function(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, axis: Any = None) -> Any:
    return _sum_or_mean(input, dim if axis is None else axis, keepdim, dtype, mean=True)


# -- prod above autograd: torch's formula would flatten the shards -------------------------------------------------


class _Product(torch.autograd.Function):
    """Each factor's gradient is the product of the others: with one zero only that factor has one, with two none."""

    @staticmethod
    def forward(ctx: Any, x: ShardTensor, dim: int | None, keepdim: bool, dtype: torch.dtype) -> Any:  # type: ignore[override]
        ctx.save_for_backward(x)
        out = _product(x, dim, keepdim, dtype)
        ctx.out, ctx.dim, ctx.keepdim = out._spec, dim, keepdim
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        (given,) = ctx.saved_tensors
        grad, dim = as_gradient(grad, ctx.out), ctx.dim
        if dim is not None and not ctx.keepdim:
            grad = grad.unsqueeze(dim)
        x = given.to(grad.dtype)
        zero = x == 0
        factors = x.masked_fill(zero, 1)
        zeros = zero.sum() if dim is None else zero.sum(dim, keepdim=True)
        others = _product(factors, dim, dim is not None, grad.dtype) / factors
        others = others.masked_fill(zeros != zero.to(zeros.dtype), 0)
        return (grad * others.conj()).to(given.dtype), None, None, None


def _product(x: Any, dim: int | None, keepdim: bool, dtype: torch.dtype) -> Any:
    if dim is None:
        return run(_aten.prod.default, (x,), {"dtype": dtype})
    return run(_aten.prod.dim_int, (x, dim, keepdim), {"dtype": dtype})


@register(torch.prod, Tensor.prod)
def _prod_function(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **kwargs: Any) -> Any:
    x = input
    if not isinstance(x, ShardTensor) or not x.requires_grad or not torch.is_grad_enabled() or not x.ndim or kwargs:
        return NotImplemented
    dims = reduced_dims(dim, x.ndim)
    x = redistribute_to(x, x._spec.for_gradient())
    dtype = opted_dtype(torch.prod, x, dtype) or x.dtype
    return _Product.apply(x, None if dim is None else dims[0], keepdim, dtype)


# -- trace ---------------------------------------------------------------------------------------------------------


class _Trace(torch.autograd.Function):
    """The sum over the part of the diagonal that runs through the shard."""

    @staticmethod
    def forward(ctx: Any, x: ShardTensor) -> Any:  # type: ignore[override]
        spec = x._spec
        starts = {d: spec.interval(m)[0] for d, m in spec.sharded_dims().items()}
        ctx.spec, ctx.offset = spec, starts.get(0, 0) - starts.get(1, 0)
        value = _diagonal(x._local_tensor, ctx.offset).sum()
        return wrap(value, reduced_spec(spec, value, [0, 1], False, "sum"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        value = as_gradient(grad, grad._spec.replicated())._local_tensor
        result = value.new_zeros(ctx.spec.local_shape())
        _diagonal(result, ctx.offset).copy_(value)
        return wrap(result, ctx.spec)


def _diagonal(x: Tensor, offset: int) -> Tensor:
    # torch takes no offset beyond an edge.
    return x.diagonal(offset) if -x.shape[0] <= offset <= x.shape[1] else x.new_empty(0)


@register(torch.trace, Tensor.trace)
def _trace(input: Any) -> Any:
    if not isinstance(input, ShardTensor) or input._spec.is_replicate():
        return NotImplemented
    if input.ndim != 2:
        raise RuntimeError("trace: expected a matrix")
    return _Trace.apply(redistribute_to(input, input._spec.for_gradient()))


@register(_aten._is_all_true.default)
def _is_all_true(x: Any) -> Any:
    return run(_aten.all.default, (x,), {})


@register(_aten._is_any_true.default)
def _is_any_true(x: Any) -> Any:
    return run(_aten.any.default, (x,), {})
