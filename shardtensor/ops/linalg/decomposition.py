"""Factorizations, inverses, determinants and solvers: on whole matrices, many of them or many right-hand sides.

Batch dims, and the columns of a right-hand side, may be cut in any way: every rank works on its own, forward and
backward, and nothing travels. A cut matrix dim is exchanged to the longest free batch dim, if it has at least as many
elements as there are ranks (one all-to-all in which every rank keeps as much as it had); results of the operand's shape
are put back as it lay, the others stay spread over the batch. A single matrix that is cut is refused.

[Note: left out] Results that are not asked for torch returns as empty vectors. On a rank without matrices a result of
one number for each is an empty vector, too, so such a rank asks torch what it would return for all matrices. Whether
``lstsq`` leaves its residuals out depends on the matrices themselves, so the processes tell each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...registry import FUNCTIONS, register
from ...tensor import ShardTensor, from_part, redistribute_to
from ..common.alignment import as_operand, common_mesh, described
from ..common.contraction import Arrangement, Form, Label, arrange, batch_labels
from ..common.reduce import reduce_over

Terms = tuple[tuple[str, ...], tuple[str, ...]]  # the dims behind the batch dims, of the operands and of the results


@dataclass(frozen=True, slots=True)
class _Signature:
    """Names of the operands, in order, and a function from them and ``left`` to their terms.

    A capital letter is a dim that may be cut; the others must be whole.
    """

    names: tuple[str, ...]
    terms: Callable[[Sequence[Tensor], bool], Terms]

    def operands(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[int | str, Tensor]]:
        """``(where it stands among the arguments, tensor)``, those that have a name here first."""
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        found = [(place, value) for place, value in given if isinstance(value, Tensor)]
        order = {name: i for i, name in enumerate(self.names)}
        return sorted(found, key=lambda item: order.get(item[0], 99) if isinstance(item[0], str) else item[0])


def _matrices(*terms: str) -> Callable[[Sequence[Tensor], bool], Terms]:
    return lambda operands, left: (terms, ())


def _has_columns(matrix: Tensor, b: Tensor) -> bool:
    """Whether the right-hand side ``b`` is a matrix, or many of them, rather than a vector for each matrix."""
    return b.ndim > 1 and not (b.ndim == matrix.ndim - 1 and b.shape == matrix.shape[:-1])


def _solved(order: Sequence[str]) -> Callable[[Sequence[Tensor], bool], Terms]:
    """Of operands of which ``B`` is a right-hand side with any number of columns; the first result is like it."""

    def terms(operands: Sequence[Tensor], left: bool) -> Terms:
        matrix, b = (operands[order.index(name)] for name in "AB")
        columns = "p" in order or _has_columns(matrix, b)
        named = {"A": "nn", "p": "n", "B": "n" if not columns else "nK" if left else "Kn"}
        return tuple(named[name] for name in order), (named["B"],)

    return terms


ONE = _Signature(("input", "A", "self"), _matrices("mn"))
_OF_ONE_MATRIX = """
    cholesky cholesky_ex cholesky_inverse det eig eigh eigvals eigvalsh geqrf inv inv_ex inverse ldl_factor
    ldl_factor_ex logdet lu lu_factor lu_factor_ex matrix_exp matrix_rank pinv pinverse qr slogdet svd svdvals
"""
_SIGNATURES: dict[str, _Signature] = {
    **dict.fromkeys(_OF_ONE_MATRIX.split(), ONE),
    "householder_product": _Signature(("input", "tau"), _matrices("mn", "k")),
    "lstsq": _Signature(("input", "b"), lambda operands, left: (("mn", "mk"[: 1 + _has_columns(*operands[:2])]), ())),
    "lu_unpack": _Signature(("LU_data", "LU_pivots"), _matrices("mn", "p")),
    "orgqr": _Signature(("input", "tau"), _matrices("mn", "k")),
    "ormqr": _Signature(("input", "tau", "other"), _matrices("mn", "k", "pq")),
    "cholesky_solve": _Signature(("B", "L"), lambda operands, left: (("nK", "nn"), ("nK",))),
    "ldl_solve": _Signature(("LD", "pivots", "B"), _solved("ApB")),
    "linalg.lu_solve": _Signature(("LU", "pivots", "B"), _solved("ApB")),
    "lu_solve": _Signature(("b", "LU_data", "LU_pivots"), _solved("BAp")),
    "solve": _Signature(("A", "B"), _solved("AB")),
    "solve_ex": _Signature(("A", "B"), _solved("AB")),
    "solve_triangular": _Signature(("input", "B"), _solved("AB")),
}


def by_matrix(
    name: str, function: Callable[..., Any], signature: _Signature, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """``function`` on each rank's batch; NotImplemented where nothing is sharded."""
    given = signature.operands(args, kwargs)
    tensors = [t for _, t in given]
    mesh = common_mesh(name, tensors)
    if mesh is None or all(t._spec.is_replicate() for t in tensors if isinstance(t, DTensor)):
        return NotImplemented
    operands = [as_operand(t, mesh) for t in tensors]
    terms, results = signature.terms(operands, kwargs.get("left", True))
    cores = [*terms, *[""] * (len(operands) - len(terms))]  # further ones are tolerances, one for each matrix
    if any(t.ndim < len(core) for t, core in zip(operands, cores, strict=True)):
        return NotImplemented  # torch says what is wrong
    leads, lead = batch_labels(*(t.shape[: t.ndim - len(core)] for t, core in zip(operands, cores, strict=True)))
    form = Form(
        tuple((*labels, *core) for labels, core in zip(leads, cores, strict=True)),
        (*lead, "K"),
        whole=frozenset(c for c in "".join(cores) if c.islower()),
        by_parts=False,
    )
    how = arrange(name, form, tuple(t._spec for t in operands))
    local_args, local_kwargs = list(args), dict(kwargs)
    for i, (place, _) in enumerate(given):
        holder: Any = local_kwargs if isinstance(place, str) else local_args
        holder[place] = how.local(i, operands[i])
    found = function(*local_args, **local_kwargs)
    several = isinstance(found, (tuple, list))
    locals_ = list(found) if several else [found]

    def of_all() -> Any:
        return function(*map(described, args), **{name: described(value) for name, value in kwargs.items()})

    left_out = _left_out(name, locals_, how, lead, of_all)
    outputs = []
    for i, y in enumerate(locals_):
        labels = (*lead, *results[i]) if i < len(results) else lead
        out = _result(y, how, lead, labels, left_out[i])
        first = operands[0]
        if first._spec.placements != how.targets[0].placements and out.shape == first.shape:
            out = redistribute_to(out, first._spec)
        outputs.append(out)
    if not several:
        return outputs[0]
    return tuple(outputs) if type(found) is tuple else type(found)(outputs)


def _left_out(
    name: str, found: Sequence[Tensor], how: Arrangement, lead: Sequence[Label], of_all: Callable[[], Any]
) -> list[bool]:
    """For each result whether it is left out, on all ranks alike; see [Note: left out]."""
    if 0 in (how.lengths[label] for label in lead) or not lead:
        return [False] * len(found)  # nothing, however it is called
    empty = [y.shape == (0,) for y in found]
    per_matrix = how.out([how.lengths[label] for label in lead], torch.int64, lead)
    nothing = 0 in per_matrix.local_shape()
    if name == "lstsq":
        opinions = torch.tensor([2 if nothing else int(not e) for e in empty], device=found[0].device)
        votes = reduce_over(opinions, per_matrix, list(per_matrix.sharded_dims().values()), "min").tolist()
        return [e if vote == 2 else not vote for e, vote in zip(empty, votes, strict=True)]
    if nothing and any(empty) and len(lead) == 1:
        whole = of_all()
        return [y.shape == (0,) for y in (whole if isinstance(whole, (tuple, list)) else [whole])]
    return empty


def _result(y: Tensor, how: Arrangement, lead: Sequence[Label], labels: Sequence[Label], left_out: bool) -> Any:
    """A local result as a ShardTensor. One that is left out is empty, and lies on every rank alike."""
    shape = [how.lengths[label] for label in lead] + list(y.shape[len(lead) :])
    spec = how.out(shape, y.dtype, lead)
    if left_out:
        y = y.new_empty(0)
        meta = spec.tensor_meta._replace(shape=y.shape, stride=y.stride())
        return from_part(y, spec.replicated().replace(meta=meta))
    for d, label in enumerate(labels[len(lead) :], start=len(lead)):
        shape[d] = how.lengths.get(label, y.shape[d])
    return from_part(y, how.out(shape, y.dtype, labels))


def _register(name: str, signature: _Signature) -> None:
    """Wherever torch has the function: ``torch.linalg``, ``torch``, the methods."""
    only_linalg = name.startswith("linalg.")
    short = name.removeprefix("linalg.")
    for owner in (torch.linalg, torch, Tensor):
        function = getattr(owner, short, None)
        if function is None or function in FUNCTIONS or (only_linalg and owner is not torch.linalg):
            continue

        @register(function)
        def handler(*args: Any, _function: Any = function, out: Any = None, **kwargs: Any) -> Any:
            if out is not None:
                return NotImplemented
            return by_matrix(short, _function, signature, args, kwargs)


for _name in sorted(_SIGNATURES, key=lambda name: "." not in name):
    _register(_name, _SIGNATURES[_name])


@register(torch.triangular_solve, Tensor.triangular_solve)
def _triangular_solve(b: Any, A: Any, *args: Any, out: Any = None, **kwargs: Any) -> Any:
    """The copy of the matrix among the results is no work of a rank's columns: it is made of the whole operand."""

    def solution(*args: Any, **kwargs: Any) -> Tensor:
        return torch.triangular_solve(*args, **kwargs).solution

    signature = _Signature(("b", "A"), lambda operands, left: (("nK", "nn"), ("nK",)))
    if out is not None:
        return NotImplemented
    x = by_matrix("triangular_solve", solution, signature, (b, A, *args), kwargs)
    if x is NotImplemented:
        return x
    matrix = as_operand(A, x.device_mesh)
    return torch.return_types.triangular_solve((x, matrix.expand(*x.shape[:-2], *A.shape[-2:]).clone()))


@register(torch.linalg.matrix_power, torch.matrix_power, Tensor.matrix_power)
def _matrix_power(input: Any, n: int, **kwargs: Any) -> Any:
    """A cut matrix is multiplied with itself, but not inverted."""
    cut = isinstance(input, ShardTensor) and {input.ndim - 1, input.ndim - 2} & set(input._spec.sharded_dims())
    if kwargs or (n >= 0 and cut):
        return NotImplemented
    return by_matrix("matrix_power", torch.linalg.matrix_power, ONE, (input, n), {})


@register(torch.linalg.cond)
def _cond(A: Any, p: Any = None, **kwargs: Any) -> Any:
    """By its parts: torch's own leaves the graph on a rank without matrices."""
    if not isinstance(A, ShardTensor) or kwargs or A.ndim < 2:
        return NotImplemented
    if p in (None, 2, -2):
        values = torch.linalg.svdvals(A)
        largest, smallest = values[..., 0], values[..., -1]
        return smallest / largest if p == -2 else largest / smallest
    inverse, info = torch.linalg.inv_ex(A)
    norm = torch.linalg.matrix_norm(inverse, p).masked_fill(info != 0, float("inf"))
    return torch.linalg.matrix_norm(A, p) * norm
