"""Transposed convolution over sharded spatial dims.

Output ``o`` sums the inputs ``i`` with ``o = i * stride - padding + t * dilation`` for some tap ``t``. A rank borrows
the inputs that reach its outputs, runs the kernel of torch on them without padding, and crops what lies outside. An
output belongs to the rank that owns the input in the middle of those that reach it: a kernel as long as its stride
doubles (or triples ...) the size of every shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...geometry import Interval, intersect, intervals_of, map_cuts
from ...parameters import Kernel, run_kernel, unsummed_parameters
from ...registry import register
from ...spec import ShardTensorSpec
from ...tensor import from_part, redistribute_to
from ..common.alignment import torch_judges, whole_rows
from ..common.stencil import borrow_dims, settled
from .conv import autocast_operands, per_spatial_dim, sharded_input
from .halo_conv import stride_of


@dataclass(frozen=True, slots=True)
class TransposedWindow:
    """A transposed convolution along one tensor dim; the numbers are those of the whole tensor.

    Example:
        >>> w = TransposedWindow(size=5, kernel=4, stride=2, dilation=1, padding=1, extra=0)
        >>> w.outputs, map_cuts((2, 3), w.cut), w.reads((4, 10))
        (10, (4, 6), (1, 5))
    """

    size: int
    kernel: int
    stride: int
    dilation: int
    padding: int
    extra: int

    @property
    def extent(self) -> int:
        return (self.kernel - 1) * self.dilation + 1

    @property
    def outputs(self) -> int:
        return (self.size - 1) * self.stride - 2 * self.padding + self.extent + self.extra

    def cut(self, c: int) -> int:
        """Where a cut of the input falls in the output."""
        if c <= 0:
            return 0
        if c >= self.size:
            return self.outputs
        return max(0, min(self.outputs, c * self.stride + (self.extent - self.stride) // 2 - self.padding))

    def reads(self, out: Interval) -> Interval:
        """The inputs that reach the outputs ``out``."""
        if out[1] <= out[0]:
            return (0, 0)
        first = -(-(out[0] + self.padding - self.extent + 1) // self.stride)
        return intersect((first, (out[1] - 1 + self.padding) // self.stride + 1), (0, self.size))

    def margins(self, part: Interval, out: Interval) -> Interval:
        """Zeros to add before and after (negative: to crop) what the kernel makes of ``part``, to get ``out``."""
        start = part[0] * self.stride - self.padding
        return (start - out[0], out[1] - (start + (part[1] - part[0] - 1) * self.stride + self.extent))


def _transposed(
    name: str,
    n: int,
    input: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    output_padding: Any,
    groups: int,
    dilation: Any,
) -> Any:
    function = getattr(torch, name)
    meta = torch_judges(function, input, weight, bias, stride, padding, output_padding, groups, dilation)
    x = settled(sharded_input(input, weight, bias), linear=False)
    if x.ndim == n + 1:
        y = function(x.unsqueeze(0), weight, bias, stride, padding, output_padding, groups, dilation)
        return y.squeeze(0)
    x = redistribute_to(x, whole_rows(name, x._spec, 1))
    spec = x._spec
    sharded = spec.sharded_dims()
    strides, pads, extras, dilations = (
        list(per_spatial_dim(a, n, name, "argument")) for a in (stride, padding, output_padding, dilation)
    )
    windows = {
        d: TransposedWindow(
            spec.shape[d], weight.shape[d], strides[d - 2], dilations[d - 2], pads[d - 2], extras[d - 2]
        )
        for d in sharded
        if d >= 2
    }
    sizes = list(spec.sizes)
    needs, margins = {}, {}
    for d, window in windows.items():
        m = sharded[d]
        cut = map_cuts(spec.cut(m), window.cut)
        sizes[m] = cut
        outs = intervals_of(cut)
        needs[d] = [window.reads(out) for out in outs]
        here = spec.coordinate[m]
        margins[d] = window.margins(needs[d][here], outs[here])
        pads[d - 2] = extras[d - 2] = 0
    x, weight, bias = autocast_operands(x, weight, bias)
    (w, b), total = unsummed_parameters(name, spec, weight, bias)
    meta = meta._replace(stride=stride_of(spec, meta.shape), dtype=x.dtype)
    out_spec = ShardTensorSpec.of(spec.mesh, spec.placements, meta, tuple(sizes))
    part = borrow_dims(x.to_local(), spec, needs)
    shape = out_spec.local_shape()
    crop = tuple(n for d in reversed(range(2, x.ndim)) for n in margins.get(d, (0, 0)))
    kernel = _kernel(function, shape, (strides, pads, extras, dilations), groups, crop)
    if any(total.needed) and not part.is_complex():
        return run_kernel(kernel, part, w, b, total, out_spec)
    return from_part(kernel.forward(part, *total.complete([w, b]))[0], out_spec)


def _kernel(
    function: Callable[..., Tensor],
    shape: Sequence[int],
    numbers: tuple[list[int], list[int], list[int], list[int]],
    groups: int,
    crop: tuple[int, ...],
) -> Kernel:
    """torch's ``function`` on a part of the input, its result cropped, or padded with zeros, to ``shape``.

    ``numbers`` are stride, padding, output padding and dilation per spatial dim.
    """
    strides, pads, extras, dilations = numbers

    def is_empty(x: Tensor) -> bool:
        return 0 in shape or x.numel() == 0

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor]:
        if is_empty(x):
            # Nothing to compute, but backward has to reach the exchange and the weight on every rank alike.
            y = x.new_zeros(shape) + x.sum() + weight[:0].sum()
        else:
            with torch.autocast(x.device.type, enabled=False):
                y = function(x, weight, None, strides, pads, extras, groups, dilations)
            y = F.pad(y, crop) if any(crop) else y
        return (y if bias is None else y + bias.view(-1, *[1] * (y.ndim - 2)),)

    def backward(
        mask: Sequence[bool], grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        grad_b = grad.sum([0, *range(2, grad.ndim)]) if mask[2] else None
        if not mask[0] and not mask[1]:
            return None, None, grad_b
        if is_empty(x):
            return torch.zeros_like(x), torch.zeros_like(weight), grad_b
        grad = F.pad(grad, [-n for n in crop]) if any(crop) else grad
        grad_x, grad_w, _ = torch.ops.aten.convolution_backward(
            grad, x, weight, None, strides, pads, dilations, True, extras, groups, [mask[0], mask[1], False]
        )
        return grad_x, grad_w, grad_b

    return Kernel(forward, backward)


def _make_function(n: int) -> Callable[..., Any]:
    name = f"conv_transpose{n}d"

    def conv_transpose(
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Any:
        if not any(isinstance(t, DTensor) for t in (input, weight, bias)):
            return NotImplemented
        return _transposed(name, n, input, weight, bias, stride, padding, output_padding, groups, dilation)

    return conv_transpose


for _n in (1, 2, 3):
    _function: Callable[..., Tensor] = getattr(torch, f"conv_transpose{_n}d")
    register(_function)(_make_function(_n))
