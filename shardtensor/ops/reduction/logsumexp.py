"""``logsumexp``: the maximum over all ranks first, so that no exponential overflows."""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch.planning import AtenCall, AtenPlan, argument
from ...operators.declaration import operator
from ..common.alignment import wide_dtype
from ..common.reduce import maximum_over, mesh_dims_of, rank_reduction, reduced_dims, reduced_spec

_aten = torch.ops.aten


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
        peak = reduce(maximum_over(x.real if x.is_complex() else x, dims), "max")
        peak = peak.masked_fill(peak.isinf(), 0)
        total = reduce((x - peak).exp().sum(dims, keepdim=True), "sum")
        result = (total.log() + peak).to(dtype)
        return result if keepdim else result.squeeze(dims)

    return call.plan(out, {(0,): spec}, call=compute)
