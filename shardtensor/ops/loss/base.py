"""What losses share: terms reduced to a value, autocast, the entry points in ``torch.nn.functional`` and below."""

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
from ...spec import ShardTensorSpec
from ...strides import contiguous_stride
from ...tensor import from_part
from ..common.alignment import wide_dtype
from .kernels import scalar_spec


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

    functional.__module__ = handler_module = getattr(handler, "func", handler).__module__

    def by_operator(order: list[str], reduction: int) -> Callable[..., Any]:
        """The handler of an operator with arguments in this order, and this reduction where none is given."""

        def by_name(*args: Any, **kwargs: Any) -> Any:
            given = {**dict(zip(order, args)), **kwargs}
            given = {"input" if k == "self" else k: v for k, v in given.items()}
            if "reduction" in order:
                given["reduction"] = ("none", "mean", "sum")[given.get("reduction", reduction)]
            return functional(**given)

        by_name.__module__ = handler_module
        return by_name

    register(function)(functional)
    for name in names:
        packet = getattr(torch.ops.aten, name)
        order = ["input" if a.name == "self" else a.name for a in packet.default._schema.arguments]
        register(packet)(by_operator(order, 1))
        bindings = [getattr(home, name) for home in (torch, torch._C._nn) if hasattr(home, name)]
        register(*bindings)(by_operator(order, _REDUCTION_OF_BINDINGS))
