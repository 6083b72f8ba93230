"""Parts of what a rank's convolution reads, and the kernel's arguments for each: worked out from specs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..._compat import kernel
from ...geometry import Interval, Window, intersect, length
from ...halo import Axis, Narrow
from ...strides import zeros_like

__all__ = ["Common", "Geometry", "Part", "check_arguments"]

_convolution_backward = kernel(torch.ops.aten.convolution_backward.default)


@dataclass(frozen=True, slots=True)
class Common:
    """What the convolutions of all parts have in common.

    Attributes:
        weight: shape of the weight.
        stride, dilation: per spatial dim.
        groups: of channels.
    """

    weight: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def without(self, dim: int) -> Common:
        """The same but for one spatial dim, whose taps are further channels."""
        i = dim - 2
        stride, dilation = self.stride[:i] + self.stride[i + 1 :], self.dilation[:i] + self.dilation[i + 1 :]
        return replace(self, stride=stride, dilation=dilation)

    def arguments(self, padding: Sequence[int]) -> tuple[Any, ...]:
        """What ``torch.convolution`` gets after the bias."""
        return self.stride, tuple(padding), self.dilation, False, (0,) * len(self.stride), self.groups


@dataclass(frozen=True, slots=True)
class Part:
    """The convolution of one part of what is read, among zeros.

    Attributes:
        common: what it shares with the other parts.
        shape: of the part.
        crop: ``(dim, start, length)`` narrowings of the part to what is read.
        inner: zeros on both ends of each spatial dim that the kernel adds itself.
        outer: zeros (negative: crops) that have to be added around the part, as ``F.pad`` takes them; empty for none.
        outputs: ``(dim, start, length)`` of the outputs that it contributes to; None for all.
        taps: ``(dim, start, length)`` of the kernel's taps that reach it; None for all.
    """

    common: Common
    shape: tuple[int, ...]
    crop: tuple[Narrow, ...]
    inner: tuple[int, ...]
    outer: tuple[int, ...]
    outputs: Narrow | None
    taps: Narrow | None = None
    _arguments: tuple[Any, ...] = field(init=False)
    _plain: bool = field(init=False)  # nothing to do but to call the kernel
    _plane: int | None = field(init=False)  # see _plane_of

    def __post_init__(self) -> None:
        plane = self._plane_of()
        arguments = self.common if plane is None else self.common.without(plane)
        inner = [n for d, n in enumerate(self.inner, start=2) if d != plane]
        object.__setattr__(self, "_arguments", arguments.arguments(inner))
        object.__setattr__(self, "_plain", not self.crop and not self.outer and self.taps is None and plane is None)
        object.__setattr__(self, "_plane", plane)

    def _plane_of(self) -> int | None:
        """The dim of a 3-D convolution along which there is one output, which reads all of the part and no zeros.

        Its taps are further channels of a 2-D convolution. For 3-D ones of few planes, as borders are, torch leaves
        oneDNN on the CPU and takes a kernel that is several times slower.
        """
        if len(self.shape) != 5:
            return None
        sizes, taps = list(self.shape), list(self.common.weight)
        for d, _, n in self.crop:
            sizes[d] = n
        if self.taps is not None:
            taps[self.taps[0]] = self.taps[2]
        pads = self.outer or (0,) * 6
        for d in (2, 3, 4):
            before, after = pads[2 * (4 - d) : 2 * (4 - d) + 2]
            dense = taps[d] == 1 or self.common.dilation[d - 2] == 1
            if sizes[d] + before + after == taps[d] and self.inner[d - 2] == 0 and dense:
                return d
        return None

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Its contribution to :attr:`outputs`."""
        if not self._plain:
            x, weight = self._folded(self._cropped(x)), self._folded(self.reached(weight))
        y = torch.convolution(x, weight, bias, *self._arguments)
        return y if self._plane is None else y.unsqueeze(self._plane)

    def differentiate(
        self, grad: Tensor, x: Tensor, weight: Tensor, needed: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of the part, of the taps that reach it and of the bias, where they are ``needed``."""
        arguments = self.common.weight[:1], *self._arguments, needed
        if not self._plain:
            x, weight = self._folded(self._cropped(x)), self._folded(self.reached(weight))
        if self._plane is not None:
            grad = grad.squeeze(self._plane)
        grad_x, grad_w, grad_b = _convolution_backward(grad, x, weight, *arguments)
        # Asked for the bias's gradient, oneDNN's kernel returns the weight's, too; ranks that do not call it have none.
        grad_w = self._unfolded(grad_w, self.common.weight[1]) if needed[1] else None
        if grad_x is not None and not self._plain:
            grad_x = self._uncropped(self._unfolded(grad_x, self.shape[1]))
        return grad_x, grad_w, grad_b

    def reached(self, weight: Tensor) -> Tensor:
        """The taps of a weight that reach the part, a view."""
        return weight if self.taps is None else weight.narrow(*self.taps)

    def region(self, y: Tensor) -> Tensor:
        """The outputs that it contributes to, a view."""
        return y if self.outputs is None else y.narrow(*self.outputs)

    def _folded(self, t: Tensor) -> Tensor:
        """Part or weight, the planes as further channels."""
        return t if self._plane is None else t.movedim(self._plane, 2).flatten(1, 2)

    def _unfolded(self, grad: Tensor, channels: int) -> Tensor:
        """The adjoint of :meth:`_folded`."""
        if self._plane is None:
            return grad
        return grad.reshape(len(grad), channels, -1, *grad.shape[2:]).movedim(2, self._plane)

    def _cropped(self, part: Tensor) -> Tensor:
        """What the kernel is given."""
        for crop in self.crop:
            part = part.narrow(*crop)
        return torch.constant_pad_nd(part, self.outer) if self.outer else part

    def _uncropped(self, grad: Tensor) -> Tensor:
        """The adjoint of :meth:`_cropped`."""
        if self.outer:
            grad = torch.constant_pad_nd(grad, [-n for n in self.outer])
        if not self.crop:
            return grad
        whole = zeros_like(grad, self.shape)
        view = whole
        for crop in self.crop:
            view = view.narrow(*crop)
        view.copy_(grad)
        return whole


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the parts of one rank's convolution follow from.

    Attributes:
        common: what they share.
        shape, out_shape: of the shard and of its outputs.
        windows: of the spatial dims.
        axes: the sharded spatial dims.
        reads, outs: ``{dim: interval}`` of the inputs that are read (beyond the global ends, too) and of the outputs.
    """

    common: Common
    shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    windows: Sequence[Window]
    axes: Sequence[Axis]
    reads: dict[int, Interval]
    outs: dict[int, Interval]

    def joined(self) -> tuple[Part | None, Interval]:
        """Shard and halo in one, and the zeros that have to be put around them along the last axis.

        (Along an earlier one they would travel along the last.) The part is None where there is nothing to compute.
        """
        part = self._part(len(self.axes))
        if part is None or not part.outer or not self.axes:
            return part, (0, 0)
        shape, outer, dim = list(part.shape), list(part.outer), self.axes[-1].dim
        at = 2 * (len(shape) - 1 - dim)
        zeros = outer[at], outer[at + 1]
        shape[dim] += sum(zeros)
        outer[at : at + 2] = 0, 0
        return replace(part, shape=tuple(shape), outer=tuple(outer) if any(outer) else ()), zeros

    def shard(self) -> Part | None:
        """The shard among zeros; None where it has no outputs or reads nothing."""
        return self._part(-1)

    def side(self, i: int, k: int) -> Part | None:
        """Side ``k`` of the halo along axis ``i``, among zeros; None where there is nothing to compute."""
        here = self.axes[i].sides[k]
        touched = self._touched(i, here)
        return self._part(i, here, touched) if length(touched) else None

    def border(self, i: int, k: int) -> tuple[Interval, Part] | None:
        """Side ``k`` of the halo along axis ``i`` and the edge of the shard next to it, in one.

        It gives the outputs that read this side; None where there are none.

        Returns:
            The edge, in global indices, and the part.
        """
        axis = self.axes[i]
        side = axis.sides[k]
        touched = self._touched(i, side)
        if not length(touched):
            return None
        first, stop = self.windows[axis.dim - 2].reads(touched)
        edge = (side[1], stop) if k == 0 else (first, side[0])
        edge = max(edge[0], 0), min(edge[1], self.windows[axis.dim - 2].size)
        part = self._part(i, (min(side[0], edge[0]), max(side[1], edge[1])), touched)
        return None if part is None else (edge, part)

    def edge(self, i: int, part: Interval) -> tuple[Narrow, Part] | None:
        """A part of the shard along axis ``i`` by itself, among zeros: what the shard's own outputs read of it.

        Returns:
            Its place in the shard, and the part; None where they read nothing of it.
        """
        axis = self.axes[i]
        here = intersect(part, axis.main)
        touched = self._touched(i, here)
        found = self._part(i, here, touched, alone=True) if length(touched) else None
        return None if found is None else ((axis.dim, here[0] - axis.transfers.own[0], length(here)), found)

    def divides(self) -> bool:
        """Whether the outputs that read a side of the halo read nothing else than that side and a part of the shard."""
        if 0 in self.shape or 0 in self.out_shape:
            return False
        for i, axis in enumerate(self.axes):
            (a, b), borders = axis.main, (self.border(i, 0), self.border(i, 1))
            if a == b or any(border is not None and not a <= border[0][0] < border[0][1] <= b for border in borders):
                return False
        return True

    def _touched(self, i: int, here: Interval) -> Interval:
        """The outputs that read an interval of axis ``i``."""
        dim = self.axes[i].dim
        return self.windows[dim - 2].touching(here, self.outs[dim]) if length(here) else (0, 0)

    def _part(self, i: int, here: Interval = (0, 0), touched: Interval = (0, 0), *, alone: bool = False) -> Part | None:
        """The part that spans what is read along the axes before axis ``i``, ``here`` along it, the shard after it.

        Args:
            touched: the outputs along axis ``i`` that it contributes to.
            alone: along the other axes, the shard only.
        """
        order = {axis.dim: j for j, axis in enumerate(self.axes)}
        shape, crop, pads = list(self.shape), [], []
        outputs, taps, counts = None, None, list(self.out_shape[2:])
        for d, window in enumerate(self.windows, start=2):
            if d not in order:
                pads.append((window.before, window.after))
                continue
            axis, read, span = self.axes[order[d]], self.reads[d], here
            if order[d] == i:
                read, shape[d] = window.reads(touched), length(span)
                outputs, counts[d - 2] = (d, touched[0] - self.outs[d][0], length(touched)), length(touched)
                if length(touched) == 1:  # the usual halo of one: no zeros, but the taps that reach it
                    first, stop = _taps(window, read[0], span)
                    if first == stop:  # a dilated window that steps over it
                        return None
                    taps = (d, first, stop - first)
                    read = (read[0] + first * window.dilation, read[0] + (stop - 1) * window.dilation + 1)
            elif order[d] < i and not alone:
                span = axis.transfers.need
                shape[d] = length(span)
            else:
                span = axis.main
                if span != axis.transfers.own:
                    crop.append((d, span[0] - axis.transfers.own[0], length(span)))
            pads.append((span[0] - read[0], read[1] - span[1]))
        read_shape = list(shape)
        for d, _, n in crop:
            read_shape[d] = n
        if 0 in read_shape or 0 in self.out_shape:
            return None
        padding = self._padding(read_shape, pads, counts, taps)
        return Part(self.common, tuple(shape), tuple(crop), *padding, outputs, taps)

    def _padding(
        self, shape: Sequence[int], pads: Sequence[Interval], outputs: Sequence[int], taps: Narrow | None
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


def check_arguments(
    name: str,
    shape: tuple[int, ...],
    weight: tuple[int, ...],
    stride: tuple[int, ...],
    pads: Sequence[Interval],
    dilation: tuple[int, ...],
    groups: int,
) -> None:
    """The errors that the whole tensor would give, in terms of the whole tensor."""
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
            f"global tensor {shape}; use a smaller kernel or more padding"
        )
