"""Operators along a dim, sharded or not: softmax and its kin, cumulative sums and products.

[Note: rows] What a rank has to know of the others' parts of a row (a line of elements along the dim) is one number: its
maximum and its sum for softmax, the total of what comes before for the cumulative ones. That is what travels, with all
rows packed into one collective. An empty shard contributes the neutral element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...dispatch import Call, Plan, argument, meta_of, rule, wrap
from ...gradients import once_differentiable
from ...redistribute import all_gather, all_reduce
from ...registry import register
from ...spec import ShardTensorSpec
from ...tensor import ShardTensor, as_gradient, redistribute_to
from ..common.alignment import common_cut, fit, wide_dtype
from .reductions import check_dtype, opted_dtype, reduced_dims, reduced_spec

_aten = torch.ops.aten

# -- what rows share ------------------------------------------------------------------------------------------------


def mesh_dims_of(spec: ShardTensorSpec, dims: Sequence[int]) -> list[int]:
    """The mesh dims that shard one of these tensor dims."""
    return [m for d, m in spec.sharded_dims().items() if d in dims]


def reduce_over(local: Tensor, spec: ShardTensorSpec, mesh_dims: Sequence[int], op: str) -> Tensor:
    """``local`` reduced over the ranks along these mesh dims."""
    for m in mesh_dims:
        local = all_reduce(local, spec.mesh.get_group(m), op)
    return local


def _maximum(x: Tensor, dims: Sequence[int]) -> Tensor:
    """The maxima over ``dims``, which stay with length 1; -inf where there is nothing."""
    if 0 in (x.shape[d] for d in dims):
        return x.new_full([1 if d in dims else n for d, n in enumerate(x.shape)], float("-inf"))
    return x.amax(dims, keepdim=True)


def _cut_plain(x: Tensor, spec: ShardTensorSpec) -> Tensor:
    """This rank's part of a plain tensor, which counts as replicated."""
    for d, m in spec.sharded_dims().items():
        start, stop = spec.interval(m)
        x = x.narrow(d, start, stop - start)
    return x


# -- softmax ----------------------------------------------------------------------------------------------------------


@rule(_aten._softmax.default, _aten._log_softmax.default)
def _softmax(call: Call) -> Plan:
    """Maximum, all-reduce, sum of exponentials, all-reduce."""
    spec = call.reduced()[(0,)]
    out = spec.replace(meta=meta_of(call.meta))
    dims = reduced_dims(call.args[1], len(spec.shape))
    over = mesh_dims_of(spec, dims)
    if not over:
        return call.plan(out, {(0,): spec})
    check_dtype(call)
    logs = call.func == _aten._log_softmax.default
    dtype = call.meta.dtype

    def compute(x: Tensor, *_: Any) -> Tensor:
        x = x.to(wide_dtype(dtype))
        shifted = x - reduce_over(_maximum(x, dims), spec, over, "max")
        weights = shifted.exp()
        total = reduce_over(weights.sum(dims, keepdim=True), spec, over, "sum")
        return (shifted - total.log() if logs else weights / total).to(dtype)

    return call.plan(out, {(0,): spec}, call=compute)


@rule(_aten._softmax_backward_data.default, _aten._log_softmax_backward_data.default)
def _softmax_backward(call: Call) -> Plan:
    """One all-reduce of a sum per row. The output decides on the cut, whatever the gradient's."""
    reduced = call.reduced()
    base = common_cut([reduced[path] for path in ((1,), (0,)) if path in reduced], meta_of(call.meta))
    dims = reduced_dims(call.args[2], len(base.shape))
    over = mesh_dims_of(base, dims)
    logs = call.func == _aten._log_softmax_backward_data.default
    plain = [i for i in (0, 1) if (i,) not in reduced]
    func, dtype = call.func, call.meta.dtype

    def compute(*args: Any) -> Tensor:
        grad, output = (_cut_plain(a, base) if i in plain else a for i, a in enumerate(args[:2]))
        if not over:
            return func(grad, output, *args[2:])
        wide = wide_dtype(output.dtype)
        grad, output = grad.to(wide), output.to(wide)
        if not logs:
            grad = grad * output
        total = reduce_over(grad.sum(dims, keepdim=True), base, over, "sum")
        return (grad - (output.exp() if logs else output) * total).to(dtype)

    return call.plan(base, {path: fit(s, base) for path, s in reduced.items()}, call=compute)


@rule(_aten.logsumexp.default)
def _logsumexp(call: Call) -> Plan:
    spec = call.reduced()[(0,)]
    dims = reduced_dims(call.args[1], len(spec.shape))
    keepdim = argument(call, 2, "keepdim", False)
    out = reduced_spec(spec, call.meta, dims, keepdim, "sum").for_gradient()
    over = mesh_dims_of(spec, dims)
    if not over:
        return call.plan(out, {(0,): spec})
    dtype = call.meta.dtype

    def compute(x: Tensor, *_: Any) -> Tensor:
        x = x.to(wide_dtype(dtype))
        peak = reduce_over(_maximum(x.real if x.is_complex() else x, dims), spec, over, "max")
        peak = peak.masked_fill(peak.isinf(), 0)
        total = reduce_over((x - peak).exp().sum(dims, keepdim=True), spec, over, "sum")
        result = (total.log() + peak).to(dtype)
        return result if keepdim else result.squeeze(dims)

    return call.plan(out, {(0,): spec}, call=compute)


# -- cumulative sums and products -------------------------------------------------------------------------------------

# kind: (operator along a row, the same of two values, neutral element)
_SCANS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], float]] = {
    "sum": (torch.cumsum, torch.add, 0),
    "product": (torch.cumprod, torch.mul, 1),
    "logsumexp": (torch.logcumsumexp, torch.logaddexp, float("-inf")),
}


def _scanned(x: Tensor, spec: ShardTensorSpec, dim: int, kind: str, dtype: torch.dtype, reverse: bool) -> Tensor:
    """The scan of a shard, continued from the totals of the ranks before it (reverse: after it)."""
    scan, combine, neutral = _SCANS[kind]
    x = x.to(wide_dtype(dtype))
    done = scan(x.flip(dim), dim) if reverse else scan(x, dim)
    m = spec.sharded_dims().get(dim)
    if m is not None:
        n = done.shape[dim]
        row = [1 if d == dim else size for d, size in enumerate(done.shape)]
        total = done.narrow(dim, n - 1, 1) if n else done.new_full(row, neutral)
        totals = all_gather(total, spec.mesh.get_group(m))
        here = spec.coordinate[m]
        before = list(totals[here + 1 :].flip(0) if reverse else totals[:here])
        if before:
            carried = before[0]
            for t in before[1:]:
                carried = combine(carried, t)
            done = combine(done, carried)
    return (done.flip(dim) if reverse else done).to(dtype)


_KINDS = {
    _aten.cumsum.default: "sum",
    _aten.cumprod.default: "product",
    _aten.logcumsumexp.default: "logsumexp",
}


@rule(*_KINDS)
def _cumulative(call: Call) -> Plan:
    spec = call.reduced()[(0,)]
    out = spec.replace(meta=meta_of(call.meta))
    dims = reduced_dims(call.args[1], len(spec.shape))
    if not mesh_dims_of(spec, dims):
        return call.plan(out, {(0,): spec})
    check_dtype(call)
    kind, dim, dtype = _KINDS[call.func], dims[0], call.meta.dtype
    return call.plan(out, {(0,): spec}, call=lambda x, *_, **__: _scanned(x, spec, dim, kind, dtype, False))


def _scan(x: ShardTensor, dim: int, kind: str, dtype: torch.dtype, reverse: bool = False) -> Any:
    spec = x._spec
    out = spec.with_dtype(dtype)
    return wrap(_scanned(x._local_tensor, spec, dim, kind, dtype, reverse), out)


class _CumulativeSum(torch.autograd.Function):
    """Its gradient is a cumulative sum from the other end; torch's own formula would flip the shards over all ranks."""

    @staticmethod
    def forward(ctx: Any, x: ShardTensor, dim: int, dtype: torch.dtype, reverse: bool) -> Any:  # type: ignore[override]
        ctx.spec, ctx.dim, ctx.reverse = x._spec, dim, reverse
        return _scan(x, dim, "sum", dtype, reverse)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        grad = as_gradient(grad, ctx.spec)
        dtype = ctx.spec.tensor_meta.dtype
        return _CumulativeSum.apply(grad, ctx.dim, dtype, not ctx.reverse), None, None, None


class _CumulativeProduct(torch.autograd.Function):
    """Exact with zeros: behind the first zero of a row nothing has a gradient, at it the others' products count."""

    @staticmethod
    def forward(ctx: Any, x: ShardTensor, dim: int, dtype: torch.dtype) -> Any:  # type: ignore[override]
        out = _scan(x, dim, "product", dtype)
        ctx.spec, ctx.dim, ctx.dtype = x._spec, dim, dtype
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        x, out = ctx.saved_tensors
        grad, x, dim, dtype = as_gradient(grad, ctx.spec), x.to(ctx.dtype), ctx.dim, ctx.dtype

        def from_the_end(t: Any) -> Any:
            return _scan(t, dim, "sum", dtype, reverse=True)

        zero = x == 0
        zeros = _scan(zero, dim, "sum", torch.int64)  # up to each element
        first = zero & (zeros == 1)
        others = x.masked_fill(first, 1)
        at_first = from_the_end(grad * _scan(others, dim, "product", dtype).conj())
        before = from_the_end(grad * out.conj()) / others.conj()
        result = torch.where(zeros == 0, before, torch.where(first, at_first, torch.zeros_like(before)))
        return result.to(ctx.spec.tensor_meta.dtype), None, None


class _LogCumulativeSumExp(torch.autograd.Function):
    """The gradient is a scan from the other end, too, of positive and negative parts in logarithms."""

    @staticmethod
    def forward(ctx: Any, x: ShardTensor, dim: int) -> Any:  # type: ignore[override]
        out = _scan(x, dim, "logsumexp", x.dtype)
        ctx.spec, ctx.dim = x._spec, dim
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        x, out = ctx.saved_tensors
        grad = as_gradient(grad, ctx.spec)

        lowest = torch.finfo(x.dtype).min

        def part(positive: Any) -> Any:
            # As torch has it, down to the NaN where a result is -inf.
            exponent = positive.log().clamp(min=lowest) - out
            return (_scan(exponent, ctx.dim, "logsumexp", x.dtype, reverse=True) + x).exp()

        return part(grad.clamp(min=0)) - part((-grad).clamp(min=0)), None


def _differentiable(x: Any) -> Any:
    """The ShardTensor with any Partial reduced, if it is one to differentiate; None otherwise."""
    if not isinstance(x, ShardTensor) or not x.requires_grad or not torch.is_grad_enabled() or not x.ndim:
        return None
    return redistribute_to(x, x._spec.for_gradient())


@register(torch.cumsum, Tensor.cumsum)
def _cumsum_function(input: Any, dim: int, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    x = _differentiable(input)
    if x is None or kwargs:
        return NotImplemented
    return _CumulativeSum.apply(
        x, reduced_dims(dim, x.ndim)[0], opted_dtype(torch.cumsum, x, dtype, dim) or x.dtype, False
    )


@register(torch.cumprod, Tensor.cumprod)
def _cumprod_function(input: Any, dim: int, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    x = _differentiable(input)
    if x is None or kwargs:
        return NotImplemented
    return _CumulativeProduct.apply(
        x, reduced_dims(dim, x.ndim)[0], opted_dtype(torch.cumprod, x, dtype, dim) or x.dtype
    )


@register(torch.logcumsumexp, Tensor.logcumsumexp)
def _logcumsumexp_function(input: Any, dim: int, **kwargs: Any) -> Any:
    x = _differentiable(input)
    if x is None or kwargs or x.is_complex():
        return NotImplemented
    return _LogCumulativeSumExp.apply(x, reduced_dims(dim, x.ndim)[0])
