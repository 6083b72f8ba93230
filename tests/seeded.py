"""Random numbers that are the same on all ranks and in the parent, on the device that is torch's default."""

from __future__ import annotations

import torch


def seeded(seed: int) -> torch.Generator:
    """A generator for ``generator=``."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)
