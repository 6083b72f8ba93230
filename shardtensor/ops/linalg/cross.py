"""The cross product. Along the dim of length 3 nothing is sharded: it is resharded to another dim, if one is free."""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, operator
from ..common.contraction import ContractionPlan, Form, batch_labels, plan_contraction


def _plan(call: Arguments, a: ShardTensorSpec, b: ShardTensorSpec, dim: int) -> ContractionPlan:
    (left, right), out = batch_labels(a.shape, b.shape)
    form = Form((left, right), out, whole=frozenset([dim % len(out) - len(out)]), by_parts=False)

    def local(x: Tensor, y: Tensor) -> Tensor:
        product: Tensor = torch.linalg.cross(x, y, dim=dim)
        return product

    return plan_contraction(call, call.name.replace("linalg_", "linalg."), local, form, "input", "other")


@operator(torch.linalg.cross, tensors="input other")
def plan_linalg_cross(
    call: Arguments, input: ShardTensorSpec, other: ShardTensorSpec, *, dim: int = -1
) -> ContractionPlan:
    """``torch.linalg.cross``."""
    call.returned(torch.linalg.cross, input, other, dim=dim)
    return _plan(call, input, other, dim)


@operator(torch.cross, Tensor.cross, tensors="input other")
def plan_cross(
    call: Arguments, input: ShardTensorSpec, other: ShardTensorSpec, dim: int | None = None
) -> ContractionPlan:
    """``torch.cross``; by default along the first dim of length 3."""
    meta = call.returned(torch.cross, input, other, dim)
    return _plan(call, input, other, list(meta.shape).index(3) if dim is None else dim)
