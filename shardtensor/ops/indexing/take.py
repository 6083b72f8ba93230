"""Reading and writing by positions: ``take`` and ``put`` in the flattened tensor, ``take_along_dim``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...dispatch.registry import DECLINED
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Composed, operator
from ..common.alignment import broadcast_shape
from ..shape.view import dim_of
from .gather import any_sharded, gathered, is_written

_aten = torch.ops.aten


def _coordinates(index: Tensor, shape: Sequence[int]) -> list[Tensor]:
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


@operator(torch.take, Tensor.take, tensors="input index", partial="input index")
def _take(call: Arguments, input: ShardTensorSpec, index: ShardTensorSpec) -> Composed:
    if not any_sharded(input, index):
        return DECLINED
    if index.tensor_meta.dtype != torch.int64:
        raise RuntimeError(f"take(): Expected a long tensor for index, but got {index.tensor_meta.dtype}")
    shape = input.shape or (1,)

    def take(x: Tensor, places: Tensor) -> Tensor:
        return gathered(x if x.ndim else x.reshape(1), _coordinates(places, shape))

    return Composed(take)


@operator(torch.put, Tensor.put, Tensor.put_, tensors="input index source", partial="input index source")
def _put(
    call: Arguments,
    input: ShardTensorSpec,
    index: ShardTensorSpec,
    source: ShardTensorSpec,
    accumulate: bool = False,
) -> Composed:
    write = _aten.index_put_.default if is_written(call) else _aten.index_put.default
    if not any_sharded(input, index, source) or not input.shape:
        return DECLINED
    dtypes = [spec.tensor_meta.dtype for spec in (input, index, source)]
    if dtypes[1] != torch.int64 or index.shape.numel() != source.shape.numel() or dtypes[2] != dtypes[0]:
        raise RuntimeError(
            f"put: a long index with as many elements as the source, which has the input's dtype, was expected; "
            f"got {tuple(index.shape)} {dtypes[1]}, {tuple(source.shape)} {dtypes[2]}, {dtypes[0]}"
        )

    def put(x: Tensor, places: Tensor, values: Tensor) -> Tensor:
        result: Tensor = write(x, _coordinates(places, x.shape), values.reshape(places.shape), accumulate)
        return result

    return Composed(put)


@operator(torch.take_along_dim, Tensor.take_along_dim, tensors="input indices", partial="input indices")
def _take_along_dim(
    call: Arguments, input: ShardTensorSpec, indices: ShardTensorSpec, dim: int | None = None
) -> Composed:
    if not any_sharded(input, indices) or (len(input.shape) != len(indices.shape) and dim is not None):
        return DECLINED
    if dim is None:
        return Composed(lambda x, places: torch.take(x, places.reshape(-1)))
    d = dim_of(input, dim)
    if d is None:
        return DECLINED
    # Along the other dims, they are broadcast.
    shape = broadcast_shape(*([1 if k == d else n for k, n in enumerate(s.shape)] for s in (input, indices)))
    wide = [[s.shape[d] if k == d else n for k, n in enumerate(shape)] for s in (input, indices)]

    def take(x: Tensor, places: Tensor) -> Tensor:
        places = torch.where(places < 0, places + x.shape[d], places)
        return torch.gather(x.expand(wide[0]), d, places.expand(wide[1]))

    return Composed(take)
