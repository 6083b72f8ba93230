"""``einsum`` and what it expresses: tensordot, inner, kron."""

from __future__ import annotations

import string
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ..._compat import TensorMeta
from ...dispatch.planning import spec_of
from ...dispatch.registry import DECLINED
from ...dispatch.tensor import redistribute_to
from ...errors import UnsupportedSharding
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Composed, Plan, operator
from ..common.contraction import ContractionPlan, plan_contraction
from ..common.named_dims import Form, arrange, free_dims


@operator(torch.einsum, tensors="operands")
def plan_einsum(call: Arguments, equation: str, *operands: ShardTensorSpec) -> Plan:
    """All operands at once where the shards allow it, otherwise two at a time, from the left."""
    specs = operands
    if not isinstance(equation, str):  # dims by number; torch calls again with letters
        return DECLINED
    call.returned(torch.einsum, equation, *specs)
    terms, out = letters(equation, tuple(len(spec.shape) for spec in specs))
    spelled = ",".join(terms) + "->" + out
    if any(len(set(term)) < len(term) for term in terms):
        once = ",".join("".join(dict.fromkeys(reversed(term)))[::-1] for term in terms) + "->" + out
        return Composed(lambda operands: torch.einsum(once, *map(_diagonal, operands, terms)))
    try:
        how = arrange("einsum", _einsum_form(terms, out, [spec.shape for spec in specs]), specs)
    except UnsupportedSharding:
        if len(specs) < 3:
            raise
        return Composed(lambda operands: _two_at_a_time(terms, out, operands))
    plan = ContractionPlan(how, lambda *parts: torch.einsum(spelled, *parts), is_product=True)
    return Composed(lambda operands: plan.run(list(map(redistribute_to, operands, how.targets))))


@lru_cache(maxsize=1024)
def letters(equation: str, ndims: tuple[int, ...]) -> tuple[tuple[str, ...], str]:
    """The operands' and the result's dims, one letter each.

    Example:
        >>> letters("b...i, ij", (4, 2))
        (('baci', 'ij'), 'acbj')
    """
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


def _diagonal(x: Tensor, term: str) -> Tensor:
    """The diagonals along dims with the same letter, at the place of the last of them."""
    for letter in set(term):
        while term.count(letter) > 1:
            first, last = term.index(letter), term.rindex(letter)
            x = x.diagonal(0, first, last).movedim(-1, last - 1)
            term = term.replace(letter, "", 1)
    return x


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


def _two_at_a_time(terms: Sequence[str], out: str, operands: Sequence[Tensor]) -> Tensor:
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
        return DECLINED
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
    product = partial(torch.tensordot, dims=(of_a, of_b))
    return plan_contraction(call, "tensordot", product, form, "a", "b", is_product=True)


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

    def run(input: Tensor, other: Tensor) -> Tensor:
        y = torch.einsum(equation, input.reshape(shapes[0]), other.reshape(shapes[1]))
        return redistribute_to(y, free_dims("kron", spec_of(y).for_gradient(), *inner_dims)).reshape(shape)

    return Composed(call.without_autocast(run))  # which casts products of matrices
