"""Variance and standard deviation: two passes, so that a large mean costs no precision."""

from __future__ import annotations

from typing import Any

import torch

from ...registry import register
from ...tensor import ShardTensor, run
from ..common.reduce import count_along, narrowed, reduced_dims, resolved, widened

_aten = torch.ops.aten


def _moments(x: ShardTensor, dim: Any, correction: Any, keepdim: bool) -> tuple[Any, Any]:
    """Variance and mean, both reduced; of half precision numbers in float32."""
    dims = reduced_dims(dim, x.ndim)
    count = count_along(x._spec, dims)
    dtype = x.dtype
    x = widened(x)
    mean = resolved(run(_aten.mean.dim, (x, dims, True), {}))
    distances = run(_aten.abs.default, (run(_aten.sub.Tensor, (x, mean), {}),), {})
    squares = run(_aten.square.default, (distances,), {})
    total = resolved(run(_aten.sum.dim_IntList, (squares, dims, keepdim), {}))
    freedom = max(0, count - (1 if correction is None else correction))
    var = narrowed(run(_aten.div.Tensor, (total, freedom), {}), dtype)
    mean = narrowed(mean, dtype)
    if not keepdim:
        mean = run(_aten.squeeze.dims, (mean, dims), {})
    return var, mean


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
