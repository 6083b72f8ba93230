"""The operators by which torch_geometric finds neighbours and samples points: ``knn``, ``radius`` and ``fps``.

They are those of its libraries, ``torch.ops.pyg`` of pyg_lib and ``torch.ops.torch_cluster``, to which ``knn_graph``,
``radius_graph``, ``knn_interpolate`` and ``DynamicEdgeConv`` lead, and get their forms on shards when the library is
imported. Points come in clouds, one after the other, each of which sees itself only; ``ptr`` says where each begins,
and the last one ends.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import wrapt
from torch import Tensor

from .._compat import not_in_graphs
from .._compat.c10d import group_along
from ..communication.redistribute import all_gather
from ..dispatch.registry import register
from ..dispatch.tensor import ShardTensor, redistribute_to, wrap
from ..errors import refuse
from ..layout.intervals import boundaries_of, map_boundaries
from ..operators.arguments import common_mesh
from ..ops.common.alignment import as_operand, replicated
from ..ranks.cuda_graphs import check_has_values
from ..ranks.history import calling
from .bisection import squared_distances
from .nearest import OUTSIDE, knn, not_finite, radius, spec_like
from .search import NOBODY

_APART = 1e100  # its square is a number, too


def _in_clouds(x: Tensor, ptr: Tensor | None) -> Tensor:
    """Points ``(n, d)`` in float64, with a further coordinate for their clouds.

    By this coordinate clouds are farther apart than any points are. Within a cloud it adds a zero to squared distances,
    which changes none ([Note: exact distances] in bisection.py).
    """
    x = x.detach().double()
    if ptr is None:
        return x
    cloud = torch.bucketize(_numbers(x), ptr, right=True)
    return torch.cat([x, (cloud.double() * _APART).unsqueeze(1)], 1)


def _numbers(x: Tensor) -> Tensor:
    """The number of each row, where the row is."""
    if not isinstance(x, ShardTensor):
        return torch.arange(len(x), device=x.device)
    local = torch.arange(*x._spec.own_interval(0), device=x.device)
    return wrap(local, spec_like(x._spec, 0, x.shape[:1], None).with_dtype(local.dtype))


@not_in_graphs(OUTSIDE)
def _knn(
    x: Tensor,
    y: Tensor,
    ptr_x: Tensor | None = None,
    ptr_y: Tensor | None = None,
    k: int = 1,
    cosine: bool = False,
    num_workers: int = 1,
) -> Tensor:
    """The ``k`` nearest points of each query ``y``, or all of its cloud: queries and points ``(2, e)``, by distance."""
    if cosine:
        reason = "neighbours by the angle between points have no form on shards"
        raise refuse("knn", (x, y), reason, "divide the points by their lengths and leave cosine out")
    distances, indices = knn(_in_clouds(x, ptr_x), _in_clouds(y, ptr_y), min(k, x.shape[0]))
    own = distances < _APART
    return torch.stack([own.nonzero()[:, 0], indices[own]])


@not_in_graphs(OUTSIDE)
def _radius(
    x: Tensor,
    y: Tensor,
    ptr_x: Tensor | None = None,
    ptr_y: Tensor | None = None,
    r: float = 1.0,
    max_num_neighbors: int = 32,
    num_workers: int = 1,
    ignore_same_index: bool = False,
) -> Tensor:
    """The points that are nearer than ``r`` to each query ``y``, of its cloud: queries and points ``(2, e)``."""
    points, queries = _in_clouds(x, ptr_x), _in_clouds(y, ptr_y)
    within = math.nextafter(r, 0.0)
    edges = radius(points, queries, within, max_neighbors=max_num_neighbors, loops=not ignore_same_index)[1]
    return edges.flip(0)


@not_in_graphs(OUTSIDE)
def _fps(src: Tensor, ptr: Tensor, ratio: float | Tensor = 0.5, random_start: bool = True) -> ShardTensor:
    """Points of each cloud, one after the other the farthest from those before; sharded in proportion to all points.

    The first one is the cloud's first, or drawn by ``torch.rand``, as in the libraries' kernels on CUDA.
    """
    check_has_values("fps", src)
    mesh = common_mesh("fps", (src, ptr))
    assert mesh is not None
    with calling(f"fps(ratio={'...' if isinstance(ratio, Tensor) else ratio}, random_start={random_start})"):
        x, ends = as_operand(src.detach(), mesh), as_operand(ptr, mesh)
        begins = redistribute_to(ends, ends._spec.replicated())._local_tensor
        spec, counts = x._spec, begins.diff()
        where: list[int] = begins.tolist()
        m = spec.sharded_dims().get(0)
        if 1 in spec.sharded_dims():
            raise refuse("fps", (x,), "the coordinates of a point are on several ranks", "shard dim 0 instead")
        if where[-1] != x.shape[0]:
            raise ValueError(f"fps: clouds end at {where[-1]}, but there are {x.shape[0]} points")
        start, group = begins[:-1], None if m is None else group_along(mesh, m)
        if random_start:
            drawn: Any = torch.rand_like(replicated(counts.to(src.dtype), spec))
            start = start + (drawn._local_tensor * counts.float()).long()
        points = x._local_tensor.double()
        finite = points.isfinite().all()
        if not bool(finite if group is None else all_gather(finite.long(), group).all()):
            raise not_finite("fps", (x,))
        samples = (counts.float() * ratio).ceil().long()
        of_clouds: list[int] = samples.tolist()
        first, _ = spec.own_interval(0)
        chosen = _farthest(points, first, begins, start, max(of_clouds), group).mT
    result = chosen[torch.arange(chosen.shape[1], device=chosen.device) < samples.unsqueeze(1)]
    if m is None:
        return replicated(result, spec)
    before = boundaries_of(of_clouds)

    def boundary(i: int) -> int:
        cloud = bisect_right(where, i) - 1
        if cloud == len(of_clouds):
            return before[-1]
        return before[cloud] + (i - where[cloud]) * of_clouds[cloud] // (where[cloud + 1] - where[cloud])

    sizes = map_boundaries(spec.sizes_along(m), boundary)
    out = spec_like(spec, 0, (len(result),), sizes).with_dtype(result.dtype)
    return wrap(result[slice(*out.interval(m))].clone(), out)


def _farthest(
    points: Tensor, first: int, begins: Tensor, start: Tensor, steps: int, group: dist.ProcessGroup | None
) -> Tensor:
    """The numbers of the farthest points, ``(steps, clouds)``. Collective over the group, if there is one.

    Each step depends on the one before, in all clouds alike. Every rank proposes the farthest of its points for each
    cloud, in one all-gather, from which all ranks see which point it is and where it lies.

    Args:
        points: this rank's, float64, from number ``first``.
        start: the numbers of the first ones, ``(clouds,)``.
    """
    numbers = torch.arange(first, first + len(points), device=points.device)
    cloud = torch.bucketize(numbers, begins, right=True) - 1
    padded = torch.cat([points, points.new_zeros(1, points.shape[1])])
    score, nearest = (numbers == start[cloud]).double(), points.new_full((len(points),), torch.inf)
    chosen = []
    for _ in range(steps):
        best = points.new_full(start.shape, -1.0).scatter_reduce(0, cloud, score, "amax")
        farthest = torch.where(score == best[cloud], numbers, NOBODY)
        number = torch.full_like(start, NOBODY).scatter_reduce(0, cloud, farthest, "amin")
        place = torch.where(number == NOBODY, len(points), number - first)
        rows = torch.cat([best.unsqueeze(1), number.double().unsqueeze(1), padded[place]], 1)
        if group is not None:  # of equal ones the first, as ranks have their points in order
            proposed = all_gather(rows, group)
            rows = proposed[proposed[:, :, 0].argmax(0), torch.arange(len(rows), device=rows.device)]
        chosen.append(rows[:, 1])
        score = nearest = torch.minimum(nearest, squared_distances(points, rows[cloud, 2:]))
    return torch.stack(chosen).long()


def register_operators(namespace: str, library: object = None) -> None:
    """Give the operators of ``torch.ops.<namespace>`` these forms, as far as there are such operators."""
    for name, form in (("knn", _knn), ("radius", _radius), ("fps", _fps)):
        if hasattr(getattr(torch.ops, namespace), name):
            register(getattr(getattr(torch.ops, namespace), name))(form)


for _library, _namespace in (("pyg_lib", "pyg"), ("torch_cluster", "torch_cluster")):
    wrapt.register_post_import_hook(partial(register_operators, _namespace), _library)
