"""Group, layer and RMS normalization, whatever is sharded.

Where no normalized dim is sharded, nothing is sent forward, and torch's own kernel works on the shard; else see
``plans.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._compat import group_norm_has_zeros, unflatten
from ...dispatch.tensor import ShardTensor, redistribute_to
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Composed, LocalPlan, Operand, Plan, operator
from ..common.alignment import wide_dtype
from .geometry import (
    geometry_of_groups,
    geometry_of_last_dims,
    prepare_parameters,
    result_dtype,
    with_unsharded_groups,
)
from .plans import LocalGroupNorm, LocalLayerNorm, ShardedNorm
from .statistics import moments_of

_aten = torch.ops.aten

_OPERANDS: Any = {"tensors": "input", "parameters": "weight bias", "sharded": "weight bias"}


# -- group norm ------------------------------------------------------------------------------------------------------


def _declare_group_norm(function: Callable[..., Tensor]) -> None:
    # Each on its own, because only the one in torch.nn.functional refuses groups of one value.
    @operator(function, **_OPERANDS)
    def plan_group_norm(
        call: Arguments,
        input: ShardTensorSpec,
        num_groups: int,
        weight: Operand | None = None,
        bias: Operand | None = None,
        eps: float = 1e-5,
    ) -> Plan:
        call.returned(function, input, num_groups, weight, bias, eps)
        x = call.redistribute("input", with_unsharded_groups("group_norm", input, num_groups))
        geometry = geometry_of_groups("group_norm", x, num_groups, eps)
        prepare_parameters(call, geometry, weight=weight, bias=bias)
        dtype = result_dtype(call, lambda t, w, b: torch.group_norm(t, 1, w, b), x, weight, bias)
        kind = ShardedNorm if geometry.merges else LocalGroupNorm
        plan = kind(call, geometry, dtype, weight, bias)
        if group_norm_has_zeros:
            plan.depends = {}
        if x is not input:
            call.then = plan.outputs.with_layout(input.layout)  # type: ignore[union-attr]
        return plan


for _function in (F.group_norm, torch.group_norm):
    _declare_group_norm(_function)


@operator(torch.native_group_norm, _aten.native_group_norm, **_OPERANDS)
def plan_native_group_norm(
    call: Arguments,
    input: ShardTensorSpec,
    weight: Operand | None,
    bias: Operand | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> Plan:
    """Group norm with mean and reciprocal standard deviation, which torch differentiates."""
    if tuple(input.shape[:2]) != (N, C) or N * C * HxW != input.shape.numel():
        raise RuntimeError(f"native_group_norm: sizes {N}, {C}, {HxW} do not fit an input of {tuple(input.shape)}")
    grouped = with_unsharded_groups("group_norm", input, group)
    kernel: Any = torch.native_group_norm
    dtype = result_dtype(call, lambda t, w, b: kernel(t, w, b, 2, 1, 1, 1, eps)[1], input, weight, bias)

    def compute(x: Any, weight: Any, bias: Any) -> tuple[Any, ...]:
        y = torch.group_norm(x, group, weight, bias, eps)
        x = unflatten(redistribute_to(x, grouped), 1, (group, C // group))
        over = list(range(2, x.ndim))
        return y, *(t.squeeze(over) for t in moments_of(x, over, eps, dtype))

    return Composed(compute)


# -- layer norm ------------------------------------------------------------------------------------------------------


@operator(F.layer_norm, torch.layer_norm, **_OPERANDS)
def plan_layer_norm(
    call: Arguments,
    input: ShardTensorSpec,
    normalized_shape: Sequence[int],
    weight: Operand | None = None,
    bias: Operand | None = None,
    eps: float = 1e-5,
) -> Plan:
    shape = tuple(normalized_shape)
    call.returned(torch.layer_norm, input, shape, weight, bias, eps)
    geometry = geometry_of_last_dims("layer_norm", input, len(shape), eps)
    prepare_parameters(call, geometry, weight=weight, bias=bias)
    dtype = result_dtype(call, lambda t, w, b: torch.layer_norm(t, (1,), w, b), input, weight, bias)
    kind = ShardedNorm if geometry.merges else LocalLayerNorm
    return kind(call, geometry, dtype, weight, bias)


@operator(torch.native_layer_norm, _aten.native_layer_norm, **_OPERANDS)
def plan_native_layer_norm(
    call: Arguments,
    input: ShardTensorSpec,
    normalized_shape: Sequence[int],
    weight: Operand | None,
    bias: Operand | None,
    eps: float,
) -> Plan:
    """Layer norm with mean and reciprocal standard deviation, whose gradients torch ignores."""
    shape, n = tuple(normalized_shape), len(input.shape)
    call.returned(torch.native_layer_norm, input, shape, weight, bias, eps)
    over = list(range(n - len(shape), n))
    kernel: Any = torch.native_layer_norm
    dtype = result_dtype(call, lambda t, w, b: kernel(t, (1,), w, b, eps)[1], input, weight, bias)

    def compute(x: ShardTensor, weight: Any, bias: Any) -> tuple[Any, ...]:
        y = torch.layer_norm(x, shape, weight, bias, eps)
        return y, *moments_of(x.detach(), over, eps, dtype)

    return Composed(compute)


# -- RMS norm --------------------------------------------------------------------------------------------------------


@operator(F.rms_norm, torch.rms_norm, tensors="input", parameters="weight", sharded="weight")
def plan_rms_norm(
    call: Arguments,
    input: ShardTensorSpec,
    normalized_shape: Sequence[int],
    weight: Operand | None = None,
    eps: float | None = None,
) -> Plan:
    shape, own_dtype = tuple(normalized_shape), input.tensor_meta.dtype
    call.returned(torch.rms_norm, input, shape, weight, eps)
    if own_dtype.is_complex:
        raise call.refuse("complex numbers are not supported", "normalize real and imaginary parts")
    smallest = torch.finfo(wide_dtype(own_dtype)).eps if eps is None else eps
    geometry = geometry_of_last_dims("rms_norm", input, len(shape), smallest, centered=False)
    prepare_parameters(call, geometry, weight=weight)
    dtype = result_dtype(call, lambda t, w: torch.rms_norm(t, (1,), w), input, weight)
    if not geometry.merges and not geometry.has_empty_shards:
        # Neither is the weight sharded then, nor is a part of it used.
        return LocalPlan(lambda x, w: torch.rms_norm(x, shape, w, eps), geometry.output_spec(dtype))
    return ShardedNorm(call, geometry, dtype, weight)
