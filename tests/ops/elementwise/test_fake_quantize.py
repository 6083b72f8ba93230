"""Fake quantization: elementwise, with a scale for all elements or for each channel."""

from __future__ import annotations

import pytest
import torch
from torch.ao.quantization import FakeQuantize, MovingAveragePerChannelMinMaxObserver
from torch.distributed.tensor import Shard

from shardtensor.testing import assert_matches_unsharded, run_distributed

SCALE = torch.tensor([0.1, 0.3, 0.25, 0.7, 0.15])
ZERO = torch.tensor([0, 7, 3, 1, 4], dtype=torch.int32)


def quantized(x):
    """By numbers, by tensors of one element, and by those of each entry of dim 1."""
    whole = torch.fake_quantize_per_tensor_affine(x, 0.1, 3, 0, 15)
    by_tensors = torch.fake_quantize_per_tensor_affine(x, SCALE[:1], ZERO[:1], 0, 15)
    return whole.square() + by_tensors * torch.fake_quantize_per_channel_affine(x, SCALE, ZERO, 1, 0, 15)


class Observed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.whole = FakeQuantize()
        self.channels = FakeQuantize(
            MovingAveragePerChannelMinMaxObserver, quant_min=-8, quant_max=7, dtype=torch.qint8, ch_axis=1
        )

    def forward(self, x):
        return self.whole(x).square() * self.channels(x)


def check(cases):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 7)
    for mesh_shape, dims, sizes, modules in cases:
        options = {"mesh_shape": mesh_shape, "placements": [Shard(d) for d in dims], "shard_sizes": sizes}
        assert_matches_unsharded(quantized, x, **options)
        if modules:
            assert_matches_unsharded(Observed(), x, **options)


@pytest.mark.parametrize("modules", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_on_two_ranks(modules):
    run_distributed(check, 2, [(2, (1,), {0: (4, 1)}, modules), (2, (2,), {0: (7, 0)}, modules)])


@pytest.mark.slow
def test_on_both_axes():
    run_distributed(check, 4, [((2, 2), (1, 0), {0: (0, 5), 1: (1, 1)}, True)])
