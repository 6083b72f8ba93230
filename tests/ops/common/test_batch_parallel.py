"""What operators exchange that take batch and channels each by itself, and what they refuse."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import on_ranks
from torch.distributed.tensor import Shard

from shardtensor import UnsupportedSharding
from shardtensor.testing import (
    count_communication,
    run_expecting_errors,
    shard,
    shared_mesh,
)


@on_ranks(2)
def test_the_detour_is_one_exchange():
    mesh = shared_mesh(2)
    torch.manual_seed(0)
    x, grid = torch.randn(4, 2, 6, 5), torch.rand(4, 3, 3, 2)
    counts = []
    for dim, sizes in ((0, (1, 3)), (1, (1, 1)), (2, (4, 2))):
        image = shard(x, mesh, [Shard(dim)], {0: sizes}, requires_grad=True)
        with count_communication() as forward:
            y = F.grid_sample(image, grid, align_corners=False)
        with count_communication() as backward:
            y.sum().backward()
        counts.append([(c.messages, c.bytes_sent, dict(c.collectives)) for c in (forward, backward)])
    rank = dist.get_rank()
    batch, channels, height = counts
    assert batch == channels == [(0, 0, {}), (0, 0, {})]
    # Half the batch of the rows that the rank holds; backward the rows of the other rank of half the batch.
    there, back = 2 * 2 * (4, 2)[rank] * 5 * 4, 2 * 2 * (2, 4)[rank] * 5 * 4
    assert height == [(1, there, {"all_to_all": 1}), (1, back, {"all_to_all": 1})]


@on_ranks(2)
def test_the_longest_dim_that_shards_evenly_is_taken():
    """Two images of three channels are sharded as images, not as two channels and one."""
    for batch, channels, taken in ((2, 3, 0), (2, 4, 1), (3, 16, 1), (1, 3, 1), (16, 33, 1)):
        image = shard(torch.rand(batch, channels, 6, 5), shared_mesh(2), [Shard(2)])
        grid = torch.rand(batch, 3, 3, 2)
        assert F.grid_sample(image, grid, align_corners=False).placements == (Shard(taken),), (batch, channels)


def fail():
    x = shard(torch.rand(1, 1, 6, 5), shared_mesh(2), [Shard(2)], {0: (4, 2)})
    F.max_unpool2d(x, torch.arange(30).view(1, 1, 6, 5), 2)


def test_without_a_free_dim_it_is_refused_on_every_rank():
    for error in run_expecting_errors(fail, 2):
        with pytest.raises(UnsupportedSharding, match=r"max_unpool2d: .*mesh dim 0 shards.*\[4, 2\].*Remedy"):
            raise error
