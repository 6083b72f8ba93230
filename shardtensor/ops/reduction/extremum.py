"""Extremes and their positions: ``max``, ``min``, ``amax``, ``amin``, ``aminmax``, ``argmax``, ``argmin``.

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
from .reductions import reduction_plan

_aten = torch.ops.aten


@operator(_aten.amax.default, _aten.amin.default)
def plan_amax(call: AtenCall) -> AtenPlan:
    op = "max" if call.func == _aten.amax.default else "min"
    return reduction_plan(call, argument(call, 1, "dim", ()), argument(call, 2, "keepdim", False), op)


@operator(_aten.max.default, _aten.min.default)
def plan_max_of_all(call: AtenCall) -> AtenPlan:
    return reduction_plan(call, None, False, "max" if call.func == _aten.max.default else "min")


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


@operator(_aten.argmax.default, _aten.argmin.default)
def plan_argmax(call: AtenCall) -> AtenPlan:
    spec = call.reduced()[(0,)]
    dim, keepdim = argument(call, 1, "dim", None), argument(call, 2, "keepdim", False)
    dims = reduced_dims(dim, len(spec.shape))
    out = reduced_spec(spec, call.meta, dims, keepdim, "sum").for_gradient()
    over = mesh_dims_of(spec, dims)
    if not over:
        return call.plan(out, {(0,): spec})
    check_dtype(call)
    op = "max" if call.func == _aten.argmax.default else "min"
    starts = [0] * len(spec.shape)
    for d, m in spec.sharded_dims().items():
        starts[d] = spec.interval(m)[0] if d in dims else 0
    strides = contiguous_stride(spec.shape)
    row = [1 if d in dims else n for d, n in enumerate(spec.local_shape())]
    shape, empty = out.local_shape(), any(spec.local_shape()[d] == 0 for d in dims)
    func = call.func

    def compute(x: Tensor, *_: object, **__: object) -> Tensor:
        if empty:
            value, index = _nothing(x, row, op)
        elif dim is None:
            index = func(x)
            value = x.reshape(-1)[index].reshape(row)
            places = torch.unravel_index(index, x.shape)
            index = sum(((i + a) * s for i, a, s in zip(places, starts, strides, strict=True)), 0 * index).reshape(row)
        else:
            index = func(x, dims[0], True)
            value = x.gather(dims[0], index)
            index = index + starts[dims[0]]
        return _agreed(value, index, spec, over, op)[1].reshape(shape)

    return call.plan(out, {(0,): spec}, call=compute)


@operator(_aten.max.dim, _aten.min.dim)
def plan_max_along(call: AtenCall) -> AtenPlan:
    spec = call.reduced()[(0,)]
    dims = reduced_dims(call.args[1], len(spec.shape))
    keepdim = argument(call, 2, "keepdim", False)
    outputs = [reduced_spec(spec, meta, dims, keepdim, "sum").for_gradient() for meta in call.meta]
    over = mesh_dims_of(spec, dims)
    if not over:
        return call.plan(outputs, {(0,): spec}, call=plain_tuple(call.func))
    check_dtype(call)
    op, dim, func = "max" if call.func == _aten.max.dim else "min", dims[0], call.func
    start, _ = spec.interval(over[0])
    row = [1 if d == dim else n for d, n in enumerate(spec.local_shape())]

    def compute(x: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        if x.shape[dim]:
            value, index = func(x, dim, True)
            index = index + start
        else:
            value, index = _nothing(x, row, op)
        value, index = _agreed(value, index, spec, over, op)
        return (value, index) if keepdim else (value.squeeze(dim), index.squeeze(dim))

    return call.plan(outputs, {(0,): spec}, call=compute)


@operator(_aten.aminmax.default)
def plan_aminmax(call: AtenCall) -> AtenPlan:
    """Two Partials, reduced when they are needed."""
    spec = call.reduced()[(0,)]
    dim, keepdim = call.kwargs.get("dim"), call.kwargs.get("keepdim", False)
    dims = reduced_dims(dim, len(spec.shape))
    outputs = [reduced_spec(spec, meta, dims, keepdim, op) for meta, op in zip(call.meta, ("min", "max"), strict=True)]
    check_dtype(call)
    empty, func = any(spec.local_shape()[d] == 0 for d in dims), call.func

    def compute(x: Tensor, **kwargs: object) -> tuple[Tensor, ...]:
        if not empty:
            return tuple(func(x, **kwargs))
        return tuple(_nothing(x, out.local_shape(), op)[0] for out, op in zip(outputs, ("min", "max"), strict=True))

    return call.plan(outputs, {(0,): spec}, call=compute)


def _declare(name: str) -> None:
    op = getattr(_aten, name).dim

    @operator(getattr(torch, name), getattr(Tensor, name), tensors="input")
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
        return plan_picking(name, op, input, dim, keepdim)


_declare("max")
_declare("min")
