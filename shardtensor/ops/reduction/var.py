"""Variance and standard deviation: two passes, so that a large mean costs no precision.

Welford's update would need one pass, but merging the ranks' moments would send as much: two sums per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch.planning import AtenCall, AtenPlan, argument
from ...operators.declaration import operator
from ..common.alignment import wide_dtype
from ..common.reduce import check_dtype, count_along, mesh_dims_of, rank_reduction, reduced_dims, reduced_spec

_aten = torch.ops.aten


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
