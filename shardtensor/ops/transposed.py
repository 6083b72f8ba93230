"""Transposed convolution over sharded spatial dims.

Output ``o`` sums the inputs ``i`` with ``o = i * stride - padding + t * dilation`` for some tap ``t``. A rank borrows
the inputs that reach its outputs, runs the kernel of torch on them without padding, and crops what lies outside. An
output belongs to the rank that owns the input in the middle of those that reach it: a kernel as long as its stride
doubles (or triples ...) the size of every shard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..geometry import Interval, intersect, intervals_of, map_cuts
from ..parameters import local_parameters
from ..registry import register
from ..spec import ShardTensorSpec
from ..tensor import _FromLocal, redistribute_to
from .convolution import autocast_operands, per_spatial_dim, sharded_input
from .convolution_parts import stride_of
from .operands import torch_judges, whole_rows
from .spatial import borrow_dims, settled


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
    w, b = local_parameters(name, spec, weight, bias)
    assert w is not None
    meta = meta._replace(stride=stride_of(spec, meta.shape), dtype=x.dtype)
    out_spec = ShardTensorSpec.of(spec.mesh, spec.placements, meta, tuple(sizes))
    part = borrow_dims(x.to_local(), spec, needs)
    shape = out_spec.local_shape()
    if 0 in shape or part.numel() == 0:
        # Nothing to compute, but backward has to reach the exchange and the weight on every rank alike.
        y = part.new_zeros(shape) + part.sum() + w[:0].sum()
    else:
        with torch.autocast(part.device.type, enabled=False):
            y = function(part, w, None, strides, pads, extras, groups, dilations)
        flat = [n for d in reversed(range(2, x.ndim)) for n in margins.get(d, (0, 0))]
        y = F.pad(y, flat) if any(flat) else y
    if b is not None:
        y = y + b.view(-1, *[1] * n)
    return _FromLocal.apply(y, out_spec)


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
