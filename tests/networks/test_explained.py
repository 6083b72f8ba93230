"""What a preview says of networks of other packages is what they communicate."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import shardtensor
from networks.oracle import Called, built
from shardtensor.layout import caches
from shardtensor.testing import count_communication, run_distributed, shard, shared_mesh

LISTED = {
    "MONAI's U-Net": ("test_monai", "UNet"),
    "AutoencoderKL": ("test_autoencoders", "AutoencoderKL"),
    "Swinv2": ("test_transformers", "Swinv2"),
}


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


class Block(nn.Module):
    """A residual block with batch norms, whose statistics training updates."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(2))
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        y = self.norms[0](self.first(x)).relu()
        return (self.norms[1](self.second(y)) + self.shortcut(x)).relu()


def resnet():
    torch.manual_seed(0)
    stem = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    model = nn.Sequential(*stem, Block(8, 8, 1), Block(8, 16, 2), Block(16, 32, 2), *head)
    return model, torch.randn(2, 3, 64, 48), 2


class Fourier(nn.Module):
    """A layer of a Fourier neural operator: products of the lowest frequencies next to a convolution."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lift, self.skip, self.project = nn.Conv2d(2, 6, 1), nn.Conv2d(6, 6, 1), nn.Conv2d(6, 1, 1)
        self.weight = nn.Parameter(0.1 * torch.randn(6, 6, 5, 4, dtype=torch.cfloat))

    def forward(self, x):
        x = self.lift(x)
        low = torch.einsum("bixy,ioxy->boxy", torch.fft.rfft2(x)[:, :, :5, :4], self.weight)
        return self.project((torch.fft.irfft2(low, s=x.shape[-2:]) + self.skip(x)).sigmoid())


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 40, 32), 1


def dynunet():
    from monai.networks.nets import DynUNet

    torch.manual_seed(0)
    model = DynUNet(3, 1, 2, [3] * 3, [1, 2, 2], [2, 2], filters=[4, 8, 16], res_block=True)
    return model, torch.randn(1, 1, 24, 16, 16), 2


class Denoiser(nn.Module):
    """diffusers' UNet2DModel, at one time step."""

    def __init__(self):
        super().__init__()
        from diffusers import UNet2DModel

        torch.manual_seed(0)
        down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
        sizes = {"block_out_channels": (16, 32), "norm_num_groups": 8, "layers_per_block": 1, "attention_head_dim": 8}
        self.model = UNet2DModel(sample_size=32, down_block_types=down, up_block_types=up, **sizes)

    def forward(self, x):
        return self.model(x, 10).sample


OWN = {
    "ResNet": resnet,
    "Fourier operator": lambda: (Fourier(), torch.randn(2, 2, 24, 20), 2),
    "TransformerEncoder": encoder,
    "DynUNet": dynunet,
    "UNet2DModel": lambda: (Denoiser(), torch.randn(1, 3, 32, 24), 2),
}


def made(name):
    """The network, its input, and the dim to shard."""
    if name in OWN:
        return OWN[name]()
    if name == "natten":
        return attention()
    if name == "ViT":
        return Vit(), torch.randn(2, 3, 32, 32), 2
    listed = importlib.import_module(f"networks.{LISTED[name][0]}")
    network = listed.NETWORKS[LISTED[name][1]]
    model = built(network.make, importlib.import_module(listed.PACKAGE), network.dtype, network.norms_train)
    return Called(network, model), torch.randn(network.shape, dtype=network.dtype), network.dim


def sizes_of(length, ranks):
    """Uneven ones; of three the second is the shortest."""
    if ranks == 2:
        return length * 5 // 8, length - length * 5 // 8
    return length // 2, length // 8, length - length // 2 - length // 8


def count(name, ranks):
    caches.forget()
    model, x, dim = made(name)
    x = shard(x, shared_mesh(ranks), [Shard(dim)], {0: sizes_of(x.shape[dim], ranks)}, requires_grad=True)
    with count_communication() as forward:
        y = model(x)
    with count_communication() as backward:
        torch.autograd.backward([y], [torch.ones_like(y)])
    return forward, backward


def check(name, ranks=2):
    model, x, dim = made(name)
    options = {"mesh": ranks, "shard": dim, "shard_sizes": {0: sizes_of(x.shape[dim], ranks)}, "backward": True}
    found = shardtensor.explain(model, x.requires_grad_(), **options)
    assert not found.refused and not found.stopped
    counted = [tuple(found.communication(rank, phase) for phase in ("forward", "backward")) for rank in range(ranks)]
    assert counted == run_distributed(count, ranks, name, ranks)
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
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "name, package",
    [
        ("ResNet", "torch"),
        ("Fourier operator", "torch"),
        ("TransformerEncoder", "torch"),
        ("DynUNet", "monai"),
        ("UNet2DModel", "diffusers"),
    ],
)
def test_counts_on_two_and_three_ranks(name, package, ranks):
    pytest.importorskip(package)
    check(name, ranks)


@pytest.mark.slow
def test_neighborhood_attention_is_a_layer_of_its_own():
    pytest.importorskip("natten")
    layers = [layer for layer in check("natten").layers if layer.module == "NeighborhoodAttention2D"]
    attending = [layer for layer in layers if "neighborhood" in layer.operator]
    assert len(attending) == 2 and all(layer.shares[0].forward.messages for layer in attending)
