"""Tables: ``embedding`` and its gradient, ``embedding_bag``, ``one_hot``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._compat import TensorMeta
from ...dispatch.aten_calls import run
from ...dispatch.planning import AtenCall, AtenPlan
from ...dispatch.registry import DECLINED
from ...dispatch.tensor import ShardTensor
from ...errors import refuse
from ...layout.spec import ShardTensorSpec
from ...layout.strides import contiguous_stride
from ...operators.declaration import Arguments, Composed, operator
from ...operators.plan import LocalPlan, Plan
from ..common.alignment import replicated, same_layout, widened
from .index_layout import INDEXED
from .index_operators import Read, any_sharded, indexed, indexes_a_shard
from .index_plan import labelled

_aten = torch.ops.aten


@operator(
    F.embedding_bag,
    tensors="input weight offsets per_sample_weights",
    partial="input weight offsets per_sample_weights",
)
def _embedding_bag(
    call: Arguments,
    input: ShardTensorSpec,
    weight: ShardTensorSpec,
    offsets: ShardTensorSpec | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: ShardTensorSpec | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Composed:
    if not any_sharded(input, weight, offsets, per_sample_weights):
        return DECLINED
    if max_norm is not None:
        raise call.refuse("max_norm writes to the table", "renormalize it beforehand")
    call.returned(
        F.embedding_bag,
        *(input, weight, offsets),
        mode=mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=padding_idx,
    )
    by_input, ignored = bool(input.sharded_dims()), None if padding_idx is None else padding_idx % weight.shape[0]

    def bags(indices: Tensor, table: Tensor, begins: Tensor | None, weights: Tensor | None) -> Tensor:
        rows = F.embedding(indices, table, scale_grad_by_freq=scale_grad_by_freq)
        # Sharded along the bags, which the reductions below are about.
        rows = same_layout(rows, indices if by_input else weights)
        kept = torch.ones_like(indices, dtype=torch.bool) if ignored is None else indices != ignored
        # In float32 where they are of half precision: what is added and divided is to be rounded once.
        (rows,) = widened(rows)
        if weights is not None:
            rows = rows * weights.unsqueeze(-1)
        if begins is None:
            return _of_equal_bags(rows, kept.unsqueeze(-1), mode).to(table.dtype)
        place = torch.arange(indices.shape[0], dtype=begins.dtype, device=begins.device)
        bag = torch.searchsorted(begins, place, right=True) - 1
        count = begins.shape[0] - include_last_offset
        if include_last_offset:
            kept, bag = kept & (bag < count), bag.clamp(max=max(0, count - 1))
        return _of_any_bags(rows, kept.unsqueeze(-1), bag, count, mode).to(table.dtype)

    return Composed(bags)


def _of_equal_bags(rows: Tensor, kept: Tensor, mode: str) -> Tensor:
    if mode == "max":
        most = rows.masked_fill(kept.logical_not(), float("-inf"))
        return torch.where(kept.any(1), most.max(1).values, 0.0) if rows.shape[1] else rows.sum(1)
    total = torch.where(kept, rows, 0.0).sum(1)
    return total / kept.sum(1).clamp(min=1) if mode == "mean" else total


def _of_any_bags(rows: Tensor, kept: Tensor, bag: Tensor, bags: int, mode: str) -> Tensor:
    some = next(t for t in (rows, kept, bag) if isinstance(t, ShardTensor))

    def everywhere(value: float, width: int) -> Tensor:
        return replicated(torch.full((bags, width), value, dtype=rows.dtype, device=rows.device), some._spec)

    count = torch.index_add(everywhere(0.0, 1), 0, bag, kept.to(rows.dtype))
    if mode == "max":
        lowest = everywhere(float("-inf"), rows.shape[1])
        most = torch.index_reduce(lowest, 0, bag, rows.masked_fill(kept.logical_not(), float("-inf")), "amax")
        return torch.where(count > 0, most, 0.0)
    total = torch.index_add(everywhere(0.0, rows.shape[1]), 0, bag, torch.where(kept, rows, 0.0))
    return total / count.clamp(min=1) if mode == "mean" else total


@operator(F.embedding, tensors="input weight", partial="input weight")
def _embedding_above_autograd(
    call: Arguments,
    input: ShardTensorSpec,
    weight: ShardTensorSpec,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Composed:
    """Of a table whose rows are sharded, with gradients that depend on how often a row is asked for, or sparse ones."""
    by_row = len(weight.shape) == 2 and indexes_a_shard(weight, [0])
    if len(weight.shape) != 2 or not (by_row or ((scale_grad_by_freq or sparse) and any_sharded(input, weight))):
        return DECLINED
    if max_norm is not None:
        raise call.refuse("max_norm writes to the table", "renormalize the table beforehand")
    n = weight.shape[0]
    if padding_idx is not None and not -n <= padding_idx < n:
        raise AssertionError("padding_idx must be within num_embeddings")

    def read(table: ShardTensor, indices: Sequence[Tensor]) -> Any:
        return run(_aten.embedding.default, (table, *indices), {})

    def add(zeros: ShardTensor, indices: Sequence[Tensor], grad: Tensor) -> Any:
        return _aten.index_put.default(zeros, list(indices), grad, True)

    def embed(indices: Tensor, table: Tensor) -> Tensor:
        if sparse and not by_row and table.requires_grad and torch.is_grad_enabled():
            reason = "a sparse gradient of the table is the same on every rank, and no rank has all of its rows"
            remedy = "pass sparse=False, and use an optimizer of dense gradients, such as Adam instead of SparseAdam"
            raise refuse("embedding", [indices, table], reason, remedy)
        rows = Read.apply(table, read, add, indices) if by_row else F.embedding(indices, table)
        if padding_idx is not None:
            padded = (indices == padding_idx % n).unsqueeze(-1)
            rows = torch.where(padded, rows.detach(), rows)
        if scale_grad_by_freq and rows.requires_grad:
            often = _frequencies(indices, table)
            rows.register_hook(lambda grad: same_layout(grad, often) / often)
        return rows

    return Composed(embed)


def _frequencies(indices: Tensor, table: Tensor) -> Tensor:
    """For each index how often there is the like, with a last dim of length 1."""
    spec = next(t for t in (table, indices) if isinstance(t, ShardTensor))._spec
    counts: Tensor = replicated(torch.zeros(table.shape[0], dtype=torch.int64, device=table.device), spec)
    flat = indices.reshape(-1)
    counts = torch.index_add(counts, 0, flat, torch.ones_like(flat, dtype=torch.int64))
    return indexed(counts, [indices]).unsqueeze(-1)


@operator(_aten.embedding.default)
def _embedding(call: AtenCall) -> AtenPlan:
    names = [f"index {j}" for j in range(len(call.args[1].shape))]
    return labelled(call, {(0,): [INDEXED, "row"], (1,): names}, [*names, "row"], indexed={(1,): 0}, picks=True)


@operator(_aten.embedding_dense_backward.default)
def _embedding_backward(call: AtenCall) -> AtenPlan:
    names = [f"index {j}" for j in range(len(call.args[1].shape))]
    by_frequency = call.args[4]
    if by_frequency and any(spec.sharded_dims() for spec in call.specs):
        raise call.refuse("scale_grad_by_freq counts the indices of one shard only", "set it to False")
    return labelled(call, {(0,): [*names, "row"], (1,): names}, [INDEXED, "row"], accumulates="sum")


@operator(F.one_hot, tensors="tensor")
def _one_hot(call: Arguments, tensor: ShardTensorSpec, num_classes: int = -1) -> Plan:
    dtype = tensor.tensor_meta.dtype
    if dtype != torch.int64:
        raise RuntimeError(f"one_hot is only applicable to index tensor of type LongTensor, not {dtype}")
    if num_classes == -1:
        return Composed(lambda x: F.one_hot(x, int(x.max()) + 1))
    shape = torch.Size((*tensor.shape, num_classes))
    out = tensor.replace(meta=TensorMeta(shape, contiguous_stride(shape), dtype))
    return LocalPlan(lambda x: F.one_hot(x, num_classes), out)
