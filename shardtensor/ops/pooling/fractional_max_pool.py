"""``fractional_max_pool``: pooling over windows of random sizes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...registry import register
from ..common.alignment import common_mesh, described
from ..common.batch_parallel import Names, by_batch, image_names


def _fractional_max_pool(
    input: Any,
    kernel_size: Any,
    output_size: Any = None,
    output_ratio: Any = None,
    return_indices: bool = False,
    _random_samples: Any = None,
    *,
    spatial: int,
    indices: bool = False,
) -> Any:
    """The samples, a few numbers per channel, are drawn as on one device: by every rank for the whole tensor."""
    function = getattr(F, f"fractional_max_pool{spatial}d_with_indices")
    if common_mesh(function.__name__, [input]) is None:
        return NotImplemented
    names = image_names(input.ndim, spatial)
    batch = input.shape[0] if input.ndim == spatial + 2 else 1
    if _random_samples is None:
        _random_samples = torch.rand(
            batch, input.shape[-spatial - 1], spatial, dtype=input.dtype, device=input.device
        )
    values, _ = function(described(input), kernel_size, output_size, output_ratio, True, described(_random_samples))
    out = list(values.shape[-spatial:])

    def pool(x: Tensor, samples: Tensor) -> Any:
        return function(x, kernel_size, out, None, True, samples)

    sample_names: Names = ["batch" if input.ndim == spatial + 2 else None, "channels", None]
    operands = [(input, names), (_random_samples, sample_names)]
    pooled = by_batch(function.__name__, pool, operands, [(values.shape, names)] * 2)
    return pooled if return_indices or indices else pooled[0]


for _n in (2, 3):
    _name = f"fractional_max_pool{_n}d"
    register(getattr(F, _name))(partial(_fractional_max_pool, spatial=_n))
    register(getattr(F, f"{_name}_with_indices"))(partial(_fractional_max_pool, spatial=_n, indices=True))
