"""``repeat``, ``tile`` and ``repeat_interleave``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsIndex

import torch
from torch import Tensor

from ...dispatch.planning import AtenCall, AtenPlan
from ...dispatch.registry import DECLINED
from ...dispatch.tensor import ShardTensor
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Composed, operator
from .view import carry, dim_of

_aten = torch.ops.aten


@operator(torch.repeat_interleave, Tensor.repeat_interleave, tensors="input repeats", partial="input repeats")
def _repeat_interleave(
    call: Arguments,
    input: ShardTensorSpec,
    repeats: ShardTensorSpec | int | None = None,
    dim: int | None = None,
    *,
    output_size: int | None = None,
) -> Composed:
    """A number of repeats stays with the owners; numbers for each entry are an index."""
    d = 0 if dim is None else dim_of(input, dim)
    if not input.sharded_dims() or repeats is None or d is None:
        return DECLINED
    if not isinstance(repeats, ShardTensorSpec):
        return Composed(lambda x, _: _each_repeated(x.reshape(-1) if dim is None else x, d, repeats))
    if not repeats.is_replicate():
        raise call.refuse(
            "the length of the result depends on the values of sharded repeats",
            "redistribute the repeats to Replicate()",
        )

    def repeat(x: Tensor, places: ShardTensor) -> Tensor:
        x = x.reshape(-1) if dim is None else x
        values = places.to_local()
        if values.numel() == 1:
            return _each_repeated(x, d, int(values))
        if values.ndim != 1 or values.numel() != x.shape[d]:
            raise RuntimeError("repeats must have the same size as input along dim")
        return torch.index_select(x, d, torch.repeat_interleave(values, output_size=output_size))

    return Composed(repeat)


def _each_repeated(x: Tensor, d: int, repeats: int) -> Tensor:
    """Every entry along a dim, so many times."""
    if repeats < 0:
        raise RuntimeError("repeats has to be non-negative")
    wide = x.unsqueeze(d + 1).expand(*x.shape[: d + 1], repeats, *x.shape[d + 1 :])
    # A copy in any case: where the dim has one entry, on any rank, the flattened one would be a view.
    return wide.clone(memory_format=torch.contiguous_format).flatten(d, d + 1)


def _counts(values: Sequence[int | Sequence[int]], given: Sequence[int] | None) -> list[int] | None:
    """The numbers of a call with ``(2, 3)``, ``((2, 3),)`` or by keyword; None where one of them is a tensor."""
    entries: Sequence[object] = values if given is None else given
    if given is None and len(values) == 1 and isinstance(values[0], Sequence):
        entries = values[0]
    numbers = [int(n) for n in entries if isinstance(n, SupportsIndex)]
    return numbers if len(numbers) == len(entries) else None


@operator(Tensor.repeat, tensors="input", partial="input")
def _repeat_above_autograd(
    call: Arguments, input: ShardTensorSpec, *values: int | Sequence[int], repeats: Sequence[int] | None = None
) -> Composed:
    """A sharded dim is joined to itself; the others are repeated in place."""
    counts = _counts(values, repeats)
    if counts is None or len(counts) < len(input.shape) or min(counts, default=0) < 0:
        return DECLINED
    new = len(counts) - len(input.shape)
    joined = {d: counts[d + new] for d in input.sharded_dims() if counts[d + new] != 1}
    if not joined:
        return DECLINED
    rest = [1 if d - new in joined else n for d, n in enumerate(counts)]

    def repeat(x: Tensor) -> Tensor:
        for d, n in joined.items():
            x = torch.cat([x] * n, d) if n else x.narrow(d, 0, 0)
        return x.repeat(rest) if any(n != 1 for n in rest) or new else x

    return Composed(repeat)


@operator(torch.tile, Tensor.tile, tensors="input", partial="input")
def _tile(
    call: Arguments, input: ShardTensorSpec, *values: int | Sequence[int], dims: Sequence[int] | None = None
) -> Composed:
    counts = _counts(values, dims)
    if counts is None:
        return DECLINED
    counts = [1] * (len(input.shape) - len(counts)) + counts
    return Composed(lambda x: x.repeat(counts))


@operator(_aten.repeat.default)
def _repeat(call: AtenCall) -> AtenPlan:
    spec = call.specs[0]
    new = call.meta.ndim - len(spec.shape)
    counts = call.args[1]
    return AtenPlan(carry(call, spec, call.meta, {d: d + new for d in range(len(spec.shape)) if counts[d + new] == 1}))
