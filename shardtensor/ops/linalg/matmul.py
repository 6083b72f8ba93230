"""Matrix products: matmul and its kin, also added to something, and linear layers.

Each names its operands' dims and leaves the rest to common/named_dims.py: rows, columns, batch dims and contracted
dims may be sharded, on one operand or on several, alike or not. einsum is in einsum.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..._compat import AutogradFunction, FunctionContext, TensorMeta
from ...dispatch import planning
from ...dispatch.gradients import needed_gradients
from ...dispatch.registry import DECLINED, register
from ...dispatch.tensor import ShardTensor, redistribute_to
from ...errors import PLAIN_TARGET, refuse
from ...layout.spec import ShardTensorSpec
from ...operators.arguments import common_mesh
from ...operators.declaration import Arguments, Composed, Operand, Plan, operator, planned
from ..common.alignment import (
    as_operand,
    cast,
    fit,
    fitted_parts,
    product,
    wide_dtype,
    widened,
    with_own_parts,
)
from ..common.contraction import plan_contraction
from ..common.named_dims import Form, batch_labels, common_layout
from ..common.reduce import check_dtype, reduced_spec
from .sparse import MATRIX, MATRIX_BATCH, MATRIX_VECTOR, added_sparse_product, sparse_product

_aten = torch.ops.aten


# -- matrix products ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _matmul_form(a: torch.Size, b: torch.Size) -> Form:
    """Of ``a @ b``: batch dims, rows, contracted dim and columns."""
    (lead_a, lead_b), lead = batch_labels(a[:-2], b[:-2])
    rows, columns = ("rows",) * (len(a) > 1), ("columns",) * (len(b) > 1)
    return Form(((*lead_a, *rows, "k"), (*lead_b, "k", *columns)), (*lead, *rows, *columns))


def _plan_product(
    call: Arguments, function: Callable[..., Tensor], form: Form | None, input: Operand, other: object, name: str
) -> Plan:
    """The plan of a product of two tensors; NotImplemented where ``other`` is none."""
    if not isinstance(other, ShardTensorSpec):
        return DECLINED
    call.returned(function, input, other)
    form = form or _matmul_form(input.shape, other.shape)
    return plan_contraction(call, function.__name__, function, form, "input", name, is_product=True)


@operator(
    *(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.linalg.matmul),
    tensors="input other",
    sparse=sparse_product(torch.matmul),
)
def plan_matmul(call: Arguments, input: ShardTensorSpec, other: ShardTensorSpec) -> Plan:
    return _plan_product(call, torch.matmul, None, input, other, "other")


@operator(Tensor.__rmatmul__, tensors="input other")
def plan_rmatmul(call: Arguments, input: ShardTensorSpec, other: ShardTensorSpec) -> Plan:
    return Composed(lambda input, other: torch.matmul(other, input))


_OUTER = Form(("i", "j"), "ij")


@operator(torch.mm, Tensor.mm, _aten.mm, tensors="input mat2", sparse=sparse_product(torch.mm))
def plan_mm(
    call: Arguments, input: ShardTensorSpec, mat2: ShardTensorSpec, out_dtype: torch.dtype | None = None
) -> Plan:
    return _plan_product(call, torch.mm, MATRIX, input, mat2, "mat2") if out_dtype is None else DECLINED


@operator(torch.bmm, Tensor.bmm, _aten.bmm, tensors="input mat2", sparse=sparse_product(torch.bmm))
def plan_bmm(
    call: Arguments, input: ShardTensorSpec, mat2: ShardTensorSpec, out_dtype: torch.dtype | None = None
) -> Plan:
    return _plan_product(call, torch.bmm, MATRIX_BATCH, input, mat2, "mat2") if out_dtype is None else DECLINED


@operator(torch.mv, Tensor.mv, _aten.mv, tensors="input vec", sparse=sparse_product(torch.mv))
def plan_mv(call: Arguments, input: ShardTensorSpec, vec: ShardTensorSpec) -> Plan:
    return _plan_product(call, torch.mv, MATRIX_VECTOR, input, vec, "vec")


@operator(torch.outer, Tensor.outer, torch.ger, Tensor.ger, tensors="input vec2")
def plan_outer(call: Arguments, input: ShardTensorSpec, vec2: ShardTensorSpec) -> Plan:
    return _plan_product(call, torch.outer, _OUTER, input, vec2, "vec2")


# -- added to something -----------------------------------------------------------------------------------------------


Number = int | float | complex | bool


def _scaled(result: Tensor, dtype: torch.dtype, beta: Number, alpha: Number) -> tuple[Tensor, Number]:
    """``(alpha * result, beta)``, the factors as numbers of the result's kind, which torch makes of them."""
    result = result.to(dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        alpha, beta = (bool(n) if dtype == torch.bool else int(n) for n in (alpha, beta))  # type: ignore[arg-type]
    return result if alpha == 1 else result * alpha, beta


def _register_added(name: str, product: Callable[..., Tensor], tensors: str) -> None:
    """``beta * input + alpha * product(a, b)``; of half precision in float32, as it is rounded once.

    Args:
        tensors: what torch calls ``input``, ``a`` and ``b``.
    """
    function = getattr(torch, name)

    def plan(
        call: Arguments,
        input: ShardTensorSpec,
        a: ShardTensorSpec,
        b: ShardTensorSpec,
        *,
        beta: Number = 1,
        alpha: Number = 1,
    ) -> Plan:
        dtype = call.returned(function, input, a, b, beta=beta, alpha=alpha).dtype
        if call.autocast() is not None:
            dtype = call.autocast_dtype(function, input, a, b)

        def added(input: Tensor, a: Tensor, b: Tensor) -> Tensor:
            result, factor = _scaled(product(*widened(a, b)), wide_dtype(dtype), beta, alpha)
            if factor != 0:  # otherwise what input holds, NaN even, does not matter
                result = torch.add(result, input.to(result.dtype), alpha=factor)
            return result if wide_dtype(dtype) == dtype else result.to(dtype)

        return Composed(call.without_autocast(added))

    own = inspect.signature(plan)
    called = dict(zip(("input", "a", "b"), tensors.split(), strict=True))
    named = [p.replace(name=called.get(p.name, p.name)) for p in own.parameters.values()]
    plan.__signature__ = own.replace(parameters=named)  # type: ignore[attr-defined]
    sparse = added_sparse_product(torch.addmm, torch.mm) if function is torch.addmm else None
    operator(function, getattr(Tensor, name), getattr(_aten, name), tensors=tensors, sparse=sparse)(plan)


def _register_in_place(name: str, product: Callable[..., Tensor]) -> None:
    """``input.addmm_(a, b)`` and its kin. What is added has a plan; it is written by no plan, whose tensors may be
    others than the caller's.
    """
    function = getattr(torch, name)

    @planned(name + "_", tensors="input a b", partial="input")
    def plan_added(
        call: Arguments, input: ShardTensorSpec, a: ShardTensorSpec, b: ShardTensorSpec, beta: Number, alpha: Number
    ) -> Plan:
        meta = call.returned(function, input, a, b, beta=beta, alpha=alpha)
        if meta.shape != input.shape:  # addbmm_ of one device grows its tensor
            reason = "it would change the shape of a tensor in place"
            raise refuse(call.name, input, reason, "use the out-of-place form")
        dtype = meta.dtype

        def scaled(input: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Number]:
            return _scaled(product(*widened(a, b)), wide_dtype(dtype), beta, alpha)

        return Composed(call.without_autocast(scaled))  # which leaves operators in place alone

    @register(getattr(Tensor, name + "_"))
    def added_(input: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
        if common_mesh(name, [input, a, b]) is None:
            return DECLINED
        if not isinstance(input, DTensor):
            raise refuse(name + "_", [input, a, b], *PLAIN_TARGET)
        result, beta = plan_added(input, a, b, beta, alpha)
        if beta == 0:
            return input.copy_(result)
        return (input if beta == 1 else input.mul_(beta)).add_(result)


# What is added, and what torch calls the tensors.
_PRODUCTS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "addmm": (torch.mm, "input mat1 mat2"),
    "addmv": (torch.mv, "input mat vec"),
    "addr": (torch.outer, "input vec1 vec2"),
    "baddbmm": (torch.bmm, "input batch1 batch2"),
    "addbmm": (partial(torch.einsum, "bik,bkj->ij"), "input batch1 batch2"),
}
for _name, (_product, _tensors) in _PRODUCTS.items():
    _register_added(_name, _product, _tensors)
    _register_in_place(_name, _product)


# -- products of vectors ----------------------------------------------------------------------------------------------


@operator(_aten.dot.default, _aten.vdot.default)
def plan_dot(call: planning.AtenCall) -> planning.AtenPlan:
    check_dtype(call)
    reduced = call.reduced()
    first = next(iter(reduced.values()))
    base = common_layout(list(reduced.values()), first.tensor_meta)
    out = reduced_spec(base, call.meta, [0], False, "sum")
    func: Callable[..., Tensor] = call.func

    def dot(*vectors: Tensor) -> Tensor:
        return func(*(v.to(out.held_dtype) for v in vectors))

    compute = with_own_parts(dot, fitted_parts(call, base))
    return call.plan(out, {path: fit(s, base) for path, s in reduced.items()}, call=compute)


# -- linear ------------------------------------------------------------------------------------------------------------

# Linear and bilinear layers.
#
# The usual case has sharded rows and replicated weights: local products, and one sum of the weights' gradients over
# the ranks. Where features or weights are sharded, the layer is a contraction like other products.


class LinearPlan(Plan):
    """``F.linear`` of an input with unsharded features. Weight and bias are replicated."""

    saves = (0, 1)
    saved_for = {0: 1}
    twice = new = True
    depends = {0: (1,), 1: (0,), 2: ()}
    outputs: ShardTensorSpec

    def __init__(self, input: ShardTensorSpec, out: TensorMeta, bias: TensorMeta | None) -> None:
        self.outputs, self.input, self.bias = input.replace(meta=out), input, bias

    def wide_for_free(self, device: str) -> bool:
        """See :func:`product`."""
        return getattr(torch, device, None) is torch.cuda

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[()]]:
        return F.linear(x, weight, bias), ()

    def again(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if weight.ndim != 2 or torch.is_autocast_enabled(x.device.type):
            return F.linear(x, weight, bias)
        result = _WithoutValues.apply(x, weight)
        return result if bias is None else result + bias

    def backward(
        self, needed: Sequence[bool], grads: Sequence[Tensor | None], x: Tensor | None, weight: Tensor
    ) -> Sequence[Tensor | None]:
        """The sum of the gradients of weight and bias travels while the input's is computed."""
        grad, bias = grads[0], self.bias
        if grad is None:
            return None, None, None
        columns = weight if weight.ndim == 2 else weight.unsqueeze(0)
        rows = _rows(grad if weight.ndim == 2 else grad.unsqueeze(-1))
        grad_x, given = None, None if x is None else _rows(x)
        grad_w, grad_b = gradients_of_weights(needed[1:], rows, given, weight, bias, self.widens)
        finish = None if self.total is None else self.total.start([None, grad_w, grad_b], overwrite=True)
        if needed[0]:
            factors = rows, _like(columns, rows)
            # By columns where the input is, so that what follows has both in one order of memory.
            by_columns = given is not None and given.stride(0) == 1 and given.stride(1) >= given.shape[0] > 1
            grad_x = torch.mm(factors[1].t(), factors[0].t()).t() if by_columns else torch.mm(*factors)
            grad_x = cast(grad_x.view(self.input.own_shape), self.input.tensor_meta.dtype)
        if finish is not None:
            _, grad_w, grad_b = finish()
        return grad_x, grad_w, grad_b


class _WithoutValues(AutogradFunction):
    """The graph of a linear layer's result. Its derivatives need the operands only, so nothing is multiplied for it."""

    apply: ClassVar[Callable[..., Tensor]]

    @staticmethod
    def forward(ctx: FunctionContext, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_empty(()).expand(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (x, weight), (need_x, need_weight) = ctx.saved_tensors, needed_gradients(ctx, 0)
        of_x = torch.matmul(grad, _like(weight, grad)) if need_x else None
        of_weight = torch.mm(_rows(grad).t(), _like(_rows(x), grad)) if need_weight else None
        return of_x, of_weight


def gradients_of_weights(
    needed: Sequence[bool], grad: Tensor, x: Tensor | None, weight: Tensor, bias: TensorMeta | None, widens: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of weight and bias, out of the rows of a result's gradient and of the input.

    Args:
        widens: they are contributions, which are not to be rounded yet.
    """
    held = wide_dtype if widens else lambda dtype: dtype
    grad_w = grad_b = None
    if needed[0] and x is not None:
        factors = grad, _like(x, grad)
        grad_w = product(*factors) if widens else torch.mm(factors[0].t(), factors[1])
        grad_w = cast(grad_w if weight.ndim == 2 else grad_w.view(weight.shape), held(weight.dtype))
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
    return LinearPlan(input, meta, biased)


@planned("linear", tensors="input weight")
def _contracted(call: Arguments, input: ShardTensorSpec, weight: ShardTensorSpec) -> Plan:
    lead, rows = tuple(range(len(input.shape) - 1)), ("rows",) * (len(weight.shape) - 1)
    form = Form(((*lead, "k"), (*rows, "k")), (*lead, *rows))
    return plan_contraction(call, "linear", _products, form, "input", "weight", is_product=True)


def _products(x: Tensor, weight: Tensor) -> Tensor:
    """``F.linear``, which writes to its result where the input is a vector: selective checkpointing may keep that."""
    return F.linear(x, weight) if x.ndim > 1 else weight @ x


def _linear_by_contraction(mesh: DeviceMesh, x: ShardTensor, weight: Tensor, bias: Tensor | None) -> ShardTensor:
    y: ShardTensor = _contracted(x, weight)
    if bias is None:
        return y
    if isinstance(bias, DTensor) and x.ndim - 1 not in y._spec.sharded_dims():
        bias = as_operand(bias, mesh)
        bias = redistribute_to(bias, bias._spec.replicated())  # one number for each output
    return y + bias.to(y.dtype)


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
