"""Losses of one element at a time, exact on unequal shards: value and gradient.

Each rank computes the terms of its shard with torch's own function, sums them, and divides by the *global* count or
weight: the result is a Partial(sum) scalar, reduced when it is needed. Targets and weights whose layout is not the
input's are brought to it; plain ones count as replicated and are sharded locally.
Losses that torch composes of other operators, like ``cosine_embedding_loss``, need nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...dispatch.planning import meta_of
from ...dispatch.tensor import ShardTensor, redistribute_to
from ...layout.spec import ShardTensorSpec
from ...operators.arguments import autocast_dtype
from ...operators.declaration import Arguments, Composed, LocalPlan, Plan
from ..common.alignment import common_layout, fit, local_part, refuse_gathering, wide_dtype
from .base import loss, outputs_spec, reduced

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
            return reduced(value, reduction, count)
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


# -- composed ---------------------------------------------------------------------------------------------------------


@loss(F.multilabel_soft_margin_loss, tensors="input target weight")
def _plan_multilabel_soft_margin(
    function: Callable[..., Tensor], call: Arguments, given: dict[str, Any], reduction: str
) -> Composed:
    """Torch's own composition; its ``logsigmoid`` has no distributed form below autograd."""

    def multilabel_soft_margin(x: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
        terms = -(y * F.logsigmoid(x) + (1 - y) * F.logsigmoid(-x))
        if weight is not None:
            terms = terms * weight
        terms = terms.sum(x.ndim - 1) / x.shape[x.ndim - 1]
        return terms if reduction == "none" else terms.mean() if reduction == "mean" else terms.sum()

    return Composed(multilabel_soft_margin)
