"""Entries chosen by a sharded mask: ``x[mask]``, ``masked_select``, ``nonzero``, ``argwhere``, ``nonzero_static``.

How many there are depends on data. The ranks tell each other how many each has, and these are the shard sizes of the
result: the entries stay with their owners. For that every rank has to have an interval of the flattened mask; where
another dim than the first one is sharded, flattening it takes an exchange.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from ..._compat import TensorMeta
from ..._compat.c10d import group_along
from ...communication.redistribute import all_gather
from ...dispatch.aten_calls import run
from ...dispatch.planning import spec_of
from ...dispatch.registry import DECLINED, register
from ...dispatch.tensor import ShardTensor, from_part, redistribute_to, wrap
from ...errors import refuse
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ...layout.strides import contiguous_stride
from ...operators.arguments import common_mesh
from ...operators.declaration import Arguments, Composed, operator
from ...ranks.cuda_graphs import check_has_values
from ..common.alignment import (
    as_operand,
    broadcast_shape,
    flattening,
    is_sharded,
    redistributed,
    reduced_value,
)
from .index_operators import any_sharded, check_mask

_aten = torch.ops.aten


def _places(line: Tensor, spec: ShardTensorSpec, mesh_dim: int | None) -> tuple[Tensor, tuple[int, ...]]:
    """Where a rank's part of a line is not zero, and how often that of each rank along the mesh dim is not."""
    if mesh_dim is not None and line.device.type != "cpu":
        # The host reads what the ranks have told each other: it waits once for its device. CPUs take twice the time.
        counts = all_gather(line.count_nonzero(), group_along(spec.mesh, mesh_dim)).tolist()
        return line.nonzero_static(size=counts[spec.coordinate[mesh_dim]]).squeeze(1), tuple(counts)
    places = line.nonzero().squeeze(1)
    if mesh_dim is None:
        return places, (len(places),)
    mine = torch.tensor(len(places), device=line.device)
    return places, tuple(all_gather(mine, group_along(spec.mesh, mesh_dim)).tolist())


def _flattened(x: ShardTensor, start: int, n: int) -> ShardTensor:
    """``x`` with one dim in place of the ``n`` dims from ``start`` on."""
    if n == 1:
        return x
    with flattening("masked_select", x):
        return x.flatten(start, start + n - 1) if n else x.unsqueeze(start)  # type: ignore[return-value]


def _moved_along(x: ShardTensor, dim: int, mask: ShardTensorSpec) -> ShardTensor:
    """``x``, whose dim ``dim`` is that of the mask, sharded like the mask there."""
    m, own = mask.sharded_dims().get(0), x._spec.sharded_dims().get(dim)
    if own is not None and own != m:
        reason = f"its dim {dim} is sharded on mesh dim {own}, where the mask is replicated"
        raise refuse("masked_select", [x._spec, mask], reason, "shard it as the mask is, or along other dims")
    axes = {} if m is None else {m: AxisLayout(Shard(dim), mask.sizes[m])}
    return redistributed("masked_select", x, x._spec.with_axes(axes))


def selected(x: Tensor, dim: int, mask: Tensor) -> ShardTensor:
    """The entries of the dims of ``x`` from ``dim`` on where ``mask`` is true, as one dim in place of these.

    Differentiable in ``x``. The result's shard sizes along that dim are how many entries each rank's part of the mask
    selects; along other dims ``x`` stays sharded as it is.

    Raises:
        IndexError: the mask's shape differs.
        UnsupportedSharding: the mask cannot be flattened.
    """
    check_mask(x, dim, mask)
    check_has_values("masked_select", x)
    mesh = common_mesh("masked_select", [x, mask])
    assert mesh is not None
    x, mask = as_operand(x, mesh), as_operand(mask.bool(), mesh)
    n = mask.ndim
    mask = _flattened(mask, 0, n)
    x = _moved_along(_flattened(x, dim, n), dim, mask._spec)
    m = mask._spec.sharded_dims().get(0)
    places, counts = _places(mask._local_tensor, mask._spec, m)
    local = x.to_local().index_select(dim, places)
    shape = [*x.shape[:dim], sum(counts), *x.shape[dim + 1 :]]
    axes = {} if m is None else {m: AxisLayout(Shard(dim), counts)}
    meta = TensorMeta(torch.Size(shape), contiguous_stride(shape), x.dtype)
    layout = [axes.get(k, own) for k, own in enumerate(x._spec.layout)]
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
        if not is_sharded(where):
            spec, own = spec_of(x), as_operand(where, spec_of(x).mesh)
            where = redistribute_to(own, own._spec.with_layout(spec.for_gradient().layout))
        return selected(x, 0, where)

    return Composed(select)


# The shape of the result depends on data, so there is no plan.
@register(_aten.nonzero.default)
def _nonzero(x: ShardTensor) -> ShardTensor:
    """The places of elements that are not zero, each with its owner."""
    if not x._spec.sharded_dims():
        return DECLINED
    check_has_values("nonzero", x)
    x = wrap(*reduced_value(x))
    with flattening("nonzero", x):
        flat = run(_aten.reshape.default, (x, [-1]), {})
    m = flat._spec.sharded_dims().get(0)
    places, counts = _places(flat._local_tensor, flat._spec, m)
    start, _ = flat._spec.own_interval(0)
    placements = [Shard(0) if i == m else Replicate() for i in range(x.device_mesh.ndim)]
    sizes = {} if m is None else {m: counts}
    shape = (sum(counts), x.ndim)
    places = torch.stack(torch.unravel_index(places + start, x.shape), 1)
    return wrap(places, ShardTensorSpec.make(x.device_mesh, placements, shape, torch.int64, shard_sizes=sizes))


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
