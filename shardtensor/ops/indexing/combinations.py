"""``combinations``: entries gathered by the combinations of their positions."""

from __future__ import annotations

import torch

from ...dispatch.registry import DECLINED
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Composed, operator
from .gather import gathered


@operator(torch.combinations, tensors="input", partial="input")
def _combinations(call: Arguments, input: ShardTensorSpec, r: int = 2, with_replacement: bool = False) -> Composed:
    if not input.sharded_dims() or len(input.shape) != 1:
        return DECLINED
    n, device = input.shape[0], call.device

    def combine(x: torch.Tensor) -> torch.Tensor:
        return gathered(x, [torch.combinations(torch.arange(n, device=device), r, with_replacement)])

    return Composed(combine)
