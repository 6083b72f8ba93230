"""The call of an operator as the function that makes its plan sees it: specs, torch's checks, what is done first."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Concatenate, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._compat import OpOverload, OpOverloadPacket, TensorMeta, overload_names
from ..dispatch.planning import converted, meta_of, replicated_spec, spec_of, without_data
from ..dispatch.tensor import ShardTensor, promote, redistribute_to
from ..errors import UnsupportedSharding, different_meshes, refuse
from ..layout.spec import ShardTensorSpec
from .autocast import autocast_dtype, autocast_to, without_autocast
from .plan import Places, Plan

Returned = TypeVar("Returned")
# Makes the plan of a call from its arguments, with an operand for each tensor; or NotImplemented.
Builder: TypeAlias = "Callable[Concatenate[Arguments, ...], Plan]"

# -- binding -----------------------------------------------------------------------------------------------------------

# The arguments of a call, by the names of the declaration of its operator, whatever the spelling.
#
# Tensors are bound by their place among the call's tensors, as the plan that is made is kept for other tensors, too.

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


def place_of(value: object) -> Places:
    """The place of an argument among the call's tensors: a number, a tuple of them for a list; None: no tensor."""
    if isinstance(value, Place):
        return value.index
    if isinstance(value, (list, tuple)) and any(isinstance(item, Place) for item in value):
        return tuple(map(place_of, value))
    return None


def places_in(value: object) -> Iterator[int]:
    """The places of all tensors in an argument."""
    if isinstance(value, Place):
        yield value.index
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from places_in(item)


# -- arguments, by their name ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Declaration:
    """What :func:`shardtensor.extend.operator` was given.

    Attributes:
        build: the function that makes plans.
        tensors, parameters, partial, sharded: names of its arguments.
        sparse: what is called where one of them is sparse, if anything.
        signature: of the operator, as ``build`` has it after the call.
        names: all tensors, in the order of the declaration.
    """

    build: Builder
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
    build: Builder,
    tensors: str,
    parameters: str,
    partial: str,
    sharded: str,
    sparse: Callable[..., Any] | None = None,
) -> Declaration:
    """What :func:`shardtensor.extend.operator` was given, names split. The function's first argument is the call."""
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
        schemas = [getattr(spelling, name)._schema for name in overload_names(spelling)]
        schemas = [schema for schema in schemas if not any(a.is_out for a in schema.arguments)] or schemas[:1]
        return [tuple(a.name for a in schema.arguments if not a.kwarg_only) for schema in schemas]
    with suppress(TypeError, ValueError):
        parameters = inspect.signature(spelling).parameters
        hidden = any(p.kind == p.VAR_POSITIONAL for p in parameters.values())
        return [] if hidden else [tuple(parameters)]
    packet = getattr(torch.ops.aten, getattr(spelling, "__name__", ""), None)
    return [] if packet is None else argument_names(packet)


# -- arguments ---------------------------------------------------------------------------------------------------------

# How a plan's function sees a tensor: a ShardTensor by its spec, a plain one by shape, strides and dtype.
Operand = ShardTensorSpec | TensorMeta


@dataclass(slots=True)
class Arguments:
    """A call of an operator, passed to the function that makes its plan.

    Attributes:
        name: the name of the operator, for errors.
        mesh: the mesh of the ShardTensors.
        device: the device type of the tensors.
        tensors: ``{argument: spec}`` of the tensors that are ShardTensors when the plan runs.
        lists: the same for arguments that are lists of tensors.
        then: the layout that the result is redistributed to after the plan has run, or None.
        steps: the steps that prepare arguments before the plan runs, in order.
        casts: the dtypes that :meth:`cast` gives arguments.
    """

    name: str
    mesh: DeviceMesh
    device: torch.device
    tensors: dict[str, ShardTensorSpec] = field(default_factory=dict)
    lists: dict[str, list[ShardTensorSpec]] = field(default_factory=dict)
    then: ShardTensorSpec | None = None
    steps: dict[str, list[Callable[[Any], Any]]] = field(default_factory=dict)
    casts: dict[str, torch.dtype] = field(default_factory=dict)

    def refuse(self, reason: str, remedy: str) -> UnsupportedSharding:
        """Return the exception of a refusal of this call, to be raised."""
        specs = [*self.tensors.values(), *(spec for specs in self.lists.values() for spec in specs)]
        return refuse(self.name, specs, reason, remedy)

    def redistribute(self, argument: str, target: ShardTensorSpec) -> ShardTensorSpec:
        """Redistribute an operand before the plan runs. Returns ``target``.

        Raises:
            UnsupportedSharding: a sharded dim would have to be gathered.
        """
        source = self.tensors[argument]
        m = source.gathered_for(target)
        if m is not None:
            raise self.refuse(
                f"{argument} would have to be gathered over mesh dim {m}",
                "shard all operands alike, or redistribute this one to Replicate() yourself",
            )
        self.tensors[argument] = target
        return target

    def returned(self, function: Callable[..., Returned], *args: object, **kwargs: object) -> Returned:
        """Return the result of a function of torch for the global tensors, as tensors without data.

        Args:
            args, kwargs: the arguments, with specs (or :class:`TensorMeta`) for tensors.

        Raises:
            Exception: torch's own error for the global sizes, on every rank.
        """
        # Autocast would cast, but does not act on meta tensors.
        casts = self.autocast() is not None

        def described(a: object) -> object:
            meta = a.tensor_meta if isinstance(a, ShardTensorSpec) else a
            if isinstance(meta, TensorMeta):
                dtype = torch.float32 if casts and meta.dtype.is_floating_point else meta.dtype
                return without_data(meta._replace(dtype=dtype))
            return a

        args, kwargs = converted(described, args, kwargs)
        return function(*args, **kwargs)

    def autocast(self) -> torch.dtype | None:
        """Return the dtype to which autocast casts the operands of matrix products, or None if it is off."""
        return autocast_to(self.device.type)

    def autocast_dtype(self, function: Callable[..., Tensor], *operands: Operand) -> torch.dtype:
        """Return the dtype of the operands of ``function`` under autocast; see autocast.py."""
        metas = [t.tensor_meta if isinstance(t, ShardTensorSpec) else t for t in operands]
        shapes = [[min(n, 2) for n in t.shape] for t in metas]
        return autocast_dtype(function, shapes, [t.dtype for t in metas], self.device)

    def without_autocast(self, function: Callable[..., Returned]) -> Callable[..., Returned]:
        """Return ``function``, called with autocast disabled."""
        kind = self.device.type
        if self.autocast() is None:
            return function

        def call(*args: object) -> Returned:
            with without_autocast(kind):
                return function(*args)

        return call

    def cast(self, dtype: torch.dtype | None, *arguments: str) -> None:
        """Cast operands before the plan runs, differentiably. None leaves them unchanged."""
        for argument in arguments if dtype is not None else ():
            self.casts[argument] = dtype  # type: ignore[assignment]
            self.then_do(argument, lambda t: t.to(dtype))
            if argument in self.tensors:
                self.tensors[argument] = self.tensors[argument].with_dtype(dtype)  # type: ignore[arg-type]

    def prepare(self, argument: str, value: Any, partial: bool) -> ShardTensorSpec | list[ShardTensorSpec]:
        """Convert an operand, or a list of operands, to ShardTensors. Returns their specs."""
        mesh = self.mesh
        if isinstance(value, (list, tuple)):
            self.then_do(argument, lambda tensors: [_prepared(t, mesh, partial) for t in tensors])
            self.lists[argument] = [prepared_spec(t, mesh, partial) for t in value]
            return list(self.lists[argument])
        if not isinstance(value, ShardTensor):
            self.then_do(argument, lambda t: promote(t, mesh))
        self.tensors[argument] = prepared_spec(value, mesh, partial)
        return self.tensors[argument]

    def then_do(self, argument: str, step: Callable[[Any], Any]) -> None:
        """Add a step that prepares a tensor before the plan runs. Its input is the result of the earlier steps."""
        self.steps.setdefault(argument, []).append(step)

    def prepare_locally(self, argument: str, step: Callable[[Any], Tensor]) -> None:
        """Make a tensor plain by ``step`` before the plan runs. The plan then sets the layout of its gradient."""
        self.then_do(argument, step)
        self.tensors.pop(argument, None)


def common_mesh(name: str, operands: Sequence[Tensor]) -> DeviceMesh | None:
    """The mesh of the ShardTensors or DTensors among some operands; None if there are none."""
    distributed = [t for t in operands if isinstance(t, DTensor)]
    if distributed and any(t.device_mesh != distributed[0].device_mesh for t in distributed):
        raise different_meshes(name, distributed)
    return distributed[0].device_mesh if distributed else None


def prepared_spec(t: Tensor | None, mesh: DeviceMesh, partial: bool) -> Any:
    """The spec that a tensor has when the plan runs, before the plan redistributes it."""
    if t is None:
        return None
    if isinstance(t, DTensor):
        return spec_of(t) if partial else spec_of(t).for_gradient()
    return replicated_spec(mesh, meta_of(t))


def _prepared(t: Tensor | None, mesh: DeviceMesh, partial: bool) -> ShardTensor | None:
    """A tensor of a list with the spec that :func:`prepared_spec` gives."""
    if t is None:
        return None
    t = promote(t, mesh)
    return t if partial else redistribute_to(t, t._spec.for_gradient())
