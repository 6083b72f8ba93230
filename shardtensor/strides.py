"""Strides of tensors that are described before they exist, row-major or channels-last, and what torch asks of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["CHANNELS_LAST", "as_bytes", "contiguous_stride", "stride_like"]

# The memory formats with the channels innermost, by number of dims.
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides."""
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * max(1, shape[d + 1])  # as torch counts dims of size 0
    return tuple(strides)


def stride_like(local: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of the global tensor: channels-last where the local tensor is, row-major otherwise."""
    fmt = CHANNELS_LAST.get(local.ndim)
    if fmt is not None and not local.is_contiguous() and _is_channels_last(local, fmt):
        inner = contiguous_stride([shape[0], *shape[2:], shape[1]])
        return (inner[0], inner[-1], *inner[1:-1])
    return contiguous_stride(shape)


def _is_channels_last(t: Tensor, fmt: torch.memory_format) -> bool:
    """Whether torch gives results of this format. Of a single sample it looks at the stride of dim 0, too."""
    return t.is_contiguous(memory_format=fmt) and (t.shape[0] != 1 or t.stride(0) >= t.stride(2) * t.shape[2])


def as_bytes(tensor: Tensor) -> Tensor:
    """The numbers of a tensor as bytes, in row-major order and one dim; the same memory if they lie there like that."""
    flat = tensor.contiguous().view(-1)
    # A single number may have any stride, but torch views it as bytes only if it has stride 1.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)
