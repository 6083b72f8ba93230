"""Zeros that are put next to a part of a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .._compat import hidden_from_program
from ..layout.intervals import resized
from ..layout.strides import cat_like
from ..ranks.cuda_graphs import is_capturing

MOST_BYTES = 8 << 20  # of zeros that are kept


def zeros_of(shape: Sequence[int], like: Tensor) -> Tensor:
    """Zeros of the dtype and device of ``like``, which nobody may write to.

    On an accelerator they are a view of zeros that are kept, so that no kernel has to write them in each call.
    """
    n = math.prod(shape)
    if like.is_cpu or type(like) is not Tensor or n * like.element_size() > MOST_BYTES or is_capturing(like.device):
        return like.new_zeros(shape)
    # Sizes are rounded up to powers of two, so there are few of these.
    return _kept(1 << max(0, n - 1).bit_length(), like.dtype, like.device)[:n].view(shape)


@lru_cache(maxsize=64)
def _kept(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with hidden_from_program():
        # Copied from the host, which waits for it: whatever stream they are used on, they are zeros by then.
        return torch.zeros(n, dtype=dtype, device="cpu").to(device)


def padded(t: Tensor, around: Sequence[int]) -> Tensor:
    """``torch.constant_pad_nd(t, around)``: zeros before and after dims from the last one on; negative: what to crop.

    Along one dim it is one kernel, where torch calls one for zeros everywhere, and one for the rest; but what autograd
    is to differentiate is torch's.
    """
    places = [i for i in range(0, len(around), 2) if around[i] or around[i + 1]]
    if len(places) != 1 or (t.requires_grad and torch.is_grad_enabled()):
        return torch.constant_pad_nd(t, around)
    dim = t.ndim - 1 - places[0] // 2
    before, after = around[places[0]], around[places[0] + 1]
    start, stop = max(0, -before), t.shape[dim] - max(0, -after)
    if before <= 0 and after <= 0:
        return t.narrow(dim, start, stop - start).clone()
    pieces = [t.narrow(dim, start, stop - start)]
    if before > 0:
        pieces.insert(0, zeros_of(resized(t.shape, dim, before), t))
    if after > 0:
        pieces.append(zeros_of(resized(t.shape, dim, after), t))
    return cat_like(pieces, dim, t, resized(t.shape, dim, before + t.shape[dim] + after))
