"""Linear and bilinear layers.

The usual case has sharded rows and replicated weights: local products, and one sum of the weights' gradients over the
ranks. Where features or weights are sharded, the layer is a contraction like other products.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..._compat import TensorMeta
from ...dispatch.tensor import ShardTensor, redistribute_to
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Composed, Operand, Plan, operator
from ..common.alignment import as_operand, wide_dtype
from ..common.contraction import Form, contract
from ..common.half import cast, product

_aten = torch.ops.aten


class LinearPlan(Plan):
    """``F.linear`` of an input with unsharded features. Weight and bias are replicated."""

    saves = (0, 1)
    twice = True
    depends = {0: (1,), 1: (0,), 2: ()}
    outputs: ShardTensorSpec

    def __init__(self, out: ShardTensorSpec, bias: TensorMeta | None) -> None:
        self.outputs, self.bias = out, bias

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[()]]:
        return F.linear(x, weight, bias), ()

    def backward(
        self, needed: Sequence[bool], grads: Sequence[Tensor | None], x: Tensor, weight: Tensor
    ) -> Sequence[Tensor | None]:
        """The sum of the gradients of weight and bias travels while the input's is computed."""
        grad, bias = grads[0], self.bias
        if grad is None:
            return None, None, None
        columns = weight if weight.ndim == 2 else weight.unsqueeze(0)
        rows = _rows(grad if weight.ndim == 2 else grad.unsqueeze(-1))
        grad_x, given = None, _rows(x) if needed[1] else x
        grad_w, grad_b = gradients_of_weights(needed[1:], rows, given, weight, bias, self.sums)
        finish = None if self.total is None else self.total.start([None, grad_w, grad_b], overwrite=True)
        if needed[0]:
            factors = rows, _like(columns, rows)
            # By columns where the input is, so that what follows has both in one order of memory.
            by_columns = needed[1] and given.stride(0) == 1 and given.stride(1) >= given.shape[0] > 1
            grad_x = torch.mm(factors[1].t(), factors[0].t()).t() if by_columns else torch.mm(*factors)
            grad_x = cast(grad_x.view(x.shape), x.dtype)
        if finish is not None:
            _, grad_w, grad_b = finish()
        return grad_x, grad_w, grad_b


def gradients_of_weights(
    needed: Sequence[bool], grad: Tensor, x: Tensor, weight: Tensor, bias: TensorMeta | None, sums: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of weight and bias, out of the rows of a result's gradient and of the input.

    Args:
        sums: they are contributions, which must not be rounded yet.
    """
    held = wide_dtype if sums else lambda dtype: dtype
    grad_w = grad_b = None
    if needed[0]:
        factors = grad, _like(x, grad)
        grad_w = (product(*factors) if sums else torch.mm(factors[0].t(), factors[1])).view(weight.shape)
        grad_w = cast(grad_w, held(weight.dtype))
    if needed[1] and bias is not None:
        grad_b = grad.sum(0, dtype=wide_dtype(grad.dtype))
        grad_b = grad_b if bias.shape == grad_b.shape else grad_b.sum_to_size(bias.shape)
        grad_b = cast(grad_b, held(bias.dtype))
    return grad_w, grad_b


def _rows(t: Tensor) -> Tensor:
    """All but the last dim as one."""
    return t if t.ndim == 2 else t.flatten(0, -2) if t.ndim > 2 else t.unsqueeze(0)


def _like(t: Tensor, grad: Tensor) -> Tensor:
    """What a gradient is multiplied with: of its dtype, which under autocast is another, and conjugate."""
    t = cast(t, grad.dtype)
    return t.conj() if t.is_complex() else t


@operator(F.linear, _aten.linear, tensors="input", parameters="weight bias", sharded="weight bias")
def plan_linear(call: Arguments, input: ShardTensorSpec, weight: Operand, bias: Operand | None = None) -> Plan:
    """Rows are sharded in the usual case; where features or the weight are, it is a contraction."""
    result = call.returned(F.linear, input, weight, bias)
    last, meta = len(input.shape) - 1, input.tensor_meta
    sharded = any(isinstance(t, ShardTensorSpec) for t in (weight, bias))
    if last in input.sharded_dims() or sharded or (bias is not None and len(bias.shape) > 1):
        return Composed(partial(_linear_by_contraction, call.mesh))
    dtype = call.autocast()
    casts = dtype is not None and meta.dtype.is_floating_point and meta.dtype != torch.float64
    meta = TensorMeta(result.shape, result.stride(), dtype if casts else result.dtype)  # type: ignore[arg-type]
    biased = bias.tensor_meta if isinstance(bias, ShardTensorSpec) else bias
    return LinearPlan(input.replace(meta=meta), biased)


def _linear_by_contraction(mesh: DeviceMesh, x: ShardTensor, weight: Tensor, bias: Tensor | None) -> ShardTensor:
    lead, rows = tuple(range(x.ndim - 1)), ("rows",) * (weight.ndim - 1)
    y = contract("linear", F.linear, Form(((*lead, "k"), (*rows, "k")), (*lead, *rows)), x, weight, mesh=mesh)
    if bias is None:
        return y
    if isinstance(bias, DTensor) and x.ndim - 1 not in y._spec.sharded_dims():
        bias = as_operand(bias, mesh)
        bias = redistribute_to(bias, bias._spec.replicated())  # one number for each output
    return y + bias.to(y.dtype)  # type: ignore[return-value]


@operator(F.bilinear, torch.bilinear, tensors="input1 input2 weight bias")
def plan_bilinear(
    call: Arguments,
    input1: ShardTensorSpec,
    input2: ShardTensorSpec,
    weight: ShardTensorSpec,
    bias: ShardTensorSpec | None = None,
) -> Plan:
    dtype = call.returned(F.bilinear, input1, input2, weight, bias).dtype
    if call.autocast() is not None:
        dtype = call.autocast_dtype(F.bilinear, input1, input2, weight)

    def run(x1: ShardTensor, x2: ShardTensor, weight: ShardTensor, bias: ShardTensor | None) -> Tensor:
        y = torch.einsum("...i,oij,...j->...o", x1.to(dtype), weight.to(dtype), x2.to(dtype))
        return y if bias is None else y + bias.to(dtype)

    return Composed(call.without_autocast(run))
