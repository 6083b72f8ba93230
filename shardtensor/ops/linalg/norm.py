"""Norms of vectors and matrices, and ``dist`` and ``renorm``: a sum of powers, reduced, and its root.

The norms of matrices that are made of singular values are taken of many matrices; the others are sums and extremes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...registry import register
from ...tensor import ShardTensor, run
from ..common.reduce import narrowed, reduced_dims, resolved, widened
from .decomposition import ONE, by_matrix

_aten = torch.ops.aten


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
    size = run(_aten.abs.default, (widened(resolved(x)),), {})
    if ord in (float("inf"), float("-inf")):
        op = _aten.amax.default if ord > 0 else _aten.amin.default
        return narrowed(resolved(run(op, (size, dims, keepdim), {})), given)
    if ord == 0:
        size = run(_aten._to_copy.default, (run(_aten.ne.Scalar, (size, 0), {}),), {"dtype": size.dtype})
        return narrowed(resolved(run(_aten.sum.dim_IntList, (size, dims, keepdim), {})), given)
    total = resolved(run(_aten.sum.dim_IntList, (run(_aten.pow.Tensor_Scalar, (size, ord), {}), dims, keepdim), {}))
    return narrowed(run(_aten.pow.Tensor_Scalar, (total, 1.0 / ord), {}), given)


@register(_aten.norm.Scalar, _aten.norm.ScalarOpt_dtype, _aten.norm.ScalarOpt_dim, _aten.norm.ScalarOpt_dim_dtype)
def _norm_operator(x: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
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


def _spectral(x: Any, order: Any, dim: Any, keepdim: bool, dtype: Any) -> Any:
    """The nuclear norm, or the largest or smallest singular value, of matrices in two dims."""
    if not isinstance(x, ShardTensor) or order not in ("nuc", 2, -2) or len(dims := list(dim)) != 2:
        return NotImplemented
    if any(not -x.ndim <= d < x.ndim for d in dims) or dims[0] % x.ndim == dims[1] % x.ndim:
        return NotImplemented  # torch says what is wrong
    dims = [d % x.ndim for d in dims]
    x = x if dtype is None else x.to(dtype)
    moved = x.movedim(dims, (-2, -1))
    norm = by_matrix("matrix_norm", torch.linalg.matrix_norm, ONE, (moved, order), {})
    if norm is NotImplemented or not keepdim:
        return norm
    for d in sorted(dims):
        norm = norm.unsqueeze(d)
    return norm


@register(torch.linalg.matrix_norm)
def _matrix_norm(A: Any, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, **kwargs: Any) -> Any:
    dtype = kwargs.pop("dtype", None)
    return NotImplemented if any(v is not None for v in kwargs.values()) else _spectral(A, ord, dim, keepdim, dtype)


@register(torch.linalg.norm)
def _linalg_norm(A: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    dtype = kwargs.pop("dtype", None)
    if any(v is not None for v in kwargs.values()) or not isinstance(A, Tensor) or ord is None or isinstance(dim, int):
        return NotImplemented
    return _spectral(A, ord, (0, 1) if dim is None and A.ndim == 2 else dim or (), keepdim, dtype)


@register(torch.norm, Tensor.norm)
def _older_norm(
    input: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, out: Any = None, dtype: Any = None
) -> Any:
    if p != "nuc" or out is not None or not isinstance(input, Tensor):
        return NotImplemented
    return _spectral(input, p, reduced_dims(dim, input.ndim) if dim is None else dim, keepdim, dtype)
