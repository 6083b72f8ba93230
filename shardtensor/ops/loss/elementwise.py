"""What losses share, losses of one element at a time, and ``ctc_loss``: exact on unequal shards.

Each rank computes the terms of its shard with torch's own function, sums them, and divides by the *global* count or
weight: the result is a Partial(sum) scalar, reduced when it is needed. Targets and weights whose layout is not the
input's are brought to it; plain ones count as replicated and are sharded locally.
Losses that torch composes of other operators, like ``cosine_embedding_loss``, need nothing here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate

from ..._compat import TensorMeta, nn_functions
from ...dispatch.planning import meta_of
from ...dispatch.tensor import ShardTensor, redistribute_to
from ...layout.caches import cached
from ...layout.spec import ShardTensorSpec
from ...layout.strides import contiguous_stride
from ...operators.autocast import autocast_dtype
from ...operators.declaration import Arguments, Composed, LocalPlan, Plan, operator
from ...ranks.cuda_graphs import check_has_values
from ..common.alignment import fit, local_part, refuse_gathering, wide_dtype
from ..common.batch_parallel import Names, by_batch
from ..common.named_dims import common_layout

# -- base --------------------------------------------------------------------------------------------------------------

# What losses share: their declaration, terms reduced to a value, autocast.

REDUCTIONS = ("none", "mean", "sum")


@cached(maxsize=4096)
def scalar_spec(spec: ShardTensorSpec, dtype: torch.dtype) -> ShardTensorSpec:
    """The spec of the sum over all elements of a tensor with ``spec``."""
    placements = [Replicate() if p.is_replicate() else Partial() for p in spec.placements]
    meta = TensorMeta(torch.Size(()), (), dtype)
    return spec.replace(placements=placements, sizes=(None,) * len(placements), meta=meta)


def outputs_spec(spec: ShardTensorSpec, reduction: str, dtype: torch.dtype) -> ShardTensorSpec:
    """The spec of a loss whose terms have the layout of ``spec``."""
    if reduction != "none":
        return scalar_spec(spec, dtype)
    return spec.replace(meta=TensorMeta(spec.shape, contiguous_stride(spec.shape), dtype))


def reduced_loss(terms: Tensor, reduction: str, divisor: Any) -> Tensor:
    """This rank's contribution to the loss, from its terms; ``divisor`` is what a mean divides by."""
    if reduction == "none":
        return terms
    # In float32 at least: a mean of half precision numbers must not overflow on its way.
    total = terms.sum(dtype=wide_dtype(terms.dtype))
    return (total / divisor if reduction == "mean" else total).to(terms.dtype)


@contextmanager
def full_precision(device: str) -> Iterator[Callable[[Any], Any]]:
    """Without autocast, whose rule for losses (float32) the given function applies to their tensors."""

    def cast(t: Any) -> Any:
        return t.float() if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 else t

    if not torch.is_autocast_enabled(device):
        yield lambda t: t
        return
    with torch.autocast(device, enabled=False):
        yield cast


# Called from Python below torch.nn.functional, torch's losses do not reduce by default, though they are declared to.
_REDUCTION_OF_BINDINGS = "none" if torch.kl_div(torch.zeros(2), torch.zeros(2)).ndim else "mean"

# Makes the plan of a loss from the function, its arguments by name (specs for tensors) and its reduction.
PlanLoss = Callable[[Callable[..., Tensor], Arguments, dict[str, Any], str], Plan]


def loss(
    function: Callable[..., Tensor], *names: str, tensors: str, parameters: str = ""
) -> Callable[[PlanLoss], PlanLoss]:
    """Decorator: the function below it makes the plans of a loss of ``torch.nn.functional``.

    Args:
        names: of the operators below it, which take a number for the reduction.
        tensors, parameters: as of :func:`shardtensor.extend.operator`; parameters may be sharded.
    """
    own = inspect.signature(function)

    def decorate(plan: PlanLoss) -> PlanLoss:
        def declare(*spellings: Callable[..., Any], reduction: Any = None) -> None:
            def build(call: Arguments, *args: Any, **kwargs: Any) -> Plan:
                given = dict(zip(own.parameters, args)) | kwargs
                return plan(function, call, given, _reduction(function, given))

            arguments = [
                p.replace(default=reduction) if p.name == "reduction" and reduction is not None else p
                for p in own.parameters.values()
            ]
            first = inspect.Parameter("call", inspect.Parameter.POSITIONAL_OR_KEYWORD)
            build.__signature__ = own.replace(parameters=[first, *arguments])  # type: ignore[attr-defined]
            build.__module__ = plan.__module__
            operator(*spellings, tensors=tensors, parameters=parameters, sharded=parameters)(build)

        declare(function)
        for name in names:
            declare(getattr(torch.ops.aten, name))
            bindings = [getattr(home, name) for home in (torch, nn_functions) if hasattr(home, name)]
            declare(*bindings, reduction=_REDUCTION_OF_BINDINGS)
        return plan

    return decorate


def _reduction(function: Callable[..., Tensor], given: dict[str, Any]) -> str:
    """The reduction's name, which is taken out of the arguments."""
    reduction = given.pop("reduction")
    average, reduce = given.pop("size_average", None), given.pop("reduce", None)
    if (average, reduce) != (None, None):  # deprecated
        return "none" if reduce is False else "sum" if average is False else "mean"
    if type(reduction) is int:
        return REDUCTIONS[reduction]
    if reduction not in REDUCTIONS and (function, reduction) != (F.kl_div, "batchmean"):
        raise ValueError(f"{reduction} is not a valid value for reduction of {function.__name__}")
    return reduction  # type: ignore[no-any-return]


# -- elementwise -------------------------------------------------------------------------------------------------------

# Each with its tensor arguments.
_ELEMENTWISE: dict[Callable[..., Tensor], str] = {
    F.mse_loss: "input target weight",
    F.l1_loss: "input target weight",
    F.smooth_l1_loss: "input target",
    F.huber_loss: "input target weight",
    F.binary_cross_entropy: "input target weight",
    F.binary_cross_entropy_with_logits: "input target weight pos_weight",
    F.kl_div: "input target",
    F.soft_margin_loss: "input target",
    F.hinge_embedding_loss: "input target",
    F.poisson_nll_loss: "input target",
    F.margin_ranking_loss: "input1 input2 target",
}


def _plan_elementwise(function: Callable[..., Tensor], call: Arguments, given: dict[str, Any], reduction: str) -> Plan:
    """A loss whose terms depend on one element of each operand. Weights do not count for the terms' shape."""
    names = _ELEMENTWISE[function].split()
    specs = {name: given[name] for name in names if given.get(name) is not None}
    options = {name: value for name, value in given.items() if name not in names}
    if "weight" in specs and reduction == "mean" and function in (F.mse_loss, F.l1_loss):
        return Composed(partial(_weighted_mean, function, names, options))
    if reduction == "batchmean":
        first = specs[names[0]].shape
        reduction, divisor = "mean", first[0] if first else 1
    else:
        divisor = None
    meta = call.returned(function, **specs, **options, reduction="none")
    spec = common_layout([*specs.values()], meta_of(meta))
    count = meta.shape.numel() if divisor is None else divisor
    for name, own in specs.items():
        target = fit(own, spec)
        refuse_gathering(call.name, [own], [target])
        expanded = None if name.endswith("weight") else spec.own_shape
        if own.lies_like(spec) and own.own_shape == spec.own_shape and not own.partial_mesh_dims():
            continue  # the plan takes its local part
        call.prepare_locally(name, partial(_operand, target, spec, expanded))
    dtype = meta.dtype
    if call.autocast() is not None:

        def terms(*operands: Tensor) -> Tensor:
            return function(**dict(zip(specs, operands, strict=True)), **options, reduction="none")

        dtypes = [spec.tensor_meta.dtype for spec in specs.values()]
        dtype = autocast_dtype(terms, [[1]] * len(specs), dtypes, call.device)
    at_once = reduction != "none" and wide_dtype(dtype) == dtype

    def compute(*operands: Tensor | None) -> Tensor:
        named = {name: t for name, t in zip(names, operands, strict=True) if t is not None}
        value = function(**named, **options, reduction="sum" if at_once else "none")
        if not at_once:
            return reduced_loss(value, reduction, count)
        value = value / count if reduction == "mean" else value
        return value if value.dtype == dtype else value.to(dtype)

    return LocalPlan(compute, outputs_spec(spec, reduction, dtype))


def _operand(target: ShardTensorSpec, out: ShardTensorSpec, shape: Sequence[int] | None, t: ShardTensor) -> Tensor:
    """The local part of an operand, for terms with spec ``out``; expanded to ``shape`` if that is given."""
    local = local_part(redistribute_to(t, target), out)
    return local if shape is None or local.shape == shape else local.expand(shape)


def _weighted_mean(
    function: Callable[..., Tensor], names: Sequence[str], options: Mapping[str, Any], *tensors: Any
) -> Any:
    """The mean that divides by the sum of the weights."""
    named = dict(zip(names, tensors, strict=True))
    # By way of torch's module, whose functions are patched: torch's own l1_loss does not pass the weight on.
    patched = getattr(F, function.__name__)
    return patched(**named, **options, reduction="sum") / named["weight"].sum()


for _function, _tensors in _ELEMENTWISE.items():
    loss(_function, _function.__name__, tensors=_tensors)(_plan_elementwise)


# -- ctc ---------------------------------------------------------------------------------------------------------------

# ``ctc_loss``: connectionist temporal classification, whose batch may be sharded.


def _whole_numbers(value: Any, device: torch.device) -> Tensor:
    """Lengths, or targets that follow each other: a few numbers per entry of the batch, on every rank.

    torch takes them from the host, too: they are what its kernels are launched by.
    """
    if isinstance(value, ShardTensor):
        return value.full_tensor()
    return value.to(device) if isinstance(value, Tensor) else torch.tensor(list(value), device=device)


def _check_batch(given: dict[str, Any], batch: int) -> None:
    """Raise where targets or lengths are not those of ``batch`` sequences."""
    for name in ("input_lengths", "target_lengths"):
        lengths = given[name]
        n = lengths.numel() if isinstance(lengths, Tensor) else len(lengths)
        if n != batch:
            raise RuntimeError(f"{name} must be of size batch_size, {batch}, but has {n} elements")
    targets = given["targets"]
    if targets.ndim == 2 and targets.shape[0] != batch:
        raise RuntimeError(f"targets of shape {tuple(targets.shape)} are not of size {batch} at dimension 0")


@loss(F.ctc_loss, tensors="log_probs", parameters="targets input_lengths target_lengths")
def plan_ctc(function: Callable[..., Tensor], call: Arguments, given: dict[str, Any], reduction: str) -> Composed:
    names = ("log_probs", "targets", "input_lengths", "target_lengths")

    def ctc_loss(*tensors: Any) -> Any:
        found = given | {name: t for name, t in zip(names, tensors, strict=True) if t is not None}
        logs, targets = found["log_probs"], found["targets"]
        check_has_values("ctc_loss", logs)
        mesh = logs.device_mesh
        batched = logs.ndim == 3
        _check_batch(found, logs.shape[1] if batched else 1)
        inputs, lengths = (_whole_numbers(found[name], logs.device).reshape(-1) for name in names[2:])
        if not batched:
            logs, targets = logs.unsqueeze(1), targets.unsqueeze(0)
        if targets.ndim == 1:
            # One after the other: side by side, so that each entry of the batch has a row.
            numbers = _whole_numbers(targets, logs.device)
            longest = int(lengths.max()) if lengths.numel() else 0
            there = torch.arange(longest, device=lengths.device) < lengths[:, None]
            targets = numbers.new_zeros(there.shape).masked_scatter(there, numbers)
        elif not isinstance(targets, ShardTensor):
            targets = targets.to(logs.device)

        def loss_of(logs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor) -> Tensor:
            return F.ctc_loss(logs, targets, inputs, lengths, given["blank"], "none", given["zero_infinity"])

        with full_precision(mesh.device_type) as cast:
            operands: list[tuple[Any, Names]] = [
                (cast(logs), [None, "batch", None]),
                (targets, ["batch", None]),
                (inputs, ["batch"]),
                (lengths, ["batch"]),
            ]
            (terms,) = by_batch("ctc_loss", loss_of, operands, [(lengths.shape, ["batch"])])
            if reduction == "mean":
                return (terms / lengths.clamp(min=1).to(terms.device, terms.dtype)).mean()
            return terms.sum() if reduction == "sum" else terms if batched else terms.squeeze(0)

    return Composed(ctc_loss)
