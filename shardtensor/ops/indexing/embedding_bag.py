"""F.embedding_bag: embeddings, and what a bag makes of its rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ...errors import refuse
from ...registry import register
from ...tensor import ShardTensor
from ..common.alignment import described
from .gather import is_cut, laid_like, replicated

__all__: list[str] = []


@register(F.embedding_bag)
def _embedding_bag(
    input: Any,
    weight: Any,
    offsets: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    if not is_cut(input, weight, offsets, per_sample_weights):
        return NotImplemented
    if max_norm is not None:
        raise refuse("embedding_bag", [input, weight], "max_norm writes to the table", "renormalize it beforehand")
    F.embedding_bag(  # torch's own errors
        described(input),
        described(weight),
        described(offsets),
        mode=mode,
        per_sample_weights=described(per_sample_weights),
        include_last_offset=include_last_offset,
        padding_idx=padding_idx,
    )
    rows = F.embedding(input, weight, scale_grad_by_freq=scale_grad_by_freq)
    # Cut along the bags, which the reductions below are about.
    rows = laid_like(rows, input if is_cut(input) else per_sample_weights)
    kept = torch.ones_like(input, dtype=torch.bool)
    if padding_idx is not None:
        kept = input != padding_idx % weight.shape[0]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if input.ndim == 2:
        return _of_equal_bags(rows, kept.unsqueeze(-1), mode)
    place = torch.arange(input.shape[0], dtype=offsets.dtype, device=offsets.device)
    bag = torch.searchsorted(offsets, place, right=True) - 1
    bags = offsets.shape[0] - include_last_offset
    if include_last_offset:
        kept, bag = kept & (bag < bags), bag.clamp(max=max(0, bags - 1))
    return _of_any_bags(rows, kept.unsqueeze(-1), bag, bags, mode)


def _of_equal_bags(rows: Any, kept: Any, mode: str) -> Any:
    if mode == "max":
        most = rows.masked_fill(kept.logical_not(), float("-inf"))
        return torch.where(kept.any(1), most.max(1).values, 0.0) if rows.shape[1] else rows.sum(1)
    total = torch.where(kept, rows, 0.0).sum(1)
    return total / kept.sum(1).clamp(min=1) if mode == "mean" else total


def _of_any_bags(rows: Any, kept: Any, bag: Any, bags: int, mode: str) -> Any:
    some = next(t for t in (rows, kept, bag) if isinstance(t, ShardTensor))

    def everywhere(value: float, width: int) -> Any:
        return replicated(torch.full((bags, width), value, dtype=rows.dtype, device=rows.device), some._spec)

    count = torch.index_add(everywhere(0.0, 1), 0, bag, kept.to(rows.dtype))
    if mode == "max":
        lowest = everywhere(float("-inf"), rows.shape[1])
        most = torch.index_reduce(lowest, 0, bag, rows.masked_fill(kept.logical_not(), float("-inf")), "amax")
        return torch.where(count > 0, most, 0.0)
    total = torch.index_add(everywhere(0.0, rows.shape[1]), 0, bag, torch.where(kept, rows, 0.0))
    return total / count.clamp(min=1) if mode == "mean" else total
