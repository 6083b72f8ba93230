"""How the tensors of a sample lie in memory: as torch made them, or in one of the ways that programs have."""

from __future__ import annotations

import copy
import types
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

# Whole samples in other memory. Behind the comma: operands of more than 3 dims have length 1 along that dim.
MEMORY = (
    "channels last",
    "channels last, batch 1",
    "channels last, channels 1",
    "channels last, rows 1",
    "permuted",
    "permuted, batch 1",
    "expanded",
    "sliced",
)
_SHORT = {"batch 1": 0, "channels 1": 1, "rows 1": 2}


def laid_out(t: Any, memory: str | None) -> Any:
    """The same values in this memory; ``t`` itself where it cannot lie so.

    Expanded: dim 0 repeats its first index. (Vectors do not: they may be buffers, which are written.)
    """
    kind = (memory or "").split(",")[0]
    if not isinstance(t, torch.Tensor) or t.layout != torch.strided or not t.ndim:
        return t
    with torch.no_grad():
        made = _made(t.detach(), kind)
    return t if made is None else made.requires_grad_(t.requires_grad)


def _made(t: torch.Tensor, kind: str) -> torch.Tensor | None:
    if kind == "channels last" and t.ndim in CHANNELS_LAST:
        order = (0, *range(2, t.ndim), 1)
        inverse = (0, t.ndim - 1, *range(1, t.ndim - 1))
        return t.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse)
    if kind == "permuted" and t.ndim > 1:
        order = tuple(reversed(range(t.ndim)))
        return t.permute(order).clone(memory_format=torch.contiguous_format).permute(order)
    if kind == "expanded" and t.ndim > 1 and t.shape[0] > 1:
        return t[:1].clone().expand(t.shape)
    if kind == "sliced":
        wide = t.new_zeros((*t.shape[:-1], 2 * t.shape[-1] + 1))
        wide[..., 1::2] = t
        return wide[..., 1::2]
    return None


def _is_long(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.layout == torch.strided and t.ndim > 3


def _shortened(t: Any, dim: int | None) -> Any:
    if dim is None or not isinstance(t, torch.Tensor) or t.layout != torch.strided:
        return t
    return t.detach().narrow(dim, 0, min(1, t.shape[dim])).requires_grad_(t.requires_grad)


def in_memory(sample: Any, memory: str) -> Any | None:
    """A sample with its tensors in this memory; None where no first operand can lie so."""
    dim = _SHORT.get(memory.partition(", ")[2])
    lengths = {t.shape[dim] for t in tree_leaves(sample.input) if _is_long(t)} if dim is not None else set()

    def first(t: Any) -> Any:
        return laid_out(_shortened(t, dim), memory) if _is_long(t) or dim is None else t

    def other(t: Any) -> Any:
        # What goes with the operand's entries along the dim.
        fits = dim is not None and isinstance(t, torch.Tensor) and t.ndim > dim and t.shape[dim] in lengths
        return laid_out(_shortened(t, dim) if fits else t, memory)

    made = tree_map(first, sample.input)
    if all(a is b for a, b in zip(tree_leaves(made), tree_leaves(sample.input))):
        return None
    return types.SimpleNamespace(input=made, args=tree_map(other, sample.args), kwargs=tree_map(other, sample.kwargs))


def copied(value: Any) -> Any:
    """The same tensors again, as leaves of their own, in the same memory."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout != torch.strided:
        return value.detach().clone().requires_grad_(value.requires_grad)
    return copy.deepcopy(value.detach()).requires_grad_(value.requires_grad)


def row_major(value: Any) -> Any:
    """The same numbers in row-major memory."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return value
    return value.detach().clone(memory_format=torch.contiguous_format).requires_grad_(value.requires_grad)


def has_channels_last(t: torch.Tensor) -> bool:
    """Whether a tensor is channels-last and nothing else."""
    fmt = CHANNELS_LAST.get(t.ndim)
    return fmt is not None and t.numel() > 0 and t.is_contiguous(memory_format=fmt) and not t.is_contiguous()


# What torch calls row-major on meta tensors, as it is on other devices.
_BY_DEVICE = (
    "nn.functional.channel_shuffle",
    "nn.functional.pad.reflect",
    "nn.functional.pad.replicate",
    "nn.functional.pixel_shuffle",
    "nn.functional.pixel_unshuffle",
    "roll",
)


def another_format(name: str, got: torch.Tensor, local: torch.Tensor, expected: torch.Tensor) -> str | None:
    """In words, how a channels-last result is not so on shards; None where it is, or is not meant to be."""
    if not has_channels_last(expected):
        return None
    fmt = CHANNELS_LAST[expected.ndim]
    if not name.startswith(_BY_DEVICE) and not got.is_contiguous(memory_format=fmt):
        return f"has global strides {got.stride()}, on one device {expected.stride()}"
    if local.numel() and not local.is_contiguous(memory_format=fmt):
        return f"has a shard {tuple(local.shape)} of strides {local.stride()}, on one device {expected.stride()}"
    return None
