"""Convolution over sharded spatial dims, of any kernel, stride, dilation, padding, groups and shard sizes.

The entry points: torch's functions, above autograd, and the aten operators below it. How it works stands in
``halo_conv.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ..._compat import TensorMeta
from ...dispatch.planning import spec_of
from ...dispatch.registry import register
from ...dispatch.tensor import as_gradient, wrap
from ...errors import refuse
from ...layout.caches import cached
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Composed, Plan, operator
from ..common.alignment import free_dims
from .geometry import Pads, plan_convolution
from .halo_conv import ConvolutionPlan

_aten = torch.ops.aten


# -- entry points above autograd --------------------------------------------------------------------------------------


def plan_batched(
    call: Arguments,
    input: ShardTensorSpec,
    weight: TensorMeta,
    bias: TensorMeta | None,
    again: Callable[..., Any],
    make: Callable[[ShardTensorSpec], ConvolutionPlan],
    *,
    transposed: bool = False,
) -> Plan:
    """The plan of a convolution of a batched input, transposed or not.

    Args:
        again: the operator, of other tensors with the same options.
        make: makes the plan, given the spec that the input has when it runs.
    """
    if input.tensor_meta.dtype.is_complex and weight.dtype.is_complex:
        return Composed(lambda x, w, b: _as_real_convolution(again, x, w, b, transposed=transposed))
    # Sharded channels are spread over the batch or a spatial dim instead, see [Note: whole rows] in sort.py.
    call.redistribute("input", free_dims(call.name, input, 1))
    call.cast(call.autocast(), "input", *(["weight"] if bias is None else ["weight", "bias"]))
    return make(call.tensors["input"])


def _as_real_convolution(
    convolve: Callable[..., Any], x: Any, weight: Tensor, bias: Tensor | None, *, transposed: bool = False
) -> Any:
    """A complex convolution as a real one of twice the channels, real and imaginary parts side by side.

    So the halo is exchanged once. Kernels for complex numbers do not exist on every device.

    Args:
        convolve: the convolution of real tensors, with the options given.
        transposed: whether it is transposed: the weight has input channels first then.
    """

    def interleaved(t: Any) -> Any:
        return torch.view_as_real(t).movedim(-1, 2).flatten(1, 2)

    real, imaginary = weight.real, weight.imag
    # Rows: real and imaginary part of an output channel; columns: those of an input channel. Transposed: vice versa.
    first, second = (imaginary, -imaginary) if transposed else (-imaginary, imaginary)
    rows = [torch.stack([real, first], 2).flatten(1, 2), torch.stack([second, real], 2).flatten(1, 2)]
    w = torch.stack(rows, 1).flatten(0, 1)
    b = None if bias is None else torch.view_as_real(bias.resolve_conj()).flatten()
    y = convolve(interleaved(x.resolve_conj()), w, b)
    return torch.view_as_complex(y.unflatten(1, (-1, 2)).movedim(2, -1).contiguous())


def _per_spatial_dim(value: Any, n: int, name: str, what: str) -> tuple[int, ...]:
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
    return tuple((p, p) for p in _per_spatial_dim(padding, n, name, "padding"))


def _plan(
    call: Arguments,
    input: ShardTensorSpec,
    weight: TensorMeta,
    bias: TensorMeta | None,
    stride: int | Sequence[int],
    padding: str | int | Sequence[int],
    dilation: int | Sequence[int],
    groups: int,
    again: Callable[..., Any],
) -> Plan:
    n, shape = len(weight.shape) - 2, tuple(weight.shape)
    name = f"conv{n}d"
    strides, dilations = _per_spatial_dim(stride, n, name, "stride"), _per_spatial_dim(dilation, n, name, "dilation")
    pads = _pads(padding, n, name, shape[2:], strides, dilations)

    def make(x: ShardTensorSpec) -> ConvolutionPlan:
        if call.autocast() is None and weight.dtype != x.tensor_meta.dtype:
            raise RuntimeError(
                f"{call.name}: input of {x.tensor_meta.dtype} and weight of {weight.dtype} should be the same"
            )
        return plan_convolution(x, shape, strides, pads, dilations, groups)

    return plan_batched(call, input, weight, bias, again, make)


def _declare(n: int) -> None:
    function = getattr(torch, f"conv{n}d")

    @operator(function, getattr(_aten, f"conv{n}d"), tensors="input", parameters="weight bias")
    def plan_conv(
        call: Arguments,
        input: ShardTensorSpec,
        weight: TensorMeta,
        bias: TensorMeta | None = None,
        stride: int | Sequence[int] = 1,
        padding: str | int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> Plan:
        if len(input.shape) not in (n + 1, n + 2) or len(weight.shape) != n + 2:
            raise RuntimeError(
                f"conv{n}d: expected a {n + 1}-D (unbatched) or {n + 2}-D (batched) input and a {n + 2}-D weight, got "
                f"shapes {tuple(input.shape)} and {tuple(weight.shape)}"
            )

        def again(x: Any, w: Any, b: Any) -> Any:
            return function(x, w, b, stride, padding, dilation, groups)

        if len(input.shape) == n + 1:
            return Composed(lambda x, w, b: again(x.unsqueeze(0), w, b).squeeze(0))
        return _plan(call, input, weight, bias, stride, padding, dilation, groups, again)


for _n in (1, 2, 3):
    _declare(_n)


# Called by name, the operator goes through the same plans, so that its gradients are complete as well.
@operator(torch.convolution, _aten.convolution, _aten.convolution.default, tensors="input", parameters="weight bias")
def plan_convolution_of_any_dims(
    call: Arguments,
    input: ShardTensorSpec,
    weight: TensorMeta,
    bias: TensorMeta | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Plan:
    """``torch.convolution``, transposed or not."""
    if transposed:
        function = getattr(torch, f"conv_transpose{len(weight.shape) - 2}d")
        return Composed(lambda x, w, b: function(x, w, b, stride, padding, output_padding, groups, dilation))

    def again(x: Any, w: Any, b: Any) -> Any:
        return torch.convolution(x, w, b, stride, padding, dilation, False, output_padding, groups)

    return _plan(call, input, weight, bias, stride, padding, dilation, groups, again)


# -- below autograd ---------------------------------------------------------------------------------------------------
# The catch-all, for callers that come past every function above: same kernels, strips exchanged anew.


@cached(maxsize=1024)
def _contributing_plan(*args: Any) -> ConvolutionPlan:
    plan = plan_convolution(*args)
    plan.sums = True
    return plan


def _planned(
    input: Any, weight: Any, bias: Any, options: Sequence[Any], grad: Any = None
) -> tuple[ConvolutionPlan, list[Any]] | None:
    """The plan and the local operands; None where all tensors are whole, and transposed convolution goes on as such.

    Args:
        options: stride, padding, dilation, transposed, output padding and groups.
        grad: of the result, if it is known.
    """
    stride, padding, dilation, transposed, _, groups = options
    if transposed:
        if all(spec_of(t).is_replicate() for t in (input, weight, bias, grad) if isinstance(t, DTensor)):
            return None
        raise refuse(
            "conv_transpose",
            [input, weight],
            "below autograd, transposed convolution has no distributed form",
            "call torch.conv_transpose1d/2d/3d",
        )
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
    pads = tuple((p, p) for p in _per_spatial_dim(padding, n, "convolution", "padding"))
    stride, dilation = (_per_spatial_dim(v, n, "convolution", "stride or dilation") for v in (stride, dilation))
    plan = _contributing_plan(spec, tuple(weight.shape), stride, pads, dilation, groups)
    return plan, [t._local_tensor if isinstance(t, DTensor) else t for t in (input, weight, bias)]


@register(_aten.convolution.default)
def _aten_convolution(input: Any, weight: Any, bias: Any, *options: Any) -> Any:
    found = _planned(input, weight, bias, options)
    if found is None:
        return NotImplemented
    plan, local = found
    return plan.wrapped(plan.forward(*local)[0])


@register(_aten.convolution_backward.default)
def _aten_convolution_backward(grad: Any, input: Any, weight: Any, bias_sizes: Any, *options_and_mask: Any) -> Any:
    *options, output_mask = options_and_mask
    found = _planned(input, weight, None, options, grad)
    if found is None:
        return NotImplemented
    (plan, (x, w, _)), spec = found, spec_of(input)
    with torch.no_grad():
        local = as_gradient(grad, plan.outputs)._local_tensor
        gx, gw, gb = plan.backward(output_mask, [local], x, w, *plan.fetch.read(x)[1])
    placements = [Partial() if isinstance(p, Shard) else Replicate() for p in spec.placements]

    def parameter(g: Tensor | None) -> Any:
        return None if g is None else wrap(g, ShardTensorSpec.make(spec.mesh, placements, g.shape, g.dtype))

    return None if gx is None else wrap(gx, spec), parameter(gw), parameter(gb)
