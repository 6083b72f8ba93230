"""The dtype in which a Partial is held, sent and summed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement


@cache
def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to sum in: half precision is summed in float32, as torch's kernels do, for it would overflow."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def held_dtype(placements: Sequence[Placement], dtype: torch.dtype) -> torch.dtype:
    """The dtype of a local tensor: for contributions to a sum or a product the wide one, see [Note: rounded once]."""
    summed = any(isinstance(p, Partial) and p.reduce_op in ("sum", "product") for p in placements)
    return wide_dtype(dtype) if summed else dtype
