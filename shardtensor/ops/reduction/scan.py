"""Cumulative operators along a dim, sharded or not: ``cumsum``, ``cumprod``, ``logcumsumexp``, ``cummax``, ``cummin``.

What a rank needs of the others' parts of a row (a line of elements along the dim) is one number: the total of what
comes before. That is what is sent, with all rows packed into one collective. An empty shard contributes the neutral
element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._compat import AutogradFunction
from ..._compat.c10d import group_along
from ...communication.redistribute import all_gather
from ...dispatch.gradients import once_differentiable
from ...dispatch.planning import AtenCall, AtenPlan, meta_of
from ...dispatch.registry import DECLINED
from ...dispatch.tensor import ShardTensor, as_gradient, wrap
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Composed, operator
from ...operators.forward_mode import decomposed
from ...operators.plan import LocalPlan, Plan
from ..common.alignment import wide_dtype
from ..common.reduce import check_dtype, kernel_dtype, mesh_dims_of, plain_tuple, plan_picking, reduced_dims

_aten = torch.ops.aten

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
    m, n = spec.sharded_dims()[dim], done.shape[dim]
    row = [1 if d == dim else size for d, size in enumerate(done.shape)]
    total = done.narrow(dim, n - 1, 1) if n else done.new_full(row, neutral)
    totals = all_gather(total, group_along(spec.mesh, m))
    here = spec.coordinate[m]
    before = list(totals[here + 1 :].flip(0) if reverse else totals[:here])
    if before:
        carried = before[0]
        for t in before[1:]:
            carried = combine(carried, t)
        done = combine(done, carried)
    return (done.flip(dim) if reverse else done).to(dtype)


def _scan(x: Any, dim: int, kind: str, dtype: torch.dtype, reverse: bool = False) -> ShardTensor:
    spec: ShardTensorSpec = x._spec
    out = spec.with_dtype(dtype)
    return wrap(_scanned(x._local_tensor, spec, dim, kind, dtype, reverse), out)


class _CumulativeSum(AutogradFunction):
    """Its gradient is a cumulative sum from the other end; torch's own formula would flip the shards over all ranks."""

    @staticmethod
    def forward(ctx: Any, x: ShardTensor, dim: int, dtype: torch.dtype, reverse: bool) -> Any:
        ctx.spec, ctx.dim, ctx.reverse = x._spec, dim, reverse
        return _scan(x, dim, "sum", dtype, reverse)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        grad = as_gradient(grad, ctx.spec)
        dtype = ctx.spec.tensor_meta.dtype
        return _CumulativeSum.apply(grad, ctx.dim, dtype, not ctx.reverse), None, None, None


class _DifferentiatedOnce(AutogradFunction):
    """The other scans. Their gradients are scans from the other end, too."""

    @staticmethod
    def forward(ctx: Any, x: ShardTensor, dim: int, dtype: torch.dtype, kind: str) -> Any:
        out = _scan(x, dim, kind, dtype)
        ctx.spec, ctx.dim, ctx.kind = x._spec, dim, kind
        ctx.operator = "cumprod" if kind == "product" else "logcumsumexp"
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        gradient: Callable[..., Tensor] = _of_product if ctx.kind == "product" else _of_logsumexp
        result = gradient(*ctx.saved_tensors, as_gradient(grad, ctx.spec), ctx.dim)
        return result.to(ctx.spec.tensor_meta.dtype), None, None, None


def _of_product(x: Tensor, out: Tensor, grad: Tensor, dim: int) -> Tensor:
    """Exact with zeros: behind the first zero of a row nothing has a gradient, at it the others' products count."""
    dtype = out.dtype

    def from_the_end(t: Tensor) -> ShardTensor:
        return _scan(t, dim, "sum", dtype, reverse=True)

    x = x.to(dtype)
    zero = x == 0
    zeros = _scan(zero, dim, "sum", torch.int64)  # up to each element
    first = zero & (zeros == 1)
    others = x.masked_fill(first, 1)
    at_first = from_the_end(grad * _scan(others, dim, "product", dtype).conj())
    before = from_the_end(grad * out.conj()) / others.conj()
    return torch.where(zeros == 0, before, torch.where(first, at_first, torch.zeros_like(before)))


def _of_logsumexp(x: Tensor, out: Tensor, grad: Tensor, dim: int) -> Tensor:
    """In logarithms, of real numbers those of the positive and of the negative part."""

    def part(logs: Tensor) -> Tensor:
        # As torch has it, down to the NaN where a result is -inf.
        total: Tensor = _scan(logs - out, dim, "logsumexp", x.dtype, reverse=True) + x
        return total.exp()

    if x.is_complex():
        return part(grad.conj().log()).conj()
    lowest = torch.finfo(x.dtype).min
    positive, negative = (t.clamp(min=0).log().clamp(min=lowest) for t in (grad, -grad))
    return part(positive) - part(negative)


@operator(
    *(torch.cumsum, Tensor.cumsum, _aten.cumsum, torch.cumprod, Tensor.cumprod, _aten.cumprod),
    tensors="input",
)
def plan_sum_or_product(call: Arguments, input: ShardTensorSpec, dim: int, *, dtype: torch.dtype | None = None) -> Plan:
    if not input.shape:
        return DECLINED
    (along,) = reduced_dims(dim, len(input.shape))
    function = getattr(torch, call.name)
    dtype = kernel_dtype(call, function, input, along, dtype=dtype)
    if not mesh_dims_of(input, [along]):
        if call.name == "cumprod" and 0 in input.own_shape:
            # Of no elements torch takes it for the identity, whose gradient depends on nothing, unlike other ranks'.
            return LocalPlan(lambda x: (x * x).to(dtype), input.with_dtype(dtype))
        return LocalPlan(lambda x: function(x, along, dtype=dtype), input.with_dtype(dtype))
    if call.name == "cumsum":
        return Composed(lambda x: _CumulativeSum.apply(x, along, dtype, False))
    return Composed(lambda x: _DifferentiatedOnce.apply(x, along, dtype, "product"))


@operator(torch.logcumsumexp, Tensor.logcumsumexp, _aten.logcumsumexp, tensors="input")
def plan_logcumsumexp(call: Arguments, input: ShardTensorSpec, dim: int) -> Plan:
    if not input.shape:
        return DECLINED
    (along,) = reduced_dims(dim, len(input.shape))
    kernel_dtype(call, torch.logcumsumexp, input, along)  # torch's own errors
    if not mesh_dims_of(input, [along]):
        return LocalPlan(lambda x: decomposed(torch.logcumsumexp, (x, along), {}), input)
    return Composed(lambda x: _DifferentiatedOnce.apply(x, along, x.dtype, "logsumexp"))


# -- cumulative extremes ----------------------------------------------------------------------------------------------


@operator(_aten.cummax.default, _aten.cummin.default)
def plan_extreme_scan(call: AtenCall) -> AtenPlan:
    """A local scan, continued from the last values and indices of the ranks before. The last of equal values wins."""
    spec = call.reduced()[(0,)]
    dims = reduced_dims(call.args[1], len(spec.shape))
    outputs = [spec.replace(meta=meta_of(meta)) for meta in call.meta]
    over = mesh_dims_of(spec, dims)
    if not over:
        return call.plan(outputs, {(0,): spec}, call=plain_tuple(call.func))
    check_dtype(call)
    dim, m, func = dims[0], over[0], call.func
    group = group_along(spec.mesh, m)
    beats = torch.ge if func == _aten.cummax.default else torch.le
    start, _ = spec.interval(m)
    before = [r for r in range(spec.coordinate[m]) if spec.sizes_along(m)[r]]

    def later(old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        wins = beats(new[0], old[0]) | (new[0] != new[0])
        return torch.where(wins, new[0], old[0]), torch.where(wins, new[1], old[1])

    def compute(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        value, index = func(x, dim)
        index = index + start
        n = x.shape[dim]
        row = [1 if d == dim else size for d, size in enumerate(x.shape)]
        last = [t.narrow(dim, n - 1, 1) if n else t.new_zeros(row) for t in (value, index)]
        values, indices = (all_gather(t, group) for t in last)
        if not before:
            return value, index
        carried = values[before[0]], indices[before[0]]
        for r in before[1:]:
            carried = later(carried, (values[r], indices[r]))
        return later(carried, (value, index))

    return call.plan(outputs, {(0,): spec}, call=compute)


@operator(torch.cummax, Tensor.cummax, torch.cummin, Tensor.cummin, tensors="input")
def plan_cumulative_extreme(call: Arguments, input: ShardTensorSpec, dim: int) -> Composed:
    return plan_picking(call.name, getattr(_aten, call.name).default, input, dim, None)
