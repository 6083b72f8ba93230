"""Transposed convolution over sharded spatial dims.

Output ``o`` sums the inputs ``i`` with ``o = i * stride - padding + t * dilation`` for some tap ``t``. A rank fetches
the inputs that reach its outputs and runs the kernel of torch on them, with the padding that leaves out what lies
outside; what no padding expresses is cropped afterwards, which is a copy. An output belongs to the rank that owns the
input in the middle of those that reach it: a kernel as long as its stride doubles (or triples ...) the size of every
shard, and so does one of 3 with stride 2 and padding 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._compat import TensorMeta
from ...geometry import Interval, intersect, intervals_of, map_boundaries
from ...halo import Fetch
from ...operators import Arguments, Composed, LocalPlan, Plan, operator
from ...spec import ShardTensorSpec
from ..common.alignment import free_dims
from ..common.half import cast, widened
from .conv import per_spatial_dim
from .halo_conv import stride_of
from .joined import nothing_of

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


@dataclass(frozen=True, slots=True)
class _Work:
    """What one rank computes.

    Attributes:
        function: torch's.
        fetch: the inputs that reach the rank's outputs.
        shape: of its outputs.
        stride, padding, output_padding, dilation: the kernel's, per spatial dim.
        crop: zeros to add around the kernel's result (negative: to crop), as ``F.pad`` takes them; empty for none.
        fetches: whether there is anything to fetch; else the part is the shard.
    """

    function: Callable[..., Tensor]
    fetch: Fetch
    shape: tuple[int, ...]
    stride: Sequence[int]
    padding: Sequence[int]
    output_padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    crop: tuple[int, ...]
    fetches: bool

    def is_empty(self, part: Tensor) -> bool:
        """Whether there is nothing to compute on this rank."""
        return 0 in self.shape or part.numel() == 0

    def part(self, x: Tensor) -> Tensor:
        """The inputs that reach this rank's outputs."""
        return self.fetch(x) if self.fetches else x

    def outputs(self, part: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """This rank's outputs; differentiable."""
        if self.is_empty(part):
            y = part.new_zeros(self.shape) + nothing_of(part, weight)
        else:
            given = None if self.adds_zeros else bias
            y = self.function(
                part, weight, given, self.stride, self.padding, self.output_padding, self.groups, self.dilation
            )
            y = torch.constant_pad_nd(y, self.crop) if self.crop else y
            if given is not None:
                return y
        return y if bias is None else y + bias.view(-1, *[1] * (y.ndim - 2))

    @property
    def adds_zeros(self) -> bool:
        """Whether there are outputs that no input reaches: they are the bias."""
        return any(n > 0 for n in self.crop)

    def gradients(
        self, grad: Tensor, part: Tensor, weight: Tensor, needed: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Those of the part and of the weight, where they are needed."""
        if not any(needed):
            return None, None
        if self.is_empty(part):
            return torch.zeros_like(part), torch.zeros_like(weight)
        grad = torch.constant_pad_nd(grad, [-n for n in self.crop]) if self.crop else grad
        arguments = self.stride, self.padding, self.dilation, True, self.output_padding, self.groups, [*needed, False]
        grad_part, grad_w, _ = torch.ops.aten.convolution_backward.default(grad, part, weight, None, *arguments)
        return grad_part, grad_w


class TransposedConvolutionPlan(Plan):
    """Transposed convolution of an input ``(N, C, *spatial)`` with replicated weights.

    The result is never sharded in its channels.
    """

    saves = (0, 1)
    twice = True
    depends = {0: (1,), 1: (0,), 2: ()}

    def __init__(self, work: _Work, outputs: ShardTensorSpec) -> None:
        self.work, self.outputs = work, outputs

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        part = self.work.part(x)
        return self.work.outputs(part, weight, bias), (part,) if self.work.fetches else ()

    def backward(
        self,
        needed: Sequence[bool],
        grads: Sequence[Tensor | None],
        x: Tensor,
        weight: Tensor,
        part: Tensor | None = None,
    ) -> Sequence[Tensor | None]:
        """The sum of the parameters' gradients is sent first, and travels while the input's is computed."""
        grad = grads[0]
        if grad is None:
            return [None, None, None]
        part = x if part is None else part
        # Contributions are not rounded yet, see [Note: rounded once] in redistribute.py.
        summed = self.sums or self.work.fetches
        wide = widened(grad, part, weight) if summed else [grad, part, weight]
        grad_b = wide[0].sum([0, *range(2, grad.ndim)]) if needed[2] else None
        of_input = wide if self.work.fetches else [grad, part, weight]
        together = needed[0] and self.total is None and of_input[0].dtype == wide[0].dtype
        grad_x, grad_w = self.work.gradients(wide[0], wide[1], wide[2], (together, needed[1]))
        finish = None if self.total is None else self.total.start([None, grad_w, grad_b])
        if needed[0]:
            if not together:
                grad_x, _ = self.work.gradients(of_input[0], of_input[1], of_input[2], (True, False))
            assert grad_x is not None
            grad_x = cast(self.work.fetch.backward(grad_x), x.dtype)
        if finish is not None:
            _, grad_w, grad_b = finish()
        return [grad_x if needed[0] else None, grad_w if needed[1] else None, grad_b]


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
        numbers = [
            per_spatial_dim(value, n, name, what)
            for value, what in (
                (stride, "stride"),
                (padding, "padding"),
                (output_padding, "output_padding"),
                (dilation, "dilation"),
            )
        ]
        if len(input.shape) == n + 1:
            *others, apart = numbers
            return Composed(lambda x, w, b: function(x.unsqueeze(0), w, b, *others, groups, apart).squeeze(0))
        call.redistribute("input", free_dims(call.name, input, 1))
        dtype = _cast(call, weight, bias)
        out, work = _work(call.tensors["input"], weight, meta, function, numbers, groups)
        if dtype.is_complex:
            # torch differentiates it as real ones.
            return LocalPlan(lambda x, w, b: work.outputs(work.part(x), w, b), out)
        return TransposedConvolutionPlan(work, out)


def _cast(call: Arguments, weight: TensorMeta, bias: TensorMeta | None) -> torch.dtype:
    """Have the operands cast as autocast does; returns the dtype that they have in common."""
    given = {"input": call.tensors["input"].tensor_meta.dtype, "weight": weight.dtype}
    if bias is not None:
        given["bias"] = bias.dtype
    dtype = call.autocast()
    if dtype is not None:
        call.cast(dtype, *given)
        return dtype
    if len(set(given.values())) > 1:
        shown = ", ".join(f"{name} of {dtype}" for name, dtype in given.items())
        raise RuntimeError(f"{call.name}: {shown} should be of the same dtype")
    return given["input"]


def _work(
    spec: ShardTensorSpec,
    weight: TensorMeta,
    meta: Tensor,
    function: Callable[..., Tensor],
    numbers: Sequence[Sequence[int]],
    groups: int,
) -> tuple[ShardTensorSpec, _Work]:
    """The spec of the result, and this rank's work.

    Args:
        meta: the global result without its data.
        numbers: stride, padding, output padding and dilation per spatial dim.
    """
    stride, padding, extra, dilation = map(list, numbers)
    layout = list(spec.layout)
    needs, margins = {}, {}
    for d, m in spec.sharded_dims().items():
        if d < 2:
            continue
        i, rank = d - 2, spec.coordinate[m]
        window = TransposedWindow(spec.shape[d], weight.shape[d], stride[i], dilation[i], padding[i], extra[i])
        sizes = map_boundaries(spec.cut(m), window.boundary)
        layout[m] = layout[m]._replace(sizes=sizes)
        outs = intervals_of(sizes)
        needs[d] = [window.reads(out) for out in outs]
        padding[i], extra[i], margins[d] = window.options(needs[d][rank], outs[rank])
    crop = tuple(n for d in reversed(range(2, len(spec.shape))) for n in margins.get(d, (0, 0)))
    out_meta = TensorMeta(meta.shape, stride_of(spec, meta.shape), spec.tensor_meta.dtype)
    out, fetch = spec.with_layout(layout, out_meta), Fetch.of(spec, needs)
    shape = out.local_shape()
    return out, _Work(
        function, fetch, shape, stride, padding, extra, dilation, groups, crop if any(crop) else (), bool(fetch)
    )


for _n in (1, 2, 3):
    _declare(_n)
