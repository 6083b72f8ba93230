"""``logsumexp``: the maximum over all ranks first, so that no exponential overflows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...operators import operator
from ...planning import Call, Plan, argument
from ..common.alignment import wide_dtype
from ..common.reduce import maximum_over, mesh_dims_of, reduce_over, reduced_dims, reduced_spec

_aten = torch.ops.aten


@operator(_aten.logsumexp.default)
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
        peak = reduce_over(maximum_over(x.real if x.is_complex() else x, dims), spec, over, "max")
        peak = peak.masked_fill(peak.isinf(), 0)
        total = reduce_over((x - peak).exp().sum(dims, keepdim=True), spec, over, "sum")
        result = (total.log() + peak).to(dtype)
        return result if keepdim else result.squeeze(dims)

    return call.plan(out, {(0,): spec}, call=compute)
