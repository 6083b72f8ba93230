"""Operators that take batch and channels each by itself, against the unsharded ones: values, gradients, messages."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard

from shardtensor import UnsupportedSharding
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    run_expecting_errors,
    shard,
    shared_mesh,
)

IMAGE = (3, 5, 6, 7)
# (mesh shape, dims cut, sizes) of tensors of shape IMAGE
CUTS = [
    (2, (0,), {0: (1, 2)}),
    (2, (1,), {0: (0, 5)}),
    (2, (2,), {0: (5, 1)}),
    (3, (3,), {0: (3, 0, 4)}),
    ((2, 2), (0, 2), {0: (3, 0), 1: (2, 4)}),
    ((2, 2), (3, 2), {0: (3, 4), 1: (6, 0)}),
]


def places(dims):
    return [Shard(d) for d in dims]


def check_pooling(mesh_shape, dims, sizes):
    torch.manual_seed(0)
    x = torch.randn(IMAGE, dtype=torch.float64)
    pooled, indices = F.max_pool2d(torch.randn(3, 5, 12, 14, dtype=torch.float64), 2, return_indices=True)
    samples = torch.rand(3, 5, 2, dtype=torch.float64)
    options = {"mesh_shape": mesh_shape, "shard_sizes": sizes}
    for other in (None, places(dims)):
        assert_matches_unsharded(
            lambda x, i: F.max_unpool2d(x, i, 2), x, indices, placements=[places(dims), other], **options
        )
    assert_matches_unsharded(
        lambda x: F.fractional_max_pool2d(x, 2, (3, 4), return_indices=True, _random_samples=samples),
        x,
        placements=[places(dims)],
        **options,
    )
    # The samples that every rank draws for the whole tensor are those of one device.
    def drawn(x):
        torch.manual_seed(1)
        return torch.nn.FractionalMaxPool2d(2, output_ratio=0.6)(x)

    assert_matches_unsharded(drawn, x, placements=[places(dims)], **options)


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


@pytest.mark.parametrize("check", [check_pooling, check_grids])
@pytest.mark.parametrize(("mesh_shape", "dims", "sizes"), CUTS)
def test_images(check, mesh_shape, dims, sizes):
    run_distributed(check, 4 if isinstance(mesh_shape, tuple) else mesh_shape, mesh_shape, dims, sizes)


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
        for places in (None, [Replicate()]):
            check(sample, x, grid, placements=[places, [Shard(dim)]], sizes=[None, {0: cut}])
        # Cut differently: both go to the batch.
        check(sample, x, grid, placements=[[Shard(2)], [Shard(dim)]], sizes=[{0: (5, 1)}, {0: cut}])
    for dim, cut in ((0, (1, 2)), (2, (3, 0))):
        affine = lambda t: F.affine_grid(t, [3, 5, 4, 2], align_corners=False)  # noqa: E731
        check(affine, theta, placements=[[Shard(dim)]], sizes={0: cut})


def test_cut_grids():
    run_distributed(check_cut_grids, 2)


def check_ctc():
    torch.manual_seed(0)
    logs = torch.randn(7, 3, 5, dtype=torch.float64)
    rows, flat = torch.randint(1, 5, (3, 4)), torch.randint(1, 5, (6,))
    inputs, lengths = torch.tensor([7, 5, 6]), torch.tensor([2, 3, 1])
    for reduction in ("mean", "sum", "none"):
        for dim, sizes in ((0, (6, 1)), (1, (0, 3)), (1, (1, 2)), (2, (3, 2))):
            for targets, given in ((rows, (inputs, lengths)), (flat, ([7, 5, 6], [2, 3, 1]))):
                assert_matches_unsharded(
                    lambda x, r=reduction, t=targets, g=given: F.ctc_loss(x.log_softmax(2), t, *g, reduction=r),
                    logs,
                    mesh_shape=2,
                    placements=[Shard(dim)],
                    shard_sizes={0: sizes},
                )


def test_ctc_loss():
    run_distributed(check_ctc, 2)


def messages():
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
    return counts


def test_the_detour_is_one_exchange():
    for rank, (batch, channels, height) in enumerate(run_distributed(messages, 2)):
        assert batch == channels == [(0, 0, {}), (0, 0, {})]
        # Half the batch of the rows that the rank holds; backward the rows of the other rank of half the batch.
        there, back = 2 * 2 * (4, 2)[rank] * 5 * 4, 2 * 2 * (2, 4)[rank] * 5 * 4
        assert height == [(1, there, {"all_to_all": 1}), (1, back, {"all_to_all": 1})]


def fail():
    x = shard(torch.rand(1, 1, 6, 5), shared_mesh(2), [Shard(2)], {0: (4, 2)})
    F.grid_sample(x, torch.rand(1, 3, 3, 2), align_corners=False)


def test_without_a_free_dim_it_is_refused_on_every_rank():
    for error in run_expecting_errors(fail, 2):
        with pytest.raises(UnsupportedSharding, match=r"grid_sample: .*mesh dim 0 cuts.*\[4, 2\].*Remedy"):
            raise error
