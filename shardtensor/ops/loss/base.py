"""What losses share: their declaration, terms reduced to a value, autocast."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate

from ..._compat import TensorMeta, nn_functions
from ...layout.caches import cached
from ...layout.spec import ShardTensorSpec
from ...layout.strides import contiguous_stride
from ...operators.declaration import Arguments, Plan, operator
from ..common.alignment import wide_dtype

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


def reduced(terms: Tensor, reduction: str, divisor: Any) -> Tensor:
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
        tensors, parameters: as of :func:`shardtensor.operator`; parameters may be sharded.
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
