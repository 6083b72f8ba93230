"""Factorizations, inverses, determinants and solvers: of unsharded matrices, many of them or many right-hand sides.

Batch dims, and the columns of a right-hand side, may be sharded in any way: every rank computes its own, forward and
backward, and nothing is sent. A sharded matrix dim is resharded to the longest free batch dim, if that has at least as
many elements as there are ranks (one all-to-all in which every rank keeps as much as it had); results of the operand's
shape get the operand's layout, the others stay sharded along the batch.

[Note: small matrices] Where there are fewer matrices than ranks, what is sharded of them is gathered if it is little:
no more than a rank's largest shard of an operand, or than is sent in the time of an exchange. Every rank then computes
all of them. The rest is refused.

[Note: left out] Results that are not asked for torch returns as empty vectors. On a rank without matrices a result of
one number for each is an empty vector, too, so such a rank asks torch what it would return for all matrices. Whether
``lstsq`` leaves its residuals out depends on the matrices themselves, so the ranks tell each other.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate

from ..._compat import decomposes
from ...dispatch.registry import DECLINED
from ...dispatch.tensor import ShardTensor, from_part, redistribute_to
from ...errors import UnsupportedSharding, refuse
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Composed, Plan, operator
from ...operators.forward_mode import decomposed
from ..common.alignment import broadcast_shape, cost_of_exchange, is_little
from ..common.named_dims import Arrangement, Form, Label, arrange, batch_labels, fresh, no_other_dim, shared
from ..common.reduce import rank_reduction

# The dims behind the batch dims, of the operands and of the results: a capital letter is a dim that may be sharded.
# Operands that are not named, such as tolerances, are one number for each matrix, and so are such results.
Terms = tuple[tuple[str, ...], tuple[str, ...]]

ONE: Terms = ("mn",), ()


def plan_by_matrix(
    call: Arguments,
    function: Callable[..., Any],
    terms: Terms,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
) -> Plan:
    """A plan that calls ``function`` on each rank's batch.

    Args:
        args, kwargs: of the function, with specs for the tensors that the plan will run on, in their order.
    """
    named = kwargs or {}
    places = [i for i, a in enumerate(args) if isinstance(a, ShardTensorSpec)]
    keys = [key for key, a in named.items() if isinstance(a, ShardTensorSpec)]
    specs = [args[i] for i in places] + [named[key] for key in keys]
    cores = [*terms[0], *[""] * (len(specs) - len(terms[0]))]
    if any(len(spec.shape) < len(core) for spec, core in zip(specs, cores)):
        return DECLINED  # torch says what is wrong
    batches = [s.shape[: len(s.shape) - len(core)] for s, core in zip(specs, cores, strict=True)]
    broadcast_shape(*batches)  # raises where they do not fit: below, equal labels have equal lengths
    leads, lead = batch_labels(*batches)
    form = Form(
        tuple((*labels, *core) for labels, core in zip(leads, cores, strict=True)),
        (*lead, "K"),
        whole=frozenset(c for c in "".join(cores) if c.islower()),
        ways=(shared, fresh),
    )
    name = call.name.lstrip("_").removeprefix("linalg_")

    def call_with(tensors: Sequence[Tensor]) -> Any:
        local_args = list(args)
        for i, t in zip(places, tensors):
            local_args[i] = t
        return decomposed(function, local_args, {**named, **dict(zip(keys, tensors[len(places) :]))})

    try:
        how = arrange(name, form, tuple(specs))
    except UnsupportedSharding:
        how = arrange(name, form, _gathered(name, form, specs))
    first = specs[0]
    back = None if first.placements == how.targets[0].placements else first

    def run(*tensors: Tensor | None) -> Any:
        locals_ = [how.local(i, t) for i, t in enumerate(t for t in tensors if t is not None)]
        found = call_with(locals_)
        results = list(found) if isinstance(found, (tuple, list)) else [found]
        left_out = _left_out(name, results, how, lead, lambda: call.returned(function, *args, **named))
        outputs = []
        for i, y in enumerate(results):
            labels = (*lead, *terms[1][i]) if i < len(terms[1]) else lead
            out = _result(y, how, lead, labels, left_out[i])
            outputs.append(out if back is None or out.shape != back.shape else redistribute_to(out, back))
        if not isinstance(found, (tuple, list)):
            return outputs[0]
        return tuple(outputs) if type(found) is tuple else type(found)(outputs)

    return Composed(run)


def _gathered(name: str, form: Form, specs: Sequence[ShardTensorSpec]) -> tuple[ShardTensorSpec, ...]:
    """The layouts of operands whose matrices are whole.

    Raises:
        UnsupportedSharding: a rank would hold more than its largest shard, and than is sent in the time of an exchange.
    """
    gathered = tuple(
        spec.with_axes({m: AxisLayout(Replicate()) for d, m in spec.sharded_dims().items() if term[d] in form.whole})
        for spec, term in zip(specs, form.terms, strict=True)
    )
    moved = [i for i, (spec, whole) in enumerate(zip(specs, gathered, strict=True)) if not spec.lies_like(whole)]
    elements = sum(_most(gathered[i]) for i in moved)
    if elements <= max(map(_most, specs)) or is_little(specs[0], elements):
        return gathered
    i = moved[0]
    d, m = next((d, m) for d, m in specs[i].sharded_dims().items() if form.terms[i][d] in form.whole)
    size = specs[0].tensor_meta.dtype.itemsize
    raise refuse(
        name,
        list(specs),
        f"{no_other_dim(f'dim {d} of operand {i}', specs[i], m)}. Its matrices take {elements * size} bytes when "
        f"gathered, more than the limits: {max(map(_most, specs)) * size}, a rank's largest shard, and "
        f"{cost_of_exchange(specs[0].mesh.device_type)}, the bytes sent in the time of an exchange",
        f"redistribute it to Replicate() on mesh dim {m}, call inside shardtensor.allow_gather(), or shard another dim",
    )


def _most(spec: ShardTensorSpec) -> int:
    """How many elements the rank with the largest shards has."""
    held = spec.sharded_dims()
    return math.prod(max(spec.sizes_along(held[d])) if d in held else n for d, n in enumerate(spec.shape))


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
        votes = rank_reduction(per_matrix, [*per_matrix.sharded_dims().values()])(opinions, "min").tolist()
        return [e if vote == 2 else not vote for e, vote in zip(empty, votes, strict=True)]
    if nothing and any(empty) and len(lead) == 1:
        results = of_all()
        return [y.shape == (0,) for y in (results if isinstance(results, (tuple, list)) else [results])]
    return empty


def _result(y: Tensor, how: Arrangement, lead: Sequence[Label], labels: Sequence[Label], left_out: bool) -> ShardTensor:
    """A local result as a ShardTensor. One that is left out is empty, and replicated."""
    shape = [how.lengths[label] for label in lead] + list(y.shape[len(lead) :])
    spec = how.out(shape, y.dtype, lead)
    if left_out:
        y = y.new_empty(0)
        meta = spec.tensor_meta._replace(shape=y.shape, stride=y.stride())
        return from_part(y, spec.replicated().replace(meta=meta))
    for d, label in enumerate(labels[len(lead) :], start=len(lead)):
        shape[d] = how.lengths.get(label, y.shape[d])
    return from_part(y, how.out(shape, y.dtype, labels))


# -- declarations -----------------------------------------------------------------------------------------------------

# Arguments that are tensors, or may be.
_TENSORS = (
    *("input", "input2", "input3", "A", "B", "b", "LU", "LU_data", "LU_pivots", "LD", "pivots", "tau"),
    *("tol", "rcond", "atol", "rtol"),  # where these are not numbers
)


def _declare(spellings: str, arguments: Callable[..., Terms]) -> None:
    """Declare functions of ``torch.linalg``, or of ``torch`` and the methods of their names.

    Args:
        arguments: a function of torch's arguments, with specs for tensors, that gives the terms.
    """
    signature = inspect.signature(arguments)
    parameters = list(signature.parameters.values())
    required = [p.name for p in parameters if p.default is p.empty and p.kind != p.KEYWORD_ONLY]
    call_first = inspect.Parameter("call", inspect.Parameter.POSITIONAL_ONLY)
    for spelling in spellings.split():
        name = spelling.removeprefix("linalg.")
        homes = [torch, Tensor] if name == spelling else [torch.linalg]
        below = getattr(torch.ops.aten, spelling.replace(".", "_"), None)
        if name == spelling and getattr(getattr(torch, name, None), "__module__", "") == "torch._linalg_utils":
            continue  # newer torch has removed it, and keeps a function that raises
        functions = [getattr(home, name) for home in homes if hasattr(home, name)]
        if below is not None and not all(decomposes(getattr(below, overload)) for overload in below.overloads()):
            functions.append(below)
        for function in functions:

            def plan(call: Arguments, *args: Any, _function: Callable[..., Any] = function, **kwargs: Any) -> Plan:
                bound = signature.bind(*args, **kwargs).arguments
                given = {p.name: bound[p.name] for p in parameters if bound[p.name] is not p.default}
                positional = [given.pop(key) for key in required]
                return plan_by_matrix(call, _function, arguments(*args, **kwargs), positional, given)

            plan.__signature__ = signature.replace(  # type: ignore[attr-defined]
                parameters=[call_first, *parameters], return_annotation=Plan
            )
            operator(function, tensors=" ".join(key for key in signature.parameters if key in _TENSORS))(plan)


def _has_columns(matrix: ShardTensorSpec, b: ShardTensorSpec) -> bool:
    """Whether the right-hand side ``b`` is a matrix, or many of them, rather than a vector for each matrix."""
    ndim = len(matrix.shape)
    return len(b.shape) > 1 and not (len(b.shape) == ndim - 1 and b.shape == matrix.shape[:-1])


def _solved(A: ShardTensorSpec, B: ShardTensorSpec, left: bool = True) -> Terms:
    """Of a system with right-hand sides ``B``, any number of columns of which may be anywhere."""
    b = "n" if not _has_columns(A, B) else "nK" if left else "Kn"
    return ("nn", b), (b,)


_declare("linalg.cholesky", lambda input, *, upper=False: ONE)
_declare("linalg.cholesky_ex", lambda input, *, upper=False, check_errors=False: ONE)
_declare("cholesky cholesky_inverse", lambda input, upper=False: ONE)
_declare("linalg.det linalg.slogdet linalg.inv", lambda A: ONE)
_declare("linalg.eig linalg.eigvals linalg.matrix_exp", lambda input: ONE)
_declare("det logdet slogdet inverse matrix_exp geqrf", lambda input: ONE)
_declare("linalg.eigh linalg.eigvalsh", lambda input, UPLO="L": ONE)
_declare("linalg.inv_ex", lambda A, *, check_errors=False: ONE)
_declare("linalg.ldl_factor", lambda input, *, hermitian=False: ONE)
_declare("linalg.ldl_factor_ex", lambda input, *, hermitian=False, check_errors=False: ONE)
_declare("linalg.lu linalg.lu_factor", lambda A, *, pivot=True: ONE)
_declare("linalg.lu_factor_ex", lambda A, *, pivot=True, check_errors=False: ONE)
_declare("lu", lambda input, pivot=True, get_infos=False: ONE)
_declare("linalg.matrix_rank", lambda input, tol=None, hermitian=False, *, atol=None, rtol=None: ONE)
_declare("linalg.pinv", lambda input, rcond=None, hermitian=False, *, atol=None, rtol=None: ONE)
_declare("pinverse", lambda input, rcond=1e-15: ONE)
_declare("linalg.qr", lambda A, mode="reduced": ONE)
_declare("qr", lambda input, some=True: ONE)
_declare("linalg.svd", lambda A, full_matrices=True, *, driver=None: ONE)
_declare("linalg.svdvals", lambda A, *, driver=None: ONE)
_declare("svd", lambda input, some=True, compute_uv=True: ONE)

_declare("linalg.householder_product", lambda input, tau: (("mn", "k"), ()))
_declare("orgqr", lambda input, input2: (("mn", "k"), ()))
_declare("ormqr", lambda input, input2, input3, left=True, transpose=False: (("mn", "k", "pq"), ()))
_declare("lu_unpack", lambda LU_data, LU_pivots, unpack_data=True, unpack_pivots=True: (("mn", "p"), ()))

_declare(
    "linalg.lstsq", lambda input, b, rcond=None, *, driver=None: (("mn", "mk" if _has_columns(input, b) else "m"), ())
)
_declare("linalg.solve", lambda A, B, *, left=True: _solved(A, B, left))
_declare("linalg.solve_ex", lambda A, B, *, left=True, check_errors=False: _solved(A, B, left))
_declare("linalg.solve_triangular", lambda input, B, *, upper, left=True, unitriangular=False: _solved(input, B, left))
_declare("cholesky_solve", lambda input, input2, upper=False: (("nK", "nn"), ("nK",)))
_declare("linalg.ldl_solve", lambda LD, pivots, B, *, hermitian=False: (("nn", "n", "nK"), ("nK",)))
_declare(
    "linalg.lu_solve",
    lambda LU, pivots, B, *, left=True, adjoint=False: (("nn", "n", b := "nK" if left else "Kn"), (b,)),
)
_declare("lu_solve", lambda input, LU_data, LU_pivots: (("nK", "nn", "n"), ("nK",)))

# Which the functions of similar names call.
_declare("_linalg_det _linalg_slogdet", lambda A: ONE)
_declare("_linalg_eigh", lambda A, UPLO="L", compute_v=True: ONE)
_declare("_linalg_svd", lambda A, full_matrices=False, compute_uv=True, *, driver=None: ONE)
_declare("_linalg_solve_ex", lambda A, B, *, left=True, check_errors=False: _solved(A, B, left))


# -- those that are put together of others ----------------------------------------------------------------------------


@operator(torch.triangular_solve, Tensor.triangular_solve, torch.ops.aten.triangular_solve, tensors="input A")
def plan_triangular_solve(
    call: Arguments,
    input: ShardTensorSpec,
    A: ShardTensorSpec,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> Plan:
    """The matrix is copied to the results from the operand: a rank that computes only some columns has all of it."""

    def solution(b: Tensor, matrix: Tensor) -> Tensor:
        return torch.triangular_solve(b, matrix, upper, transpose, unitriangular).solution

    solve = plan_by_matrix(call, solution, (("nK", "nn"), ("nK",)), (input, A))
    if solve is DECLINED:
        return DECLINED

    def run(b: ShardTensor, matrix: ShardTensor) -> Any:
        x = solve.run((b, matrix))
        copied = matrix.expand(*x.shape[:-2], *matrix.shape[-2:]).clone()
        return torch.return_types.triangular_solve((x, copied))

    return Composed(run)


@operator(torch.linalg.matrix_power, torch.matrix_power, Tensor.matrix_power, tensors="input")
def plan_matrix_power(call: Arguments, input: ShardTensorSpec, n: int) -> Plan:
    """A sharded matrix is multiplied with itself, but not inverted."""
    ndim = len(input.shape)
    if n >= 0 and {ndim - 1, ndim - 2} & set(input.sharded_dims()):
        return DECLINED
    return plan_by_matrix(call, torch.linalg.matrix_power, ONE, (input, n))


@operator(torch.linalg.cond, tensors="input")
def plan_cond(call: Arguments, input: ShardTensorSpec, p: float | str | None = None) -> Plan:
    """By its parts: torch's own leaves the graph on a rank without matrices."""
    if len(input.shape) < 2:
        return DECLINED

    def of_singular_values(matrix: Tensor) -> Tensor:
        values: Tensor = torch.linalg.svdvals(matrix)
        largest, smallest = values[..., 0], values[..., -1]
        return smallest / largest if p == -2 else largest / smallest

    def of_inverse(matrix: Tensor) -> Tensor:
        inverse, info = torch.linalg.inv_ex(matrix)
        norm: Tensor = torch.linalg.matrix_norm(inverse, p)
        own: Tensor = torch.linalg.matrix_norm(matrix, p)
        return own * norm.masked_fill(info != 0, float("inf"))

    return Composed(of_singular_values if p in (None, 2, -2) else of_inverse)
