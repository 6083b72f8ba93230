"""Volumes on the CPU: by oneDNN whatever their size, with the same numbers."""

from __future__ import annotations

import pytest
import torch
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import Shard

from shardtensor.ops.convolution.volumes import convolution_backward, convolve_volume, volume_backward
from shardtensor.testing import assert_matches_unsharded, shard, shared_mesh

# Channels x depth x height below and above torch's limit, which knows no width; the longest dim first, last, between.
SHAPES = [(1, 8, 5, 18, 300), (1, 8, 300, 18, 5), (1, 8, 18, 300, 5)]
SHAPES += [(1, 3, 7, 5, 2), (1, 64, 18, 20, 3), (2, 3, 7, 9, 8)]
OPTIONS = {
    "plain": ((1, 1, 1), (1, 1, 1), (1, 1, 1)),
    "strides": ((2, 1, 3), (0, 1, 0), (1, 1, 1)),
    "dilation": ((1, 1, 1), (2, 0, 1), (2, 1, 1)),
}


@pytest.mark.on_cpu("oneDNN is the CPU's")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last_3d])
def test_the_same_numbers_as_torchs(shape, options, memory_format):
    torch.manual_seed(0)
    stride, padding, dilation = OPTIONS[options]
    arguments = (stride, padding, dilation, False, (0, 0, 0), 1)
    x = torch.randn(shape).to(memory_format=memory_format)
    weight, bias = torch.randn(4, shape[1], 3, 1, 2).to(memory_format=memory_format), torch.randn(4)
    exact = torch.convolution(x.double(), weight.double(), bias.double(), *arguments)
    with torch.no_grad():
        y = convolve_volume(x, weight, bias, *arguments)
    torch.testing.assert_close(y.double(), exact, rtol=1e-4, atol=1e-4)
    assert y.is_contiguous(memory_format=memory_format)  # also where torch's own kernel would forget it
    grad = torch.randn_like(y)
    for mask in ((True, True, True), (True, False, False), (False, True, False)):
        found = volume_backward(grad, x, weight, [4], *arguments, mask)
        wanted = convolution_backward(grad.double(), x.double(), weight.double(), [4], *arguments, mask)
        for needed, g, expected, like in zip(mask, found, wanted, (x, weight, bias), strict=True):
            if needed:
                torch.testing.assert_close(g.double(), expected, rtol=1e-4, atol=1e-3)
                assert g.shape == like.shape


@pytest.mark.on_cpu("oneDNN is the CPU's")
@on_ranks(2)
def test_shards_have_the_kernels_of_the_whole_volume():
    mesh = shared_mesh(2)
    torch.manual_seed(0)
    x = torch.randn(1, 16, 9, 144, 20)
    conv = nn.Conv3d(16, 4, 3)
    found = []
    for operand in (x, shard(x, mesh, [Shard(3)], {0: (70, 74)})):
        operand = operand.detach().requires_grad_()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            conv(operand).sum().backward()
        found.append({event.key for event in profiler.key_averages() if "slow_conv3d" in event.key})
    assert found == [set(), set()]


@pytest.mark.on_cpu("oneDNN is the CPU's")
@pytest.mark.parametrize("sizes", [(9, 9), (17, 1), (0, 18)])
@on_ranks(2)
def test_shards_of_small_volumes(sizes):
    torch.manual_seed(0)
    conv, x = nn.Conv3d(8, 4, 3, padding=1), torch.randn(1, 8, 5, 18, 300)
    assert_matches_unsharded(conv, x, placements=[Shard(3)], shard_sizes={0: sizes}, mesh_shape=2)
