"""Products: linear, matmul and its kin, einsum, tensordot, inner, outer, kron, bilinear.

Each names its operands' dims and leaves the rest to common/contraction.py: rows, columns, batch dims and contracted
dims may be cut, on one operand or on several, alike or not.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ...errors import UnsupportedSharding, refuse
from ...operators import operator
from ...parameters import Kernel, run_kernel, unsummed_parameters
from ...planning import Call, Plan, meta_of
from ...registry import register
from ...spec import ShardTensorSpec
from ...tensor import ShardTensor, from_part, redistribute_to, run
from ..common.alignment import as_operand, common_cut, common_mesh, fit, torch_judges, whole_rows
from ..common.contraction import Form, arrange, batch_labels, contract
from ..common.reduce import check_dtype, reduced_spec

_aten = torch.ops.aten


# -- matrix products ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _matmul_form(a: torch.Size, b: torch.Size) -> Form:
    """Of ``a @ b``: batch dims, rows, contracted dim and columns."""
    (lead_a, lead_b), lead = batch_labels(a[:-2], b[:-2])
    rows, columns = ("rows",) * (len(a) > 1), ("columns",) * (len(b) > 1)
    return Form(((*lead_a, *rows, "k"), (*lead_b, "k", *columns)), (*lead, *rows, *columns))


def _product(function: Callable[..., Tensor], form: Form | None, *operands: Any) -> Any:
    """A product of ShardTensors and plain tensors; NotImplemented where none is a ShardTensor."""
    if not all(isinstance(t, Tensor) for t in operands) or common_mesh(function.__name__, operands) is None:
        return NotImplemented
    torch_judges(function, *operands)
    return contract(function.__name__, function, form or _matmul_form(*(t.shape for t in operands)), *operands)


@register(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.linalg.matmul)
def _matmul(input: Any, other: Any) -> Any:
    return _product(torch.matmul, None, input, other)


@register(Tensor.__rmatmul__)
def _rmatmul(self: Any, other: Any) -> Any:
    return _matmul(other, self)


_MM = Form(("ik", "kj"), "ij")
_BMM = Form(("bik", "bkj"), "bij")
_SUM_OF_MM = Form(("bik", "bkj"), "ij")
_MV = Form(("ik", "k"), "i")
_OUTER = Form(("i", "j"), "ij")


@register(torch.mm, Tensor.mm)
def _mm(input: Any, mat2: Any, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else _product(torch.mm, _MM, input, mat2)


@register(torch.bmm, Tensor.bmm)
def _bmm(input: Any, mat2: Any, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else _product(torch.bmm, _BMM, input, mat2)


@register(torch.mv, Tensor.mv)
def _mv(input: Any, vec: Any) -> Any:
    return _product(torch.mv, _MV, input, vec)


@register(torch.outer, Tensor.outer, torch.ger, Tensor.ger)
def _outer(input: Any, vec2: Any) -> Any:
    return _product(torch.outer, _OUTER, input, vec2)


# -- added to something -----------------------------------------------------------------------------------------------


def _sum_of_products(batch1: Tensor, batch2: Tensor) -> Tensor:
    return torch.einsum("bik,bkj->ij", batch1, batch2)


# name: (the product, its form)
_ADDED: dict[str, tuple[Callable[..., Tensor], Form]] = {
    "addmm": (torch.mm, _MM),
    "addmv": (torch.mv, _MV),
    "addr": (torch.outer, _OUTER),
    "baddbmm": (torch.bmm, _BMM),
    "addbmm": (_sum_of_products, _SUM_OF_MM),
}


def _register_added(name: str, product: Callable[..., Tensor], form: Form) -> None:
    """``beta * input + alpha * product(a, b)``, also in place."""
    function = getattr(torch, name)

    def scaled_product(input: Any, a: Any, b: Any, beta: Any, alpha: Any) -> Any:
        """``(alpha * product(a, b), beta)``, the factors as numbers of the result's kind, which torch makes of them."""
        dtype = torch_judges(function, input, a, b, beta=beta, alpha=alpha).dtype
        result = _product(product, form, a, b) if any(isinstance(t, ShardTensor) for t in (a, b)) else product(a, b)
        if not torch.is_autocast_enabled(result.device.type):
            result = result.to(dtype)
        if not (dtype.is_floating_point or dtype.is_complex):
            alpha, beta = (bool(n) if dtype == torch.bool else int(n) for n in (alpha, beta))
        return result if alpha == 1 else result * alpha, beta

    @register(function, getattr(Tensor, name))
    def added(input: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> Any:
        if out is not None or common_mesh(name, [input, a, b]) is None:
            return NotImplemented
        result, beta = scaled_product(input, a, b, beta, alpha)
        if beta == 0 and isinstance(result, ShardTensor):
            return result  # what input holds, NaN even, does not matter then
        return torch.add(result, input.to(result.dtype), alpha=beta)

    @register(getattr(Tensor, name + "_"))
    def added_(input: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
        if common_mesh(name, [input, a, b]) is None:
            return NotImplemented
        if not isinstance(input, DTensor):
            reason = "a ShardTensor cannot be written into a plain tensor"
            raise refuse(name + "_", [input, a, b], reason, "use the out-of-place form")
        result, beta = scaled_product(input, a, b, beta, alpha)
        if torch.broadcast_shapes(input.shape, result.shape) != input.shape:  # addbmm_ of one device grows its tensor
            reason = "it would change the shape of a tensor in place"
            raise refuse(name + "_", input, reason, "use the out-of-place form")
        if beta == 0:
            return input.copy_(result)
        return (input if beta == 1 else input.mul_(beta)).add_(result)


for _name, _of in _ADDED.items():
    _register_added(_name, *_of)


# -- linear and bilinear layers -----------------------------------------------------------------------------------


def _linear_backward(
    mask: Sequence[bool], grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    grad_x = grad_w = grad_b = None
    if mask[0]:
        to = weight.to(grad.dtype).conj()
        grad_x = (grad @ to if weight.ndim == 2 else grad.unsqueeze(-1) * to).to(x.dtype)
    if mask[1]:
        rows, inputs = grad.flatten(0, x.ndim - 2), x.to(grad.dtype).flatten(0, -2)
        grad_w = torch.tensordot(rows, inputs.conj(), ([0], [0])).to(weight.dtype)
    if mask[2] and bias is not None:
        grad_b = grad.flatten(0, x.ndim - 2).sum(0).to(bias.dtype)
    return grad_x, grad_w, grad_b


_LINEAR = Kernel(lambda x, weight, bias: (F.linear(x, weight, bias),), _linear_backward)


@register(F.linear)
def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    mesh = common_mesh("linear", [t for t in (input, weight, bias) if t is not None])
    if mesh is None:
        return NotImplemented
    shape = torch_judges(F.linear, input, weight, bias).shape
    x, last = as_operand(input, mesh), input.ndim - 1
    spec = x._spec
    if last in spec.sharded_dims() or _is_cut(weight) or _is_cut(bias):
        lead, rows = tuple(range(last)), ("rows",) * (weight.ndim - 1)
        y = contract("linear", F.linear, Form(((*lead, "k"), (*rows, "k")), (*lead, *rows)), x, weight, mesh=mesh)
        if bias is None:
            return y
        if _is_cut(bias) and last not in y._spec.sharded_dims():
            bias = redistribute_to(as_operand(bias, mesh), bias._spec.replicated())  # one number for each output
        return y + bias.to(y.dtype)
    (w, b), total = unsummed_parameters("linear", spec, weight, bias)
    out = spec.replace(meta=spec.tensor_meta._replace(shape=shape, stride=_stride(shape)))
    if any(total.needed):
        return run_kernel(_LINEAR, x, w, b, total, out)
    y = F.linear(x.to_local(), w, b)
    return from_part(y, out.with_dtype(y.dtype))


def _stride(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _is_cut(parameter: Any) -> bool:
    return isinstance(parameter, DTensor) and not all(p.is_replicate() for p in parameter.placements)


@register(F.bilinear, torch.bilinear)
def _bilinear(input1: Any, input2: Any, weight: Any, bias: Any = None) -> Any:
    operands = [t for t in (input1, input2, weight, bias) if t is not None]
    if common_mesh("bilinear", operands) is None:
        return NotImplemented
    torch_judges(F.bilinear, input1, input2, weight, bias)
    y = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return y if bias is None else y + bias.to(y.dtype)


# -- einsum and what it expresses -----------------------------------------------------------------------------------


@register(torch.einsum)
def _einsum(equation: Any, *operands: Any) -> Any:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or common_mesh("einsum", operands) is None:
        return NotImplemented
    torch_judges(torch.einsum, equation, *operands)
    terms, out = _letters(equation, [t.ndim for t in operands])
    return _contract_letters(terms, out, list(operands))


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


def _contract_letters(terms: Sequence[str], out: str, operands: list[Any]) -> Any:
    """All at once where the shards allow it, otherwise two operands at a time, from the left."""
    equation = ",".join(terms) + "->" + out
    length: dict[str, int] = {}
    for term, t in zip(terms, operands, strict=True):
        for letter, n in zip(term, t.shape, strict=True):
            length[letter] = n if length.get(letter, 1) == 1 else length[letter]
    labels = tuple(
        tuple(c if n == length[c] else None for c, n in zip(term, t.shape, strict=True))
        for term, t in zip(terms, operands, strict=True)
    )
    try:
        return contract("einsum", lambda *locals_: torch.einsum(equation, *locals_), Form(labels, out), *operands)
    except UnsupportedSharding:
        if len(operands) < 3:
            raise
    (a, b), rest = terms[:2], terms[2:]
    kept = "".join(dict.fromkeys(c for c in a + b if c in out or any(c in term for term in rest)))
    first = torch.einsum(f"{a},{b}->{kept}", *operands[:2])
    return _contract_letters([kept, *rest], out, [first, *operands[2:]])


@register(torch.tensordot)
def _tensordot(a: Any, b: Any, dims: Any = 2, out: Any = None) -> Any:
    if out is not None or common_mesh("tensordot", [a, b]) is None:
        return NotImplemented
    if isinstance(dims, Tensor):
        dims = dims.tolist()
    judged = dims if isinstance(dims, int) else tuple(tuple(d) if isinstance(d, (list, tuple)) else (d,) for d in dims)
    torch_judges(torch.tensordot, a, b, judged)
    if isinstance(judged, int):
        judged = tuple(range(a.ndim - judged, a.ndim)), tuple(range(judged))
    pairs = [(i % a.ndim, j % b.ndim) for i, j in zip(*judged, strict=True)]
    left: list[Any] = [("a", d) for d in range(a.ndim)]
    right: list[Any] = [("b", d) for d in range(b.ndim)]
    for i, j in pairs:
        # A contracted dim of length 1 is broadcast.
        left[i] = ("k", i) if a.shape[i] == b.shape[j] or b.shape[j] == 1 else None
        right[j] = ("k", i) if a.shape[i] == b.shape[j] or a.shape[i] == 1 else None
    kept = [label for label in (*left, *right) if label is not None and label[0] != "k"]
    form = Form((tuple(left), tuple(right)), tuple(kept))
    return contract("tensordot", lambda x, y: torch.tensordot(x, y, judged), form, a, b)


@register(torch.inner, Tensor.inner)
def _inner(input: Any, other: Any) -> Any:
    if common_mesh("inner", [input, other]) is None:
        return NotImplemented
    torch_judges(torch.inner, input, other)
    return torch.tensordot(input, other, ([-1], [-1])) if input.ndim and other.ndim else input * other


@register(torch.kron, Tensor.kron)
def _kron(input: Any, other: Any) -> Any:
    """An outer product, whose dims are merged by pairs: the first factor's lead, unless they have length 1."""
    if common_mesh("kron", [input, other]) is None:
        return NotImplemented
    ndim = max(input.ndim, other.ndim)
    a, b = (t.reshape((1,) * (ndim - t.ndim) + tuple(t.shape)) for t in (input, other))
    if not ndim:
        return a * b
    left, right = string.ascii_letters[:ndim], string.ascii_letters[ndim : 2 * ndim]
    y = torch.einsum(f"{left},{right}->{''.join(map(''.join, zip(left, right)))}", a, b)
    buried = [2 * d + 1 for d in range(ndim) if a.shape[d] != 1]
    return _with_free(y, buried).reshape([m * n for m, n in zip(a.shape, b.shape, strict=True)])


def _with_free(t: Any, dims: Sequence[int]) -> Any:
    """``t`` with none of ``dims`` sharded; refused where no other dim can be."""
    spec = t._spec.for_gradient()
    return redistribute_to(t, whole_rows("kron", spec, *dims))


# -- below autograd: what torch's own formulas call ---------------------------------------------------------------


@operator(_aten.mm.default, _aten.bmm.default)
def _mm_below(call: Call) -> Plan:
    reduced = call.reduced()
    mesh = call.specs[0].mesh
    specs = []
    for i, a in enumerate(call.args[:2]):
        # A plain operand counts as replicated.
        plain = None if (i,) in reduced else ShardTensorSpec.make(mesh, [Replicate()] * mesh.ndim, a.shape, a.dtype)
        specs.append(reduced[(i,)] if plain is None else plain)
    how = arrange(call.func, _MM if call.func == _aten.mm.default else _BMM, tuple(specs))
    plain_slices = {
        i: [(d, *t.interval(m)) for d, m in t.sharded_dims().items()]
        for i, t in enumerate(how.targets)
        if (i,) not in reduced
    }
    func = call.func

    def local(a: Tensor, b: Tensor) -> Tensor:
        operands = [a, b]
        for i, places in plain_slices.items():
            for d, start, stop in places:
                operands[i] = operands[i].narrow(d, start, stop - start)
        return how.compute(func, operands)

    out = how.out(call.meta.shape, call.meta.dtype).replace(meta=meta_of(call.meta))
    return call.plan(out, {path: how.targets[path[0]] for path in reduced}, call=local)


@register(_aten.addmm.default)
def _addmm_below(input: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _added_below(input, _product_below(_aten.mm.default, a, b), beta, alpha)


@register(_aten.baddbmm.default)
def _baddbmm_below(input: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _added_below(input, _product_below(_aten.bmm.default, a, b), beta, alpha)


@register(_aten.mv.default)
def _mv_below(a: Any, b: Any) -> Any:
    column = run(_aten.unsqueeze.default, (b, 1), {}) if isinstance(b, DTensor) else b.unsqueeze(1)
    return run(_aten.squeeze.dim, (_product_below(_aten.mm.default, a, column), 1), {})


def _product_below(op: Any, a: Any, b: Any) -> Any:
    return run(op, (a, b), {}) if isinstance(a, DTensor) or isinstance(b, DTensor) else op(a, b)


def _added_below(input: Any, product: Any, beta: Any, alpha: Any) -> Any:
    if alpha != 1:
        product = product * alpha
    if beta == 0 and isinstance(product, DTensor):
        return product  # what input holds, NaN even, does not matter then
    return run(_aten.add.Tensor, (product, input), {"alpha": beta})


@operator(_aten.dot.default, _aten.vdot.default)
def _dot(call: Call) -> Plan:
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
