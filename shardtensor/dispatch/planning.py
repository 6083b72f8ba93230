"""Plans of aten operators below autograd: what one call does to shards, and the cache of plans.

[Note: plans] What an operator does to shards follows from the specs of its tensors and from its other arguments, never
from data. So it is worked out once per ``(operator, specs, arguments, settings)`` and kept as a plan. A later call with
the same key unwraps, runs the plan on the local tensors and wraps. A run communicates and calls kernels, and does
nothing else. There are plans above autograd (operators/declaration.py) and below it, where a *rule* builds an
:class:`AtenPlan`. Building makes torch's checks, and raises refusals, on every rank alike. It communicates nothing, and
gives the same plan each time: a rank may forget plans, the oldest ones first, by itself.

A plan may slice what is replicated, reduce what is Partial, and reshard by an exchange. It may not make a shard whole:
that is refused outside :func:`shardtensor.allow_gather`. Operands that are smaller than what a rank holds of the result
are excepted, see [Note: small operands] in ops/elementwise/pointwise.py, and so are small matrices, see
[Note: small matrices] in ops/linalg/decomposition.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, TypeAlias, TypeGuard

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from .._compat import (
    OpOverload,
    TensorMeta,
    any_autocast_enabled,
    goes_into_graph,
    only_deterministic,
    tree_map,
)
from .._compat.c10d import world
from .._compat.data_parallel import takes_gradient_late
from ..context import UNCHANGED, gather_allowed, read_settings, settings
from ..errors import UnsupportedSharding, refuse
from ..layout import caches
from ..layout.placements import AxisLayout, without_owners
from ..layout.spec import ShardTensorSpec
from ..ranks.compared_operands import PlainOperands
from .copied_views import check_current
from .registry import META_FUNCTIONS

# Arguments that hold no tensor, and say all about themselves to a plan.
SCALARS = frozenset({bool, int, float, complex, str, type(None), torch.dtype})

Path = tuple[Any, ...]
# The specs of results in the structure that an operator returns; None for a result that is passed through as it is.
Outputs: TypeAlias = "ShardTensorSpec | Sequence[ShardTensorSpec | None] | None"
# All that a plan depends on. Where an item cannot be hashed, the plan is not kept.
PlanKey = list[object]


@dataclass(slots=True)
class AtenPlan:
    """What one aten call does on this rank.

    Attributes:
        outputs: spec of each output, in the structure that the operator returns (None: passed through as it is).
        inputs: ``(path, source spec, target spec)`` of operands that have to be redistributed first. A path is
            ``(index,)``, ``(index, item)`` for a tensor in a list, or ``(keyword,)``.
        call: what runs on the local arguments; None means the operator itself.
        returns_self: an in-place operator, which returns its first argument.
        may_copy: a view that some ranks may have to copy, see [Note: views that are copies] in copied_views.py.
        call_moves: ``call`` itself brings elements to other ranks: what represents a view is a copy on all of them.
        keeps: the path of an operand with which ``call``, which gets it by the name ``keeper``, keeps what it finds
            about its values, see index_findings.py.
        opens: the layout of the result, a new tensor, is open, see open_layouts.py.
        prepares: something is done to the local arguments before ``call``.
        new: the spec of the result, where it is one new tensor; None: :attr:`give` makes what is returned.
        give: makes it of ``(plan, result of call, func, args, kwargs, local arguments)``.
        plain: the plain operands, by their path; None if there are none to look at.
    """

    outputs: Any
    inputs: list[tuple[Path, ShardTensorSpec, ShardTensorSpec]] = field(default_factory=list)
    call: Callable[..., Any] | None = None
    returns_self: bool = False
    may_copy: bool = False
    call_moves: bool = False
    keeps: Path | None = None
    opens: bool = False
    # Filled in where the plan is kept, see aten_calls.py: what follows from the operator and the plan is chosen once.
    prepares: bool = False
    new: ShardTensorSpec | None = None
    give: Callable[..., Any] | None = None
    plain: PlainOperands | None = None

    @property
    def moves(self) -> bool:
        """Whether the first tensor is brought to other ranks, not only its local part computed with."""
        return self.call_moves or bool(self.inputs)


@dataclass(slots=True)
class AtenCall:
    """An aten call as a rule sees it: specs in place of ShardTensors, meta tensors in place of plain ones.

    Attributes:
        func, args, kwargs: the call.
        meta: the operator's result on meta tensors of the global shapes.
        tensors: ``{path: spec}`` for the ShardTensors, in order.
    """

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: Any
    tensors: dict[Path, ShardTensorSpec]

    @staticmethod
    def of(
        func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], tensors: dict[Path, ShardTensorSpec]
    ) -> AtenCall:
        """The call with these arguments; torch's own errors, on every rank alike."""
        args, kwargs = as_specs(args, kwargs)
        return AtenCall(func, args, kwargs, on_meta(func, args, kwargs), tensors)

    @property
    def specs(self) -> list[ShardTensorSpec]:
        return list(self.tensors.values())

    def refuse(self, reason: str, remedy: str) -> UnsupportedSharding:
        return refuse(self.func, self.specs, reason, remedy)

    def reduced(self, *, keep: Callable[[Partial], bool] = lambda p: False) -> dict[Path, ShardTensorSpec]:
        """The specs with Partial placements made Replicate, except those that ``keep`` accepts."""
        result = {}
        for path, spec in self.tensors.items():
            if any(p.is_partial() and not keep(p) for p in spec.placements):  # type: ignore[arg-type]
                spec = spec.with_axes({m: AxisLayout(Replicate()) for m in spec.partial_mesh_dims()})
            result[path] = spec
        return result

    def plan(
        self, outputs: Outputs, targets: dict[Path, ShardTensorSpec] | None = None, *, small: int = 1, **kwargs: Any
    ) -> AtenPlan:
        """A plan with the operands redistributed to ``targets``, refused where that would gather a shard.

        Exceptions are a sharded dim of length 1, of which one rank has all and which is broadcast, and operands of no
        more than ``small`` elements.
        """
        inputs = []
        for path, target in (targets or {}).items():
            source = self.tensors[path]
            if source == target:
                continue
            m = source.gathered_for(target)
            if m is not None and source.shape.numel() > small and not gather_allowed():
                raise self.refuse(
                    f"operand {path[0]} would have to be gathered over mesh dim {m}",
                    "redistribute it yourself, or call inside shardtensor.allow_gather()",
                )
            inputs.append((path, source, target))
        return AtenPlan(outputs, inputs, **kwargs)


Rule = Callable[[AtenCall], AtenPlan]

_KEEP_OWNERS: set[Rule] = set()


def keeps_owners(rule: Rule) -> Rule:
    """Decorator: the results of this rule say which ranks have the elements of a Partial, if the operands do.

    Views are such operators. See [Note: owners] in layout/placements.py.
    """
    _KEEP_OWNERS.add(rule)
    return rule


def planned_by(rule: Rule, call: AtenCall) -> AtenPlan:
    """The plan that a rule makes of a call."""
    plan = rule(call)
    if rule not in _KEEP_OWNERS and not returns_view(call.func):
        plan.outputs = disowned(plan.outputs)
    return plan


def disowned(outputs: Outputs) -> Any:
    """The specs of results, which may have been made from those of operands, without what is known of owners."""

    def convert(spec: object) -> object:
        return spec.with_layout(without_owners(spec.layout)) if has_home(spec) else spec

    return tree_map(convert, outputs)


def has_home(spec: object) -> TypeGuard[ShardTensorSpec]:
    """Whether it is the spec of a Partial of which it is known how many elements each rank has."""
    return isinstance(spec, ShardTensorSpec) and any(axis.home is not None for axis in spec.layout)


def disowns(rule: Rule | None, func: OpOverload, written: ShardTensorSpec) -> bool:
    """Whether what an in-place operator does to contributions would make untrue what is known of their owners."""
    return rule not in _KEEP_OWNERS and is_inplace(func) and has_home(written)


def argument(call: AtenCall, index: int, name: str, default: object) -> Any:
    """An argument of an aten call, wherever it stands."""
    return call.args[index] if len(call.args) > index else call.kwargs.get(name, default)


# -- the cache --------------------------------------------------------------------------------------------------------


class KeptPlan(Protocol):
    """What the cache keeps for a call: an operator's plan, above autograd or below.

    Attributes:
        plain: the plain tensors of calls, which ranks compare at first; None if there are none to look at.
    """

    plain: PlainOperands | None


_plans: dict[tuple[object, ...], KeptPlan] = {}
MAX_PLANS = 8192
caches.forgets(_plans.clear)


def look_up(op: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[PlanKey, Any, list[Tensor], list[Any]]:
    """The plan of a call of an operator, above or below autograd, if one is kept.

    Returns:
        The key that holds all that the plan depends on; what is kept under it, or None; the call's tensors, also those
        in lists, positional arguments first; and its arguments in this order, with local tensors for DTensors.

    Raises:
        UnsupportedSharding: a plain tensor is sparse; a view that is a copy is out of date.
    """
    if world._default_pg is not caches.world:
        caches.check_world()
    here = read_settings()
    deciding = UNCHANGED.deciding if here is UNCHANGED else settings()
    key = [op, deciding, torch.get_default_dtype(), only_deterministic(), *kwargs]
    tensors: list[Tensor] = []
    local = describe(args if not kwargs else (*args, *kwargs.values()), key, tensors)
    if any_autocast_enabled():
        kind = tensors[0].device.type if tensors else "cpu"
        key.append(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None)
    try:
        plan = _plans.get(tuple(key))
    except TypeError:  # an argument that cannot be hashed: no caching
        plan = None
    return key, plan, tensors, local


def describe(values: Iterable[Any], key: PlanKey, tensors: list[Tensor]) -> list[Any]:
    """Append to ``key`` what a plan depends on of arguments, and to ``tensors`` those among them.

    Returns the arguments with local tensors for DTensors. The first item of ``key`` is the operator.
    """
    local = []
    for a in values:
        kind = type(a)
        if kind in SCALARS:
            local.append(a)
            key.append(kind)  # 1, 1.0 and True are equal, but mean different things
            key.append(a)
        elif isinstance(a, DTensor):
            held, spec = a._local_tensor, a._spec
            if type(spec) is not ShardTensorSpec:
                a = reduced_by_dtensor(a)
                held, spec = a._local_tensor, spec_of(a)
            elif a._viewed is not None:  # type: ignore[attr-defined]
                check_current(key[0], a)
            tensors.append(a)
            local.append(held)
            key.append(spec.number)
            if type(held) is not Tensor and goes_into_graph(held):
                key.append([])  # cannot be hashed: a plan may hold tensors, and those of a trace are not for others
        elif isinstance(a, Tensor):
            tensors.append(a)
            local.append(torch.zeros_like(a) if a._is_zerotensor() else a)
            if a.layout is not torch.strided:
                reason = f"an operand has the layout {a.layout}, and plans are made for strided ones"
                remedy = "make it dense by to_dense(), or call it on to_local() of replicated tensors"
                if a.layout is torch.jagged:
                    remedy = "pack the sequences into one dense tensor, and attend with a mask: docs/attention.md"
                raise refuse(key[0], a, reason, remedy)
            late = not a.requires_grad or takes_gradient_late(a)
            key.append((a.shape, a.stride(), a.dtype, a.device, late))
        elif kind is list or kind is tuple:
            kinds = tuple(map(type, a))
            key.append(kinds)
            if SCALARS.issuperset(kinds):
                local.append(a)
                key.append(tuple(a))
            else:
                local.append(describe(a, key, tensors))
        else:
            local.append(a)
            key.append(kind)
            key.append(a)
    return local


def kept_plans() -> list[KeptPlan]:
    """All plans that are kept now, for who needs them longer than they are."""
    return list(_plans.values())


def keep_plan(key: PlanKey, plan: KeptPlan) -> None:
    """Keep a plan, if its key can be hashed."""
    with suppress(TypeError):
        hash(tuple(key))
        while len(_plans) >= MAX_PLANS:
            _plans.pop(next(iter(_plans)), None)
        _plans[tuple(key)] = plan


def label(name: str, outputs: Outputs, arguments: Mapping[Any, object]) -> str:
    """The operator with its result's layout and its arguments: what every rank knows of a plan, short in any world.

    Example:
        >>> label("flip", None, {"input": TensorMeta((3,), (1,), torch.float32), "dims": (0,)})
        'flip of input=(3,) float32, dims=(0,)'
    """
    spec = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs
    to = f" to {spec.in_short}" if isinstance(spec, ShardTensorSpec) else ""
    # Names of process groups are each rank's own.
    common = [(k, a) for k, a in arguments.items() if a is not None and k != "group"]
    shown = [f"{k}={_in_short(a)}" if type(k) is str else _in_short(a) for k, a in common]
    return f"{name}{to} of {', '.join(shown)}"


def _in_short(argument: Any) -> str:
    if isinstance(argument, DTensor):
        return spec_of(argument).in_short
    if isinstance(argument, ShardTensorSpec):
        return argument.in_short
    if isinstance(argument, (TensorMeta, Tensor)):
        return f"{tuple(argument.shape)} {str(argument.dtype).removeprefix('torch.')}"
    if type(argument) in (list, tuple):
        return f"({', '.join(map(_in_short, argument))}{',' * (len(argument) == 1)})"
    return str(argument) if type(argument) in SCALARS else type(argument).__name__


# -- what plans are made from -----------------------------------------------------------------------------------------


def spec_of(tensor: Tensor) -> ShardTensorSpec:
    """The spec of a ShardTensor, or of a DTensor seen as one."""
    spec = tensor._spec  # type: ignore[attr-defined]
    if isinstance(spec, ShardTensorSpec):
        return spec
    meta = spec.tensor_meta
    return ShardTensorSpec.make(spec.mesh, spec.placements, meta.shape, meta.dtype, stride=meta.stride)


def reduced_by_dtensor(dtensor: DTensor) -> DTensor:
    """A DTensor, reduced where it is a mean or a norm: only DTensor knows what its contributions mean."""
    if not any(isinstance(p, Partial) and (type(p) is not Partial or p.reduce_op == "avg") for p in dtensor.placements):
        return dtensor
    whole = [Replicate() if p.is_partial() else p for p in dtensor.placements]
    # The second time for the gradient: torch takes it sharded or whole for a mean or a norm, but not as contributions.
    return dtensor.redistribute(placements=whole).redistribute(placements=whole)


def replicated_spec(mesh: DeviceMesh, meta: TensorMeta) -> ShardTensorSpec:
    """The spec of a tensor of which every rank has all."""
    return ShardTensorSpec.of(mesh, [Replicate()] * mesh.ndim, meta, (None,) * mesh.ndim)


def meta_of(tensor: Tensor) -> TensorMeta:
    """Shape, stride and dtype of a tensor, as specs carry them."""
    return TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)


@cache
def is_inplace(func: OpOverload) -> bool:
    """Whether the operator writes to its first argument and returns it."""
    first = func._schema.arguments[0] if func._schema.arguments else None
    return first is not None and first.alias_info is not None and bool(first.alias_info.is_write)


@cache
def returns_view(func: OpOverload) -> bool:
    """Whether the operator's result is a view of its first argument: shares memory that is not written to."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


@cache
def returning(func: OpOverload) -> OpOverload | None:
    """The operator that returns what the in-place operator ``func`` writes, if there is one."""
    namespace, name = func._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    if not is_inplace(func) or not name.endswith("_") or packet is None:
        return None
    types = _types(func)  # some overloads have another name: pow_.Tensor, pow.Tensor_Tensor
    like = (op for overload in packet.overloads() if _types(op := getattr(packet, overload)) == types)
    found = getattr(packet, func._overloadname, None) or next(like, None)
    return None if found is None or is_inplace(found) else found


def _types(func: OpOverload) -> list[str]:
    return [str(a.type) for a in func._schema.arguments]


def operand(args: Sequence[Any], path: Path) -> Any:
    """The argument at ``path``."""
    for step in path:
        args = args[step]
    return args


def operands(args: Sequence[Any], kwargs: dict[str, Any], kinds: Any) -> Iterator[tuple[Path, Any]]:
    """What is of these kinds among the arguments, also in lists, by its path."""
    for name, value in [*enumerate(args), *kwargs.items()]:
        if isinstance(value, kinds):
            yield (name,), value
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                if isinstance(item, kinds):
                    yield (name, i), item


def flat(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments of a call, with the items of lists and tuples in their place."""
    return [a for item in (*args, *kwargs.values()) for a in (item if type(item) in (list, tuple) else (item,))]


def converted(
    convert: Callable[[Any], Any], args: Iterable[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, each of them converted; of lists and tuples, their items."""
    return tuple(_each(convert, a) for a in args), {name: _each(convert, value) for name, value in kwargs.items()}


def _each(convert: Callable[[Any], Any], value: Any) -> Any:
    # No closure that calls itself: it would keep tensors until garbage is collected.
    return type(value)(_each(convert, v) for v in value) if type(value) in (list, tuple) else convert(value)


def distributed_operands(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Path, ShardTensorSpec]]:
    """The specs of the DTensors among the arguments, by their path."""
    return ((path, spec_of(t)) for path, t in operands(args, kwargs, DTensor))


def as_specs(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with specs for DTensors, and tensors without data for plain ones."""

    def convert(a: object) -> object:
        if isinstance(a, DTensor):
            return spec_of(a)
        return without_data(meta_of(a)) if isinstance(a, Tensor) else a

    return tree_map(convert, tuple(args)), tree_map(convert, kwargs)


def on_meta(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The operator on meta tensors of the global shapes: shapes and dtypes, and torch's own errors on every rank.

    Args:
        args, kwargs: as :func:`as_specs` gives them.
    """

    def convert(a: object) -> object:
        if isinstance(a, ShardTensorSpec):
            return without_data(a.tensor_meta)
        return torch.device("meta") if isinstance(a, torch.device) else a

    return META_FUNCTIONS.get(func, func)(*tree_map(convert, args), **tree_map(convert, kwargs))


def without_data(meta: TensorMeta) -> Tensor:
    """A meta tensor of this shape, stride and dtype."""
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
