"""``_foreach_*``: an operator on every tensor of a list, as optimizers use it.

[Note: item by item] Where the lists' tensors have the same layouts, the operator itself runs on the lists of shards.
Otherwise, with Partials or with plain tensors among them, each item is planned as the operator on that item alone
would be, and the plans run one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._compat import OpOverload
from ...dispatch.planning import AtenCall, AtenPlan, Path, Rule, meta_of, on_meta
from ...dispatch.registry import default_rule, rule_of
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec

_aten = torch.ops.aten

# The overload for one item, by that for lists: the first one that there is.
_OVERLOADS = {
    "List": ("Tensor",),
    "Tensor": ("Tensor",),
    "Scalar": ("Scalar", "Tensor"),
    "ScalarList": ("Scalar", "Tensor"),
    "default": ("default",),
}


@default_rule("elementwise")
def _default(op: OpOverload) -> Rule | None:
    name = op._schema.name.removeprefix("aten::")
    # These reduce each of their tensors.
    reduces = name.rstrip("_") in ("_foreach_norm", "_foreach_max", "_foreach_powsum")
    return _foreach if name.startswith("_foreach_") and not reduces else None


def _foreach(call: AtenCall) -> AtenPlan:
    """The plan for lists, see [Note: item by item]."""
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
        args = _item(call.args, i)
        tensors = {(path[0],): spec for path, spec in call.tensors.items() if path[1:] in ((), (i,))}
        if not tensors:  # plain tensors only
            plans.append(None)
            continue
        plan = build(AtenCall(op, args, call.kwargs, on_meta(op, args, call.kwargs), tensors))
        inputs += [((path[0], i), source, target) for path, source, target in plan.inputs]
        plans.append(plan)
    kernels = [op if plan is None else plan.call or op for plan in plans]

    def run(*args: Any, **kwargs: Any) -> list[Any] | None:
        found = [kernel(*_item(args, i), **kwargs) for i, kernel in enumerate(kernels)]
        return None if call.meta is None else found

    return AtenPlan(None if call.meta is None else [p if p is None else p.outputs for p in plans], inputs, call=run)


def _of_one(func: OpOverload) -> OpOverload | None:
    """The operator on one item of the lists."""
    packet = getattr(_aten, func._schema.name.removeprefix("aten::_foreach_"), None)
    names = _OVERLOADS.get(func._overloadname or "default", ())
    found = [getattr(packet, name) for name in names if packet is not None and hasattr(packet, name)]
    return next((op for op in found if str(op._schema.arguments[0].type) == "Tensor"), None)


def _item(args: Sequence[Any], i: int) -> tuple[Any, ...]:
    return tuple(a[i] if isinstance(a, (list, tuple)) else a for a in args)
