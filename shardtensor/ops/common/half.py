"""Contributions of half precision in float32, see [Note: rounded once] in redistribute.py.

torch's kernels sum half precision in float32 and round the sum. A rank's contribution must not be rounded yet; so it is
computed from operands that are converted to float32, which changes none of their values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .alignment import wide_dtype

ROWS = 4096  # that are converted at a time


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``t.to(dtype)``, which takes the host a microsecond also where it does nothing."""
    return t if t.dtype == dtype else t.to(dtype)


def is_half(t: Tensor) -> bool:
    """Whether the tensor is one of half precision."""
    return wide_dtype(t.dtype) != t.dtype


def widened(*tensors: Any) -> list[Any]:
    """Tensors of half precision in float32, all else as it is."""
    return [t.to(torch.float32) if isinstance(t, Tensor) and is_half(t) else t for t in tensors]


def product(rows: Tensor, others: Tensor) -> Tensor:
    """``rows.t() @ others`` of two matrices, in float32 where they are of half precision.

    >>> product(torch.ones(3, 2).bfloat16(), torch.ones(3, 4).bfloat16()).dtype
    torch.float32
    """
    if not is_half(rows):
        return torch.mm(rows.t(), others)
    if rows.is_cuda:
        return torch.mm(rows.t(), others, out_dtype=torch.float32)
    total = rows.new_zeros(rows.shape[1], others.shape[1], dtype=torch.float32)
    for i in range(0, len(rows), ROWS):
        some, of_others = (t[i : i + ROWS].to(torch.float32) for t in (rows, others))
        total.addmm_(some.t(), of_others)
    return total
