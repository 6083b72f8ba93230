"""Products: linear, matmul, mm, bmm, addmm, baddbmm, mv.

Every product is ``(*batch, M, K) @ (*batch, K, N)``. For each mesh dim one of these holds, anything else is refused:

| cut | the other operand | result |
|---|---|---|
| a batch dim | cut alike, or broadcast along it | cut alike |
| M or N | whole | cut alike |
| K | cut alike | Partial(sum) |
| nothing | nothing | whole |

A replicated operand is cut locally where it has to be; nothing is ever gathered. Where ranks use a whole operand for
different parts of the result, its gradient is a Partial, summed when it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .._compat import TensorMeta
from ..dispatch import Call, Plan, meta_of, rule, run
from ..errors import UnsupportedSharding, refuse
from ..parameters import local_parameters
from ..registry import register
from ..spec import ShardTensorSpec, contiguous_stride
from ..tensor import ShardTensor, _FromLocal
from .operands import as_operand, common_mesh, local_part, moved, torch_judges

_aten = torch.ops.aten

Cut = tuple[Placement, tuple[int, ...] | None]  # placement on one mesh dim, and sizes where it is Shard
_WHOLE: Cut = (Replicate(), None)


@dataclass(slots=True)
class _Product:
    """How operands and result of one product lie: per mesh dim, for ``a``, ``b`` and the result."""

    a: list[Cut]
    b: list[Cut]
    out: list[Cut]


def _product(op: Any, a: ShardTensorSpec, b: ShardTensorSpec) -> _Product:
    """Geometry of ``a @ b``, both with at least two dims and nothing Partial."""
    ndim = max(len(a.shape), len(b.shape))
    result = _Product([], [], [])
    for m in range(a.mesh.ndim):
        triple = _one_mesh_dim(a, b, _cut_of(a, m, ndim), _cut_of(b, m, ndim), ndim)
        if triple is None:
            raise _refusal(op, a, b, m)
        for row, cut in zip((result.a, result.b, result.out), triple, strict=True):
            row.append(cut)
    for row in (result.a, result.b, result.out):
        dims = [p.dim for p, _ in row if isinstance(p, Shard)]
        if len(set(dims)) < len(dims):
            reason = "two mesh dims would have to cut the same dim of an operand or of the result"
            raise refuse(op, [a, b], reason, "redistribute one of the operands to Replicate() on one of the mesh dims")
    return result


def _refusal(op: Any, a: ShardTensorSpec, b: ShardTensorSpec, m: int) -> UnsupportedSharding:
    return refuse(
        op,
        [a, b],
        f"the operands are cut on mesh dim {m} in a way that needs one of them whole",
        f"redistribute the smaller one to Replicate() on mesh dim {m}, or cut both along the same batch dim or the "
        "contracted dim with the same shard sizes",
    )


def _cut_of(spec: ShardTensorSpec, m: int, ndim: int) -> tuple[int, tuple[int, ...]] | None:
    """``(dim, sizes)`` that mesh dim ``m`` cuts, dims counted as if the operand had ``ndim``."""
    p, sizes = spec.placements[m], spec.sizes[m]
    if not isinstance(p, Shard):
        return None
    assert sizes is not None
    return p.dim + ndim - len(spec.shape), sizes


def _one_mesh_dim(
    a: ShardTensorSpec,
    b: ShardTensorSpec,
    cut_a: tuple[int, tuple[int, ...]] | None,
    cut_b: tuple[int, tuple[int, ...]] | None,
    ndim: int,
) -> tuple[Cut, Cut, Cut] | None:
    """The rows of the table in this module's docstring; None where there is none."""
    rows, columns = ndim - 2, ndim - 1
    lead_a, lead_b = ndim - len(a.shape), ndim - len(b.shape)

    def in_a(dim: int, sizes: tuple[int, ...]) -> Cut:
        return Shard(dim - lead_a), sizes

    def in_b(dim: int, sizes: tuple[int, ...]) -> Cut:
        return Shard(dim - lead_b), sizes

    if cut_a is None and cut_b is None:
        return _WHOLE, _WHOLE, _WHOLE
    # The contracted dim: the last of a, the last but one of b.
    sizes_a = cut_a[1] if cut_a and cut_a[0] == columns else None
    sizes_b = cut_b[1] if cut_b and cut_b[0] == rows else None
    if sizes_a or sizes_b:
        if (cut_a and not sizes_a) or (cut_b and not sizes_b) or (sizes_a and sizes_b and sizes_a != sizes_b):
            return None
        sizes = sizes_a or sizes_b
        assert sizes is not None
        return in_a(columns, sizes), in_b(rows, sizes), (Partial(), None)
    dim, sizes = cut_a or cut_b  # type: ignore[misc]
    if dim >= rows:
        if cut_a and cut_b:
            return None
        cut: Cut = (Shard(dim), sizes)
        return (in_a(dim, sizes), _WHOLE, cut) if cut_a else (_WHOLE, in_b(dim, sizes), cut)
    if cut_a and cut_b and cut_a != cut_b:
        return None
    here = []
    for spec, lead, place in ((a, lead_a, in_a), (b, lead_b, in_b)):
        spans = dim >= lead and spec.shape[dim - lead] == sum(sizes)
        here.append(place(dim, sizes) if spans else _WHOLE)
    if (cut_a and here[0] == _WHOLE) or (cut_b and here[1] == _WHOLE):
        return None  # a dim of length 1 that is cut and broadcast
    return here[0], here[1], (Shard(dim), sizes)


def _with(spec: ShardTensorSpec, cuts: Sequence[Cut]) -> ShardTensorSpec:
    return spec.replace(placements=[p for p, _ in cuts], sizes=tuple(s for _, s in cuts))


def _out_spec(mesh: DeviceMesh, shape: Sequence[int], dtype: torch.dtype, cuts: Sequence[Cut]) -> ShardTensorSpec:
    meta = TensorMeta(torch.Size(shape), contiguous_stride(shape), dtype)
    return ShardTensorSpec(mesh, [p for p, _ in cuts], meta, tuple(s for _, s in cuts))


# -- above autograd: matmul and linear ----------------------------------------------------------------------------


@register(torch.matmul, Tensor.matmul, Tensor.__matmul__)
def _matmul(input: Any, other: Any) -> Any:
    if not any(isinstance(t, ShardTensor) for t in (input, other)) or not isinstance(other, Tensor):
        return NotImplemented
    mesh = common_mesh("matmul", [input, other])
    assert mesh is not None
    torch_judges(torch.matmul, input, other)
    a, b = as_operand(input, mesh), as_operand(other, mesh)
    if a.ndim == 1:
        a = a.unsqueeze(0)
    if b.ndim == 1:
        b = b.unsqueeze(1)
    how = _product("matmul", a._spec, b._spec)
    a, b = moved("matmul", a, _with(a._spec, how.a)), moved("matmul", b, _with(b._spec, how.b))
    shape = (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    spec = _out_spec(mesh, shape, torch.promote_types(a.dtype, b.dtype), how.out)
    y = local_part(a, spec) @ local_part(b, spec)
    out = _FromLocal.apply(y, _out_spec(mesh, shape, y.dtype, how.out))
    if other.ndim == 1:
        out = out.squeeze(-1)
    if input.ndim == 1:
        out = out.squeeze(-1 if other.ndim == 1 else -2)
    return out


@register(Tensor.__rmatmul__)
def _rmatmul(self: Any, other: Any) -> Any:
    return _matmul(other, self)


@register(F.linear)
def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    if not isinstance(input, ShardTensor):
        return NotImplemented
    x = as_operand(input, input.device_mesh)
    spec = x._spec
    last = x.ndim - 1
    shape = torch_judges(F.linear, x, weight, bias).shape
    if last in spec.sharded_dims():
        y = _matmul(x, weight.t() if weight.ndim == 2 else weight)
        return y if bias is None else y + bias.to(y.dtype)
    w, b = local_parameters("linear", spec, weight, bias)
    y = F.linear(x.to_local(), w, b)
    return _FromLocal.apply(y, _out_spec(spec.mesh, shape, y.dtype, list(zip(spec.placements, spec.sizes))))


# -- below autograd: mm and bmm, whose gradients torch writes in terms of themselves ----------------------------------


@rule(_aten.mm.default, _aten.bmm.default)
def _mm(call: Call) -> Plan:
    reduced = call.reduced()
    mesh = call.specs[0].mesh
    specs = []
    for i, a in enumerate(call.args[:2]):
        # A plain operand counts as replicated.
        plain = None if (i,) in reduced else ShardTensorSpec.make(mesh, [Replicate()] * mesh.ndim, a.shape, a.dtype)
        specs.append(reduced[(i,)] if plain is None else plain)
    how = _product(call.func, *specs)
    targets = [_with(s, cuts) for s, cuts in zip(specs, (how.a, how.b), strict=True)]
    func = call.func
    slices = {i: [(d, *t.interval(m)) for d, m in t.sharded_dims().items()] for i, t in enumerate(targets)}
    plain_slices = {i: s for i, s in slices.items() if (i,) not in reduced}

    def local(a: Tensor, b: Tensor) -> Tensor:
        operands = [a, b]
        for i, places in plain_slices.items():
            for d, start, stop in places:
                operands[i] = operands[i].narrow(d, start, stop - start)
        return func(*operands)

    out = ShardTensorSpec(mesh, [p for p, _ in how.out], meta_of(call.meta), tuple(s for _, s in how.out))
    return call.plan(out, {path: targets[path[0]] for path in reduced}, call=local)


@register(_aten.addmm.default)
def _addmm(input: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _added(input, _product_of(_aten.mm.default, a, b), beta, alpha)


@register(_aten.baddbmm.default)
def _baddbmm(input: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _added(input, _product_of(_aten.bmm.default, a, b), beta, alpha)


def _product_of(op: Any, a: Any, b: Any) -> Any:
    return run(op, (a, b), {}) if isinstance(a, DTensor) or isinstance(b, DTensor) else op(a, b)


def _added(input: Any, product: Any, beta: Any, alpha: Any) -> Any:
    if alpha != 1:
        product = product * alpha
    if beta == 0 and isinstance(product, DTensor):
        return product  # what input holds, NaN even, does not matter then
    return run(_aten.add.Tensor, (product, input), {"alpha": beta})


@register(_aten.mv.default)
def _mv(a: Any, b: Any) -> Any:
    column = run(_aten.unsqueeze.default, (b, 1), {}) if isinstance(b, DTensor) else b.unsqueeze(1)
    return run(_aten.squeeze.dim, (_product_of(_aten.mm.default, a, column), 1), {})
