"""TorchScript: what is scripted, or traced on plain tensors, called with shards; and what cannot be traced."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from alike import raises_alike
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from shardtensor import UnsupportedSharding
from shardtensor.testing import assert_matches_unsharded, run_distributed, shard, shared_mesh

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
IMAGE = (1, 3, 8, 6)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(self.linear(F.gelu(self.conv(x))) + x.mean(), 2)


def check(sizes):
    torch.manual_seed(0)
    x = torch.randn(IMAGE, dtype=torch.float64)
    network = Network().double().requires_grad_(False)
    for made in (torch.jit.trace(network, x), torch.jit.script(network)):
        options = {"placements": [Shard(2)], "shard_sizes": {0: sizes}}
        assert_matches_unsharded(lambda t, made=made: made(t), x, mesh_shape=len(sizes), **options)


@pytest.mark.parametrize("sizes", [(5, 3), pytest.param((7, 0, 1), marks=pytest.mark.slow)])
def test_scripted_and_traced_modules_take_shards(sizes):
    run_distributed(check, len(sizes), sizes)


def layers():
    """Whose gradients torch computes by operators of their own."""
    resampled = nn.Upsample(scale_factor=2.0, mode="bilinear"), nn.LayerNorm(12), nn.AdaptiveAvgPool2d((4, 2))
    convolved = nn.Conv2d(3, 4, 3, padding=1), nn.ConvTranspose2d(4, 4, 3, padding=1)
    return nn.Sequential(*convolved, nn.BatchNorm2d(4), *resampled)


@pytest.mark.parametrize("make", [layers, pytest.param(Network, marks=pytest.mark.slow)])
@on_ranks(2)
def test_traced_modules_learn(make):
    torch.manual_seed(0)
    x, network = torch.randn(IMAGE, dtype=torch.float64), make().double()
    sharded = shard(x, shared_mesh(2), [Shard(2)], {0: (5, 3)})
    traced = torch.jit.trace(copy.deepcopy(network), x)
    for made, t in ((network, x), (traced, sharded)):
        optimizer = torch.optim.AdamW(made.parameters(), foreach=False)
        for _ in range(3):
            optimizer.zero_grad()
            made(t).square().sum().backward()
            optimizer.step()
    for w, expected in zip(traced.parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(w, expected)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def operand():
    return shard(torch.rand(IMAGE), shared_mesh(2), [Shard(2)], {0: (5, 3)})


CALLED = r"rrelu_with_noise.*: .*\[5, 3\].*call the module that was scripted or traced instead"
RECORDED = r"{}: torch.jit.trace would record .*\[5, 3\].*trace the module on plain tensors"
ERRORS = {
    "traced": (
        lambda x: torch.jit.trace(nn.RReLU(), torch.rand(IMAGE), check_trace=False)(x),
        UnsupportedSharding,
        CALLED,
    ),
    "scripted": (lambda x: torch.jit.script(nn.RReLU())(x), UnsupportedSharding, CALLED),
    "tracing a module": (
        lambda x: torch.jit.trace(nn.Linear(6, 5), x),
        UnsupportedSharding,
        RECORDED.format("linear"),
    ),
    "tracing a product": (lambda x: torch.jit.trace(Scale(), x), UnsupportedSharding, RECORDED.format("mul")),
}


@pytest.mark.parametrize("name", ERRORS)
def test_refusals_say_what_to_do_on_every_rank(name):
    raises_alike(operand, name, silent=False)  # which is counted by a mode, under which nothing is traced
