"""Histograms: every rank counts its own elements, so that counts are a Partial; densities come out reduced.

Where no range is given, the ranks agree on the least and the greatest value by one all-reduce. So bins depend on data,
and these operators are registered below autograd without plans; they have no gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ...communication.redistribute import redistribute_local
from ...dispatch.planning import AtenCall, AtenPlan, spec_of
from ...dispatch.registry import DECLINED, register
from ...dispatch.tensor import ShardTensor, promote, wrap
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import operator
from ...ranks.cuda_graphs import OUTSIDE, check_has_values
from ..common.alignment import as_operand, is_sharded, redistributed, reduced_value, replicated
from ..common.named_dims import free_dims
from ..common.reduce import rank_reduction
from ..reduction.reductions import reduction_plan

_aten = torch.ops.aten

Range = Sequence[float] | None


def _free_coordinates(x: DTensor) -> tuple[Tensor, ShardTensorSpec]:
    """The local part of points, whose coordinates are along the last dim."""
    spec = spec_of(x)
    target = free_dims("histogramdd", spec.for_gradient(), x.ndim - 1)
    return redistribute_local(x._local_tensor, spec, target), target


def _plain(op: str, t: Tensor) -> Tensor:
    """A small operand that every rank has."""
    if not isinstance(t, DTensor):
        return t
    return redistributed(op, ShardTensor.from_dtensor(t), spec_of(t).replicated())._local_tensor


def _check_weight(op: str, weight: Tensor | None, shape: torch.Size) -> None:
    """Raise where the weight of a histogram has not the shape that there are elements, or points."""
    if weight is not None and weight.shape != shape:
        raise RuntimeError(f"{op}(): weight has shape {tuple(weight.shape)}, but the elements have {tuple(shape)}")


def _weights(op: str, weight: Tensor | None, spec: ShardTensorSpec) -> Tensor | None:
    """The weights of a shard's elements, or of its points."""
    if weight is None:
        return None
    given = ShardTensor.from_dtensor(weight) if isinstance(weight, DTensor) else promote(weight, spec.mesh)
    return redistributed(op, given, given._spec.with_layout(spec.layout))._local_tensor


def _like_weights(op: str, x: Tensor, weights: Tensor | None) -> Tensor:
    """The elements, or points. Where every rank has them, but not their weights, each takes those of its weights."""
    if not is_sharded(weights) or is_sharded(x) or x.shape[: weights.ndim] != weights.shape:  # type: ignore[union-attr]
        return x
    spec = spec_of(weights)  # type: ignore[arg-type]
    elements = as_operand(x, spec.mesh)
    return redistributed(op, elements, elements._spec.with_layout(spec.for_gradient().layout))


def _range(x: Tensor, spec: ShardTensorSpec, columns: bool = False) -> Tensor:
    """The least and the greatest value of all ranks ``(2,)``, or of each column of points ``(2, columns)``."""
    flat = x.reshape(-1, x.shape[-1]) if columns else x.reshape(-1, 1)
    lowest = flat.new_full((2, flat.shape[1]), float("-inf"))
    ends = torch.stack([flat.amax(0), -flat.amin(0)]) if len(flat) else lowest
    greatest, least = rank_reduction(spec, [*spec.sharded_dims().values()])(ends, "max")
    found = torch.stack([-least, greatest])
    return found if columns else found.squeeze(1)


def _counted(counts: Tensor, spec: ShardTensorSpec, edges: Sequence[Tensor], density: bool) -> ShardTensor:
    placements = [Partial() if isinstance(p, Shard) else Replicate() for p in spec.placements]
    result = wrap(counts, ShardTensorSpec.make(spec.mesh, placements, counts.shape, counts.dtype))
    if not density:
        return result
    total, reduced = reduced_value(result)
    shares = total / total.sum()
    for d, ends in enumerate(edges):
        shares = shares / ends.diff().view([-1 if i == d else 1 for i in range(shares.ndim)])
    return wrap(shares, reduced)


# -- one dim --------------------------------------------------------------------------------------------------------


@register(_aten.histc.default)
def _histc(x: ShardTensor, bins: int = 100, min: float = 0, max: float = 0) -> ShardTensor:
    if min != max or spec_of(x).is_replicate():
        return DECLINED
    check_has_values("histc", x, remedy="give it min and max, or " + OUTSIDE)
    torch.histc(torch.ones(1, dtype=x.dtype, device=x.device), bins)  # torch's own errors
    local, spec = reduced_value(x)
    real = local if local.is_floating_point() else local.double()
    low, high = _range(real, spec).tolist() if x.numel() else (0, 0)
    if low == high:
        low, high = low - 1, high + 1
    torch.histc(local.new_ones(1), bins, low, high)  # that the range is finite
    counts = torch.histc(local, bins, low, high) if local.numel() else local.new_zeros(bins)
    return _counted(counts, spec, [], False)


@register(_aten.histogram.bin_ct, _aten.histogram.bins_tensor)
def _histogram(
    x: Tensor, bins: int | Tensor = 100, *, range: Range = None, weight: Tensor | None = None, density: bool = False
) -> tuple[ShardTensor, ShardTensor]:
    x = _like_weights("histogram", x, weight)
    if not isinstance(x, DTensor) or spec_of(x).is_replicate():
        return DECLINED
    _check_weight("histogram", weight, x.shape)
    local, spec = reduced_value(x)
    if isinstance(bins, Tensor):
        edges, weight = _plain("histogram", bins), _weights("histogram", weight, spec)
        counts = torch.histogram(local, edges, weight=weight).hist
    else:
        weight = _weights("histogram", weight, spec)
        seen = _range(local, spec) if range is None and x.numel() else local.new_empty(0)
        edges = torch.histogram(seen, bins, range=range).bin_edges
        counts = torch.histogram(local, bins, range=(float(edges[0]), float(edges[-1])), weight=weight).hist
    return _counted(counts, spec, [edges], density), replicated(edges.clone(), spec)


# -- several ----------------------------------------------------------------------------------------------------------


def _edges(x: Tensor, spec: ShardTensorSpec, bins: Sequence[int], range: Range) -> list[Tensor]:
    seen = _range(x, spec, columns=True) if range is None and spec.shape.numel() else x.new_empty(0, x.shape[-1])
    return list(_aten._histogramdd_bin_edges.default(seen, bins, range=range))


@register(_aten._histogramdd_bin_edges.default)
def _bin_edges(
    x: Tensor, bins: Sequence[int], *, range: Range = None, weight: Tensor | None = None, density: bool = False
) -> list[ShardTensor]:
    x = _like_weights("histogramdd", x, weight)
    if not isinstance(x, DTensor) or spec_of(x).is_replicate():
        return DECLINED
    _check_weight("histogramdd", weight, x.shape[:-1])
    local, spec = _free_coordinates(x)
    return [replicated(t, spec) for t in _edges(local, spec, bins, range)]


@register(_aten._histogramdd_from_bin_cts.default, _aten._histogramdd_from_bin_tensors.default)
def _from_bins(
    x: Tensor,
    bins: Sequence[Any],
    *,
    range: Range = None,
    weight: Tensor | None = None,
    density: bool = False,
) -> ShardTensor:
    """``bins`` are how many there are along each coordinate, or their edges."""
    x = _like_weights("histogramdd", x, weight)
    if not isinstance(x, DTensor) or spec_of(x).is_replicate():
        return DECLINED
    _check_weight("histogramdd", weight, x.shape[:-1])
    local, spec = _free_coordinates(x)
    weight, given = _weights("histogramdd", weight, spec), [t for t in bins if isinstance(t, Tensor)]
    if given:
        edges = [_plain("histogramdd", t) for t in given]
        counts = _aten._histogramdd_from_bin_tensors.default(local, edges, weight=weight)
    else:
        edges = _edges(local, spec, bins, range)
        ends = [float(t[i]) for t in edges for i in (0, -1)]
        counts = _aten._histogramdd_from_bin_cts.default(local, bins, range=ends, weight=weight)
    return _counted(counts, spec, edges, density)


@operator(_aten.histc.default)
def _histc_plan(call: AtenCall) -> AtenPlan:
    return reduction_plan(call, None, False, "sum", of_partial=False)


@operator(_aten._convert_indices_from_coo_to_csr.default)
def _starts_plan(call: AtenCall) -> AtenPlan:
    """Where each number begins among ascending ones is how many are smaller, which each rank counts for itself."""
    return reduction_plan(call, None, False, "sum", of_partial=False)


@register(_aten.bincount.default)
def _bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> ShardTensor:
    """The ranks agree on the greatest number; then each has its own counts, a Partial."""
    x = _like_weights("bincount", x, weights)
    if not isinstance(x, DTensor) or spec_of(x).is_replicate():
        return DECLINED
    check_has_values("bincount", x)
    if weights is not None and weights.shape != x.shape:
        raise RuntimeError(
            f"weights should be 1-d and have the same length as input, {len(x)}, but have shape {tuple(weights.shape)}"
            if x.ndim == 1
            else "bincount only supports 1-d non-negative integral inputs."
        )
    local, spec = reduced_value(x)
    torch.bincount(local.new_zeros([min(n, 1) for n in spec.shape]), minlength=minlength)  # torch's own errors
    ends = torch.stack([local.max(), -local.min()]) if local.numel() else local.new_full((2,), -1)
    greatest, least = rank_reduction(spec, [*spec.sharded_dims().values()])(ends.long(), "max").tolist()
    if spec.shape.numel() and least > 0:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    weights = _weights("bincount", weights, spec)
    counts = torch.bincount(local, weights, minlength=max(minlength, greatest + 1))
    if weights is not None:  # torch forgets the weights' dtype where there are no elements
        counts = counts.to(torch.float32 if weights.dtype == torch.float32 else torch.float64)
    return _counted(counts, spec, [], False)
