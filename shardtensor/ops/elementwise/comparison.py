"""``allclose`` and ``equal``: one answer for the whole tensors, the same on every rank."""

from __future__ import annotations

from typing import Any

import torch

from ...registry import register
from ...tensor import run
from ..interop.export import item

_aten = torch.ops.aten


@register(_aten.allclose.default)
def _allclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    close = torch.isclose(a, b, rtol=rtol, atol=atol, equal_nan=equal_nan)
    return bool(item(run(_aten.all.default, (close,), {})))


@register(_aten.equal.default)
def _equal(a: Any, b: Any) -> bool:
    if a.shape != b.shape:
        return False
    return bool(item(run(_aten.all.default, (run(_aten.eq.Tensor, (a, b), {}),), {})))
