"""Convolution over sharded spatial dims, of any kernel, stride, dilation, padding, groups and shard sizes.

The doors: torch's functions, above autograd, and the aten operators below it. How it works stands in
``halo_conv.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ...dispatch import spec_of, wrap
from ...errors import refuse
from ...gradients import once_differentiable
from ...halo import Strips
from ...parameters import GradientSum, unsummed_parameters
from ...registry import FUNCTIONS, register
from ...spec import ShardTensorSpec
from ...tensor import ShardTensor, as_gradient, promote, redistribute_to
from ..common.alignment import whole_rows
from .halo_conv import ConvolutionPlan, Pads, backward_by_parts, forward_by_parts, plan_convolution

_aten = torch.ops.aten


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: ShardTensor, weight: Tensor, bias: Tensor | None, plan: ConvolutionPlan, total: GradientSum
    ) -> Any:
        y, strips = forward_by_parts(x._local_tensor, weight, bias, plan, x._spec.mesh)
        ctx.plan, ctx.total = plan, total
        ctx.present = [[s is not None for s in pair] for pair in strips.sides]
        ctx.save_for_backward(x, weight, *(s for pair in strips.sides for s in pair if s is not None))
        return wrap(y, plan.out_spec.with_dtype(y.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        x, weight, *saved = ctx.saved_tensors
        plan: ConvolutionPlan = ctx.plan
        strips = Strips(plan.axes, x._spec.mesh)
        remaining = iter(saved)
        strips.sides = [[next(remaining) if there else None for there in pair] for pair in ctx.present]
        local = as_gradient(grad, plan.out_spec)._local_tensor
        mask = ctx.needs_input_grad[:3]
        gx, gw, gb = backward_by_parts(local, x._local_tensor, weight, strips, plan, mask, ctx.total)
        return None if gx is None else wrap(gx, x._spec), gw, gb, None, None


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
        input: sharded in any dims; the result is never sharded in its channels.
        weight: ``(C_out, C / groups, *kernel)``, plain or a replicated DTensor.
        bias: ``(C_out,)`` or None.
        pads: zeros before and after each spatial dim of the whole tensor.
    """
    name = f"conv{len(stride)}d"
    x = sharded_input(input, weight, bias)
    spec = x._spec
    if spec.tensor_meta.dtype.is_complex and weight.is_complex():
        return _as_real_convolution(x, weight, bias, stride, pads, dilation, groups)
    # Sharded channels are spread over the batch or a spatial dim instead, see [Note: whole rows] in sorting/sort.py.
    x = redistribute_to(x, whole_rows(name, spec.for_gradient(), 1))
    spec = x._spec
    x, weight, bias = autocast_operands(x, weight, bias)
    if weight.dtype != spec_of(x).tensor_meta.dtype:
        raise RuntimeError(
            f"{name}: input of {spec_of(x).tensor_meta.dtype} and weight of {weight.dtype} should be the same"
        )
    plan = plan_convolution(x._spec, tuple(weight.shape), tuple(stride), pads, tuple(dilation), groups)
    (w, b), total = unsummed_parameters(name, x._spec, weight, bias)
    with torch.autocast(spec.mesh.device_type, enabled=False):
        return _Convolution.apply(x, w, b, plan, total)


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
    plan = plan_convolution(spec, tuple(weight.shape), stride, pads, dilation, groups)
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
    y, _ = forward_by_parts(x, w, b, plan, spec.mesh)
    return wrap(y, plan.out_spec.with_dtype(y.dtype))


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
        gx, gw, gb = backward_by_parts(local, x, w, strips, plan, output_mask)
    placements = [Partial() if isinstance(p, Shard) else Replicate() for p in spec.placements]

    def parameter(g: Tensor | None) -> Any:
        return None if g is None else wrap(g, ShardTensorSpec.make(spec.mesh, placements, g.shape, g.dtype))

    return None if gx is None else wrap(gx, spec), parameter(gw), parameter(gb)


# Called by name, the operator goes through the function above autograd, so that its gradients are complete as well.
FUNCTIONS[_aten.convolution.default] = FUNCTIONS[_aten.convolution] = _torch_convolution
