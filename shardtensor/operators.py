"""The declaration of an operator above autograd: a plan, made once from specs and arguments, and a bare run.

[Note: plan and run] What an operator does follows from the specs of its tensors and from its other arguments, never
from data. :func:`operator` therefore declares it by one function that makes a :class:`Plan`: it makes torch's checks,
decides what is exchanged, and raises what is refused, on every rank alike. The plan is kept under a key of all that it
was made from; the next call with the same key runs it, and running does nothing but communicate and call kernels.

The key holds the function, the specs (shapes, strides, dtypes and shard sizes), shapes, strides, dtypes and devices of
plain tensors, all other arguments with their types, autocast, the default dtype, deterministic mode, and the settings
of ``context.py``: :func:`shardtensor.allow_gather`, the method of attention, the state of the registry.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ._compat import OpOverload, OpOverloadPacket, TensorMeta, is_traced, untraced
from .context import settings
from .copies import check_current
from .errors import UnsupportedSharding, different_meshes, refuse
from .parameters import GradientSum, contributing
from .plan import Composed, LocalPlan, Plan, picked
from .planning import SCALARS, cached_plan, keep_plan, meta_of, spec_of
from .registry import declare, declare_rule
from .spec import ShardTensorSpec
from .tensor import ShardTensor, promote, redistribute_to

__all__ = ["Arguments", "Composed", "LocalPlan", "Operand", "Operator", "Plan", "operator", "planned"]

# How a plan's function sees a tensor: a ShardTensor by its spec, a plain one by shape, strides and dtype.
Operand = ShardTensorSpec | TensorMeta

# Arguments of some spellings that plans do not depend on: those that choose among a device's kernels, and ``out``,
# which is None here, see ShardTensor.__torch_function__.
_OF_KERNELS = frozenset({"cudnn_enable", "cudnn_enabled", "out"})


# -- keys -------------------------------------------------------------------------------------------------------------


def plan_key(function: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Any]) -> list[Any]:
    """What the plan of a call above autograd depends on, besides the registry. Its tensors are added to ``tensors``."""
    key: list[Any] = [function, settings(), torch.get_default_dtype()]
    if torch.are_deterministic_algorithms_enabled():
        key.append("deterministic")
    _describe(args, key, tensors)
    for name, value in kwargs.items():
        key.append(name)
        _describe((value,), key, tensors)
    device = tensors[0].device.type if tensors else "cpu"
    if torch.is_autocast_enabled(device):
        key.append(torch.get_autocast_dtype(device))
    return key


def _describe(args: Sequence[Any], key: list[Any], tensors: list[Any]) -> None:
    for a in args:
        kind = type(a)
        if kind in SCALARS:
            key.append(kind)  # 1, 1.0 and True are equal, but mean different things
            key.append(a)
        elif kind is ShardTensor:
            if a._viewed is not None:
                check_current(key[0].name, a)
            tensors.append(a)
            key.append(a._spec)
            if type(a._local_tensor) is not Tensor and is_traced(a._local_tensor):
                key.append([])  # see _localize
        elif isinstance(a, Tensor):
            tensors.append(a)
            key.append(spec_of(a) if isinstance(a, DTensor) else (a.shape, a.stride(), a.dtype, a.device))
        elif kind is list or kind is tuple:
            key.append(len(a))
            _describe(a, key, tensors)
        else:
            key.append(kind)
            key.append(a)


# -- making plans ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Arguments:
    """A call as the function that makes its plan sees it.

    Attributes:
        name: of the operator, for errors.
        mesh: of its ShardTensors.
        device: of its tensors.
        tensors: ``{argument: spec}`` of the tensors that are ShardTensors when the plan runs.
        lists: the same for arguments that are lists of tensors.
        then: the layout that the result is redistributed to after the plan has run; None leaves it as it is.
    """

    name: str
    mesh: DeviceMesh
    device: torch.device
    tensors: dict[str, ShardTensorSpec] = field(default_factory=dict)
    lists: dict[str, list[ShardTensorSpec]] = field(default_factory=dict)
    then: ShardTensorSpec | None = None
    steps: dict[str, Callable[[Any], Any]] = field(default_factory=dict)

    def refuse(self, reason: str, remedy: str) -> UnsupportedSharding:
        """The exception for this call, to be raised."""
        specs = [*self.tensors.values(), *(spec for specs in self.lists.values() for spec in specs)]
        return refuse(self.name, specs, reason, remedy)

    def redistribute(self, argument: str, target: ShardTensorSpec) -> ShardTensorSpec:
        """Have an operand redistributed before the plan runs; returns ``target``.

        Raises:
            UnsupportedSharding: a sharded dim would have to be gathered.
        """
        source = self.tensors[argument]
        for m, (old, new) in enumerate(zip(source.placements, target.placements, strict=True)):
            if isinstance(old, Shard) and not isinstance(new, Shard) and source.shape[old.dim] > 1:
                raise self.refuse(
                    f"{argument} would have to be gathered over mesh dim {m}",
                    "shard all operands alike, or redistribute this one to Replicate() yourself",
                )
        self.tensors[argument] = target
        return target

    def returned(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a function of torch returns for the global tensors: tensors without data, of its shapes and dtypes.

        Args:
            args, kwargs: its arguments, with specs (or :class:`TensorMeta`) for tensors.

        Raises:
            Exception: torch's own, for the global sizes, and so on every rank alike.
        """
        # Autocast would cast, but does not act on meta tensors.
        casts = self.autocast() is not None

        def described(a: Any) -> Any:
            meta = a.tensor_meta if isinstance(a, ShardTensorSpec) else a
            if isinstance(meta, TensorMeta):
                dtype = torch.float32 if casts and meta.dtype.is_floating_point else meta.dtype
                return torch.empty_strided(meta.shape, meta.stride, dtype=dtype, device="meta")
            return type(a)(map(described, a)) if type(a) in (list, tuple) else a

        with torch.no_grad(), untraced():
            return function(*map(described, args), **{name: described(a) for name, a in kwargs.items()})

    def autocast(self) -> torch.dtype | None:
        """The dtype to which autocast casts the operands of matrix products; None where it is off."""
        kind = self.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def cast(self, dtype: torch.dtype | None, *arguments: str) -> None:
        """Have operands cast before the plan runs, differentiably; None leaves them as they are."""
        for argument in arguments if dtype is not None else ():
            self.then_do(argument, lambda t: t.to(dtype))
            if argument in self.tensors:
                self.tensors[argument] = self.tensors[argument].with_dtype(dtype)  # type: ignore[arg-type]

    def prepare(self, argument: str, value: Any, partial: bool) -> Any:
        """Have an operand, or a list of them, made ShardTensors; returns the specs that they then have."""
        if isinstance(value, (list, tuple)):
            self.then_do(argument, _preparation_of_list(self.mesh, partial))
            self.lists[argument] = [_prepared_spec(t, self.mesh, partial) for t in value]
            return list(self.lists[argument])
        if not isinstance(value, ShardTensor):
            self.then_do(argument, _promotion(value, self.mesh))
        self.tensors[argument] = _prepared_spec(value, self.mesh, partial)
        return self.tensors[argument]

    def then_do(self, argument: str, step: Callable[[Any], Any]) -> None:
        """Add a step by which a tensor is prepared before the plan runs. It is run on what the others returned."""
        first = self.steps.get(argument)
        self.steps[argument] = step if first is None else lambda t: step(first(t))


    def prepare_locally(self, argument: str, step: Callable[[Any], Tensor]) -> None:
        """Have a tensor made plain by ``step`` before the plan runs, which then has to see to its gradient's layout."""
        self.then_do(argument, step)
        self.tensors.pop(argument, None)


class Operator:
    """One spelling of an operator above autograd: finds or makes the plan of a call, and runs it."""

    def __init__(self, spelling: Callable[..., Any] | str, declared: _Declared) -> None:
        self.name: str = spelling if isinstance(spelling, str) else getattr(spelling, "__name__", str(spelling))
        self.__module__ = declared.build.__module__
        self._declared = declared
        self._arguments = None if isinstance(spelling, str) else declared.arguments_of(spelling)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors: list[Any] = []
        key = plan_key(self, args, kwargs, tensors)
        plan = cached_plan(key)
        if plan is None:
            plan = self._make(args, kwargs, tensors)
            keep_plan(key, plan)
        return NotImplemented if plan is NotImplemented else plan(tensors)

    def _make(self, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]) -> Any:
        # Tensors are bound by their place among the call's tensors: the next call may have others there.
        places = iter(range(len(tensors)))
        given = self._bind(_placed(args, places), dict(zip(kwargs, _placed(list(kwargs.values()), places))))
        declared = self._declared
        at = {name: _index(given.arguments.get(name)) for name in declared.names}
        named = {name: picked(tensors, place) for name, place in at.items() if place is not None}
        mesh = _common_mesh(self.name, [t for value in named.values() for t in _each(value)])
        if mesh is None:
            return NotImplemented
        call = Arguments(self.name, mesh, next(t.device for value in named.values() for t in _each(value)))
        for name, value in named.items():
            if name in declared.parameters:
                others = [t for k in declared.tensors if k in named for t in _each(named[k])]
                takes_sharded = name in declared.sharded and _is_sharded(value)
                given.arguments[name] = spec_of(value) if takes_sharded else _parameter(self.name, value, others)
            else:
                given.arguments[name] = call.prepare(name, value, name in declared.partial)
        plan = declared.build(call, *given.args, **given.kwargs)
        if plan is not NotImplemented:
            order = tuple(at[name] for name in declared.names)
            plan.order = None if order == tuple(range(len(tensors))) else order
            self._finish(plan, call, named)
        return plan

    def _finish(self, plan: Plan, call: Arguments, named: Mapping[str, Any]) -> None:
        """Fill in what the plan's run does before and after its local work."""
        declared = self._declared
        plan.name, plan.device, plan.then = self.name, call.device.type, call.then
        placements = None
        if declared.parameters:
            mesh_dims, placements = contributing(call.tensors[declared.tensors[0]])
            plain = tuple(
                n in declared.parameters and n in named and not isinstance(named[n], DTensor) for n in declared.names
            )
            plan.total = GradientSum(call.mesh, mesh_dims, plain) if any(plain) and mesh_dims else None
        steps: list[Callable[[Any], Any] | None] = []
        for name in declared.names:
            if isinstance(plan, Composed) and name in declared.parameters:
                steps.append(None)
                continue
            to_plain = name in declared.parameters and not (name in declared.sharded and _is_sharded(named.get(name)))
            if isinstance(named.get(name), DTensor) and to_plain:
                steps.append(_chain(_to_local(placements), call.steps.get(name)))
                continue
            target = call.tensors.get(name)
            moves = target is not None and not _prepared_spec(named[name], call.mesh, True).lies_like(target)
            steps.append(_chain(call.steps.get(name), _redistribution(target) if moves else None))
        plan.steps = tuple(steps) if any(step is not None for step in steps) else None

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """The arguments by the names of the declaration, defaults included; Python's own errors."""
        if "out" in kwargs and kwargs["out"] is None:  # what is written out does not come here
            kwargs = {name: value for name, value in kwargs.items() if name != "out"}
        if self._arguments is None:
            named = {name: value for name, value in kwargs.items() if name not in _OF_KERNELS}
            bound = self._declared.signature.bind(*args, **named)
            bound.apply_defaults()
            return bound
        if len(args) > len(self._arguments):
            raise TypeError(f"{self.name}() takes {len(self._arguments)} arguments, but {len(args)} were given")
        given = dict(zip(self._arguments, args))
        for name, value in kwargs.items():
            name = self._declared.called(name)
            if name in given:
                raise TypeError(f"{self.name}() got multiple values for argument {name!r}")
            given[name] = value
        given = {name: value for name, value in given.items() if name not in _OF_KERNELS}
        bound = self._declared.signature.bind(**given)
        bound.apply_defaults()
        return bound


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands where a call has its ``index``-th tensor."""

    index: int


def _placed(values: Sequence[Any], places: Iterator[int]) -> list[Any]:
    """The values with places for tensors, in the order in which plan_key collects these."""

    def placed(value: Any) -> Any:
        if isinstance(value, Tensor):
            return _Place(next(places))
        return type(value)(map(placed, value)) if type(value) in (list, tuple) else value

    return [placed(value) for value in values]


def _index(value: Any) -> Any:
    """The place of an argument among the call's tensors: a number, a tuple of them for a list; None: no tensor."""
    if isinstance(value, _Place):
        return value.index
    if isinstance(value, (list, tuple)) and any(isinstance(item, _Place) for item in value):
        return tuple(map(_index, value))
    return None


def _each(value: Any) -> Sequence[Tensor]:
    return [t for t in value if t is not None] if isinstance(value, (list, tuple)) else [value]


@dataclass(frozen=True, slots=True)
class _Declared:
    """What :func:`operator` was given."""

    build: Callable[..., Plan]
    tensors: tuple[str, ...]
    parameters: tuple[str, ...]
    partial: tuple[str, ...]
    sharded: tuple[str, ...]
    signature: inspect.Signature

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors, in the order of the declaration."""
        return tuple(name for name in self.signature.parameters if name in (*self.tensors, *self.parameters))

    def called(self, name: str) -> str:
        """What the declaration calls an argument: the first one is often ``self`` for methods and operators."""
        parameters = self.signature.parameters
        return next(iter(parameters)) if name == "self" and name not in parameters else name

    def arguments_of(self, spelling: Callable[..., Any]) -> tuple[str, ...] | None:
        """The names of a spelling's positional arguments, in its own order; None: as in the declaration."""
        if any(p.kind == p.VAR_POSITIONAL for p in self.signature.parameters.values()):
            return None
        forms = [tuple(map(self.called, names)) for names in _argument_names(spelling)]
        known = [names for names in forms if all(n in self.signature.parameters or n in _OF_KERNELS for n in names)]
        if forms and not known:
            raise TypeError(f"the plan of {spelling} lacks arguments of {spelling}, which has {forms}")
        return max(known, key=len, default=None)


def operator(
    *spellings: Callable[..., Any],
    tensors: str = "",
    parameters: str = "",
    partial: str = "",
    sharded: str = "",
    meta: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function below it makes the plans of an operator. See [Note: plan and run].

    Above autograd (``tensors`` are named) it is called with an :class:`Arguments` and then the operator's own
    arguments, by torch's names and with torch's defaults, in any order that serves all spellings; those of each
    spelling are bound by its own signature or schema. It returns a :class:`Plan`, or NotImplemented to have the call
    go on as if there were no declaration.

    Below autograd (no ``tensors``) the spellings are overloads such as ``torch.ops.aten.flip.default``; the function is
    called with a :class:`shardtensor.dispatch.Call` and returns a :class:`shardtensor.dispatch.Plan`. torch
    differentiates such an operator by its own formula, in operators that have plans in turn.

    Args:
        spellings: functions of ``torch.nn.functional`` and ``torch``, methods, ``torch.ops.aten`` operators.
        tensors: names of the arguments that are ShardTensors when the plan runs: plain tensors (equal on every rank)
            and DTensors are made such, and what is Partial is reduced. The function gets their specs; of an argument
            that is a list of tensors, a list of specs.
        parameters: names of those that every rank holds whole, plain or as replicated DTensors. The local work gets
            them plain, and sums their gradients over the ranks by :attr:`Plan.total`. The function gets shape, strides
            and dtype.
        partial: which of ``tensors`` may stay Partial.
        sharded: which of ``parameters`` may be sharded DTensors. The function gets their specs, and returns a
            :class:`Composed` or has them made plain by :meth:`Arguments.then_do`; their gradients are not summed.
        meta: below autograd, a function with the shapes and dtypes of an operator that torch does not run on meta
            tensors.

    Raises:
        ValueError: a spelling is declared already.
        TypeError: a spelling has an argument that the function has not.

    Example:
        >>> import torch, shardtensor
        >>> def halved(x):
        ...     if torch.overrides.has_torch_function_unary(x):
        ...         return torch.overrides.handle_torch_function(halved, (x,), x)
        ...     return x / 2
        >>> @shardtensor.operator(halved, tensors="x")
        ... def plan_halved(call, x):
        ...     return shardtensor.LocalPlan(lambda local: local / 2, x)
        >>> shardtensor.unregister(halved)
    """

    def decorate(build: Callable[..., Any]) -> Callable[..., Any]:
        if not tensors:
            for spelling in spellings:
                declare_rule(spelling, build, meta)
            return build
        declared = _declaration(build, tensors, parameters, partial, sharded)
        for spelling in dict.fromkeys(spellings):
            declare(spelling, Operator(spelling, declared))
        return build

    return decorate


def planned(
    name: str, *, tensors: str, parameters: str = "", partial: str = "", sharded: str = ""
) -> Callable[[Callable[..., Any]], Operator]:
    """Decorator: as :func:`operator`, for what handlers call. The decorated function is called like an operator.

    For entry points that tell more than a key does: whether arguments are the same tensor, or a mask's class.

    Args:
        name: for errors.
    """

    def decorate(build: Callable[..., Any]) -> Operator:
        return Operator(name, _declaration(build, tensors, parameters, partial, sharded))

    return decorate


def _declaration(build: Callable[..., Any], tensors: str, parameters: str, partial: str, sharded: str) -> _Declared:
    signature = inspect.signature(build)
    own = signature.replace(parameters=list(signature.parameters.values())[1:])
    tensor_names, parameter_names, partial_names, sharded_names = (
        tuple(names.split()) for names in (tensors, parameters, partial, sharded)
    )
    return _Declared(build, tensor_names, parameter_names, partial_names, sharded_names, own)


def _argument_names(spelling: Callable[..., Any]) -> list[tuple[str, ...]]:
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
    return [] if packet is None else _argument_names(packet)


def _common_mesh(name: str, operands: Sequence[Tensor]) -> DeviceMesh | None:
    """The mesh of the ShardTensors or DTensors among some operands; None if there are none."""
    distributed = [t for t in operands if isinstance(t, DTensor)]
    if distributed and any(t.device_mesh != distributed[0].device_mesh for t in distributed):
        raise different_meshes(name, distributed)
    return distributed[0].device_mesh if distributed else None


def _prepared_spec(t: Any, mesh: DeviceMesh, partial: bool) -> Any:
    """The spec that a tensor has when the plan runs, before the plan redistributes it."""
    if t is None:
        return None
    if isinstance(t, DTensor):
        return spec_of(t) if partial else spec_of(t).for_gradient()
    return ShardTensorSpec.of(mesh, (Replicate(),) * mesh.ndim, meta_of(t), (None,) * mesh.ndim)


def _is_sharded(t: Any) -> bool:
    return isinstance(t, DTensor) and not spec_of(t).is_replicate()


def _parameter(name: str, parameter: Tensor, others: Sequence[Tensor]) -> TensorMeta:
    if not isinstance(parameter, DTensor):
        return meta_of(parameter)
    spec = spec_of(parameter)
    if not spec.is_replicate():
        shown = [spec_of(t) if isinstance(t, DTensor) else t for t in (*others, parameter)]
        raise refuse(name, shown, "the parameter is sharded", "redistribute it to Replicate() before the call")
    return spec.tensor_meta


def _promotion(t: Tensor, mesh: DeviceMesh) -> Callable[[Any], Any]:
    return ShardTensor.from_dtensor if isinstance(t, DTensor) else lambda plain: promote(plain, mesh)


def _preparation_of_list(mesh: DeviceMesh, partial: bool) -> Callable[[Any], Any]:
    def prepare(t: Any) -> Any:
        if t is None:
            return None
        t = ShardTensor.from_dtensor(t) if isinstance(t, DTensor) else promote(t, mesh)
        return t if partial else redistribute_to(t, t._spec.for_gradient())

    return lambda tensors: [prepare(t) for t in tensors]


def _to_local(placements: Any) -> Callable[[Any], Any]:
    return lambda p: ShardTensor.from_dtensor(p).to_local(grad_placements=placements)


def _redistribution(target: Any) -> Callable[[Any], Any]:
    return lambda t: redistribute_to(t, target)


def _chain(*steps: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    some = [step for step in steps if step is not None]
    if len(some) < 2:
        return some[0] if some else None
    first, second = some
    return lambda t: second(first(t))
