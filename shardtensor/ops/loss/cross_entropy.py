"""Losses over classes: cross entropy, negative log likelihood, multi-class and multi-label margins.

[Note: sharded classes] A target names one class, and the rank that holds its logit is the only one that contributes:
on the others the target counts as ignored. So the terms (one number per row) are a Partial over the mesh dim that cuts
the classes, and go into the loss's Partial scalar without being reduced on their own. What cross entropy sends is
what a log-softmax over a sharded dim sends: two all-reduces of one number per row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from ..._compat import TensorMeta
from ...parameters import local_parameters
from ...redistribute import all_reduce, start_all_reduce
from ...spec import ShardTensorSpec
from ...tensor import ShardTensor, redistribute_to
from ..common.alignment import (
    as_operand,
    common_layout,
    free_dims,
    local_part,
    redistributed,
    torch_judges,
    wide_dtype,
)
from .base import composed_loss, contribution, full_precision, reduced
from .kernels import scalar_spec

# What a target becomes on the ranks that do not hold its class, and where it is to be ignored.
_ELSEWHERE = -(2**62)


# -- layouts --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _with_dim(spec: ShardTensorSpec, dim: int, pattern: ShardTensorSpec) -> ShardTensorSpec:
    """The spec with one more dim in front of ``dim``, to have the shape of ``pattern``."""
    placements = [Shard(p.dim + (p.dim >= dim)) if isinstance(p, Shard) else p for p in spec.placements]
    return ShardTensorSpec.of(spec.mesh, placements, pattern.tensor_meta, spec.sizes)


@lru_cache(maxsize=4096)
def _without_dim(spec: ShardTensorSpec, dim: int, meta: TensorMeta) -> ShardTensorSpec:
    """The spec without ``dim``; replicated where that was sharded."""
    placements: list[Any] = []
    sizes = list(spec.sizes)
    for m, p in enumerate(spec.placements):
        if isinstance(p, Shard):
            p = Shard(p.dim - (p.dim > dim)) if p.dim != dim else Replicate()
        sizes[m] = sizes[m] if isinstance(p, Shard) else None
        placements.append(p)
    return ShardTensorSpec.of(spec.mesh, placements, meta, tuple(sizes))


def _class_weights(name: str, weight: Any, common: ShardTensorSpec, classes: int) -> Tensor | None:
    """The weights ``(C,)`` of the classes that this rank holds."""
    m = common.sharded_dims().get(classes)
    if isinstance(weight, ShardTensor) and weight._spec.sharded_dims():
        w = as_operand(weight, common.mesh)
        placements = [Shard(0) if i == m else Replicate() for i in range(common.mesh.ndim)]
        sizes = tuple(size if i == m else None for i, size in enumerate(common.sizes))
        return local_part(redistributed(name, w, w._spec.replace(placements=placements, sizes=sizes)), common)
    (w,) = local_parameters(name, common, weight)
    if m is not None and w is not None:
        start, stop = common.interval(m)
        w = w.narrow(0, start, stop - start)
    return w


def _own_targets(t: Tensor, ignored: Tensor, classes: int, common: ShardTensorSpec) -> Tensor:
    """The targets as indices into this rank's classes; :data:`_ELSEWHERE` if ignored, or where others hold the class.

    Targets that name no class at all stay what they are, so that torch's kernel raises its error.
    """
    start, stop = common.interval(common.sharded_dims()[classes])
    t = t.long()
    others = (t >= 0) & (t < common.shape[classes]) & ((t < start) | (t >= stop))
    return torch.where(others | ignored, _ELSEWHERE, t - start)


# -- cross entropy and negative log likelihood ------------------------------------------------------------------------


def _likelihood(function: Callable[..., Tensor], given: dict[str, Any], reduction: str) -> Any:
    """Cross entropy (a log-softmax before the other) or negative log likelihood.

    ``given`` holds the input ``(C,)`` or ``(N, C, *spatial)``, sharded in any dims, the target (class indices, ``()``
    or ``(N, *spatial)``, or for cross entropy probabilities in the input's shape) and weights of the classes ``(C,)``.
    """
    input, target, weight = given["input"], given["target"], given["weight"]
    smoothing, ignore_index = given.get("label_smoothing", 0.0), given["ignore_index"]
    name = function.__name__
    mesh = input.device_mesh
    meta = torch_judges(function, **given, reduction="none")
    soft = input.shape == target.shape and function is F.cross_entropy
    if not soft and weight is not None and weight.requires_grad:
        raise RuntimeError(f"{name}: the weights of the classes cannot be differentiated; detach them")
    with full_precision(mesh.device_type) as cast:
        x, t, weight = as_operand(cast(input), mesh), as_operand(cast(target), mesh), cast(weight)
        classes = min(1, x.ndim - 1)
        targets = t._spec if soft else _with_dim(t._spec, classes, x._spec)
        common = common_layout([x._spec, targets], x._spec.tensor_meta)
        m = common.sharded_dims().get(classes)
        x, rows = redistributed(name, x, common), _without_dim(common, classes, meta)
        if m is None and not soft:
            t = redistributed(name, t, _without_dim(common, classes, t._spec.tensor_meta)).to_local()
            w = _class_weights(name, weight, common, classes)
            options = {"label_smoothing": smoothing} if function is F.cross_entropy else {}
            options.update(weight=w, ignore_index=ignore_index)
            return _of_whole_rows(function, x.to_local(), t, options, reduction, rows)
        terms_spec = rows.replace(placements=[Partial() if i == m else p for i, p in enumerate(rows.placements)])
        logs = (torch.log_softmax(x, classes) if function is F.cross_entropy else x).to_local()
        w = _class_weights(name, weight, common, classes)
        weighted = logs if w is None else logs * w.view(-1, *[1] * (logs.ndim - classes - 1))
        if soft:
            t = redistributed(name, t, common).to_local() * (1 - smoothing) + smoothing / common.shape[classes]
            return reduced(-(weighted * t).sum(classes), terms_spec, reduction, meta.shape.numel())
        target_spec = rows.replace(meta=t._spec.tensor_meta)
        # The targets (a number per row) are gathered if need be.
        t = redistribute_to(t, target_spec).to_local()
        ignored = t == ignore_index
        t, ignore_index = _own_targets(t, ignored, classes, common), _ELSEWHERE
        if logs.numel():
            terms = F.nll_loss(logs, t, w, ignore_index=ignore_index, reduction="none")
        else:
            terms = _no_terms(F.nll_loss, logs, terms_spec)
        if smoothing:
            smooth = -weighted.sum(classes).masked_fill(ignored, 0)
            terms = (1 - smoothing) * terms + smoothing / common.shape[classes] * smooth
        divisor = _start_total_weight(t, w, ignore_index, terms_spec)() if reduction == "mean" else None
        return reduced(terms, terms_spec, reduction, divisor)


def _of_whole_rows(
    function: Callable[..., Tensor],
    logits: Tensor,
    t: Tensor,
    options: dict[str, Any],
    reduction: str,
    rows: ShardTensorSpec,
) -> Any:
    """The loss where each rank has all classes, and targets are class indices: torch's own, of this rank's rows."""
    pending = None
    if reduction == "mean":
        pending = _start_total_weight(t, options["weight"], options["ignore_index"], rows)
    at_once = reduction != "none" and wide_dtype(logits.dtype) == logits.dtype
    if not logits.numel():
        terms = _no_terms(F.nll_loss, logits, rows)
    else:
        terms = function(logits, t, reduction="sum" if at_once else "none", **options)
    divisor = None if pending is None else pending()
    if at_once and logits.numel():
        return contribution(terms, rows, terms.dtype, divisor)
    return reduced(terms, rows, reduction, divisor)


def _no_terms(function: Callable[..., Tensor], logits: Tensor, spec: ShardTensorSpec) -> Tensor:
    """Zeros from an empty shard, by way of torch's kernel: the graph has to be that of the other ranks, of which every
    order of derivatives communicates. Not all kernels take empty dims, but all take a batch of no rows.
    """
    target = logits.new_empty((0, 1) if function is F.multilabel_margin_loss else (0,), dtype=torch.long)
    return function(logits.reshape(0, 1), target, reduction="none").sum().expand(spec.local_shape())


def _start_total_weight(
    t: Tensor, weight: Tensor | None, ignore_index: int, spec: ShardTensorSpec
) -> Callable[[], Tensor]:
    """The summed class weights of all targets that are not ignored (without weights: their number) are on their way to
    every rank; the function that is returned waits for them.
    """
    valid = t != ignore_index
    if weight is None:
        total = valid.sum()
    elif not weight.numel():
        total = weight.sum()
    else:
        of_target = weight[torch.where(valid, t, 0)]
        total = torch.where(valid, of_target, 0).sum(dtype=wide_dtype(weight.dtype))
    groups = [spec.mesh.get_group(m) for m in scalar_spec(spec, total.dtype).partial_mesh_dims()]
    if not groups:
        return lambda: total
    first = start_all_reduce(total, groups[0], overwrite=True)
    return lambda: reduce(all_reduce, groups[1:], first())


@composed_loss(F.cross_entropy, "cross_entropy_loss", tensors="input target", parameters="weight")
def cross_entropy(given: dict[str, Any], reduction: str) -> Any:
    """Of class indices, or of probabilities."""
    return _likelihood(F.cross_entropy, given, reduction)


@composed_loss(
    F.nll_loss, "nll_loss", "nll_loss_nd", "nll_loss2d", tensors="input target", parameters="weight"
)
def nll_loss(given: dict[str, Any], reduction: str) -> Any:
    """Of logarithms of probabilities."""
    return _likelihood(F.nll_loss, given, reduction)


# -- margins ----------------------------------------------------------------------------------------------------------


def _margins(function: Callable[..., Tensor], given: dict[str, Any], reduction: str) -> Any:
    """Margins between all classes of a row: it has to be whole, see [Note: whole rows] in sorting/sort.py."""
    input, target, weight = given["input"], given["target"], given.get("weight")
    name = function.__name__
    mesh = input.device_mesh
    meta = torch_judges(function, **given, reduction="none")
    if weight is not None and weight.requires_grad:
        raise RuntimeError(f"{name}: the weights of the classes cannot be differentiated; detach them")
    with full_precision(mesh.device_type) as cast:
        x, t = as_operand(cast(input), mesh), as_operand(target, mesh)
        classes = x.ndim - 1
        per_class = t.ndim == x.ndim
        like_x = t._spec if per_class else _with_dim(t._spec, classes, x._spec)
        common = free_dims(name, common_layout([x._spec, like_x], x._spec.tensor_meta), classes)
        x, rows = redistribute_to(x, common), _without_dim(common, classes, meta)
        target_spec = common if per_class else rows
        t = redistribute_to(t, target_spec.replace(meta=t._spec.tensor_meta)).to_local()
        if weight is not None:
            given["weight"] = _class_weights(name, cast(weight), common, classes)
        logits = x.to_local()
        if logits.numel():
            terms = function(**{**given, "input": logits, "target": t}, reduction="none")
        else:
            terms = _no_terms(function, logits, rows)
        return reduced(terms, rows, reduction, meta.shape.numel())


@composed_loss(F.multi_margin_loss, "multi_margin_loss", tensors="input target", parameters="weight")
def multi_margin(given: dict[str, Any], reduction: str) -> Any:
    """Of one class per row."""
    return _margins(F.multi_margin_loss, given, reduction)


@composed_loss(F.multilabel_margin_loss, "multilabel_margin_loss", tensors="input target")
def multilabel_margin(given: dict[str, Any], reduction: str) -> Any:
    """Of several classes per row."""
    return _margins(F.multilabel_margin_loss, given, reduction)


def linear_cross_entropy(given: dict[str, Any], reduction: str) -> Any:
    """Torch's reference: a linear layer, then ``cross_entropy``. ``options`` would save memory."""
    x, w, target, bias = (given[k] for k in ("input", "linear_weight", "target", "linear_bias"))
    torch_judges(F.linear_cross_entropy, **{**given, "options": None}, reduction=reduction)
    classes = w.shape[:-1]
    logits = F.linear(x, w.flatten(0, -2), None if bias is None else bias.flatten())
    ignored = given["ignore_index"]
    return F.cross_entropy(
        logits if len(classes) == 1 else logits.unflatten(-1, classes),
        target,
        given["weight"],
        ignore_index=-100 if ignored is None else ignored,
        reduction=reduction,
        label_smoothing=given["label_smoothing"],
    )


if hasattr(F, "linear_cross_entropy"):  # since torch 2.12
    composed_loss(
        F.linear_cross_entropy, tensors="input target", parameters="linear_weight linear_bias weight"
    )(linear_cross_entropy)
