"""``knn`` and ``radius``: the neighbours of points, on plain tensors and on ShardTensors.

Which points are neighbours is found without gradients. Where distances need gradients they are computed again from the
points that were found, which are read by index as in any program, so that their gradient is a scatter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from .._compat import TensorMeta, not_in_graphs
from .._compat.c10d import group_along
from ..communication.redistribute import all_gather
from ..dispatch.registry import register
from ..dispatch.tensor import ShardTensor, from_part, redistribute_to, wrap
from ..errors import refuse
from ..layout.placements import AxisLayout
from ..layout.spec import ShardTensorSpec
from ..layout.strides import contiguous_stride
from ..operators.arguments import common_mesh
from ..ops.common.alignment import as_operand
from ..ranks.cuda_graphs import check_has_values
from ..ranks.history import calling
from .bisection import even_sizes, squared_distances
from .search import Nearest, Within
from .traffic import search_all

OUTSIDE = "neighbours are found outside of compiled functions; pass them in"


@not_in_graphs(OUTSIDE)
def knn(points: Tensor, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Find the ``k`` nearest points of each query.

    The results for plain tensors and ShardTensors are the same. Points may be sharded along dim 0 in any sizes. A rank
    receives only the points of other ranks that may be among the nearest of its queries. Equally near points are
    ordered by index. Distances are Euclidean, computed in float64 and rounded once. They are differentiable any number
    of times with respect to points and queries. At a distance of 0 the derivative is 0.

    Args:
        points: ``(n, d)``, floating-point.
        queries: ``(m, d)``, of the same dtype. If this is ``points``, each point is its own nearest.
        k: between 1 and ``n``.

    Returns:
        distances ``(m, k)``, ascending, of the points' dtype, and indices ``(m, k)``, int64, sharded like the queries.

    Raises:
        ValueError: shapes that do not fit, ``k`` out of range, or infinite or NaN coordinates; on all ranks.
        TypeError: tensors that are not floating-point, or of two dtypes; a ``k`` that is not an integer.
        UnsupportedSharding: coordinates of a point on several ranks; points and queries sharded on two mesh dims.

    Example:
        >>> import torch
        >>> distances, indices = knn(torch.tensor([[0.0], [4.0], [1.0]]), torch.tensor([[1.5]]), k=2)
        >>> distances.tolist(), indices.tolist()
        ([[0.5, 1.5]], [[2, 0]])

    On CPUs, SciPy's ``cKDTree`` searches if SciPy is installed (``pip install shardtensor[neighbors]``).
    """
    _check("knn", points, queries)
    _check_k(k, points)
    if _is_dispatched(points, queries):
        return _dispatched(knn, points, queries, k)
    search = Nearest(queries.detach().double(), k)
    _search("knn", search, points, queries)
    distances = _distances(points, queries.unsqueeze(1), search.numbers, search.squares)
    return distances, search.numbers


@not_in_graphs(OUTSIDE)
def radius(
    points: Tensor, queries: Tensor, r: float, *, max_neighbors: int | None = None, loops: bool = True
) -> tuple[Tensor, Tensor]:
    """Find all points within a distance of each query, as the edges of a graph.

    Sharding is as in :func:`knn`. A point is a neighbour if its distance is at most ``r`` in float64.

    Args:
        points: ``(n, d)``, floating-point.
        queries: ``(m, d)``, of the same dtype. If this is ``points``, each point is a neighbour of itself.
        r: a finite number, at least 0.
        max_neighbors: the largest number of neighbours of a query; the nearest are kept. Default: all.
        loops: whether a query may be a neighbour of the point with the same index.

    Returns:
        distances ``(e,)`` of the points' dtype, and edges ``(2, e)``, int64: points in the first row and queries in the
        second, as in ``edge_index`` of PyTorch Geometric. Edges are sorted by query, distance and point. If the queries
        are sharded, each edge is on the rank of its query; the shard sizes depend on data.

    Raises:
        ValueError, TypeError, UnsupportedSharding: as :func:`knn`; an ``r`` or a ``max_neighbors`` out of range.

    Example:
        >>> import torch
        >>> distances, edges = radius(torch.tensor([[0.0], [4.0], [1.0]]), torch.tensor([[1.5], [3.5]]), r=1.5)
        >>> edges.tolist()
        [[2, 0, 1], [0, 0, 1]]
    """
    _check("radius", points, queries)
    _check_r(r, max_neighbors)
    if _is_dispatched(points, queries):
        return _dispatched(radius, points, queries, r, max_neighbors=max_neighbors, loops=loops)
    own = None if loops else torch.arange(len(queries), device=queries.device)
    search = Within(queries.detach().double(), float(r), max_neighbors, own)
    _search("radius", search, points, queries)
    rows, numbers, squares = search.found()
    needed = _needs_gradient(points, queries)
    return _distances(points, queries[rows] if needed else queries, numbers, squares), torch.stack([numbers, rows])


def _is_dispatched(*operands: Tensor) -> bool:
    # torch's own DTensors do not say so themselves.
    return torch.overrides.has_torch_function(operands) or any(isinstance(t, DTensor) for t in operands)


def _dispatched(
    function: Callable[..., Any], points: Tensor, queries: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """What the function of ShardTensors returns, which DTensors are made."""
    points, queries = (ShardTensor.from_dtensor(t) if isinstance(t, DTensor) else t for t in (points, queries))
    found: tuple[Tensor, Tensor] = torch.overrides.handle_torch_function(
        function, (points, queries), points, queries, *args, **kwargs
    )
    return found


# -- what is refused --------------------------------------------------------------------------------------------------
# From shapes, dtypes and numbers, which all ranks have alike.


def _check(name: str, points: Tensor, queries: Tensor) -> None:
    shapes = f"points of shape {tuple(points.shape)} and queries of shape {tuple(queries.shape)}"
    if points.ndim != 2 or queries.ndim != 2 or points.shape[1] != queries.shape[1] or not points.shape[1]:
        raise ValueError(f"{name}: {shapes}; it takes points (n, d) and queries (m, d) of the same d, at least 1")
    if not points.is_floating_point() or points.dtype != queries.dtype:
        raise TypeError(
            f"{name}: points of {points.dtype} and queries of {queries.dtype}; both must have the same floating-point "
            "dtype, convert them by .to(dtype)"
        )


def _check_k(k: int, points: Tensor) -> None:
    if not isinstance(k, int) or isinstance(k, bool):
        raise TypeError(f"knn: k must be an integer, not {k!r}")
    if not 1 <= k <= points.shape[0]:
        raise ValueError(f"knn: k is {k}, but must be between 1 and the number of points, {points.shape[0]}")


def _check_r(r: float, most: int | None) -> None:
    if not isinstance(r, Real) or isinstance(r, bool):
        raise TypeError(f"radius: r must be a number, not {r!r}")
    if not 0 <= r < math.inf:
        raise ValueError(f"radius: r is {r}, but must be finite and at least 0")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool)):
        raise TypeError(f"radius: max_neighbors must be an integer or None, not {most!r}")
    if most is not None and most < 1:
        raise ValueError(f"radius: max_neighbors is {most}, but must be at least 1, or None for all")


def not_finite(name: str, operands: Sequence[Tensor]) -> ValueError:
    shown = ", ".join(str(t._spec) if isinstance(t, ShardTensor) else str(tuple(t.shape)) for t in operands)
    return ValueError(
        f"{name}: coordinates of points or queries are not finite (NaN or infinite). "
        f"Operands: {shown}. Remedy: remove these points, or replace their coordinates (torch.nan_to_num)."
    )


# -- points and distances ---------------------------------------------------------------------------------------------


def _search(name: str, search: Nearest | Within, points: Tensor, queries: Tensor) -> None:
    """Collective over the mesh dim on which points or queries are sharded, if one is."""
    of_points, of_queries = (t._spec if isinstance(t, ShardTensor) else None for t in (points, queries))
    local = points._local_tensor.detach() if isinstance(points, ShardTensor) else points.detach()
    if of_points is not None and 0 in of_points.sharded_dims():
        m = of_points.sharded_dims()[0]
        finite = search_all(search, local, of_points.sizes_along(m), group_along(of_points.mesh, m))
    else:
        coordinates = local.double()
        here = coordinates.isfinite().all() & search.queries.isfinite().all()
        if of_queries is not None and 0 in of_queries.sharded_dims():
            here = all_gather(here.long(), group_along(of_queries.mesh, of_queries.sharded_dims()[0])).all()
        finite = bool(here)
        if finite:
            search.add(coordinates, torch.arange(len(local), device=local.device))
    if not finite:
        raise not_finite(name, (points, queries))


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _distances(points: Tensor, queries: Tensor, numbers: Tensor, squares: Tensor) -> Tensor:
    """Distances of the points with these numbers from queries that broadcast against them."""
    if not _needs_gradient(points, queries):
        return squares.sqrt().to(points.dtype)
    return _distance(points[numbers], queries)


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Differentiable; at 0 every derivative is 0."""
    squares = squared_distances(a.double(), b.double())
    nothing = squares == 0
    return squares.masked_fill(nothing, 1.0).sqrt().masked_fill(nothing, 0.0).to(a.dtype)


# -- on ShardTensors --------------------------------------------------------------------------------------------------


@register(knn)
def _knn(points: Tensor, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    with calling(f"knn(k={k})"):
        points, queries, given = _operands("knn", points, queries)
        search = Nearest(queries._local_tensor.detach().double(), k)
        _search("knn", search, points, queries)
        spec = spec_like(queries._spec, 0, (queries.shape[0], k), None)
        indices = wrap(search.numbers, spec.with_dtype(torch.int64))
        distances = _sharded_distances(points, queries, indices, search.squares, (slice(None), None))
        return _laid_out_as(given, distances), _laid_out_as(given, indices)


@register(radius)
def _radius(
    points: Tensor, queries: Tensor, r: float, *, max_neighbors: int | None = None, loops: bool = True
) -> tuple[Tensor, Tensor]:
    with calling(f"radius(r={r}, max_neighbors={max_neighbors}, loops={loops})"):
        points, queries, given = _operands("radius", points, queries)
        m, local = queries._spec.sharded_dims().get(0), queries._local_tensor.detach().double()
        first, _ = queries._spec.own_interval(0)
        own = None if loops else torch.arange(first, first + len(local), device=local.device)
        search = Within(local, float(r), max_neighbors, own)
        _search("radius", search, points, queries)
        rows, numbers, squares = search.found()
        counts: tuple[int, ...] = (len(rows),)
        if m is not None:
            mine = torch.tensor(len(rows), device=rows.device)
            counts = tuple(all_gather(mine, group_along(points.device_mesh, m)).tolist())
        spec = spec_like(queries._spec, 0, (sum(counts),), counts)
        distances = _sharded_distances(points, queries, wrap(numbers, spec.with_dtype(torch.int64)), squares, rows)
        of_edges = spec_like(spec, 1, (2, *spec.shape), counts).with_dtype(torch.int64)
        edges = wrap(torch.stack([numbers, rows + first]), of_edges)
        return _laid_out_as(given, distances), _laid_out_as(given, edges)


def _operands(name: str, points: Tensor, queries: Tensor) -> tuple[ShardTensor, ShardTensor, ShardTensorSpec]:
    """Points and queries as ShardTensors that the ranks search together, and the queries' spec as it was given.

    Where the points are sharded and the queries replicated, each rank has a part of the queries.
    """
    check_has_values(name, points)
    mesh = common_mesh(name, (points, queries))
    assert mesh is not None
    points, queries = as_operand(points, mesh), as_operand(queries, mesh)
    given = queries._spec
    specs = [points._spec, given]
    for spec in specs:
        if 1 in spec.sharded_dims():
            raise refuse(
                name, specs, "the coordinates of a point are on several ranks (dim 1 is sharded)", "shard dim 0 instead"
            )
    m, of_queries = (spec.sharded_dims().get(0) for spec in specs)
    if m is not None and of_queries not in (None, m):
        raise refuse(
            name,
            specs,
            f"points are sharded on mesh dim {m}, queries on mesh dim {of_queries}",
            "shard both on the same mesh dim",
        )
    if m is not None and of_queries is None:
        part = AxisLayout(Shard(0), even_sizes(given.shape[0], mesh.size(m)))
        queries = redistribute_to(queries, given.with_axes({m: part}))
    return points, queries, given


def _sharded_distances(
    points: ShardTensor, queries: ShardTensor, indices: ShardTensor, squares: Tensor, at: Any
) -> ShardTensor:
    """Distances of the points with these indices from the rank's queries ``[at]``."""
    spec = indices._spec.with_dtype(points.dtype)
    if not _needs_gradient(points, queries):
        return wrap(squares.sqrt().to(points.dtype), spec)
    near = redistribute_to(points[indices], spec_like(spec, 0, (*spec.shape, points.shape[1]), None))
    return from_part(_distance(near.to_local(), queries.to_local()[at]), spec)


def spec_like(spec: ShardTensorSpec, dim: int, shape: Sequence[int], sizes: tuple[int, ...] | None) -> ShardTensorSpec:
    """The spec of a tensor whose dim ``dim`` is sharded where dim 0 of ``spec`` is, in other sizes if given."""
    meta = TensorMeta(torch.Size(shape), contiguous_stride(shape), spec.tensor_meta.dtype)
    layout = [
        AxisLayout(Shard(dim), sizes or axis.sizes) if axis.placement.is_shard() else AxisLayout(Replicate())
        for axis in spec.layout
    ]
    return spec.with_layout(layout, meta)


def _laid_out_as(queries: ShardTensorSpec, result: ShardTensor) -> ShardTensor:
    """A result as the queries were given: replicated where they were."""
    return result if queries.sharded_dims() else redistribute_to(result, result._spec.replicated())
