"""What a preview says of networks of other packages is what they communicate on two ranks."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import shardtensor
from networks.oracle import Network, built
from shardtensor import caches
from shardtensor.testing import count_communication, run_distributed, shard, shared_mesh

LISTED = {
    "MONAI's U-Net": ("test_monai", "UNet"),
    "AutoencoderKL": ("test_autoencoders", "AutoencoderKL"),
    "Swinv2": ("test_transformers", "Swinv2"),
}


class Called(nn.Module):
    """A network, called as its entry says."""

    def __init__(self, network: Network, model: nn.Module):
        super().__init__()
        self.model, self.call = model, network.call

    def forward(self, x):
        return self.call(self.model, x)


def attention():
    """The globe's U-Net with natten's neighborhood attention, which torch does not dispatch."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "globe"))
    from attention import AttentionUNet

    torch.manual_seed(0)
    return AttentionUNet(width=4, depth=2).double(), torch.randn(1, 3, 96, 88, dtype=torch.float64), 2


class Vit(nn.Module):
    """transformers' ViT, in training."""

    def __init__(self):
        super().__init__()
        import transformers

        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        self.model = transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=32, patch_size=4))

    def forward(self, x):
        return self.model(x).last_hidden_state


def made(name):
    """The network, its input, and the dim to shard."""
    if name == "natten":
        return attention()
    if name == "ViT":
        return Vit(), torch.randn(2, 3, 32, 32), 2
    listed = importlib.import_module(f"networks.{LISTED[name][0]}")
    network = listed.NETWORKS[LISTED[name][1]]
    model = built(network.make, importlib.import_module(listed.PACKAGE), network.dtype, network.norms_train)
    return Called(network, model), torch.randn(network.shape, dtype=network.dtype), network.dim


def sizes_of(length):
    return length * 5 // 8, length - length * 5 // 8


def count(name):
    caches.forget()
    model, x, dim = made(name)
    x = shard(x, shared_mesh(2), [Shard(dim)], {0: sizes_of(x.shape[dim])}, requires_grad=True)
    with count_communication() as forward:
        y = model(x)
    with count_communication() as backward:
        torch.autograd.backward([y], [torch.ones_like(y)])
    return forward, backward


def check(name):
    model, x, dim = made(name)
    options = {"mesh": 2, "shard": dim, "shard_sizes": {0: sizes_of(x.shape[dim])}, "backward": True}
    found = shardtensor.explain(model, x.requires_grad_(), **options)
    assert not found.refused and not found.stopped
    counted = [tuple(found.communication(rank, phase) for phase in ("forward", "backward")) for rank in (0, 1)]
    assert counted == run_distributed(count, 2, name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, package",
    [("MONAI's U-Net", "monai"), ("AutoencoderKL", "diffusers"), ("Swinv2", "transformers"), ("ViT", "transformers")],
)
def test_counts_are_those_of_a_real_run(name, package):
    pytest.importorskip(package)
    check(name)


@pytest.mark.slow
def test_neighborhood_attention_is_a_layer_of_its_own():
    pytest.importorskip("natten")
    layers = [layer for layer in check("natten").layers if layer.module == "NeighborhoodAttention2D"]
    attending = [layer for layer in layers if "neighborhood" in layer.operator]
    assert len(attending) == 2 and all(layer.shares[0].forward.messages for layer in attending)
