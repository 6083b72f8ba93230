"""Diagonals and what has them: diagonal, diag_embed, diag and their gradients.

[Note: diagonals] An entry of a diagonal belongs to the rank that owns its row (or its column, if the columns are
sharded): the diagonal of a shard is the shard of the diagonal, and nothing travels. Where rows and columns are both
sharded, the diagonal is cut as the rows are, and is a sum over the mesh dim of the columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from ...geometry import intersect, map_cuts
from ...operators import operator
from ...planning import Call, Plan, argument, meta_of
from ...registry import register
from ...spec import ShardTensorSpec
from ...tensor import ShardTensor
from ..common.alignment import is_cut
from .slice import cut_of_slice, cut_of_sliced, remember, remembered
from .view import wrap_dim

__all__: list[str] = []

_aten = torch.ops.aten


def _starts(offset: int) -> tuple[int, int]:
    """Row and column of a diagonal's first entry."""
    return max(0, -offset), max(0, offset)


def _taken_from(spec: ShardTensorSpec, meta: Any, offset: int, dims: Sequence[int]) -> ShardTensorSpec:
    """How the diagonal of a tensor with ``spec`` lies."""
    last = len(meta.shape) - 1
    kept = [d for d in range(len(spec.shape)) if d not in dims]
    rows_sharded = dims[0] in spec.sharded_dims()
    placements: list[Any] = []
    sizes: list[Any] = []
    for m, p in enumerate(spec.placements):
        size = spec.sizes[m]
        if isinstance(p, Shard) and p.dim in dims:
            if p.dim == dims[1] and rows_sharded:
                p, size = Partial() if spec.mesh.size(m) > 1 else Replicate(), None
            else:
                start = _starts(offset)[dims.index(p.dim)]
                size = map_cuts(spec.cut(m), cut_of_slice(range(start, start + meta.shape[last])))
                p = Shard(last)
        elif isinstance(p, Shard):
            p = Shard(kept.index(p.dim))
        placements.append(p)
        sizes.append(size)
    return ShardTensorSpec(spec.mesh, placements, meta, tuple(sizes))


@operator(_aten.diagonal.default)
def _diagonal(call: Call) -> Plan:
    spec = call.specs[0]
    offset = argument(call, 1, "offset", 0)
    dims = [wrap_dim(argument(call, i, f"dim{i - 1}", i - 2), len(spec.shape)) for i in (2, 3)]
    sharded = spec.sharded_dims()
    if any(d in sharded for d in dims):
        remember(("diagonal", offset, *dims), spec)
    out = _taken_from(spec, meta_of(call.meta), offset, dims)
    a, b = ((0, spec.shape[d]) if d not in sharded else spec.interval(sharded[d]) for d in dims)
    local_offset = offset + a[0] - b[0]
    if not all(d in sharded for d in dims):
        return Plan(out, call=lambda x, *_, **__: x.diagonal(local_offset, *dims))
    # Of the entries in this rank's rows, those in its columns.
    first = out.interval(sharded[dims[0]])[0]
    row, column = _starts(offset)
    start, stop = intersect((a[0] - row, a[1] - row), (b[0] - column, b[1] - column))
    shape = out.local_shape()

    def compute(x: Tensor, *_: Any, **__: Any) -> Tensor:
        entries = x.new_zeros(shape)
        if stop > max(start, 0):
            found = x.diagonal(local_offset, *dims)
            entries.narrow(-1, max(start, 0) - first, found.shape[-1]).copy_(found)
        return entries

    return Plan(out, [((0,), spec, spec)], call=compute)  # with an input that moves: it is a copy


def _embedded(call: Call, grad: ShardTensorSpec, offset: int, dims: Sequence[int]) -> Plan:
    """Zeros of the result's shape with ``grad`` on a diagonal."""
    shape, last = call.meta.shape, len(grad.shape) - 1
    kept = [d for d in range(len(shape)) if d not in dims]
    for source in remembered(("diagonal", offset, *dims), grad, shape):
        made = _taken_from(source.for_gradient(), grad.tensor_meta, offset, dims)
        if made.placements == grad.placements and made.sizes == grad.sizes:
            out = source.for_gradient().replace(meta=meta_of(call.meta))
            break
    else:
        placements: list[Any] = []
        sizes: list[Any] = []
        start = _starts(offset)[0]
        for m, p in enumerate(grad.placements):
            size = grad.sizes[m]
            if p == Shard(last):
                taken = range(start, start + grad.shape[last])
                p, size = Shard(dims[0]), cut_of_sliced(taken, shape[dims[0]], grad.cut(m))
            elif isinstance(p, Shard):
                p = Shard(kept[p.dim])
            placements.append(p)
            sizes.append(size)
        out = ShardTensorSpec(grad.mesh, placements, meta_of(call.meta), tuple(sizes))
    sharded = out.sharded_dims()
    a, b = (0 if d not in sharded else out.interval(sharded[d])[0] for d in dims)
    local = out.local_shape()

    def compute(g: Tensor, *_: Any, **__: Any) -> Tensor:
        result = g.new_zeros(local)
        result.diagonal(offset + a - b, *dims).copy_(g)
        return result

    return call.plan(out, {(0,): grad}, call=compute)


@operator(_aten.diagonal_backward.default)
def _diagonal_backward(call: Call) -> Plan:
    offset, *dims = call.args[2:]
    n = call.meta.ndim
    return _embedded(call, call.reduced()[(0,)], offset, [wrap_dim(d, n) for d in dims])


@operator(_aten.diag_embed.default)
def _diag_embed(call: Call) -> Plan:
    n = call.meta.ndim
    dims = [wrap_dim(argument(call, i, f"dim{i - 1}", i - 4), n) for i in (2, 3)]
    return _embedded(call, call.specs[0], argument(call, 1, "offset", 0), dims)


@register(torch.block_diag)
def _block_diag(*tensors: Any) -> Any:
    if not any(isinstance(t, ShardTensor) for t in tensors) or any(t.ndim > 2 for t in tensors):
        return NotImplemented
    blocks = [t.reshape(1, -1) if t.ndim < 2 else t for t in tensors]
    before, after = 0, sum(block.shape[1] for block in blocks)
    rows = []
    dtype = torch.empty(0, dtype=blocks[0].dtype)
    for block in blocks[1:]:
        dtype = torch.cat([dtype, torch.empty(0, dtype=block.dtype)])
    for block in blocks:
        after -= block.shape[1]
        rows.append(torch.nn.functional.pad(block.to(dtype.dtype), (before, after)))
        before += block.shape[1]
    return torch.cat(rows)


@operator(_aten.tril.default, _aten.triu.default, _aten.tril_.default, _aten.triu_.default)
def _triangle(call: Call) -> Plan:
    """A shard sees the diagonal from where it lies."""
    spec, func = call.specs[0], call.func
    diagonal = call.args[1] if len(call.args) > 1 else call.kwargs.get("diagonal", 0)
    sharded = spec.sharded_dims()
    row, column = (
        spec.interval(sharded[d])[0] if d in sharded else 0 for d in (len(spec.shape) - 2, len(spec.shape) - 1)
    )
    out = spec.replace(meta=meta_of(call.meta))
    inplace = func in (_aten.tril_.default, _aten.triu_.default)
    return Plan(out, call=lambda x, *_, **__: func(x, diagonal + row - column), returns_self=inplace)


@register(Tensor.fill_diagonal_)
def _fill_diagonal(self: Any, fill_value: Any, wrap: bool = False) -> Any:
    if not isinstance(self, ShardTensor) or not is_cut(self):
        return NotImplemented
    torch.empty(self.shape, dtype=self.dtype, device="meta").fill_diagonal_(fill_value, wrap)  # torch's own errors
    rows, columns = self.shape[0], self.shape[-1]
    if self.ndim == 2:
        place = torch.arange(0, rows * columns if wrap else min(rows, columns) * columns, columns + 1)
        places = [place // max(1, columns), place % max(1, columns)]
    else:
        places = [torch.arange(rows)] * self.ndim
    value = torch.tensor(fill_value, dtype=self.dtype, device=self.device)
    return _aten.index_put_.default(self, [place.to(self.device) for place in places], value)
