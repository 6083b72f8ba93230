"""Convolution by parts: what one rank does, worked out from specs, and its local work.

[Note: convolution by parts] What a rank's outputs read is tiled by its own shard and its halo (see "corners" in
halo.py). Convolution is linear, so its output is the sum of the convolutions of these parts, each among zeros. The
shard's own part is an ordinary convolution with zero padding, which runs while the halo travels; the part of a side of
the halo touches only the outputs near the boundary and is added to them. No enlarged copy of the shard is made, and
the backward pass saves the shard and the halo only. In the backward pass the halo's gradients are computed and sent
first, and travel during the shard's own part.

[Note: owner computes] The rank that owns the input under the kernel's middle tap computes an output
(``Window.boundary``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...errors import refuse
from ...exchange import Pending, plan_intervals
from ...geometry import Interval, Window, intersect, intervals_of, length, map_boundaries
from ...halo import Axis, Halo, Sides
from ...spec import ShardTensorSpec
from ...strides import stride_like

_convolution_backward = torch.ops.aten.convolution_backward.default

# Elements of a shard from which on its gradient takes longer than to start a collective.
WORTH_OVERLAPPING = 1 << 16

Pads = tuple[tuple[int, int], ...]
Grads = list[Tensor | None]
# Gradients of the halo on their way to its owners: of the first axis, and what has arrived from the others.
_Returning = tuple[Pending | None, list[list[Tensor]]]


@dataclass(frozen=True, slots=True)
class Part:
    """The convolution of one part of what is read (the shard, or a side of the halo), among zeros.

    Attributes:
        shape: of the part.
        crop: ``(dim, start, length)`` narrowings of the part to what is read.
        inner: zeros on both ends of each spatial dim that the kernel adds itself.
        outer: zeros (negative: crops) that have to be added around the part, as ``F.pad`` takes them; empty for none.
        outputs: ``(dim, start, length)`` of the outputs that it contributes to; None for all.
        taps: ``(dim, start, length)`` of the kernel's taps that reach it; None for all.
    """

    shape: tuple[int, ...]
    crop: tuple[tuple[int, int, int], ...]
    inner: tuple[int, ...]
    outer: tuple[int, ...]
    outputs: tuple[int, int, int] | None
    taps: tuple[int, int, int] | None = None

    def cropped(self, part: Tensor) -> Tensor:
        """What the kernel is given."""
        for crop in self.crop:
            part = part.narrow(*crop)
        return torch.constant_pad_nd(part, self.outer) if self.outer else part

    def uncropped(self, grad: Tensor) -> Tensor:
        """The adjoint of :meth:`cropped`."""
        if self.outer:
            grad = torch.constant_pad_nd(grad, [-n for n in self.outer])
        if not self.crop:
            return grad
        whole = grad.new_zeros(self.shape)
        view = whole
        for crop in self.crop:
            view = view.narrow(*crop)
        view.copy_(grad)
        return whole

    def kernel(self, weight: Tensor) -> Tensor:
        """The taps of a weight that reach the part, a view."""
        return weight if self.taps is None else weight.narrow(*self.taps)

    def region(self, y: Tensor) -> Tensor:
        """The outputs that it contributes to, a view."""
        return y if self.outputs is None else y.narrow(*self.outputs)


@dataclass(frozen=True, slots=True)
class HaloConvolution:
    """One convolution on one rank: its geometry and its local work.

    Attributes:
        halo: what is exchanged.
        shard: the shard's own part; None where it has no outputs or reads nothing.
        sides: per axis the parts of the halo before and after the shard; None where there is nothing to compute.
        out_spec: of the result.
        out_shape: of this rank's shard of it.
        arguments: stride and dilation.
        groups: of channels.
    """

    halo: Halo
    shard: Part | None
    sides: tuple[tuple[Part | None, Part | None], ...]
    out_spec: ShardTensorSpec
    out_shape: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Sides]:
        """This rank's outputs, and the halo for the backward pass."""
        halo, sides = self.halo, self.halo.nothing()
        pending = halo.start(0, x, sides) if self.sides else None
        if self.shard is None:
            y = x.new_zeros(self.out_shape)
            if bias is not None:
                y += bias.view(-1, *[1] * len(self.stride))
        else:
            y = self._convolve(self.shard, x, weight, bias)
        for i, parts in enumerate(self.sides):
            halo.finish(i, pending, sides)
            if i + 1 < len(self.sides):
                pending = halo.start(i + 1, x, sides)
            for side, part in zip(sides[i], parts, strict=True):
                if side is not None and part is not None:
                    part.region(y).add_(self._convolve(part, side, weight, None))
        return y, sides

    def backward(
        self,
        needed: Sequence[bool],
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        sides: Sides,
        sum_parameters: Callable[[Grads], Callable[[], Grads]] | None = None,
    ) -> Grads:
        """Gradients of the shard, the weight and the bias; this rank's contributions to the latter two.

        First what travels: the halo's gradients, then the sum of the parameters'. The shard's is computed meanwhile.

        Args:
            sum_parameters: starts the sum of gradients of weight and bias over the ranks; the function that it returns
                waits for it.
        """
        need_x, need_w, need_b = needed
        from_sides: list[tuple[Part, Tensor]] = []
        side_grads = self._backward_of_sides(grad, weight, sides, (need_x, need_w), from_sides)
        returning = self._start_returns(side_grads, x) if need_x else None
        grad_x = grad_w = grad_b = None
        # One call of the kernel computes both gradients faster than two, unless the sum travels during the second.
        together = need_x and (sum_parameters is None or x.numel() < WORTH_OVERLAPPING)
        if self.shard is not None and (need_w or need_b):
            grad_x, grad_w, grad_b = self._differentiate(self.shard, grad, x, weight, (together, need_w, need_b))
        elif need_b:
            grad_b = grad.sum(dim=[0, *range(2, grad.ndim)])
        if need_w:
            grad_w = torch.zeros_like(weight) if grad_w is None else grad_w
            for part, contribution in from_sides:
                part.kernel(grad_w).add_(contribution)
        finish = None if sum_parameters is None else sum_parameters([grad_w, grad_b])
        if returning is not None:
            grad_x = self._gradient_of_shard(grad, x, weight) if grad_x is None else grad_x
            self._add_returned(grad_x, returning, side_grads)
        if finish is not None:
            grad_w, grad_b = finish()
        return [grad_x, grad_w, grad_b]

    def _gradient_of_shard(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The gradient of the shard, but for what other ranks computed with it."""
        if self.shard is None:
            return torch.zeros_like(x)
        grad_x, _, _ = self._differentiate(self.shard, grad, x, weight, (True, False, False))
        assert grad_x is not None
        return grad_x

    def _start_returns(self, side_grads: Sides, x: Tensor) -> _Returning:
        """Send the halo's gradients to their owners, one axis after the other: see [Note: corners] in halo.py."""
        returned: list[list[Tensor]] = [[] for _ in self.sides]
        pending = None
        for i in reversed(range(len(self.sides))):
            pending = self.halo.start_return(i, side_grads, x)
            if i > 0:
                returned[i] = self.halo.finish_return(i, pending, side_grads)
        return pending, returned

    def _add_returned(self, grad_x: Tensor, returning: _Returning, side_grads: Sides) -> None:
        """Add what :meth:`_start_returns` has under way to the gradient of the shard."""
        pending, returned = returning
        if self.sides:
            returned[0] = self.halo.finish_return(0, pending, side_grads)
        for i in reversed(range(len(self.sides))):
            self.halo.add_to_shard(i, grad_x, returned[i])

    def _backward_of_sides(
        self, grad: Tensor, weight: Tensor, sides: Sides, needed: tuple[bool, bool], weights: list[tuple[Part, Tensor]]
    ) -> Sides:
        """The gradients of the halo; the contributions to the weight's are added to ``weights``."""
        result = self.halo.nothing()
        need_x, need_w = needed
        for i, parts in enumerate(self.sides if need_x or need_w else ()):
            for k, (side, part) in enumerate(zip(sides[i], parts, strict=True)):
                if side is None:
                    continue
                if part is None:
                    result[i][k] = torch.zeros_like(side) if need_x else None
                    continue
                region = part.region(grad)
                result[i][k], grad_w, _ = self._differentiate(part, region, side, weight, (need_x, need_w, False))
                if grad_w is not None:
                    weights.append((part, grad_w))
        return result

    def _convolve(self, part: Part, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        arguments = self.stride, part.inner, self.dilation, False, [0] * len(self.stride), self.groups
        return torch.convolution(part.cropped(x), part.kernel(weight), bias, *arguments)

    def _differentiate(
        self, part: Part, grad: Tensor, x: Tensor, weight: Tensor, mask: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of a part (in its full shape), the weight and the bias."""
        bias, zeros = [weight.shape[0]], [0] * len(self.stride)
        arguments = bias, self.stride, part.inner, self.dilation, False, zeros, self.groups, list(mask)
        grad_part, grad_w, grad_b = _convolution_backward(grad, part.cropped(x), part.kernel(weight), *arguments)
        return None if grad_part is None else part.uncropped(grad_part), grad_w, grad_b


@lru_cache(maxsize=1024)
def plan_convolution(
    spec: ShardTensorSpec,
    weight: tuple[int, ...],
    stride: tuple[int, ...],
    pads: Pads,
    dilation: tuple[int, ...],
    groups: int,
) -> HaloConvolution:
    """Everything about a convolution that follows from specs and arguments; errors here are raised on all ranks."""
    name = f"conv{len(stride)}d"
    shape = spec.shape
    _check(name, spec, weight, stride, pads, dilation, groups)
    windows = [
        Window(shape[2 + i], weight[2 + i], stride[i], dilation[i], before, after)
        for i, (before, after) in enumerate(pads)
    ]
    sharded = spec.sharded_dims()
    if 1 in sharded:
        raise refuse(
            name, spec, "the channels are sharded", "redistribute to shard a spatial dim or the batch, e.g. Shard(2)"
        )
    sizes = list(spec.sizes)
    axes: list[Axis] = []
    reads: dict[int, Interval] = {}
    outs: dict[int, Interval] = {}
    for dim, m in sharded.items():
        if dim == 0:
            continue
        window, cut = windows[dim - 2], spec.cut(m)
        out_cut = map_boundaries(cut, window.boundary)
        sizes[m] = out_cut
        out = intervals_of(out_cut)
        read = [window.reads(o) for o in out]
        need = [intersect(r, (0, shape[dim])) for r in read]
        rank = spec.coordinate[m]
        plan = plan_intervals(intervals_of(cut), tuple((a, b) if b > a else (0, 0) for a, b in need), rank)
        axes.append(Axis(dim, m, plan))
        reads[dim], outs[dim] = read[rank], out[rank]
    out_global = (shape[0], weight[0], *(w.outputs for w in windows))
    out_spec = ShardTensorSpec.of(
        spec.mesh,
        spec.placements,
        type(spec.tensor_meta)(torch.Size(out_global), stride_of(spec, out_global), spec.tensor_meta.dtype),
        tuple(sizes),
    )
    out_shape = out_spec.local_shape()
    halo = Halo(axes, spec.mesh, spec.local_shape())
    geometry = _Geometry(spec.local_shape(), out_shape, windows, axes, reads, outs)
    return HaloConvolution(
        halo=halo,
        shard=geometry.part(None, None),
        sides=tuple((geometry.part(a, 0), geometry.part(a, 1)) for a in axes),
        out_spec=out_spec,
        out_shape=out_shape,
        stride=stride,
        dilation=dilation,
        groups=groups,
    )


@dataclass(frozen=True, slots=True)
class _Geometry:
    """What the parts of one rank's convolution follow from.

    Attributes:
        shape, out_shape: of the shard and of its outputs.
        windows: of the spatial dims.
        axes: the sharded spatial dims.
        reads, outs: ``{dim: interval}`` of the inputs that are read (beyond the global ends, too) and of the outputs.
    """

    shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    windows: Sequence[Window]
    axes: Sequence[Axis]
    reads: dict[int, Interval]
    outs: dict[int, Interval]

    def part(self, of: Axis | None, k: int | None) -> Part | None:
        """The part of the shard (``of`` None) or of side ``k`` of an axis; None where there is nothing to compute."""
        inside = {axis.dim: axis for axis in self.axes}
        shape, crop, pads = list(self.shape), [], []
        outputs, taps, counts = None, None, list(self.out_shape[2:])
        for d, window in enumerate(self.windows, start=2):
            axis = inside.get(d)
            if axis is None:
                pads.append((window.before, window.after))
                continue
            read = self.reads[d]
            if axis is of:
                assert k is not None
                here = axis.sides[k]
                touched = window.touching(here, self.outs[d])
                if not length(here) or not length(touched):
                    return None
                read, shape[d] = window.reads(touched), length(here)
                outputs, counts[d - 2] = (d, touched[0] - self.outs[d][0], length(touched)), length(touched)
                if length(touched) == 1:  # the usual halo of one: no zeros, but the taps that reach it
                    first, stop = _taps(window, read[0], here)
                    if first == stop:  # a dilated window that steps over it
                        return None
                    taps = (d, first, stop - first)
                    read = (read[0] + first * window.dilation, read[0] + (stop - 1) * window.dilation + 1)
            elif of is not None and self.axes.index(axis) < self.axes.index(of):
                here = axis.transfers.need
                shape[d] = length(here)
            else:
                here = axis.main
                if here != axis.transfers.own:
                    crop.append((d, here[0] - axis.transfers.own[0], length(here)))
            pads.append((here[0] - read[0], read[1] - here[1]))
        read_shape = list(shape)
        for d, _, n in crop:
            read_shape[d] = n
        if 0 in read_shape or 0 in self.out_shape:
            return None
        return Part(tuple(shape), tuple(crop), *self._padding(read_shape, pads, counts, taps), outputs, taps)

    def _padding(
        self, shape: Sequence[int], pads: Sequence[Interval], outputs: Sequence[int], taps: tuple[int, ...] | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Zeros that the kernel adds itself, symmetrically, and zeros (or crops) that have to be added around."""
        inner, outer = [], []
        for i, (before, after) in enumerate(pads):
            window = self.windows[i]
            extent = window.extent
            if taps is not None and taps[0] == 2 + i:
                extent = (taps[2] - 1) * window.dilation + 1
            room = shape[2 + i] + 2 * before - extent
            fits = before >= 0 and room // window.stride + 1 == outputs[i]
            inner.append(before if fits else 0)
            outer.append((0, 0) if fits else (before, after))
        flat = tuple(n for pair in reversed(outer) for n in pair)
        return tuple(inner), flat if any(flat) else ()


def _taps(window: Window, start: int, part: Interval) -> Interval:
    """Which taps of a window that starts at ``start`` reach into ``part``."""
    first = max(0, -(-(part[0] - start) // window.dilation))
    return first, max(first, min(window.kernel, -(-(part[1] - start) // window.dilation)))


def stride_of(spec: ShardTensorSpec, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of an output of ``shape``: channels-last where the input is."""
    meta = spec.tensor_meta
    return stride_like(torch.empty_strided(meta.shape, meta.stride, device="meta"), shape)


def _check(
    name: str,
    spec: ShardTensorSpec,
    weight: tuple[int, ...],
    stride: tuple[int, ...],
    pads: Pads,
    dilation: tuple[int, ...],
    groups: int,
) -> None:
    """The errors that the whole tensor would give, in terms of the whole tensor."""
    shape = tuple(spec.shape)
    if len(weight) != len(shape):
        raise RuntimeError(f"{name}: a weight of shape {weight} for an input of shape {shape}")
    if min(stride) < 1 or min(dilation) < 1 or groups < 1 or min(min(p) for p in pads) < 0:
        raise RuntimeError(
            f"{name}: stride {stride}, dilation {dilation} and groups {groups} must be positive, padding {pads} not "
            "negative"
        )
    if shape[1] != weight[1] * groups or weight[0] % groups:
        raise RuntimeError(
            f"{name}: weight {weight} with groups={groups} does not fit {shape[1]} input channels: "
            f"it expects {weight[1] * groups}, and output channels that are a multiple of groups"
        )
    padded = tuple(n + a + b for n, (a, b) in zip(shape[2:], pads, strict=True))
    extents = tuple((k - 1) * d + 1 for k, d in zip(weight[2:], dilation, strict=True))
    if any(e > n for e, n in zip(extents, padded, strict=True)):
        raise RuntimeError(
            f"{name}: kernel size {weight[2:]} (dilated to {extents}) is greater than the padded input {padded} of the "
            f"whole tensor {shape}; use a smaller kernel or more padding"
        )
