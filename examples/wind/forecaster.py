"""The network: ordinary PyTorch, which knows nothing of ranks."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def pad(x: Tensor, n: int) -> Tensor:
    """A globe has no edge in the east or west; beyond the poles the last row is repeated."""
    return F.pad(F.pad(x, (n, n, 0, 0), mode="circular"), (0, 0, n, n), mode="replicate")


def places(x: Tensor) -> Tensor:
    """Where the cells of fields (N, C, latitudes, longitudes) are: (N, 4, latitudes, longitudes)."""
    options = {"dtype": x.dtype, "device": x.device}
    latitude = torch.linspace(math.pi / 2, -math.pi / 2, x.shape[2], **options)[:, None].expand(x.shape[2:])
    longitude = torch.linspace(0, 2 * math.pi, x.shape[3] + 1, **options)[:-1].expand(x.shape[2:])
    each = torch.stack([latitude.sin(), latitude.cos(), longitude.sin(), longitude.cos()])
    return each.expand(x.shape[0], -1, -1, -1)


class Block(nn.Module):
    """Reads cells at a distance of up to 2 x `dilation`, and adds to what it is given."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.norm = nn.GroupNorm(4, width)
        self.first = nn.Conv2d(width, width, 3, dilation=dilation)
        self.second = nn.Conv2d(width, width, 3, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.first(pad(self.norm(x), self.dilation)))
        return x + self.second(pad(y, self.dilation))


def seasons(x: Tensor, month: Tensor) -> Tensor:
    """The time of the year for fields (N, C, ...) of months 0 to 11, (N,): (N, 2, latitudes, longitudes)."""
    angle = month.to(x.device, x.dtype) * (2 * math.pi / 12)
    return torch.stack([angle.sin(), angle.cos()], 1)[:, :, None, None].expand(-1, -1, *x.shape[2:])


class Forecast(nn.Module):
    """The next month's fields (N, fields, latitudes, longitudes) of this month's, and of its number, 0 to 11, (N,)."""

    def __init__(self, fields: int, width: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(fields + 6, width, 1)
        self.blocks = nn.Sequential(*(Block(width, dilation) for dilation in (1, 2, 4)))
        self.leave = nn.Conv2d(width, fields, 1)
        nn.init.zeros_(self.leave.weight)  # so it starts from the forecast that nothing changes
        nn.init.zeros_(self.leave.bias)

    def forward(self, x: Tensor, month: Tensor) -> Tensor:
        return x + self.leave(self.blocks(self.enter(torch.cat([x, places(x), seasons(x, month)], 1))))
