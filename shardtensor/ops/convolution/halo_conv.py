"""Convolution by parts: what one rank does, worked out from specs, and its local work.

[Note: convolution by parts] What a rank's outputs read is tiled by its own shard and the strips that it borrows
(see "corners" in halo.py). Convolution is linear, so its output is the sum of the convolutions of these parts, each
among zeros. The shard's own part is an ordinary convolution with zero padding, which runs while the strips travel; a
strip's part touches only the outputs near the border and is added to them. No enlarged copy of the shard is made, and
the backward pass saves the shard and the strips only. In the backward pass the strips' gradients are computed and sent
first, and travel during the shard's own part.

[Note: who computes which output] The rank that owns the input under the kernel's middle tap (``Window.cut``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...errors import refuse
from ...exchange import plan_intervals
from ...geometry import Interval, Window, intersect, intervals_of, length, map_cuts
from ...halo import Axis, Strips
from ...parameters import GradientSum
from ...spec import ShardTensorSpec, stride_like

_aten = torch.ops.aten

Pads = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Part:
    """The convolution of one part of what is read, among zeros.

    Attributes:
        crop: ``(dim, start, length)`` narrowings of the part to what is read.
        pads: zeros before and after it, per spatial dim (negative: cropped).
        outputs: ``(dim, start, length)`` of the outputs that it contributes to; None for all.
    """

    crop: tuple[tuple[int, int, int], ...]
    pads: Pads
    outputs: tuple[int, int, int] | None


@dataclass(frozen=True, slots=True)
class ConvolutionPlan:
    """One convolution on one rank."""

    axes: tuple[Axis, ...]
    shard: Part
    sides: tuple[tuple[Part | None, Part | None], ...]
    out_spec: ShardTensorSpec
    out_shape: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@lru_cache(maxsize=1024)
def plan_convolution(
    spec: ShardTensorSpec,
    weight: tuple[int, ...],
    stride: tuple[int, ...],
    pads: Pads,
    dilation: tuple[int, ...],
    groups: int,
) -> ConvolutionPlan:
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
        out_cut = map_cuts(cut, window.cut)
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
    inside = {axis.dim: axis for axis in axes}

    def part(of: Axis | None, side: Interval | None) -> Part | None:
        """The part of the shard (``of`` None) or of the strip ``side`` of an axis."""
        crop, part_pads = [], []
        outputs = None
        for d, window in enumerate(windows, start=2):
            axis = inside.get(d)
            if axis is None:
                part_pads.append((window.before, window.after))
                continue
            read = reads[d]
            earlier = of is not None and axes.index(axis) < axes.index(of)
            if axis is of:
                assert side is not None
                touched = window.touching(side, outs[d])
                if not length(side) or not length(touched):
                    return None
                here, read = side, window.reads(touched)
                outputs = (d, touched[0] - outs[d][0], length(touched))
            elif earlier:
                here = axis.plan.need
            else:
                here = axis.main
                crop.append((d, here[0] - axis.plan.own[0], length(here)))
            part_pads.append((here[0] - read[0], read[1] - here[1]))
        return Part(tuple(crop), tuple(part_pads), outputs)

    shard = part(None, None)
    assert shard is not None
    return ConvolutionPlan(
        axes=tuple(axes),
        shard=shard,
        sides=tuple((part(a, a.sides[0]), part(a, a.sides[1])) for a in axes),
        out_spec=out_spec,
        out_shape=out_spec.local_shape(),
        stride=stride,
        dilation=dilation,
        groups=groups,
    )


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


# -- local work: one part among zeros ---------------------------------------------------------------------------


def _padding(
    part: Tensor, weight: Tensor, plan: ConvolutionPlan, spec: Part, outputs: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Zeros that the kernel adds itself, symmetrically, and zeros (or crops) that have to be added around ``part``."""
    inner, outer = [], []
    for i, (before, after) in enumerate(spec.pads):
        extent = (weight.shape[2 + i] - 1) * plan.dilation[i] + 1
        fits = before >= 0 and (part.shape[2 + i] + 2 * before - extent) // plan.stride[i] + 1 == outputs[i]
        inner.append(before if fits else 0)
        outer.append((0, 0) if fits else (before, after))
    return inner, [n for pair in reversed(outer) for n in pair]


def _convolve(
    part: Tensor, weight: Tensor, bias: Tensor | None, plan: ConvolutionPlan, spec: Part, outputs: Sequence[int]
) -> Tensor:
    for crop in spec.crop:
        part = part.narrow(*crop)
    inner, outer = _padding(part, weight, plan, spec, outputs)
    if any(outer):
        part = _aten.constant_pad_nd(part, outer)
    zeros = [0] * len(inner)
    return _aten.convolution(part, weight, bias, plan.stride, inner, plan.dilation, False, zeros, plan.groups)


def _convolve_backward(
    grad: Tensor, part: Tensor, weight: Tensor, plan: ConvolutionPlan, spec: Part, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the part (in its full shape), the weight and the bias."""
    shape = part.shape
    for crop in spec.crop:
        part = part.narrow(*crop)
    inner, outer = _padding(part, weight, plan, spec, grad.shape[2:])
    if any(outer):
        part = _aten.constant_pad_nd(part, outer)
    grad_part, grad_weight, grad_bias = _aten.convolution_backward(
        grad,
        part,
        weight,
        [weight.shape[0]],
        plan.stride,
        inner,
        plan.dilation,
        False,
        [0] * len(inner),
        plan.groups,
        mask,
    )
    if grad_part is not None:
        if any(outer):
            grad_part = _aten.constant_pad_nd(grad_part, [-n for n in outer])
        if grad_part.shape != shape:
            whole = grad_part.new_zeros(shape)
            view = whole
            for crop in spec.crop:
                view = view.narrow(*crop)
            view.copy_(grad_part)
            grad_part = whole
    return grad_part, grad_weight, grad_bias


def _region(y: Tensor, part: Part) -> Tensor:
    return y if part.outputs is None else y.narrow(*part.outputs)


def _is_empty(x: Tensor, part: Part) -> bool:
    return x.numel() == 0 or any(n == 0 for _, _, n in part.crop)


def forward_by_parts(
    x: Tensor, weight: Tensor, bias: Tensor | None, plan: ConvolutionPlan, mesh: Any
) -> tuple[Tensor, Strips]:
    """This rank's outputs, and the strips for the backward pass."""
    strips = Strips(plan.axes, mesh)
    pending = strips.start(0, x) if plan.axes else None
    if 0 in plan.out_shape or _is_empty(x, plan.shard):
        y = x.new_zeros(plan.out_shape)
        if bias is not None:
            y += bias.view(-1, *[1] * len(plan.stride))
    else:
        y = _convolve(x, weight, bias, plan, plan.shard, plan.out_shape[2:])
    for i in range(len(plan.axes)):
        strips.finish(i, pending)
        if i + 1 < len(plan.axes):
            pending = strips.start(i + 1, x)
        for strip, part in zip(strips.sides[i], plan.sides[i], strict=True):
            if strip is not None and part is not None and y.numel() and not _is_empty(strip, part):
                out = _region(y, part)
                out += _convolve(strip, weight, None, plan, part, out.shape[2:])
    return y, strips


def backward_by_parts(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    strips: Strips,
    plan: ConvolutionPlan,
    mask: Sequence[bool],
    total: GradientSum | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the shard, and of weight and bias: with ``total`` theirs, without it this rank's contributions.

    First what travels: the gradients of the strips, then the sum of the parameters'. The shard's is computed meanwhile.
    """
    need_x, need_w, need_b = mask
    grad_w = torch.zeros_like(weight) if need_w else None
    side_grads: list[list[Tensor | None]] = [[None, None] for _ in plan.axes]
    for i, parts in enumerate(plan.sides):
        for k, part in enumerate(parts):
            strip = strips.sides[i][k]
            if strip is None or not (need_x or need_w):
                continue
            if part is None or not grad.numel() or _is_empty(strip, part):
                side_grads[i][k] = torch.zeros_like(strip) if need_x else None
                continue
            g, gw, _ = _convolve_backward(_region(grad, part), strip, weight, plan, part, [need_x, need_w, False])
            side_grads[i][k] = g
            if grad_w is not None and gw is not None:
                grad_w += gw
    returned: list[tuple[int, list[tuple[Interval, Tensor]]]] = []
    pending = None
    if need_x:
        for i in reversed(range(len(plan.axes))):
            pending = strips.start_return(i, side_grads, x)
            if i > 0:
                returned.append((i, strips.finish_return(i, pending, side_grads)))
    there = bool(grad.numel()) and not _is_empty(x, plan.shard)
    grad_x = grad_b = None
    if there and (need_w or need_b):
        _, gw, grad_b = _convolve_backward(grad, x, weight, plan, plan.shard, [False, need_w, need_b])
        if grad_w is not None and gw is not None:
            grad_w = gw.add_(grad_w) if plan.axes else gw
    elif need_b:
        grad_b = grad.sum(dim=[0, *range(2, grad.ndim)])
    finish = None if total is None else total.start([grad_w, grad_b])
    if need_x:
        if there:
            grad_x, _, _ = _convolve_backward(grad, x, weight, plan, plan.shard, [True, False, False])
        grad_x = torch.zeros_like(x) if grad_x is None else grad_x
        if plan.axes:
            returned.append((0, strips.finish_return(0, pending, side_grads)))
        for i, mine in returned:
            strips.add_to_shard(i, grad_x, mine)
    if finish is not None:
        grad_w, grad_b = finish()
    return grad_x, grad_w, grad_b
