"""Activations that are not just elementwise: ``glu``, ``rrelu``, ``logsigmoid``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ...geometry import map_cuts
from ...registry import register
from ...tensor import ShardTensor, redistribute_to
from ..common.alignment import torch_judges

_aten = torch.ops.aten


@register(F.glu, torch._C._nn.glu, _aten.glu)
def _glu(input: Any, dim: int = -1) -> Any:
    """The two halves of a sharded dim meet where both are spread evenly: a rank gets half as much as it had of each."""
    if not isinstance(input, ShardTensor):
        return NotImplemented
    torch_judges(F.glu, input, dim)
    x = redistribute_to(input, input._spec.for_gradient())
    halves = x.chunk(2, dim)
    m = x._spec.sharded_dims().get(dim % x.ndim)
    if m is not None:
        sizes = map_cuts(x._spec.cut(m), lambda c: c // 2)
        halves = tuple(half.redistribute(shard_sizes={m: sizes}) for half in halves)
    return halves[0] * halves[1].sigmoid()


@register(F.rrelu, torch.rrelu, _aten.rrelu)
def _rrelu(
    input: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: Any = False, **kwargs: Any
) -> Any:
    """Slopes are drawn like all random numbers of shards; torch's own writes them into a plain tensor."""
    if not isinstance(input, ShardTensor):
        return NotImplemented
    generator = kwargs.get("generator", inplace if isinstance(inplace, torch.Generator) else None)
    if not training:
        return F.leaky_relu(input, (lower + upper) / 2, inplace=inplace is True)
    slopes = torch.empty_like(input.detach()).uniform_(lower, upper, generator=generator)
    result = torch.where(input <= 0, input * slopes, input)
    return input.copy_(result) if inplace is True else result


@register(torch.rrelu_, _aten.rrelu_)
def _rrelu_(
    input: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Any:
    return _rrelu(input, lower, upper, training, True, generator=generator)


@register(torch.nn.functional.logsigmoid)
def _log_sigmoid(input: Any) -> Any:
    """By parts: torch's own has a second result, whose shape is each backend's own affair."""
    if not isinstance(input, ShardTensor):
        return NotImplemented
    return torch.minimum(input, torch.zeros_like(input)) - torch.log1p(torch.exp(-input.abs()))
