"""``repeat``, ``tile`` and ``repeat_interleave``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...errors import refuse
from ...operators import operator
from ...planning import Call, Plan
from ...registry import register
from ...tensor import ShardTensor
from ..common.alignment import is_cut
from .view import carry, dim_of

_aten = torch.ops.aten


@register(torch.repeat_interleave, Tensor.repeat_interleave)
def _repeat_interleave(
    input: Any, repeats: Any = None, dim: int | None = None, *, output_size: int | None = None
) -> Any:
    """A number of repeats stays with the owners; numbers for each entry are an index."""
    if not is_cut(input) or repeats is None:
        return NotImplemented
    if isinstance(repeats, DTensor):
        if not all(p.is_replicate() for p in repeats.placements):
            raise refuse(
                "repeat_interleave",
                [input, repeats],
                "how long the result is depends on the values of sharded repeats",
                "redistribute the repeats to Replicate()",
            )
        repeats = repeats.to_local()
    if dim is None:
        input, dim = input.reshape(-1), 0
    d = dim_of(input, dim)
    if d is None:
        return NotImplemented
    if isinstance(repeats, Tensor) and repeats.numel() == 1:
        repeats = int(repeats)
    if isinstance(repeats, int):
        if repeats < 0:
            raise RuntimeError("repeats has to be non-negative")
        return input.unsqueeze(d + 1).expand(*input.shape[: d + 1], repeats, *input.shape[d + 1 :]).flatten(d, d + 1)
    if repeats.ndim != 1 or repeats.numel() != input.shape[d]:
        raise RuntimeError("repeats must have the same size as input along dim")
    return torch.index_select(input, d, torch.repeat_interleave(repeats, output_size=output_size))


@register(Tensor.repeat)
def _repeat_function(self: Any, *repeats: Any, **kwargs: Any) -> Any:
    """A sharded dim is joined to itself; the others are repeated in place."""
    given = kwargs.get("repeats", repeats[0] if len(repeats) == 1 and not isinstance(repeats[0], int) else repeats)
    counts = [int(n) for n in given]
    if not isinstance(self, ShardTensor) or len(counts) < self.ndim or min(counts, default=0) < 0:
        return NotImplemented
    x, new = self, len(counts) - self.ndim
    for d in self._spec.sharded_dims():
        if counts[d + new] != 1:
            x = torch.cat([x] * counts[d + new], d) if counts[d + new] else x.narrow(d, 0, 0)
            counts[d + new] = 1
    if x is self:
        return NotImplemented
    return x.repeat(counts) if any(n != 1 for n in counts) or new else x


@register(torch.tile, Tensor.tile)
def _tile(input: Any, *dims: Any, **kwargs: Any) -> Any:
    given = kwargs.get("dims", dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims)
    counts = [int(n) for n in given]
    if not isinstance(input, ShardTensor):
        return NotImplemented
    return input.repeat([1] * (input.ndim - len(counts)) + counts)


@operator(_aten.repeat.default)
def _repeat(call: Call) -> Plan:
    spec = call.specs[0]
    new = call.meta.ndim - len(spec.shape)
    counts = call.args[1]
    return Plan(carry(call, spec, call.meta, {d: d + new for d in range(len(spec.shape)) if counts[d + new] == 1}))
