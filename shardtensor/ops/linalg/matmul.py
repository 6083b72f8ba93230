"""Matrix products: matmul and its kin, also added to something.

Each names its operands' dims and leaves the rest to common/contraction.py: rows, columns, batch dims and contracted
dims may be sharded, on one operand or on several, alike or not. Linear layers are in linear.py, einsum in einsum.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ..._compat import OpOverload
from ...dispatch import planning
from ...dispatch.registry import DECLINED, register
from ...dispatch.tensor import run
from ...errors import PLAIN_TARGET, refuse
from ...layout.spec import ShardTensorSpec
from ...operators.arguments import common_mesh
from ...operators.declaration import Arguments, Composed, Operand, Plan, operator, planned
from ..common.alignment import common_layout, fit, wide_dtype
from ..common.contraction import Form, arrange, batch_labels, plan_contraction
from ..common.half import widened
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
    return plan_contraction(call, function.__name__, function, form, "input", name)


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


@operator(torch.mm, Tensor.mm, tensors="input mat2", sparse=sparse_product(torch.mm))
def plan_mm(
    call: Arguments, input: ShardTensorSpec, mat2: ShardTensorSpec, out_dtype: torch.dtype | None = None
) -> Plan:
    return _plan_product(call, torch.mm, MATRIX, input, mat2, "mat2") if out_dtype is None else DECLINED


@operator(torch.bmm, Tensor.bmm, tensors="input mat2", sparse=sparse_product(torch.bmm))
def plan_bmm(
    call: Arguments, input: ShardTensorSpec, mat2: ShardTensorSpec, out_dtype: torch.dtype | None = None
) -> Plan:
    return _plan_product(call, torch.bmm, MATRIX_BATCH, input, mat2, "mat2") if out_dtype is None else DECLINED


@operator(torch.mv, Tensor.mv, tensors="input vec", sparse=sparse_product(torch.mv))
def plan_mv(call: Arguments, input: ShardTensorSpec, vec: ShardTensorSpec) -> Plan:
    return _plan_product(call, torch.mv, MATRIX_VECTOR, input, vec, "vec")


@operator(torch.outer, Tensor.outer, torch.ger, Tensor.ger, tensors="input vec2")
def plan_outer(call: Arguments, input: ShardTensorSpec, vec2: ShardTensorSpec) -> Plan:
    return _plan_product(call, torch.outer, _OUTER, input, vec2, "vec2")


# -- added to something -----------------------------------------------------------------------------------------------


Number = int | float | complex | bool


def _sum_of_products(batch1: Tensor, batch2: Tensor) -> Tensor:
    return torch.einsum("bik,bkj->ij", batch1, batch2)


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
    operator(function, getattr(Tensor, name), tensors=tensors, sparse=sparse)(plan)


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
    "addbmm": (_sum_of_products, "input batch1 batch2"),
}
for _name, (_product, _tensors) in _PRODUCTS.items():
    _register_added(_name, _product, _tensors)
    _register_in_place(_name, _product)


# -- below autograd: what torch's own formulas call ---------------------------------------------------------------


@operator(_aten.mm.default, _aten.bmm.default)
def plan_product(call: planning.AtenCall) -> planning.AtenPlan:
    reduced = call.reduced()
    mesh = call.specs[0].mesh
    specs = []
    for i, a in enumerate(call.args[:2]):
        # A plain operand counts as replicated.
        plain = None if (i,) in reduced else ShardTensorSpec.make(mesh, [Replicate()] * mesh.ndim, a.shape, a.dtype)
        specs.append(reduced[(i,)] if plain is None else plain)
    how = arrange(call.func, MATRIX if call.func == _aten.mm.default else MATRIX_BATCH, tuple(specs))
    plain_slices = [
        (i, d, *t.interval(m))
        for i, t in enumerate(how.targets)
        if (i,) not in reduced
        for d, m in t.sharded_dims().items()
    ]
    work = how.local_work(call.func)
    out = how.out(call.meta.shape, call.meta.dtype).replace(meta=planning.meta_of(call.meta))
    held = out.held_dtype

    def local(*operands: Tensor) -> Tensor:
        parts = [t.to(held) for t in operands]
        for i, d, start, stop in plain_slices:
            parts[i] = parts[i].narrow(d, start, stop - start)
        return work(*parts)

    return call.plan(out, {path: how.targets[path[0]] for path in reduced}, call=local)


# Two operators in a row, each with a plan of its own.


def _register_added_below(op: OpOverload, product: OpOverload) -> None:
    @register(op)
    def added(input: Tensor, a: Tensor, b: Tensor, *, beta: Number = 1, alpha: Number = 1) -> Tensor:
        result = _product_below(product, a, b)
        if alpha != 1:
            result = result * alpha
        if beta == 0 and isinstance(result, DTensor):
            return result  # what input holds, NaN even, does not matter then
        total: Tensor = run(_aten.add.Tensor, (result, input), {"alpha": beta})
        return total


_register_added_below(_aten.addmm.default, _aten.mm.default)
_register_added_below(_aten.baddbmm.default, _aten.bmm.default)


@register(_aten.mv.default)
def _mv_below(a: Tensor, b: Tensor) -> Tensor:
    column = run(_aten.unsqueeze.default, (b, 1), {}) if isinstance(b, DTensor) else b.unsqueeze(1)
    product: Tensor = run(_aten.squeeze.dim, (_product_below(_aten.mm.default, a, column), 1), {})
    return product


def _product_below(op: OpOverload, a: Tensor, b: Tensor) -> Tensor:
    product: Tensor = run(op, (a, b), {}) if isinstance(a, DTensor) or isinstance(b, DTensor) else op(a, b)
    return product


@operator(_aten.dot.default, _aten.vdot.default)
def plan_dot(call: planning.AtenCall) -> planning.AtenPlan:
    check_dtype(call)
    reduced = call.reduced()
    first = next(iter(reduced.values()))
    base = common_layout(list(reduced.values()), first.tensor_meta)
    out = reduced_spec(base, call.meta, [0], False, "sum")
    bounds = [base.interval(m) for m in base.sharded_dims().values()]
    func: Callable[..., Tensor] = call.func
    plain = [i for i in (0, 1) if (i,) not in reduced]

    def compute(*vectors: Tensor) -> Tensor:
        parts = [v.to(out.held_dtype) for v in vectors]
        for i in plain:  # counts as replicated
            for start, stop in bounds:
                parts[i] = parts[i][start:stop]
        return func(*parts)

    return call.plan(out, {path: fit(s, base) for path, s in reduced.items()}, call=compute)
