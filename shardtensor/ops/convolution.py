"""Convolution over sharded spatial dims, of any kernel, stride, dilation, padding, groups and shard sizes.

[Note: convolution by parts] What a rank's outputs read is tiled by its own shard and the strips that it borrows
(see "corners" in halo.py). Convolution is linear, so its output is the sum of the convolutions of these parts, each
among zeros. The shard's own part is an ordinary convolution with zero padding, which runs while the strips travel; a
strip's part touches only the outputs near the border and is added to them. No enlarged copy of the shard is made, and
the backward pass saves the shard and the strips only. In the backward pass the strips' gradients are computed and sent
first, and travel during the shard's own part.

[Note: who computes which output] The rank that owns the input under the kernel's middle tap (``Window.cut``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ..dispatch import spec_of, wrap
from ..errors import refuse
from ..exchange import plan_intervals
from ..geometry import Interval, Window, intersect, intervals_of, length, map_cuts
from ..halo import Axis, Strips
from ..parameters import local_parameters
from ..registry import FUNCTIONS, register
from ..spec import ShardTensorSpec, stride_like
from ..tensor import ShardTensor, as_gradient, promote, redistribute_to

_aten = torch.ops.aten

Pads = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Part:
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
class _Plan:
    """One convolution on one rank."""

    axes: tuple[Axis, ...]
    shard: _Part
    sides: tuple[tuple[_Part | None, _Part | None], ...]
    out_spec: ShardTensorSpec
    out_shape: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@lru_cache(maxsize=1024)
def _plan(
    spec: ShardTensorSpec,
    weight: tuple[int, ...],
    stride: tuple[int, ...],
    pads: Pads,
    dilation: tuple[int, ...],
    groups: int,
) -> _Plan:
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
    out_spec = ShardTensorSpec(
        spec.mesh,
        spec.placements,
        type(spec.tensor_meta)(torch.Size(out_global), stride_of(spec, out_global), spec.tensor_meta.dtype),
        tuple(sizes),
    )
    inside = {axis.dim: axis for axis in axes}

    def part(of: Axis | None, side: Interval | None) -> _Part | None:
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
        return _Part(tuple(crop), tuple(part_pads), outputs)

    shard = part(None, None)
    assert shard is not None
    return _Plan(
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
    part: Tensor, weight: Tensor, plan: _Plan, spec: _Part, outputs: Sequence[int]
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
    part: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan, spec: _Part, outputs: Sequence[int]
) -> Tensor:
    for crop in spec.crop:
        part = part.narrow(*crop)
    inner, outer = _padding(part, weight, plan, spec, outputs)
    if any(outer):
        part = _aten.constant_pad_nd(part, outer)
    zeros = [0] * len(inner)
    return _aten.convolution(part, weight, bias, plan.stride, inner, plan.dilation, False, zeros, plan.groups)


def _convolve_backward(
    grad: Tensor, part: Tensor, weight: Tensor, plan: _Plan, spec: _Part, mask: list[bool]
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


def _region(y: Tensor, part: _Part) -> Tensor:
    return y if part.outputs is None else y.narrow(*part.outputs)


def _is_empty(x: Tensor, part: _Part) -> bool:
    return x.numel() == 0 or any(n == 0 for _, _, n in part.crop)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan, mesh: Any) -> tuple[Tensor, Strips]:
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


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, strips: Strips, plan: _Plan, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the shard, and this rank's contributions to those of weight and bias."""
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
    grad_x = grad_b = None
    if grad.numel() and not _is_empty(x, plan.shard):
        grad_x, gw, grad_b = _convolve_backward(grad, x, weight, plan, plan.shard, [need_x, need_w, need_b])
        if grad_w is not None and gw is not None:
            grad_w = gw.add_(grad_w) if plan.axes else gw
    elif need_b:
        grad_b = grad.sum(dim=[0, *range(2, grad.ndim)])
    if need_x:
        grad_x = torch.zeros_like(x) if grad_x is None else grad_x
        if plan.axes:
            returned.append((0, strips.finish_return(0, pending, side_grads)))
        for i, mine in returned:
            strips.add_to_shard(i, grad_x, mine)
    return grad_x, grad_w, grad_b


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: ShardTensor, weight: Tensor, bias: Tensor | None, plan: _Plan) -> Any:  # type: ignore[override]
        y, strips = _forward(x._local_tensor, weight, bias, plan, x._spec.mesh)
        ctx.plan = plan
        ctx.present = [[s is not None for s in pair] for pair in strips.sides]
        ctx.save_for_backward(x, weight, *(s for pair in strips.sides for s in pair if s is not None))
        return _wrapped(y, plan.out_spec)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        x, weight, *saved = ctx.saved_tensors
        plan: _Plan = ctx.plan
        strips = Strips(plan.axes, x._spec.mesh)
        remaining = iter(saved)
        strips.sides = [[next(remaining) if there else None for there in pair] for pair in ctx.present]
        local = as_gradient(grad, plan.out_spec)._local_tensor
        gx, gw, gb = _backward(local, x._local_tensor, weight, strips, plan, ctx.needs_input_grad[:3])
        return None if gx is None else wrap(gx, x._spec), gw, gb, None


def _wrapped(y: Tensor, spec: ShardTensorSpec) -> Any:
    return wrap(
        y, spec if y.dtype == spec.tensor_meta.dtype else spec.replace(meta=spec.tensor_meta._replace(dtype=y.dtype))
    )


# -- the doors --------------------------------------------------------------------------------------------------


def convolution(
    input: Any,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    pads: Pads,
    dilation: Sequence[int],
    groups: int,
) -> Any:
    """N-d convolution of a ShardTensor ``(N, C, *spatial)`` with replicated weights; differentiable.

    Args:
        input: sharded in any spatial dims and / or the batch.
        weight: ``(C_out, C / groups, *kernel)``, plain or a replicated DTensor.
        bias: ``(C_out,)`` or None.
        pads: zeros before and after each spatial dim of the whole tensor.
    """
    name = f"conv{len(stride)}d"
    x = sharded_input(input, weight, bias)
    spec = x._spec
    if spec.tensor_meta.dtype.is_complex and weight.is_complex():
        return _as_real_convolution(x, weight, bias, stride, pads, dilation, groups)
    if spec.partial_mesh_dims():
        x = redistribute_to(x, spec.for_gradient())
        spec = x._spec
    x, weight, bias = autocast_operands(x, weight, bias)
    if weight.dtype != spec_of(x).tensor_meta.dtype:
        raise RuntimeError(
            f"{name}: input of {spec_of(x).tensor_meta.dtype} and weight of {weight.dtype} should be the same"
        )
    plan = _plan(x._spec, tuple(weight.shape), tuple(stride), pads, tuple(dilation), groups)
    w, b = local_parameters(name, x._spec, weight, bias)
    with torch.autocast(spec.mesh.device_type, enabled=False):
        return _Convolution.apply(x, w, b, plan)


def autocast_operands(*tensors: Any) -> Any:
    """The operands in the dtype that autocast, if it is on, gives convolutions; None stays None."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    to = torch.get_autocast_dtype(device)
    return tuple(None if t is None else t.to(to) for t in tensors)


def _as_real_convolution(
    x: Any, weight: Tensor, bias: Tensor | None, stride: Sequence[int], pads: Pads, dilation: Sequence[int], groups: int
) -> Any:
    """A complex convolution as a real one of twice the channels, real and imaginary parts side by side.

    So the halo is exchanged once. Kernels for complex numbers do not exist on every device.
    """

    def interleaved(t: Any) -> Any:
        return torch.view_as_real(t).movedim(-1, 2).flatten(1, 2)

    real, imaginary = weight.real, weight.imag
    # Rows: real and imaginary part of an output channel; columns: those of an input channel.
    rows = [torch.stack([real, -imaginary], 2).flatten(1, 2), torch.stack([imaginary, real], 2).flatten(1, 2)]
    w = torch.stack(rows, 1).flatten(0, 1)
    b = None if bias is None else torch.view_as_real(bias.resolve_conj()).flatten()
    y = convolution(interleaved(x.resolve_conj()), w, b, stride, pads, dilation, groups)
    return torch.view_as_complex(y.unflatten(1, (weight.shape[0], 2)).movedim(2, -1).contiguous())


def sharded_input(x: Any, *others: Any) -> Any:
    """The input as a ShardTensor; a plain one that meets ShardTensor weights is replicated."""
    if isinstance(x, ShardTensor):
        return x
    if isinstance(x, DTensor):
        return ShardTensor.from_dtensor(x)
    mesh = next(t.device_mesh for t in others if isinstance(t, DTensor))
    return promote(x, mesh)


def per_spatial_dim(value: Any, n: int, name: str, what: str) -> tuple[int, ...]:
    values = (value,) * n if isinstance(value, int) else tuple(value)
    if len(values) == 1:
        values *= n
    if len(values) != n:
        raise RuntimeError(f"{name}: {what} {value} must be one number or {n}")
    return values


def _pads(
    padding: Any, n: int, name: str, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Pads:
    if isinstance(padding, str):
        if padding == "valid":
            return ((0, 0),) * n
        if padding != "same":
            raise ValueError(f"{name}: padding {padding!r}; it must be numbers, 'valid' or 'same'")
        if any(s != 1 for s in stride):
            raise RuntimeError(f"{name}: padding='same' is not supported for strided convolutions")
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((t // 2, t - t // 2) for t in totals)
    return tuple((p, p) for p in per_spatial_dim(padding, n, name, "padding"))


def _make_function(n: int) -> Callable[..., Any]:
    name = f"conv{n}d"

    def conv(
        input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
    ) -> Any:
        if not any(isinstance(t, DTensor) for t in (input, weight, bias)):
            return NotImplemented
        if input.ndim not in (n + 1, n + 2) or weight.ndim != n + 2:
            raise RuntimeError(
                f"{name}: expected a {n + 1}-D (unbatched) or {n + 2}-D (batched) input and a {n + 2}-D weight, got "
                f"shapes {tuple(input.shape)} and {tuple(weight.shape)}"
            )
        stride, dilation = per_spatial_dim(stride, n, name, "stride"), per_spatial_dim(dilation, n, name, "dilation")
        pads = _pads(padding, n, name, weight.shape[2:], stride, dilation)
        if input.ndim == n + 1:
            x = sharded_input(input, weight, bias).unsqueeze(0)
            return convolution(x, weight, bias, stride, pads, dilation, groups).squeeze(0)
        return convolution(input, weight, bias, stride, pads, dilation, groups)

    return conv


for _n, _function in ((1, torch.conv1d), (2, torch.conv2d), (3, torch.conv3d)):
    register(_function)(_make_function(_n))


@register(torch.convolution)
def _torch_convolution(
    input: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    n = weight.ndim - 2
    if transposed:
        function = getattr(torch, f"conv_transpose{n}d")
        return function(input, weight, bias, stride, padding, output_padding, groups, dilation)
    name = f"conv{n}d"
    stride, dilation = per_spatial_dim(stride, n, name, "stride"), per_spatial_dim(dilation, n, name, "dilation")
    pads = _pads(padding, n, name, weight.shape[2:], stride, dilation)
    return convolution(input, weight, bias, stride, pads, dilation, groups)


def _replicated(*operands: Any) -> bool:
    return all(spec_of(t).is_replicate() for t in operands if isinstance(t, DTensor))


def _refuse_transposed(transposed: bool, *operands: Any) -> None:
    if transposed:
        shown = [t for t in operands if isinstance(t, Tensor)]
        raise refuse(
            "conv_transpose",
            shown,
            "below autograd, transposed convolution has no distributed form",
            "call torch.conv_transpose1d/2d/3d",
        )


# The catch-all below autograd, for callers that come past every function above: same kernels, strips exchanged anew.


def _operands(
    input: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> tuple[Any, ...]:
    if not isinstance(input, DTensor):
        raise refuse(
            "convolution", [weight], "a plain input meets a ShardTensor weight", "make the input a ShardTensor"
        )
    spec = spec_of(input)
    if spec.partial_mesh_dims():
        raise refuse("convolution", spec, "the input is Partial", "redistribute it to Replicate or Shard first")
    for t in (weight, bias):
        if isinstance(t, DTensor) and not spec_of(t).is_replicate():
            raise refuse("convolution", [spec, t], "the weight is sharded", "redistribute it to Replicate() first")
    n = weight.ndim - 2
    pads = tuple((p, p) for p in per_spatial_dim(padding, n, "convolution", "padding"))
    stride, dilation = (per_spatial_dim(v, n, "convolution", "stride or dilation") for v in (stride, dilation))
    plan = _plan(spec, tuple(weight.shape), stride, pads, dilation, groups)
    local = [t._local_tensor if isinstance(t, DTensor) else t for t in (input, weight, bias)]
    return spec, plan, *local


@register(_aten.convolution.default)
def _aten_convolution(
    input: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    if transposed and _replicated(input, weight, bias):
        return NotImplemented
    _refuse_transposed(transposed, input, weight)
    spec, plan, x, w, b = _operands(input, weight, bias, stride, padding, dilation, groups)
    y, _ = _forward(x, w, b, plan, spec.mesh)
    return _wrapped(y, plan.out_spec)


@register(_aten.convolution_backward.default)
def _aten_convolution_backward(
    grad: Any,
    input: Any,
    weight: Any,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Sequence[bool],
) -> Any:
    if transposed and _replicated(grad, input, weight):
        return NotImplemented
    _refuse_transposed(transposed, input, weight)
    spec, plan, x, w, _ = _operands(input, weight, None, stride, padding, dilation, groups)
    strips = Strips(plan.axes, spec.mesh)
    for i in range(len(plan.axes)):
        strips.finish(i, strips.start(i, x))
    with torch.no_grad():
        local = as_gradient(grad, plan.out_spec)._local_tensor
        gx, gw, gb = _backward(local, x, w, strips, plan, output_mask)
    placements = [Partial() if isinstance(p, Shard) else Replicate() for p in spec.placements]

    def parameter(g: Tensor | None) -> Any:
        return None if g is None else wrap(g, ShardTensorSpec.make(spec.mesh, placements, g.shape, g.dtype))

    return None if gx is None else wrap(gx, spec), parameter(gw), parameter(gb)


# Called by name, the operator goes through the function above autograd, so that its gradients are complete as well.
FUNCTIONS[_aten.convolution.default] = FUNCTIONS[_aten.convolution] = _torch_convolution
