"""Norms of vectors and matrices, and ``dist`` and ``renorm``: a sum of powers, reduced, and its root.

The norms of matrices that are made of singular values are taken of many matrices; the others are sums and extremes.
``clip_grad_norm_`` asks for the norms of all gradients at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..._compat import OpOverload, decomposition
from ..._compat.c10d import group_along
from ...communication.redistribute import all_reduce, redistribute_local
from ...dispatch.planning import AtenCall, AtenPlan, argument, meta_of, spec_of
from ...dispatch.registry import DECLINED, register
from ...dispatch.tensor import ShardTensor, from_part, wrap
from ...layout.intervals import map_boundaries
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Composed, LocalPlan, Plan, operator
from ..common.alignment import wide_dtype
from ..common.contraction import ContractionPlan, plan_contraction
from ..common.named_dims import Form, batch_labels, free_dims
from ..common.reduce import mesh_dims_of, neutral_element, rank_reduction, reduced_dims, reduced_spec
from .decomposition import ONE, plan_by_matrix

_aten = torch.ops.aten


# -- of vectors, below autograd ---------------------------------------------------------------------------------------


@operator(
    _aten.linalg_vector_norm.default,
    # The older operator, which pairwise_distance still calls.
    _aten.norm.Scalar,
    _aten.norm.ScalarOpt_dtype,
    _aten.norm.ScalarOpt_dim,
    _aten.norm.ScalarOpt_dim_dtype,
)
def plan_vector_norm(call: AtenCall) -> AtenPlan:
    """One all-reduce: of the sum of powers, or of the extreme."""
    spec = call.reduced()[(0,)]
    order = argument(call, 1, "ord", 2)
    order = 2 if order is None else order
    dims = reduced_dims(argument(call, 2, "dim", None), len(spec.shape))
    keepdim = argument(call, 3, "keepdim", False)
    out = reduced_spec(spec, call.meta, dims, keepdim, "sum").for_gradient()
    over = mesh_dims_of(spec, dims)
    if not over:
        return call.plan(out, {(0,): spec})
    given = argument(call, 4, "dtype", None) or spec.tensor_meta.dtype
    dtype, wide, shape = call.meta.dtype, wide_dtype(given), out.local_shape()
    op = {math.inf: "max", -math.inf: "min"}.get(order, "sum")
    power, reduce = (order if op == "sum" and order else 1), rank_reduction(spec, over)
    empty = 0 in spec.local_shape()

    def norm(x: Tensor, *_: object, **__: object) -> Tensor:
        if empty:
            own = torch.full(shape, neutral_element(op, dtype), dtype=wide.to_real(), device=x.device)
        else:
            own = torch.linalg.vector_norm(x.to(given).to(wide), order, dims, keepdim)
            own = own if power == 1 else own.pow(power)
        total = reduce(own, op)
        return (total if power == 1 else total.pow(1.0 / power)).to(dtype)

    return call.plan(out, {(0,): spec}, call=norm)


for _op in (_aten.dist.default, _aten.renorm.default):  # other operators in a row, which have plans
    register(_op)(decomposition(_op, __name__))


# -- of matrices, above autograd --------------------------------------------------------------------------------------


def _plan_spectral(
    call: Arguments,
    spec: ShardTensorSpec,
    order: float | str | None,
    dim: Sequence[int],
    keepdim: bool,
    dtype: torch.dtype | None,
) -> Plan:
    """The nuclear norm, or the largest or smallest singular value, of matrices in two dims; others: NotImplemented."""
    ndim, dims = len(spec.shape), list(dim)
    if order not in ("nuc", 2, -2) or len(dims) != 2:
        return DECLINED
    if any(not -ndim <= d < ndim for d in dims) or dims[0] % ndim == dims[1] % ndim:
        return DECLINED  # torch says what is wrong
    dims = [d % ndim for d in dims]
    if dims == [ndim - 2, ndim - 1] and not keepdim and dtype is None:
        return plan_by_matrix(call, torch.linalg.matrix_norm, ONE, (spec, order))

    def norm(x: Tensor) -> Tensor:
        x = x if dtype is None else x.to(dtype)
        result: Tensor = torch.linalg.matrix_norm(x.movedim(dims, (-2, -1)), order)
        for d in sorted(dims) if keepdim else ():
            result = result.unsqueeze(d)
        return result

    return Composed(norm)


@operator(torch.linalg.matrix_norm, torch.linalg.norm, tensors="input")
def plan_norm(
    call: Arguments,
    input: ShardTensorSpec,
    ord: float | str | None = None,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Plan:
    """``torch.linalg.norm`` and ``matrix_norm``, of matrices: ``dim`` names two dims, or the tensor has two.

    Norms that are not made of singular values are sums and extremes.
    """
    if isinstance(dim, int):
        return DECLINED
    of_last = dim is None and (call.name == "linalg_matrix_norm" or len(input.shape) == 2)
    return _plan_spectral(call, input, ord, (-2, -1) if of_last else dim or (), keepdim, dtype)


@operator(torch.norm, Tensor.norm, tensors="input")
def plan_older_norm(
    call: Arguments,
    input: ShardTensorSpec,
    p: float | str | None = "fro",
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Plan:
    """``torch.norm``: the nuclear one."""
    if p != "nuc" or isinstance(dim, int):
        return DECLINED
    dims = reduced_dims(dim, len(input.shape)) if dim is None else dim
    return _plan_spectral(call, input, p, dims, keepdim, dtype)


# -- distance ----------------------------------------------------------------------------------------------------------

# Distances between points: ``cdist``, ``pdist``.
#
# Points and batch dims may be sharded in any way; where both sets of points are, the smaller one is sent around a
# ring. Along the coordinates of a point nothing is sharded: they are resharded to another dim, if one is free.

_BY_PRODUCTS = "use_mm_for_euclid_dist_if_necessary"


@operator(torch.cdist, tensors="x1 x2")
def plan_cdist(
    call: Arguments, x1: ShardTensorSpec, x2: ShardTensorSpec, p: float = 2.0, compute_mode: str | None = _BY_PRODUCTS
) -> ContractionPlan:
    """A contraction over the coordinates, of which a sum of powers is only one kind."""
    call.returned(torch.cdist, x1, x2, p, compute_mode)
    # Whether by products is decided for all points, not for those that a rank has.
    mode = compute_mode or _BY_PRODUCTS
    if mode == _BY_PRODUCTS:
        large = x1.shape[-2] > 25 or x2.shape[-2] > 25
        mode = "use_mm_for_euclid_dist" if large else "donot_use_mm_for_euclid_dist"
    (lead1, lead2), lead = batch_labels(x1.shape[:-2], x2.shape[:-2])
    form = Form(((*lead1, "p", "m"), (*lead2, "r", "m")), (*lead, "p", "r"), whole=frozenset("m"))

    def local(a: Tensor, b: Tensor) -> Tensor:
        return torch.cdist(a, b, p, mode)

    return plan_contraction(call, "cdist", local, form, "x1", "x2")


@operator(F.pdist, torch.pdist, tensors="input")
def plan_pdist(call: Arguments, input: ShardTensorSpec, p: float = 2) -> Composed | LocalPlan:
    """The distances above the diagonal, row by row: a rank has those of its rows."""
    meta = call.returned(F.pdist, input, p)
    if input.is_replicate():
        return LocalPlan(lambda x: F.pdist(x, p), input.replace(meta=meta_of(meta)))
    call.redistribute("input", free_dims("pdist", input, 1))
    n = input.shape[0]
    count = n * (n - 1) // 2

    def above_diagonal(axis: AxisLayout) -> AxisLayout:
        sizes = None if axis.sizes is None else map_boundaries(axis.sizes, lambda c: c * n - c * (c + 1) // 2)
        return axis._replace(sizes=sizes)

    def distances(x: ShardTensor) -> ShardTensor:
        square = torch.cdist(x, x, p, "donot_use_mm_for_euclid_dist")
        assert isinstance(square, ShardTensor)
        spec = square._spec
        first, stop = spec.own_interval(0)
        points = torch.arange(n, device=square.device)
        values = square.to_local()[points > points[first:stop, None]]
        meta = spec.tensor_meta._replace(shape=torch.Size([count]), stride=(1,))
        return from_part(values, spec.with_layout([above_diagonal(axis) for axis in spec.layout], meta))

    return Composed(distances)


# -- of lists of tensors, such as the gradients of clip_grad_norm_ -----------------------------------------------------


def _declare_norms(op: OpOverload, rooted: bool) -> None:
    @register(op)
    def norms(tensors: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Norms, or sums of powers where they are not ``rooted``; one all-reduce for all that the same ranks share."""
        kind = {math.inf: "max", -math.inf: "min"}.get(ord, "sum") if rooted else "sum"
        power = ord if kind == "sum" and ord else 1
        specs = [spec_of(t).for_gradient() if isinstance(t, DTensor) else None for t in tensors]
        found: list[Tensor] = []
        together: dict[Any, list[int]] = {}
        for i, (t, spec) in enumerate(zip(tensors, specs, strict=True)):
            own = t
            if isinstance(t, DTensor) and spec is not None:
                own = redistribute_local(t._local_tensor, spec_of(t), spec)
            given = dtype or t.dtype
            wide = wide_dtype(given)
            own = own.to(given).to(wide)
            if not own.numel():
                part = own.new_full((), neutral_element(kind, wide.to_real()), dtype=wide.to_real())
            elif rooted:
                part = torch.linalg.vector_norm(own, ord)
                part = part if power == 1 else part.pow(power)
            else:
                part = own.abs().pow(ord).sum()
            found.append(part)
            if spec is not None and spec.sharded_dims():
                together.setdefault((spec.mesh, (*spec.sharded_dims().values(),), part.dtype), []).append(i)
        for (mesh, over, _), places in together.items():
            values = torch.stack([found[i] for i in places])
            for m in over:
                values = all_reduce(values, group_along(mesh, m), kind)
            for i, value in zip(places, values.unbind(), strict=True):
                found[i] = value
        for i, (t, spec) in enumerate(zip(tensors, specs, strict=True)):
            value = found[i].pow(1 / power) if rooted and power != 1 else found[i]
            value = value.to((dtype or t.dtype).to_real())
            found[i] = value if spec is None else wrap(value, spec.replicated().replace(meta=meta_of(value)))
        return found


for _name in ("_foreach_norm", "_foreach_powsum"):
    if hasattr(_aten, _name):
        _declare_norms(getattr(_aten, _name).Scalar, _name == "_foreach_norm")
