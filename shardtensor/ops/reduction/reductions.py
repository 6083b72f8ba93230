"""Reductions over any dims, exact on unequal shards.

A reduction over a sharded dim leaves a Partial: each rank's contribution to the whole, reduced when it is needed. A
mean is a sum over the global count, never a mean of means. Ranks with empty shards contribute the neutral element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard

from ..._compat import alias
from ...dispatch import Call, Plan, argument, meta_of, rule, run, wrap
from ...gradients import once_differentiable
from ...redistribute import redistribute_local
from ...registry import register
from ...spec import ShardTensorSpec
from ...tensor import ShardTensor, as_gradient, redistribute_to
from ..common.alignment import common_cut, fit, wide_dtype

_aten = torch.ops.aten


def reduced_dims(dim: Any, ndim: int) -> list[int]:
    """Normalized dims of a reduction's ``dim`` argument; None and () mean all.

    Raises:
        IndexError, RuntimeError: dims that do not exist or are named twice, with torch's texts.
    """
    given = [dim] if isinstance(dim, int) else list(dim or ())
    room = max(ndim, 1)
    for d in given:
        if not -room <= d < room:
            raise IndexError(f"Dimension out of range (expected to be in range of [{-room}, {room - 1}], but got {d})")
    dims = sorted({d % room for d in given})
    if len(dims) < len(given):
        raise RuntimeError(f"a dim appears multiple times in the list of dims {tuple(given)}")
    return [d for d in dims if d < ndim] if dims else list(range(ndim))


def reduced_spec(spec: ShardTensorSpec, meta: Tensor, dims: Sequence[int], keepdim: bool, op: str) -> ShardTensorSpec:
    """Spec of a reduction's result: Partial where a sharded dim is reduced, the other dims as they are."""
    placements: list[Any] = []
    sizes: list[Any] = []
    for m, p in enumerate(spec.placements):
        size = None
        if isinstance(p, Shard):
            if p.dim in dims:
                p = Partial(op)
            else:
                size = spec.sizes[m]
                p = p if keepdim else Shard(p.dim - sum(d < p.dim for d in dims))
        placements.append(p)
        sizes.append(size)
    return ShardTensorSpec.of(spec.mesh, placements, meta_of(meta), tuple(sizes))


def neutral_element(op: str, dtype: torch.dtype) -> Any:
    """What an empty shard contributes."""
    if dtype == torch.bool:
        return op in ("min", "product")
    if op in ("sum", "product"):
        return int(op == "product")
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    return info.min if op == "max" else info.max


def _reduction(
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


def check_dtype(call: Call) -> None:
    """Let torch's kernel judge the dtype, on one element: ranks with empty shards would not call it.

    Raises:
        Exception: torch's own, on every rank alike.
    """
    device = call.specs[0].mesh.device_type

    def one(a: Any) -> Any:
        if isinstance(a, (Tensor, ShardTensorSpec)):
            meta = a.tensor_meta if isinstance(a, ShardTensorSpec) else a
            return torch.ones([1] * len(a.shape), dtype=meta.dtype, device=device)
        return a

    call.func(*map(one, call.args), **call.kwargs)


@rule(_aten.sum.default, _aten.sum.dim_IntList)
def _sum(call: Call) -> Plan:
    return _reduction(call, argument(call, 1, "dim", None), argument(call, 2, "keepdim", False), "sum")


@rule(_aten.nansum.default)
def _nansum(call: Call) -> Plan:
    # NaN in a Partial is none in the sum.
    return _reduction(
        call, argument(call, 1, "dim", None), argument(call, 2, "keepdim", False), "sum", of_partial=False
    )


@rule(_aten.count_nonzero.default, _aten.count_nonzero.dim_IntList)
def _count_nonzero(call: Call) -> Plan:
    return _reduction(call, argument(call, 1, "dim", None), False, "sum", of_partial=False)


@rule(_aten.mean.default, _aten.mean.dim)
def _mean(call: Call) -> Plan:
    spec = call.specs[0]
    dims = reduced_dims(argument(call, 1, "dim", None), len(spec.shape))
    count = _count(spec, dims)
    keepdim, dtype = argument(call, 2, "keepdim", False), call.meta.dtype
    if not any(d in dims for d in spec.sharded_dims()):
        return _reduction(call, dims, keepdim, "sum")
    # Divided before it is rounded: the sum of half precision numbers may overflow where their mean does not.
    wide = wide_dtype(dtype)
    return _reduction(
        call, dims, keepdim, "sum", lambda x, *_, **__: (x.sum(dims, keepdim, dtype=wide) / count).to(dtype)
    )


@rule(_aten.amax.default, _aten.amin.default)
def _extreme(call: Call) -> Plan:
    op = "max" if call.func == _aten.amax.default else "min"
    return _reduction(call, argument(call, 1, "dim", ()), argument(call, 2, "keepdim", False), op)


@rule(_aten.max.default, _aten.min.default)
def _extreme_of_all(call: Call) -> Plan:
    return _reduction(call, None, False, "max" if call.func == _aten.max.default else "min")


@rule(_aten.prod.default, _aten.prod.dim_int)
def _prod(call: Call) -> Plan:
    return _reduction(call, argument(call, 1, "dim", None), argument(call, 2, "keepdim", False), "product")


@rule(_aten.any.default, _aten.any.dim, _aten.any.dims, _aten.all.default, _aten.all.dim, _aten.all.dims)
def _logical(call: Call) -> Plan:
    op = "max" if call.func._schema.name == "aten::any" else "min"
    return _reduction(call, argument(call, 1, "dim", None), argument(call, 2, "keepdim", False), op)


@rule(_aten.dot.default, _aten.vdot.default)
def _dot(call: Call) -> Plan:
    check_dtype(call)
    reduced = call.reduced()
    first = next(iter(reduced.values()))
    base = common_cut(list(reduced.values()), first.tensor_meta)
    out = reduced_spec(base, call.meta, [0], False, "sum")
    bounds = [base.interval(m) for m in base.sharded_dims().values()]
    func, plain = call.func, [i for i in (0, 1) if (i,) not in reduced]

    def compute(*vectors: Tensor) -> Tensor:
        parts = list(vectors)
        for i in plain:  # counts as replicated
            for start, stop in bounds:
                parts[i] = parts[i][start:stop]
        return func(*parts)

    return call.plan(out, {path: fit(s, base) for path, s in reduced.items()}, call=compute)


@rule(_aten.histc.default)
def _histc(call: Call) -> Plan:
    return _reduction(call, None, False, "sum", of_partial=False)


def _count(spec: ShardTensorSpec, dims: Sequence[int]) -> int:
    n = 1
    for d in dims:
        n *= spec.shape[d]
    return n


def opted_dtype(function: Callable[..., Tensor], x: Any, dtype: Any, *args: Any) -> Any:
    """``dtype``, or where none is given the one that autocast, which acts above us, would choose for this function."""
    if dtype is not None or not torch.is_autocast_enabled(x.device.type):
        return dtype
    return function(torch.ones([1] * x.ndim, dtype=x.dtype, device=x.device), *args).dtype


# -- sum and mean above autograd: their gradient is expanded to the shard, never to the whole tensor -----------


class _SumOrMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: ShardTensor, dims: list[int], keepdim: bool, dtype: Any, mean: bool) -> Any:  # type: ignore[override]
        ctx.spec, ctx.dims, ctx.keepdim = x._spec, dims, keepdim
        ctx.scale = _count(x._spec, dims) if mean else None
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


# -- var and std: two passes, so that a large mean costs no precision -------------------------------------------


def _moments(x: ShardTensor, dim: Any, correction: Any, keepdim: bool) -> tuple[Any, Any]:
    """Variance and mean, both reduced; of half precision numbers in float32."""
    dims = reduced_dims(dim, x.ndim)
    count = _count(x._spec, dims)
    dtype = x.dtype
    x = _wide(x)
    mean = _whole(run(_aten.mean.dim, (x, dims, True), {}))
    distances = run(_aten.abs.default, (run(_aten.sub.Tensor, (x, mean), {}),), {})
    squares = run(_aten.square.default, (distances,), {})
    total = _whole(run(_aten.sum.dim_IntList, (squares, dims, keepdim), {}))
    freedom = max(0, count - (1 if correction is None else correction))
    var = _narrow(run(_aten.div.Tensor, (total, freedom), {}), dtype)
    mean = _narrow(mean, dtype)
    if not keepdim:
        mean = run(_aten.squeeze.dims, (mean, dims), {})
    return var, mean


def _wide(x: Any) -> Any:
    half = x.dtype in (torch.float16, torch.bfloat16)
    return run(_aten._to_copy.default, (x,), {"dtype": torch.float32}) if half else x


def _narrow(x: Any, dtype: torch.dtype) -> Any:
    half = dtype in (torch.float16, torch.bfloat16)
    return run(_aten._to_copy.default, (x,), {"dtype": dtype}) if half else x


def _whole(x: Any) -> Any:
    """A Partial reduced; anything else as it is."""
    spec = x._spec
    target = spec.for_gradient()
    return wrap(redistribute_local(x._local_tensor, spec, target), target)


@register(_aten.var.correction)
def _var(x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return _moments(x, dim, correction, keepdim)[0]


@register(_aten.std.correction)
def _std(x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return run(_aten.sqrt.default, (_moments(x, dim, correction, keepdim)[0],), {})


@register(_aten.var_mean.correction)
def _var_mean(x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return _moments(x, dim, correction, keepdim)


@register(_aten.std_mean.correction)
def _std_mean(x: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    var, mean = _moments(x, dim, correction, keepdim)
    return run(_aten.sqrt.default, (var,), {}), mean


# -- norms: a sum of powers, reduced, and its root ------------------------------------------------------------------


@register(_aten.linalg_vector_norm.default)
def _vector_norm(x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if x._spec.is_replicate():
        return NotImplemented
    if not (x.dtype.is_floating_point or x.dtype.is_complex):
        raise RuntimeError(f"linalg.vector_norm: expected a floating point or complex tensor, got {x.dtype}")
    if dtype is not None:
        x = run(_aten._to_copy.default, (x,), {"dtype": dtype})
    dims = reduced_dims(dim, x.ndim)
    given = x.dtype
    size = run(_aten.abs.default, (_wide(_whole(x)),), {})
    if ord in (float("inf"), float("-inf")):
        op = _aten.amax.default if ord > 0 else _aten.amin.default
        return _narrow(_whole(run(op, (size, dims, keepdim), {})), given)
    if ord == 0:
        size = run(_aten._to_copy.default, (run(_aten.ne.Scalar, (size, 0), {}),), {"dtype": size.dtype})
        return _narrow(_whole(run(_aten.sum.dim_IntList, (size, dims, keepdim), {})), given)
    total = _whole(run(_aten.sum.dim_IntList, (run(_aten.pow.Tensor_Scalar, (size, ord), {}), dims, keepdim), {}))
    return _narrow(run(_aten.pow.Tensor_Scalar, (total, 1.0 / ord), {}), given)


@register(_aten.norm.Scalar, _aten.norm.ScalarOpt_dtype, _aten.norm.ScalarOpt_dim, _aten.norm.ScalarOpt_dim_dtype)
def _norm(x: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The older operator, which pairwise_distance still calls."""
    return _vector_norm(x, 2 if p is None else p, dim, keepdim, dtype=dtype)


@register(_aten.dist.default)
def _dist(a: Any, b: Any, p: Any = 2) -> Any:
    return _vector_norm(run(_aten.sub.Tensor, (a, b), {}), p)


@register(_aten.renorm.default)
def _renorm(x: Any, p: Any, dim: int, maxnorm: Any) -> Any:
    if x._spec.is_replicate():
        return NotImplemented
    (kept,) = reduced_dims(dim, x.ndim)
    others = [d for d in range(x.ndim) if d != kept]
    if not others:
        raise RuntimeError("renorm: input needs at least 2 dimensions")
    norm = _vector_norm(x, p, others, True)
    one = run(_aten.ones_like.default, (norm,), {})
    scale = run(_aten.div.Tensor, (run(_aten.mul.Scalar, (one, maxnorm), {}), norm + 1e-7), {})
    return x * run(_aten.where.self, (norm > maxnorm, scale, one), {})


# -- leaving the tensor world: item(), float(), bool() mean the whole value -------------------------------------


@register(_aten._local_scalar_dense.default)
def _item(x: Any) -> Any:
    spec = x._spec
    if spec.shape.numel() != 1:
        raise RuntimeError(f"a tensor with {spec.shape.numel()} elements cannot be converted to a scalar")
    return redistribute_local(x._local_tensor, spec, spec.replicated()).item()


@register(_aten._is_all_true.default)
def _is_all_true(x: Any) -> Any:
    return run(_aten.all.default, (x,), {})


@register(_aten._is_any_true.default)
def _is_any_true(x: Any) -> Any:
    return run(_aten.any.default, (x,), {})


@register(_aten.allclose.default)
def _allclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    close = torch.isclose(a, b, rtol=rtol, atol=atol, equal_nan=equal_nan)
    return bool(_item(run(_aten.all.default, (close,), {})))


@register(_aten.equal.default)
def _equal(a: Any, b: Any) -> bool:
    if a.shape != b.shape:
        return False
    return bool(_item(run(_aten.all.default, (run(_aten.eq.Tensor, (a, b), {}),), {})))
