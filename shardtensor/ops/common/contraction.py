"""Plans of operators whose dims have names, as in einsum; named_dims.py finds how the operands must lie.

[Note: rows again] Few queries are sent around a ring to the ranks that have the keys, as LeViT's are where it halves an
image. Their scores are sharded along the keys then, and the product with the values is a sum over the ranks, which all
of them would have and go on with alike. So the first product notes how its rows were sharded, and the sum is sharded so
again where it is large: it takes half of the bytes of an all-reduce.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from ..._compat import AutogradFunction
from ...dispatch.tensor import ShardTensor, from_part, redistribute_to, to_part
from ...layout.dtypes import wide_dtype
from ...layout.intervals import intervals_of
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ...operators.autocast import autocast_dtype
from ...operators.declaration import Arguments, LocalPlan
from .alignment import is_little
from .named_dims import Along, Arrangement, Form, arrange
from .records import note, recall
from .ring import Tour, part_by_part


def local_work(how: Arrangement, function: Callable[..., Tensor], *, is_product: bool) -> Callable[..., Tensor]:
    """``function`` for the local operands, part by part where one is sent around. Differentiable."""
    work, graph = function, partial(_Product.apply, *_spelled(how.form)) if is_product else function
    for m, axis in enumerate(how.axes):
        if axis is not None and axis.sent is not None:
            work = graph = _around_ring(how, work, graph, m, axis.sent)
    return work


def _around_ring(
    how: Arrangement, function: Callable[..., Tensor], graph: Callable[..., Tensor], m: int, sent: Along
) -> Callable[..., Tensor]:
    label, intervals, terms = sent.label, intervals_of(sent.sizes), how.form.terms
    shards = [(i, p.dim) for i, target in enumerate(how.targets) if isinstance(p := target.placements[m], Shard)]
    at, dim = next((i, d) for i, d in shards if terms[i][d] == label)
    target = how.targets[at]
    dims = [term.index(label) if label in term and i != at else None for i, term in enumerate(terms)]

    def part_of(function: Callable[..., Tensor], owner: int, part: Tensor, *others: Tensor) -> Tensor:
        a, b = intervals[owner]
        operands = [*others[:at], part, *others[at:]]
        pairs = zip(operands, dims, strict=True)
        return function(*(t if d is None else t.narrow(d, a, b - a) for t, d in pairs))

    into = None if how.form.summed(label) else how.form.out.index(label)
    tour = Tour(target.mesh, m, target.coordinate[m], dim, into, intervals)
    works = partial(part_of, function), partial(part_of, graph)

    def call(*operands: Tensor) -> Tensor:
        return part_by_part(*works, tour, operands[at], *operands[:at], *operands[at + 1 :])

    return call


# For each operand of a product that of its gradient, and the dims along which this is the same everywhere, left out.
Equations = Sequence[tuple[str, Sequence[int]]]


class _Product(AutogradFunction):
    """The graph of a product of operands: the result has gradients, but no values."""

    apply: ClassVar[Callable[..., Tensor]]

    @staticmethod
    def forward(ctx: Any, terms: Sequence[str], out: str, equations: Equations, *operands: Tensor) -> Tensor:
        ctx.equations = equations
        ctx.save_for_backward(*operands)
        lengths = {c: n for term, t in zip(terms, operands, strict=True) for c, n in zip(term, t.shape, strict=True)}
        return operands[0].new_empty(()).expand([lengths.get(c, 1) for c in out])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        own: Sequence[Tensor] = ctx.saved_tensors
        found: list[Tensor | None] = [None, None, None]
        for i, (t, need) in enumerate(zip(own, ctx.needs_input_grad[3:], strict=True)):
            if not need:
                found.append(None)
                continue
            equation, broadcast = ctx.equations[i]
            result = torch.einsum(equation, grad, *(other.conj() for other in (*own[:i], *own[i + 1 :])))
            for d in broadcast:
                result = result.unsqueeze(d)
            found.append(result.expand(t.shape) if broadcast else result)
        return tuple(found)


def _spelled(form: Form) -> tuple[list[str], str, Equations]:
    """Operands and result of a product as einsum writes them, and the equations of its gradients.

    Example:
        >>> _spelled(Form(("ik", "kjl"), "ij"))
        (['ab', 'bcd'], 'ac', [('ac,bcd->ab', []), ('ac,ab->bc', [2])])
    """
    named = [[(i, d) if x is None else x for d, x in enumerate(term)] for i, term in enumerate(form.terms)]
    letters = dict(zip(dict.fromkeys(x for term in (*named, form.out) for x in term), string.ascii_letters))
    *terms, out = ("".join(letters[x] for x in term) for term in (*named, form.out))
    equations = []
    for i, term in enumerate(terms):
        factors = ",".join([out, *terms[:i], *terms[i + 1 :]])
        kept = "".join(c for c in term if c in factors)
        equations.append((f"{factors}->{kept}", [d for d, c in enumerate(term) if c not in factors]))
    return terms, out, equations


class ContractionPlan(LocalPlan):
    """``function`` of local operands that have an arrangement's targets.

    Where half precision is summed over ranks, in the result or in the gradient of an operand, it runs in float32: see
    [Note: rounded once] in redistribute.py.
    """

    outputs: ShardTensorSpec

    def __init__(self, how: Arrangement, function: Callable[..., Tensor], *, is_product: bool = False) -> None:
        shape = [how.lengths.get(label, 1) for label in how.form.out]
        gradients = [how.gradient(i) for i in range(len(how.targets))]
        self.targets = how.targets
        self.cast_to = _dtype_of_autocast(how, function)
        out = how.out(shape, how.targets[0].tensor_meta.dtype)
        _note_rows(how, out)
        self.axes = {} if is_little(out, out.shape.numel()) else _rows_again(how, out)
        super().__init__(local_work(how, function, is_product=is_product), out, gradients)

    def run(self, tensors: Sequence[Any]) -> ShardTensor:
        # Some operators have arguments behind the operands that may be tensors, but are none in this call.
        operands = tensors[: len(self.targets)]
        dtype = self.cast_to or operands[0].dtype
        computed = torch.float32 if self._rounds_sums(dtype, operands) else self.cast_to
        if computed is None:
            result = self.function(*self.local_tensors(operands))
            return self._result(result, result.dtype)
        parts = [to_part(t, s or t._spec, computed) for t, s in zip(operands, self.gradients or (), strict=True)]
        with torch.autocast(parts[0].device.type, enabled=False):
            result = self.function(*parts)
        return self._result(result, dtype)

    def _result(self, local: Tensor, dtype: torch.dtype) -> ShardTensor:
        result = from_part(local, self.outputs.with_dtype(dtype))
        return redistribute_to(result, result._spec.with_axes(self.axes)) if self.axes else result

    def _rounds_sums(self, dtype: torch.dtype, operands: Sequence[ShardTensor]) -> bool:
        """Whether a result of this dtype, or a gradient, is rounded, and added up over ranks before that."""
        if wide_dtype(dtype) == dtype:
            return False
        graded = zip(operands, self.gradients or (), strict=True)
        summed = any(s is not None and s.partial_mesh_dims() and t.requires_grad for t, s in graded)
        return summed or bool(self.outputs.partial_mesh_dims())


def _note_rows(how: Arrangement, out: ShardTensorSpec) -> None:
    """Note how the dims of a product were sharded that were sent around, see [Note: rows again]."""
    for m, axis in enumerate(how.axes):
        if axis is not None and axis.sent is not None and axis.sent.label in how.form.out:
            rows = AxisLayout(Shard(list(how.form.out).index(axis.sent.label)), axis.sent.sizes)
            note(out, ("rows", m, out.shape, out.placements[m]), rows)


def _rows_again(how: Arrangement, out: ShardTensorSpec) -> dict[int, AxisLayout]:
    """How to shard a sum over ranks, where rows of an operand were sharded before they were sent around."""
    axes = {}
    for m in out.partial_mesh_dims():
        for spec, term in zip(how.targets, how.form.terms, strict=True):
            rows: AxisLayout | None = recall(spec, ("rows", m, spec.shape, spec.placements[m]))
            if rows is not None and isinstance(rows.placement, Shard) and term[rows.placement.dim] in how.form.out:
                dim = list(how.form.out).index(term[rows.placement.dim])
                if dim not in out.sharded_dims():
                    axes[m] = AxisLayout(Shard(dim), rows.sizes)
    return axes


def _dtype_of_autocast(how: Arrangement, function: Callable[..., Tensor]) -> torch.dtype | None:
    """The dtype to which autocast casts the operands; None where it is off."""
    device = how.targets[0].mesh.device_type
    if not torch.is_autocast_enabled(device):
        return None
    whole = how.form.whole
    shapes = [
        [n if label in whole else min(n, 2) for n, label in zip(spec.shape, term, strict=True)]
        for spec, term in zip(how.targets, how.form.terms, strict=True)
    ]
    return autocast_dtype(function, shapes, [spec.tensor_meta.dtype for spec in how.targets], device)


def plan_contraction(
    call: Arguments, name: str, function: Callable[..., Tensor], form: Form, *operands: str, is_product: bool = False
) -> ContractionPlan:
    """The plan of an operator of this form, whose tensors are ``operands``.

    The caller has had torch check their shapes and dtypes.

    Args:
        is_product: the operator multiplies entries and sums over the labels that the result lacks, as einsum does.
    """
    how = arrange(name, form, tuple(call.tensors[operand] for operand in operands))
    for operand, target in zip(operands, how.targets, strict=True):
        call.redistribute(operand, target)
    return ContractionPlan(how, function, is_product=is_product)
