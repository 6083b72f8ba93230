"""Small networks of the programs, and their data, of awkward sizes.

No weight has a gradient of zero, such as a bias before a norm: Adam would make a step of its rounding errors.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

IMAGES, TOKENS, POINTS = (3, 3, 13, 11), (3, 13, 8), (29, 3)


class UNet(nn.Module):
    """Two levels and a skip connection."""

    def __init__(self, channels: int = 3, out: int = 3, norm: bool = True) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, 6, 3, padding=1, bias=not norm)
        self.norm = nn.BatchNorm2d(6) if norm else nn.Identity()
        self.down = nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.inner = nn.GroupNorm(2, 8)
        self.up = nn.ConvTranspose2d(8, 6, 3, stride=2, padding=1)
        self.last = nn.Conv2d(12, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = nn.functional.gelu(self.norm(self.first(x)))
        deep = nn.functional.silu(self.inner(self.down(skip)))
        return self.last(torch.cat([skip, self.up(deep)], 1))


def classifier(classes: int = 4) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2, padding=1),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, classes),
    )


def transformer(layers: int = 1) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True, bias=False)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def mlp(inner: int = 12, given: int = 3, out: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(given, inner), nn.Tanh(), nn.Linear(inner, inner), nn.Tanh(), nn.Linear(inner, out))


def images(seed: int = 1, channels: int = 3) -> Tensor:
    return drawn(IMAGES[0], channels, *IMAGES[2:], seed=seed)


def tokens(seed: int = 1) -> Tensor:
    return drawn(*TOKENS, seed=seed)


def points(seed: int = 1) -> Tensor:
    return drawn(*POINTS, seed=seed)


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def classes(*shape: int, of: int = 3, seed: int = 2) -> Tensor:
    return torch.randint(0, of, shape, generator=torch.Generator().manual_seed(seed))
