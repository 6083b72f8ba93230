"""Products of a sparse matrix and a ShardTensor: ``torch.mm(matrix, x)``, ``matrix @ x`` and their kin.

The matrix is plain, and the same on every rank. No plans are kept of these: a plan knows operands by their strides.

[Note: rows of matrices] If rows of the other operand are sharded, the dim that is summed over, a rank computes the rows
of the result that correspond to its rows of the operand, or an even part if the matrix is not square. It needs the rows
that its part of the matrix reads: a halo, as that of an index ([Note: row halos] in row_halos.py). Each rank finds the
halo by itself, after the ranks have compared their indices. It keeps with the matrix the halo, and where the entries of
its part are; values are taken anew in each call. What the backward pass multiplies by the transposed part goes back to
the owners. If a matrix reads more rows than resharding the operand would move, the operand is resharded, as for any
matrix.

Where other dims are sharded, and in graphs, the layout is worked out as for a dense matrix (common/named_dims.py); a
rank takes of the matrix what belongs to its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ..._compat import AutogradFunction, OpOverload, TensorMeta, hidden_from_program, is_traced, sparse_parts, tree_map
from ..._compat.c10d import group_along
from ...communication.row_halos import RowHalo, check_same_on_ranks, check_unwritten
from ...dispatch.index_findings import found, is_kept
from ...dispatch.registry import DECLINED, register
from ...dispatch.tensor import ShardTensor, from_part, redistribute_to, to_part
from ...errors import refuse
from ...layout.dtypes import wide_dtype
from ...layout.intervals import boundaries_of, chunk_sizes, intervals_of
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ...layout.strides import contiguous_stride
from ...operators.arguments import common_mesh
from ...ranks.compared_operands import note_operand
from ...ranks.cuda_graphs import is_capturing
from ..common.alignment import as_operand
from ..common.named_dims import Form, arrange

MATRIX = Form(("ik", "kj"), "ij")
MATRIX_BATCH = Form(("bik", "bkj"), "bij")
MATRIX_VECTOR = Form(("ik", "k"), "i")

_aten = torch.ops.aten

_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)  # torch differentiates products of no others
_PRODUCTS = {torch.mm: MATRIX, torch.bmm: MATRIX_BATCH, torch.mv: MATRIX_VECTOR}


def sparse_product(function: Callable[..., Tensor], reduce: str = "sum") -> Callable[..., Any]:
    """What is called in place of a plan where an operand is sparse; it may decline.

    Args:
        function: ``torch.mm``, ``bmm``, ``mv`` or ``matmul``.
        reduce: how ``torch.sparse.mm`` makes one row of several.
    """

    def product(name: str, matrix: Tensor, other: Any, out_dtype: torch.dtype | None = None) -> Any:
        if not _is_sparse(matrix) or not isinstance(other, Tensor) or _is_sparse(other) or out_dtype is not None:
            return DECLINED
        chosen = function
        if function is torch.matmul:
            chosen = torch.mv if other.ndim == 1 else torch.mm
        form = _PRODUCTS[chosen]
        if form is MATRIX_BATCH and matrix.layout is not torch.sparse_coo:
            return DECLINED
        if matrix.layout not in _LAYOUTS or (matrix.ndim, other.ndim) != tuple(map(len, form.terms)):
            return DECLINED
        if reduce != "sum" and matrix.layout is not torch.sparse_csr:
            return DECLINED
        return _product(name, chosen, form, matrix, other, reduce)

    return product


def _product(
    name: str, function: Callable[..., Tensor], form: Form, matrix: Tensor, other: Tensor, reduce: str
) -> Tensor:
    mesh = common_mesh(name, (other,))
    if mesh is None:  # the ShardTensor is what the product is added to
        return function(matrix, other)
    _check(function, matrix, other)
    x = as_operand(other, mesh)
    device, dtype = x.device.type, matrix.dtype
    if torch.is_autocast_enabled(device) and dtype.is_floating_point and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    whole = ShardTensorSpec.make(mesh, [Replicate()] * mesh.ndim, matrix.shape, matrix.dtype)
    how = arrange(name, form, (whole, x._spec)) if reduce == "sum" else None
    if form is not MATRIX_BATCH:
        result = _by_rows(name, matrix, x, dtype, None if how is None else how.targets[1], reduce)
        if result is not None:
            return result
    if how is None:
        how = arrange(name, replace(form, whole=frozenset("k")), (whole, x._spec))
        function = partial(torch.sparse.mm, reduce=reduce)
    if matrix.requires_grad and torch.is_grad_enabled():
        reason = "the gradient of a sparse operand has no distributed form where columns of the other one are divided"
        raise refuse(name, (matrix, other), reason, "detach it, or shard the other operand along the contracted dim")
    out = how.out([how.lengths[label] for label in form.out], dtype)
    part = _part(matrix, how.targets[0]).to(out.held_dtype)
    local = to_part(redistribute_to(x, how.targets[1]), how.gradient(1)).to(out.held_dtype)
    with torch.autocast(device, enabled=False):
        return from_part(function(part, local), out)


def _check(function: Callable[..., Tensor], *operands: Tensor) -> None:
    """torch's errors about shapes and dtypes, on every rank and before anything is sent."""
    dtypes = {t.dtype: None for t in operands}
    if len(dtypes) > 1 and not torch.is_autocast_enabled(operands[0].device.type):
        raise RuntimeError(f"expected operands to have the same dtype, but got: {', '.join(map(str, dtypes))}")
    with hidden_from_program():
        function(*(torch.empty(t.shape, dtype=t.dtype, device="meta") for t in operands))


def _part(matrix: Tensor, spec: ShardTensorSpec) -> Tensor:
    """What belongs to this rank's shard."""
    for d, m in spec.sharded_dims().items():
        start, stop = spec.interval(m)
        matrix = matrix if matrix.layout is torch.sparse_coo else matrix.to_sparse(layout=torch.sparse_coo)
        matrix = matrix.narrow_copy(d, start, stop - start)
    return matrix


def added_sparse_product(function: Callable[..., Tensor], product: Callable[..., Tensor]) -> Callable[..., Any]:
    """The same for ``function``, which adds a ``product`` to something."""

    def added(name: str, input: Tensor, matrix: Tensor, other: Tensor, beta: Any = 1, alpha: Any = 1) -> Any:
        if _is_sparse(input) or not _is_sparse(matrix) or _is_sparse(other):
            return DECLINED
        _check(function, input, matrix, other)
        result = product(matrix, other)
        result = result if alpha == 1 else result * alpha
        return result if beta == 0 else torch.add(result, input, alpha=beta)  # otherwise what input holds, NaN even

    return added


@register(torch.sparse.mm)
def sparse_mm(mat1: Tensor, mat2: Tensor, reduce: str = "sum") -> Any:
    return sparse_product(torch.mm, reduce)("sparse.mm", mat1, mat2)


def _is_sparse(t: Tensor) -> bool:
    return not isinstance(t, DTensor) and t.layout is not torch.strided


def _held(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def _constructed(func: OpOverload) -> Callable[..., Any]:
    """A constructor of sparse tensors. Of what every rank holds whole it makes a plain one."""

    def construct(*args: Any, **kwargs: Any) -> Any:
        parts = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        if not all(p.is_replicate() for t in parts if isinstance(t, DTensor) for p in t.placements):
            reason = "a sparse matrix is the same on every rank, and no rank has all of this one's entries"
            remedy = "make it of plain tensors (an edge_index before it is sharded); it may multiply sharded rows"
            raise refuse("a sparse tensor's constructor", parts, reason, remedy)
        return func(*tree_map(_held, args), **tree_map(_held, kwargs))

    return construct


for _func in (
    _aten._sparse_coo_tensor_with_dims_and_tensors.default,
    _aten.sparse_compressed_tensor.comp_plain_value_size,
):
    register(_func)(_constructed(_func))


# -- by rows -------------------------------------------------------------------------------------------------------


def _by_rows(
    name: str, matrix: Tensor, x: ShardTensor, dtype: torch.dtype, other: ShardTensorSpec | None, reduce: str
) -> Tensor | None:
    """The product in shards of rows, see [Note: rows of matrices]; None if it cannot be had, or would send more.

    Args:
        dtype: of the result.
        other: the layout that ``x`` would have otherwise, if there is another way.
    """
    spec, (n, k) = x._spec, matrix.shape
    m = spec.sharded_dims().get(0)
    if m is None or spec.mesh.size(m) == 1 or not (dtype.is_floating_point or dtype.is_complex):
        return None
    if is_traced(matrix) or is_traced(x._local_tensor):
        return None
    sizes = spec.sizes_along(m)
    ends = sizes if n == k else chunk_sizes(n, len(sizes))
    graded = matrix.requires_grad and torch.is_grad_enabled()
    entries = matrix.coalesce() if graded and matrix.layout is torch.sparse_coo else matrix
    indices, values = sparse_parts(entries)
    group = group_along(spec.mesh, m)
    key = (group.group_name, sizes, ends, entries is matrix)
    if is_capturing(x.device) and not is_kept(matrix, key):
        return None

    def find() -> MatrixRows:
        check_same_on_ranks(name, indices, group, "the sparse matrix")
        return MatrixRows(entries.layout, indices, ends, sizes, spec.coordinate[m], group)

    rows = found(matrix, key, find)
    rows.check(indices)
    if other is not None and not graded:
        # An exchange that shards columns, or contributions to all rows, which whoever needs them sums.
        moved = n * 2 * len(sizes) if other.layout[m] == spec.layout[m] else k / len(sizes)
        if rows.halo.total > moved * (len(sizes) - 1):
            return None
    if graded:
        shared = {i: AxisLayout(Partial()) for i in spec.sharded_dims().values()}
        wanted = as_operand(values, spec.mesh)
        values = to_part(wanted, wanted._spec.with_axes(shared))
    else:
        note_operand(name, values, spec.mesh)
    layout = [AxisLayout(Shard(0), ends) if i == m else axis for i, axis in enumerate(spec.layout)]
    shape = (n, *x.shape[1:])
    out = spec.with_layout(layout, TensorMeta(torch.Size(shape), contiguous_stride(shape), dtype))
    with torch.autocast(x.device.type, enabled=False):
        result = rows.times(values.to(dtype), to_part(x, spec).to(dtype), reduce)
        return from_part(result, out)


class MatrixRows:
    """This rank's rows of a sparse matrix that every rank has. Made without communication.

    Args:
        layout: of the matrix.
        indices: the matrix's, as :func:`shardtensor._compat.sparse_parts` gives them.
        ends, sizes: how the matrix's rows, and those of the other operand, are divided.
        rank: this one's, of ``group``.

    Attributes:
        halo: of the other operand's rows.

    Raises:
        IndexError: an index is out of range.
    """

    def __init__(
        self,
        layout: torch.layout,
        indices: Sequence[Tensor],
        ends: Sequence[int],
        sizes: Sequence[int],
        rank: int,
        group: dist.ProcessGroup,
    ) -> None:
        rows, columns = indices
        if layout is torch.sparse_csr:
            rows = torch.repeat_interleave(rows.diff())
        elif layout is torch.sparse_csc:
            columns, rows = torch.repeat_interleave(rows.diff()), columns
        order = None if bool((rows.diff() >= 0).all()) else rows.argsort(stable=True)
        if order is not None:
            rows, columns = rows[order], columns[order]
        bounds = torch.tensor(boundaries_of(ends), device=rows.device, dtype=rows.dtype)
        places: list[int] = torch.searchsorted(rows, bounds).tolist()
        (start, stop), (first, last) = intervals_of(ends)[rank], places[rank : rank + 2]
        self.halo = RowHalo(columns, sizes, rank, group, (0, [b - a for a, b in pairwise(places)]))
        if self.halo.beyond or self.halo.negative or places[0] or places[-1] != len(rows):
            raise IndexError(f"an index of a sparse matrix is out of range for its shape {(sum(ends), sum(sizes))}")
        self._taken = slice(first, last) if order is None else order[first:last]
        # Where in the indices this rank's are: all that has to stay as it was.
        starts = slice(start, stop + 1) if layout is torch.sparse_csr else slice(None)
        self._own = (self._taken if layout is torch.sparse_coo else starts, self._taken)
        self._indices = [t[own].clone() for t, own in zip(indices, self._own, strict=True)]
        width = sizes[rank] + len(self.halo.positions)
        self._pattern = Pattern.of(rows[first:last] - start, self.halo.places, (stop - start, width))

    def check(self, indices: Sequence[Tensor]) -> None:
        """Raise where the matrix's indices are others than this was made of, see :meth:`RowHalo.check`."""
        for now, own, before in zip(indices, self._own, self._indices, strict=True):
            check_unwritten(now[own], before)

    def times(self, values: Tensor, local: Tensor, reduce: str) -> Tensor:
        """Own rows of the product of the matrix with all these values, and what is sharded. Differentiable."""
        wide = wide_dtype(values.dtype)
        vector = local.ndim == 1
        rows = self.halo.fetched(local.unsqueeze(1) if vector else local, wide)
        own = values[self._taken].to(wide)
        product: Tensor
        if reduce == "sum":
            product = SparseProduct.apply(own, rows, self._pattern)
        else:
            product = torch.sparse.mm(self._pattern.matrix(own), rows, reduce)
        return (product.squeeze(1) if vector else product).to(values.dtype)


class Pattern:
    """Where a sparse matrix has entries, in the order of its rows, and the same of the transposed one.

    Attributes:
        order: the places of the transposed matrix's values among this one's.
    """

    order: Tensor
    transposed: Pattern

    def __init__(self, starts: Tensor, columns: Tensor, shape: tuple[int, int]) -> None:
        # In the integers that the libraries of kernels take.
        dtype = torch.int32 if max(*shape, len(columns)) < 2**31 else torch.int64
        self._starts, self._columns, self._shape = starts.to(dtype), columns.to(dtype), shape

    @staticmethod
    def of(rows: Tensor, columns: Tensor, shape: tuple[int, int]) -> Pattern:
        """The pattern of entries in these rows, which ascend, and columns."""
        order = columns.argsort(stable=True)
        pattern = Pattern(_starts(rows, shape[0]), columns, shape)
        pattern.transposed = Pattern(_starts(columns[order], shape[1]), rows[order], (shape[1], shape[0]))
        pattern.order, pattern.transposed.order, pattern.transposed.transposed = order, order.argsort(), pattern
        return pattern

    def matrix(self, values: Tensor) -> Tensor:
        return torch.sparse_csr_tensor(self._starts, self._columns, values, self._shape, check_invariants=False)

    def product(self, values: Tensor, right: Tensor) -> Tensor:
        """The matrix with these values, times rows."""
        if not self._is_crowded:
            product: Tensor = self.matrix(values) @ right
            return product
        terms = values.unsqueeze(1) * right[self._columns]
        return right.new_zeros(self._shape[0], right.shape[1]).index_add_(0, self._rows, terms)

    def sampled(self, left: Tensor, right: Tensor) -> Tensor:
        """For each entry the product of a row of ``left`` and the conjugate of one of ``right``."""
        if self._is_crowded:
            return (left[self._rows] * right[self._columns].conj()).sum(1)
        none = self.matrix(left.new_zeros(len(self._columns)))
        values: Tensor = torch.sparse.sampled_addmm(none, left, right.mH, beta=0).values()
        return values.clone()  # no view of a matrix, which has no strides

    @property
    def _is_crowded(self) -> bool:
        """Whether there are more entries than places, as some are repeated: cuSPARSE refuses such a matrix."""
        return len(self._columns) > self._shape[0] * self._shape[1]

    @property
    def _rows(self) -> Tensor:
        return torch.repeat_interleave(self._starts.diff())


def _starts(rows: Tensor, n: int) -> Tensor:
    return torch.searchsorted(rows, torch.arange(n + 1, device=rows.device, dtype=rows.dtype))


class SparseProduct(AutogradFunction):
    """A sparse matrix times rows. torch's own gradient would sort the matrix's entries in each step."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: Tensor, pattern: Pattern) -> Tensor:
        ctx.save_for_backward(values, rows if ctx.needs_input_grad[0] else None)
        ctx.pattern = pattern
        return pattern.product(values, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (values, rows), pattern = ctx.saved_tensors, ctx.pattern
        of_values = _OfValues.apply(grad, rows, pattern) if ctx.needs_input_grad[0] else None
        of_rows = None
        if ctx.needs_input_grad[1]:
            of_rows = SparseProduct.apply(values[pattern.order].conj(), grad, pattern.transposed)
        return of_values, of_rows, None


class _OfValues(AutogradFunction):
    """For each entry of a matrix the product of a row of ``left`` and the conjugate of one of ``right``."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, pattern: Pattern) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.pattern = pattern
        return pattern.sampled(left, right)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (left, right), pattern = ctx.saved_tensors, ctx.pattern
        of_right = SparseProduct.apply(grad[pattern.order].conj(), left, pattern.transposed)
        return SparseProduct.apply(grad, right, pattern), of_right, None
