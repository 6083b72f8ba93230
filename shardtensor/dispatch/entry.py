"""Where torch's calls with ShardTensors come in: above autograd each torch function, below it each aten operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from .._compat import SCRIPTED, OpOverload, recorded_by_torchscript, transforms_active
from .._compat.functorch import forward_mode
from ..context import gather_allowed
from ..errors import PLAIN_TARGET, UnsupportedSharding, refuse
from ..layout.spec import ShardTensorSpec
from ..ranks.compared_operands import forget_operands, note_operand
from ..ranks.history import here
from . import transform_levels
from .aten_calls import run
from .copied_views import mark_copied
from .planning import SCALARS, converted, flat
from .registry import FUNCTIONS, function_of
from .size_errors import explain, writes
from .tensor import ShardTensor, from_dtensor, promote, redistribute_to
from .written import LISTS, MAY_BE_WRITTEN, WrittenTensor, call_on_sharded, write_to_plain

# What runs a graph cannot run it on other tensors instead.
ENGINE = (torch.autograd.backward, torch.autograd.grad, Tensor.backward)

_TRACED = (
    "torch.jit.trace would record what is done to this rank's shard",
    "trace the module on plain tensors of the global shape, and call what is traced with ShardTensors",
)
# What a call may have besides tensors to promote.
_AS_THEY_ARE = SCALARS | {ShardTensor}
# What it may write to besides ShardTensors.
_TARGETS = MAY_BE_WRITTEN | LISTS


def enter(
    cls: type,
    func: Callable[..., Any],
    types: Sequence[type],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    otherwise: Callable[..., Any] | None = None,
) -> Any:
    """A call of a torch function, method or operator with ShardTensors: ``ShardTensor.__torch_function__``.

    The first of these that has a form for the call makes it: what is unusual about it, a registered handler,
    ``otherwise``, or torch, whose operators reach ``__torch_dispatch__``.

    Args:
        otherwise: called with the arguments in place of torch, see patches.py.
    """
    given = args, kwargs = args, kwargs or {}
    try:
        if (
            len(types) > 1
            or not args
            or type(args[0]) is not ShardTensor
            or "out" in kwargs
            or transforms_active()
            or forward_mode._current_level >= 0
        ):
            result = _unusual(func, types, args, kwargs)
            if result is not NotImplemented:
                return result
        # Called by name, an operator is a function, too.
        handler = function_of(func) if isinstance(func, OpOverload) else FUNCTIONS.get(func)
        if handler is not None:
            if recorded_by_torchscript():
                raise refuse(getattr(func, "__name__", func), flat(args, kwargs), *_TRACED)
            try:
                result = handler(*args, **kwargs)
            except UnsupportedSharding:
                if not gather_allowed() or func in ENGINE:
                    raise
                result = _gather_and_call(func, handler, args, kwargs)
            if result is not NotImplemented:
                return result
        if otherwise is not None:
            return otherwise(*args, **kwargs)
        if not _AS_THEY_ARE.issuperset(map(type, (*args, *kwargs.values()) if kwargs else args)):
            args, kwargs = _promote_operands(func, args, kwargs)
        return DTensor.__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
    except Exception as error:
        _raise_better(func, *given, error)
        raise


def enter_below(
    cls: type, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """A call of an aten operator with ShardTensors, which autograd is done with: ``ShardTensor.__torch_dispatch__``."""
    try:
        return run(func, args, kwargs or {})
    except UnsupportedSharding as error:
        here.refused = str(error)
        raise


ShardTensor.__torch_function__ = classmethod(enter)  # type: ignore[assignment]
ShardTensor.__torch_dispatch__ = classmethod(enter_below)  # type: ignore[assignment]


def _unusual(func: Callable[..., Any], types: Sequence[type], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a call returns that is about more than values of ShardTensors; NotImplemented for any other.

    Such are calls with plain tensors that were written to, or that are written to now, inside of levels of
    ``torch.func`` or forward mode, and with ``out=``.
    """
    if WrittenTensor in types:
        return call_on_sharded(func, args, kwargs)
    if transforms_active() or forward_mode._current_level >= 0:
        result = transform_levels.carried_out(func, args, kwargs)
        if result is not NotImplemented:
            return result
    if args and type(args[0]) in _TARGETS and writes(func):
        result = write_to_plain(func, args, kwargs)
        if result is not NotImplemented:
            return result
    return NotImplemented if kwargs.get("out") is None else _write_out(func, args, kwargs)


def _raise_better(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], error: Exception) -> None:
    """Raise an error that says more than one that a call raised, where there is one."""
    forget_operands((*args, *kwargs.values()))
    refused, here.refused = here.refused, ""
    if refused and isinstance(func, SCRIPTED):  # TorchScript's own error has lost the text
        remedy = "Inside TorchScript operators have fewer forms: call the module that was scripted or traced instead."
        raise UnsupportedSharding(f"{refused} {remedy}") from error
    explain(func, args, kwargs, error)


def _promote_operands(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Turn plain tensors that require grad, and DTensors, into ShardTensors: below autograd it would be too late."""
    given = flat(args, kwargs)
    if not any(map(_to_promote, given)):
        return args, kwargs
    mesh = next((a._spec.mesh for a in given if isinstance(a, ShardTensor)), None)
    if mesh is None:
        return args, kwargs
    name = getattr(func, "__name__", "")
    if recorded_by_torchscript():
        raise refuse(name, given, *_TRACED)
    first = args[0] if args else None
    if writes(func) and isinstance(first, (list, tuple)):
        return args, kwargs  # each is written to where it lies
    if writes(func) and not isinstance(first, ShardTensor):
        others = [a for a in given if isinstance(a, ShardTensor)]
        # A DTensor takes numbers next to it, such as the factor by which gradients are clipped.
        if any(not a._spec.is_replicate() or (a.ndim and isinstance(first, DTensor)) for a in others):
            raise refuse(name, given, *PLAIN_TARGET)
        # Every rank has all of what is written, and of the places.
        return converted(lambda a: a.to_local() if isinstance(a, ShardTensor) else a, args, kwargs)
    if name in ("__get__", "__set__", "backward") or (getattr(func, "__module__", None) or "").startswith(
        "torch.autograd"
    ):
        return args, kwargs  # these are about the very tensors that they are given

    def convert(a: object) -> object:
        if isinstance(a, ShardTensor):
            return a
        if isinstance(a, DTensor):
            return from_dtensor(a)
        if isinstance(a, Tensor) and a.requires_grad:
            note_operand(name, a, mesh)
            return promote(a, mesh)
        return a

    return converted(convert, args, kwargs)


def _to_promote(a: object) -> bool:
    if type(a) in SCALARS:
        return False
    if isinstance(a, DTensor):
        return not isinstance(a, ShardTensor)
    return isinstance(a, Tensor) and a.requires_grad and torch.is_grad_enabled()


def _write_out(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A function with ``out=``: what it returns without, copied into ShardTensors, which keep their sizes."""
    out = kwargs["out"]
    outs = out if isinstance(out, (list, tuple)) else (out,)
    name, tensors = getattr(func, "__name__", str(func)), [a for a in (*args, *outs) if isinstance(a, Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise RuntimeError(f"{name}(): functions with out=... arguments don't support automatic differentiation")
    if isinstance(func, OpOverload):
        func = func.overloadpacket
    result = func(*args, **{k: v for k, v in kwargs.items() if k != "out"})
    results = result if isinstance(result, (list, tuple)) else (result,)
    for target, value in zip(outs, results, strict=True):
        if target.shape != value.shape:
            reason = f"out= has shape {tuple(target.shape)}, but the result {tuple(value.shape)}"
            raise refuse(name, target, reason, "pass a ShardTensor of the result's shape")
        if not torch.can_cast(value.dtype, target.dtype):
            raise RuntimeError(f"result type {value.dtype} can't be cast to the desired output type {target.dtype}")
        target.copy_(value)
    return type(result)(outs) if isinstance(result, (list, tuple)) else out


def _gather_and_call(
    func: Callable[..., Any], handler: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Inside ``allow_gather``: a refused function on whole tensors, its result sharded as its first operand was."""
    operands = [a for a in flat(args, kwargs) if isinstance(a, ShardTensor)]
    sharded = [a._spec for a in operands if not a._spec.is_replicate()]
    if not sharded:
        raise  # the refusal that is being handled: there is nothing to gather

    written = args[0] if args and (writes(func) or kwargs.get("inplace")) else None
    args, kwargs = converted(
        lambda a: redistribute_to(a, a._spec.replicated()) if isinstance(a, ShardTensor) else a, args, kwargs
    )
    result = handler(*args, **kwargs)  # libraries' functions dispatch on nothing
    if result is NotImplemented:
        result = func(*args, **kwargs)
    if isinstance(written, ShardTensor):
        if written is not args[0]:
            written.copy_(args[0])
        return None if result is None else written
    if not isinstance(result, ShardTensor):
        return result
    is_view, result = result._is_view(), _sharded_like(sharded[0], result)
    return mark_copied(result, operands[0]) if is_view else result


def _sharded_like(pattern: ShardTensorSpec, result: ShardTensor) -> ShardTensor:
    """A replicated result sharded like an operand along the dims whose length it has kept."""
    if result.ndim != len(pattern.shape):
        return result
    sizes = {m: s for d, m in pattern.sharded_dims().items() if (s := pattern.sizes[m]) and result.shape[d] == sum(s)}
    placements = [p if m in sizes else Replicate() for m, p in enumerate(pattern.placements)]
    return result.redistribute(placements=placements, shard_sizes=sizes)
