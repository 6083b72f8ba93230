"""The networks whose training steps are timed: other packages', unmodified, and two small ones.

diffusers and transformers come with ``.[test]``, MONAI with ``.[bench]``; natten is installed by ``make bench``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "globe"))


@dataclass(frozen=True)
class Network:
    """One network, and how its step is to compare.

    Attributes:
        make: imports its package, and makes the module.
        shape, dim: of the input, and which dim is sharded.
        bar: two ranks' time relative to half the input's.
        faster: how many times as fast as one process two ranks are to be; for an input of twice the size 1.8.
        call: the result for an input.
        alone: whether half the input, and all of it on one process, are ShardTensors on a mesh of one rank: natten has
            no gradients for plain tensors on the CPU.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dim: int
    bar: float | None = 1.25
    faster: float | None = 1.6
    call: Callable[[nn.Module, Tensor], Tensor] = lambda network, x: network(x)
    alone: bool = False

    @property
    def twice(self) -> tuple[int, ...]:
        """The shape of an input of twice the size."""
        return tuple(n * 2 if dim == self.dim else n for dim, n in enumerate(self.shape))

    @property
    def half(self) -> tuple[int, ...]:
        return tuple(n // 2 if dim == self.dim else n for dim, n in enumerate(self.shape))


def globe(width: int = 8) -> nn.Module:
    from model import UNet  # examples/globe

    return UNet(width=width)


def unet_3d() -> nn.Module:
    from monai.networks.nets import UNet

    # Four images of a scan. At this size both the whole input and half of it use the same kernels: torch does not give
    # 3-D convolutions of fewer than 20,480 channels times rows times columns to oneDNN.
    return UNet(3, 4, 3, channels=(16, 32, 64), strides=(2, 2), num_res_units=2)


def autoencoder(*channels: int) -> nn.Module:
    from diffusers import AutoencoderKL

    blocks = {"block_out_channels": channels, "layers_per_block": 2, "norm_num_groups": 8}
    down, up = ("DownEncoderBlock2D",) * len(channels), ("UpDecoderBlock2D",) * len(channels)
    return AutoencoderKL(latent_channels=4, **blocks, down_block_types=down, up_block_types=up)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTModel

    size = {"hidden_size": 192, "intermediate_size": 768, "num_attention_heads": 3, "num_hidden_layers": 4}
    config = ViTConfig(image_size=384, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **size)
    return ViTModel(config, add_pooling_layer=False)


def segformer() -> nn.Module:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout_prob": 0.0}
    config = SegformerConfig(num_labels=4, drop_path_rate=0.0, **dropout)
    network: nn.Module = SegformerForSemanticSegmentation(config)
    return network


def neighborhood() -> nn.Module:
    from natten import NeighborhoodAttention2D

    class Block(nn.Module):
        def __init__(self, channels: int, dilation: int) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(channels), nn.LayerNorm(channels)
            self.attend = NeighborhoodAttention2D(channels, num_heads=2, kernel_size=7, dilation=dilation)
            self.wide, self.narrow = nn.Linear(channels, 2 * channels), nn.Linear(2 * channels, channels)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attend(self.first(x))
            return x + self.narrow(F.gelu(self.wide(self.second(x))))

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Conv2d(3, 64, 4, 4)
            self.blocks = nn.Sequential(*(Block(64, dilation) for dilation in (1, 2, 1, 2)))

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks(self.embed(x).movedim(1, -1))

    return Network()


class SpectralConv(nn.Module):
    """Multiplies the lowest frequencies by weights, and drops the others."""

    def __init__(self, channels: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(channels, channels, 2 * modes, modes, 2) / channels)

    def forward(self, x: Tensor) -> Tensor:
        found, m = torch.fft.rfft2(x), self.modes
        lowest = torch.cat([found[:, :, :m, :m], found[:, :, -m:, :m]], 2)
        product = torch.einsum("bixy,ioxy->boxy", lowest, torch.view_as_complex(self.weight))
        result = torch.zeros_like(found)
        result[:, :, :m, :m] = product[:, :, :m]
        result[:, :, -m:, :m] = product[:, :, m:]
        return torch.fft.irfft2(result, s=x.shape[-2:])


class FourierOperator(nn.Module):
    """A Fourier neural operator: spectral convolutions next to pointwise ones."""

    def __init__(self, channels: int = 24, modes: int = 12, depth: int = 4) -> None:
        super().__init__()
        self.lift, self.project = nn.Conv2d(3, channels, 1), nn.Conv2d(channels, 1, 1)
        self.spectral = nn.ModuleList(SpectralConv(channels, modes) for _ in range(depth))
        self.pointwise = nn.ModuleList(nn.Conv2d(channels, channels, 1) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for spectral, pointwise in zip(self.spectral, self.pointwise):
            x = F.gelu(spectral(x) + pointwise(x))
        return self.project(x)


def decoded(network: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = network.decode(x).sample
    return result


# The last two have no bars for their times.
NETWORKS = {
    "globe U-Net": Network(globe, (1, 3, 384, 768), 2),
    "3-D U-Net (MONAI)": Network(unet_3d, (1, 4, 192, 128, 32), 2),
    "AutoencoderKL decoder": Network(lambda: autoencoder(32, 64), (1, 4, 64, 64), 2, call=decoded),
    "ViT": Network(
        vit, (1, 3, 384, 384), 2, 1.5, call=lambda m, x: m(x, interpolate_pos_encoding=True).last_hidden_state
    ),
    "SegFormer": Network(segformer, (1, 3, 512, 512), 2, call=lambda m, x: m(x).logits),
    "neighborhood attention": Network(neighborhood, (1, 3, 256, 256), 2, None, None, alone=True),
    "Fourier operator": Network(FourierOperator, (1, 3, 256, 256), 2, None, None),
}


def step(network: Network, model: nn.Module, x: Tensor) -> Tensor:
    """A training step without an optimizer."""
    model.zero_grad()
    loss = network.call(model, x).square().mean()
    loss.backward()
    return loss.detach()
