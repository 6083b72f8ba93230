"""Operators without a rule of ours, by the sharding strategy that a user has given DTensor for them.

A strategy says which placements of operands give which placements of results when each rank calls the operator on its
part. It knows nothing of shard sizes. The sizes of the results come from running the operator on meta tensors of the
shape that every rank has, and must add up to the global result. torch's strategies for its own operators are not asked,
see docs/design.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from .._compat import DTensorSpec, OpOverload, TensorMeta, acceptable_placements, strategies
from ..context import gather_allowed
from ..layout.intervals import chunk_sizes
from ..layout.placements import AxisLayout, normalize_placements
from ..layout.spec import ShardTensorSpec
from .planning import AtenCall, AtenPlan, Outputs, Path, Rule, meta_of, on_meta, operands, replicated_spec
from .registry import default_rule

Placements = tuple[Placement, ...]

TORCHS_STRATEGIES = "torch.distributed.tensor._ops"


@default_rule("strategy")
def _by_strategy(op: OpOverload) -> Rule | None:
    """Not for random operators: the numbers of shards would not match one device."""
    strategy = strategies().get(op)
    if strategy is None or torch.Tag.nondeterministic_seeded in op.tags:
        return None
    function = getattr(strategy, "func", strategy)  # of a partial, as register_sharding makes them
    of_torch = op.namespace in ("aten", "prims") and function.__module__.startswith(TORCHS_STRATEGIES)
    return None if of_torch else fall_back


def fall_back(call: AtenCall) -> AtenPlan:
    """The rule of operators that fall back on a sharding strategy."""
    if any(a.alias_info is not None for a in (*call.func._schema.arguments, *call.func._schema.returns)):
        raise call.refuse("operators with a strategy may not write to operands or return views", "return new tensors")
    mesh = call.specs[0].mesh
    found = operands(call.args, call.kwargs, (ShardTensorSpec, Tensor))
    # Plain tensors are replicated.
    specs = {path: replicated_spec(mesh, meta_of(t)) if isinstance(t, Tensor) else t for path, t in found}
    inputs, outputs = _cheapest(call, specs)
    targets = _aligned(specs, inputs)
    plan = call.plan(_results(call, targets, outputs), {path: targets[path] for path in call.tensors})
    plan.inputs += [(p, specs[p], targets[p]) for p in specs if p not in call.tensors and targets[p].sharded_dims()]
    return plan


def _filled(call: AtenCall, values: Mapping[Path, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments with these in place of the tensors."""

    def filled(name: int | str, value: object) -> object:
        if isinstance(value, (list, tuple)):
            return type(value)(values.get((name, i), item) for i, item in enumerate(value))
        return values.get((name,), value)

    return tuple(filled(i, a) for i, a in enumerate(call.args)), {k: filled(k, a) for k, a in call.kwargs.items()}


# -- placements -------------------------------------------------------------------------------------------------------


def _cheapest(call: AtenCall, operands: Mapping[Path, ShardTensorSpec]) -> tuple[list[Placements], list[Any]]:
    """Placements of operands that none has to be gathered for, and those of the results."""
    plain = {p: DTensorSpec(spec.mesh, spec.placements, spec.tensor_meta) for p, spec in operands.items()}
    specs, metas = list(operands.values()), _metas(call.meta)
    found = []
    try:
        accepted = acceptable_placements(call.func, *_filled(call, plain))
    except RuntimeError as error:  # torch 2.15, where nothing is acceptable
        raise call.refuse(f"its sharding strategy raises: {error}", "correct it for these operands") from error
    for inputs, outputs, cost in accepted:
        several = outputs and not isinstance(outputs[0], Placement)
        outputs = list(outputs) if several else [outputs] * len(metas)
        placed = _normalized(inputs, [spec.tensor_meta for spec in specs], call)
        results = _normalized(outputs, metas, call)
        if placed is not None and results is not None and all(map(_reachable, specs, placed)):
            moved = sum(spec.placements != places for spec, places in zip(specs, placed, strict=True))
            found.append((cost, moved, placed, results))
    if not found:
        raise call.refuse(
            "its sharding strategy lists no placements that the operands can take without a gather",
            "redistribute them yourself, or call inside shardtensor.allow_gather()",
        )
    _, _, placed, results = min(found, key=lambda one: one[:2])
    return placed, results


def _normalized(placements: Sequence[Any], metas: Sequence[TensorMeta | None], call: AtenCall) -> list[Any] | None:
    """Placements of tensors as a spec has them; None where there are others, such as strided shards."""
    if len(placements) != len(metas) or any((p is None) != (m is None) for p, m in zip(placements, metas, strict=True)):
        return None
    mesh = call.specs[0].mesh
    try:
        return [p and normalize_placements(p, mesh, len(m.shape)) for p, m in zip(placements, metas) if m is not None]
    except (TypeError, ValueError):
        return None


def _reachable(spec: ShardTensorSpec, placements: Placements) -> bool:
    """Whether a tensor gets these placements without being gathered, or made Partial."""
    if any(isinstance(new, Partial) and old != new for old, new in zip(spec.placements, placements, strict=True)):
        return False
    return gather_allowed() or spec.gathered_for(placements) is None


# -- sizes ------------------------------------------------------------------------------------------------------------


def _aligned(operands: Mapping[Path, ShardTensorSpec], inputs: Sequence[Placements]) -> dict[Path, ShardTensorSpec]:
    """The operands with these placements. On a mesh dim, equal lengths are sharded alike, different ones evenly."""
    targets = dict(operands)
    for m in range(len(inputs[0])):
        placed = dict(zip(operands, [places[m] for places in inputs], strict=True))
        lengths = {p: operands[p].shape[new.dim] for p, new in placed.items() if isinstance(new, Shard)}
        there = [p for p in lengths if operands[p].placements[m] == placed[p]]
        largest = max(there, key=lambda p: operands[p].tensor_meta.shape.numel(), default=None)
        kept = operands[largest].sizes_along(m) if largest is not None and len(set(lengths.values())) == 1 else None
        for path, new in placed.items():
            sizes = (kept or chunk_sizes(lengths[path], operands[path].mesh.size(m))) if path in lengths else None
            targets[path] = targets[path].with_axes({m: AxisLayout(new, sizes)})
    return targets


def _results(call: AtenCall, targets: Mapping[Path, ShardTensorSpec], outputs: Sequence[Any]) -> Outputs:
    """The specs of the results, with the sizes that the operator gives on every rank."""
    mesh = call.specs[0].mesh
    known: dict[Any, list[TensorMeta | None]] = {}
    everywhere: dict[tuple[int, ...], list[TensorMeta | None]] = {}
    for at in product(*map(range, mesh.shape)):
        shapes = tuple(spec.local_shape(at) for spec in targets.values())
        if shapes not in known:
            local = {
                path: torch.empty(shape, dtype=spec.tensor_meta.dtype, device="meta")
                for (path, spec), shape in zip(targets.items(), shapes, strict=True)
            }
            try:
                known[shapes] = _metas(on_meta(call.func, *_filled(call, local)))
            except Exception as error:
                raise call.refuse(
                    f"on a rank whose operands have the shapes {', '.join(map(str, shapes))} it would raise: {error}",
                    "redistribute the operands, e.g. to shards without empty ones",
                ) from error
        everywhere[at] = known[shapes]
    specs = [
        None if meta is None else _result(call, meta, places, {at: metas[i] for at, metas in everywhere.items()})
        for i, (meta, places) in enumerate(zip(_metas(call.meta), outputs, strict=True))
    ]
    return specs if isinstance(call.meta, (list, tuple)) else specs[0]


def _result(
    call: AtenCall, meta: TensorMeta, placements: Placements, local: Mapping[tuple[int, ...], TensorMeta | None]
) -> ShardTensorSpec:
    """The spec of one result, whose local ones have these shapes at each coordinate of the mesh."""
    mesh = call.specs[0].mesh
    shapes = {at: tuple(one.shape) for at, one in local.items() if one is not None and one.dtype == meta.dtype}
    if len(shapes) == len(local) and all(len(shape) == len(meta.shape) for shape in shapes.values()):
        sizes: list[tuple[int, ...] | None] = [None] * mesh.ndim
        for m, p in enumerate(placements):
            if isinstance(p, Shard):
                line = [(0,) * m + (r,) + (0,) * (mesh.ndim - m - 1) for r in range(mesh.size(m))]
                sizes[m] = tuple(shapes[at][p.dim] for at in line)
        spec = ShardTensorSpec.of(mesh, placements, meta, tuple(sizes))
        complete = all(sum(spec.sizes_along(m)) == meta.shape[d] for d, m in spec.sharded_dims().items())
        if complete and all(shape == spec.local_shape(at) for at, shape in shapes.items()):
            return spec
    shown = ", ".join(dict.fromkeys(str(tuple(one.shape)) if one is not None else "none" for one in local.values()))
    raise call.refuse(
        f"its sharding strategy says {placements}, but local results {shown} do not add up to {tuple(meta.shape)}",
        "correct the strategy for these sizes, or redistribute the operands",
    )


def _metas(result: object) -> list[TensorMeta | None]:
    """What is known of an operator's results; None for what is no tensor."""
    results = result if isinstance(result, (list, tuple)) else [result]
    return [meta_of(one) if isinstance(one, Tensor) else None for one in results]
