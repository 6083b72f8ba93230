"""Extremes along a dim, and positions: ``max``, ``min``, ``aminmax``, ``argmax``, ``argmin``. Others are reductions.

[Note: positions] Indices are global. Among equal values the first one wins, as it does on one device: the ranks agree
on the extreme by one all-reduce, and on the smallest index that holds it by another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..._compat.c10d import group_along
from ...communication.redistribute import all_reduce
from ...dispatch.planning import AtenCall, AtenPlan, argument
from ...dispatch.registry import DECLINED
from ...layout.spec import ShardTensorSpec
from ...layout.strides import contiguous_stride
from ...operators.declaration import Arguments, Composed, Operand, operator
from ..common.pick import plain_tuple, plan_picking
from ..common.reduce import check_dtype, mesh_dims_of, neutral_element, reduced_dims, reduced_spec

_aten = torch.ops.aten


_NOWHERE = torch.iinfo(torch.int64).max


def _agreed(value: Tensor, index: Tensor, spec: ShardTensorSpec, over: Sequence[int], op: str) -> tuple[Tensor, Tensor]:
    """The extreme over ranks along the mesh dims ``over``, and the smallest index where it is."""
    for m in over:
        group = group_along(spec.mesh, m)
        best = all_reduce(value, group, op)
        index = torch.where((value == best) | (value != value), index, _NOWHERE)
        index = all_reduce(index, group, "min")
        value = best
    return value, index


def _nothing(x: Tensor, shape: Sequence[int], op: str) -> tuple[Tensor, Tensor]:
    """What an empty shard contributes."""
    value = x.new_full(shape, neutral_element(op, x.dtype))
    return value, torch.full(shape, _NOWHERE, dtype=torch.int64, device=x.device)


@operator(_aten.argmax.default, _aten.argmin.default, _aten.max.dim, _aten.min.dim)
def plan_position(call: AtenCall) -> AtenPlan:
    """The position of an extreme, of all elements or along a dim; of ``max`` and ``min`` with the extreme itself."""
    func, position_only = call.func, isinstance(call.meta, Tensor)
    spec = call.reduced()[(0,)]
    dim, keepdim = argument(call, 1, "dim", None), argument(call, 2, "keepdim", False)
    dims = reduced_dims(dim, len(spec.shape))
    metas = [call.meta] if position_only else call.meta
    outputs = [reduced_spec(spec, meta, dims, keepdim, "sum").for_gradient() for meta in metas]
    returned, over = outputs[0] if position_only else outputs, mesh_dims_of(spec, dims)
    if not over:
        return call.plan(returned, {(0,): spec}, call=None if position_only else plain_tuple(func))
    check_dtype(call)
    op = "max" if func in (_aten.argmax.default, _aten.max.dim) else "min"
    along = getattr(_aten, op).dim
    starts = [0] * len(spec.shape)
    for d, m in spec.sharded_dims().items():
        starts[d] = spec.interval(m)[0] if d in dims else 0
    strides = contiguous_stride(spec.shape)
    row = [1 if d in dims else n for d, n in enumerate(spec.local_shape())]
    shape, empty = outputs[0].local_shape(), any(spec.local_shape()[d] == 0 for d in dims)

    def compute(x: Tensor, *_: object, **__: object) -> Tensor | tuple[Tensor, Tensor]:
        if empty:
            value, index = _nothing(x, row, op)
        elif dim is None:
            index = func(x)
            value = x.reshape(-1)[index].reshape(row)
            places = torch.unravel_index(index, x.shape)
            index = sum(((i + a) * s for i, a, s in zip(places, starts, strides, strict=True)), 0 * index).reshape(row)
        else:
            value, index = along(x, dims[0], True)
            index = index + starts[dims[0]]
        value, index = _agreed(value, index, spec, over, op)
        return index.reshape(shape) if position_only else (value.reshape(shape), index.reshape(shape))

    return call.plan(returned, {(0,): spec}, call=compute)


@operator(_aten.aminmax.default)
def plan_aminmax(call: AtenCall) -> AtenPlan:
    """Two Partials, reduced when they are needed."""
    spec = call.reduced()[(0,)]
    dims, keepdim = reduced_dims(call.kwargs.get("dim"), len(spec.shape)), call.kwargs.get("keepdim", False)
    outputs = [reduced_spec(spec, meta, dims, keepdim, op) for meta, op in zip(call.meta, ("min", "max"), strict=True)]
    check_dtype(call)
    empty, func = any(spec.local_shape()[d] == 0 for d in dims), call.func

    def compute(x: Tensor, **kwargs: object) -> tuple[Tensor, ...]:
        if not empty:
            return tuple(func(x, **kwargs))
        return tuple(_nothing(x, out.local_shape(), op)[0] for out, op in zip(outputs, ("min", "max"), strict=True))

    return call.plan(outputs, {(0,): spec}, call=compute)


@operator(torch.max, Tensor.max, torch.min, Tensor.min, tensors="input")
def plan_extremum(
    call: Arguments,
    input: ShardTensorSpec,
    dim: int | Operand | None = None,
    keepdim: bool = False,
    *,
    other: Operand | None = None,
) -> Composed:
    """Along a dim. Of all elements, and of two tensors, the aten operators have plans."""
    if not isinstance(dim, int) or other is not None:
        return DECLINED
    return plan_picking(call.name, getattr(_aten, call.name).dim, input, dim, keepdim)
