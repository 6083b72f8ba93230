"""The cross product. Along the dim of length 3 nothing is sharded: it is resharded to another dim, if one is free."""

from __future__ import annotations

import torch
from torch import Tensor

from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, operator
from ..common.contraction import ContractionPlan, plan_contraction
from ..common.named_dims import Form, batch_labels, fresh, shared


@operator(torch.linalg.cross, torch.ops.aten.linalg_cross, torch.cross, Tensor.cross, tensors="input other")
def plan_cross(
    call: Arguments, input: ShardTensorSpec, other: ShardTensorSpec, dim: int | None = None
) -> ContractionPlan:
    """By default ``torch.linalg.cross`` goes along the last dim, ``torch.cross`` along the first dim of length 3."""
    of_linalg = call.name == "linalg_cross"
    dim = -1 if of_linalg and dim is None else dim
    meta = call.returned(torch.linalg.cross if of_linalg else torch.cross, input, other, dim=dim)
    along = list(meta.shape).index(3) if dim is None else dim
    (left, right), out = batch_labels(input.shape, other.shape)
    form = Form((left, right), out, whole=frozenset([along % len(out) - len(out)]), ways=(shared, fresh))

    def local(x: Tensor, y: Tensor) -> Tensor:
        product: Tensor = torch.linalg.cross(x, y, dim=along)
        return product

    return plan_contraction(call, call.name.replace("linalg_", "linalg."), local, form, "input", "other")
