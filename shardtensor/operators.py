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
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ._compat import TensorMeta, is_traced, untraced
from .context import settings
from .copies import check_current
from .errors import UnsupportedSharding, different_meshes, refuse
from .gradients import not_twice
from .parameters import GradientSum, contributing
from .planning import SCALARS, cached_plan, keep_plan, meta_of, spec_of
from .registry import declare, declare_rule
from .spec import ShardTensorSpec
from .tensor import ShardTensor, as_gradient, from_part, promote, redistribute_to, wrap

__all__ = ["Arguments", "Composed", "LocalPlan", "Operand", "Operator", "Plan", "operator"]

# How a plan's function sees a tensor: a ShardTensor by its spec, a plain one by shape, strides and dtype.
Operand = ShardTensorSpec | TensorMeta

# Arguments of some spellings that choose among a device's kernels, and change no result.
_OF_KERNELS = frozenset({"cudnn_enable", "cudnn_enabled"})


class Plan:
    """What one call does on this rank. Subclasses give the local work of an operator and its gradient.

    Attributes:
        outputs: the result's spec, or a tuple of them.
        saves: which of the tensors the gradient needs, by position.
        total: the sum over ranks that the gradients of plain parameters need.
        twice: whether :meth:`forward` may be run again and be differentiated by autograd, for second derivatives.
    """

    outputs: ShardTensorSpec | tuple[ShardTensorSpec, ...]
    saves: tuple[int, ...] = ()
    total: GradientSum | None = None
    twice: ClassVar[bool] = False
    # Filled in by the operator that made the plan.
    name: str = ""
    _device: str = "cpu"
    _order: tuple[Any, ...] | None = None
    _prepare: tuple[Callable[[Any], Any] | None, ...] | None = None
    _then: ShardTensorSpec | None = None

    def forward(self, *tensors: Any) -> tuple[Any, tuple[Tensor | None, ...]]:
        """The local result (a tensor, or a tuple of them) and what else :meth:`backward` needs.

        Args:
            tensors: the local tensors, None for those that the caller left out.
        """
        raise NotImplementedError

    def backward(self, needed: Sequence[bool], grads: Sequence[Any], *saved: Any) -> Sequence[Tensor | None]:
        """Local gradients of all tensors, None for those that are not ``needed``; those of parameters complete.

        Args:
            grads: local gradients of the results, which have the layout of :attr:`outputs`; None where there is none.
            saved: the local tensors named by :attr:`saves`, then what :meth:`forward` returned besides its result.
        """
        raise NotImplementedError

    def run(self, tensors: Sequence[Any]) -> Any:
        """The result as ShardTensors, differentiable. ``tensors`` are the operator's, redistributed already."""
        if torch.is_grad_enabled():
            return _Run.apply(self, *tensors)
        result, _ = self.forward(*(t._local_tensor if type(t) is ShardTensor else t for t in tensors))
        return self._wrapped(result)

    def _wrapped(self, result: Any) -> Any:
        if type(self.outputs) is tuple:
            return tuple(map(wrap, result, self.outputs))
        return wrap(result, self.outputs)  # type: ignore[arg-type]

    def __call__(self, tensors: Sequence[Any]) -> Any:
        if self._order is not None:
            tensors = [_picked(tensors, place) for place in self._order]
        if self._prepare is not None:
            tensors = [t if step is None else step(t) for step, t in zip(self._prepare, tensors, strict=True)]
        result = self.run(tensors)
        return result if self._then is None else redistribute_to(result, self._then)


class LocalPlan(Plan):
    """A plan whose local work autograd differentiates: ``function`` of the local tensors gives the local result.

    Where it communicates, it calls what is differentiable, such as :class:`shardtensor.halo.Fetch`.
    """

    def __init__(
        self, function: Callable[..., Any], outputs: ShardTensorSpec | tuple[ShardTensorSpec, ...], 
    ) -> None:
        self.function, self.outputs = function, outputs

    def run(self, tensors: Sequence[Any]) -> Any:
        locals_ = [t.to_local() if type(t) is ShardTensor else t for t in tensors]
        if self.total is not None and torch.is_grad_enabled():
            locals_ = self.total.complete(locals_)
        result = self.function(*locals_)
        if type(self.outputs) is tuple:
            return tuple(map(from_part, result, self.outputs))
        return from_part(result, self.outputs)  # type: ignore[arg-type]


class Composed(Plan):
    """A plan that calls other operators: ``function`` gets the operator's tensors, parameters as the caller gave them.

    For an operator that is others in a row for these arguments.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def run(self, tensors: Sequence[Any]) -> Any:
        return self.function(*tensors)


class _Run(torch.autograd.Function):
    """A plan's run, and its gradient. Saved are tensors and the plan."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Any) -> Any:  # type: ignore[override]
        result, kept = plan.forward(*[t._local_tensor if type(t) is ShardTensor else t for t in tensors])
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        ctx.save_for_backward(*[tensors[i] for i in plan.saves], *kept)
        ctx.specs = [t._spec if type(t) is ShardTensor else None for t in tensors]
        if plan.twice:
            ctx.others = [None if i in plan.saves else t for i, t in enumerate(tensors)]
            device = plan._device
            ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        return plan._wrapped(result)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        if not torch.is_grad_enabled():
            return None, *_gradients(ctx, ctx.saved_tensors, grads)
        if ctx.plan.twice:
            return None, *_second_derivatives(ctx, grads)
        with torch.no_grad():
            found = _gradients(ctx, ctx.saved_tensors, grads)
        return None, *not_twice(ctx.plan.name, found, (*grads, *ctx.saved_tensors))


def _gradients(ctx: Any, saved: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
    plan = ctx.plan
    outputs = plan.outputs if type(plan.outputs) is tuple else (plan.outputs,)
    local_grads = [None if g is None else _local_gradient(g, s) for g, s in zip(grads, outputs, strict=True)]
    local_saved = [t._local_tensor if type(t) is ShardTensor else t for t in saved]
    if torch.is_autocast_enabled(plan._device):
        with torch.autocast(plan._device, enabled=False):
            found = plan.backward(ctx.needs_input_grad[1:], local_grads, *local_saved)
    else:
        found = plan.backward(ctx.needs_input_grad[1:], local_grads, *local_saved)
    return [g if s is None or g is None else wrap(g, s) for g, s in zip(found, ctx.specs, strict=True)]


def _local_gradient(grad: Any, spec: ShardTensorSpec) -> Tensor:
    if type(grad) is ShardTensor and grad._spec is spec and spec._reduced is None:
        return grad._local_tensor
    return as_gradient(grad, spec)._local_tensor


def _second_derivatives(ctx: Any, grads: Sequence[Any]) -> list[Any]:
    """The gradients for second derivatives: the same computation once more, and differentiated by autograd."""
    plan, needed, saved = ctx.plan, ctx.needs_input_grad[1:], ctx.saved_tensors
    tensors = list(ctx.others)
    for i, t in zip(plan.saves, saved):
        tensors[i] = t
    locals_ = [t.to_local() if type(t) is ShardTensor else t for t in tensors]
    completed = locals_ if plan.total is None else plan.total.complete(locals_)
    with torch.autocast(*ctx.autocast) if ctx.autocast[2] else nullcontext():
        result = plan.forward(*completed)[0]
    results, outputs = (result, plan.outputs) if type(plan.outputs) is tuple else ((result,), (plan.outputs,))
    pairs = [(y, as_gradient(g, s).to_local()) for y, g, s in zip(results, grads, outputs) if g is not None]
    wanted = [t for t, need in zip(locals_, needed, strict=True) if need]
    found = torch.autograd.grad([y for y, _ in pairs], wanted, [g for _, g in pairs], create_graph=True)
    # With an empty shard some of them depend on less; but what is differentiated again must communicate on every rank.
    nothing = pairs[0][0].new_zeros(())
    for t in (*locals_, *completed, *(g for _, g in pairs)):
        if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()):
            nothing = nothing + t.reshape(-1)[:0].sum()
    gradients = iter([g + nothing.to(g.dtype) for g in found])
    result = [next(gradients) if need else None for need in needed]
    return [g if g is None or s is None else from_part(g, s) for g, s in zip(result, ctx.specs, strict=True)]


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

    def then_do(self, argument: str, step: Callable[[Any], Any]) -> None:
        """Add a step by which a tensor is prepared before the plan runs. It is run on what the others returned."""
        first = self.steps.get(argument)
        self.steps[argument] = step if first is None else lambda t: step(first(t))


class Operator:
    """One spelling of an operator above autograd: finds or makes the plan of a call, and runs it."""

    def __init__(self, spelling: Callable[..., Any], declared: _Declared) -> None:
        self.spelling, self.name = spelling, getattr(spelling, "__name__", str(spelling))
        self.__module__ = declared.build.__module__
        self._declared = declared
        self._arguments = declared.arguments_of(spelling)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors: list[Any] = []
        key = plan_key(self, args, kwargs, tensors)
        plan = cached_plan(key)
        if plan is None:
            plan = self._make(args, kwargs, tensors)
            if plan is NotImplemented:
                return NotImplemented
            keep_plan(key, plan)
        return plan(tensors)

    def _make(self, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]) -> Any:
        # Tensors are bound by their place among the call's tensors: the next call may have others there.
        places = iter(range(len(tensors)))
        given = self._bind(_placed(args, places), dict(zip(kwargs, _placed(list(kwargs.values()), places))))
        declared = self._declared
        at = {name: _index(given.arguments.get(name)) for name in declared.names}
        named = {name: _picked(tensors, place) for name, place in at.items() if place is not None}
        mesh = _common_mesh(self.name, [t for value in named.values() for t in _each(value)])
        if mesh is None:
            return NotImplemented
        call = Arguments(self.name, mesh, next(t.device for value in named.values() for t in _each(value)))
        for name, value in named.items():
            if name in declared.parameters:
                others = [t for k in declared.tensors if k in named for t in _each(named[k])]
                given.arguments[name] = _parameter(self.name, value, others)
            elif isinstance(value, (list, tuple)):
                given.arguments[name] = [_prepared_spec(t, mesh, name in declared.partial) for t in value]
                call.then_do(name, _preparation_of_list(mesh, name in declared.partial))
                call.lists[name] = list(given.arguments[name])
            else:
                if not isinstance(value, ShardTensor):
                    call.then_do(name, _promotion(value, mesh))
                call.tensors[name] = given.arguments[name] = _prepared_spec(value, mesh, name in declared.partial)
        plan = declared.build(call, *given.args, **given.kwargs)
        if plan is not NotImplemented:
            order = tuple(at[name] for name in declared.names)
            plan._order = None if order == tuple(range(len(tensors))) else order
            self._finish(plan, call, named)
        return plan

    def _finish(self, plan: Plan, call: Arguments, named: Mapping[str, Any]) -> None:
        """Fill in what the plan's run does before and after its local work."""
        declared = self._declared
        plan.name, plan._device, plan._then = self.name, call.device.type, call.then
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
            if isinstance(named.get(name), DTensor) and name in declared.parameters:
                steps.append(_chain(_to_local(placements), call.steps.get(name)))
                continue
            target = call.tensors.get(name)
            moves = target is not None and not _prepared_spec(named[name], call.mesh, True).lies_like(target)
            steps.append(_chain(call.steps.get(name), _redistribution(target) if moves else None))
        plan._prepare = tuple(steps) if any(step is not None for step in steps) else None

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """The arguments by the names of the declaration, defaults included; Python's own errors."""
        if self._arguments is None:
            bound = self._declared.signature.bind(*args, **kwargs)
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


def _picked(tensors: Sequence[Any], place: Any) -> Any:
    if place is None:
        return None
    return tensors[place] if type(place) is int else [_picked(tensors, item) for item in place]


def _each(value: Any) -> Sequence[Tensor]:
    return [t for t in value if t is not None] if isinstance(value, (list, tuple)) else [value]


@dataclass(frozen=True, slots=True)
class _Declared:
    """What :func:`operator` was given."""

    build: Callable[..., Plan]
    tensors: tuple[str, ...]
    parameters: tuple[str, ...]
    partial: tuple[str, ...]
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
        names = _argument_names(spelling)
        if names is None or any(p.kind == p.VAR_POSITIONAL for p in self.signature.parameters.values()):
            return None
        names = tuple(self.called(name) for name in names)
        unknown = [name for name in names if name not in self.signature.parameters and name not in _OF_KERNELS]
        if unknown:
            raise TypeError(f"the plan of {spelling} has no arguments {unknown}, which {spelling} has")
        return names


def operator(
    *spellings: Callable[..., Any],
    tensors: str = "",
    parameters: str = "",
    partial: str = "",
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
        signature = inspect.signature(build)
        own = signature.replace(parameters=list(signature.parameters.values())[1:])
        declared = _Declared(build, tuple(tensors.split()), tuple(parameters.split()), tuple(partial.split()), own)
        for spelling in dict.fromkeys(spellings):
            declare(spelling, Operator(spelling, declared))
        return build

    return decorate


def _argument_names(spelling: Callable[..., Any]) -> tuple[str, ...] | None:
    """The names of a function's positional arguments, from its signature or its operator's schema; None: unknown."""
    if isinstance(spelling, torch._ops.OpOverload):
        return tuple(a.name for a in spelling._schema.arguments)
    if isinstance(spelling, torch._ops.OpOverloadPacket):
        return _argument_names(getattr(spelling, spelling.overloads()[0]))
    with suppress(TypeError, ValueError):
        parameters = inspect.signature(spelling).parameters
        hidden = any(p.kind == p.VAR_POSITIONAL for p in parameters.values())
        return None if hidden else tuple(parameters)
    packet = getattr(torch.ops.aten, getattr(spelling, "__name__", ""), None)
    return None if packet is None else _argument_names(packet)


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
