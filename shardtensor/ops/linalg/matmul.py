"""Products: linear, matmul and its kin, einsum, tensordot, inner, outer, kron, bilinear.

Each names its operands' dims and leaves the rest to common/contraction.py: rows, columns, batch dims and contracted
dims may be cut, on one operand or on several, alike or not.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from types import NotImplementedType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ... import dispatch
from ..._compat import TensorMeta
from ...dispatch import meta_of
from ...errors import UnsupportedSharding, refuse
from ...operators import Arguments, Composed, Operand, Plan, operator
from ...registry import register
from ...spec import ShardTensorSpec
from ...tensor import ShardTensor, redistribute_to
from ..common.alignment import as_operand, common_cut, common_mesh, fit, torch_judges, whole_rows
from ..common.contraction import ContractionPlan, Form, arrange, batch_labels, contract, plan_contraction
from ..common.reduce import check_dtype, reduced_spec

_aten = torch.ops.aten


# -- matrix products ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _matmul_form(a: torch.Size, b: torch.Size) -> Form:
    """Of ``a @ b``: batch dims, rows, contracted dim and columns."""
    (lead_a, lead_b), lead = batch_labels(a[:-2], b[:-2])
    rows, columns = ("rows",) * (len(a) > 1), ("columns",) * (len(b) > 1)
    return Form(((*lead_a, *rows, "k"), (*lead_b, "k", *columns)), (*lead, *rows, *columns))


def _plan_product(
    call: Arguments, function: Callable[..., Tensor], form: Form | None, input: Operand, other: Any, name: str
) -> Plan:
    """The plan of a product of two tensors; NotImplemented where ``other`` is none."""
    if not isinstance(other, ShardTensorSpec):
        return NotImplemented
    call.returned(function, input, other)
    form = form or _matmul_form(input.shape, other.shape)
    return plan_contraction(call, function.__name__, function, form, "input", name)


@operator(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.linalg.matmul, tensors="input other")
def plan_matmul(call: Arguments, input: ShardTensorSpec, other: ShardTensorSpec) -> Plan:
    return _plan_product(call, torch.matmul, None, input, other, "other")


@operator(Tensor.__rmatmul__, tensors="input other")
def plan_rmatmul(call: Arguments, input: ShardTensorSpec, other: ShardTensorSpec) -> Plan:
    return Composed(lambda input, other: torch.matmul(other, input))


_MM = Form(("ik", "kj"), "ij")
_BMM = Form(("bik", "bkj"), "bij")
_MV = Form(("ik", "k"), "i")
_OUTER = Form(("i", "j"), "ij")


@operator(torch.mm, Tensor.mm, tensors="input mat2")
def plan_mm(
    call: Arguments, input: ShardTensorSpec, mat2: ShardTensorSpec, out_dtype: torch.dtype | None = None
) -> Plan:
    return _plan_product(call, torch.mm, _MM, input, mat2, "mat2") if out_dtype is None else NotImplemented


@operator(torch.bmm, Tensor.bmm, tensors="input mat2")
def plan_bmm(
    call: Arguments, input: ShardTensorSpec, mat2: ShardTensorSpec, out_dtype: torch.dtype | None = None
) -> Plan:
    return _plan_product(call, torch.bmm, _BMM, input, mat2, "mat2") if out_dtype is None else NotImplemented


@operator(torch.mv, Tensor.mv, tensors="input vec")
def plan_mv(call: Arguments, input: ShardTensorSpec, vec: ShardTensorSpec) -> Plan:
    return _plan_product(call, torch.mv, _MV, input, vec, "vec")


@operator(torch.outer, Tensor.outer, torch.ger, Tensor.ger, tensors="input vec2")
def plan_outer(call: Arguments, input: ShardTensorSpec, vec2: ShardTensorSpec) -> Plan:
    return _plan_product(call, torch.outer, _OUTER, input, vec2, "vec2")


# -- added to something -----------------------------------------------------------------------------------------------


Number = int | float | complex | bool


def _sum_of_products(batch1: Tensor, batch2: Tensor) -> Tensor:
    return torch.einsum("bik,bkj->ij", batch1, batch2)


def _scaled(result: Any, dtype: torch.dtype, beta: Number, alpha: Number) -> tuple[Any, Number]:
    """``(alpha * result, beta)``, the factors as numbers of the result's kind, which torch makes of them."""
    if not torch.is_autocast_enabled(result.device.type):
        result = result.to(dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        alpha, beta = (bool(n) if dtype == torch.bool else int(n) for n in (alpha, beta))  # type: ignore[arg-type]
    return result if alpha == 1 else result * alpha, beta


def _plan_added(
    call: Arguments,
    function: Callable[..., Tensor],
    product: Callable[..., Tensor],
    operands: Sequence[Operand],
    beta: Number,
    alpha: Number,
) -> Plan:
    """The plan of ``beta * input + alpha * product(a, b)``."""
    dtype = call.returned(function, *operands, beta=beta, alpha=alpha).dtype

    def added(input: ShardTensor, a: ShardTensor, b: ShardTensor) -> ShardTensor:
        result, factor = _scaled(product(a, b), dtype, beta, alpha)
        if factor == 0:
            return result  # what input holds, NaN even, does not matter then
        return torch.add(result, input.to(result.dtype), alpha=factor)

    return Composed(added)


@operator(torch.addmm, Tensor.addmm, tensors="input mat1 mat2")
def plan_addmm(
    call: Arguments,
    input: ShardTensorSpec,
    mat1: ShardTensorSpec,
    mat2: ShardTensorSpec,
    *,
    beta: Number = 1,
    alpha: Number = 1,
) -> Plan:
    return _plan_added(call, torch.addmm, torch.mm, (input, mat1, mat2), beta, alpha)


@operator(torch.addmv, Tensor.addmv, tensors="input mat vec")
def plan_addmv(
    call: Arguments,
    input: ShardTensorSpec,
    mat: ShardTensorSpec,
    vec: ShardTensorSpec,
    *,
    beta: Number = 1,
    alpha: Number = 1,
) -> Plan:
    return _plan_added(call, torch.addmv, torch.mv, (input, mat, vec), beta, alpha)


@operator(torch.addr, Tensor.addr, tensors="input vec1 vec2")
def plan_addr(
    call: Arguments,
    input: ShardTensorSpec,
    vec1: ShardTensorSpec,
    vec2: ShardTensorSpec,
    *,
    beta: Number = 1,
    alpha: Number = 1,
) -> Plan:
    return _plan_added(call, torch.addr, torch.outer, (input, vec1, vec2), beta, alpha)


@operator(torch.baddbmm, Tensor.baddbmm, tensors="input batch1 batch2")
def plan_baddbmm(
    call: Arguments,
    input: ShardTensorSpec,
    batch1: ShardTensorSpec,
    batch2: ShardTensorSpec,
    *,
    beta: Number = 1,
    alpha: Number = 1,
) -> Plan:
    return _plan_added(call, torch.baddbmm, torch.bmm, (input, batch1, batch2), beta, alpha)


@operator(torch.addbmm, Tensor.addbmm, tensors="input batch1 batch2")
def plan_addbmm(
    call: Arguments,
    input: ShardTensorSpec,
    batch1: ShardTensorSpec,
    batch2: ShardTensorSpec,
    *,
    beta: Number = 1,
    alpha: Number = 1,
) -> Plan:
    return _plan_added(call, torch.addbmm, _sum_of_products, (input, batch1, batch2), beta, alpha)


def _register_in_place(name: str, product: Callable[..., Tensor]) -> None:
    """``input.addmm_(a, b)`` and its kin. Not by a plan, whose tensors may be others than the caller's."""
    function = getattr(torch, name)

    @register(getattr(Tensor, name + "_"))
    def added_(
        input: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1
    ) -> ShardTensor | NotImplementedType:
        if common_mesh(name, [input, a, b]) is None:
            return NotImplemented
        if not isinstance(input, DTensor):
            reason = "a ShardTensor cannot be written into a plain tensor"
            raise refuse(name + "_", [input, a, b], reason, "use the out-of-place form")
        dtype = torch_judges(function, input, a, b, beta=beta, alpha=alpha).dtype
        result, beta = _scaled(product(a, b), dtype, beta, alpha)
        if torch.broadcast_shapes(input.shape, result.shape) != input.shape:  # addbmm_ of one device grows its tensor
            reason = "it would change the shape of a tensor in place"
            raise refuse(name + "_", input, reason, "use the out-of-place form")
        if beta == 0:
            return input.copy_(result)
        return (input if beta == 1 else input.mul_(beta)).add_(result)


for _name, _of in {
    "addmm": torch.mm,
    "addmv": torch.mv,
    "addr": torch.outer,
    "baddbmm": torch.bmm,
    "addbmm": _sum_of_products,
}.items():
    _register_in_place(_name, _of)


# -- linear and bilinear layers -----------------------------------------------------------------------------------


class LinearPlan(Plan):
    """``F.linear`` of an input with unsharded features. Weight and bias are replicated."""

    saves = (0, 1)
    twice = True
    outputs: ShardTensorSpec

    def __init__(self, out: ShardTensorSpec, bias: TensorMeta | None) -> None:
        self.outputs, self.bias = out, bias

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[()]]:
        return F.linear(x, weight, bias), ()

    def backward(
        self, needed: Sequence[bool], grads: Sequence[Tensor | None], x: Tensor, weight: Tensor
    ) -> Sequence[Tensor | None]:
        grad = grads[0]
        if grad is None:
            return None, None, None
        columns = weight if weight.ndim == 2 else weight.unsqueeze(0)
        rows = _rows(grad if weight.ndim == 2 else grad.unsqueeze(-1))
        grad_x = grad_w = grad_b = None
        if needed[1]:
            grad_w = torch.mm(rows.t(), _rows(_like(x, rows))).view(weight.shape)
            grad_w = grad_w if grad_w.dtype == weight.dtype else grad_w.to(weight.dtype)
        if needed[2] and self.bias is not None:
            grad_b = rows.sum(0) if self.bias.shape == columns.shape[:1] else rows.sum_to_size(self.bias.shape)
            grad_b = grad_b if grad_b.dtype == self.bias.dtype else grad_b.to(self.bias.dtype)
        # The sum over the ranks travels while the input's gradient is computed.
        finish = None if self.total is None else self.total.start([None, grad_w, grad_b])
        if needed[0]:
            grad_x = torch.mm(rows, _like(columns, rows)).view(x.shape)
            grad_x = grad_x if grad_x.dtype == x.dtype else grad_x.to(x.dtype)
        if finish is not None:
            _, grad_w, grad_b = finish()
        return grad_x, grad_w, grad_b


def _rows(t: Tensor) -> Tensor:
    """All but the last dim as one."""
    return t if t.ndim == 2 else t.flatten(0, -2) if t.ndim > 2 else t.unsqueeze(0)


def _like(t: Tensor, grad: Tensor) -> Tensor:
    """What a gradient is multiplied with: of its dtype, which under autocast is another, and conjugate."""
    t = t if t.dtype == grad.dtype else t.to(grad.dtype)
    return t.conj() if t.is_complex() else t


@operator(F.linear, _aten.linear, tensors="input", parameters="weight bias", shardable="weight bias")
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
    return y + bias.to(y.dtype)


@operator(F.bilinear, torch.bilinear, tensors="input1 input2 weight bias")
def plan_bilinear(
    call: Arguments,
    input1: ShardTensorSpec,
    input2: ShardTensorSpec,
    weight: ShardTensorSpec,
    bias: ShardTensorSpec | None = None,
) -> Plan:
    call.returned(F.bilinear, input1, input2, weight, bias)

    def run(x1: ShardTensor, x2: ShardTensor, weight: ShardTensor, bias: ShardTensor | None) -> ShardTensor:
        y = torch.einsum("...i,oij,...j->...o", x1, weight, x2)
        return y if bias is None else y + bias.to(y.dtype)

    return Composed(run)


# -- einsum and what it expresses -----------------------------------------------------------------------------------


@operator(torch.einsum, tensors="operands")
def plan_einsum(call: Arguments, equation: str, *operands: ShardTensorSpec) -> Plan:
    """All operands at once where the shards allow it, otherwise two at a time, from the left."""
    specs = operands
    if not isinstance(equation, str):  # dims by number; torch calls again with letters
        return NotImplemented
    call.returned(torch.einsum, equation, *specs)
    terms, out = _letters(equation, [len(spec.shape) for spec in specs])
    spelled = ",".join(terms) + "->" + out
    try:
        how = arrange("einsum", _einsum_form(terms, out, [spec.shape for spec in specs]), specs)
    except UnsupportedSharding:
        if len(specs) < 3:
            raise
        return Composed(lambda operands: _two_at_a_time(terms, out, operands))
    plan = ContractionPlan(how, lambda *parts: torch.einsum(spelled, *parts))
    return Composed(plan.run_on)


@lru_cache(maxsize=1024)
def _letters_of(equation: str, ndims: tuple[int, ...]) -> tuple[tuple[str, ...], str]:
    given, arrow, result = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    free = [c for c in string.ascii_letters if c not in equation]
    longest = max(n - len(t.replace("...", "")) for t, n in zip(terms, ndims, strict=True))
    dots = "".join(free[:longest])

    def spelled(term: str, ndim: int) -> str:
        n = ndim - len(term.replace("...", ""))
        return term.replace("...", dots[len(dots) - n :]) if "..." in term else term

    spelled_terms = tuple(spelled(t, n) for t, n in zip(terms, ndims, strict=True))
    if not arrow:
        once = sorted(c for c in set(given) - set(".,") if given.count(c) == 1)
        result = "..." * ("..." in given) + "".join(once)
    return spelled_terms, result.replace("...", dots)


def _letters(equation: str, ndims: Sequence[int]) -> tuple[tuple[str, ...], str]:
    """The operands' and the result's dims, one letter each.

    Example:
        >>> _letters("b...i, ij", [4, 2])
        (('baci', 'ij'), 'acbj')
    """
    return _letters_of(equation, tuple(ndims))


def _einsum_form(terms: Sequence[str], out: str, shapes: Sequence[torch.Size]) -> Form:
    length: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for letter, n in zip(term, shape, strict=True):
            length[letter] = n if length.get(letter, 1) == 1 else length[letter]
    labels = tuple(
        tuple(c if n == length[c] else None for c, n in zip(term, shape, strict=True))
        for term, shape in zip(terms, shapes, strict=True)
    )
    return Form(labels, out)


def _two_at_a_time(terms: Sequence[str], out: str, operands: Sequence[ShardTensor]) -> ShardTensor:
    (a, b), rest = terms[:2], terms[2:]
    kept = "".join(dict.fromkeys(c for c in a + b if c in out or any(c in term for term in rest)))
    first = torch.einsum(f"{a},{b}->{kept}", *operands[:2])
    return torch.einsum(",".join([kept, *rest]) + "->" + out, first, *operands[2:])


@operator(torch.tensordot, tensors="a b", parameters="dims")
def plan_tensordot(
    call: Arguments,
    a: ShardTensorSpec,
    b: ShardTensorSpec,
    dims: int | Sequence[int] | Sequence[Sequence[int]] | TensorMeta = 2,
    out: None = None,
) -> Plan:
    if isinstance(dims, TensorMeta):
        return Composed(lambda a, b, dims: torch.tensordot(a, b, dims.tolist()))
    if not isinstance(b, ShardTensorSpec):
        return NotImplemented
    if isinstance(dims, int):
        call.returned(torch.tensordot, a, b, dims)
        of_a, of_b = tuple(range(len(a.shape) - dims, len(a.shape))), tuple(range(dims))
    else:
        of_a, of_b = (tuple(d) if isinstance(d, (list, tuple)) else (d,) for d in dims)
        call.returned(torch.tensordot, a, b, (of_a, of_b))
    left: list[Any] = [("a", d) for d in range(len(a.shape))]
    right: list[Any] = [("b", d) for d in range(len(b.shape))]
    for i, j in zip(of_a, of_b, strict=True):
        i, j = i % len(a.shape), j % len(b.shape)
        # A contracted dim of length 1 is broadcast.
        left[i] = ("k", i) if a.shape[i] == b.shape[j] or b.shape[j] == 1 else None
        right[j] = ("k", i) if a.shape[i] == b.shape[j] or a.shape[i] == 1 else None
    kept = [label for label in (*left, *right) if label is not None and label[0] != "k"]
    form = Form((tuple(left), tuple(right)), tuple(kept))
    return plan_contraction(call, "tensordot", lambda x, y: torch.tensordot(x, y, (of_a, of_b)), form, "a", "b")


@operator(torch.inner, Tensor.inner, tensors="input other")
def plan_inner(call: Arguments, input: ShardTensorSpec, other: ShardTensorSpec) -> Plan:
    call.returned(torch.inner, input, other)
    if input.shape and other.shape:
        return Composed(lambda input, other: torch.tensordot(input, other, ([-1], [-1])))
    return Composed(lambda input, other: input * other)


@operator(torch.kron, Tensor.kron, tensors="input other")
def plan_kron(call: Arguments, input: ShardTensorSpec, other: ShardTensorSpec) -> Plan:
    """An outer product, whose dims are merged by pairs: the first factor's lead, unless they have length 1."""
    ndim = max(len(input.shape), len(other.shape))
    if not ndim:
        return Composed(lambda input, other: input * other)
    shapes = [(1,) * (ndim - len(spec.shape)) + tuple(spec.shape) for spec in (input, other)]
    left, right = string.ascii_letters[:ndim], string.ascii_letters[ndim : 2 * ndim]
    equation = f"{left},{right}->{''.join(map(''.join, zip(left, right, strict=True)))}"
    inner_dims = [2 * d + 1 for d, n in enumerate(shapes[0]) if n != 1]
    shape = [m * n for m, n in zip(*shapes, strict=True)]

    def run(input: ShardTensor, other: ShardTensor) -> ShardTensor:
        y = torch.einsum(equation, input.reshape(shapes[0]), other.reshape(shapes[1]))
        return _with_free(y, inner_dims).reshape(shape)

    return Composed(run)


def _with_free(t: ShardTensor, dims: Sequence[int]) -> ShardTensor:
    """``t`` with none of ``dims`` sharded; refused where no other dim can be."""
    spec = t._spec.for_gradient()
    return redistribute_to(t, whole_rows("kron", spec, *dims))


# -- below autograd: what torch's own formulas call ---------------------------------------------------------------


@operator(_aten.mm.default, _aten.bmm.default)
def plan_product(call: dispatch.Call) -> dispatch.Plan:
    reduced = call.reduced()
    mesh = call.specs[0].mesh
    specs = []
    for i, a in enumerate(call.args[:2]):
        # A plain operand counts as replicated.
        plain = None if (i,) in reduced else ShardTensorSpec.make(mesh, [Replicate()] * mesh.ndim, a.shape, a.dtype)
        specs.append(reduced[(i,)] if plain is None else plain)
    how = arrange(call.func, _MM if call.func == _aten.mm.default else _BMM, tuple(specs))
    plain_slices = [
        (i, d, *t.interval(m))
        for i, t in enumerate(how.targets)
        if (i,) not in reduced
        for d, m in t.sharded_dims().items()
    ]
    work = how.local_work(call.func)

    def local(*operands: Tensor) -> Tensor:
        parts = list(operands)
        for i, d, start, stop in plain_slices:
            parts[i] = parts[i].narrow(d, start, stop - start)
        return work(*parts)

    out = how.out(call.meta.shape, call.meta.dtype).replace(meta=meta_of(call.meta))
    return call.plan(out, {path: how.targets[path[0]] for path in reduced}, call=local)


# Two operators in a row, each with a plan of its own.


@register(_aten.addmm.default)
def _addmm_below(input: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _added_below(input, _product_below(_aten.mm.default, a, b), beta, alpha)


@register(_aten.baddbmm.default)
def _baddbmm_below(input: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _added_below(input, _product_below(_aten.bmm.default, a, b), beta, alpha)


@register(_aten.mv.default)
def _mv_below(a: Any, b: Any) -> Any:
    column = dispatch.run(_aten.unsqueeze.default, (b, 1), {}) if isinstance(b, DTensor) else b.unsqueeze(1)
    return dispatch.run(_aten.squeeze.dim, (_product_below(_aten.mm.default, a, column), 1), {})


def _product_below(op: Any, a: Any, b: Any) -> Any:
    return dispatch.run(op, (a, b), {}) if isinstance(a, DTensor) or isinstance(b, DTensor) else op(a, b)


def _added_below(input: Any, product: Any, beta: Any, alpha: Any) -> Any:
    if alpha != 1:
        product = product * alpha
    if beta == 0 and isinstance(product, DTensor):
        return product  # what input holds, NaN even, does not matter then
    return dispatch.run(_aten.add.Tensor, (product, input), {"alpha": beta})


@operator(_aten.dot.default, _aten.vdot.default)
def plan_dot(call: dispatch.Call) -> dispatch.Plan:
    check_dtype(call)
    reduced = call.reduced()
    first = next(iter(reduced.values()))
    base = common_cut(list(reduced.values()), first.tensor_meta)
    out = reduced_spec(base, call.meta, [0], False, "sum")
    bounds = [base.interval(m) for m in base.sharded_dims().values()]
    func, plain = call.func, [i for i in (0, 1) if (i,) not in reduced]

    def compute(*vectors: Tensor) -> Tensor:
        parts = list(vectors)
        for i in plain:  # counts as replicated
            for start, stop in bounds:
                parts[i] = parts[i][start:stop]
        return func(*parts)

    return call.plan(out, {path: fit(s, base) for path, s in reduced.items()}, call=compute)
