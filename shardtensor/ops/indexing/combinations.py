"""``combinations``: entries looked up by the combinations of their positions."""

from __future__ import annotations

from typing import Any

import torch

from ...registry import register
from ..common.alignment import is_cut
from .gather import look_up


@register(torch.combinations)
def _combinations(input: Any, r: int = 2, with_replacement: bool = False) -> Any:
    if not is_cut(input) or input.ndim != 1:
        return NotImplemented
    numbers = torch.combinations(torch.arange(input.shape[0], device=input.device), r, with_replacement)
    return look_up(input, [numbers])
