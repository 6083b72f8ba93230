"""From an aten call on ShardTensors to local work: rules, the plan cache, and the policy on gathering.

[Note: plans] What an aten operator does to shards follows from the specs of its tensors and its other arguments,
never from data. So it is worked out once per ``(operator, specs, arguments)`` and kept as a :class:`Plan`; a later
call with the same key unwraps, runs the operator on the local tensors and wraps. A *rule* builds the plan. Building
communicates nothing, and gives the same plan each time: a rank may forget plans, the oldest ones first, by itself.

[Note: no silent gather] A plan may cut what is replicated, reduce what is Partial, exchange between cuts and between
sharded dims. It may not make a shard whole: that is refused outside :func:`allow_gather`.

[Note: allowlist] DTensor's sharding propagation is not consulted. It mislabels some results on even shards and cannot
express uneven ones, and it gathers without a word; a rule here is a few lines. An operator without a rule is refused,
unless all its tensors are replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ._compat import TensorMeta, is_traced, kernel, new_wrapper, not_in_graphs, untraced
from .copies import check_current, check_written, mark_copied, note_copies, stands_for_view, write_back
from .errors import UnsupportedSharding, different_meshes, refuse
from .redistribute import redistribute_local
from .registry import OPERATORS, changes
from .spec import CIRCUMSTANCES, ShardTensorSpec

__all__ = [
    "RULES",
    "STAND_INS",
    "Call",
    "Plan",
    "allow_gather",
    "argument",
    "cached_plan",
    "choose",
    "declare_rule",
    "gather_allowed",
    "keep_plan",
    "plan_key",
    "rule",
    "run",
    "spec_of",
    "wrap",
]

_aten = torch.ops.aten
_tensor_class: type[DTensor] = DTensor  # tensor.py, which stands above this module, puts its class here

# Arguments that hold no tensor, and say all about themselves to a plan.
SCALARS = frozenset({bool, int, float, complex, str, type(None), torch.dtype})

Path = tuple[Any, ...]


@dataclass(slots=True)
class Plan:
    """What one aten call does on this rank.

    Attributes:
        outputs: spec of each output, in the structure that the operator returns (None: passed through as it is).
        inputs: ``(path, source spec, target spec)`` of operands that have to be redistributed first. A path is
            ``(index,)``, ``(index, item)`` for a tensor in a list, or ``(keyword,)``.
        call: what runs on the local arguments; None means the operator itself.
        returns_self: an in-place operator, which returns its first argument.
        view: the result stands for a view of the first argument (:func:`run` fills this in).
        may_copy: a view that some ranks may have to copy, see [Note: views that are copies] in copies.py.
    """

    outputs: Any
    inputs: list[tuple[Path, ShardTensorSpec, ShardTensorSpec]] = field(default_factory=list)
    call: Any = None
    returns_self: bool = False
    view: bool = False
    may_copy: bool = False


@dataclass(slots=True)
class Call:
    """An aten call as a rule sees it: ShardTensors stand for their specs, plain tensors for meta tensors.

    Attributes:
        func, args, kwargs: the call.
        meta: the operator's result on meta tensors of the global shapes.
        tensors: ``{path: spec}`` for the ShardTensors, in order.
    """

    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: Any
    tensors: dict[Path, ShardTensorSpec]

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
                spec = spec.replace(placements=[Replicate() if p.is_partial() else p for p in spec.placements])
            result[path] = spec
        return result

    def plan(self, outputs: Any, targets: dict[Path, ShardTensorSpec] | None = None, **kwargs: Any) -> Plan:
        """A plan with the operands redistributed to ``targets``, refused where that would gather a shard.

        A sharded dim of length 1 is an exception: one rank has all of it, and it is broadcast.
        """
        inputs = []
        for path, target in (targets or {}).items():
            source = self.tensors[path]
            if source == target:
                continue
            for m, (old, new) in enumerate(zip(source.placements, target.placements, strict=True)):
                gathers = isinstance(old, Shard) and not isinstance(new, Shard) and source.shape[old.dim] > 1
                if gathers and not gather_allowed():
                    raise self.refuse(
                        f"operand {path[0]} would have to be gathered over mesh dim {m}",
                        "redistribute it yourself, or call inside shardtensor.allow_gather()",
                    )
            inputs.append((path, source, target))
        return Plan(outputs, inputs, **kwargs)


def argument(call: Call, index: int, name: str, default: Any) -> Any:
    """An argument of an aten call, wherever it stands."""
    return call.args[index] if len(call.args) > index else call.kwargs.get(name, default)


Rule = Callable[[Call], Plan]
RULES: dict[torch._ops.OpOverload, Rule] = {}
# Functions with the shapes and dtypes of operators that torch does not run on meta tensors.
STAND_INS: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
_default_rules: list[Callable[[torch._ops.OpOverload], Rule | None]] = []
_plans: dict[Any, Any] = {}
MAX_PLANS = 8192
_gather_depth = 0
_chosen: tuple[tuple[str, str], ...] = ()


# A spec's strides are the global tensor's. Local tensors may lie in memory otherwise, and these operators would raise.
# So whole tensors, too, go by their rule.
RESHAPES = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def rule(*ops: torch._ops.OpOverload) -> Callable[[Rule], Rule]:
    """Decorator: the function below builds the plans of these aten operators."""

    def decorate(build: Rule) -> Rule:
        for op in ops:
            RULES[op] = build
        return build

    return decorate


def declare_rule(op: torch._ops.OpOverload, build: Rule, meta: Callable[..., Any] | None = None) -> None:
    """Have ``build`` make the plans of an aten operator; ValueError where another function does already."""
    if op in RULES:
        raise ValueError(f"{op} has a rule already")
    RULES[op] = build
    if meta is not None:
        STAND_INS[op] = meta


def default_rule(
    find: Callable[[torch._ops.OpOverload], Rule | None],
) -> Callable[[torch._ops.OpOverload], Rule | None]:
    """Decorator: ``find(op)`` gives the rule of operators that :data:`RULES` does not name, or None."""
    _default_rules.append(find)
    return find


@not_in_graphs("call the compiled function inside of shardtensor.allow_gather(); it is compiled anew for that")
@contextmanager
def allow_gather() -> Iterator[None]:
    """Let operators that have no distributed form gather their operands, compute, and cut the result again.

    Outside this context they raise :class:`UnsupportedSharding`. Every rank has to enter it alike.

    Example:
        >>> import shardtensor
        >>> with shardtensor.allow_gather():
        ...     pass  # y = torch.linalg.svdvals(x)
    """
    global _gather_depth
    _gather_depth += 1
    try:
        yield
    finally:
        _gather_depth -= 1


def gather_allowed() -> bool:
    """Whether the calling code stands inside :func:`allow_gather`."""
    return _gather_depth > 0


def choose(name: str, value: str) -> None:
    """Note a user's choice that plans above autograd depend on. Every rank has to choose alike."""
    global _chosen
    _chosen = tuple(sorted({**dict(_chosen), name: value}.items()))


CIRCUMSTANCES.extend((gather_allowed, changes))


def spec_of(tensor: Tensor) -> ShardTensorSpec:
    """The spec of a ShardTensor, or of a DTensor seen as one."""
    spec = tensor._spec  # type: ignore[attr-defined]
    if isinstance(spec, ShardTensorSpec):
        return spec
    meta = spec.tensor_meta
    return ShardTensorSpec.make(spec.mesh, spec.placements, meta.shape, meta.dtype, stride=meta.stride)


def wrap(local: Tensor, spec: ShardTensorSpec) -> Any:
    """A ShardTensor around ``local``, which must have the shape that the spec says."""
    if local.shape != spec.own_shape:
        raise RuntimeError(
            f"internal error: local shape {tuple(local.shape)} does not fit {spec} at {spec.coordinate}; "
            "please report it"
        )
    return new_wrapper(_tensor_class, local, spec)


def run(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an aten operator on ShardTensors (and plain tensors, which count as replicated)."""
    if torch.is_inference_mode_enabled() and _traits(func)[1] and not args[0].is_inference():
        # In inference mode, too, a view of an ordinary tensor is an ordinary tensor, which autograd keeps a version of.
        with torch.inference_mode(False), torch.no_grad():
            return run(func, args, kwargs)
    handler = OPERATORS.get(func)
    if handler is not None:
        result = handler(*args, **kwargs)
        if result is not NotImplemented:
            return result
    key: list[Any] = [func, _gather_depth > 0, torch.get_default_dtype()]
    local_args = _localize(args, key)
    local_kwargs = {}
    for name, value in kwargs.items():
        key.append(name)
        local_kwargs[name] = _localize((value,), key)[0]
    try:
        plan = _plans.get(tuple(key))
    except TypeError:  # an argument that cannot be hashed: no caching
        plan, key = None, []
    if plan is None:
        if is_inplace(func):
            check_written(func, args[0])
        made = _make_plan(func, args, kwargs)
        plan = made.plan if isinstance(made, _Done) else made
        if plan is not None:
            plan.call, plan.view = plan.call or kernel(func), _traits(func)[1]
            if key:
                _keep(tuple(key), plan)
        if isinstance(made, _Done):
            return made.value if plan is None else _done(made.value, args[0], plan)
        plan = made
    if plan.returns_self:
        check_written(func, args[0])
    for path, source, target in plan.inputs:
        _replace(local_args, local_kwargs, path, source, target)
    result = plan.call(*local_args, **local_kwargs)
    if plan.returns_self:
        write_back(args[0])
        return args[0]
    outputs = plan.outputs
    note = plan.view and (plan.inputs or plan.may_copy or stands_for_view(args[0]))
    if type(outputs) is ShardTensorSpec:
        out = wrap(result, outputs)
        return _viewing(out, args[0], plan) if note else out
    if outputs is None:
        return result
    wrapped = [r if s is None else wrap(r, s) for r, s in zip(result, outputs, strict=True)]
    if note:
        wrapped = [_viewing(r, args[0], plan) for r in wrapped]
    return type(result)(wrapped)


def _done(value: Any, first: Any, plan: Plan) -> Any:
    """A result that was computed while looking for a plan, with what a call by the plan would note."""
    if plan.returns_self:
        write_back(first)
    elif plan.view and stands_for_view(first):
        tree_map(lambda out: _viewing(out, first, plan), value)
    return value


def _viewing(view: Any, viewed: Any, plan: Plan) -> Any:
    return note_copies(view, viewed, moved=bool(plan.inputs), may_copy=plan.may_copy)


def _keep(key: Any, plan: Plan) -> None:
    """See [Note: plans]."""
    while len(_plans) >= MAX_PLANS:
        _plans.pop(next(iter(_plans)), None)
    _plans[key] = plan


def _localize(args: Sequence[Any], key: list[Any]) -> list[Any]:
    """Local versions of the arguments; what the plan depends on is appended to ``key``."""
    out = []
    for a in args:
        kind = type(a)
        if kind in SCALARS:
            out.append(a)
            key.append(kind)  # 1, 1.0 and True are equal, but promote differently
            key.append(a)
        elif kind is _tensor_class:
            if a._viewed is not None:
                check_current(key[0] if key else "operator", a)
            local = a._local_tensor
            out.append(local)
            key.append(a._spec)
            if type(local) is not Tensor and is_traced(local):
                key.append([])  # cannot be hashed: a plan may hold tensors, and those of a trace are not for others
        elif isinstance(a, DTensor):
            out.append(a._local_tensor)
            key.append(spec_of(a))
        elif isinstance(a, Tensor):
            out.append(a)
            key.append((a.shape, a.stride(), a.dtype, a.device))
        elif kind is list or kind is tuple:
            key.append(len(a))
            out.append(_localize(a, key))
        else:
            out.append(a)
            key.append(kind)
            key.append(a)
    return out


def plan_key(function: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Any]) -> list[Any]:
    """What the plan of a call above autograd depends on, besides the registry. Its tensors are added to ``tensors``."""
    key: list[Any] = [function, _gather_depth > 0, torch.get_default_dtype(), _chosen]
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
        elif kind is _tensor_class:
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


def cached_plan(key: list[Any]) -> Any:
    """The plan that was kept under a key of :func:`plan_key`, if any."""
    try:
        return _plans.get(tuple(key))
    except TypeError:  # an argument that cannot be hashed: no caching
        return None


def keep_plan(key: list[Any], plan: Any) -> None:
    """Keep a plan, if its key can be hashed."""
    with suppress(TypeError):
        _keep(tuple(key), plan)


def _replace(args: list[Any], kwargs: dict[str, Any], path: Path, src: ShardTensorSpec, dst: ShardTensorSpec) -> None:
    holder: Any = kwargs if isinstance(path[0], str) else args
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = redistribute_local(holder[path[-1]], src, dst)


@dataclass(slots=True)
class _Done:
    """A result that was computed while looking for a plan, and the plan for the next time, if there is one."""

    value: Any
    plan: Plan | None = None


def _make_plan(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Plan | _Done:
    build = RULES.get(func) or next((r for r in (find(func) for find in _default_rules) if r is not None), None)
    if build is None:
        decomposed = func.decompose(*args, **kwargs)
        if decomposed is not NotImplemented:
            return _Done(decomposed)
    tensors = dict(_paths(args, kwargs))
    specs = list(tensors.values())
    mesh = specs[0].mesh
    if any(spec.mesh != mesh for spec in specs):
        raise different_meshes(func, specs)
    if torch.Tag.inplace_view in func.tags or any(a.is_out for a in func._schema.arguments):
        raise refuse(func, specs, "it would change the layout of a tensor in place", "use the out-of-place form")
    random = torch.Tag.nondeterministic_seeded in func.tags
    replicated = all(spec.is_replicate() for spec in specs)
    if build is None and not replicated and _returning(func) is not None:
        return _Done(_written(func, args, kwargs))
    if build is None and (random or not replicated):
        if gather_allowed() and not random:
            return _Done(_gathered(func, args, kwargs))
        reason = "random numbers of shards would not match one device" if random else "no distributed form is known"
        remedy = "draw on plain tensors" if random else "call inside shardtensor.allow_gather(), or register a handler"
        raise refuse(func, specs, reason, remedy)
    if replicated and not random and func not in RESHAPES:
        return _run_replicated(func, args, kwargs, specs[0].replicated())
    call = Call(func, *_as_specs(args, kwargs), _on_meta(func, args, kwargs), tensors)
    assert build is not None
    try:
        return build(call)
    except UnsupportedSharding:
        if not gather_allowed():
            raise
        return _Done(_gathered(func, args, kwargs))


def _run_replicated(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any], base: ShardTensorSpec
) -> _Done:
    """Everything is whole on every rank, so each computes for itself; the result tells its own shape."""
    local_kwargs = {name: _localize((value,), [])[0] for name, value in kwargs.items()}
    result = func(*_localize(args, []), **local_kwargs)
    returns_self = is_inplace(func)

    def spec(value: Any) -> Any:
        return base.replace(meta=meta_of(value)) if isinstance(value, Tensor) else None

    def wrapped(value: Any) -> Any:
        return wrap(value, spec(value)) if isinstance(value, Tensor) else value

    value = args[0] if returns_self and result is not None else tree_map(wrapped, result)
    if torch.Tag.dynamic_output_shape in func.tags:
        return _Done(value)  # the shape may be another one next time
    outputs = [spec(r) for r in result] if isinstance(result, (list, tuple)) else spec(result)
    return _Done(value, Plan(outputs, returns_self=returns_self and result is not None))


def meta_of(tensor: Tensor) -> TensorMeta:
    """Shape, stride and dtype of a tensor, as specs carry them."""
    return TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)


def is_inplace(func: torch._ops.OpOverload) -> bool:
    """Whether the operator writes to its first argument and returns it."""
    return _traits(func)[0]


@cache
def _traits(func: torch._ops.OpOverload) -> tuple[bool, bool]:
    """Whether the operator is in place, and whether its result is a view: shares memory that is not written to."""
    first = func._schema.arguments[0] if func._schema.arguments else None
    inplace = first is not None and first.alias_info is not None and first.alias_info.is_write
    returned = [r.alias_info for r in func._schema.returns]
    return bool(inplace), any(alias is not None and not alias.is_write for alias in returned)


def _paths(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Path, ShardTensorSpec]]:
    for name, value in [*enumerate(args), *kwargs.items()]:
        if isinstance(value, DTensor):
            yield (name,), spec_of(value)
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                if isinstance(item, DTensor):
                    yield (name, i), spec_of(item)


def _as_specs(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def convert(a: Any) -> Any:
        if isinstance(a, DTensor):
            return spec_of(a)
        return _on_meta_device(a) if isinstance(a, Tensor) else a

    return tree_map(convert, tuple(args)), tree_map(convert, kwargs)


def _on_meta(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The operator on meta tensors of the global shapes: shapes and dtypes, and torch's own errors on every rank."""

    def convert(a: Any) -> Any:
        if isinstance(a, DTensor):
            meta = spec_of(a).tensor_meta
            return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
        if isinstance(a, Tensor):
            return _on_meta_device(a)
        return torch.device("meta") if isinstance(a, torch.device) else a

    with torch.no_grad(), untraced():
        return STAND_INS.get(func, func)(*tree_map(convert, tuple(args)), **tree_map(convert, kwargs))


def _on_meta_device(a: Tensor) -> Tensor:
    with untraced():
        return torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta")


@cache
def _returning(func: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The operator that returns what the in-place operator ``func`` writes, if there is one."""
    namespace, name = func._schema.name.split("::")
    if not is_inplace(func) or not name.endswith("_"):
        return None
    found = getattr(getattr(getattr(torch.ops, namespace), name[:-1], None), func._overloadname, None)
    return None if found is None or is_inplace(found) else found


def _written(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An in-place operator without a rule: what its other form returns, copied into the first argument."""
    _on_meta(func, args, kwargs)  # raises where the result's dtype does not fit
    returning = _returning(func)
    assert returning is not None
    return run(_aten.copy_.default, (args[0], run(returning, args, kwargs)), {})


def _gathered(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Gather the operands, compute, and cut what still has the shape of the first sharded operand.

    What an in-place operator writes to gets its part of the result.
    """
    inplace = is_inplace(func)
    if inplace and not isinstance(args[0], DTensor):
        raise refuse(
            func,
            [spec for _, spec in _paths(args, kwargs)],
            "it would write to something else than a ShardTensor",
            "use the out-of-place form",
        )
    leaves, structure = tree_flatten((tuple(args), kwargs))
    pattern = next(spec_of(a) for a in leaves if isinstance(a, DTensor) and not spec_of(a).is_replicate())
    whole = [
        redistribute_local(a._local_tensor, spec_of(a), spec_of(a).replicated()) if isinstance(a, DTensor) else a
        for a in leaves
    ]
    plain_args, plain_kwargs = tree_unflatten(whole, structure)
    if inplace:
        written, spec = args[0], spec_of(args[0])
        value = plain_args[0].clone()
        func(value, *plain_args[1:], **plain_kwargs)
        written._local_tensor.copy_(redistribute_local(value, spec.replicated(), spec))
        write_back(written)
        return written

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.layout != torch.strided:
            raise refuse(func, pattern, "a ShardTensor holds no sparse tensor", "call it on full_tensor()")
        spec = pattern.replicated().replace(meta=meta_of(value))
        if value.shape != pattern.shape:
            return wrap(value, spec)
        target = spec.replace(placements=pattern.for_gradient().placements, sizes=pattern.sizes)
        return wrap(redistribute_local(value, spec, target), target)

    result = tree_map(cut, func(*plain_args, **plain_kwargs))
    return tree_map(lambda view: mark_copied(view, args[0]), result) if _traits(func)[1] else result
