"""Losses over classes: cross entropy, negative log likelihood, multi-class and multi-label margins.

If classes are sharded, only the rank that holds the logit of a target's class contributes. On the other ranks the
target counts as ignored. So the terms (one number per row) are a Partial over the mesh dim that shards the classes, and
go into the loss's Partial scalar without being reduced on their own. Cross entropy sends what a log-softmax over a
sharded dim sends: two all-reduces of one number per row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from ..._compat import unflatten
from ..._compat.c10d import group_along
from ...communication.redistribute import all_reduce, start_all_reduce
from ...dispatch.tensor import redistribute_to
from ...errors import refuse
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Composed, LocalPlan, Operand, Plan, planned
from ..common.alignment import as_operand, local_part, refuse_gathering, wide_dtype, widened
from ..common.named_dims import common_layout, free_dims
from ..common.reduce import reduced_spec
from .elementwise import full_precision, loss, outputs_spec, reduced_loss, scalar_spec

# What a target becomes on the ranks that do not hold its class, and where it is to be ignored.
_ELSEWHERE = -(2**62)


# -- layouts --------------------------------------------------------------------------------------------------------


def _with_dim(spec: ShardTensorSpec, dim: int, pattern: ShardTensorSpec) -> ShardTensorSpec:
    """The spec with one more dim in front of ``dim``, to have the shape of ``pattern``."""
    placements = [Shard(p.dim + (p.dim >= dim)) if isinstance(p, Shard) else p for p in spec.placements]
    return ShardTensorSpec.of(spec.mesh, placements, pattern.tensor_meta, spec.sizes)


# -- weights of the classes -------------------------------------------------------------------------------------------


def _prepare_weights(call: Arguments, weight: Operand | None, common: ShardTensorSpec, classes: int) -> Any:
    """Have weights ``(C,)`` prepared for an input with spec ``common``.

    Returns:
        ``(start, length)`` of the classes that this rank holds, where the local work has to narrow the weights to them;
        None where it has not.
    """
    m = common.sharded_dims().get(classes)
    if not isinstance(weight, ShardTensorSpec):
        return None if m is None or weight is None else (common.interval(m)[0], common.local_shape()[classes])
    if not weight.sharded_dims():
        reason = "the parameter is sharded"
        raise refuse(call.name, [common, weight], reason, "redistribute it to Replicate() before the call")
    placements = [Shard(0) if i == m else Replicate() for i in range(common.mesh.ndim)]
    sizes = tuple(size if i == m else None for i, size in enumerate(common.sizes))
    source = weight.for_gradient()
    target = source.replace(placements=placements, sizes=sizes)
    refuse_gathering(call.name, [source], [target])
    mesh = common.mesh
    call.then_do("weight", lambda w: local_part(redistribute_to(as_operand(w, mesh), target), common))
    return None


def _fixed(name: str, weight: Tensor | None) -> Tensor | None:
    """The weights of the classes, which have no gradient. Whether one is wanted, plans do not depend on."""
    if weight is not None and weight.requires_grad:
        raise RuntimeError(f"{name}: the weights of the classes cannot be differentiated; detach them")
    return weight


def _without_autocast(
    call: Arguments, function: Callable[..., Tensor], given: Mapping[str, Any], reduction: str
) -> Plan:
    """The loss where autocast is on, whose rule for losses is float32: once more without it."""
    names = [name for name in given if name in ("input", "target", "weight")]
    options = {name: value for name, value in given.items() if name not in names}
    name, device = function.__name__, call.device.type

    def compute(*tensors: Any) -> Any:
        with full_precision(device) as cast:
            # By way of torch's module, whose functions are patched.
            return getattr(F, name)(**dict(zip(names, map(cast, tensors))), **options, reduction=reduction)

    return Composed(compute)


# -- cross entropy and negative log likelihood ------------------------------------------------------------------------


@loss(F.cross_entropy, "cross_entropy_loss", tensors="input target", parameters="weight")
@loss(F.nll_loss, "nll_loss", "nll_loss_nd", "nll_loss2d", tensors="input target", parameters="weight")
def _plan_likelihood(function: Callable[..., Tensor], call: Arguments, given: dict[str, Any], reduction: str) -> Plan:
    """Cross entropy (a log-softmax before the other) or negative log likelihood.

    ``given`` holds the input ``(C,)`` or ``(N, C, *spatial)``, sharded in any dims, the target (class indices, ``()``
    or ``(N, *spatial)``, or for cross entropy probabilities in the input's shape) and weights of the classes ``(C,)``.
    """
    if call.autocast() is not None:
        return _without_autocast(call, function, given, reduction)
    input, target, weight = given["input"], given["target"], given["weight"]
    meta = call.returned(function, **given, reduction="none")
    soft = input.shape == target.shape and function is F.cross_entropy
    classes = min(1, len(input.shape) - 1)
    rows_shape = [*input.shape[:classes], *input.shape[classes + 1 :]]
    if len(input.shape) > 2 and not soft and [*target.shape] != rows_shape:  # torch does not see it without data
        raise RuntimeError(f"size mismatch (got input: {list(input.shape)}, target: {list(target.shape)})")
    targets = target if soft else _with_dim(target, classes, input)
    common = common_layout([input, targets], input.tensor_meta)
    refuse_gathering(call.name, [input], [common])
    call.redistribute("input", common)
    if classes not in common.sharded_dims() and not soft:
        rows = reduced_spec(common, meta, [classes], False, "sum")
        target_spec = rows.replace(meta=target.tensor_meta)
        refuse_gathering(call.name, [target], [target_spec])
        call.redistribute("target", target_spec)
        _prepare_weights(call, weight, common, classes)
        call.then_do("weight", partial(_fixed, call.name))
        options = {name: value for name, value in given.items() if name not in ("input", "target", "weight")}
        compute = _loss_of_rows(function, options, rows, reduction)
        return LocalPlan(compute, outputs_spec(rows, reduction, meta.dtype))
    if soft:
        refuse_gathering(call.name, [target], [common])
        call.redistribute("target", common)
    smoothing, ignore_index = given.get("label_smoothing", 0.0), given["ignore_index"]

    def compute_logs(input: Tensor, target: Tensor, weight: Tensor | None) -> Any:
        weight = weight if soft else _fixed(call.name, weight)
        logs = torch.log_softmax(input, classes) if function is F.cross_entropy else input
        return _of_logs[function](logs, target, weight, meta.dtype, soft, smoothing, ignore_index, reduction)

    return Composed(compute_logs)


def _loss_of_rows(
    function: Callable[..., Tensor], options: Mapping[str, Any], rows: ShardTensorSpec, reduction: str
) -> Callable[..., Tensor]:
    """The loss where each rank has all classes, and targets are class indices: torch's own, of this rank's rows."""
    groups, shape, ignore_index = _groups(rows), rows.local_shape(), options["ignore_index"]

    def compute(logits: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        # Row-major, because the gradient's kernel refuses channels-last logarithms. Ranks may differ in whether their
        # shards have these, as dims of length 1 do not tell, and a rank that raises would leave the others waiting.
        logits = logits.contiguous()
        pending = _start_total_weight(target, weight, ignore_index, groups) if reduction == "mean" else None
        at_once = reduction != "none" and wide_dtype(logits.dtype) == logits.dtype
        if not logits.numel():
            terms = _no_terms(F.nll_loss, logits, shape)
        else:
            terms = function(logits, target, weight=weight, reduction="sum" if at_once else "none", **options)
        divisor = None if pending is None else pending()
        if at_once and logits.numel():
            return terms if divisor is None else (terms / divisor).to(terms.dtype)
        return reduced_loss(terms, reduction, divisor)

    return compute


def _plan_of_logs(
    call: Arguments,
    logs: ShardTensorSpec,
    target: ShardTensorSpec,
    weight: Operand | None,
    dtype: torch.dtype,
    soft: bool,
    smoothing: float,
    ignore_index: int,
    reduction: str,
) -> Plan:
    """The loss of logarithms whose classes are sharded, or of targets that are probabilities. ``dtype`` is its own."""
    classes = min(1, len(logs.shape) - 1)
    m = logs.sharded_dims().get(classes)
    meta = call.returned(torch.sum, logs, classes, dtype=dtype)
    terms = reduced_spec(logs, meta, [classes], False, "sum")  # a Partial where the classes are sharded
    own_weights = _own_weights(_prepare_weights(call, weight, logs, classes))
    share, count = smoothing / logs.shape[classes], meta.numel()

    def soft_loss(logs: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        weighted = _weighted(logs, own_weights(weight), classes)
        return reduced_loss(-(weighted * (target * (1 - smoothing) + share)).sum(classes), reduction, count)

    if soft:
        return LocalPlan(soft_loss, outputs_spec(terms, reduction, dtype))
    assert m is not None
    # A number per row, gathered if need be.
    call.tensors["target"] = terms.for_gradient().replace(meta=target.tensor_meta)
    here, number = logs.interval(m), logs.shape[classes]
    groups, own_shape = _groups(terms), terms.local_shape()

    def loss(logs: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        w, ignored = own_weights(weight), target == ignore_index
        t = _own_targets(target, ignored, here, number)
        if logs.numel():
            rows_of_logs = logs.contiguous()  # row-major on all ranks, as in _loss_of_rows
            found = F.nll_loss(rows_of_logs, t, w, ignore_index=_ELSEWHERE, reduction="none")
        else:
            found = _no_terms(F.nll_loss, logs, own_shape)
        if smoothing:
            smooth = -_weighted(logs, w, classes).sum(classes).masked_fill(ignored, 0)
            found = (1 - smoothing) * found + share * smooth
        divisor = _start_total_weight(t, w, _ELSEWHERE, groups)() if reduction == "mean" else None
        return reduced_loss(found, reduction, divisor)

    return LocalPlan(loss, outputs_spec(terms, reduction, dtype))


_of_logs: dict[Callable[..., Tensor], Callable[..., Any]] = {
    function: planned(function.__name__, tensors="logs target", parameters="weight", sharded="weight")(_plan_of_logs)
    for function in (F.cross_entropy, F.nll_loss)
}


def _own_weights(interval: tuple[int, int] | None) -> Callable[[Tensor | None], Tensor | None]:
    """The weights of this rank's classes: all of them, or ``(start, length)``."""
    return lambda w: w if w is None or interval is None else w.narrow(0, *interval)


def _weighted(logs: Tensor, weight: Tensor | None, classes: int) -> Tensor:
    return logs if weight is None else logs * weight.view(-1, *[1] * (logs.ndim - classes - 1))


def _own_targets(t: Tensor, ignored: Tensor, here: tuple[int, int], number: int) -> Tensor:
    """The targets as indices into this rank's classes; :data:`_ELSEWHERE` if ignored, or where others hold the class.

    Targets that name none of the ``number`` classes stay what they are, so that torch's kernel raises its error.
    """
    start, stop = here
    t = t.long()
    others = (t >= 0) & (t < number) & ((t < start) | (t >= stop))
    return torch.where(others | ignored, _ELSEWHERE, t - start)


def _no_terms(function: Callable[..., Tensor], logits: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros from an empty shard, by way of torch's kernel: the graph has to be that of the other ranks, of which every
    order of derivatives communicates. Not all kernels take empty dims, but all take a batch of no rows.
    """
    target = logits.new_empty((0, 1) if function is F.multilabel_margin_loss else (0,), dtype=torch.long)
    return function(logits.reshape(0, 1), target, reduction="none").sum().expand(shape)


def _groups(terms: ShardTensorSpec) -> list[dist.ProcessGroup]:
    """Over which a sum of terms is completed."""
    return [group_along(terms.mesh, m) for m in scalar_spec(terms, terms.tensor_meta.dtype).partial_mesh_dims()]


def _start_total_weight(
    t: Tensor, weight: Tensor | None, ignore_index: int, groups: Sequence[dist.ProcessGroup]
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
    if not groups:
        return lambda: total
    first = start_all_reduce(total, groups[0], overwrite=True)
    return lambda: reduce(all_reduce, groups[1:], first())


# -- margins ----------------------------------------------------------------------------------------------------------


@loss(F.multi_margin_loss, "multi_margin_loss", tensors="input target", parameters="weight")
@loss(F.multilabel_margin_loss, "multilabel_margin_loss", tensors="input target")
def _plan_margins(function: Callable[..., Tensor], call: Arguments, given: dict[str, Any], reduction: str) -> Plan:
    """Margins between all classes of a row, which must not be sharded: see [Note: whole rows] in sorting/sort.py."""
    if call.autocast() is not None:
        return _without_autocast(call, function, given, reduction)
    input, target, weight = given["input"], given["target"], given.get("weight")
    meta = call.returned(function, **given, reduction="none")
    classes = len(input.shape) - 1
    per_class = len(target.shape) == len(input.shape)
    like_input = target if per_class else _with_dim(target, classes, input)
    common = free_dims(call.name, common_layout([input, like_input], input.tensor_meta), classes)
    rows = reduced_spec(common, meta, [classes], False, "sum")
    call.tensors["input"] = common
    # A number per row, or per class of it; gathered if need be.
    call.tensors["target"] = (common if per_class else rows).replace(meta=target.tensor_meta)
    _prepare_weights(call, weight, common, classes)
    call.then_do("weight", partial(_fixed, call.name))
    options = {name: value for name, value in given.items() if name not in ("input", "target", "weight")}
    own_shape, count = rows.local_shape(), meta.shape.numel()

    def compute(logits: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
        weights = {} if weight is None else {"weight": weight}
        if logits.numel():
            terms = function(logits, target, **options, **weights, reduction="none")
        else:
            terms = _no_terms(function, logits, own_shape)
        return reduced_loss(terms, reduction, count)

    return LocalPlan(compute, outputs_spec(rows, reduction, meta.dtype))


# -- with a linear layer ----------------------------------------------------------------------------------------------

_OF_LINEAR = "linear_weight linear_bias weight"


def plan_linear_cross_entropy(
    function: Callable[..., Tensor], call: Arguments, given: dict[str, Any], reduction: str
) -> Plan:
    """Torch's reference: a linear layer, then ``cross_entropy``. With ``options`` torch keeps logits in float32."""
    call.returned(function, **{**given, "options": None}, reduction=reduction)
    names = [name for name in given if name in ("input", "target", *_OF_LINEAR.split())]
    ignored, smoothing = given["ignore_index"], given["label_smoothing"]

    dtype, widens = given["input"].tensor_meta.dtype, given.get("options") is not None

    def compute(*tensors: Any) -> Any:
        found = dict(zip(names, widened(*tensors) if widens else tensors, strict=True))
        w, bias = found["linear_weight"], found["linear_bias"]
        logits = F.linear(found["input"], w.flatten(0, -2), None if bias is None else bias.flatten())
        found_loss = F.cross_entropy(
            logits if w.ndim == 2 else unflatten(logits, -1, w.shape[:-1]),
            found["target"],
            found["weight"],
            ignore_index=-100 if ignored is None else ignored,
            reduction=reduction,
            label_smoothing=smoothing,
        )
        return found_loss.to(dtype) if widens else found_loss

    return Composed(compute)


if hasattr(F, "linear_cross_entropy"):  # since torch 2.12
    loss(F.linear_cross_entropy, tensors="input target", parameters=_OF_LINEAR)(plan_linear_cross_entropy)
