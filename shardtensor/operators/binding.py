"""The arguments of a call, by the names of the declaration of its operator, whatever the spelling.

Tensors are bound by their place among the call's tensors, as the plan that is made is kept for other tensors, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from .._compat import OpOverload, OpOverloadPacket
from ..dispatch.planning import converted

# Arguments of some spellings that plans do not depend on: those that choose among a device's kernels, and ``out``,
# which is None here, see ShardTensor.__torch_function__.
_OF_KERNELS = frozenset({"cudnn_enable", "cudnn_enabled", "out"})
# NumPy's names of arguments, which torch's operators take for their own.
_OF_NUMPY = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other"}


# -- tensors, by their place -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Stands where a call has its ``index``-th tensor."""

    index: int


def placed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with places for tensors, in the order in which look_up collects these."""
    places = count()
    return converted(lambda value: Place(next(places)) if isinstance(value, Tensor) else value, args, kwargs)


def place_of(value: Any) -> Any:
    """The place of an argument among the call's tensors: a number, a tuple of them for a list; None: no tensor."""
    if isinstance(value, Place):
        return value.index
    if isinstance(value, (list, tuple)) and any(isinstance(item, Place) for item in value):
        return tuple(map(place_of, value))
    return None


def places_in(value: Any) -> Iterator[int]:
    """The places of all tensors in an argument."""
    if isinstance(value, Place):
        yield value.index
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from places_in(item)


# -- arguments, by their name ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Declaration:
    """What :func:`shardtensor.operator` was given.

    Attributes:
        build: the function that makes plans.
        tensors, parameters, partial, sharded: names of its arguments.
        sparse: what is called where one of them is sparse, if anything.
        signature: of the operator, as ``build`` has it after the call.
        names: all tensors, in the order of the declaration.
    """

    build: Callable[..., Any]
    tensors: tuple[str, ...]
    parameters: tuple[str, ...]
    partial: tuple[str, ...]
    sharded: tuple[str, ...]
    sparse: Callable[..., Any] | None
    signature: inspect.Signature
    names: tuple[str, ...]

    def called(self, name: str) -> str:
        """What the declaration calls an argument: the first one is often ``self`` for methods and operators."""
        parameters = self.signature.parameters
        if name in parameters:
            return name
        return next(iter(parameters)) if name == "self" else _OF_NUMPY.get(name, name)

    def arguments_of(self, spelling: Callable[..., Any]) -> tuple[str, ...] | None:
        """The names of a spelling's positional arguments, in its own order; None: as in the declaration."""
        if any(p.kind == p.VAR_POSITIONAL for p in self.signature.parameters.values()):
            return None
        forms = [tuple(map(self.called, names)) for names in argument_names(spelling)]
        known = [names for names in forms if all(n in self.signature.parameters or n in _OF_KERNELS for n in names)]
        if forms and not known:
            raise TypeError(f"the plan of {spelling} lacks arguments of {spelling}, which has {forms}")
        return max(known, key=len, default=None)

    def has_other_tensors(self, spelling: Callable[..., Any]) -> bool:
        """Whether an overload of the spelling takes a tensor as an argument that the declaration has for another use.

        ``torch.max(x, t)`` is elementwise, whatever ``t`` is: there it is no ``dim``.
        """
        packet = getattr(torch.ops.aten, getattr(spelling, "__name__", ""), None)
        schemas = [] if packet is None else [getattr(packet, name)._schema for name in packet.overloads()]
        tensors = [a for schema in schemas for a in schema.arguments if "Tensor" in str(a.type) and not a.is_out]
        called = {self.called(a.name) for a in tensors}
        return any(name in self.signature.parameters and name not in self.names for name in called - _OF_KERNELS)

    def bind(
        self, name: str, own_names: Sequence[str] | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> inspect.BoundArguments:
        """The arguments of a call by the names of the declaration, defaults included; Python's own errors.

        Args:
            name: of the operator, for errors.
            own_names: what :meth:`arguments_of` returned for its spelling.
        """
        if own_names is None:
            bound = self.signature.bind(*args, **{key: v for key, v in kwargs.items() if key not in _OF_KERNELS})
        else:
            if len(args) > len(own_names):
                raise TypeError(f"{name}() takes {len(own_names)} arguments, but {len(args)} were given")
            given = dict(zip(own_names, args))
            for key, value in kwargs.items():
                called = self.called(key)
                if called in given:
                    raise TypeError(f"{name}() got multiple values for argument {called!r}")
                given[called] = value
            bound = self.signature.bind(**{key: value for key, value in given.items() if key not in _OF_KERNELS})
        bound.apply_defaults()
        return bound


def declaration(
    build: Callable[..., Any],
    tensors: str,
    parameters: str,
    partial: str,
    sharded: str,
    sparse: Callable[..., Any] | None = None,
) -> Declaration:
    """What :func:`shardtensor.operator` was given, its names split. The function's first argument is the call."""
    signature = inspect.signature(build)
    own = signature.replace(parameters=list(signature.parameters.values())[1:])
    tensor_names, parameter_names, partial_names, sharded_names = (
        tuple(names.split()) for names in (tensors, parameters, partial, sharded)
    )
    names = tuple(name for name in own.parameters if name in (*tensor_names, *parameter_names))
    return Declaration(build, tensor_names, parameter_names, partial_names, sharded_names, sparse, own, names)


def argument_names(spelling: Callable[..., Any]) -> list[tuple[str, ...]]:
    """The names of a function's positional arguments, from its signature or its operator's schemas; none: unknown.

    A function that is several overloads has several lists of names.
    """
    if isinstance(spelling, OpOverload):
        return [tuple(a.name for a in spelling._schema.arguments)]
    if isinstance(spelling, OpOverloadPacket):
        schemas = [getattr(spelling, name)._schema for name in spelling.overloads()]  # type: ignore[no-untyped-call]
        schemas = [schema for schema in schemas if not any(a.is_out for a in schema.arguments)] or schemas[:1]
        return [tuple(a.name for a in schema.arguments if not a.kwarg_only) for schema in schemas]
    with suppress(TypeError, ValueError):
        parameters = inspect.signature(spelling).parameters
        hidden = any(p.kind == p.VAR_POSITIONAL for p in parameters.values())
        return [] if hidden else [tuple(parameters)]
    packet = getattr(torch.ops.aten, getattr(spelling, "__name__", ""), None)
    return [] if packet is None else argument_names(packet)
