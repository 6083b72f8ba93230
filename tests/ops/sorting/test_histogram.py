"""Histograms of shards against one device."""

from __future__ import annotations

import pytest
import torch
from on_ranks import on_ranks
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import UnsupportedSharding
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    run_expecting_errors,
    shard,
    shared_mesh,
)

NO_KERNEL = pytest.mark.on_cpu("torch has no kernel of histogram for GPUs")
CUTS = [
    (2, (0,), {0: (5, 2)}),
    (3, (0,), {0: (0, 6, 1)}),
    (2, (1,), {0: (2, 1)}),
    ((2, 2), (None, 0), {1: (7, 0)}),
    ((2, 2), (1, 0), {0: (1, 2), 1: (4, 3)}),
]


def options_of(mesh_shape, dims, sizes):
    return {
        "mesh_shape": mesh_shape,
        "placements": [Replicate() if d is None else Shard(d) for d in dims],
        "shard_sizes": sizes,
        "check_grads": False,
    }


@pytest.mark.parametrize(("mesh_shape", "dims", "sizes"), CUTS)
@on_ranks("mesh_shape")
def test_histc(mesh_shape, dims, sizes):
    torch.manual_seed(0)
    x, options = torch.randn(7, 3, dtype=torch.float64), options_of(mesh_shape, dims, sizes)
    assert_matches_unsharded(lambda x: torch.histc(x, 7), x, **options)
    assert_matches_unsharded(lambda x: torch.histc(x * 0 + 3, 7), x, **options)


def check(mesh_shape, dims, sizes):
    torch.manual_seed(0)
    x, w = torch.randn(7, 3, dtype=torch.float64), torch.rand(7, 3, dtype=torch.float64)
    options = options_of(mesh_shape, dims, sizes)
    edges = torch.linspace(-2, 2, 6, dtype=torch.float64)
    for both in ({"density": False}, {"density": True}):
        assert_matches_unsharded(lambda x, both=both: tuple(torch.histogram(x, 5, **both)), x, **options)
        assert_matches_unsharded(lambda x, both=both: tuple(x.histogram(5, range=(-1.0, 0.5), **both)), x, **options)
        assert_matches_unsharded(lambda x, both=both: tuple(torch.histogram(x, edges, weight=w, **both)), x, **options)
        assert_matches_unsharded(lambda x, w, b=both: tuple(torch.histogram(x, 4, weight=w, **b)), x, w, **options)
    if len(dims) == 1 or None in dims:
        points = [(2, 3, 4), [edges, edges[1:], edges[2:]]]
        for bins in points:
            for density in (False, True):

                def several(x, bins=bins, density=density, **more):
                    result = torch.histogramdd(x, bins, density=density, **more)
                    return result.hist, *result.bin_edges

                assert_matches_unsharded(several, x, **options)
                assert_matches_unsharded(lambda x, f=several: f(x, weight=w[:, 0].contiguous()), x, **options)


@NO_KERNEL
@pytest.mark.parametrize(("mesh_shape", "dims", "sizes"), CUTS)
def test_against_one_device(mesh_shape, dims, sizes):
    run_distributed(check, mesh_shape if isinstance(mesh_shape, int) else 4, mesh_shape, dims, sizes)


@NO_KERNEL
@on_ranks(2)
def test_what_travels():
    """Two numbers a row of points where no range is given; the counts only for a density."""
    x = shard(torch.randn(100, 2), shared_mesh(2), [Shard(0)], {0: (70, 30)})
    found = []
    for function in (
        lambda: x.histogram(5).hist,
        lambda: x.histogram(5, range=(0.0, 1.0)).hist,
        lambda: x.histogram(5, range=(0.0, 1.0), density=True).hist,
        lambda: x.histc(5),
        lambda: torch.histogramdd(x, (2, 3)).hist,
    ):
        with count_communication() as counted:
            y = function()
        found.append((counted.messages, dict(counted.collectives), counted.collective_bytes, y.placements))
    one = {"all_reduce": 1}
    assert found == [
        (0, one, 2 * 4, (Partial(),)),
        (0, {}, 0, (Partial(),)),
        (0, one, 5 * 4, (Replicate(),)),
        (0, one, 2 * 4, (Partial(),)),
        (0, {"all_reduce": 2}, 2 * (2 * 2 * 4), (Partial(),)),  # edges, and again to count
    ]


def fail(case):
    mesh = shared_mesh(2)
    x = shard(torch.tensor([1.0, float("nan"), 2.0]), mesh, [Shard(0)], {0: (1, 2)})
    if case == "undefined":
        x.histogram(5)
    elif case == "undefined, histc":
        x.histc(5)
    elif case == "sharded edges":
        x.histogram(shard(torch.arange(4.0), mesh, [Shard(0)], {0: (1, 3)}))
    else:
        x.histogram(-1)


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        pytest.param("undefined", RuntimeError, "not finite", marks=NO_KERNEL),
        ("undefined, histc", RuntimeError, "not finite"),
        ("sharded edges", UnsupportedSharding, r"histogram: an operand would have to be gathered.*\[1, 3\].*Remedy"),
        pytest.param("bins", RuntimeError, "bins", marks=NO_KERNEL),
    ],
)
def test_errors_are_the_same_on_every_rank(case, kind, text):
    for error in run_expecting_errors(fail, 2, case):
        with pytest.raises(kind, match=text):
            raise error


def check_weights(mesh_shape, dims, sizes):
    """Weights may be sharded where the elements are not."""
    torch.manual_seed(0)
    options = options_of(mesh_shape, dims, sizes)
    numbers, weights = torch.randint(9, (7, 3)), torch.rand(7, 3, dtype=torch.float64)
    places = [None, options.pop("placements")]
    if dims[0] != 1 and dims[-1] != 1:
        check = lambda x, w: torch.bincount(x[:, 0], w[:, 0], 4)  # noqa: E731
        assert_matches_unsharded(check, numbers, weights, placements=places, **options)
        points = torch.randn(7, 2, dtype=torch.float64)
        for bins in ([3, 4], [torch.linspace(-1, 1, 4).double()] * 2):
            check = lambda x, w, b=bins: torch.histogramdd(x, b, weight=w[:, 0]).hist  # noqa: E731
            assert_matches_unsharded(check, points, weights, placements=places, **options)
    for bins in (4, torch.linspace(0, 9, 5).double()):
        check = lambda x, w, b=bins: torch.histogram(x, b, weight=w).hist  # noqa: E731
        assert_matches_unsharded(check, numbers.double(), weights, placements=places, **options)


@NO_KERNEL
@pytest.mark.parametrize("cut", [CUTS[0], *[pytest.param(cut, marks=pytest.mark.slow) for cut in CUTS[1:]]])
def test_sharded_weights_of_plain_elements(cut):
    run_distributed(check_weights, 4 if cut[0] == (2, 2) else cut[0], *cut)
