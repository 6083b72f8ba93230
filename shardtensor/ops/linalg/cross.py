"""The cross product. Along the dim of length 3 nothing is sharded: it is exchanged to another dim, if one is free."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...registry import register
from ..common.alignment import common_mesh, torch_judges
from ..common.contraction import Form, batch_labels, contract


def _crossed(name: str, a: Any, b: Any, dim: int) -> Any:
    (left, right), out = batch_labels(a.shape, b.shape)
    form = Form((left, right), out, whole=frozenset([dim % len(out) - len(out)]), by_parts=False)
    return contract(name, lambda x, y: torch.linalg.cross(x, y, dim=dim), form, a, b)


@register(torch.linalg.cross)
def _linalg_cross(input: Any, other: Any, *, dim: int = -1, **kwargs: Any) -> Any:
    if kwargs or common_mesh("cross", [input, other]) is None:
        return NotImplemented
    torch_judges(torch.linalg.cross, input, other, dim=dim)
    return _crossed("linalg.cross", input, other, dim)


@register(torch.cross, Tensor.cross)
def _cross(input: Any, other: Any, dim: int | None = None, **kwargs: Any) -> Any:
    if kwargs or common_mesh("cross", [input, other]) is None:
        return NotImplemented
    torch_judges(torch.cross, input, other, dim)
    if dim is None:  # the first of length 3
        dim = list(torch.broadcast_shapes(input.shape, other.shape)).index(3)
    return _crossed("cross", input, other, dim)
