"""Operators that work on the entries of some dims (batch, channels) independently and need the other dims unsharded:
``max_unpool``, ``fractional_max_pool``, ``grid_sample``, ``affine_grid``, ``ctc_loss``, recurrent networks.

[Note: named dims] Every dim of every operand either has a name or has to be unsharded. Dims of one name run together
and may be sharded: all operands that have it are sharded alike, those without it are replicated. A mesh dim shards a
name that all operands have which it finds sharded: one that is sharded already, or else the longest, by one exchange
in which every rank keeps as much as it had. Then the result, whose other dims have other lengths, stays spread over
that dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from ...arguments import common_mesh
from ...errors import refuse
from ...geometry import chunk_sizes
from ...layout import AxisLayout
from ...operators import Arguments, Composed, Plan
from ...spec import ShardTensorSpec
from ...tensor import ShardTensor, from_part, redistribute_to
from .alignment import as_operand, local_part

__all__ = ["Names", "Result", "by_batch", "image_names", "plan_by_batch"]

Names = Sequence[str | None]


class Result(NamedTuple):
    """One result of an operator: global shape, names of its dims, dtype; its strides where it is not row-major."""

    shape: Sequence[int]
    names: Names
    dtype: torch.dtype
    stride: Sequence[int] | None = None


class _Axis(NamedTuple):
    """Which named dim a mesh dim shards, and into what."""

    name: str | None
    sizes: tuple[int, ...] | None


def _axes(op: str, specs: Sequence[ShardTensorSpec], names: Sequence[Names]) -> list[_Axis]:
    """See [Note: named dims]."""
    mesh = specs[0].mesh
    lengths: dict[str | None, int] = {}
    for spec, row in zip(specs, names, strict=True):
        lengths.update(zip(row, spec.shape, strict=True))
    offered: list[list[_Axis]] = [[] for _ in range(mesh.ndim)]
    common: list[set[str | None]] = [set(lengths) - {None} for _ in range(mesh.ndim)]
    for spec, row in zip(specs, names, strict=True):
        for d, m in spec.sharded_dims().items():
            if row[d] is not None or spec.shape[d] > 1:
                offered[m].append(_Axis(row[d], spec.sizes[m]))
                common[m] &= set(row)
    axes: list[_Axis] = []
    for m in range(mesh.ndim):
        taken = {axis.name for axis in axes}
        others = taken | {axis.name for row in offered[m + 1 :] for axis in row}
        ready = [axis for axis in offered[m] if axis.name in common[m] - taken]
        if ready or not offered[m]:
            axes.append(ready[0] if ready else _Axis(None, None))
            continue
        free = sorted((name for name in common[m] - others if lengths[name] >= mesh.size(m)), key=str)
        if not free:
            raise _refusal(op, specs, m)
        name = max(free, key=lambda k: lengths[k])
        axes.append(_Axis(name, chunk_sizes(lengths[name], mesh.size(m))))
    return axes


def _refusal(op: str, specs: Sequence[ShardTensorSpec], mesh_dim: int) -> Exception:
    return refuse(
        op,
        list(specs),
        f"it needs a tensor dim unsharded that mesh dim {mesh_dim} shards, and no batch or channel dim is free and "
        f"long enough to be shared among its {specs[0].mesh.size(mesh_dim)} ranks",
        "redistribute to shard the batch, or to Replicate() what is small",
    )


def _laid_out(spec: ShardTensorSpec, names: Names, axes: Sequence[_Axis]) -> ShardTensorSpec:
    """The spec of a tensor whose dims have these names."""
    layout = [
        AxisLayout(Shard(list(names).index(axis.name)), axis.sizes)
        if axis.name is not None and axis.name in names
        else AxisLayout(Replicate())
        for axis in axes
    ]
    return spec.with_layout(layout)


def _outputs(mesh: DeviceMesh, results: Sequence[Result], axes: Sequence[_Axis]) -> list[ShardTensorSpec]:
    replicated = [Replicate()] * mesh.ndim
    return [
        _laid_out(ShardTensorSpec.make(mesh, replicated, r.shape, r.dtype, stride=r.stride), r.names, axes)
        for r in results
    ]


def _run(
    function: Callable[..., Any], tensors: Sequence[ShardTensor], outputs: Sequence[ShardTensorSpec], takes_empty: bool
) -> tuple[ShardTensor, ...]:
    """The results, from this rank's parts of ``tensors``, which are redistributed already."""
    local = [local_part(t, outputs[0]) for t in tensors]
    if not takes_empty and any(0 in spec.local_shape() for spec in outputs):
        # Not all of torch's kernels take empty dims, yet this rank takes part in the backward pass.
        nothing = reduce(torch.add, [t.sum() for t in local if t.is_floating_point()])
        found: Sequence[Tensor] = [nothing.expand(spec.local_shape()).to(spec.tensor_meta.dtype) for spec in outputs]
    else:
        result = function(*local)
        found = result if isinstance(result, (tuple, list)) else (result,)
    return tuple(from_part(t, spec.with_dtype(t.dtype)) for t, spec in zip(found, outputs, strict=True))


def plan_by_batch(
    call: Arguments,
    function: Callable[..., Any],
    operands: Mapping[str, Names],
    results: Sequence[Result],
    takes_empty: bool = False,
) -> Plan:
    """The plan that calls ``function`` on this rank's parts of the operands, see [Note: named dims].

    Args:
        operands: ``{argument: names of its dims}`` of all tensors, in the order of the declaration; a name of None is
            of a dim to be unsharded.
        takes_empty: ``function`` can be called with an empty dim.
    """
    axes = _axes(call.name, [call.tensors[name] for name in operands], list(operands.values()))
    for name, names in operands.items():
        call.redistribute(name, _laid_out(call.tensors[name], names, axes))
    outputs = _outputs(call.mesh, results, axes)

    def run(*tensors: ShardTensor) -> ShardTensor | tuple[ShardTensor, ...]:
        found = _run(function, tensors, outputs, takes_empty)
        return found[0] if len(found) == 1 else found

    return Composed(run)


def by_batch(
    op: str,
    function: Callable[..., Any],
    operands: Sequence[tuple[Tensor, Names]],
    results: Sequence[tuple[Sequence[int], Names]],
    takes_empty: bool = False,
) -> tuple[ShardTensor, ...]:
    """The results for operands that are at hand, at least one of them a ShardTensor; ``op`` is named in errors."""
    mesh = common_mesh(op, [t for t, _ in operands])
    assert mesh is not None
    tensors, names = [as_operand(t, mesh) for t, _ in operands], [row for _, row in operands]
    axes = _axes(op, [t._spec for t in tensors], names)
    outputs = _outputs(mesh, [Result(shape, row, tensors[0].dtype) for shape, row in results], axes)
    laid_out = [redistribute_to(t, _laid_out(t._spec, row, axes)) for t, row in zip(tensors, names, strict=True)]
    return _run(function, laid_out, outputs, takes_empty)


def image_names(ndim: int, spatial: int) -> list[str | None]:
    """Names of batch and channels, and the spatial dims behind them, which have to be unsharded."""
    names: list[str | None] = ["batch", "channels"]
    return names[2 + spatial - ndim :] + [None] * spatial
