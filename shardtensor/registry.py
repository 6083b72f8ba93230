"""The one table from functions and aten operators to their distributed form; open to users' own operators.

Two kinds of entry:

- a *function* (``torch.nn.functional.conv2d``, a tensor method, a library's function): the handler is called above
  autograd with the caller's arguments and returns what the function returns. It is responsible for gradients,
  usually by calling an ``autograd.Function`` or differentiable operators.
- an *aten operator* (``torch.ops.aten.flip.default``): the handler is called below autograd with ShardTensors.

A handler may return ``NotImplemented``: the call then goes on as if there were no handler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .context import Setting

__all__ = ["FUNCTIONS", "OPERATORS", "declare", "register", "registered", "unregister"]

Handler = Callable[..., Any]

FUNCTIONS: dict[Callable[..., Any], Handler] = {}
OPERATORS: dict[torch._ops.OpOverload, Handler] = {}
# How often handlers have been registered or removed; plans and compiled graphs hold for one set of them.
_changes = Setting(0)


def _table(func_or_op: Any) -> dict[Any, Handler]:
    return OPERATORS if isinstance(func_or_op, torch._ops.OpOverload) else FUNCTIONS


def register(*funcs_or_ops: Any) -> Callable[[Handler], Handler]:
    """Decorator: make the function below it the handler of these functions or aten operators.

    Args:
        funcs_or_ops: Python functions that dispatch on ``__torch_function__`` (every ``torch.*`` function and tensor
            method does), or aten overloads such as ``torch.ops.aten.flip.default``.

    Raises:
        ValueError: one of them has a handler already; :func:`unregister` it first.
        TypeError: something that cannot be called.

    Example:
        >>> import torch, shardtensor
        >>> def half(x):
        ...     if torch.overrides.has_torch_function_unary(x):
        ...         return torch.overrides.handle_torch_function(half, (x,), x)
        ...     return x / 2
        >>> @shardtensor.register(half)
        ... def _(x):
        ...     return x * 0.5
        >>> half in shardtensor.registered()
        True
        >>> shardtensor.unregister(half)
    """
    for f in funcs_or_ops:
        if not callable(f):
            raise TypeError(f"{f!r} is neither a function nor an operator overload")
        if f in _table(f):
            raise ValueError(f"{f} has a handler already; unregister it first")

    def decorate(handler: Handler) -> Handler:
        _changes.set(_changes.value + 1)
        for f in funcs_or_ops:
            _table(f)[f] = handler
        return handler

    return decorate


def declare(spelling: Callable[..., Any], handler: Handler) -> None:
    """Make ``handler`` that of a function or operator above autograd; ValueError where there is one already."""
    if spelling in FUNCTIONS:
        raise ValueError(f"{spelling} has a handler already; unregister it first")
    _changes.set(_changes.value + 1)
    FUNCTIONS[spelling] = handler


def unregister(*funcs_or_ops: Any) -> None:
    """Remove handlers; KeyError where there is none."""
    _changes.set(_changes.value + 1)
    for f in funcs_or_ops:
        del _table(f)[f]


def registered() -> dict[Any, Handler]:
    """All entries: ``{function or aten operator: handler}`` (a copy)."""
    return {**FUNCTIONS, **OPERATORS}
