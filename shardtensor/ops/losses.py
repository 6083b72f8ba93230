"""Losses, exact on unequal shards: value and gradient.

Each rank computes the terms of its shard with torch's own function and ``reduction="none"``, sums them, and divides
by the *global* count or weight: the result is a Partial(sum) scalar, reduced when it is needed. Targets and weights
that are cut otherwise than the input are brought to its cut; plain ones count as replicated and are cut locally.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from .._compat import TensorMeta
from ..errors import refuse
from ..parameters import local_parameters
from ..redistribute import redistribute_local
from ..registry import register
from ..spec import ShardTensorSpec, contiguous_stride
from ..tensor import _FromLocal
from .operands import as_operand, common_cut, common_mesh, fit, local_part, moved, torch_judges, wide_dtype

# -- reducing terms to a value ------------------------------------------------------------------------------------


def _reduction(size_average: Any, reduce: Any, reduction: str) -> str:
    """The reduction that deprecated arguments mean."""
    if size_average is None and reduce is None:
        return reduction
    return "none" if reduce is False else "sum" if size_average is False else "mean"


def _scalar_spec(spec: ShardTensorSpec, dtype: torch.dtype) -> ShardTensorSpec:
    placements = [Partial() if isinstance(p, Shard) else Replicate() for p in spec.placements]
    return ShardTensorSpec.make(spec.mesh, placements, (), dtype)


def _reduced(terms: Tensor, spec: ShardTensorSpec, reduction: str, divisor: Any) -> Any:
    """The loss, from this rank's terms, which lie like ``spec``; ``divisor`` is what a mean divides by."""
    if reduction == "none":
        meta = TensorMeta(spec.shape, contiguous_stride(spec.shape), terms.dtype)
        return _FromLocal.apply(terms, spec.replace(meta=meta))
    # In float32 at least: a mean of half precision numbers must not overflow on its way.
    value = terms.sum(dtype=wide_dtype(terms.dtype))
    if reduction == "mean":
        value = value / divisor
    return _FromLocal.apply(value.to(terms.dtype), _scalar_spec(spec, terms.dtype))


def _checked(name: str, reduction: str, *more: str) -> str:
    if reduction not in ("none", "mean", "sum", *more):
        raise ValueError(f"{reduction} is not a valid value for reduction of {name}")
    return reduction


# -- losses that treat every element alone --------------------------------------------------------------------------


def _elementwise(
    function: Callable[..., Tensor], tensors: dict[str, Any], reduction: str, divisor: int | None = None, **options: Any
) -> Any:
    """A loss whose terms depend on one element of each operand.

    Args:
        function: torch's.
        tensors: its tensor arguments by name, "input" and "target" first; None where not given.
        divisor: of the mean; default: the number of terms.
    """
    name = function.__name__
    tensors = {k: t for k, t in tensors.items() if t is not None}
    mesh = common_mesh(name, list(tensors.values()))
    if mesh is None:
        return NotImplemented
    meta = torch_judges(function, **tensors, **options, reduction="none")
    operands = {k: as_operand(t, mesh) for k, t in tensors.items()}
    spec = common_cut([t._spec for t in operands.values()], meta)
    local = {k: local_part(moved(name, t, fit(t._spec, spec)), spec) for k, t in operands.items()}
    for k in ("input", "target"):
        local[k] = local[k].expand(spec.local_shape())
    terms = function(**local, **options, reduction="none")
    return _reduced(terms, spec, reduction, meta.shape.numel() if divisor is None else divisor)


def _weighted(function: Callable[..., Tensor], tensors: dict[str, Any], reduction: str) -> Any:
    """A loss whose mean divides by the sum of its weights, if it has any."""
    weight = tensors["weight"]
    if weight is None or reduction != "mean":
        return _elementwise(function, tensors, reduction)
    total = _elementwise(function, tensors, "sum")
    return total if total is NotImplemented else total / weight.sum()


@register(F.mse_loss)
def _mse_loss(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", weight: Any = None
) -> Any:
    reduction = _checked("mse_loss", _reduction(size_average, reduce, reduction))
    return _weighted(F.mse_loss, {"input": input, "target": target, "weight": weight}, reduction)


@register(F.l1_loss)
def _l1_loss(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", weight: Any = None
) -> Any:
    reduction = _checked("l1_loss", _reduction(size_average, reduce, reduction))
    return _weighted(F.l1_loss, {"input": input, "target": target, "weight": weight}, reduction)


@register(F.smooth_l1_loss)
def _smooth_l1_loss(
    input: Any, target: Any, size_average: Any = None, reduce: Any = None, reduction: str = "mean", beta: float = 1.0
) -> Any:
    reduction = _checked("smooth_l1_loss", _reduction(size_average, reduce, reduction))
    return _elementwise(F.smooth_l1_loss, {"input": input, "target": target}, reduction, beta=beta)


@register(F.huber_loss)
def _huber_loss(input: Any, target: Any, reduction: str = "mean", delta: float = 1.0, weight: Any = None) -> Any:
    tensors = {"input": input, "target": target, "weight": weight}
    return _elementwise(F.huber_loss, tensors, _checked("huber_loss", reduction), delta=delta)


@register(F.binary_cross_entropy)
def _binary_cross_entropy(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, reduce: Any = None, reduction: str = "mean"
) -> Any:
    reduction = _checked("binary_cross_entropy", _reduction(size_average, reduce, reduction))
    return _elementwise(F.binary_cross_entropy, {"input": input, "target": target, "weight": weight}, reduction)


@register(F.binary_cross_entropy_with_logits)
def _binary_cross_entropy_with_logits(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    pos_weight: Any = None,
) -> Any:
    reduction = _checked("binary_cross_entropy_with_logits", _reduction(size_average, reduce, reduction))
    tensors = {"input": input, "target": target, "weight": weight, "pos_weight": pos_weight}
    return _elementwise(F.binary_cross_entropy_with_logits, tensors, reduction)


@register(F.kl_div)
def _kl_div(
    input: Any,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Any:
    reduction = _checked("kl_div", _reduction(size_average, reduce, reduction), "batchmean")
    divisor = None
    if reduction == "batchmean":
        reduction, divisor = "mean", input.shape[0] if input.ndim else 1
    return _elementwise(F.kl_div, {"input": input, "target": target}, reduction, divisor, log_target=log_target)


# -- losses over classes --------------------------------------------------------------------------------------------


def _over_classes(
    function: Callable[..., Tensor],
    input: Any,
    target: Any,
    weight: Any,
    reduction: str,
    ignore_index: int,
    **options: Any,
) -> Any:
    """Cross entropy or negative log likelihood.

    Args:
        input: ``(C,)`` or ``(N, C, *spatial)``, sharded in batch or spatial dims.
        target: class indices, ``()`` or ``(N, *spatial)``, or for cross entropy probabilities in the input's shape.
        weight: of the classes ``(C,)``, plain or replicated, or None.
    """
    name = function.__name__
    mesh = common_mesh(name, [t for t in (input, target, weight) if t is not None])
    if mesh is None:
        return NotImplemented
    _checked(name, reduction)
    options["ignore_index"] = ignore_index
    meta = torch_judges(function, input, target, weight, **options, reduction="none")
    x, t = as_operand(input, mesh), as_operand(target, mesh)
    classes = min(1, x.ndim - 1)
    soft = input.shape == target.shape and function is F.cross_entropy
    common = common_cut([x._spec, t._spec if soft else _with_dim(t._spec, classes, x._spec)], x._spec.tensor_meta)
    if classes in common.sharded_dims():
        raise refuse(
            name,
            [x, t],
            f"the classes (tensor dim {classes}) are sharded",
            "redistribute to shard the batch or a spatial dim instead, e.g. placements=(Shard(0),)",
        )
    spec = _without_dim(common, classes, meta)
    x = moved(name, x, common).to_local()
    t = moved(name, t, common if soft else spec.replace(meta=t._spec.tensor_meta)).to_local()
    (w,) = local_parameters(name, common, weight)
    if x.numel() == 0:
        # Not all of torch's kernels take empty spatial dims. This one does, and keeps dtype and graph what they are on
        # other ranks: backward must communicate on every rank alike.
        flat = x.movedim(classes, -1).reshape(0, x.shape[classes])
        x, t = flat, (t.movedim(classes, -1).reshape(flat.shape) if soft else t.reshape(0))
    terms = function(x, t, w, **options, reduction="none").reshape(spec.local_shape())
    divisor: Any = None
    if reduction == "mean":
        divisor = meta.shape.numel() if soft else _total_weight(t, w, ignore_index, spec)
    return _reduced(terms, spec, reduction, divisor)


def _total_weight(t: Tensor, weight: Tensor | None, ignore_index: int, spec: ShardTensorSpec) -> Tensor:
    """The summed class weights of all targets that are not ignored (without weights: their number), on every rank."""
    valid = t != ignore_index
    if weight is None:
        total = valid.sum()
    else:
        of_target = weight.detach()[torch.where(valid, t, 0)]
        total = torch.where(valid, of_target, 0).sum(dtype=wide_dtype(weight.dtype))
    partial = _scalar_spec(spec, total.dtype)
    return redistribute_local(total, partial, partial.replicated())


def _with_dim(spec: ShardTensorSpec, dim: int, pattern: ShardTensorSpec) -> ShardTensorSpec:
    """The spec with one more dim in front of ``dim``, to have the shape of ``pattern``."""
    placements = [Shard(p.dim + (p.dim >= dim)) if isinstance(p, Shard) else p for p in spec.placements]
    return ShardTensorSpec(spec.mesh, placements, pattern.tensor_meta, spec.sizes)


def _without_dim(spec: ShardTensorSpec, dim: int, meta: TensorMeta) -> ShardTensorSpec:
    """The spec without ``dim``, which is not sharded."""
    placements = [Shard(p.dim - (p.dim > dim)) if isinstance(p, Shard) else p for p in spec.placements]
    return ShardTensorSpec(spec.mesh, placements, meta, spec.sizes)


@register(F.cross_entropy)
def _cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    reduction = _reduction(size_average, reduce, reduction)
    return _over_classes(
        F.cross_entropy, input, target, weight, reduction, ignore_index, label_smoothing=label_smoothing
    )


@register(F.nll_loss)
def _nll_loss(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    return _over_classes(F.nll_loss, input, target, weight, _reduction(size_average, reduce, reduction), ignore_index)
