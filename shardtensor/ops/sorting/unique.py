"""Runs of equal elements: ``unique_consecutive``, ``unique``.

How long the results are depends on data, so there are no plans. The ranks tell each other how much each has, and these
are the shard sizes of the results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from ..._compat.c10d import group_along
from ...communication.halo import Fetch
from ...communication.redistribute import all_gather, redistribute_local
from ...dispatch.aten_calls import run
from ...dispatch.registry import DECLINED, register
from ...dispatch.tensor import ShardTensor, wrap
from ...errors import refuse
from ...layout.intervals import boundaries_of, chunk_sizes, intervals_of, resized
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ...ranks.cuda_graphs import check_has_values
from ..common.alignment import flattening, reduced_value
from ..common.distributed_sort import Route, Sorted, find_slices, sort_keys
from ..common.reduce import rank_reduction, reduced_dims

_aten = torch.ops.aten


def _line_spec(
    spec: ShardTensorSpec, mesh_dim: int | None, length: int, sizes: Sequence[int] | None, dtype: torch.dtype
) -> ShardTensorSpec:
    """The spec of a vector that is sharded on this mesh dim."""
    placements = [Shard(0) if m == mesh_dim else Replicate() for m in range(spec.mesh.ndim)]
    shard_sizes = {} if mesh_dim is None or sizes is None else {mesh_dim: sizes}
    return ShardTensorSpec.make(spec.mesh, placements, (length,), dtype, shard_sizes=shard_sizes)


def _begins(x: Tensor, spec: ShardTensorSpec, dim: int) -> Tensor:
    """For each own slice along ``dim`` whether it begins a run. A rank asks the one before for one slice."""
    m = spec.sharded_dims().get(dim)
    start, stop = spec.own_interval(dim)
    seen = x
    if m is not None:
        own = intervals_of(spec.sizes_along(m))
        need = [(max(0, a - 1), b) if b > a else (a, b) for a, b in own]
        seen = Fetch.of(spec, {dim: need}).read(x)[0]
    seen = seen.movedim(dim, 0).flatten(1) if x.ndim > 1 else seen.unsqueeze(1)
    begins = (seen[1:] != seen[:-1]).any(1)
    if start == 0 and stop:
        begins = torch.nn.functional.pad(begins, (1, 0), value=True)
    return rank_reduction(spec, [i for d, i in spec.sharded_dims().items() if d != dim])(begins, "max")


def _runs(x: Tensor, spec: ShardTensorSpec, dim: int) -> tuple[ShardTensor, ShardTensor, ShardTensor]:
    """The first slice of each run of equal slices along ``dim``, the runs that slices belong to, and their lengths.

    All ranks tell each other how many runs begin with them and where.
    """
    m, length = spec.sharded_dims().get(dim), spec.shape[dim]
    start, _ = spec.own_interval(dim)
    begins = _begins(x, spec, dim)
    at = begins.nonzero().squeeze(1)
    here, ranks = 0, [[len(at), start + int(at[0]) if len(at) else length]]
    if m is not None:
        mine = torch.tensor(ranks[0], device=x.device)
        here, ranks = spec.coordinate[m], all_gather(mine, group_along(spec.mesh, m)).tolist()
    counts = tuple(n for n, _ in ranks)
    following = next((first for n, first in ranks[here + 1 :] if n), length)
    total = sum(counts)
    values = x.index_select(dim, at)
    shape = [total if d == dim else n for d, n in enumerate(spec.shape)]
    sizes = {i: s for i, s in spec.shard_sizes.items() if i != m} | ({} if m is None else {m: counts})
    out = ShardTensorSpec.make(spec.mesh, spec.placements, shape, x.dtype, shard_sizes=sizes)
    inverse = begins.cumsum(0) + (sum(counts[:here]) - 1)
    lengths = torch.nn.functional.pad(at + start, (0, 1), value=following).diff()
    return (
        wrap(values, out),
        wrap(inverse, _line_spec(spec, m, length, None if m is None else spec.sizes_along(m), torch.int64)),
        wrap(lengths, _line_spec(spec, m, total, counts, torch.int64)),
    )


def _results(
    x: ShardTensor,
    values: ShardTensor,
    inverse: ShardTensor,
    counts: ShardTensor,
    return_inverse: bool,
    return_counts: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """What is not asked for is empty, as torch has it."""
    nothing = x._local_tensor.new_empty(0, dtype=torch.int64)
    return values, inverse if return_inverse else nothing, counts if return_counts else nothing.clone()


@register(_aten.unique_consecutive.default)
def _unique_consecutive(
    x: ShardTensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    if x._spec.is_replicate():
        return DECLINED
    check_has_values("unique_consecutive", x)
    local, spec = reduced_value(x)
    if dim is not None:
        results = _runs(local, spec, reduced_dims(dim, x.ndim)[0])
        return _results(x, *results, return_inverse, return_counts)
    whole = wrap(local, spec)
    with flattening("unique_consecutive", whole):
        flat = run(_aten.reshape.default, (whole, [-1]), {})
    values, inverse, counts = _runs(flat._local_tensor, flat._spec, 0)
    if return_inverse:
        inverse = run(_aten.view.default, (inverse, x.shape), {})
        back = inverse._spec.with_layout(spec.layout)
        inverse = wrap(redistribute_local(inverse._local_tensor, inverse._spec, back), back)
    return _results(x, values, inverse, counts, return_inverse, return_counts)


@register(_aten._unique2.default)
def _unique(
    x: ShardTensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Sorted across the ranks, then runs; which of them an element belongs to is sent back to where it came from."""
    if x._spec.is_replicate():
        return DECLINED
    check_has_values("unique", x)
    local, spec = reduced_value(x)
    if len(spec.sharded_dims()) > 1:
        raise refuse("unique", [spec], "it is sharded on several mesh dims", "shard it on one mesh dim only")
    if not spec.sharded_dims():
        args = (wrap(local, spec), sorted, return_inverse, return_counts)
        found: tuple[Tensor, Tensor, Tensor] = run(_aten._unique2.default, args, {})
        return found
    ((d, m),) = spec.sharded_dims().items()
    sizes = tuple(n * math.prod(resized(spec.shape, d, 1)) for n in spec.sizes_along(m))  # elements on each rank
    rows = Sorted(local.reshape(1, -1), sizes, sizes, False, group_along(spec.mesh, m))
    line = _line_spec(spec, m, spec.shape.numel(), sizes, x.dtype)
    values, inverse, counts = _runs(rows.values.flatten(), line, 0)
    if return_inverse:
        here = rows.back(inverse._local_tensor.view(1, -1)).view(spec.local_shape())
        inverse = wrap(here, spec.with_dtype(torch.int64))
    return _results(x, values, inverse, counts, return_inverse, return_counts)


def _slice_order(slices: Tensor) -> Tensor:
    """The positions of slices ``(slices, columns)`` in order."""
    places: Tensor = torch.unique(sort_keys(slices), dim=0, return_inverse=True)[1]
    return places.argsort(stable=True)


@register(_aten.unique_dim.default)
def _unique_slices(
    x: ShardTensor, dim: int, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Like :func:`_unique`, for slices along ``dim``, which have to be complete: that dim is the one to be sharded."""
    if x._spec.is_replicate():
        return DECLINED
    check_has_values("unique", x)
    local, spec = reduced_value(x)
    dim = reduced_dims(dim, x.ndim)[0]
    if spec.shape[dim] == 1 and spec.shape.numel():
        return _results(x, *_runs(local, spec, dim), return_inverse, return_counts)
    target = spec if spec.shape.numel() else spec.replicated()
    for d, m in target.sharded_dims().items():
        if d == dim:
            continue
        ranks = spec.mesh.size(m)
        if dim in target.sharded_dims() or spec.shape[dim] < ranks:
            reason = f"slices along dim {dim} would have to be complete, but dim {d} is sharded on mesh dim {m}"
            raise refuse("unique", [spec], reason, f"shard dim {dim} only")
        target = target.with_axes({m: AxisLayout(Shard(dim), chunk_sizes(spec.shape[dim], ranks))})
    local = redistribute_local(local, spec, target)
    if target.is_replicate():
        args = (wrap(local, target), dim, sorted, return_inverse, return_counts)
        found: tuple[Tensor, Tensor, Tensor] = run(_aten.unique_dim.default, args, {})
        return found
    m = target.sharded_dims()[dim]
    sizes, group = target.sizes_along(m), group_along(target.mesh, m)
    slices = local.movedim(dim, 0)
    flat = slices.reshape(len(slices), math.prod(slices.shape[1:]))
    order = _slice_order(flat)
    places = torch.tensor(boundaries_of(sizes)[1:-1], dtype=torch.int64, device=x.device)
    everybody = find_slices(sort_keys(flat[order]), x.dtype, places, group)
    route = Route(order.unsqueeze(0), everybody.unsqueeze(1), sizes, sizes, group)
    here = route.there(flat.unsqueeze(0)).squeeze(0)
    within = _slice_order(here)
    route.reorder(within.unsqueeze(0))
    values, inverse, counts = _runs(here[within].view(slices.shape).movedim(0, dim), target, dim)
    if return_inverse:
        inverse = wrap(route.back(inverse._local_tensor.unsqueeze(0)).squeeze(0), inverse._spec)
    return _results(x, values, inverse, counts, return_inverse, return_counts)
