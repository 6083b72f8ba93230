"""``max_unpool`` and ``fractional_max_pool`` against the unsharded ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from image_cuts import CUTS, IMAGE, places
from on_ranks import on_ranks
from torch.distributed.tensor import Shard

from shardtensor.testing import assert_matches_unsharded


@pytest.mark.on_device
@pytest.mark.parametrize(("mesh_shape", "dims", "sizes"), CUTS)
@on_ranks("mesh_shape")
def test_images(mesh_shape, dims, sizes):
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


@pytest.mark.on_cpu("under autocast, only CPUs cast what is pooled fractionally; GPUs demand samples of its dtype")
@on_ranks(2)
def test_fractional_max_pool_under_autocast():
    torch.manual_seed(0)
    for n, sizes in ((2, (5, 6)), (3, (5, 6, 5))):
        name, samples = f"fractional_max_pool{n}d", torch.rand(2, 3, n)

        def pool(x, name=name, samples=samples):
            with torch.autocast("cpu", torch.bfloat16):
                return getattr(F, name)(x, 2, output_size=3, return_indices=True, _random_samples=samples)

        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(2, 3, *sizes).to(dtype)
            assert_matches_unsharded(pool, x, mesh_shape=2, placements=[Shard(2)], shard_sizes={0: (1, 4)})
