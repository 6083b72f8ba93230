"""``grid_sample`` and ``affine_grid`` against the unsharded ones, with the image or the grid sharded."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from image_cuts import CUTS, IMAGE, places
from torch.distributed.tensor import Replicate, Shard

from shardtensor.testing import (
    assert_matches_unsharded,
    run_distributed,
)


def check_grids(mesh_shape, dims, sizes):
    torch.manual_seed(0)
    x = torch.randn(IMAGE, dtype=torch.float64)
    grid = torch.rand(3, 4, 2, 2, dtype=torch.float64) * 2.4 - 1.2
    for mode, padding in (("bilinear", "zeros"), ("nearest", "border"), ("bicubic", "reflection")):
        assert_matches_unsharded(
            lambda x, g, m=mode, p=padding: F.grid_sample(x, g, m, p, align_corners=False),
            x,
            grid,
            mesh_shape=mesh_shape,
            placements=[places(dims), None],
            shard_sizes=[sizes, None],
        )


@pytest.mark.parametrize(("mesh_shape", "dims", "sizes"), CUTS)
def test_images(mesh_shape, dims, sizes):
    run_distributed(check_grids, 4 if isinstance(mesh_shape, tuple) else mesh_shape, mesh_shape, dims, sizes)


def check_cut_grids():
    torch.manual_seed(0)
    x = torch.randn(IMAGE, dtype=torch.float64)
    grid = torch.rand(3, 4, 2, 2, dtype=torch.float64) * 2 - 1
    theta = torch.randn(3, 2, 3, dtype=torch.float64)

    def sample(x, g):
        return F.grid_sample(x, g, align_corners=True)

    def check(function, *tensors, placements, sizes):
        assert_matches_unsharded(function, *tensors, mesh_shape=2, placements=placements, shard_sizes=sizes)

    for dim, cut in ((0, (0, 3)), (1, (3, 1)), (2, (2, 0)), (3, (1, 1))):
        for image in (None, [Replicate()]):
            check(sample, x, grid, placements=[image, [Shard(dim)]], sizes=[None, {0: cut}])
        # Cut differently: both go to the batch.
        check(sample, x, grid, placements=[[Shard(2)], [Shard(dim)]], sizes=[{0: (5, 1)}, {0: cut}])
    for dim, cut in ((0, (1, 2)), (2, (3, 0))):
        affine = lambda t: F.affine_grid(t, [3, 5, 4, 2], align_corners=False)  # noqa: E731
        check(affine, theta, placements=[[Shard(dim)]], sizes={0: cut})


def test_cut_grids():
    run_distributed(check_cut_grids, 2)
