"""Transposed convolution over sharded spatial dims.

Output ``o`` sums the inputs ``i`` with ``o = i * stride - padding + t * dilation`` for some tap ``t``. A rank fetches
the inputs that reach its outputs and runs the kernel of torch on them, with the padding that leaves out what lies
outside; what no padding expresses is cropped afterwards, which is a copy. An output belongs to the rank that owns the
input in the middle of those that reach it: a kernel as long as its stride doubles (or triples ...) the size of every
shard, and so does one of 3 with stride 2 and padding 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..._compat import TensorMeta
from ...communication.halo import Fetch
from ...layout.geometry import Interval, intersect, intervals_of, map_boundaries
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Composed, Plan, operator
from ..common.stencil import per_dim
from .conv import plan_batched
from .geometry import output_spec
from .halo_conv import ConvolutionPlan, LocalConvolution

Numbers = int | Sequence[int]


@dataclass(frozen=True, slots=True)
class TransposedWindow:
    """A transposed convolution along one tensor dim; the numbers are those of the global tensor.

    Example:
        >>> w = TransposedWindow(size=5, kernel=4, stride=2, dilation=1, padding=1, extra=0)
        >>> w.outputs, map_boundaries((2, 3), w.boundary), w.reads((4, 10))
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

    def boundary(self, b: int) -> int:
        """Where a boundary of the input falls in the output."""
        if b <= 0:
            return 0
        if b >= self.size:
            return self.outputs
        shift, two = divmod(self.extent - self.stride, 2)
        shift -= self.padding
        if two and shift < 0:  # of the two that are as close, the one that keeps the sizes in proportion
            shift += 1
        return max(0, min(self.outputs, b * self.stride + shift))

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

    def options(self, part: Interval, out: Interval) -> tuple[int, int, Interval]:
        """The kernel's padding and output padding for ``part``, and the margins that are left then.

        Example:
            >>> w = TransposedWindow(size=5, kernel=3, stride=2, dilation=1, padding=1, extra=1)
            >>> w.margins((0, 3), (0, 5)), w.options((0, 3), (0, 5))
            ((-1, -1), (1, 0, (0, 0)))
        """
        before, after = self.margins(part, out)
        if before >= 0 or after > 0:
            return 0, 0, (before, after)
        extra = after - before
        if extra < 0:  # more to crop at the end than the padding at both ends leaves out
            return -before, 0, (0, extra)
        if extra < self.stride:  # an output padding must be
            return -before, extra, (0, 0)
        return -after, 0, (-extra, 0)


def _declare(n: int) -> None:
    name = f"conv_transpose{n}d"
    function = getattr(torch, name)

    @operator(function, getattr(torch.ops.aten, name), tensors="input", parameters="weight bias")
    def plan_conv_transpose(
        call: Arguments,
        input: ShardTensorSpec,
        weight: TensorMeta,
        bias: TensorMeta | None = None,
        stride: Numbers = 1,
        padding: Numbers = 0,
        output_padding: Numbers = 0,
        groups: int = 1,
        dilation: Numbers = 1,
    ) -> Plan:
        meta = call.returned(function, input, weight, bias, stride, padding, output_padding, groups, dilation)
        numbers = [per_dim(value, n) for value in (stride, padding, output_padding, dilation)]

        def again(x: Any, w: Any, b: Any) -> Any:
            return function(x, w, b, *numbers[:3], groups, numbers[3])

        def make(x: ShardTensorSpec) -> ConvolutionPlan:
            dtypes = {"input": x.tensor_meta.dtype, "weight": weight.dtype}
            if bias is not None:
                dtypes["bias"] = bias.dtype
            if call.autocast() is None and len(set(dtypes.values())) > 1:
                shown = ", ".join(f"{what} of {dtype}" for what, dtype in dtypes.items())
                raise RuntimeError(f"{call.name}: {shown} should be of the same dtype")
            return _plan(x, weight, tuple(meta.shape), numbers, groups)

        if len(input.shape) == n + 1:
            return Composed(lambda x, w, b: again(x.unsqueeze(0), w, b).squeeze(0))
        return plan_batched(call, input, weight, bias, again, make, transposed=True)


def _plan(
    spec: ShardTensorSpec, weight: TensorMeta, shape: tuple[int, ...], numbers: Sequence[Sequence[int]], groups: int
) -> ConvolutionPlan:
    """This rank's part.

    Args:
        shape: of the global result.
        numbers: stride, padding, output padding and dilation per spatial dim.
    """
    stride, padding, extra, dilation = map(list, numbers)
    sizes, needs, margins = {}, {}, {}
    for d, m in spec.sharded_dims().items():
        if d < 2:
            continue
        i, rank = d - 2, spec.coordinate[m]
        window = TransposedWindow(spec.shape[d], weight.shape[d], stride[i], dilation[i], padding[i], extra[i])
        sizes[d] = map_boundaries(spec.sizes_along(m), window.boundary)
        outs = intervals_of(sizes[d])
        needs[d] = [window.reads(out) for out in outs]
        padding[i], extra[i], margins[d] = window.options(needs[d][rank], outs[rank])
    crop = tuple(n for d in reversed(range(2, len(shape))) for n in margins.get(d, (0, 0)))
    out_spec = output_spec(spec, shape, sizes)
    arguments = tuple(stride), tuple(padding), tuple(dilation), True, tuple(extra), groups
    convolve = LocalConvolution(out_spec.local_shape(), arguments, crop=crop if any(crop) else ())
    return ConvolutionPlan(out_spec, Fetch.of(spec, needs), convolve)


for _n in (1, 2, 3):
    _declare(_n)
