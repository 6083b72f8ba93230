"""Entries chosen by a sharded mask: ``x[mask]``, ``masked_select``, ``nonzero``, ``argwhere``, ``nonzero_static``.

How many there are depends on data. The ranks tell each other how many each has, and these are the shard sizes of the
result: the entries stay with their owners. For that the mask has to be sharded along its first dim, whose parts follow
each other in the result; where another dim is sharded, one all-to-all shards the first one instead.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from ..._compat import TensorMeta
from ..._compat.c10d import group_along
from ...errors import refuse
from ...layout import AxisLayout
from ...operators import Arguments, Composed, operator
from ...planning import spec_of
from ...redistribute import all_gather, redistribute_local
from ...registry import DECLINED, register
from ...spec import ShardTensorSpec
from ...strides import contiguous_stride
from ...tensor import ShardTensor, from_part, redistribute_to, wrap
from ..common.alignment import (
    as_operand,
    broadcast_shape,
    common_mesh,
    is_sharded,
    leading,
    redistributed,
    reduced_value,
)
from .gather import any_sharded
from .index_operators import check_mask

__all__ = ["selected"]

_aten = torch.ops.aten


def _counts(found: int, spec: ShardTensorSpec, mesh_dim: int | None, device: torch.device) -> tuple[int, ...]:
    """How many entries each rank along the mesh dim has found."""
    if mesh_dim is None:
        return (found,)
    return tuple(all_gather(torch.tensor(found, device=device), group_along(spec.mesh, mesh_dim)).tolist())


def _sharded_dim(spec: ShardTensorSpec) -> tuple[int, int] | None:
    """The one sharded dim of a mask that :func:`leading` has laid out, and the mesh dim that shards it."""
    return next(iter(spec.sharded_dims().items()), None)


def _moved_along(x: ShardTensor, dim: int, mask: ShardTensorSpec) -> ShardTensor:
    """``x``, whose dims from ``dim`` on are those of the mask, sharded like the mask there."""
    along, n = _sharded_dim(mask), len(mask.shape)
    for d, m in x._spec.sharded_dims().items():
        if dim <= d < dim + n and (along is None or m != along[1]):
            reason = f"its dim {d} is sharded on mesh dim {m}, where the mask is replicated"
            raise refuse("masked_select", [x._spec, mask], reason, "shard it as the mask is, or along other dims")
    if along is None:
        return redistributed("masked_select", x, x._spec)
    axis = AxisLayout(Shard(dim + along[0]), mask.sizes[along[1]])
    return redistributed("masked_select", x, x._spec.with_axes({along[1]: axis}))


def selected(x: Tensor, dim: int, mask: Tensor) -> ShardTensor:
    """The entries of the dims of ``x`` from ``dim`` on where ``mask`` is true, as one dim in place of these.

    Differentiable in ``x``. The result's shard sizes along that dim are how many entries each rank's part of the mask
    selects; along other dims ``x`` stays sharded as it is.

    Raises:
        IndexError: the mask's shape differs.
        UnsupportedSharding: the mask cannot be sharded along its first dim.
    """
    check_mask(x, dim, mask)
    mesh = common_mesh("masked_select", [x, mask])
    assert mesh is not None
    x, mask = as_operand(x, mesh), as_operand(mask.bool(), mesh)
    lead = leading("masked_select", mask._spec)
    x = _moved_along(x, dim, lead)
    here = redistribute_local(mask._local_tensor, mask._spec, lead)
    along = _sharded_dim(lead)
    counts = _counts(int(here.sum()), lead, None if along is None else along[1], here.device)
    local = x.to_local()[(slice(None),) * dim + (here,)]
    shape = [*x.shape[:dim], sum(counts), *x.shape[dim + mask.ndim :]]
    axes = {}
    for d, m in x._spec.sharded_dims().items():
        if dim <= d < dim + mask.ndim:
            axes[m] = AxisLayout(Shard(dim), counts)
        elif d >= dim:
            axes[m] = AxisLayout(Shard(d - mask.ndim + 1), x._spec.sizes[m])
    meta = TensorMeta(torch.Size(shape), contiguous_stride(shape), x.dtype)
    layout = [axes.get(m, own) for m, own in enumerate(x._spec.layout)]
    return from_part(local, x._spec.with_layout(layout, meta))


@operator(torch.masked_select, Tensor.masked_select, tensors="input mask", partial="input mask")
def _masked_select(call: Arguments, input: ShardTensorSpec, mask: ShardTensorSpec) -> Composed:
    if not any_sharded(input, mask):
        return DECLINED
    dtype = mask.tensor_meta.dtype
    if dtype != torch.bool:
        raise RuntimeError(f"masked_select: expected BoolTensor for mask, but got {dtype}")
    shape = broadcast_shape(input.shape, mask.shape)

    def select(x: Tensor, where: Tensor) -> ShardTensor:
        x, where = x.expand(shape), where.expand(shape)
        if not shape:
            x, where = x.unsqueeze(0), where.unsqueeze(0)
        return selected(x, 0, where if is_sharded(where) else _laid_out_like(where, x))

    return Composed(select)


def _laid_out_like(mask: Tensor, x: Tensor) -> ShardTensor:
    """A replicated mask, sharded as ``x`` is."""
    spec = spec_of(x)
    mask = as_operand(mask, spec.mesh)
    return redistribute_to(mask, spec.for_gradient().replace(meta=mask._spec.tensor_meta))


# The shape of the result depends on data, so there is no plan.
@register(_aten.nonzero.default)
def _nonzero(x: ShardTensor) -> ShardTensor:
    """The places of elements that are not zero, each with its owner."""
    if not x._spec.sharded_dims():
        return DECLINED
    local, spec = reduced_value(x)
    lead = leading("nonzero", spec)
    local = redistribute_local(local, spec, lead)
    places = local.nonzero()
    along = _sharded_dim(lead)
    if along is not None:
        places[:, along[0]] += lead.interval(along[1])[0]
    m = None if along is None else along[1]
    counts = _counts(len(places), lead, m, local.device)
    placements = [Shard(0) if i == m else Replicate() for i in range(spec.mesh.ndim)]
    sizes = {} if m is None else {m: counts}
    shape = (sum(counts), len(spec.shape))
    return wrap(places, ShardTensorSpec.make(spec.mesh, placements, shape, torch.int64, shard_sizes=sizes))


@operator(torch.nonzero_static, Tensor.nonzero_static, tensors="input", partial="input")
def _nonzero_static(call: Arguments, input: ShardTensorSpec, *, size: int, fill_value: int = -1) -> Composed:
    if not input.sharded_dims():
        return DECLINED
    if size < 0:
        raise RuntimeError("nonzero_static: 'size' must be an non-negative integer")

    def nonzero(x: ShardTensor) -> Tensor:
        places = torch.nonzero(x)[:size]
        return F.pad(places, (0, 0, 0, size - places.shape[0]), value=fill_value)

    return Composed(nonzero)
