"""Strides of tensors that are described before they exist, row-major or channels-last, and what torch asks of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._compat import recomputed, same_memory

# The memory formats with the channels innermost, by number of dims.
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides."""
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * max(1, shape[d + 1])  # as torch counts dims of size 0
    return tuple(strides)


def dense_stride(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides of dims that lie in memory without gaps, in the order in which those with the strides ``like`` do."""
    strides, step = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (like[d], -d)):
        strides[d] = step
        step *= max(1, shape[d])
    return tuple(strides)


def lies_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether dims with these strides lie in memory without gaps, and without sharing any of it."""
    dense = dense_stride(shape, stride)
    return 0 in shape or all(n == 1 or a == b for n, a, b in zip(shape, stride, dense, strict=True))


def stride_like(like: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor of another shape: channels-last where this one is, row-major otherwise."""
    if like.ndim in CHANNELS_LAST and _is_channels_last(like):
        inner = contiguous_stride([shape[0], *shape[2:], shape[1]])
        return (inner[0], inner[-1], *inner[1:-1])
    return contiguous_stride(shape)


def _is_channels_last(t: Tensor) -> bool:
    """Whether torch gives results of this format: by the order of strides, also those of dims of length 1.

    Unlike torch's, it holds for tensors without elements too: a shard says the same of the global tensor on every rank,
    as a slice of that has its strides. New ones in this format have strides of 0, which others do not have.
    """
    least, empty = 0, not t.numel()
    for d in (1, *range(t.ndim - 1, 1, -1), 0):
        stride = t.stride(d)
        if (d == 1 and stride == 0) or (d == 0 and least == t.stride(1)):
            return False
        if stride < least and not (empty and stride == 0):
            return False
        least = stride * (max(1, t.shape[d]) if d == 1 else t.shape[d])
    return True


def is_dense(t: Tensor) -> bool:
    """Whether its first and its last element in memory are as far apart as its number of elements says.

    Example:
        >>> x = torch.ones(4, 3)
        >>> is_dense(x.t()), is_dense(x[:, :2]), is_dense(x[:1].expand(4, 3))
        (True, False, False)
    """
    n, last = t.numel(), 0
    for length, stride in zip(t.shape, t.stride(), strict=True):
        last += (length - 1) * stride
    return n == 0 or last == n - 1


def apart(result: Any, operands: Iterable[Any]) -> Any:
    """An operator's result in memory of its own, as torch returns it: what is written to it is written to nothing else.

    It is copied where it shares its memory with an operand, or where elements of it share theirs.

    Args:
        result: a tensor, or a tuple of them.
        operands: tensors, and lists of them; what is neither is left out.

    Example:
        >>> x = torch.ones(4, 3)
        >>> apart(x[1:], [x, None]).is_set_to(x[1:]), apart(x[:1].expand(4, 3), []).stride()
        (False, (3, 1))
    """
    if type(result) is tuple:
        return tuple([apart(r, operands) for r in result])
    shares = 0 in result.stride() and not is_dense(result)
    for t in operands:  # a loop, as a generator would take longer than what it looks at
        if isinstance(t, Tensor):
            shares = shares or same_memory(t, result)
        elif type(t) is list:
            shares = shares or any(isinstance(item, Tensor) and same_memory(item, result) for item in t)
    return result.clone() if shares else result


@recomputed()
def cat_like(pieces: list[Tensor], dim: int, like: Tensor, shape: Sequence[int]) -> Tensor:
    """``torch.cat(pieces, dim)``, which has this shape, channels-last where ``like`` is and row-major otherwise."""
    if like.ndim not in CHANNELS_LAST or not _is_channels_last(like):
        return torch.cat(pieces, dim)
    stride = stride_like(like, shape)
    if stride == contiguous_stride(shape):
        return torch.cat(pieces, dim)
    out = torch.empty_strided(shape, stride, dtype=pieces[0].dtype, device=pieces[0].device)
    return torch.cat(pieces, dim, out=out)


@recomputed()
def zeros_like(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros of this shape, channels-last where ``like`` is and row-major otherwise."""
    return torch.empty_strided(shape, stride_like(like, shape), dtype=like.dtype, device=like.device).zero_()


@recomputed()
def with_stride(t: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The tensor, copied to memory with these strides if it has others."""
    if t.stride() == stride:
        return t
    return torch.empty_strided(t.shape, stride, dtype=t.dtype, device=t.device).copy_(t)


def index_select_like(t: Tensor, dim: int, index: Tensor) -> Tensor:
    """``t.index_select(dim, index)``, channels-last where ``t`` is, as is its gradient. Differentiable."""
    if t.ndim not in CHANNELS_LAST or not _is_channels_last(t):
        return t.index_select(dim, index)
    inner = t.ndim - 1 if dim == 1 else dim - (dim > 1)
    return t.movedim(1, -1).index_select(inner, index).movedim(-1, 1)


def as_bytes(tensor: Tensor) -> Tensor:
    """The numbers of a tensor as bytes, in row-major order and one dim; the same memory if they lie there like that."""
    flat = tensor.contiguous().view(-1)
    # A single number may have any stride, but torch views it as bytes only if it has stride 1.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)
