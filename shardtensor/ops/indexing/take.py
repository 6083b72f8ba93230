"""Reading and writing by positions: ``take`` and ``put`` in the flattened tensor, ``take_along_dim``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...registry import register
from ..common.alignment import is_cut
from ..shape.view import dim_of
from .gather import look_up

_aten = torch.ops.aten


def _coordinates(index: Any, shape: Sequence[int]) -> list[Any]:
    """Positions in a flattened tensor of ``shape``, negative ones from its end, as one index for each dim.

    What is out of range is so in the first dim, too.
    """
    n = torch.Size(shape).numel()
    index = torch.where(index < 0, index + n, index)
    index = torch.where((index < 0) | (index >= n), n, index)
    places = []
    step = n
    for d, size in enumerate(shape):
        step //= max(1, size)
        place = torch.div(index, max(1, step), rounding_mode="floor")
        places.append(place if d == 0 else place % max(1, size))
    return places


@register(torch.take, Tensor.take)
def _take(input: Any, index: Any, *, out: Any = None) -> Any:
    if out is not None or not is_cut(input, index):
        return NotImplemented
    if index.dtype != torch.int64:
        raise RuntimeError(f"take(): Expected a long tensor for index, but got {index.dtype}")
    return look_up(input if input.ndim else input.reshape(1), _coordinates(index, input.shape or (1,)))


def _put(op: Any, input: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    if not is_cut(input, index, source) or not input.ndim:
        return NotImplemented
    if index.dtype != torch.int64 or index.numel() != source.numel() or source.dtype != input.dtype:
        raise RuntimeError(
            f"put: a long index with as many elements as the source, which has the input's dtype, was expected; "
            f"got {tuple(index.shape)} {index.dtype}, {tuple(source.shape)} {source.dtype}, {input.dtype}"
        )
    return op(input, _coordinates(index, input.shape), source.reshape(index.shape), accumulate)


@register(torch.put, Tensor.put)
def _put_function(input: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    return _put(_aten.index_put.default, input, index, source, accumulate)


@register(Tensor.put_)
def _put_method(input: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    return _put(_aten.index_put_.default, input, index, source, accumulate)


@register(torch.take_along_dim, Tensor.take_along_dim)
def _take_along_dim(input: Any, indices: Any, dim: int | None = None, *, out: Any = None) -> Any:
    if out is not None or not is_cut(input, indices) or (input.ndim != indices.ndim and dim is not None):
        return NotImplemented
    if dim is None:
        return torch.take(input, indices.reshape(-1))
    d = dim_of(input, dim)
    if d is None:
        return NotImplemented
    shape = torch.broadcast_shapes(*([1 if k == d else n for k, n in enumerate(t.shape)] for t in (input, indices)))
    indices = torch.where(indices < 0, indices + input.shape[d], indices)
    wide = [t.expand([t.shape[d] if k == d else n for k, n in enumerate(shape)]) for t in (input, indices)]
    return torch.gather(wide[0], d, wide[1])
