"""Runs of equal elements and counts of numbers, whose results are as long as the data has it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from row_cases import placed
from torch.distributed.tensor import Partial, Shard

from shardtensor import UnsupportedSharding
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_expecting_errors,
    shard,
    shared_mesh,
)

# (mesh shape, shape, dims cut, sizes)
CUTS = [
    (2, (17,), (0,), {0: (12, 5)}),
    (3, (17,), (0,), {0: (9, 0, 8)}),
    (4, (33,), (0,), {0: (0, 1, 31, 1)}),
    (2, (5, 4), (1,), {0: (1, 3)}),
    (3, (5, 4), (0,), {0: (0, 4, 1)}),
    (2, (1, 7), (1,), {0: (0, 7)}),
    ((2, 2), (6, 3), (None, 0), {1: (5, 1)}),
]


def world_of(mesh_shape):
    return mesh_shape if isinstance(mesh_shape, int) else 4


@pytest.mark.parametrize(("mesh_shape", "shape", "dims", "sizes"), CUTS)
@on_ranks("mesh_shape")
def test_against_one_device(mesh_shape, shape, dims, sizes):
    torch.manual_seed(0)
    options = {"mesh_shape": mesh_shape, "placements": placed(dims), "shard_sizes": sizes, "check_grads": False}
    all_of_it = {"return_inverse": True, "return_counts": True}
    for x in (torch.randint(-2, 3, shape), torch.rand(shape) > 0.5, torch.zeros(shape), torch.randn(shape).round()):
        assert_matches_unsharded(lambda x: torch.unique(x), x, **options)
        assert_matches_unsharded(lambda x: x.unique(return_counts=True), x, **options)
        assert_matches_unsharded(lambda x: x.unique(**all_of_it), x, **options)
        assert_matches_unsharded(lambda x: torch.unique_consecutive(x, **all_of_it), x, **options)
        for dim in range(x.ndim):
            assert_matches_unsharded(lambda x, d=dim: x.unique_consecutive(dim=d, **all_of_it), x, **options)
            if shape[dim] >= world_of(mesh_shape) or dims[-1] == dim or 1 in shape:
                few = x.clamp(0, 1) if x.dtype != torch.bool else x  # more slices that are equal
                assert_matches_unsharded(lambda x, d=dim: torch.unique(x, dim=d, **all_of_it), few, **options)
    if len(shape) == 1:
        numbers, weights = torch.randint(0, 9, shape), torch.rand(shape, dtype=torch.float64)
        assert_matches_unsharded(lambda x: torch.bincount(x), numbers, **options)
        assert_matches_unsharded(lambda x: x.bincount(minlength=20), numbers, **options)
        assert_matches_unsharded(lambda x: torch.bincount(x, weights), numbers, **options)
        assert_matches_unsharded(lambda x, w: x.bincount(w), numbers, weights.float(), **options)


@on_ranks(2)
def test_what_travels():
    x = shard(torch.arange(100) // 3, shared_mesh(2), [Shard(0)], {0: (70, 30)})
    counts = {}
    for name, function in {
        "consecutive": lambda: x.unique_consecutive(return_inverse=True, return_counts=True),
        "unique": lambda: x.unique(),
        "inverse": lambda: x.unique(return_inverse=True),
        "slices": lambda: x.view(50, 2).unique(dim=0),
        "bincount": lambda: x.bincount(),
    }.items():
        with count_communication() as counted:
            result = function()
        result = result if isinstance(result, tuple) else (result,)
        counts[name] = counted.bytes_sent, dict(counted.collectives), counted.collective_bytes, result[0].placements
    sort = {"all_reduce": 64 // 4, "all_gather": 2}
    rank = dist.get_rank()
    # The last element of the first rank; how many runs begin where.
    line = (Shard(0),)
    assert counts["consecutive"] == (8 * (rank == 0), {"all_to_all": 1, "all_gather": 1}, 16, line)
    # The numbers are in order already, so that nothing else moves.
    assert counts["unique"][1] == {**sort, "all_to_all": 2} and counts["unique"][0] == 8 * (rank == 0)
    assert counts["inverse"][1] == {**sort, "all_to_all": 3} and counts["inverse"][0] == 8 * (rank == 0)
    # For each of two columns: its digits, and what is below; then how many are equal; how many runs begin where.
    assert counts["slices"][1] == {"all_reduce": 2 * (64 // 4 + 1), "all_gather": 2, "all_to_all": 2}
    assert counts["bincount"] == (0, {"all_reduce": 1}, 16, (Partial(),))


def fail(case):
    mesh = shared_mesh(2)
    if case == "negative":
        shard(torch.tensor([1, 2, -3]), mesh, [Shard(0)], {0: (2, 1)}).bincount()
    elif case == "weights":
        shard(torch.tensor([1, 2, 3]), mesh, [Shard(0)], {0: (2, 1)}).bincount(torch.ones(2))
    elif case == "real":
        shard(torch.rand(3), mesh, [Shard(0)], {0: (3, 0)}).bincount()
    elif case == "two dims, consecutive":
        shard(torch.rand(4, 8), shared_mesh((2, 2)), [Shard(1), Shard(0)], {0: (3, 5), 1: (1, 3)}).unique_consecutive()
    elif case == "two dims":
        shard(torch.rand(4, 8), shared_mesh((2, 2)), [Shard(1), Shard(0)], {0: (3, 5), 1: (1, 3)}).unique()


@pytest.mark.parametrize(
    ("case", "world", "kind", "text"),
    [
        ("negative", 2, RuntimeError, "non-negative"),
        ("weights", 2, RuntimeError, "same length"),
        ("real", 2, (RuntimeError, NotImplementedError), "bincount"),
        ("two dims, consecutive", 4, UnsupportedSharding, r"unique_consecutive: it has to be flattened, but .*Remedy"),
        ("two dims", 4, UnsupportedSharding, r"unique: it is sharded on several mesh dims.*Remedy"),
    ],
)
def test_errors_are_the_same_on_every_rank(case, world, kind, text):
    for error in run_expecting_errors(fail, world, case):
        with pytest.raises(kind, match=text):
            raise error
