"""Factorizations of a single tall matrix whose rows are sharded: what is small of it is gathered, once.

[Note: tall matrices] A matrix of more rows than columns is ``W S``: the columns of ``W`` are orthonormal, and ``S``,
the *stack*, has few rows. ``W`` leaves the first rows of the matrix as they are, as many as it has columns, and has on
each rank an orthonormal basis of what its other rows span: there ``S`` has the triangle of a QR factorization. A shard
with fewer rows than columns stays as it is. So each rank gathers the stack, calls torch for it, and multiplies what has
the matrix's rows with its own block of ``W``.

LAPACK's Householder reflections depend on the first rows of a matrix and on the scalar products of the others. Both are
the stack's as well, so signs are those of one device: of ``R``, and of singular vectors. For the same reason one of its
decisions, by the ratio of rows and columns, comes out alike: the stack has less than twice as many rows as columns only
where it is the matrix.

torch differentiates by its formulas for the whole matrix, in products of what is sharded by rows and what is
replicated. So a shard whose own rows are linearly dependent has the gradients of one device, and there are second
derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from ..._compat import DisableTorchFunction, OpOverloadPacket, TensorMeta
from ...communication.redistribute import redistribute_local
from ...dispatch.registry import DECLINED
from ...dispatch.tensor import ShardTensor, from_part, redistribute_to
from ...layout.geometry import intersect, intervals_of, length, resized
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ...layout.strides import contiguous_stride
from ...operators.declaration import Composed, Plan
from ..common.alignment import is_little
from ..common.reduce import rank_reduction

# What is called below autograd, and how each of its results lies: it has the matrix's rows, or these as columns, or
# every rank has all of it.
_RESULTS = {
    "qr": ("rows", "whole"),
    "svd": ("rows", "whole", "whole"),
    "pinv": ("columns",),
    "lstsq": ("whole", "whole", "whole", "whole"),
}
# What torch composes of these. Larger results than the matrix, which these arguments ask for, have no such form.
_COMPOSED = {*_RESULTS, "svdvals", "matrix_norm", "matrix_rank", "pinverse"}
_LARGER = {("mode", "complete"), ("full_matrices", True)}


class _Stack:
    """The stack of a matrix with this spec.

    Attributes:
        spec: the matrix's.
        dim, mesh_dim: of the rows.
        columns: how many there are.
        head: how many of this rank's rows are in the stack as they are, in front.
        block: the interval of the stack that comes from this rank.
        rows: how many rows of the stack come from each rank.
    """

    def __init__(self, spec: ShardTensorSpec) -> None:
        self.spec, self.dim = spec, len(spec.shape) - 2
        self.mesh_dim, self.columns = spec.sharded_dims()[self.dim], spec.shape[-1]
        shards, rank = intervals_of(spec.sizes_along(self.mesh_dim)), spec.coordinate[self.mesh_dim]
        heads = [length(intersect(own, (0, self.columns))) for own in shards]
        self.rows = tuple(h + min(self.columns, length(own) - h) for h, own in zip(heads, shards, strict=True))
        self.head, self.block = heads[rank], intervals_of(self.rows)[rank]

    def basis(self, local: Tensor) -> Tensor | None:
        """This rank's block of ``W`` below the head; None for the identity."""
        tail = local[..., self.head :, :]
        return torch.linalg.qr(tail)[0] if tail.shape[-2] > self.columns else None

    def project(self, local: Tensor, basis: Tensor | None) -> Tensor:
        """This rank's rows of ``W^H b``: of the stack, for those of the matrix."""
        if basis is None:
            return local
        return torch.cat([local[..., : self.head, :], basis.mH @ local[..., self.head :, :]], -2)

    def expand(self, stacked: Tensor, basis: Tensor | None) -> Tensor:
        """This rank's rows of ``W y``."""
        own = stacked[..., slice(*self.block), :]
        return own if basis is None else torch.cat([own[..., : self.head, :], basis @ own[..., self.head :, :]], -2)

    def gather(self, rows: Tensor) -> Tensor:
        """All rows of the stack, of each rank's."""
        shape = resized(rows.shape, self.dim, sum(self.rows))
        stacked = self._spec(shape, rows.dtype, AxisLayout(Shard(self.dim), self.rows))
        return redistribute_local(rows, stacked, stacked.replicated())

    def solve(
        self, lstsq: Callable[..., Any], local: Tensor, basis: Tensor | None, right: Tensor, rcond: float
    ) -> list[Tensor]:
        """What ``lstsq`` returns, with the residuals of the matrix."""
        is_vector = right.ndim < local.ndim
        columns = right.unsqueeze(-1) if is_vector else right
        both = self.gather(self.project(torch.cat([local, columns], -1), basis))
        stack, stacked = both.tensor_split([self.columns], -1)
        found = [*lstsq([stack, stacked.squeeze(-1) if is_vector else stacked], rcond=rcond)]
        x, left_out = found[0].unsqueeze(-1) if is_vector else found[0], not found[1].numel()
        residuals = (columns - local @ x).abs().square().sum(-2)
        residuals = rank_reduction(self.spec, [self.mesh_dim])(residuals, "sum")
        found[1] = found[1] if left_out else residuals.reshape(found[1].shape)
        return found

    def result(self, y: Tensor, kind: str, basis: Tensor | None) -> ShardTensor:
        """A result on the stack as one on the matrix, which lies as ``kind`` says."""
        shape, dims = [*y.shape], {"rows": self.dim, "columns": self.dim + 1}
        if y.shape == (0,) or kind not in dims:  # left out
            return from_part(y, self._spec(shape, y.dtype))
        sizes = self.spec.sizes_along(self.mesh_dim)
        shape[dims[kind]] = sum(sizes)
        local = self.expand(y, basis) if kind == "rows" else self.expand(y.mH, basis).mH.resolve_conj()
        return from_part(local, self._spec(shape, y.dtype, AxisLayout(Shard(dims[kind]), sizes)))

    def _spec(self, shape: Sequence[int], dtype: torch.dtype, axis: AxisLayout | None = None) -> ShardTensorSpec:
        meta = TensorMeta(torch.Size(shape), contiguous_stride(shape), dtype)
        spec = self.spec.replicated().replace(meta=meta)
        return spec if axis is None else spec.with_axes({self.mesh_dim: axis})


def plan_tall(
    function: Callable[..., Any],
    specs: Sequence[ShardTensorSpec],
    named: Mapping[str, Any],
    call_with: Callable[..., Any],
) -> Plan | None:
    """The plan of ``function`` for a tall matrix with sharded rows; None where it has no such form, or its stack is too
    large.

    Args:
        specs: of the function's tensors; the matrix is the first one.
        named: its other arguments by name, those that are torch's defaults left out.
        call_with: calls the function with other tensors, and with other arguments by name.
    """
    name, spec = function.__name__.lstrip("_").removeprefix("linalg_"), specs[0]
    if name not in _COMPOSED or any(item in named.items() for item in _LARGER):
        return None
    targets = _targets(name, specs)
    if targets is None:
        return None
    if not isinstance(function, OpOverloadPacket):
        return DECLINED  # torch composes it, or differentiates it, and comes back
    stack = _Stack(spec)
    eps = torch.finfo(spec.tensor_meta.dtype).eps * spec.shape[-2]  # torch would take the stack's number of rows

    def on_stack(local: Tensor, basis: Tensor | None, others: Sequence[Tensor]) -> Any:
        if name == "lstsq":
            return stack.solve(call_with, local, basis, others[0], named.get("rcond", eps))
        atol = others[0] if others else named.get("atol", 0.0)
        chosen = {"rtol": eps * (atol <= 0)} if name == "pinv" and {"rtol", "rcond"}.isdisjoint(named) else {}
        return call_with([stack.gather(stack.project(local, basis)), *others], **chosen)

    def run(*tensors: ShardTensor | None) -> Any:
        given = [t for t in tensors if t is not None]
        if torch.is_grad_enabled() and any(t.requires_grad for t in given):
            with DisableTorchFunction():
                return call_with(given)
        local, *others = (redistribute_to(t, s)._local_tensor for t, s in zip(given, targets, strict=True))
        basis = stack.basis(local)
        found = on_stack(local, basis, others)
        results = [found] if isinstance(found, Tensor) else found
        made = tuple(stack.result(y, kind, basis) for y, kind in zip(results, _RESULTS[name], strict=True))
        return made[0] if isinstance(found, Tensor) else made

    return Composed(run)


def _targets(name: str, specs: Sequence[ShardTensorSpec]) -> list[ShardTensorSpec] | None:
    """The layouts that the tensors need for the stack; None where the first one has none, or one that is too large."""
    spec, *others = specs
    dim = len(spec.shape) - 2
    m, n = spec.shape[dim:]
    if [*spec.sharded_dims()] != [dim] or not 0 < n <= m:
        return None
    stack, mesh_dim = _Stack(spec), spec.sharded_dims()[dim]
    targets, width = [spec, *others], n
    if name == "lstsq":
        right = others[0]
        if right.shape[: dim + 1] != spec.shape[: dim + 1]:
            return None
        targets[1] = right.replicated().with_axes({mesh_dim: spec.layout[mesh_dim]})
        width += right.shape[dim + 1 :].numel()
    if any(t.gathered_for(target) is not None for t, target in zip(specs, targets, strict=True)):
        return None
    if not all(t.is_replicate() for t in targets[2 if name == "lstsq" else 1 :]):
        return None
    rows = sum(stack.rows)
    lead = spec.shape[:dim].numel()
    share = max(spec.sizes_along(mesh_dim))
    return targets if rows < m and (rows <= share or is_little(spec, rows * lead * width)) else None
