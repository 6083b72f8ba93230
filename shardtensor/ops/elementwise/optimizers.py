"""What optimizers call: ``_foreach_*``, an operator on every tensor of a list, and fused steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..._compat import OpOverload, counting_writes
from ..._compat.c10d import group_along
from ...communication.redistribute import all_reduce
from ...dispatch.index_findings import raise_versions
from ...dispatch.planning import AtenCall, AtenPlan, Path, Rule, is_inplace, meta_of, on_meta, spec_of
from ...dispatch.registry import default_rule, register, rule_of
from ...errors import refuse
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ...layout.strides import with_stride

_aten = torch.ops.aten


@default_rule("elementwise")
def _default(op: OpOverload) -> Rule | None:
    name = op._schema.name.removeprefix("aten::")
    if name == "_foreach_max":  # it reduces each of its tensors
        return _item_by_item
    return _foreach if name.startswith("_foreach_") else None


def _foreach(call: AtenCall) -> AtenPlan:
    """If the lists' tensors have the same layouts, the operator itself runs on the lists of shards.

    Otherwise, also if Partials or plain tensors are among them, each item is planned as the operator on that item alone
    would be, and the plans run one after the other.
    """
    if not _alike(call):
        return _item_by_item(call)
    if call.meta is None:
        return AtenPlan(None)
    firsts = [call.tensors.get((0, i)) for i in range(len(call.meta))]
    return AtenPlan([s if s is None else s.replace(meta=meta_of(m)) for s, m in zip(firsts, call.meta, strict=True)])


def _alike(call: AtenCall) -> bool:
    """Whether each item's tensors have one layout, without Partials and without plain tensors."""
    layouts: dict[Any, tuple[AxisLayout, ...]] = {}
    for path, spec in call.tensors.items():
        if spec.partial_mesh_dims() or layouts.setdefault(path[-1], spec.layout) != spec.layout:
            return False
    lists = [a for a in call.args if isinstance(a, (list, tuple))]
    return not any(isinstance(t, Tensor) and t.ndim and i in layouts for a in lists for i, t in enumerate(a))


def _item_by_item(call: AtenCall) -> AtenPlan:
    op = _of_one(call.func)
    build = None if op is None else rule_of(op)
    if op is None or build is None:
        raise call.refuse("the lists' tensors have different layouts", "redistribute them, or loop over the lists")
    plans: list[AtenPlan | None] = []
    inputs: list[tuple[Path, ShardTensorSpec, ShardTensorSpec]] = []
    for i in range(len(call.args[0])):
        args, options = _item(op, call.args, i)
        tensors = {(path[0],): spec for path, spec in call.tensors.items() if path[1:] in ((), (i,))}
        writes_plain = is_inplace(call.func) and (0,) not in tensors
        if not tensors or (writes_plain and all(spec.is_replicate() for spec in tensors.values())):
            plans.append(None)  # of plain tensors, and of numbers that every rank has, such as a factor for all
            continue
        options |= call.kwargs
        plan = build(AtenCall(op, args, options, on_meta(op, args, options), tensors))
        inputs += [((path[0], i), source, target) for path, source, target in plan.inputs]
        plans.append(plan)
    kernels = [op if plan is None else plan.call or op for plan in plans]

    def run(*args: Any, **kwargs: Any) -> list[Any] | None:
        items = [_item(op, args, i) for i in range(len(kernels))]
        found = [kernel(*item, **rest, **kwargs) for kernel, (item, rest) in zip(kernels, items, strict=True)]
        return None if call.meta is None else found

    return AtenPlan(None if call.meta is None else [p if p is None else p.outputs for p in plans], inputs, call=run)


def _of_one(func: OpOverload) -> OpOverload | None:
    """The operator on one item of the lists: the overload that takes each list's items, and needs nothing else."""
    packet = getattr(_aten, func._schema.name.removeprefix("aten::_foreach_"), None)
    wanted = [str(a.type).removeprefix("List[").removesuffix("]") for a in func._schema.arguments]
    found = []
    for name in packet.overloads() if packet is not None else ():
        op = getattr(packet, name)
        own = op._schema.arguments
        if [str(a.type) for a in own[: len(wanted)]] == wanted and not any(a.is_out for a in own):
            found.append(op)
    return min(found, key=lambda op: len(op._schema.arguments), default=None)


def _item(op: OpOverload, args: Sequence[Any], i: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the operator on one item, which takes some of them by name."""
    own = [a[i] if isinstance(a, (list, tuple)) else a for a in args]
    arguments = op._schema.arguments
    n = sum(not a.kwarg_only for a in arguments)
    return tuple(own[:n]), dict(zip((a.name for a in arguments[n:]), own[n:]))


# -- fused optimizers --------------------------------------------------------------------------------------------------

# Fused optimizer steps, and what GradScaler asks of gradients.
#
# A step is elementwise: each rank runs torch's kernel on its shards. Only whether a gradient overflowed concerns all
# ranks: one all-reduce of a number per mesh dim that shards a gradient.
#
# torch's kernels go through the memory of a parameter, its gradient and its state side by side: where these differ in
# strides, those of CUDA raise, and those of the CPU go wrong. Autograd gives a gradient its parameter's strides on one
# device, but does not see those of shards.
#
# These operators have handlers, not plans: a model's parameters may be on several meshes, and a plan is made for one.
# A plan's key of hundreds of specs would save nothing next to the step.


def _local(t: Any) -> Any:
    """Local tensors in place of ShardTensors, also in lists."""
    if isinstance(t, (list, tuple)):
        return [_local(item) for item in t]
    return t._local_tensor if isinstance(t, DTensor) else t


def _register_step(op: OpOverload) -> None:
    @register(op)
    def step(*args: Any, **kwargs: Any) -> None:
        for i, parameter in enumerate(args[0]):
            _check_alike(op, parameter, [item[i] for item in args[1:] if isinstance(item, (list, tuple)) and item])
        on_shards(*map(_local, args), **{name: _local(value) for name, value in kwargs.items()})
        raise_versions(args[0])

    @counting_writes
    def on_shards(*args: Any, **kwargs: Any) -> None:
        local, copied = _in_one_order(list(args))
        op(*local, **kwargs)
        for t, copy in copied:
            t.copy_(copy)


def _in_one_order(args: list[Any]) -> tuple[list[Any], list[tuple[Tensor, Tensor]]]:
    """The lists with each parameter's tensors in the same strides, and those that were copied, with their copies."""
    copied: list[tuple[Tensor, Tensor]] = []

    def ordered(t: Tensor, parameter: Tensor, stride: tuple[int, ...]) -> Tensor:
        if t.shape != parameter.shape or all(a == b for a, b, n in zip(t.stride(), stride, t.shape) if n != 1):
            return t
        copied.append((t, with_stride(t, stride)))
        return copied[-1][1]

    # An empty tensor like it is dense, in the same order where the parameter is.
    strides = [p.stride() if p.is_contiguous() else torch.empty_like(p, device="meta").stride() for p in args[0]]
    lists = [
        [ordered(*item) for item in zip(a, args[0], strides, strict=True)] if isinstance(a, list) and a else a
        for a in args
    ]
    return lists, copied


def _check_alike(op: OpOverload, parameter: Tensor, others: Sequence[Any]) -> None:
    """UnsupportedSharding where a parameter's gradient or state has another layout; a count of steps may have one."""

    def layout(t: Tensor) -> tuple[AxisLayout, ...] | None:
        return spec_of(t).layout if isinstance(t, DTensor) else None

    partial = isinstance(parameter, DTensor) and spec_of(parameter).partial_mesh_dims()
    if partial or any(t.ndim and layout(t) != layout(parameter) for t in others if isinstance(t, Tensor)):
        reason = "a parameter and its gradient or state have different layouts"
        raise refuse(op, [parameter, *others], reason, "redistribute them, or use the optimizer with foreach=True")


def _register_copying_step(op: OpOverload, inplace: OpOverload) -> None:
    @register(op)
    def step(*args: Any, **kwargs: Any) -> tuple[list[Tensor], ...]:
        *written, steps = [[t.clone() for t in item] for item in args]
        inplace(*written, steps, **kwargs)
        return tuple(written)


for _name in ("_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad"):
    for _overload in ("default", "tensor_lr"):
        _packet = getattr(_aten, f"{_name}_")
        if _overload in _packet.overloads():
            _register_step(getattr(_packet, _overload))
            if "adam" in _name:
                _register_copying_step(getattr(getattr(_aten, _name), _overload), getattr(_packet, _overload))


@register(_aten._amp_foreach_non_finite_check_and_unscale_.default)
def _unscale(gradients: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Every rank learns whether any of them has found an infinite or undefined gradient."""
    specs = [spec_of(g) for g in gradients if isinstance(g, DTensor)]
    if any(spec.partial_mesh_dims() for spec in specs):
        raise refuse("_amp_foreach_non_finite_check_and_unscale_", specs, "a gradient is Partial", "redistribute it")
    found = _local(found_inf)
    _aten._amp_foreach_non_finite_check_and_unscale_.default(_local(gradients), found, _local(inv_scale))
    over = {(spec.mesh, m): group_along(spec.mesh, m) for spec in specs for m in spec.sharded_dims().values()}
    for group in over.values():
        found.copy_(all_reduce(found, group, "max"))
