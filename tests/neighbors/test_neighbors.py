"""``shardtensor.neighbors`` on shards against one process: values, ties, layouts, gradients, what travels, errors."""

from __future__ import annotations

import pytest
import torch
from on_ranks import on_ranks
from seeded import seeded
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardtensor import UnsupportedSharding
from shardtensor.layout.intervals import chunk_sizes, sizes_of
from shardtensor.neighbors import knn, radius, search, traffic
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    run_expecting_errors,
    shard,
    shared_mesh,
)

SHAPES = [(1, 1, 1), (2, 5, 2), (7, 17, 3), (97, 33, 2), (33, 97, 3)]


def cloud(n, d, seed, grid=False):
    """Random points; on a grid of few places many are equal, and equally far from others."""
    x = torch.rand(n, d, dtype=torch.float64, generator=seeded(seed))
    return (3 * x).round() if grid else x


def sizes(n, ranks, kind):
    """Even; all on the last rank; or any."""
    if kind == "random":
        cuts = torch.randint(0, n + 1, (ranks - 1,), generator=seeded(n + ranks)).sort().values.tolist()
        return sizes_of([0, *cuts, n])
    return (0,) * (ranks - 1) + (n,) if kind == "last" else chunk_sizes(n, ranks)


def placed(x, ranks, kind, requires_grad=False):
    if kind is None:
        return x
    placement = Replicate() if kind == "replicated" else Shard(0)
    given = {} if kind == "replicated" else {0: sizes(len(x), ranks, kind)}
    return shard(x, shared_mesh(ranks), [placement], given, requires_grad)


def assert_same(found, expected, like):
    """The values of one process, in the layout of the queries; edges lie along dim 1."""
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.full_tensor(), other)
        dim = 1 if found[0].ndim == 1 and one.ndim == 2 else 0
        assert one.placements == tuple(Shard(dim) if p.is_shard() else p for p in like.placements)
    if found[0].ndim == 2:
        assert found[0].shard_sizes == found[1].shard_sizes == like.shard_sizes


LAYOUTS = [
    ("even", "even"),
    ("random", "even"),
    ("last", "random"),
    ("random", "last"),
    ("even", "replicated"),
    ("replicated", "random"),
    ("random", None),
    (None, "even"),
    ("replicated", "replicated"),
]


def check_values(ranks, grid):
    """Every layout of every shape, and on more than two ranks of every second one."""
    for i, (n, m, d) in enumerate(SHAPES):
        points, queries = cloud(n, d, n, grid), cloud(m, d, m + 1, grid)
        for of_points, of_queries in LAYOUTS if ranks <= 2 else LAYOUTS[i % 2 :: 2]:
            x, q = placed(points, ranks, of_points), placed(queries, ranks, of_queries)
            like = q if of_queries else shard(queries, shared_mesh(ranks), [Replicate()])
            for k in {1, min(n, 5), n}:
                assert_same(knn(x, q, k), knn(points, queries, k), like)
            for r, most, loops in ((0.0, None, True), (0.4, None, True), (1.0, 3, True), (1.0, 3, False)):
                found = radius(x, q, r, max_neighbors=most, loops=loops)
                assert_same(found, radius(points, queries, r, max_neighbors=most, loops=loops), like)


@pytest.mark.parametrize(
    ("ranks", "grid"),
    [
        *((2, False), (4, True)),
        *(pytest.param(n, grid, marks=pytest.mark.slow) for n in (1, 3) for grid in (False, True)),
    ],
)
def test_values_are_those_of_one_process(ranks, grid):
    run_distributed(check_values, ranks, ranks, grid, timeout=180)


@pytest.mark.on_device
def test_values_on_a_device():
    run_distributed(check_values, 2, 2, True, timeout=180)


@on_ranks(4)
def test_on_a_mesh_of_two_dims():
    mesh = shared_mesh((2, 2))
    points, queries = cloud(33, 2, 0), cloud(17, 2, 1)
    for placements in ([Replicate(), Shard(0)], [Shard(0), Replicate()]):
        m = placements.index(Shard(0))
        x, q = shard(points, mesh, placements, {m: (4, 29)}), shard(queries, mesh, placements, {m: (17, 0)})
        assert_same(knn(x, q, 5), knn(points, queries, 5), q)
        found = radius(x, q, 0.4)
        assert_same(found, radius(points, queries, 0.4), q)
        assert found[1].placements == tuple(Shard(1) if p.is_shard() else p for p in placements)


@on_ranks(2)
def test_other_dtypes_and_extreme_coordinates():
    for dtype in (torch.float32, torch.bfloat16):
        points = cloud(97, 3, 0).to(dtype)
        x = shard(points, shared_mesh(2), [Shard(0)], {0: (33, 64)})
        for found, expected in (
            (knn(x, x, 7), knn(points, points, 7)),
            (radius(x, x, 0.3), radius(points, points, 0.3)),
        ):
            assert found[0].dtype == dtype and found[1].dtype == torch.int64
            assert_same(found, expected, x)
    points = 1e160 * cloud(97, 3, 0)  # the squares overflow: all are equally far
    x = shard(points, shared_mesh(2), [Shard(0)], {0: (33, 64)})
    assert_same(knn(x, x, 3), knn(points, points, 3), x)
    assert knn(points, points, 3)[1].tolist()[5:] == [[i, 0, 1] for i in range(5, 97)]


@on_ranks(2)
def test_of_dtensors_and_of_no_queries():
    mesh, points = shared_mesh(2), cloud(7, 2, 0)
    x = distribute_tensor(points, mesh, [Shard(0)])  # torch's class
    assert_same(knn(x, x, 3), knn(points, points, 3), shard(points, mesh, [Shard(0)]))
    none = points[:0]
    q = shard(none, mesh, [Shard(0)])
    assert_same(knn(x, q, 3), knn(points, none, 3), q)
    assert_same(radius(q, x, 1.0), radius(none, points, 1.0), shard(points, mesh, [Shard(0)]))


# -- gradients --------------------------------------------------------------------------------------------------------


def within(points, queries):
    return radius(points, queries, 0.5)


def nearest(points, queries):
    return knn(points, queries, 4)


def second_order(points, queries):
    """A function of first derivatives, so that its gradient is one of second derivatives."""
    values = [(f(points, queries)[0] ** 3).sum() for f in (nearest, within)]
    return torch.autograd.grad(values[0] + values[1], (points, queries), create_graph=True)


@pytest.mark.parametrize("ranks", [2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
@on_ranks("ranks", timeout=180)
def test_gradients_are_those_of_one_process(ranks):
    points, queries = cloud(17, 3, 0), cloud(7, 3, 1)
    for of_points, of_queries in LAYOUTS:
        places = [
            None if kind is None else [Replicate() if kind == "replicated" else Shard(0)]
            for kind in (of_points, of_queries)
        ]
        given = [
            {0: sizes(n, ranks, kind)} if kind not in (None, "replicated") else None
            for n, kind in ((17, of_points), (7, of_queries))
        ]
        for function in (nearest, within, second_order):
            assert_matches_unsharded(
                function, points, queries, placements=places, shard_sizes=given, mesh_shape=ranks, rtol=1e-10
            )
    for grid in (False, True):  # each point is its own nearest, at a distance of 0
        points = cloud(17, 2, 3, grid)
        for function in (nearest, within, second_order):
            assert_matches_unsharded(
                lambda x, function=function: function(x, x * 1.0), points, placements=[Shard(0)], mesh_shape=ranks
            )


@pytest.mark.parametrize("function", [nearest, within])
def test_derivatives_are_those_of_numerical_differences(function):
    points, queries = cloud(9, 2, 0).requires_grad_(), cloud(4, 2, 1).requires_grad_()
    assert torch.autograd.gradcheck(lambda *t: function(*t)[0], (points, queries))
    assert torch.autograd.gradgradcheck(lambda *t: function(*t)[0], (points, queries))


def test_at_a_distance_of_zero_derivatives_are_zero():
    x = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(knn(x, x.detach(), 1)[0].sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert not first.any() and not second.any()


# -- what travels -----------------------------------------------------------------------------------------------------


def line():
    """Points 0 to 39 on a line, 20 on each of two ranks: a query looks for 3, at distances up to 1, or 2 at an end."""
    x = shard(torch.arange(40.0, dtype=torch.float64).unsqueeze(1), shared_mesh(2), [Shard(0)])
    with count_communication() as counted:
        knn(x, x, 3)
    with count_communication() as within_three:
        radius(x, x, 3)
    return [(c.messages, c.bytes_sent, c.bytes_received, dict(c.collectives)) for c in (counted, within_three)]


def test_only_points_near_a_border_travel():
    # Each box holds one point, so that the last query of rank 0 looks no farther than 1. A row has 16 bytes: a
    # coordinate and a number.
    rows = run_distributed(line, 2)
    assert (
        rows == [[(1, 16, 16, {"all_gather": 2, "all_to_all": 1}), (1, 48, 48, {"all_gather": 3, "all_to_all": 1})]] * 2
    )


@on_ranks(2)
def test_where_nobody_needs_anything_only_boxes_are_told():
    points = cloud(40, 2, 0) + torch.tensor([[0.0, 0.0]] * 20 + [[9.0, 0.0]] * 20)
    x = shard(points, shared_mesh(2), [Shard(0)])
    with count_communication() as counted:
        found = knn(x, x, 4)
    assert_same(found, knn(points, points, 4), x)
    boxes = 64 * (1 + 4 * 2) * 8
    assert (counted.messages, dict(counted.collectives), counted.collective_bytes) == (0, {"all_gather": 1}, boxes)


def elsewhere():
    """Queries of rank 0 are among the points of rank 1, and there are fewer than k points on rank 2."""
    points = torch.arange(1003.0, dtype=torch.float64).unsqueeze(1)
    queries = torch.tensor([[700.25], [700.5], [0.25]], dtype=torch.float64)
    x = shard(points, shared_mesh(3), [Shard(0)], {0: (500, 500, 3)})
    q = shard(queries, shared_mesh(3), [Shard(0)], {0: (2, 0, 1)})
    with count_communication() as counted:
        found = knn(x, q, 4)
    assert_same(found, knn(points, queries, 4), q)
    return counted.bytes_received // 16


def test_boxes_say_how_far_a_query_looks_that_is_not_among_its_ranks_points():
    # Four points are in one box of 8, or in two; so nobody gets more than those of a few boxes.
    received = run_distributed(elsewhere, 3)
    assert received[1] == 0 and 4 <= received[0] <= 32 and 4 <= received[2] <= 32


def in_rounds():
    """Points in random order: all matter to all."""
    points = cloud(15000, 2, 0)
    queries = cloud(40, 2, 1)
    x, q = (shard(t, shared_mesh(3), [Shard(0)]) for t in (points, queries))
    sizes, add = [], search.Nearest.add
    search.Nearest.add = lambda self, some, numbers: (sizes.append(len(some)), add(self, some, numbers))[1]
    try:
        with count_communication() as counted:
            found = knn(x, q, 2000)
    finally:
        search.Nearest.add = add
    assert_same(found, knn(points, queries, 2000), q)
    return sizes, counted.bytes_received // 24, dict(counted.collectives)


def test_a_rank_never_gets_more_than_a_shard_at_a_time():
    assert traffic._TOGETHER < 5000
    for sizes, received, collectives in run_distributed(in_rounds, 3, timeout=120):
        own, *others = sizes
        assert own == 5000 and len(others) == 2 and max(others) <= 5000 and sum(others) == received > 5000
        assert collectives == {"all_gather": 2, "all_to_all": 2}


@on_ranks(2)
def test_replicated_points_are_searched_where_they_are():
    points, queries = cloud(97, 3, 0), cloud(17, 3, 1)
    x, q = shard(points, shared_mesh(2), [Replicate()]), shard(queries, shared_mesh(2), [Shard(0)])
    with count_communication() as counted:
        knn(x, q, 5)
    assert (counted.messages, dict(counted.collectives), counted.collective_bytes) == (0, {"all_gather": 1}, 8)


# -- what is refused --------------------------------------------------------------------------------------------------


def nothing_sent(function, *operands, collectives=()):
    with count_communication() as counted:
        try:
            function(*operands)
        finally:
            assert not counted.messages and dict(counted.collectives) == dict(collectives)


def sharded(x, dim=0):
    return shard(x, shared_mesh(2), [Shard(dim)])


def too_many():
    nothing_sent(lambda x: knn(x, x, 18), sharded(cloud(17, 2, 0)))


def no_neighbors():
    nothing_sent(lambda x: knn(x, x, 0), sharded(cloud(17, 2, 0)))


def other_dims():
    nothing_sent(lambda x, q: knn(x, q, 1), sharded(cloud(17, 2, 0)), sharded(cloud(17, 3, 0)))


def integers():
    nothing_sent(lambda x: radius(x, x, 1.0), sharded(torch.arange(10).unsqueeze(1)))


def two_dtypes():
    nothing_sent(lambda x, q: radius(x, q, 1.0), sharded(cloud(17, 2, 0)), sharded(cloud(17, 2, 0).float()))


def negative():
    nothing_sent(lambda x: radius(x, x, -1.0), sharded(cloud(17, 2, 0)))


def none_at_most():
    nothing_sent(lambda x: radius(x, x, 1.0, max_neighbors=0), sharded(cloud(17, 2, 0)))


def not_a_number():
    x = cloud(17, 2, 0)
    x[16, 1] = torch.nan  # on the last rank
    nothing_sent(lambda x: knn(x, x, 2), sharded(x), collectives={"all_gather": 1})


def infinite_query():
    q = cloud(17, 2, 0)
    q[0, 0] = torch.inf  # on the first rank; the points are on all
    nothing_sent(lambda x, q: radius(x, q, 2.0), cloud(5, 2, 0), sharded(q), collectives={"all_gather": 1})


def coordinates_apart():
    nothing_sent(lambda x, q: knn(x, q, 2), sharded(cloud(17, 4, 0), 1), sharded(cloud(17, 4, 0)))


def two_mesh_dims():
    mesh = shared_mesh((2, 2))
    x = shard(cloud(17, 2, 0), mesh, [Shard(0), Replicate()])
    nothing_sent(lambda x, q: knn(x, q, 2), x, shard(cloud(17, 2, 0), mesh, [Replicate(), Shard(0)]))


REFUSED = {
    too_many: (2, ValueError, r"knn: k is 18, but must be between 1 and the number of points, 17"),
    no_neighbors: (2, ValueError, r"knn: k is 0, but must be between 1"),
    other_dims: (
        2,
        ValueError,
        r"knn: points of shape \(17, 2\) and queries of shape \(17, 3\); it takes points \(n, d\)",
    ),
    integers: (2, TypeError, r"radius: points of torch.int64 .* must have the same floating-point dtype"),
    two_dtypes: (2, TypeError, r"radius: points of torch.float64 and queries of torch.float32; .* \.to\(dtype\)"),
    negative: (2, ValueError, r"radius: r is -1.0, but must be finite and at least 0"),
    none_at_most: (2, ValueError, r"radius: max_neighbors is 0, but must be at least 1, or None"),
    not_a_number: (2, ValueError, r"knn: coordinates .* not finite.*S\(0\)\[9, 8\].*Remedy: remove these points"),
    infinite_query: (2, ValueError, r"radius: coordinates of points or queries are not finite"),
    coordinates_apart: (2, UnsupportedSharding, r"knn: the coordinates.*several ranks.*S\(1\).*Remedy: shard dim 0"),
    two_mesh_dims: (4, UnsupportedSharding, r"knn: points are sharded on mesh dim 0, queries on mesh dim 1.*Remedy"),
}


@pytest.mark.parametrize("function", REFUSED)
def test_errors_on_every_rank_before_anything_is_sent(function):
    ranks, kind, text = REFUSED[function]
    for error in run_expecting_errors(function, ranks):
        with pytest.raises(kind, match=text):
            raise error


def test_one_process_refuses_alike():
    x = cloud(5, 2, 0)
    for arguments, kind, text in (
        ((x, x, 6), ValueError, "k is 6, but must be between 1 and the number of points, 5"),
        ((x, x, 2.0), TypeError, "k must be an integer, not 2.0"),
        ((x, x.long(), 1), TypeError, "same floating-point dtype"),
        ((x * torch.nan, x, 1), ValueError, "are not finite"),
    ):
        with pytest.raises(kind, match=text):
            knn(*arguments)
