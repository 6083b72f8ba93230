"""The one table from functions and aten operators to their distributed form; open to users' own operators.

Kinds of entry:

- a *function* (``torch.nn.functional.conv2d``, a tensor method, a library's function): the handler is called above
  autograd with the caller's arguments and returns what the function returns. Mostly it is an ``operators.Operator``,
  which finds or makes the plan of the call. Any function will do; it is then responsible for gradients, usually by
  calling an ``autograd.Function`` or differentiable operators. If an aten operator is among the functions, and has no
  rule, the handler is called below autograd, too, without a graph.
- an *aten operator* (``torch.ops.aten.flip.default``) with a *rule*, which makes plans below autograd.
- an *aten operator* with a handler, which is called below autograd with ShardTensors.
- default rules, for operators that have no entry: elementwise ones, and those for which a user has given DTensor a
  sharding strategy.

A handler may return ``NotImplemented``: the call then goes on as if there were no handler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from .._compat import OpOverload, OpOverloadPacket, decomposes, dispatched, strategies
from ..context import Setting
from ..errors import refuse

Handler = Callable[..., Any]

# NotImplemented, for functions with annotations. These leave it out, as those of Python's binary operators do; but mypy
# takes the name itself for Any, and asks for Any.
DECLINED: NoReturn = NotImplemented

FUNCTIONS: dict[Callable[..., Any], Handler] = {}
OPERATORS: dict[OpOverload, Handler] = {}
RULES: dict[OpOverload, Handler] = {}
# Functions with the shapes and dtypes of operators that torch does not run on meta tensors.
META_FUNCTIONS: dict[OpOverload, Handler] = {}
# Operators that have no distributed form, with the reason and the remedy; replicated tensors have them all the same.
REFUSED: dict[OpOverloadPacket, tuple[str, str]] = {}
_default_rules: list[tuple[str, Callable[[OpOverload], Handler | None]]] = []
# Why an operator is refused that has no distributed form, and what to do about it.
UNKNOWN = "no distributed form is known"
REMEDY = (
    "call inside shardtensor.allow_gather(), or register a handler, or for a custom operator a sharding strategy "
    "(torch.distributed.tensor.experimental.register_sharding)"
)
RANDOM = "random numbers of shards would not match one device", "draw on plain tensors"
# How often handlers have been registered or removed; plans and compiled graphs hold for one set of them.
_changes = Setting(0)


def _changed() -> None:
    _changes.set_everywhere(_changes.value + 1)


def _table(func_or_op: Callable[..., Any]) -> dict[Any, Handler]:
    return OPERATORS if isinstance(func_or_op, OpOverload) else FUNCTIONS


def register(*funcs_or_ops: Callable[..., Any]) -> Callable[[Handler], Handler]:
    """Register a handler for functions or aten operators, as a decorator.

    Args:
        funcs_or_ops: Python functions that dispatch on ``__torch_function__`` (every ``torch.*`` function and tensor
            method does), or aten overloads such as ``torch.ops.aten.flip.default``.

    Raises:
        ValueError: one of them has a handler already. Call :func:`unregister` first.
        TypeError: something that cannot be called.

    Example:
        >>> import torch, shardtensor
        >>> def half(x):
        ...     if torch.overrides.has_torch_function_unary(x):
        ...         return torch.overrides.handle_torch_function(half, (x,), x)
        ...     return x / 2
        >>> @shardtensor.extend.register(half)
        ... def _(x):
        ...     return x * 0.5
        >>> half in shardtensor.extend.registered()
        True
        >>> shardtensor.extend.unregister(half)
    """
    for f in funcs_or_ops:
        if not callable(f):
            raise TypeError(f"{f!r} is neither a function nor an operator overload")
        if f in _table(f):
            raise ValueError(f"{f} has a handler already; unregister it first")

    def decorate(handler: Handler) -> Handler:
        _changed()
        for f in funcs_or_ops:
            _table(f)[f] = handler
        return handler

    return decorate


def declare(spelling: Callable[..., Any], handler: Handler) -> None:
    """Make ``handler`` that of a function or operator above autograd; ValueError where there is one already."""
    if spelling in FUNCTIONS:
        raise ValueError(f"{spelling} has a handler already; unregister it first")
    _changed()
    FUNCTIONS[spelling] = handler


def declare_rule(op: Any, build: Handler, meta: Handler | None = None) -> None:
    """Have ``build`` make the plans of an aten operator; ValueError where another function does already."""
    if op in RULES:
        raise ValueError(f"{op} has a rule already; unregister it first")
    _changed()
    RULES[op] = build
    if meta is not None:
        META_FUNCTIONS[op] = meta


def default_rule(
    how: str,
) -> Callable[[Callable[[OpOverload], Handler | None]], Callable[[OpOverload], Handler | None]]:
    """Decorator: ``find(op)`` gives the rule of operators that have none of their own, or None.

    ``how`` is what :func:`supports` calls them. The first that has a rule gives it.
    """

    def decorate(find: Callable[[OpOverload], Handler | None]) -> Callable[[OpOverload], Handler | None]:
        _default_rules.append((how, find))
        return find

    return decorate


def rule_of(op: OpOverload) -> Handler | None:
    """The rule that makes the plans of an aten operator, if there is one."""
    return RULES.get(op) or _default_of(op)[1]


def function_of(op: OpOverload) -> Handler | None:
    """The handler of an operator that is called by its name."""
    return FUNCTIONS.get(op) or FUNCTIONS.get(op.overloadpacket)


def _default_of(op: OpOverload) -> tuple[str, Handler | None]:
    found = ((how, find(op)) for how, find in _default_rules)
    return next(((how, rule) for how, rule in found if rule is not None), ("", None))


def unregister(*funcs_or_ops: Any) -> None:
    """Remove the handler of each function or operator, or else its rule. KeyError if there is neither."""
    for f in funcs_or_ops:
        table = next((table for table in (OPERATORS, FUNCTIONS, RULES) if f in table), None)
        if table is None:
            raise KeyError(f)
        del table[f]
        if table is RULES:
            META_FUNCTIONS.pop(f, None)
    _changed()


def registered() -> dict[Any, Handler]:
    """Return all entries, ``{function or aten operator: handler or rule}``, as a copy. See also :func:`supports`.

    Operators with your own sharding strategies for DTensor have the entry ``strategies.fall_back``.
    """
    fallen = {op: rule for op in strategies() for how, rule in [_default_of(op)] if rule and how == "strategy"}
    return {**fallen, **RULES, **OPERATORS, **FUNCTIONS}


@dataclass(frozen=True)
class Refusal:
    """A handler that refuses whatever it is called with, for what no shards can do.

    Attributes:
        name: of the operator.
        where: the module that refuses it.
        reason, remedy: as the error says.
    """

    name: str
    where: str
    reason: str
    remedy: str

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        operands = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        raise refuse(self.name, operands, self.reason, self.remedy)


# -- what is supported -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Support:
    """Whether an operator is supported on ShardTensors. Returned by :func:`supports`.

    Attributes:
        supported: whether there is a distributed form. This form is exact for all layouts that are not refused.
        how: "declared" (it has its own plan or handler), "elementwise" (each rank works on its shard), "decomposed"
            (torch composes it of other operators, some of which may be refused), "strategy" (you have registered a
            sharding strategy for it with DTensor), or "refused".
        where: the module that holds the form; empty if there is none.
        reason: the refused layouts and arguments, or the reason and remedy of a refusal; empty if the form is exact for
            all layouts.
    """

    supported: bool
    how: str
    where: str = ""
    reason: str = ""

    def __bool__(self) -> bool:
        return self.supported


# What forms refuse: {(module, name of the function, or "" for all others of the module): text}.
CONDITIONS: dict[tuple[str, str], str] = {}

# Of torch.func's transforms, which are not called with ShardTensors, but with functions of them.
TRANSFORMS: dict[Callable[..., Any], Support] = {}


def supports(func_or_op: Any) -> Support:
    """Return whether and how ShardTensors support a function, tensor method, aten operator or transform.

    Example:
        >>> import torch, shardtensor
        >>> answer = shardtensor.supports(torch.nn.functional.conv2d)
        >>> answer.how, answer.where
        ('declared', 'shardtensor.ops.convolution.conv')
        >>> answer.reason
        'refused: sharded weights'
        >>> bool(shardtensor.supports(torch.segment_reduce))
        False
        >>> shardtensor.supports(torch.func.grad).reason
        'refused: writes to an argument that is differentiated by'
    """
    if not callable(func_or_op):
        raise TypeError(f"{func_or_op!r} is neither a function nor an operator overload")
    if func_or_op in TRANSFORMS:
        return TRANSFORMS[func_or_op]
    handler = FUNCTIONS.get(func_or_op) or OPERATORS.get(func_or_op) or RULES.get(func_or_op)
    if handler is None and isinstance(func_or_op, OpOverload):
        handler = function_of(func_or_op)
    if isinstance(handler, Refusal):
        return Support(False, "refused", handler.where, f"{handler.reason}; {handler.remedy}")
    if handler is not None:
        return Support(True, "declared", handler.__module__, _condition(handler.__module__, func_or_op))
    if isinstance(func_or_op, OpOverload):
        return _support_of_overload(func_or_op)
    packet = func_or_op if isinstance(func_or_op, OpOverloadPacket) else _packet_of(func_or_op)
    if packet is None:  # Python code, which calls other operators
        return Support(True, "decomposed", reason="as far as the operators that it calls are")
    overloads = [getattr(packet, name) for name in packet.overloads()]
    found = [supports(op) for op in overloads if dispatched(op) and not any(a.is_out for a in op._schema.arguments)]
    order = ("refused", "decomposed", "strategy", "elementwise", "declared")
    return max(found, key=lambda answer: order.index(answer.how), default=Support(False, "refused"))


def _condition(where: str, func_or_op: Callable[..., Any]) -> str:
    """What the form of a function in a module refuses, as :class:`Support` tells it."""
    name = getattr(func_or_op, "__name__", "").partition(".")[0].strip("_").removeprefix("linalg_")
    text = CONDITIONS.get((where, name)) or CONDITIONS.get((where, ""), "")
    return text and f"refused: {text}"


def _support_of_overload(op: OpOverload) -> Support:
    how, rule = _default_of(op)
    if rule is not None:
        return Support(True, how, rule.__module__, _condition(rule.__module__, op))
    if decomposes(op):
        return Support(True, "decomposed", reason="as far as the operators that torch composes it of are")
    functional = getattr(torch.ops.aten, op._schema.name.split("::")[1].removesuffix("_"), None)
    if op._schema.name.endswith("_") and functional is not None and functional is not op.overloadpacket:
        return supports(functional)
    return Support(False, "refused", reason="; ".join(REFUSED.get(op.overloadpacket, (UNKNOWN, REMEDY))))


def _packet_of(function: Callable[..., Any]) -> Any:
    """The aten operator that a function or method of torch calls, found by name."""
    name = "" if getattr(function, "__module__", "") == "builtins" else getattr(function, "__name__", "")
    for candidate in (name, f"linalg_{name}", f"fft_{name}", f"special_{name}"):
        if not candidate.startswith("__") and hasattr(torch.ops.aten, candidate):
            return getattr(torch.ops.aten, candidate)
    return None
