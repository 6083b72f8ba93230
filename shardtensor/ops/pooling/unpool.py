"""``max_unpool``: the inverse of max pooling, which is told where each maximum was."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...registry import register
from ..common.alignment import common_mesh, torch_judges
from ..common.batch_parallel import by_batch, image_names


def _max_unpool(
    input: Any,
    indices: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    output_size: Any = None,
    *,
    spatial: int,
) -> Any:
    function = getattr(F, f"max_unpool{spatial}d")
    if common_mesh(function.__name__, [input, indices]) is None:
        return NotImplemented
    size = None if output_size is None else tuple(output_size)
    meta = torch_judges(function, input, indices, kernel_size, stride, padding, size)
    names = image_names(input.ndim, spatial)
    out = list(meta.shape[-spatial:])

    def unpool(x: Tensor, places: Tensor) -> Tensor:
        return function(x, places, kernel_size, stride, padding, out)

    return by_batch(function.__name__, unpool, [(input, names), (indices, names)], [(meta.shape, names)])



for _n in (1, 2, 3):
    register(getattr(F, f"max_unpool{_n}d"))(partial(_max_unpool, spatial=_n))
