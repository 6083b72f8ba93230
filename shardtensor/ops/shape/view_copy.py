"""Operators that are another one and a copy: ``*_copy``, ``*_scatter``.

Below autograd, each is other operators in a row, which have plans; so they are registered and have none themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..._compat import OpOverload, tree_map
from ...dispatch.registry import DECLINED, register
from ...dispatch.tensor import ShardTensor, run

_aten = torch.ops.aten

# -- a view, copied ---------------------------------------------------------------------------------------------

_VIEWS = """
    alias detach diagonal expand narrow permute select slice split split_with_sizes squeeze t transpose unbind unfold
    unsqueeze view view_as_complex view_as_real
"""


def _register_copy(view: OpOverload, copy: OpOverload) -> None:
    @register(copy)
    def _(*args: Any, **kwargs: Any) -> Any:
        # The view first: only its plan knows where shards have to be moved.
        return tree_map(lambda t: t.clone(memory_format=torch.contiguous_format), view(*args, **kwargs))


for _name in _VIEWS.split():
    _view, _copy = getattr(_aten, _name), getattr(_aten, f"{_name}_copy")
    for _overload in _copy.overloads():
        if "out" not in _overload and _overload in _view.overloads():
            _register_copy(getattr(_view, _overload), getattr(_copy, _overload))


# -- a copy of which a view is written to ------------------------------------------------------------------------


@register(_aten.slice_scatter.default)
def _slice_scatter(x: Tensor, src: Tensor, *args: int | None, **kwargs: int | None) -> Tensor:
    if not isinstance(x, ShardTensor):
        return DECLINED
    # Partial is reduced first: what is written into a part of it would have to be shared out, too.
    result: Tensor = run(_aten.clone.default, (x.redistribute(placements=x._spec.for_gradient().placements),), {})
    _aten.slice.Tensor(result, *args, **kwargs).copy_(src)
    return result


@register(_aten.diagonal_scatter.default)
def _diagonal_scatter(x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    if not isinstance(x, ShardTensor):
        return DECLINED
    place = torch.zeros(x.shape, device="meta").diagonal(offset, dim1, dim2)
    if src.shape != place.shape:
        raise RuntimeError(f"a diagonal of shape {tuple(place.shape)} was expected, not of {tuple(src.shape)}")
    ones = torch.ones_like(_aten.diagonal.default(x, offset, dim1, dim2), dtype=torch.bool)
    where = _aten.diagonal_backward.default(ones, x.shape, offset, dim1, dim2)
    src = src.to(x.dtype).expand_as(ones) if isinstance(src, DTensor) else torch.zeros_like(ones, dtype=x.dtype) + src
    return torch.where(where, _aten.diagonal_backward.default(src, x.shape, offset, dim1, dim2), x)


@register(_aten.select_scatter.default)
def _select_scatter(x: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    if not isinstance(x, ShardTensor):
        return DECLINED
    torch.empty(x.shape, device="meta").select(dim, index)  # torch's own errors
    scattered: Tensor = _aten.slice_scatter.default(x, src.unsqueeze(dim % x.ndim), dim, index, index + 1 or None)
    return scattered
