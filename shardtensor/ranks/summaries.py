"""A tensor's values in a few integers, from which ranks tell whether theirs are equal."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from ..layout.strides import as_bytes

_CHUNK = 1 << 20  # integers; what is computed on the way has their size
_SPREAD = 0x5851F42D4C957F2D  # odd, so that every bit of a number counts
_BYTES = 8
_SAMPLE = 1 << 16


def digest(tensor: Tensor) -> int:
    """64 bits that follow from a tensor's numbers, bit by bit: NaN equals itself, and 0.0 differs from -0.0.

    Computed where the tensor is; shape and dtype do not count.

    Example:
        >>> import torch
        >>> digest(torch.tensor([1.0, 2.0])) == digest(torch.tensor([2.0, 1.0]))
        False
    """
    with torch.no_grad():
        return int(_bits(_plain(tensor)))


def some_of(tensor: Tensor) -> Tensor:
    """At most some thousand numbers from all over a tensor."""
    some = tensor.detach()
    for d in reversed(range(some.ndim)):
        step = max(1, min(some.shape[d], -(-some.numel() // _SAMPLE)))
        some = some[(slice(None),) * d + (slice(None, None, step),)]
    return some


def digest_of_some(tensor: Tensor) -> int:
    """The digest of :func:`some_of` a tensor's numbers; 0 if they are all the same."""
    some = some_of(tensor)
    elements = as_bytes(_plain(some)).view(-1, some.element_size())
    return 0 if bool((elements == elements[:1]).all()) else digest(some) or 1


def summary(tensor: Tensor) -> Tensor:
    """The digest and, for :func:`differ`, what tells rounding from other differences: four integers.

    They are on the tensor's device, and nothing waits for them. Numbers that are repeated in memory count once.
    """
    with torch.no_grad():
        for d, (stride, n) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
            tensor = tensor.narrow(d, 0, 1) if stride == 0 and n > 1 else tensor
        tensor = _plain(tensor)
        return torch.cat([_bits(tensor).view(1), _projections(tensor)])


def differ(summaries: Sequence[Sequence[int]], tolerance: float) -> bool:
    """Whether the tensors with these summaries have other values, by more than rounding.

    Args:
        tolerance: the largest difference that is none, relative to the norm; 0: they have to be equal bit by bit.
    """
    first, *others = summaries
    return any(other[0] != first[0] and not _near(first[1:], other[1:], tolerance) for other in others)


def tolerance_of(dtype: torch.dtype) -> float:
    """By how much what ranks have computed alike may differ: kernels that are chosen by their speed round otherwise."""
    if not dtype.is_floating_point and not dtype.is_complex:
        return 0.0
    return 1e-3 if torch.finfo(dtype).bits >= 32 else 3e-2


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _bits(tensor: Tensor) -> Tensor:
    data = as_bytes(tensor)
    missing = -len(data) % _BYTES
    if missing or data.storage_offset() % _BYTES:
        data = torch.cat([data, data.new_zeros(missing)])
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for i, numbers in enumerate(torch.split(data.view(torch.int64), _CHUNK)):
        places = torch.arange(i * _CHUNK, i * _CHUNK + len(numbers), device=data.device)
        total += ((numbers ^ (numbers >> 29)) * (places * (2 * _SPREAD % 2**63) + _SPREAD)).sum()
    return total


def _projections(tensor: Tensor) -> Tensor:
    """Two sums of a sample of the numbers, with other factors each, and their squares' sum, as integers."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        return torch.zeros(3, dtype=torch.int64, device=tensor.device)
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)
    wide = torch.float32 if tensor.device.type == "mps" else torch.float64
    sample = flat[:: max(1, -(-len(flat) // _SAMPLE))].to(wide)
    places = torch.arange(len(sample), device=flat.device, dtype=wide)
    sums = [(sample * torch.cos(places * factor)).sum() for factor in (1.0, 1.7)]
    return torch.stack([*sums, (sample * sample).sum()]).float().view(torch.int32).to(torch.int64)


def _near(one: Sequence[int], other: Sequence[int], tolerance: float) -> bool:
    (a, b, squares), (c, d, more) = (struct.unpack("3f", struct.pack("3i", *numbers)) for numbers in (one, other))
    allowed = tolerance * math.sqrt(max(squares, more))
    return bool(tolerance and math.isfinite(allowed) and abs(a - c) <= allowed and abs(b - d) <= allowed)
