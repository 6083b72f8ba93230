"""Losses, exact on unequal shards: value and gradient.

Each rank computes the terms of its shard with torch's own function and ``reduction="none"``, sums them, and divides
by the *global* count or weight: the result is a Partial(sum) scalar, reduced when it is needed. Targets and weights
that are cut otherwise than the input are brought to its cut; plain ones count as replicated and are cut locally.

Losses that torch composes of other operators, like ``cosine_embedding_loss``, need nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...tensor import ShardTensor
from ..common.alignment import as_operand, common_cut, common_mesh, fit, local_part, moved, torch_judges, wide_dtype
from .base import contribution, reduced, register_loss
from .kernels import WITH_KERNEL

__all__ = []

# -- losses that treat every element alone --------------------------------------------------------------------------


def _elementwise(
    function: Callable[..., Tensor],
    tensors: dict[str, Any],
    options: dict[str, Any],
    reduction: str,
    divisor: int | None = None,
) -> Any:
    """A loss whose terms depend on one element of each operand.

    Args:
        function: torch's.
        tensors: its tensor arguments by name; None where not given. Weights do not count for the terms' shape.
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
    for k, t in local.items():
        if t.shape != spec.own_shape and not k.endswith("weight"):
            local[k] = t.expand(spec.own_shape)
    divisor = meta.shape.numel() if divisor is None else divisor
    if reduction == "none" or wide_dtype(meta.dtype) != meta.dtype:
        return reduced(function(**local, **options, reduction="none"), spec, reduction, divisor)
    total = function(**local, **options, reduction="sum")
    return contribution(total, spec, total.dtype, divisor if reduction == "mean" else None)


def _alike(a: Any, b: Any) -> bool:
    """Whether both are ShardTensors of the same shape, dtype and cut, and not Partial."""
    if not isinstance(a, ShardTensor) or not isinstance(b, ShardTensor):
        return False
    spec = a._spec
    return (spec is b._spec or spec == b._spec) and spec.for_gradient() is spec


# Each with its tensor arguments.
_ELEMENTWISE: dict[Callable[..., Tensor], tuple[str, ...]] = {
    F.mse_loss: ("input", "target", "weight"),
    F.l1_loss: ("input", "target", "weight"),
    F.smooth_l1_loss: ("input", "target"),
    F.huber_loss: ("input", "target", "weight"),
    F.binary_cross_entropy: ("input", "target", "weight"),
    F.binary_cross_entropy_with_logits: ("input", "target", "weight", "pos_weight"),
    F.kl_div: ("input", "target"),
    F.soft_margin_loss: ("input", "target"),
    F.hinge_embedding_loss: ("input", "target"),
    F.poisson_nll_loss: ("input", "target"),
    F.margin_ranking_loss: ("input1", "input2", "target"),
}


def _register_elementwise(function: Callable[..., Tensor], names: tuple[str, ...]) -> None:
    has_kernel = function in WITH_KERNEL

    def handler(given: dict[str, Any], reduction: str) -> Any:
        composed = given.get("weight") is not None or given.get("beta") == 0
        if has_kernel and not composed and _alike(given["input"], given["target"]):
            return NotImplemented  # there is nothing to be seen to above autograd
        tensors, divisor = {k: given.pop(k, None) for k in names}, None
        if reduction == "batchmean":
            first = tensors["input"]
            reduction, divisor = "mean", first.shape[0] if first.ndim else 1
        weight = tensors.get("weight")
        if weight is not None and reduction == "mean" and function in (F.mse_loss, F.l1_loss):
            total = _elementwise(function, tensors, given, "sum")
            return total if total is NotImplemented else total / weight.sum()
        return _elementwise(function, tensors, given, reduction, divisor)

    register_loss(function, handler, function.__name__)


for _function, _names in _ELEMENTWISE.items():
    _register_elementwise(_function, _names)


# -- composed ---------------------------------------------------------------------------------------------------------


def _multilabel_soft_margin(given: dict[str, Any], reduction: str) -> Any:
    """Torch's own composition; its ``logsigmoid`` has no distributed form below autograd."""
    x, y, weight = given["input"], given["target"], given["weight"]
    if not any(isinstance(t, ShardTensor) for t in (x, y, weight)):
        return NotImplemented
    loss = -(y * F.logsigmoid(x) + (1 - y) * F.logsigmoid(-x))
    if weight is not None:
        loss = loss * weight
    loss = loss.sum(x.ndim - 1) / x.shape[x.ndim - 1]
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


register_loss(F.multilabel_soft_margin_loss, _multilabel_soft_margin)
