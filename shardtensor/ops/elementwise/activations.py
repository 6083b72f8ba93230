"""Activations that are not just elementwise: ``glu``, ``rrelu``, ``logsigmoid``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from ..._compat import nn_functions
from ...layout.geometry import map_boundaries
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Composed, operator

_aten = torch.ops.aten


@operator(F.glu, nn_functions.glu, _aten.glu, tensors="input")
def plan_glu(call: Arguments, input: ShardTensorSpec, dim: int = -1) -> Composed:
    """The two halves of a sharded dim meet where both have half the shard sizes: a rank computes half of its shard."""
    call.returned(F.glu, input, dim)
    m = input.sharded_dims().get(dim % len(input.shape))
    sizes = None if m is None else {m: map_boundaries(input.sizes_along(m), lambda boundary: boundary // 2)}

    def glu(x: Any) -> Any:
        halves = x.chunk(2, dim)
        if sizes is not None:
            halves = [half.redistribute(shard_sizes=sizes) for half in halves]
        return halves[0] * halves[1].sigmoid()

    return Composed(glu)


@operator(F.rrelu, torch.rrelu, _aten.rrelu, torch.rrelu_, _aten.rrelu_, tensors="input", partial="input")
def plan_rrelu(
    call: Arguments,
    input: ShardTensorSpec,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
    generator: Generator | None = None,
) -> Composed:
    """Slopes are drawn like all random numbers of shards; torch's own writes them into a plain tensor."""
    inplace = inplace or call.name == "rrelu_"

    def rrelu(x: Any) -> Any:
        if not training:
            return F.leaky_relu(x, (lower + upper) / 2, inplace=inplace)
        slopes = torch.empty_like(x.detach()).uniform_(lower, upper, generator=generator)
        result = torch.where(x <= 0, x * slopes, x)
        return x.copy_(result) if inplace else result

    return Composed(rrelu)


@operator(F.logsigmoid, tensors="input")
def plan_log_sigmoid(call: Arguments, input: ShardTensorSpec) -> Composed:
    """By parts: torch's own has a second result, whose shape each backend decides for itself."""

    def log_sigmoid(x: Any) -> Tensor:
        return torch.minimum(x, torch.zeros_like(x)) - torch.log1p(torch.exp(-x.abs()))

    return Composed(log_sigmoid)
