"""A small U-Net in plain PyTorch. It takes images of any size, odd ones included, and knows nothing of shards."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ConvNormAct(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, kernel_size: int = 3, stride: int = 1):
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel_size, stride, padding=kernel_size // 2, bias=False),
            nn.GroupNorm(max(1, outputs // 4), outputs),
            nn.SiLU(),
        )


class Residual(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.body = ConvNormAct(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Up(nn.Module):
    """Bring the coarse features to the size of the fine ones, and merge the two."""

    def __init__(self, coarse: int, fine: int):
        super().__init__()
        self.narrow = ConvNormAct(coarse, fine, kernel_size=1)
        self.merge = ConvNormAct(2 * fine, fine)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = F.interpolate(self.narrow(x), size=skip.shape[-2:], mode="nearest")
        return self.merge(torch.cat([skip, x], dim=1))


class UNet(nn.Module):
    """One logit per pixel. Each of the `depth` levels halves the size and doubles the channels, of which there are
    `width` at full size."""

    def __init__(self, inputs: int = 3, width: int = 8, depth: int = 4):
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.stem = ConvNormAct(inputs, width)
        self.downs = nn.ModuleList(
            nn.Sequential(ConvNormAct(fine, coarse, stride=2), Residual(coarse))
            for fine, coarse in zip(widths, widths[1:])
        )
        self.ups = nn.ModuleList(Up(coarse, fine) for fine, coarse in zip(widths, widths[1:]))
        self.head = nn.Conv2d(width, 1, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for down in self.downs:
            features.append(down(features[-1]))
        x = self.lowest(features.pop())
        for up in reversed(self.ups):
            x = up(x, features.pop())
        return self.head(x)

    def lowest(self, x: Tensor) -> Tensor:
        """What happens to the coarsest features before the way up."""
        return x
