"""Losses that treat every element alone, below autograd: torch's kernels, and those of their gradients, on shards.

Each rank adds up the terms of its shard and divides by the *global* count: the value is a Partial(sum) scalar.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate

from ..._compat import TensorMeta, kernel
from ...caches import cached
from ...operators import operator
from ...planning import AtenCall, AtenPlan, argument
from ...spec import ShardTensorSpec
from ..common.alignment import wide_dtype
from ..common.reduce import check_dtype
from ..elementwise.pointwise import pointwise_plan

__all__ = ["WITH_KERNEL", "scalar_spec"]

_aten = torch.ops.aten

# Not composed of other operators by torch.
WITH_KERNEL = (F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss, F.binary_cross_entropy)
_NAMES = [function.__name__ for function in WITH_KERNEL]
_NONE, _MEAN, _SUM = range(3)


@cached(maxsize=4096)
def scalar_spec(spec: ShardTensorSpec, dtype: torch.dtype) -> ShardTensorSpec:
    """The spec of the sum over all elements of a tensor with ``spec``."""
    placements = [Replicate() if p.is_replicate() else Partial() for p in spec.placements]
    meta = TensorMeta(torch.Size(()), (), dtype)
    return spec.replace(placements=placements, sizes=(None,) * len(placements), meta=meta)


def _reduction(call: AtenCall) -> tuple[int, int]:
    """Where the argument that names the reduction stands, and which one it is."""
    at = [a.name for a in call.func._schema.arguments].index("reduction")
    return at, argument(call, at, "reduction", _MEAN)


def _instead(call: AtenCall, at: int, reduction: int) -> tuple[Any, ...]:
    """What stands behind the given ones of the first ``at`` arguments, with another reduction."""
    return (*(None,) * (at - len(call.args[:at])), reduction, *call.args[at + 1 :])


@operator(*(getattr(_aten, name).default for name in _NAMES))
def _value(call: AtenCall) -> AtenPlan:
    check_dtype(call)
    at, reduction = _reduction(call)
    if reduction == _NONE:
        return pointwise_plan(call)
    shape, dtype = torch.broadcast_shapes(*(a.shape for a in call.args[:2])), call.meta.dtype  # type: ignore[no-untyped-call]
    terms = pointwise_plan(replace(call, meta=torch.empty(shape, dtype=dtype, device="meta")))
    local, wide = terms.call or kernel(call.func), wide_dtype(dtype)
    half = wide != dtype  # then the sum may overflow where the mean does not
    rest = _instead(call, at, _NONE if half else _SUM)
    count = shape.numel() if reduction == _MEAN else 1

    def compute(*args: Any) -> Tensor:
        total = local(*args[:at], *rest)
        total = total.sum(dtype=wide) if half else total
        mean = total / count if reduction == _MEAN else total
        return mean.to(dtype) if half else mean  # type: ignore[no-any-return]

    return AtenPlan(scalar_spec(terms.outputs, dtype), terms.inputs, call=compute)


@operator(*(getattr(_aten, f"{name}_backward").default for name in _NAMES))
def _gradient(call: AtenCall) -> AtenPlan:
    check_dtype(call)
    at, reduction = _reduction(call)
    plan = pointwise_plan(call)
    if reduction != _MEAN:
        return plan
    local = plan.call or kernel(call.func)
    count = torch.broadcast_shapes(*(a.shape for a in call.args[1:3])).numel()  # type: ignore[no-untyped-call]
    rest = _instead(call, at, _SUM)

    def compute(grad: Tensor, *args: Any) -> Tensor:
        return local(grad / count, *args[: at - 1], *rest)  # type: ignore[no-any-return]

    plan.call = compute
    return plan
