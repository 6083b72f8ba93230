"""Tables: ``embedding`` and its gradient, ``embedding_bag``, ``one_hot``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ...errors import refuse
from ...operators import operator
from ...planning import Call, Plan
from ...registry import register
from ...tensor import ShardTensor, run
from ..common.alignment import described, is_cut, laid_like, replicated
from .gather import LookUp, look_up, looks_into_a_shard
from .index_plan import LOOKED_UP, labelled

_aten = torch.ops.aten

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


@register(F.embedding)
def _embedding_function(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Of a table whose rows are sharded, or with gradients that depend on how often a row is asked for."""
    if weight.ndim != 2 or not (looks_into_a_shard(weight, [0]) or (scale_grad_by_freq and is_cut(input, weight))):
        return NotImplemented
    if max_norm is not None:
        raise refuse("embedding", [weight], "max_norm writes to the table", "renormalize the table beforehand")
    n = weight.shape[0]
    if padding_idx is not None and not -n <= padding_idx < n:
        raise AssertionError("padding_idx must be within num_embeddings")
    if looks_into_a_shard(weight, [0]):
        rows = LookUp.apply(
            weight,
            lambda t, found: run(_aten.embedding.default, (t, *found), {}),
            lambda zeros, found, grad: _aten.index_put.default(zeros, list(found), grad, True),
            input,
        )
    else:
        rows = F.embedding(input, weight)
    if padding_idx is not None:
        padded = (input == padding_idx % n).unsqueeze(-1)
        rows = torch.where(padded, rows.detach(), rows)
    if scale_grad_by_freq and rows.requires_grad:
        spec = (weight if isinstance(weight, ShardTensor) else input)._spec
        counts = replicated(torch.zeros(n, dtype=torch.int64, device=weight.device), spec)
        flat = input.reshape(-1)
        counts = torch.index_add(counts, 0, flat, torch.ones_like(flat, dtype=torch.int64))
        often = look_up(counts, [input]).unsqueeze(-1)
        rows.register_hook(lambda grad: laid_like(grad, often) / often)
    return rows


@operator(_aten.embedding.default)
def _embedding(call: Call) -> Plan:
    names = [f"index {j}" for j in range(len(call.args[1].shape))]
    return labelled(
        call, {(0,): [LOOKED_UP, "row"], (1,): names}, [*names, "row"], indexed={(1,): 0}, picks=True
    )


@operator(_aten.embedding_dense_backward.default)
def _embedding_backward(call: Call) -> Plan:
    names = [f"index {j}" for j in range(len(call.args[1].shape))]
    by_frequency = call.args[4]
    if by_frequency and any(spec.sharded_dims() for spec in call.specs):
        raise call.refuse("scale_grad_by_freq counts the indices of one shard only", "set it to False")
    return labelled(call, {(0,): [*names, "row"], (1,): names}, [LOOKED_UP, "row"], accumulates=True)


@register(F.one_hot)
def _one_hot(tensor: Any, num_classes: int = -1) -> Any:
    if not isinstance(tensor, ShardTensor):
        return NotImplemented
    if tensor.dtype != torch.int64:
        raise RuntimeError(f"one_hot is only applicable to index tensor of type LongTensor, not {tensor.dtype}")
    if num_classes == -1:
        num_classes = int(tensor.max()) + 1
    classes = torch.arange(num_classes, device=tensor.device)
    return (tensor.unsqueeze(-1) == classes).long()
