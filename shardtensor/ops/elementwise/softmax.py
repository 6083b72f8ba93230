"""``softmax`` and ``log_softmax`` along any dim, sharded or not.

What a rank needs of the others' parts of a row (a line of elements along the dim) is two numbers: its maximum and its
sum of exponentials. Each is one all-reduce with all rows packed into it. An empty shard contributes the neutral
element. The results are row-major whatever the operands are, as torch's are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...dispatch.planning import AtenCall, AtenPlan, meta_of
from ...operators.declaration import operator
from ..common.alignment import fit, fitted_parts, wide_dtype, with_own_parts
from ..common.named_dims import common_layout
from ..common.reduce import check_dtype, maximum_over, mesh_dims_of, rank_reduction, reduced_dims

_aten = torch.ops.aten


@operator(_aten._softmax.default, _aten._log_softmax.default, _aten._safe_softmax.default)
def plan_softmax(call: AtenCall) -> AtenPlan:
    """Maximum, all-reduce, sum of exponentials, all-reduce."""
    spec = call.reduced()[(0,)]
    out = spec.replace(meta=meta_of(call.meta))
    dims = reduced_dims(call.args[1], len(spec.shape))
    over = mesh_dims_of(spec, dims)
    if not over:
        return call.plan(out, {(0,): spec})
    check_dtype(call)
    logs, safe = call.func == _aten._log_softmax.default, call.func == _aten._safe_softmax.default
    dtype, wide = call.meta.dtype, wide_dtype(call.meta.dtype)
    reduce = rank_reduction(spec, over)

    def compute(x: Tensor, *_: object) -> Tensor:
        x = x.to(wide)
        maximum = reduce(maximum_over(x, dims), "max of numbers")
        if safe:  # rows of nothing but -inf give zeros
            maximum = maximum.masked_fill(maximum == -math.inf, 0)
        shifted = x - maximum
        weights = shifted.exp()
        total = reduce(weights.sum(dims, keepdim=True), "sum")
        if safe:
            total = total.masked_fill(total == 0, 1)
        return (shifted - total.log() if logs else weights / total).to(dtype).contiguous()

    return call.plan(out, {(0,): spec}, call=compute)


@operator(_aten._softmax_backward_data.default, _aten._log_softmax_backward_data.default)
def plan_softmax_backward(call: AtenCall) -> AtenPlan:
    """One all-reduce of a sum per row. The result has the output's layout, whatever the gradient's."""
    reduced = call.reduced()
    base = common_layout([reduced[path] for path in ((1,), (0,)) if path in reduced], meta_of(call.meta))
    dims = reduced_dims(call.args[2], len(base.shape))
    over = mesh_dims_of(base, dims)
    logs = call.func == _aten._log_softmax_backward_data.default
    dtype, reduce = call.meta.dtype, rank_reduction(base, over)

    def across(grad: Tensor, output: Tensor, *_: object) -> Tensor:
        wide = wide_dtype(output.dtype)
        grad, output = grad.to(wide), output.to(wide)
        if not logs:
            grad = grad * output
        total = reduce(grad.sum(dims, keepdim=True), "sum")
        return (grad - (output.exp() if logs else output) * total).to(dtype).contiguous()

    compute = with_own_parts(across if over else call.func, fitted_parts(call, base))
    return call.plan(base, {path: fit(s, base) for path, s in reduced.items()}, call=compute)
