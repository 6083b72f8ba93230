"""``grid_sample`` and ``affine_grid`` against the unsharded ones, with the image or the grid sharded."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from halves import half_of, in_halves
from image_cuts import CUTS, IMAGE, places
from on_ranks import on_ranks
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    shard,
    shared_mesh,
)


@pytest.mark.parametrize(("mesh_shape", "dims", "sizes"), CUTS)
@on_ranks("mesh_shape")
def test_images(mesh_shape, dims, sizes):
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


@on_ranks(2)
def test_cut_grids():
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


# -- the image and the grid sharded in space, and a batch shorter than the number of ranks ---------------------------

# (mesh shape, placements of the image and of the grid, sizes of both)
TOGETHER = [
    (2, [Shard(2)], [Shard(1)], {0: (5, 1)}, {0: (3, 2)}),
    (2, [Shard(3)], [Shard(1)], {0: (0, 7)}, {0: (5, 0)}),
    (2, [Shard(2)], None, {0: (2, 4)}, None),
    (3, [Shard(2)], [Shard(1)], {0: (4, 0, 2)}, {0: (1, 4, 0)}),
    (3, [Shard(1)], [Shard(2)], None, {0: (2, 2, 2)}),
    ((2, 2), [Shard(2), Shard(3)], [Shard(1), Shard(2)], {0: (4, 2), 1: (1, 6)}, {0: (2, 3), 1: (6, 0)}),
    ((2, 2), [Shard(3), Replicate()], [Shard(1), Shard(2)], {0: (3, 4)}, {0: (4, 1)}),
    ((2, 2), [Replicate(), Shard(2)], [Shard(1), Replicate()], {1: (3, 3)}, {0: (4, 1)}),
]
# Of each mode, and of each padding mode, one that is checked in every run.
MODES = [("bilinear", "zeros", False), ("nearest", "border", False), ("bicubic", "reflection", True)]
ALL_MODES = [
    (mode, padding, corners)
    for mode in ("bilinear", "nearest", "bicubic")
    for padding in ("zeros", "border", "reflection")
    for corners in (True, False)
]


def check_together(layout, channels, modes, size=(6, 7)):
    mesh_shape, image, grid, image_sizes, grid_sizes = layout
    torch.manual_seed(0)
    x = torch.randn(1, channels, *size, dtype=torch.float64)
    at = torch.rand(1, 5, *size[: len(size) - 2], 6, len(size), dtype=torch.float64) * 2.6 - 1.3
    for mode in modes:
        assert_matches_unsharded(
            lambda x, g, m=mode: F.grid_sample(x, g, *m),
            x,
            at,
            mesh_shape=mesh_shape,
            placements=[image, grid],
            shard_sizes=[image_sizes, grid_sizes],
        )


@pytest.mark.parametrize(("layout", "half"), in_halves([(layout,) for layout in TOGETHER]))
def test_image_and_grid(layout, half):
    world = 4 if isinstance(layout[0], tuple) else layout[0]
    for channels in half_of((1, 3), half):  # fewer than ranks, and mostly as many
        run_distributed(check_together, world, layout, channels, MODES)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TOGETHER[i] for i in (0, 3, 5)])
@pytest.mark.parametrize("channels", [1, 3])
def test_all_modes(layout, channels):
    world = 4 if isinstance(layout[0], tuple) else layout[0]
    run_distributed(check_together, world, layout, channels, ALL_MODES, timeout=300.0)


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 3])
def test_volumes(channels):
    layout = 2, [Shard(3)], [Shard(2)], {0: (4, 1)}, {0: (1, 3)}
    modes = [mode for mode in ALL_MODES if mode[0] != "bicubic"]
    run_distributed(check_together, 2, layout, channels, modes, (4, 5, 4), timeout=300.0)


@pytest.mark.parametrize("sizes", [[7], pytest.param([3, 5, 6, 10, 12, 33], marks=pytest.mark.slow)])
@on_ranks(2, timeout=300.0)
def test_centers_of_pixels(sizes):
    """At the centers of pixels it is a matter of rounding which ones torch's kernels read."""
    torch.manual_seed(0)
    for n, step, corners in ((n, step, corners) for n in sizes for step in (1, 2) for corners in (True, False)):
        rows = -(-n // step)
        at = F.affine_grid(torch.eye(2, 3, dtype=torch.float64)[None], [1, 1, rows, rows], align_corners=corners)
        for mode, padding in (("bilinear", "border"), ("nearest", "zeros"), ("bicubic", "reflection")):
            assert_matches_unsharded(
                lambda x, g, m=(mode, padding, corners): F.grid_sample(x, g, *m),
                torch.randn(1, 1, n, n, dtype=torch.float64),
                at,
                mesh_shape=2,
                placements=[[Shard(2)], [Shard(1)]],
                shard_sizes=[{0: (n - 1, 1)}, {0: (1, rows - 1)}],
            )


@on_ranks(2)
def test_what_is_sent():
    mesh, counts = shared_mesh(2), []
    torch.manual_seed(0)
    at = F.affine_grid(torch.eye(2, 3)[None], [1, 1, 64, 4], align_corners=False)
    for channels in (1, 2):
        image = shard(torch.rand(1, channels, 64, 4), mesh, [Shard(2)], {0: (40, 24)}, requires_grad=True)
        grid = shard(at, mesh, [Shard(1)], {0: (40, 24)}, requires_grad=True)
        with count_communication() as forward:
            y = F.grid_sample(image, grid, align_corners=False)
        with count_communication() as backward:
            y.sum().backward()
        assert y._spec.shard_sizes == {0: (40, 24)}
        counts.append([(c.bytes_sent, dict(c.collectives)) for c in (forward, backward)])
    rank = dist.get_rank()
    pixels, channels = counts
    (sent, collectives), (back, collectives_back) = pixels
    # A row of four numbers at most, and the two ends of what the rank reads.
    assert sent <= 16 + 16 and collectives == {"all_gather": 1, "all_to_all": 1}
    assert back <= 16 and collectives_back == {"all_to_all": 1}
    # The image to channel shards, the grid once around the ring, the result to the rows of the grid.
    rows, others = (40, 24)[rank], (24, 40)[rank]
    assert channels[0] == (rows * 4 * 4 + rows * 4 * 8 + others * 4 * 4, {"all_to_all": 3})


def attend(value, grids):
    """Deformable attention as transformers has it, with the same points for both levels."""
    sampled, start = [], 0
    for height, width in ((6, 4), (3, 2)):
        level = value[:, start : start + height * width]
        start += height * width
        image = level.flatten(2).transpose(1, 2).reshape(2, 3, height, width)
        at = (2 * grids - 1).transpose(1, 2).flatten(0, 1)
        sampled.append(F.grid_sample(image, at, mode="bilinear", padding_mode="zeros", align_corners=False))
    return torch.stack(sampled, dim=-2).flatten(-2).mean(-1)


@on_ranks(3)
def test_deformable_attention_with_fewer_heads_than_ranks():
    torch.manual_seed(0)
    value = torch.randn(1, 30, 2, 3, dtype=torch.float64)  # (batch, pixels, heads, channels of a head)
    grids = torch.rand(1, 30, 2, 4, 2, dtype=torch.float64)  # (batch, queries, heads, points, coordinates)
    for sizes in ((10, 10, 10), (17, 0, 13)):
        for layout in ([Shard(1)], None):
            assert_matches_unsharded(
                attend, value, grids, mesh_shape=3, placements=[[Shard(1)], layout], shard_sizes={0: sizes}
            )


def transform(x, theta):
    return F.grid_sample(
        x, F.affine_grid(theta.view(-1, 2, 3), list(x.shape), align_corners=False), align_corners=False
    )


@on_ranks(2)
def test_spatial_transformer():
    torch.manual_seed(0)
    x = torch.randn(1, 1, 8, 5, dtype=torch.float64)
    theta = torch.tensor([[0.9, 0.1, 0.05, -0.1, 1.1, 0.0]], dtype=torch.float64)
    for layout, sizes in ((None, None), ([Shard(1)], {0: (4, 2)}), ([Partial()], None)):
        assert_matches_unsharded(
            transform, x, theta, mesh_shape=2, placements=[[Shard(2)], layout], shard_sizes=[{0: (7, 1)}, sizes]
        )


@on_ranks(2)
def test_autocast():
    torch.manual_seed(0)
    mesh = shared_mesh(2)
    image, at = torch.rand(1, 1, 8, 5), torch.rand(1, 6, 4, 2) * 2 - 1
    x, grid = shard(image.bfloat16(), mesh, [Shard(2)], {0: (7, 1)}), shard(at, mesh, [Shard(1)], {0: (1, 5)})
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = (
            F.grid_sample(x, grid, align_corners=False),
            F.grid_sample(image.bfloat16(), at, align_corners=False),
        )
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y.full_tensor(), expected)
