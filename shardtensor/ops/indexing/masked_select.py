"""Entries chosen by a sharded mask: ``x[mask]``, ``masked_select``, ``nonzero``, ``argwhere``, ``nonzero_static``.

How many there are depends on data. The ranks tell each other how many each has, and the result is cut so: the entries
stay with their owners. For that the mask has to be cut along its first dim, whose parts follow each other in the
result; where another dim is cut, one all-to-all shards the first one instead.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from ..._compat import TensorMeta
from ...errors import refuse
from ...redistribute import all_gather, redistribute_local
from ...registry import register
from ...spec import ShardTensorSpec
from ...strides import contiguous_stride
from ...tensor import from_part, redistribute_to, wrap
from ..common.alignment import as_operand, common_mesh, is_cut, leading, moved, whole_value

__all__ = ["check_mask", "selected"]

_aten = torch.ops.aten


def _counts(found: int, spec: ShardTensorSpec, mesh_dim: int | None, device: torch.device) -> tuple[int, ...]:
    """How many entries each rank along the mesh dim has found."""
    if mesh_dim is None:
        return (found,)
    return tuple(all_gather(torch.tensor(found, device=device), spec.mesh.get_group(mesh_dim)).tolist())


def _cut_of(spec: ShardTensorSpec) -> tuple[int, int] | None:
    """The one sharded dim of a mask that :func:`leading` has laid out, and the mesh dim that cuts it."""
    return next(iter(spec.sharded_dims().items()), None)


def _moved_along(x: Any, dim: int, mask: ShardTensorSpec) -> Any:
    """``x``, whose dims from ``dim`` on are those of the mask, cut like the mask there."""
    cut, n = _cut_of(mask), len(mask.shape)
    placements, sizes = list(x._spec.placements), list(x._spec.sizes)
    for d, m in x._spec.sharded_dims().items():
        if dim <= d < dim + n and (cut is None or m != cut[1]):
            reason = f"its dim {d} is sharded on mesh dim {m}, where the mask is whole"
            raise refuse("masked_select", [x._spec, mask], reason, "shard it as the mask is, or along other dims")
    if cut is not None:
        placements[cut[1]], sizes[cut[1]] = Shard(dim + cut[0]), mask.sizes[cut[1]]
    return moved("masked_select", x, x._spec.replace(placements=placements, sizes=tuple(sizes)))


def check_mask(x: Any, dim: int, mask: Any) -> None:
    """IndexError where the dims of ``x`` from ``dim`` on are not those of the mask."""
    if mask.shape != x.shape[dim : dim + mask.ndim]:
        raise IndexError(
            f"the mask of shape {tuple(mask.shape)} does not fit the dims {tuple(x.shape[dim : dim + mask.ndim])}"
        )


def selected(x: Any, dim: int, mask: Any) -> Any:
    """The entries of the dims of ``x`` from ``dim`` on where ``mask`` is true, as one dim in place of these.

    Differentiable in ``x``. The result is cut along that dim into as many entries as each rank's part of the mask
    selects; how ``x`` is cut along other dims stays.

    Raises:
        IndexError: the mask's shape differs.
        UnsupportedSharding: the mask cannot be cut along its first dim.
    """
    check_mask(x, dim, mask)
    mesh = common_mesh("masked_select", [x, mask])
    assert mesh is not None
    x, mask = as_operand(x, mesh), as_operand(mask.bool(), mesh)
    lead = leading("masked_select", mask._spec)
    x = _moved_along(x, dim, lead)
    here = redistribute_local(mask._local_tensor, mask._spec, lead)
    cut = _cut_of(lead)
    counts = _counts(int(here.sum()), lead, None if cut is None else cut[1], here.device)
    local = x.to_local()[(slice(None),) * dim + (here,)]
    shape = [*x.shape[:dim], sum(counts), *x.shape[dim + mask.ndim :]]
    placements, sizes = list(x._spec.placements), list(x._spec.sizes)
    for d, m in x._spec.sharded_dims().items():
        if d >= dim:
            inside = d < dim + mask.ndim
            placements[m] = Shard(dim if inside else d - mask.ndim + 1)
            sizes[m] = counts if inside else sizes[m]
    meta = TensorMeta(torch.Size(shape), contiguous_stride(shape), x.dtype)
    return from_part(local, x._spec.replace(placements=placements, sizes=tuple(sizes), meta=meta))


@register(torch.masked_select, Tensor.masked_select)
def _masked_select(input: Any, mask: Any) -> Any:
    if not is_cut(input, mask):
        return NotImplemented
    if mask.dtype != torch.bool:
        raise RuntimeError(f"masked_select: expected BoolTensor for mask, but got {mask.dtype}")
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    input, mask = input.expand(shape), mask.expand(shape)
    if not shape:
        input, mask = input.unsqueeze(0), mask.unsqueeze(0)
    if not is_cut(mask):
        mask = _cut_like(mask, input)
    return selected(input, 0, mask)


def _cut_like(mask: Any, x: Any) -> Any:
    """A mask that every rank has whole, cut as ``x`` is."""
    mask = as_operand(mask, x._spec.mesh)
    return redistribute_to(mask, x._spec.for_gradient().replace(meta=mask._spec.tensor_meta))


@register(_aten.nonzero.default)
def _nonzero(x: Any) -> Any:
    """The places of elements that are not zero, each with its owner."""
    if not x._spec.sharded_dims():
        return NotImplemented
    local, spec = whole_value(x)
    lead = leading("nonzero", spec)
    local = redistribute_local(local, spec, lead)
    places = local.nonzero()
    cut = _cut_of(lead)
    if cut is not None:
        places[:, cut[0]] += lead.interval(cut[1])[0]
    m = None if cut is None else cut[1]
    counts = _counts(len(places), lead, m, local.device)
    placements = [Shard(0) if i == m else Replicate() for i in range(spec.mesh.ndim)]
    cuts = {} if m is None else {m: counts}
    shape = (sum(counts), len(spec.shape))
    return wrap(places, ShardTensorSpec.make(spec.mesh, placements, shape, torch.int64, shard_sizes=cuts))


@register(torch.nonzero_static, Tensor.nonzero_static)
def _nonzero_static(input: Any, *, size: int, fill_value: int = -1, out: Any = None) -> Any:
    if out is not None or not is_cut(input):
        return NotImplemented
    if size < 0:
        raise RuntimeError("nonzero_static: 'size' must be an non-negative integer")
    places = torch.nonzero(input)[:size]
    return F.pad(places, (0, 0, 0, size - places.shape[0]), value=fill_value)
