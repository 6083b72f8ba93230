"""The U-Net with neighborhood attention at its lowest level: every place looks at the 7 x 7 places around it, and at
every third one of a wider neighborhood. The attention is natten's module, unmodified.
"""

import torch
from model import UNet
from natten import NeighborhoodAttention2D
from torch import Tensor, nn

KERNEL, DILATIONS = 7, (1, 3)


class Block(nn.Module):
    """A transformer's block: attention, then a small network at every place, both added to what comes in."""

    def __init__(self, channels: int, dilation: int, attention: type[nn.Module]):
        super().__init__()
        self.attend = nn.Sequential(
            nn.LayerNorm(channels),
            attention(channels, num_heads=channels // 16, kernel_size=KERNEL, dilation=dilation),
        )
        self.think = nn.Sequential(
            nn.LayerNorm(channels), nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x)
        return x + self.think(x)


class AttentionUNet(UNet):
    """`attention` is natten's module, or one with the same weights that computes the same."""

    def __init__(self, inputs: int = 3, width: int = 8, depth: int = 4, attention: type[nn.Module] | None = None):
        super().__init__(inputs, width, depth)
        self.blocks = nn.Sequential(
            *(Block(width * 2**depth, dilation, attention or NeighborhoodAttention2D) for dilation in DILATIONS)
        )

    def lowest(self, x: Tensor) -> Tensor:
        return self.blocks(x.movedim(1, -1)).movedim(-1, 1)

    @staticmethod
    def least(depth: int = 4) -> int:
        """The smallest image that has a whole neighborhood at the lowest level."""
        return (KERNEL * max(DILATIONS) - 1) * 2**depth + 1


class PlainAttention(NeighborhoodAttention2D):
    """natten's module in plain PyTorch: one neighbor after the other, for one process on a CPU, where natten has no
    gradients and no float64."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(-3)
        rows, columns = (
            neighbors(size, kernel, dilation)
            for size, kernel, dilation in zip(x.shape[1:3], self.kernel_size, self.dilation)
        )
        pairs = [(i, j) for i in rows.T for j in columns.T]
        scores = torch.stack([(query * key[:, i][:, :, j]).sum(-1) for i, j in pairs], dim=-1)
        weights = (scores * self.scale).softmax(-1).unbind(-1)
        mixed = sum(weight[..., None] * value[:, i][:, :, j] for weight, (i, j) in zip(weights, pairs))
        return self.proj(mixed.flatten(-2))


def neighbors(size: int, kernel: int, dilation: int) -> Tensor:
    """The indices that each index of a dim attends to, (size, kernel): the nearest ones `dilation` apart."""
    index = torch.arange(size)
    group, place = index % dilation, index // dilation
    places = (size - group + dilation - 1) // dilation
    first = (place - kernel // 2).clamp(min=0).minimum(places - kernel)
    return group[:, None] + dilation * (first[:, None] + torch.arange(kernel))
