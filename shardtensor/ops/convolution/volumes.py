"""Convolution of a volume on the CPU, by oneDNN also where torch would take a slower kernel.

Of the float32 volumes of one sample, torch gives oneDNN those whose channels times the first two spatial dims are more
than 20,480, however long the last dim is. torch has a kernel of its own for the others, which takes 2 to 10 times as
long. Shards may be on this side of the limit while the whole volume is on the other: two ranks would take longer than
one. So the forward pass calls oneDNN. For the backward pass there is no such function: it gets the volume with its
longest dims first, if these are long enough for torch's rule. Tiny volumes, and kernels of one tap, are left to torch's
own kernel: oneDNN takes 30 us to begin.

Source: ``use_mkldnn`` in torch's aten/src/ATen/native/Convolution.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._compat import is_traced, kernel

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # of input, weight and bias

_LIMIT = 20480  # torch's
_TINY = 40_000  # inputs times taps; with so many torch's kernel takes as long as oneDNN's, 30 us on one core
_ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
convolution_backward = kernel(torch.ops.aten.convolution_backward.default)


def convolve_volume(read: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    """``torch.convolution`` of volumes."""
    if torch.is_grad_enabled() or not _is_small_volume(read, weight, arguments):
        return torch.convolution(read, weight, bias, *arguments)
    stride, padding, dilation, _, _, groups = arguments
    return torch.mkldnn_convolution(read, weight, bias, padding, stride, dilation, groups)


def volume_backward(
    grad: Tensor, read: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None, *arguments: Any
) -> Gradients:
    """``torch.ops.aten.convolution_backward`` of volumes."""
    if _is_small_volume(read, weight, arguments):
        order = sorted((2, 3, 4), key=lambda d: read.shape[d], reverse=True)
        if read.shape[1] * read.shape[order[0]] * read.shape[order[1]] > _LIMIT:
            return _with_dims_in_order(order, grad, read, weight, bias_sizes, *arguments)
    found: Gradients = convolution_backward(grad, read, weight, bias_sizes, *arguments)
    return found


def _is_small_volume(read: Tensor, weight: Tensor, arguments: Sequence[Any]) -> bool:
    """Whether torch does not take oneDNN because of the volume's size, and would be faster with it."""
    if read.dtype != torch.float32 or not read.is_cpu or not _ONEDNN or is_traced(read):
        return False
    n, channels, depth, height, width = read.shape
    transposed, groups = arguments[3], arguments[5]
    if n != 1 or groups != 1 or transposed or channels * depth * height > _LIMIT:
        return False
    taps = weight.shape[2:].numel()
    # Of those that are channels-last torch's kernel would forget it.
    return not read.is_contiguous() or (taps > 1 and channels * depth * height * width * taps > _TINY)


def _with_dims_in_order(
    order: Sequence[int],
    grad: Tensor,
    read: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> Gradients:
    """The backward pass with the spatial dims in this order; the gradients lie in memory as the operands do."""
    dims = [0, 1, *order]
    lists = [[values[d - 2] for d in order] for values in (stride, padding, dilation, output_padding)]
    operands = [t.permute(dims) for t in (grad, read, weight)]
    found = convolution_backward(*operands, bias_sizes, *lists[:3], transposed, lists[3], groups, mask)
    back = [dims.index(d) for d in range(5)]
    of_read, of_weight = (
        None if g is None else torch.empty_like(like).copy_(g.permute(back))
        for g, like in zip(found[:2], (read, weight), strict=True)
    )
    return of_read, of_weight, found[2]
