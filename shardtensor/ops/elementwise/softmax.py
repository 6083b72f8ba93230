"""``softmax`` and ``log_softmax`` along any dim, sharded or not.

What a rank has to know of the others' parts of a row (a line of elements along the dim) is two numbers: its maximum and
its sum of exponentials. Each is one all-reduce with all rows packed into it. An empty shard contributes the neutral
element.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...operators import operator
from ...planning import Call, Plan, meta_of
from ...registry import register
from ...spec import ShardTensorSpec
from ...tensor import ShardTensor
from ..common.alignment import common_cut, fit, wide_dtype
from ..common.reduce import check_dtype, maximum_over, mesh_dims_of, reduce_over, reduced_dims

_aten = torch.ops.aten


def _cut_plain(x: Tensor, spec: ShardTensorSpec) -> Tensor:
    """This rank's part of a plain tensor, which counts as replicated."""
    for d, m in spec.sharded_dims().items():
        start, stop = spec.interval(m)
        x = x.narrow(d, start, stop - start)
    return x


@operator(_aten._softmax.default, _aten._log_softmax.default)
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
        shifted = x - reduce_over(maximum_over(x, dims), spec, over, "max")
        weights = shifted.exp()
        total = reduce_over(weights.sum(dims, keepdim=True), spec, over, "sum")
        return (shifted - total.log() if logs else weights / total).to(dtype)

    return call.plan(out, {(0,): spec}, call=compute)


@operator(_aten._softmax_backward_data.default, _aten._log_softmax_backward_data.default)
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


@register(torch._safe_softmax, _aten._safe_softmax)
def _safe_softmax(input: Any, dim: int, dtype: torch.dtype | None = None) -> Any:
    """Rows of nothing but -inf give zeros."""
    if not isinstance(input, ShardTensor):
        return NotImplemented
    masked: Any = torch.eq(input, float("-inf")).all(dim, keepdim=True)
    result: Tensor = torch.softmax(input.masked_fill(masked, 0), dim, dtype)
    return result.masked_fill(masked, 0)
