"""The declaration of an operator above autograd: a plan, made once from specs and arguments, and a bare run.

An operator is declared by one function that makes its :class:`Plan`, see :func:`operator`. The function makes torch's
checks, decides what is exchanged, and raises what is refused, on every rank alike. The plan is kept under a key of all
that it was made from, see [Note: plans] in dispatch/planning.py.

The key holds the function, the specs (shapes, strides, dtypes and shard sizes), shapes, strides, dtypes and devices of
plain tensors, all other arguments with their types, autocast, the default dtype, deterministic mode, and the settings
of ``context.py``: :func:`shardtensor.allow_gather`, the method of attention, half precision, the state of the registry.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from .._compat import TensorMeta, goes_into_graph, hidden_from_program
from .._compat.data_parallel import takes_gradient_late
from ..communication.weight_gradients import GradientSum, contributing
from ..dispatch.planning import converted, disowned, flat, keep_plan, label, look_up, meta_of, spec_of
from ..dispatch.registry import DECLINED, declare, declare_rule
from ..dispatch.tensor import ShardTensor, redistribute_to, to_part
from ..errors import UnsupportedSharding, refuse
from ..layout.dtypes import wide_dtype
from ..ranks.compared_operands import PlainOperands
from ..ranks.failures import note_raised
from ..ranks.history import here
from .arguments import (
    Arguments,
    Builder,
    Declaration,
    Operand,
    common_mesh,
    declaration,
    place_of,
    placed,
    places_in,
    prepared_spec,
)
from .plan import Composed, LocalPlan, Plan, picked

__all__ = ["Arguments", "Composed", "LocalPlan", "Operand", "Operator", "Plan", "operator", "planned"]

Build = TypeVar("Build", bound=Callable[..., Any])


# -- making plans ------------------------------------------------------------------------------------------------------


class Operator:
    """One spelling of an operator above autograd: finds or makes the plan of a call, and runs it."""

    def __init__(self, spelling: Callable[..., Any] | str, declared: Declaration) -> None:
        self.name: str = spelling if isinstance(spelling, str) else getattr(spelling, "__name__", str(spelling))
        self.__name__, self.__module__ = self.name, declared.build.__module__
        self._declared = declared
        self._arguments = None if isinstance(spelling, str) else declared.arguments_of(spelling)
        self._takes_numbers = isinstance(spelling, str) or not declared.has_other_tensors(spelling)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        try:
            key, plan, tensors, _ = look_up(self, args, kwargs)
        except UnsupportedSharding:
            result = self._of_sparse(args, kwargs)
            if result is NotImplemented:
                raise
            return result
        if plan is None:
            # Tensors are bound by their place among the call's tensors: the next call may have others there.
            given = self._declared.bind(self.name, self._arguments, *placed(args, kwargs))
            if numbers := self._numbers(given, tensors):
                places = count()
                args, kwargs = converted(
                    lambda a: numbers.get(next(places), a) if isinstance(a, Tensor) else a, args, kwargs
                )
                return self(*args, **kwargs)
            with hidden_from_program():
                plan = self._make(given, tensors)
            keep_plan(key, plan)
        if plan is NotImplemented:
            return NotImplemented
        if plan.plain is not None and plan.plain.note(tensors):
            plan.plain = None
        caller, here.operator = here.operator, plan.label
        try:
            result = plan.run(plan.prepared(tensors) if plan.prepares else tensors)
            return result if plan.then is None else redistribute_to(result, plan.then)
        except Exception as error:
            note_raised(error)
            raise
        finally:
            here.operator = caller

    def _numbers(self, given: inspect.BoundArguments, tensors: Sequence[Tensor]) -> dict[int, Any]:
        """The values of tensors that are sizes, dims and other numbers of the operator, by their place.

        torch takes tensors of one element for numbers. The values are part of the plan, so they go into its key.
        """
        if not self._takes_numbers or len(tensors) <= 1:
            return {}
        others = [value for name, value in given.arguments.items() if name not in self._declared.names]
        places = [place for value in others for place in places_in(value)]
        return {place: tensors[place].item() for place in places if _is_number(tensors[place])}

    def _of_sparse(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the operator returns for a sparse operand, of which no plan is made; NotImplemented if it takes none."""
        given = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and not isinstance(a, DTensor)]
        if self._declared.sparse is None or all(a.layout is torch.strided for a in given):
            return NotImplemented
        bound = self._declared.bind(self.name, self._arguments, args, kwargs)
        return self._declared.sparse(self.name, *bound.args, **bound.kwargs)

    def _make(self, given: inspect.BoundArguments, tensors: Sequence[Tensor]) -> Plan:
        declared = self._declared
        at = {name: place_of(given.arguments.get(name)) for name in declared.names}
        named = {name: picked(tensors, place) for name, place in at.items() if place is not None}
        found = [t for t in flat(named.values(), {}) if t is not None]
        mesh = common_mesh(self.name, found)
        if mesh is None:
            return DECLINED
        call = Arguments(self.name, mesh, found[0].device)
        for name, value in named.items():
            if name in declared.parameters:
                others = [t for t in flat((named.get(k) for k in declared.tensors), {}) if t is not None]
                takes_sharded = name in declared.sharded and _is_sharded(value)
                given.arguments[name] = spec_of(value) if takes_sharded else _parameter(self.name, value, others)
            else:
                given.arguments[name] = call.prepare(name, value, name in declared.partial)
        plan = declared.build(call, *given.args, **given.kwargs)
        if plan is not NotImplemented:
            order = tuple(at[name] for name in declared.names)
            plan.order = None if order == tuple(range(len(tensors))) else order
            plan.plain = PlainOperands.among(self.name, mesh, enumerate(tensors))
            self._finish(plan, call, named, given.arguments)
        return plan

    def _finish(self, plan: Plan, call: Arguments, named: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """Fill in what the plan's run does before and after its local work."""
        declared = self._declared
        plan.name, plan.device, plan.then = self.name, call.device.type, call.then
        if hasattr(plan, "outputs"):
            plan.outputs = disowned(plan.outputs)
        plan.label = label(self.name, getattr(plan, "outputs", None), given)
        mesh_dims, placements = contributing(call.tensors[declared.tensors[0]]) if declared.parameters else ((), ())
        contributes = bool(mesh_dims) and any(name in declared.parameters for name in named)
        plan.decide_precision(plan.device, contributes)
        if contributes:
            plan.label += ", half precision exact" if plan.exact else ""
            self._sum_gradients(plan, call, named, mesh_dims)
        steps: list[tuple[int, Callable[[Any], Any]]] = []
        for i, name in enumerate(declared.names):
            if isinstance(plan, Composed) and name in declared.parameters:
                continue
            value, target, wanted = named.get(name), call.tensors.get(name), call.steps.get(name, [])
            to_plain = name in declared.parameters and not (name in declared.sharded and _is_sharded(value))
            if isinstance(value, DTensor) and to_plain:
                dtype = call.casts.get(name) if wanted else value.dtype
                half = dtype is not None and wide_dtype(dtype) != dtype
                # It stays a DTensor until the run, so that a contribution is not rounded on each rank.
                if contributes and half and type(plan).run is Plan.run and spec_of(value).is_replicate():
                    plan.contributed = {**plan.contributed, i: placements}
                    wanted = [ShardTensor.from_dtensor, *wanted]
                else:
                    wanted = [partial(_to_local, placements), *wanted]
            elif target is not None and not prepared_spec(value, call.mesh, True).lies_like(target):
                wanted = [*wanted, partial(redistribute_to, target=target)]
            steps += [(i, step) for step in wanted]
        plan.steps = tuple(steps)
        plan.prepares = plan.order is not None or bool(steps)

    def _sum_gradients(self, plan: Plan, call: Arguments, named: Mapping[str, Any], mesh_dims: tuple[int, ...]) -> None:
        """Arrange for the sum of plain parameters' gradients."""
        declared = self._declared
        plain = {n: t for n, t in named.items() if n in declared.parameters and not isinstance(t, DTensor)}
        if plain:
            total = GradientSum(call.mesh, mesh_dims, tuple(name in plain for name in declared.names), plan.widens)
            if plan.defers and all(map(takes_gradient_late, plain.values())):
                plan.deferred = total
            else:
                plan.total = total


def operator(
    *spellings: Callable[..., Any],
    tensors: str = "",
    parameters: str = "",
    partial: str = "",
    sharded: str = "",
    sparse: Callable[..., Any] | None = None,
    meta: Callable[..., Any] | None = None,
) -> Callable[[Build], Build]:
    """Declare the function that makes the plans of an operator, as a decorator.

    Above autograd (with ``tensors``), the function gets an :class:`Arguments` and then the arguments of the operator.
    It takes these by torch's names and with torch's defaults, in any order that suits all spellings. The arguments of
    each spelling are bound by its signature or schema. The function returns a :class:`Plan`. If it returns
    NotImplemented, the call continues as without a declaration.

    Below autograd (without ``tensors``), the spellings are overloads such as ``torch.ops.aten.flip.default``. The
    function is called with a :class:`shardtensor.dispatch.planning.AtenCall`, and returns a
    :class:`shardtensor.dispatch.planning.AtenPlan`. torch's own formula differentiates the operator.

    Args:
        spellings: functions of ``torch.nn.functional`` and ``torch``, methods, ``torch.ops.aten`` operators.
        tensors: names of the arguments that are ShardTensors when the plan runs. Plain tensors (equal on every rank)
            and DTensors are converted, and Partials are reduced. The function gets a spec for each tensor, and a list
            of specs for a list of tensors.
        parameters: names of the arguments that are plain or replicated DTensors. The local work gets them plain, and
            :attr:`Plan.total` sums their gradients over the ranks. The function gets shape, strides and dtype.
        partial: the names among ``tensors`` that may stay Partial.
        sharded: the names among ``parameters`` that may be sharded DTensors. The function gets their specs. It returns
            a :class:`Composed`, or makes them plain with :meth:`Arguments.then_do`; their gradients are not summed.
        sparse: a function that is called without a plan if a plain tensor is sparse, with the operator's name and its
            arguments, by the names of the declaration. It returns the result, or NotImplemented for a refusal.
        meta: below autograd, a function that returns the shapes and dtypes of an operator without a meta kernel.

    Raises:
        ValueError: a spelling is declared already.
        TypeError: a spelling has an argument that the function does not have.

    Example:
        >>> import torch, shardtensor
        >>> def halved(x):
        ...     if torch.overrides.has_torch_function_unary(x):
        ...         return torch.overrides.handle_torch_function(halved, (x,), x)
        ...     return x / 2
        >>> @shardtensor.extend.operator(halved, tensors="x")
        ... def plan_halved(call, x):
        ...     return shardtensor.extend.LocalPlan(lambda local: local / 2, x)
        >>> shardtensor.extend.unregister(halved)
    """

    def decorate(build: Build) -> Build:
        if not tensors:
            for spelling in spellings:
                declare_rule(spelling, build, meta)
            return build
        declared = declaration(build, tensors, parameters, partial, sharded, sparse)
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

    def decorate(build: Builder) -> Operator:
        return Operator(name, declaration(build, tensors, parameters, partial, sharded))

    return decorate


def _is_number(t: Tensor) -> bool:
    local = t._local_tensor if isinstance(t, DTensor) else t
    return not t.ndim and not t.requires_grad and not goes_into_graph(local)


def _is_sharded(t: object) -> bool:
    return isinstance(t, DTensor) and bool(spec_of(t).sharded_dims())


def _parameter(name: str, parameter: Tensor, others: Sequence[Tensor]) -> TensorMeta:
    if not isinstance(parameter, DTensor):
        return meta_of(parameter)
    spec = spec_of(parameter)
    if spec.sharded_dims():
        shown = [spec_of(t) if isinstance(t, DTensor) else t for t in (*others, parameter)]
        raise refuse(name, shown, "the parameter is sharded", "redistribute it to Replicate() before the call")
    return spec.tensor_meta


def _to_local(placements: Sequence[Placement], parameter: DTensor) -> Tensor:
    t = ShardTensor.from_dtensor(parameter)
    t = redistribute_to(t, t._spec.for_gradient())
    return to_part(t, t._spec.replace(placements=placements), may_be_absent=True)
