"""cdist, pdist and cross products of sharded points."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from on_ranks import on_ranks
from torch.distributed.tensor import Replicate, Shard

from shardtensor import UnsupportedSharding
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_expecting_errors,
    shard,
    shared_mesh,
)

WHOLE = [Replicate()]


def data(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def check(function, tensors, placements, sizes, ranks):
    torch.manual_seed(0)
    assert_matches_unsharded(function, *tensors, mesh_shape=ranks, placements=placements, shard_sizes=sizes)


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks")
def test_distances(ranks):
    seven, five = {0: (4, 2, 1)[:ranks] if ranks == 3 else (4, 3)}, {0: (0,) * (ranks - 1) + (5,)}
    three = {0: (3,) + (0,) * (ranks - 1)}
    for p in (0, 1, 2, 3, float("inf")) if ranks == 2 else (2, 3):
        distance = lambda a, b, p=p: torch.cdist(a, b, p)  # noqa: E731
        check(distance, [data(7, 3), data(5, 3)], [[Shard(0)], [Shard(0)]], [seven, five], ranks)
        check(lambda a, p=p: F.pdist(a, p), [data(7, 3)], [Shard(0)], seven, ranks)
    check(torch.pdist, [data(7, 3)], [Shard(1)], three, ranks)
    check(torch.cdist, [data(2, 7, 3), data(5, 3)], [[Shard(1)], WHOLE], [seven, None], ranks)
    # More than 25 points: torch computes with products, whatever a rank has of them.
    many = {0: (28,) + (1,) * (ranks - 1)}
    check(torch.cdist, [data(7, 3), data(27 + ranks, 3)], [WHOLE, [Shard(0)]], [None, many], ranks)
    check(torch.cdist, [data(3, 7, 3), data(1, 5, 3)], [[Shard(0)], [Shard(1)]], [None, five], ranks)
    check(torch.cdist, [data(7, 3), data(5, 3)], [[Shard(1)], [Shard(1)]], [three, three], ranks)


@on_ranks(2)
def test_cross():
    for dim in (0, 1):
        places = [[Shard(dim)], [Shard(dim)]]
        check(torch.linalg.cross, [data(7, 3), data(7, 3)], places, None, 2)
    check(torch.linalg.cross, [data(7, 3), data(1, 3)], [[Shard(0)], WHOLE], [{0: (0, 7)}, None], 2)
    check(lambda a, b: torch.cross(a, b, 0), [data(3, 4), data(3, 4)], [[Shard(1)], [Shard(0)]], None, 2)


@on_ranks(2)
def test_what_is_sent():
    mesh = shared_mesh(2)
    a = shard(data(8, 3), mesh, [Shard(0)], {0: (5, 3)})
    b = shard(data(4, 3), mesh, [Shard(0)], {0: (2, 2)})
    with count_communication() as both:
        y = torch.cdist(a, b)
    with count_communication() as one:
        torch.cdist(a, data(4, 3))
    assert (both.messages, both.bytes_sent) == (1, 2 * 3 * 8)  # the smaller set's shard
    assert y.placements == (Shard(0),) and y.shard_sizes == {0: (5, 3)}
    assert one.messages == 0


def fail():
    torch.linalg.cross(*[shard(data(1, 3), shared_mesh(2), [Shard(1)])] * 2)


def test_refused():
    for error in run_expecting_errors(fail, 2):
        with pytest.raises(UnsupportedSharding, match=r"cross: dim 1 of operand 0 must be unsharded"):
            raise error
