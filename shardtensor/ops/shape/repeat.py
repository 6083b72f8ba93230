"""``repeat``, ``tile`` and ``repeat_interleave``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsIndex

import torch
from torch import Tensor

from ..._compat.c10d import group_along
from ...communication.redistribute import all_gather
from ...dispatch.index_findings import INDICES
from ...dispatch.registry import DECLINED, register
from ...dispatch.tensor import ShardTensor, wrap
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Composed, LocalPlan, Plan, operator
from ...ranks.cuda_graphs import check_has_values
from ..common.alignment import is_sharded, reduced_value
from .view import carry, dim_of

_aten = torch.ops.aten


@operator(torch.repeat_interleave, Tensor.repeat_interleave, tensors="input repeats", partial="input")
def _repeat_interleave(
    call: Arguments,
    input: ShardTensorSpec,
    repeats: ShardTensorSpec | int | None = None,
    dim: int | None = None,
    *,
    output_size: int | None = None,
) -> Composed:
    """A number of repeats stays with the owners; numbers for each entry are an index, sharded as they are."""
    d = 0 if dim is None else dim_of(input, dim)
    sharded = [spec for spec in (input, repeats) if isinstance(spec, ShardTensorSpec) and spec.sharded_dims()]
    if repeats is None or d is None or not sharded:
        return DECLINED
    if not isinstance(repeats, ShardTensorSpec):
        return Composed(lambda x, _: _each_repeated(x.reshape(-1) if dim is None else x, d, repeats))

    def repeat(x: Tensor, counts: ShardTensor) -> Tensor:
        x = x.reshape(-1) if dim is None else x
        if counts.numel() == 1:
            return _each_repeated(x, d, int(counts))
        if counts.ndim != 1 or counts.numel() != x.shape[d]:
            raise RuntimeError("repeats must have the same size as input along dim")
        values = counts if is_sharded(counts) else counts.to_local()
        return torch.index_select(x, d, torch.repeat_interleave(values, output_size=output_size))

    return Composed(repeat)


# The shape of the result depends on data, so there is no plan.
@register(_aten.repeat_interleave.Tensor)
def _numbers_repeated(counts: ShardTensor, *, output_size: int | None = None) -> ShardTensor:
    """The number of each entry, as often as the entry says, with its owner."""
    if not counts._spec.sharded_dims() or counts.ndim != 1 or counts.dtype not in INDICES:
        return DECLINED
    check_has_values("repeat_interleave", counts)
    local, spec = reduced_value(counts)
    m, (start, _) = spec.sharded_dims()[0], spec.own_interval(0)
    mine = torch.stack([local.sum(), (local < 0).sum()])
    totals, negative = zip(*all_gather(mine, group_along(spec.mesh, m)).tolist(), strict=True)
    if any(negative):
        raise RuntimeError("repeats can not be negative")
    if output_size is not None and output_size != sum(totals):
        raise RuntimeError(f"repeat_interleave: output_size is {output_size}, but the repeats add up to {sum(totals)}")
    numbers = torch.repeat_interleave(local, output_size=totals[spec.coordinate[m]]) + start
    shape, sizes = (sum(totals),), {m: totals}
    return wrap(numbers, ShardTensorSpec.make(spec.mesh, spec.placements, shape, counts.dtype, shard_sizes=sizes))


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


@operator(Tensor.repeat, _aten.repeat, tensors="input", partial="input")
def _repeat(
    call: Arguments, input: ShardTensorSpec, *values: int | Sequence[int], repeats: Sequence[int] | None = None
) -> Plan:
    """A sharded dim is joined to itself; the others are repeated in place."""
    counts = _counts(values, repeats)
    if counts is None:
        return DECLINED
    meta = call.returned(Tensor.repeat, input, counts)
    new = len(counts) - len(input.shape)
    joined = {d: counts[d + new] for d in input.sharded_dims() if counts[d + new] != 1}
    if not joined:
        return LocalPlan(
            lambda x: x.repeat(counts), carry(call, input, meta, {d: d + new for d in input.sharded_dims()})
        )
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
