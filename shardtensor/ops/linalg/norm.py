"""Norms of vectors and matrices, and ``dist`` and ``renorm``: a sum of powers, reduced, and its root.

The norms of matrices that are made of singular values are taken of many matrices; the others are sums and extremes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...dispatch.planning import AtenCall, AtenPlan, argument
from ...dispatch.registry import DECLINED, register
from ...dispatch.tensor import ShardTensor, run
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Composed, Plan, operator
from ..common.alignment import wide_dtype
from ..common.reduce import mesh_dims_of, neutral_element, rank_reduction, reduced_dims, reduced_spec
from .decomposition import ONE, plan_by_matrix

_aten = torch.ops.aten


# -- of vectors, below autograd ---------------------------------------------------------------------------------------


@operator(
    _aten.linalg_vector_norm.default,
    # The older operator, which pairwise_distance still calls.
    _aten.norm.Scalar,
    _aten.norm.ScalarOpt_dtype,
    _aten.norm.ScalarOpt_dim,
    _aten.norm.ScalarOpt_dim_dtype,
)
def plan_vector_norm(call: AtenCall) -> AtenPlan:
    """One all-reduce: of the sum of powers, or of the extreme."""
    spec = call.reduced()[(0,)]
    order = argument(call, 1, "ord", 2)
    order = 2 if order is None else order
    dims = reduced_dims(argument(call, 2, "dim", None), len(spec.shape))
    keepdim = argument(call, 3, "keepdim", False)
    out = reduced_spec(spec, call.meta, dims, keepdim, "sum").for_gradient()
    over = mesh_dims_of(spec, dims)
    if not over:
        return call.plan(out, {(0,): spec})
    given = argument(call, 4, "dtype", None) or spec.tensor_meta.dtype
    local = _local_norm(order, dims, keepdim, rank_reduction(spec, over))
    dtype, wide = call.meta.dtype, wide_dtype(given)
    return call.plan(out, {(0,): spec}, call=lambda x, *_, **__: local(x.to(given).to(wide).abs()).to(dtype))


def _local_norm(
    order: float, dims: list[int], keepdim: bool, reduce: Callable[[Tensor, str], Tensor]
) -> Callable[[Tensor], Tensor]:
    """The norm of what the ranks have, from the sizes of a rank's elements."""
    if order in (float("inf"), float("-inf")):
        op, extreme = ("max", torch.amax) if order > 0 else ("min", torch.amin)

        def of_extremes(size: Tensor) -> Tensor:
            if 0 not in size.shape:
                return reduce(extreme(size, dims, keepdim), op)
            return reduce(size.sum(dims, keepdim).fill_(neutral_element(op, size.dtype)), op)

        return of_extremes
    if order == 0:
        return lambda size: reduce((size != 0).to(size.dtype).sum(dims, keepdim), "sum")
    return lambda size: reduce(size.pow(order).sum(dims, keepdim), "sum").pow(1.0 / order)


# Handlers, not plans: they are other operators in a row, which have plans.


@register(_aten.dist.default)
def _dist(a: ShardTensor, b: ShardTensor, p: float = 2) -> ShardTensor:
    distance: ShardTensor = run(_aten.linalg_vector_norm.default, (run(_aten.sub.Tensor, (a, b), {}), p), {})
    return distance


@register(_aten.renorm.default)
def _renorm(x: ShardTensor, p: float, dim: int, maxnorm: float) -> Tensor:
    if x._spec.is_replicate():
        return DECLINED
    (kept,) = reduced_dims(dim, x.ndim)
    others = [d for d in range(x.ndim) if d != kept]
    if not others:
        raise RuntimeError("renorm: input needs at least 2 dimensions")
    norm = run(_aten.linalg_vector_norm.default, (x, p, others, True), {})
    one = run(_aten.ones_like.default, (norm,), {})
    scale = run(_aten.div.Tensor, (run(_aten.mul.Scalar, (one, maxnorm), {}), norm + 1e-7), {})
    factors: ShardTensor = run(_aten.where.self, (norm > maxnorm, scale, one), {})
    return x * factors


# -- of matrices, above autograd --------------------------------------------------------------------------------------


def _plan_spectral(
    call: Arguments,
    spec: ShardTensorSpec,
    order: float | str | None,
    dim: Sequence[int],
    keepdim: bool,
    dtype: torch.dtype | None,
) -> Plan:
    """The nuclear norm, or the largest or smallest singular value, of matrices in two dims; others: NotImplemented."""
    ndim, dims = len(spec.shape), list(dim)
    if order not in ("nuc", 2, -2) or len(dims) != 2:
        return DECLINED
    if any(not -ndim <= d < ndim for d in dims) or dims[0] % ndim == dims[1] % ndim:
        return DECLINED  # torch says what is wrong
    dims = [d % ndim for d in dims]
    if dims == [ndim - 2, ndim - 1] and not keepdim and dtype is None:
        return plan_by_matrix(call, torch.linalg.matrix_norm, ONE, (spec, order))

    def norm(x: Tensor) -> Tensor:
        x = x if dtype is None else x.to(dtype)
        result: Tensor = torch.linalg.matrix_norm(x.movedim(dims, (-2, -1)), order)
        for d in sorted(dims) if keepdim else ():
            result = result.unsqueeze(d)
        return result

    return Composed(norm)


@operator(torch.linalg.matrix_norm, torch.linalg.norm, tensors="input")
def plan_norm(
    call: Arguments,
    input: ShardTensorSpec,
    ord: float | str | None = None,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Plan:
    """``torch.linalg.norm`` and ``matrix_norm``, of matrices: ``dim`` names two dims, or the tensor has two.

    Norms that are not made of singular values are sums and extremes.
    """
    if isinstance(dim, int):
        return DECLINED
    of_last = dim is None and (call.name == "linalg_matrix_norm" or len(input.shape) == 2)
    return _plan_spectral(call, input, ord, (-2, -1) if of_last else dim or (), keepdim, dtype)


@operator(torch.norm, Tensor.norm, tensors="input")
def plan_older_norm(
    call: Arguments,
    input: ShardTensorSpec,
    p: float | str | None = "fro",
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Plan:
    """``torch.norm``: the nuclear one."""
    if p != "nuc" or isinstance(dim, int):
        return DECLINED
    dims = reduced_dims(dim, len(input.shape)) if dim is None else dim
    return _plan_spectral(call, input, p, dims, keepdim, dtype)
