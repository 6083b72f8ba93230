"""Diagonals and what has them: diagonal, diag_embed, diag and their gradients.

An entry of a diagonal belongs to the rank that owns its row (or its column, if the columns are sharded). So the
diagonal of a shard is the shard of the diagonal, and nothing is sent. If rows and columns are both sharded, the
diagonal is sharded as the rows are, and is a sum over the mesh dim of the columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from ..._compat import TensorMeta
from ...dispatch.planning import AtenCall, AtenPlan, argument, is_inplace, meta_of
from ...dispatch.registry import DECLINED
from ...layout.intervals import intersect, map_boundaries
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Composed, operator
from .slice import boundary_of_slice, record_source, sizes_before_slice, source_of
from .view import wrap_dim

_aten = torch.ops.aten


def _starts(offset: int) -> tuple[int, int]:
    """Row and column of a diagonal's first entry."""
    return max(0, -offset), max(0, offset)


def _taken_from(spec: ShardTensorSpec, meta: TensorMeta, offset: int, dims: Sequence[int]) -> ShardTensorSpec:
    """The spec of the diagonal of a tensor with ``spec``."""
    last = len(meta.shape) - 1
    kept = [d for d in range(len(spec.shape)) if d not in dims]
    sharded = spec.sharded_dims()
    axes: dict[int, AxisLayout] = {}
    for d, m in sharded.items():
        if d not in dims:
            axes[m] = AxisLayout(Shard(kept.index(d)), spec.sizes_along(m))
        elif d == dims[1] and dims[0] in sharded:
            axes[m] = AxisLayout(Partial() if spec.mesh.size(m) > 1 else Replicate())
        else:
            start = _starts(offset)[dims.index(d)]
            taken = range(start, start + meta.shape[last])
            axes[m] = AxisLayout(Shard(last), map_boundaries(spec.sizes_along(m), boundary_of_slice(taken)))
    return spec.with_layout([axes.get(m, own) for m, own in enumerate(spec.layout)], meta)


@operator(_aten.diagonal.default)
def _diagonal(call: AtenCall) -> AtenPlan:
    spec = call.specs[0]
    offset = argument(call, 1, "offset", 0)
    dims = [wrap_dim(argument(call, i, f"dim{i - 1}", i - 2), len(spec.shape)) for i in (2, 3)]
    sharded = spec.sharded_dims()
    out = _taken_from(spec, meta_of(call.meta), offset, dims)
    if any(d in sharded for d in dims):
        part = _taken_from(spec.for_gradient(), out.tensor_meta, offset, dims)
        record_source(("diagonal", offset, *dims), spec, part)
    a, b = (spec.own_interval(d) for d in dims)
    local_offset = offset + a[0] - b[0]
    if not all(d in sharded for d in dims):
        return AtenPlan(out, call=lambda x, *_, **__: x.diagonal(local_offset, *dims))
    # Of the entries in this rank's rows, those in its columns.
    first = out.interval(sharded[dims[0]])[0]
    row, column = _starts(offset)
    start, stop = intersect((a[0] - row, a[1] - row), (b[0] - column, b[1] - column))
    shape = out.local_shape()

    def compute(x: Tensor, *_: int, **__: int) -> Tensor:
        entries = x.new_zeros(shape)
        if stop > max(start, 0):
            found = x.diagonal(local_offset, *dims)
            entries.narrow(-1, max(start, 0) - first, found.shape[-1]).copy_(found)
        return entries

    return AtenPlan(out, call=compute, call_moves=True)


@operator(_aten.diagonal_backward.default, _aten.diag_embed.default)
def _embedded(call: AtenCall) -> AtenPlan:
    """Zeros of the result's shape with the tensor on a diagonal."""
    if call.func == _aten.diag_embed.default:
        grad, offset = call.specs[0], argument(call, 1, "offset", 0)
        given = [argument(call, i, f"dim{i - 1}", i - 4) for i in (2, 3)]
    else:
        grad = call.reduced()[(0,)]
        offset, *given = call.args[2:]
    shape, last = call.meta.shape, len(grad.shape) - 1
    dims = [wrap_dim(d, len(shape)) for d in given]
    source = source_of(("diagonal", offset, *dims), shape, grad)
    out = None if source is None else source.for_gradient().replace(meta=meta_of(call.meta))
    if out is None or not _taken_from(out, grad.tensor_meta, offset, dims).lies_like(grad):
        kept = [d for d in range(len(shape)) if d not in dims]
        start = _starts(offset)[0]
        taken = range(start, start + grad.shape[last])
        axes = {
            m: AxisLayout(Shard(dims[0]), sizes_before_slice(taken, shape[dims[0]], grad.sizes_along(m)))
            if d == last
            else AxisLayout(Shard(kept[d]), grad.sizes_along(m))
            for d, m in grad.sharded_dims().items()
        }
        out = grad.with_layout([axes.get(m, own) for m, own in enumerate(grad.layout)], meta_of(call.meta))
    (a, _), (b, _) = (out.own_interval(d) for d in dims)
    local = out.local_shape()

    def compute(g: Tensor, *_: int, **__: int) -> Tensor:
        result = g.new_zeros(local)
        result.diagonal(offset + a - b, *dims).copy_(g)
        return result

    return call.plan(out, {(0,): grad}, call=compute)


@operator(torch.block_diag, tensors="tensors", partial="tensors")
def _block_diag(call: Arguments, *tensors: ShardTensorSpec) -> Composed:
    shapes = [t.shape for t in tensors]
    if any(len(shape) > 2 for shape in shapes):
        return DECLINED
    dtype = call.returned(torch.block_diag, *tensors).dtype
    widths = [shape[-1] if shape else 1 for shape in shapes]

    def join(blocks: Sequence[Tensor]) -> Tensor:
        rows, before = [], 0
        for block, width in zip(blocks, widths, strict=True):
            block = block.reshape(1, -1) if block.ndim < 2 else block
            rows.append(torch.nn.functional.pad(block.to(dtype), (before, sum(widths) - before - width)))
            before += width
        return torch.cat(rows)

    return Composed(join)


@operator(_aten.tril.default, _aten.triu.default, _aten.tril_.default, _aten.triu_.default)
def _triangle(call: AtenCall) -> AtenPlan:
    """A shard's diagonal is that of the global tensor, counted from where the shard begins."""
    spec, func = call.specs[0], call.func
    (row, _), (column, _) = (spec.own_interval(d) for d in (len(spec.shape) - 2, len(spec.shape) - 1))
    diagonal = argument(call, 1, "diagonal", 0) + row - column
    out = spec.replace(meta=meta_of(call.meta))
    return AtenPlan(out, call=lambda x, *_, **__: func(x, diagonal), returns_self=is_inplace(func))


@operator(Tensor.fill_diagonal_, tensors="input", partial="input")
def _fill_diagonal(call: Arguments, input: ShardTensorSpec, fill_value: complex, wrap: bool = False) -> Composed:
    """An assignment to indices. Of a replicated tensor torch's own operator does."""
    if input.is_replicate():
        return DECLINED
    call.returned(Tensor.fill_diagonal_, input, fill_value, wrap)
    shape, (rows, columns) = input.shape, (input.shape[0], input.shape[-1])

    def fill(x: Tensor) -> Tensor:
        if len(shape) == 2:
            stop = rows * columns if wrap else min(rows, columns) * columns
            place = torch.arange(0, stop, columns + 1, device=x.device)
            places = [place // max(1, columns), place % max(1, columns)]
        else:
            places = [torch.arange(rows, device=x.device)] * len(shape)
        value = torch.full((), fill_value, dtype=x.dtype, device=x.device)
        if input.partial_mesh_dims():  # see [Note: written to a Partial] in pointwise.py
            return x.copy_(_aten.index_put.default(x, places, value))
        filled: Tensor = _aten.index_put_.default(x, places, value)
        return filled

    return Composed(fill)
