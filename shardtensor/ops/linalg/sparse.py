"""Products of a sparse matrix and a ShardTensor: ``torch.mm(matrix, x)``, ``matrix @ x`` and their kin.

The matrix is plain, and the same on every rank. Which of the other operand's dims may be sharded, and how it is
resharded, is worked out as for a dense matrix (common/named_dims.py); a rank takes of the matrix what belongs to its
shard. No plans are kept of these: a plan knows operands by their strides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ..._compat import untraced
from ...dispatch.registry import DECLINED, register
from ...dispatch.tensor import from_part, redistribute_to, to_part
from ...errors import refuse
from ...layout.spec import ShardTensorSpec
from ...operators.arguments import common_mesh
from ..common.alignment import as_operand
from ..common.named_dims import Form, arrange

MATRIX = Form(("ik", "kj"), "ij")
MATRIX_BATCH = Form(("bik", "bkj"), "bij")
MATRIX_VECTOR = Form(("ik", "k"), "i")

_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)  # torch differentiates products of no others
_PRODUCTS = {torch.mm: MATRIX, torch.bmm: MATRIX_BATCH, torch.mv: MATRIX_VECTOR}


def sparse_product(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """What is called in place of a plan where an operand is sparse; it may decline.

    Args:
        function: ``torch.mm``, ``bmm``, ``mv`` or ``matmul``.
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
        return _product(name, chosen, form, matrix, other)

    return product


def _product(name: str, function: Callable[..., Tensor], form: Form, matrix: Tensor, other: Tensor) -> Tensor:
    mesh = common_mesh(name, (other,))
    if mesh is None:  # the ShardTensor is what the product is added to
        return function(matrix, other)
    if matrix.requires_grad and torch.is_grad_enabled():
        reason = "the gradient of a sparse operand has no distributed form"
        raise refuse(name, (matrix, other), reason, "detach it, or make it dense by to_dense()")
    _check(function, matrix, other)
    x = as_operand(other, mesh)
    whole = ShardTensorSpec.make(mesh, [Replicate()] * mesh.ndim, matrix.shape, matrix.dtype)
    how = arrange(name, form, (whole, x._spec))
    device, dtype = x.device.type, matrix.dtype
    if torch.is_autocast_enabled(device) and dtype.is_floating_point and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
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
    with torch.no_grad(), untraced():
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
    return sparse_product(torch.mm)("sparse.mm", mat1, mat2) if reduce == "sum" else DECLINED


def _is_sparse(t: Tensor) -> bool:
    return not isinstance(t, DTensor) and t.layout is not torch.strided
