"""From an aten call on ShardTensors to local work: what is called where torch's autograd is done with a call.

torch's sharding strategies for its own operators are not consulted. They mislabel some results on even shards and
cannot express uneven ones, and DTensor gathers without a word. A rule here is a few lines. Strategies that users have
registered are consulted, see user_strategies.py. An operator without a rule goes by its form above autograd, without a
graph, if it has one. Otherwise it is refused, unless all its tensors are replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._compat import (
    DisableTorchFunction,
    OpOverload,
    above_autograd,
    counting_writes,
    hidden_from_program,
    kernel,
    tracing,
    tree_map,
)
from ..communication.redistribute import redistribute_local
from ..context import gather_allowed
from ..errors import UnsupportedSharding, different_meshes, refuse
from ..layout.spec import ShardTensorSpec
from ..layout.strides import apart
from ..ranks.compared_operands import PlainOperands
from ..ranks.history import here
from .copied_views import Back, Moved, check_written, note_copies, note_write, represents_view
from .gathering import STRIDED, gathered
from .index_findings import INDICES, note_views, raise_versions
from .open_layouts import (
    REDUCES_BY_INDEX,
    axes_like_read,
    decide,
    decide_anew,
    decide_by_index,
    fill,
    is_open,
    items_of,
    leave_open,
    note_open_views,
)
from .planning import (
    AtenCall,
    AtenPlan,
    PlanKey,
    as_specs,
    disowns,
    distributed_operands,
    is_inplace,
    keep_plan,
    label,
    look_up,
    meta_of,
    on_meta,
    operand,
    planned_by,
    replicated_spec,
    returning,
    returns_view,
)
from .registry import OPERATORS, RANDOM, REFUSED, REMEDY, UNKNOWN, Handler, function_of, rule_of
from .tensor import wrap

_aten = torch.ops.aten

# A spec's strides are the global tensor's. Local tensors may lie in memory otherwise, and these operators would raise.
# So whole tensors, too, go by their rule.
RESHAPES = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)

# Views whose elements are those of the tensor, in its order.
_REORDER_NOTHING = (*RESHAPES, _aten.unsqueeze.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims)

# A spec has strides.
_WITHOUT_STRIDES = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def run(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], *, moves: bool = True) -> Any:
    """Run an aten operator on ShardTensors (and plain tensors, which count as replicated).

    Args:
        moves: operands may be redistributed; UnsupportedSharding if not, and one would have to be.
    """
    first = args[0] if args else None
    opens = getattr(first, "_open", None) is not None
    sums = type(first) is Tensor and func in REDUCES_BY_INDEX
    if opens or sums or type(first) is list or torch.is_inference_mode_enabled():
        result = _unusual(func, args, kwargs, opens)
        if result is not NotImplemented:
            return result
    handler = OPERATORS.get(func)
    if handler is not None:
        result = handler(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if opens and is_inplace(func) and is_open(first):
        decide(func, args, kwargs)
    key, plan, tensors, given = look_up(func, args, kwargs)
    local_args, local_kwargs = given, {}
    if kwargs:
        local_args, local_kwargs = given[: len(args)], dict(zip(kwargs, given[len(args) :], strict=True))
    if type(plan) is _Form:
        result = _as_above(plan.handler, func, args, kwargs)
        if result is not NotImplemented:
            return result
        plan = None
    if plan is None:
        made = _planned(func, args, kwargs, key, tensors)
        if isinstance(made, _Done):
            return made.value
        plan = made
    if plan.plain is not None and plan.plain.note(tensors):
        plan.plain = None
    if plan.prepares or not moves:
        local_args = _prepared(plan, func, args, local_args, local_kwargs, moves)
    result = plan.call(*local_args, **local_kwargs)
    if plan.new is not None:
        return wrap(result, plan.new)
    return plan.give(plan, result, func, args, kwargs, given)


def _unusual(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], opens: bool) -> Any:
    """What comes before a call in inference mode, on lists, and on an open tensor; or its result, if that is all."""
    if torch.is_inference_mode_enabled() and returns_view(func) and not args[0].is_inference():
        # In inference mode, too, a view of an ordinary tensor is an ordinary tensor, which autograd keeps a version of.
        with torch.inference_mode(False), torch.no_grad():
            return run(func, args, kwargs)
    if opens:
        if func in REDUCES_BY_INDEX:
            decide_by_index(*args)
        fill(args[0])
    elif type(args[0]) is Tensor and func in REDUCES_BY_INDEX and not is_inplace(func):
        axes = axes_like_read(*args)
        if axes:
            whole = replicated_spec(args[3]._spec.mesh, meta_of(args[0]))
            target = whole.with_axes(axes)
            return run(func, (wrap(redistribute_local(args[0], whole, target), target), *args[1:]), kwargs)
    elif args and type(args[0]) is list and is_inplace(func) and _written_one_by_one(func, args, kwargs):
        return None
    return NotImplemented


# -- plans, completed --------------------------------------------------------------------------------------------------


def _complete(plan: AtenPlan, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Choose how the calls of a plan run that a rule has made for these arguments."""
    view, writes, own = returns_view(func), is_inplace(func), plan.call
    if type(plan.outputs) is ShardTensorSpec and own is None and not (view or writes or plan.opens):
        plan.new = plan.outputs
    plan.prepares = writes or bool(plan.inputs) or plan.keeps is not None
    plan.give = _as_it_is
    if writes:
        plan.give = _after_write
    elif view:
        plan.give = partial(_views, plan.moves or plan.may_copy or args[0].dtype in INDICES)
    elif plan.outputs is not None:
        plan.give = partial(_new_tensors, own is not None and not plan.opens and func not in RESHAPES)
    call = own or kernel(func)
    if view or func._schema.is_mutable:
        call = counting_writes(call)
    if own is not None and (plan.moves or not view):
        call = _labelled(call, label(func.__name__, plan.outputs, {**dict(enumerate(args)), **kwargs}))
    plan.call = call


def _prepared(
    plan: AtenPlan,
    func: OpOverload,
    args: Sequence[Any],
    local_args: list[Any],
    kwargs: dict[str, Any],
    moves: bool,
) -> list[Any]:
    """The local arguments as a plan needs them: some are redistributed, in ``kwargs`` in their places."""
    if is_inplace(func):
        _check_written(func, args)
    if not moves and plan.moves:
        raise refuse(func, args[0], "it would have to be redistributed", "take the view later")
    held = list(local_args)
    for path, source, target in plan.inputs:
        holder = kwargs if isinstance(path[0], str) else held
        for step in path[:-1]:
            holder = holder[step]
        holder[path[-1]] = redistribute_local(holder[path[-1]], source, target)
    if plan.keeps is not None:
        kwargs["keeper"] = operand(args, plan.keeps)
    return held


def _labelled(call: Callable[..., Any], text: str) -> Callable[..., Any]:
    """``call``, which may communicate, with the text of its operator, where none is that of a caller."""

    def labelled(*args: object, **kwargs: object) -> Any:
        if here.operator:
            return call(*args, **kwargs)
        here.operator = text
        try:
            return call(*args, **kwargs)
        finally:
            here.operator = ""

    return labelled


def _as_it_is(plan: AtenPlan, result: object, *_: object) -> object:
    return result


def _after_write(plan: AtenPlan, result: Any, func: OpOverload, args: Sequence[Any], *_: object) -> Any:
    _note_writes(args)
    return args[0] if plan.returns_self else result


def _new_tensors(copies: bool, plan: AtenPlan, result: Any, *call: Any) -> object:
    """New tensors. Where the plan's own call may have returned a part of an operand, that is copied."""
    out = _wrapped(result, plan.outputs, call[-1] if copies else ())
    if plan.opens and not tracing():
        leave_open(out)
    return out


def _views(
    noted: bool,
    plan: AtenPlan,
    result: Any,
    func: OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    _: object,
) -> object:
    """Views. Where they are ``noted``, something has to be known of all of them, see :func:`_as_views`."""
    out = _wrapped(result, plan.outputs)
    if noted or represents_view(args[0]) or is_open(args[0]):
        return _as_views(out, func, args, kwargs, plan)
    return out


def _wrapped(result: Any, specs: Any, operands: Sequence[Any] = ()) -> Any:
    """Local results as ShardTensors, in memory that none of the operands has."""
    if type(specs) is ShardTensorSpec:
        return wrap(apart(result, operands) if operands else result, specs)
    pairs = zip(result, specs, strict=True)
    return type(result)([r if s is None else wrap(apart(r, operands) if operands else r, s) for r, s in pairs])


def _written_one_by_one(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Before an in-place operator on lists: whether it has run on each item, as several have the same memory.

    A view that is a copy and what it is a view of may both be in the list: each item has to see what was written to
    those before it. Only some ranks may have a copy, so what is asked is what autograd knows of views on every rank.
    Open tensors are laid out.
    """
    tensors = args[0]
    with DisableTorchFunction():
        wholes = {id(t if t._base is None else t._base) for t in tensors}
    copied = any(isinstance(getattr(t, "_copied", ()), Moved) for t in tensors)  # some are no views to autograd
    one_by_one = len(tensors) > 1 and (copied or len(wholes) < len(tensors))
    if one_by_one:
        _check_written(func, args)
    for t, item in zip(tensors, items_of(args), strict=True):
        if one_by_one or is_open(t):
            if one_by_one:
                run(func, item, kwargs)
            else:
                fill(t)
                decide(func, item, kwargs)
    return one_by_one


def _check_written(func: OpOverload, args: Sequence[Any]) -> None:
    for written in args[0] if isinstance(args[0], (list, tuple)) else args[:1]:
        check_written(func, written)


def _note_writes(args: Sequence[Any]) -> None:
    """After an in-place operator: copies that it wrote to are written back, and tensors in lists get new versions."""
    is_list = isinstance(args[0], (list, tuple))
    for written in args[0] if is_list else args[:1]:
        note_write(written)
    if is_list:
        raise_versions(args[0])


def _planned(
    func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], key: PlanKey, tensors: Sequence[Tensor]
) -> AtenPlan | _Done:
    """The plan of a call, made and kept; or the call's result, where that came about meanwhile."""
    if is_inplace(func):
        _check_written(func, args)
    try:
        made = _make_plan(func, args, kwargs)
    except UnsupportedSharding:
        if not is_inplace(func) or not decide_anew(func, args, kwargs):
            raise
        made = _Done(run(func, args, kwargs))
    plan = made.plan if isinstance(made, _Done) else made
    if isinstance(plan, _Form):
        keep_plan(key, plan)
    if plan is None or isinstance(plan, _Form):
        return made
    _complete(plan, func, args, kwargs)
    mesh = next(t.device_mesh for t in tensors if isinstance(t, DTensor))
    plan.plain = PlainOperands.among(func.__name__, mesh, enumerate(tensors))
    keep_plan(key, plan)
    if not isinstance(made, _Done):
        return plan
    if plan.plain is not None:
        plan.plain.note(tensors)
    if is_inplace(func):
        _note_writes(args)
    elif returns_view(func):
        _as_views(made.value, func, args, kwargs, plan)
    return made


def _as_views(out: object, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], plan: AtenPlan) -> object:
    """Views of the first tensor, with a note of what has to be known when they or the tensor are written to."""
    viewed = args[0]
    if plan.moves or plan.may_copy or represents_view(viewed):
        how = Moved()
        if plan.moves or isinstance(getattr(viewed, "_copied", ()), Moved):
            again = None if isinstance(out, (list, tuple)) else lambda t: run(func, (t, *args[1:]), kwargs)
            how = Moved(_back_of(func, args), again)
        out = tree_map(lambda t: note_copies(t, viewed, moved=plan.moves, may_copy=plan.may_copy, how=how), out)
    note_views(out, viewed, func, args, kwargs)
    if is_open(viewed):
        note_open_views(out, viewed, lambda t: run(func, (t, *args[1:]), kwargs, moves=False))
    return out


def _back_of(func: OpOverload, args: Sequence[Any]) -> Back | None:
    """How what is written to a view that is a copy reaches the tensor: of reshapes, and of an entry of a dim."""
    if func in _REORDER_NOTHING:
        return lambda view, viewed: run(
            _aten.copy_.default, (viewed, run(_aten.view.default, (view, viewed.shape), {})), {}
        )
    if func is not _aten.select.int:
        return None
    _, dim, index = args

    def write_entry(view: Tensor, viewed: Tensor) -> None:
        place = run(_aten.slice.Tensor, (viewed, dim, index, index + 1 or None), {})
        run(_aten.copy_.default, (place, run(_aten.unsqueeze.default, (view, dim % viewed.ndim), {})), {})

    return write_entry


@dataclass(slots=True)
class _Form:
    """In place of a plan: the operator's form above autograd, which is called each time and has plans of its own."""

    handler: Handler
    plain: PlainOperands | None = None


@dataclass(slots=True)
class _Done:
    """A result that was computed while looking for a plan, and the plan for the next time, if there is one."""

    value: Any
    plan: AtenPlan | _Form | None = None


def _make_plan(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> AtenPlan | _Done:
    build = rule_of(func)
    above = None if build is not None or is_inplace(func) else function_of(func)
    if build is None and above is None:
        decomposed = func.decompose(*args, **kwargs)
        if decomposed is not NotImplemented:
            return _Done(decomposed)
    tensors = dict(distributed_operands(args, kwargs))
    specs = list(tensors.values())
    _check(func, specs)
    random = torch.Tag.nondeterministic_seeded in func.tags
    replicated = all(spec.is_replicate() for spec in specs)
    if (0,) in tensors and func is not _aten.copy_.default and disowns(build, func, tensors[0,]):
        build = None
    if build is None and not replicated and returning(func) is not None:
        return _Done(_written(func, args, kwargs))
    if replicated and not random and func not in RESHAPES:
        return _run_replicated(func, args, kwargs, specs[0].replicated())
    if above is not None:
        result = _as_above(above, func, args, kwargs)
        if result is not NotImplemented:
            return _Done(result, _Form(above))
    if build is None:
        # Without shards there are Partials: these may be reduced by any operator. But a view of that would be a copy.
        reduces = not any(spec.sharded_dims() for spec in specs) and not returns_view(func)
        if (gather_allowed() or reduces) and not random:
            return _Done(gathered(func, args, kwargs))
        unknown = RANDOM if random else (UNKNOWN, REMEDY)
        raise refuse(func, specs, *REFUSED.get(func.overloadpacket, unknown))
    try:
        with hidden_from_program():
            return planned_by(build, AtenCall.of(func, args, kwargs, tensors))
    except UnsupportedSharding:
        if not gather_allowed():
            raise
        return _Done(gathered(func, args, kwargs))


def _as_above(form: Handler, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What an operator returns by its form above autograd, or else by torch's decomposition, if by any."""
    try:
        with torch.no_grad(), above_autograd():
            result = form(*args, **kwargs)
    except UnsupportedSharding:
        if not gather_allowed():
            raise
        return NotImplemented
    return func.decompose(*args, **kwargs) if result is NotImplemented else result


def _check(func: OpOverload, specs: Sequence[ShardTensorSpec]) -> None:
    if any(spec.mesh != specs[0].mesh for spec in specs):
        raise different_meshes(func, specs)
    if torch.Tag.inplace_view in func.tags or any(a.is_out for a in func._schema.arguments):
        raise refuse(func, specs, "it would change the layout of a tensor in place", "use the out-of-place form")


def _run_replicated(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], base: ShardTensorSpec) -> _Done:
    """Everything is whole on every rank, so each computes for itself; the result tells its own shape."""
    whole_args, whole_kwargs = tree_map(
        lambda a: a._local_tensor if isinstance(a, DTensor) else a, (tuple(args), kwargs)
    )
    call = counting_writes(func) if func._schema.is_mutable or returns_view(func) else func
    if func in STRIDED:
        call = partial(_in_its_memory, call, args[0]._spec)
    result = call(*whole_args, **whole_kwargs)
    returns_self = is_inplace(func)

    def spec(value: object) -> Any:
        if isinstance(value, Tensor) and value.layout in _WITHOUT_STRIDES:
            raise refuse(func, base, f"a ShardTensor cannot have the layout {value.layout}", "call it on to_local()")
        return base.replace(meta=meta_of(value)) if isinstance(value, Tensor) else None

    def wrapped(value: object) -> object:
        return wrap(value, spec(value)) if isinstance(value, Tensor) else value

    value = args[0] if returns_self and result is not None else tree_map(wrapped, result)
    if torch.Tag.dynamic_output_shape in func.tags:
        return _Done(value)  # the shape may be another one next time
    outputs = [spec(r) for r in result] if isinstance(result, (list, tuple)) else spec(result)
    plan = AtenPlan(outputs, returns_self=returns_self and result is not None)
    return _Done(value, replace(plan, call=call) if func in STRIDED else plan)


def _in_its_memory(
    func: Callable[..., Any], spec: ShardTensorSpec, local: Tensor, *args: object, **kwargs: object
) -> Any:
    """An operator that takes elements of a whole tensor by their places in memory."""
    if local.stride() != spec.tensor_meta.stride:
        reason = f"the memory of the whole tensor has strides {local.stride()} instead of {spec.tensor_meta.stride}"
        raise refuse(func, spec, reason, "call it on contiguous(), with the strides of that")
    return func(local, *args, **kwargs)


def _written(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An in-place operator without a rule: what its other form returns, copied into the first argument."""
    with hidden_from_program():
        on_meta(func, *as_specs(args, kwargs))  # raises where the result's dtype does not fit
    new = returning(func)
    assert new is not None
    return run(_aten.copy_.default, (args[0], run(new, args, kwargs)), {})
