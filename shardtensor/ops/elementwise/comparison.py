"""``allclose``, ``equal`` and ``_assert_async``: one answer for the global tensors, the same on every rank.

The first two return a number that is read from the data, so they have no plan.
"""

from __future__ import annotations

import torch

from ...dispatch.planning import AtenCall, AtenPlan
from ...dispatch.registry import register
from ...dispatch.tensor import ShardTensor, run
from ...operators.declaration import operator
from ..interop.export import item

_aten = torch.ops.aten


@register(_aten.allclose.default)
def _allclose(a: ShardTensor, b: ShardTensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    close = torch.isclose(a, b, rtol=rtol, atol=atol, equal_nan=equal_nan)
    return bool(item(run(_aten.all.default, (close,), {})))


@register(_aten.equal.default)
def _equal(a: ShardTensor, b: ShardTensor) -> bool:
    if a.shape != b.shape:
        return False
    return bool(item(run(_aten.all.default, (run(_aten.eq.Tensor, (a, b), {}),), {})))


@operator(_aten._assert_async.default, _aten._assert_async.msg)
def _assert_async(call: AtenCall) -> AtenPlan:
    """Every rank checks the same value, so either all raise or none."""
    return call.plan(None, {path: spec.replicated() for path, spec in call.tensors.items()})
