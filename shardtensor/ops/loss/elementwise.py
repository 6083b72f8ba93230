"""Losses, exact on unequal shards: value and gradient.

Each rank computes the terms of its shard with torch's own function and ``reduction="none"``, sums them, and divides
by the *global* count or weight: the result is a Partial(sum) scalar, reduced when it is needed. Targets and weights
that are cut otherwise than the input are brought to its cut; plain ones count as replicated and are cut locally.

Losses that torch composes of other operators, like ``cosine_embedding_loss``, need nothing here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._compat import TensorMeta
from ...registry import register
from ...spec import ShardTensorSpec, contiguous_stride
from ...tensor import ShardTensor, from_part
from ..common.alignment import as_operand, common_cut, common_mesh, fit, local_part, moved, torch_judges, wide_dtype
from .kernels import WITH_KERNEL, scalar_spec

__all__ = ["contribution", "full_precision", "reduced", "register_loss"]

# -- reducing terms to a value ------------------------------------------------------------------------------------


def reduced(terms: Tensor, spec: ShardTensorSpec, reduction: str, divisor: Any) -> Any:
    """The loss, from this rank's terms, which lie like ``spec``; ``divisor`` is what a mean divides by."""
    if reduction == "none":
        meta = TensorMeta(spec.shape, contiguous_stride(spec.shape), terms.dtype)
        return from_part(terms, spec.replace(meta=meta))
    # In float32 at least: a mean of half precision numbers must not overflow on its way.
    total = terms.sum(dtype=wide_dtype(terms.dtype))
    return contribution(total, spec, terms.dtype, divisor if reduction == "mean" else None)


def contribution(total: Tensor, spec: ShardTensorSpec, dtype: torch.dtype, divisor: Any) -> Any:
    """The loss, from the sum of this rank's terms, which lie like ``spec``; None: it is a sum, not a mean."""
    value = total if divisor is None else total / divisor
    return from_part(value.to(dtype), scalar_spec(spec, dtype))


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


# -- doors --------------------------------------------------------------------------------------------------------


# Called from Python below torch.nn.functional, torch's losses do not reduce by default, though they are declared to.
_REDUCTION_OF_BINDINGS = 0 if torch.kl_div(torch.zeros(2), torch.zeros(2)).ndim else 1


def register_loss(function: Callable[..., Tensor], handler: Callable[[dict[str, Any], str], Any], *names: str) -> None:
    """Make ``handler(arguments by name, reduction)`` that of a loss in ``torch.nn.functional``, and of the operators
    ``names`` below it, which take a number for the reduction.
    """
    signature = inspect.signature(function)
    places = list(signature.parameters)
    names_of_all = signature.parameters.keys()
    defaults = {n: p.default for n, p in signature.parameters.items() if p.default is not inspect.Parameter.empty}

    def functional(*args: Any, **kwargs: Any) -> Any:
        given = {**defaults, **dict(zip(places, args)), **kwargs}
        fits = len(args) <= len(places) and given.keys() == names_of_all
        if not fits or kwargs.keys() & places[: len(args)]:
            signature.bind(*args, **kwargs)  # Python's own error
        reduction = given.pop("reduction")
        average, reduce = given.pop("size_average", None), given.pop("reduce", None)
        if (average, reduce) != (None, None):  # deprecated
            reduction = "none" if reduce is False else "sum" if average is False else "mean"
        if reduction not in ("none", "mean", "sum") and (function, reduction) != (F.kl_div, "batchmean"):
            raise ValueError(f"{reduction} is not a valid value for reduction of {function.__name__}")
        return handler(given, reduction)

    def by_operator(order: list[str], reduction: int) -> Callable[..., Any]:
        """The handler of an operator with arguments in this order, and this reduction where none is given."""

        def by_name(*args: Any, **kwargs: Any) -> Any:
            given = {**dict(zip(order, args)), **kwargs}
            given = {"input" if k == "self" else k: v for k, v in given.items()}
            if "reduction" in order:
                given["reduction"] = ("none", "mean", "sum")[given.get("reduction", reduction)]
            return functional(**given)

        return by_name

    register(function)(functional)
    for name in names:
        packet = getattr(torch.ops.aten, name)
        order = ["input" if a.name == "self" else a.name for a in packet.default._schema.arguments]
        register(packet)(by_operator(order, 1))
        bindings = [getattr(home, name) for home in (torch, torch._C._nn) if hasattr(home, name)]
        register(*bindings)(by_operator(order, _REDUCTION_OF_BINDINGS))


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


def _linear_cross_entropy(given: dict[str, Any], reduction: str) -> Any:
    """Torch's reference: a linear layer, then ``cross_entropy``. ``options`` would save memory."""
    x, w, target, bias = (given[k] for k in ("input", "linear_weight", "target", "linear_bias"))
    if not any(isinstance(t, ShardTensor) for t in (x, w, target, bias, given["weight"])):
        return NotImplemented
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
    register_loss(F.linear_cross_entropy, _linear_cross_entropy)
