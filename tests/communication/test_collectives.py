"""How many collectives a training step of a whole network takes: more would cost time on every step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from shardtensor.testing import count_communication, run_distributed, shard, shared_mesh

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "globe"))

HALVES = 2


def unet() -> tuple[nn.Module, torch.Tensor, int]:
    from model import UNet  # examples/globe

    return UNet(), torch.randn(1, 3, 32, 64), 2


def convolutions_3d() -> tuple[nn.Module, torch.Tensor, int]:
    layers = [layer for _ in range(3) for layer in (nn.Conv3d(4, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(1, 4, 8, 4, 4), 2


def patches() -> tuple[nn.Module, torch.Tensor, int]:
    return nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.GELU(), nn.Conv2d(8, 8, 1)), torch.randn(1, 3, 32, 32), 2


def perceptron() -> tuple[nn.Module, torch.Tensor, int]:
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.GELU()))), torch.randn(8, 16), 0


def encoder() -> tuple[nn.Module, torch.Tensor, int]:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(1, 32, 32), 1


# Forward and backward: collectives, and messages of rank 0.
EXPECTED = {
    # A halo for each of 13 convolutions larger than 1 x 1; the first one's input needs no gradient. A gather and a sum
    # for each of 17 norms, the sum with those of its parameters. All convolutions' weights in two buckets. Rank 0 has
    # no halo at the 4 convolutions of stride 2. On devices buckets are larger: there is one.
    unet: (({"all_to_all": 13, "all_gather": 17}, 13), ({"all_to_all": 12, "all_reduce": 17 + 2}, 8)),
    convolutions_3d: (({"all_to_all": 3, "all_gather": 3}, 3), ({"all_to_all": 2, "all_reduce": 3 + 1}, 2)),
    # Only weights.
    patches: (({}, 0), ({"all_reduce": 1}, 0)),
    perceptron: (({}, 0), ({"all_reduce": 1}, 0)),
    # Keys and values of each layer in one exchange, and their gradients in another.
    encoder: (({"all_to_all": 2}, 2), ({"all_to_all": 2, "all_reduce": 1}, 2)),
}


def counts(make) -> list[tuple[dict[str, int], int]]:
    torch.manual_seed(0)
    model, whole, dim = make()
    x = shard(whole, shared_mesh(HALVES), [Shard(dim)], {0: (whole.shape[dim] // HALVES,) * HALVES})
    model(x).square().mean().backward()  # makes the plans
    model.zero_grad()
    with count_communication() as forward:
        loss = model(x).square().mean()
    with count_communication() as backward:
        loss.backward()
    return [(dict(counted.collectives), counted.messages) for counted in (forward, backward)]


@pytest.mark.parametrize("make", EXPECTED, ids=lambda make: make.__name__)
def test_collectives_of_a_step(make, device_of_ranks):
    forward, (backward, messages) = EXPECTED[make]
    if device_of_ranks != "cpu" and make is unet:
        backward = {**backward, "all_reduce": 17 + 1}
    assert tuple(run_distributed(counts, HALVES, make)[0]) == (forward, (backward, messages))
