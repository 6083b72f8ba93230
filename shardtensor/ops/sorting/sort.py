"""Order along a dim: ``sort``, ``argsort``, ``msort``, ``topk``, ``kthvalue``, ``median``, ``nanmedian``, ``mode``.

[Note: whole rows] Sorting needs a complete row (a line of elements along the dim). If the dim is sharded, the mesh dim
shards the longest free dim that shards evenly instead, by one all-to-all in which every rank keeps as much as it had:
the rows are spread over the ranks. sort puts its results back into the input's layout (one all-to-all each). The
results of the other operators, which have another length along the dim, stay spread. Without a free dim that is long
enough one rank would get everything. There the rows stay sharded, and operators do what common/distributed_sort.py can:
elements are found by counting, sorted rows are exchanged, and a few largest elements are gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._compat import AutogradFunction, OpOverload
from ..._compat.c10d import group_along
from ...communication.redistribute import all_gather, all_reduce, redistribute_local
from ...dispatch.gradients import once_differentiable
from ...dispatch.planning import AtenCall, AtenPlan, Path, argument, meta_of
from ...dispatch.registry import DECLINED, register
from ...dispatch.tensor import ShardTensor, as_gradient, redistribute_to, wrap
from ...errors import UnsupportedSharding
from ...layout.intervals import map_boundaries
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Composed, operator
from ..common.alignment import as_operand
from ..common.distributed_sort import Sorted, find_places, sort_keys
from ..common.named_dims import Labels, free_dims
from ..common.reduce import Selected, check_dtype, mesh_dims_of, plain_tuple, rank_reduction, reduced_dims, reduced_spec
from ..indexing.index_layout import INDEXED
from ..indexing.index_plan import labelled

_aten = torch.ops.aten


# -- operators that need complete rows -------------------------------------------------------------------------------


_SORTS = (_aten.sort.default, _aten.sort.stable)
_MEDIANS = (_aten.median.dim, _aten.nanmedian.dim)


def _argument(call: AtenCall, name: str) -> Any:
    """An argument of the call, which its operator has in a place of its own; None where it has none."""
    found = ((i, a) for i, a in enumerate(call.func._schema.arguments) if a.name == name)
    return next((argument(call, i, name, a.default_value) for i, a in found), None)


def _with_free_rows(op: OpOverload, spec: ShardTensorSpec, dim: int) -> ShardTensorSpec | None:
    """``spec`` with the dim ``dim`` free; None where that would give one rank everything."""
    try:
        return free_dims(op.__name__, spec, dim)
    except UnsupportedSharding:
        if op in _ACROSS:
            return None
        raise


@operator(*_SORTS, *_MEDIANS, _aten.topk.default, _aten.kthvalue.default, _aten.mode.default)
def _on_rows(call: AtenCall) -> AtenPlan:
    given = call.reduced()[(0,)]
    dims = reduced_dims(_argument(call, "dim"), len(given.shape))
    spec = _with_free_rows(call.func, given, dims[0]) if dims else given
    if spec is None:
        return _ACROSS[call.func](call, given, dims[0])
    keepdim = _argument(call, "keepdim")
    if keepdim is None:
        spread = [spec.replace(meta=meta_of(meta)) for meta in call.meta]
    else:
        spread = [reduced_spec(spec, meta, dims, keepdim, "sum") for meta in call.meta]
    func = call.func
    if call.func not in _SORTS or spec == given:
        return call.plan(spread, {(0,): spec}, call=plain_tuple(_of_dense(func) if func in _MEDIANS else func))
    outputs = [given.replace(meta=meta_of(meta)) for meta in call.meta]

    def compute(*args: object, **kwargs: object) -> tuple[Tensor, ...]:
        results = func(*args, **kwargs)
        return tuple(redistribute_local(r, *specs) for r, specs in zip(results, zip(spread, outputs), strict=True))

    return call.plan(outputs, {(0,): spec}, call=compute)


def _of_dense(func: Callable[..., Any]) -> Callable[..., Any]:
    """The same where a tensor is expanded: of those torch gives wrong medians on CPUs."""
    return lambda x, *args, **kwargs: func(x.contiguous() if 0 in x.stride() else x, *args, **kwargs)


# -- the same where rows stay sharded ------------------------------------------------------------------------------


def _as_rows(x: Tensor, dim: int) -> Tensor:
    x = x.movedim(dim, -1)
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _from_rows(rows: Tensor, dim: int, shape: Sequence[int]) -> Tensor:
    """``rows`` as a tensor of this shape, but for its own number of columns."""
    others = [n for d, n in enumerate(shape) if d != dim]
    return rows.view(*others, rows.shape[-1]).movedim(-1, dim)


class _RowsAcross:
    """The sorted rows of a shard along a sharded dim, in the layout of the shard."""

    def __init__(self, x: Tensor, spec: ShardTensorSpec, dim: int, descending: bool) -> None:
        m = spec.sharded_dims()[dim]
        self._dim, self._shape = dim, x.shape
        sizes = spec.sizes_along(m)
        self._sorted = Sorted(_as_rows(x, dim), sizes, sizes, descending, group_along(spec.mesh, m))
        rows, columns = self._sorted.shape
        start, _ = spec.interval(m)
        index = torch.arange(start, start + columns, device=x.device).expand(rows, -1)
        self.values = _from_rows(self._sorted.values, dim, x.shape)
        self.indices = _from_rows(self._sorted.there(index), dim, x.shape)

    def back(self, grad: Tensor) -> Tensor:
        return _from_rows(self._sorted.back(_as_rows(grad, self._dim)), self._dim, self._shape)


def _check_order(spec: ShardTensorSpec) -> None:
    """Have torch check on every rank whether it orders this dtype."""
    torch.ones(1, dtype=spec.tensor_meta.dtype, device=spec.mesh.device_type).sort()


def _sort_across(call: AtenCall, spec: ShardTensorSpec, dim: int) -> AtenPlan:
    _check_order(spec)
    descending = _argument(call, "descending")
    outputs = [spec.replace(meta=meta_of(meta)) for meta in call.meta]

    def compute(x: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        rows = _RowsAcross(x, spec, dim, descending)
        return rows.values, rows.indices

    return call.plan(outputs, {(0,): spec}, call=compute)


def _is_few(spec: ShardTensorSpec, dim: int, k: int) -> bool:
    """Whether every rank may hold the ``k`` largest elements of all ranks: no more than a shard."""
    ranks = spec.mesh.size(spec.sharded_dims()[dim])
    return k * ranks <= spec.shape[dim] // ranks


def _topk_across(call: AtenCall, spec: ShardTensorSpec, dim: int) -> AtenPlan:
    """A few are gathered from every rank; many are taken from the sorted rows."""
    _check_order(spec)
    k, largest = call.args[1], _argument(call, "largest")
    m = spec.sharded_dims()[dim]
    sizes, group, (start, stop) = spec.sizes_along(m), group_along(spec.mesh, m), spec.interval(m)
    if _is_few(spec, dim, k):
        outputs = [reduced_spec(spec, meta, [dim], True, "sum").for_gradient() for meta in call.meta]

        def gathered(x: Tensor, *_: object, **__: object) -> tuple[Tensor, ...]:
            best = torch.topk(_as_rows(x, dim), min(k, stop - start), largest=largest)
            room = (0, k - best.values.shape[-1])
            pairs = [torch.nn.functional.pad(t, room) for t in (best.values, best.indices + start)]
            values, indices = (
                torch.cat([t[:, : min(k, n)] for t, n in zip(all_gather(p, group), sizes, strict=True)], -1)
                for p in pairs
            )
            order = torch.argsort(values, dim=-1, descending=largest, stable=True)[:, :k]
            return tuple(_from_rows(t.gather(-1, order), dim, x.shape) for t in (values, indices))

        return call.plan(outputs, {(0,): spec}, call=gathered)
    kept = map_boundaries(sizes, lambda b: min(b, k))
    taken = spec.with_axes({m: spec.layout[m]._replace(sizes=kept)})
    outputs = [taken.replace(meta=meta_of(meta)) for meta in call.meta]

    def sorted_(x: Tensor, *_: object, **__: object) -> tuple[Tensor, ...]:
        rows = _RowsAcross(x, spec, dim, largest)
        return tuple(t.narrow(dim, 0, kept[spec.coordinate[m]]) for t in (rows.values, rows.indices))

    return call.plan(outputs, {(0,): spec}, call=sorted_)


def place_of_median(length: int, missing: Tensor, ignores: bool) -> Tensor:
    """The place of a median among ``length`` elements in order, of which ``missing`` are NaN; ``ignores``: these.

    Otherwise it is the first NaN, if there is one.
    """
    if ignores:
        return (length - missing - 1).clamp(min=0) // 2
    return torch.where(missing > 0, length - missing, (length - 1) // 2)


def _kth_across(call: AtenCall, spec: ShardTensorSpec, dim: int) -> AtenPlan:
    """Found by counting, without moving anything: kthvalue, median, nanmedian."""
    _check_order(spec)
    func, length = call.func, spec.shape[dim]
    m = spec.sharded_dims()[dim]
    group, (start, _) = group_along(spec.mesh, m), spec.interval(m)
    keepdim = _argument(call, "keepdim")
    outputs = [reduced_spec(spec, meta, [dim], keepdim, "sum").for_gradient() for meta in call.meta]
    given = call.args[1] - 1 if func == _aten.kthvalue.default else None

    def compute(x: Tensor, *_: object, **__: object) -> tuple[Tensor, ...]:
        ordered, order = torch.sort(_as_rows(x, dim), dim=-1, stable=True)
        if given is not None:
            place = torch.full((len(ordered), 1), given, device=x.device)
        else:
            missing = all_reduce(ordered.isnan().sum(-1, keepdim=True), group)
            place = place_of_median(length, missing, func == _aten.nanmedian.dim)
        found = find_places(sort_keys(ordered), x.dtype, place, [group])
        pairs = [_from_rows(found.pick(t, [group]), dim, x.shape) for t in (ordered, order + start)]
        return tuple(t if keepdim else t.squeeze(dim) for t in pairs)

    return call.plan(outputs, {(0,): spec}, call=compute)


_ACROSS: dict[OpOverload, Callable[[AtenCall, ShardTensorSpec, int], AtenPlan]] = {
    _aten.sort.default: _sort_across,
    _aten.sort.stable: _sort_across,
    _aten.topk.default: _topk_across,
    _aten.kthvalue.default: _kth_across,
    _aten.median.dim: _kth_across,
    _aten.nanmedian.dim: _kth_across,
}


class _SortedAcross(AutogradFunction):
    """Rows sorted where they are sharded; gradients go back to where the elements came from."""

    @staticmethod
    def forward(ctx: Any, x: ShardTensor, dim: int, descending: bool) -> Any:
        ctx.spec, ctx.rows = x._spec, _RowsAcross(x._local_tensor, x._spec, dim, descending)
        ctx.set_materialize_grads(False)
        values = wrap(ctx.rows.values, x._spec)
        indices = wrap(ctx.rows.indices, x._spec.with_dtype(torch.int64))
        ctx.mark_non_differentiable(indices)
        return values, indices

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any, _: Any) -> Any:
        if grad is None:
            return None, None, None
        return wrap(ctx.rows.back(as_gradient(grad, ctx.spec)._local_tensor), ctx.spec), None, None


# -- gradients: torch's formulas would write them into a plain tensor of the global shape -------------------------


def _plan_on_rows(
    call: Arguments,
    op: OpOverload,
    spec: ShardTensorSpec,
    dim: int,
    keepdim: bool | None,
    args: Sequence[object] = (),
    options: Mapping[str, object] | None = None,
) -> Composed:
    """The plan of an operator of rows, with a gradient.

    Args:
        op: what is run, as ``op(x, *args, **options)``.
        keepdim: None where the dim stays in any case.
    """
    if not spec.shape or not isinstance(dim, int):
        return DECLINED
    options = dict(options or {})
    call.returned(op, spec, *args, **options)
    (dim,) = reduced_dims(dim, len(spec.shape))
    names: Callable[[Sequence[Tensor]], tuple[Tensor, ...]] = getattr(torch.return_types, call.name)
    room = _with_free_rows(op, spec, dim)
    k = args[0] if op == _aten.topk.default else None
    if room is None and (op in _SORTS or (isinstance(k, int) and not _is_few(spec, dim, k))):
        _check_order(spec)
        descending = args[2] if k is not None else options["descending"]

        def across(x: ShardTensor) -> tuple[Tensor, ...]:
            pair = _SortedAcross.apply(x, dim, descending)
            return names(pair if k is None else [t.narrow(dim, 0, k) for t in pair])

        return Composed(across)

    def on_rows(x: ShardTensor) -> tuple[Tensor, ...]:
        spread = x if room is None else redistribute_to(x, room)
        pair = Selected.apply(spread, op, dim, keepdim is False, args, options)
        if op in _SORTS:
            pair = [redistribute_to(t, t._spec.with_layout(spec.layout)) for t in pair]
        return names(pair)

    return Composed(on_rows)


@operator(torch.sort, Tensor.sort, tensors="input")
def _sort(
    call: Arguments, input: ShardTensorSpec, dim: int = -1, descending: bool = False, *, stable: bool | None = False
) -> Composed:
    options = {"stable": stable, "dim": dim, "descending": descending}
    return _plan_on_rows(call, _aten.sort.stable, input, dim, None, options=options)


@operator(torch.msort, Tensor.msort, tensors="input")
def _msort(call: Arguments, input: ShardTensorSpec) -> Composed:
    return Composed(lambda x: torch.sort(x, 0).values)


@operator(torch.topk, Tensor.topk, tensors="input")
def _topk(
    call: Arguments, input: ShardTensorSpec, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Composed:
    return _plan_on_rows(call, _aten.topk.default, input, dim, None, (k, dim, largest, sorted))


@operator(torch.kthvalue, Tensor.kthvalue, tensors="input")
def _kthvalue(call: Arguments, input: ShardTensorSpec, k: int, dim: int = -1, keepdim: bool = False) -> Composed:
    return _plan_on_rows(call, _aten.kthvalue.default, input, dim, keepdim, (k, dim, keepdim))


def _declare_along(
    function: Callable[..., object], method: Callable[..., object], op: OpOverload, default: int | None
) -> None:
    """median, nanmedian and mode: with a dim they are alike."""

    @operator(function, method, tensors="input")
    def plan(call: Arguments, input: ShardTensorSpec, dim: int | None = default, keepdim: bool = False) -> Composed:
        return DECLINED if dim is None else _plan_on_rows(call, op, input, dim, keepdim, (dim, keepdim))


_declare_along(torch.median, Tensor.median, _aten.median.dim, None)
_declare_along(torch.nanmedian, Tensor.nanmedian, _aten.nanmedian.dim, None)
_declare_along(torch.mode, Tensor.mode, _aten.mode.default, -1)


# -- quantile ----------------------------------------------------------------------------------------------------------

# Order statistics: ``median`` and ``nanmedian`` of all elements, ``quantile``, ``nanquantile``.
#
# Nothing is sorted across ranks and no element moves: the elements at the places in question are found by counting,
# see common/distributed_sort.py.

# -- the median of all elements ---------------------------------------------------------------------------------------


@operator(_aten.median.default, _aten.nanmedian.default)
def _median(call: AtenCall) -> AtenPlan:
    spec = call.reduced()[(0,)]
    out = spec.replicated().replace(meta=meta_of(call.meta))
    check_dtype(call)
    count, over = spec.shape.numel(), list(spec.sharded_dims().values())
    groups = [group_along(spec.mesh, m) for m in over]
    if not count:
        return call.plan(out, {(0,): spec})
    ignores, reduce = call.func == _aten.nanmedian.default, rank_reduction(spec, over)

    def compute(x: Tensor) -> Tensor:
        row = x.reshape(1, -1).sort(-1).values
        missing = reduce(row.isnan().sum(-1, keepdim=True), "sum")
        found = find_places(sort_keys(row), x.dtype, place_of_median(count, missing, ignores), groups)
        return found.pick(row, groups).reshape(())

    return call.plan(out, {(0,): spec}, call=compute)


# -- quantiles ----------------------------------------------------------------------------------------------------


class _AtPlaces(AutogradFunction):
    """The elements of ``x`` at these places of its rows along ``dims``, which have length 1 in the result.

    ``places`` has one more dim in front, for several places of a row. A gradient goes to the element that was found.
    """

    @staticmethod
    def forward(ctx: Any, x: ShardTensor, places: ShardTensor, dims: list[int]) -> Any:
        spec = x._spec
        groups = [group_along(spec.mesh, m) for m in mesh_dims_of(spec, dims)]
        ends = list(range(-len(dims), 0))
        moved = x._local_tensor.movedim(dims, ends)
        rows = math.prod(moved.shape[: x.ndim - len(dims)])
        columns = math.prod(moved.shape[x.ndim - len(dims) :])
        ordered, order = torch.sort(moved.reshape(rows, columns), dim=-1, stable=True)
        wanted = places._local_tensor
        found = find_places(sort_keys(ordered), x.dtype, wanted.reshape(len(wanted), rows).T.contiguous(), groups)
        ctx.spec, ctx.out, ctx.dims, ctx.moved = spec, places._spec, dims, moved.shape
        ctx.save_for_backward(order, found.before, found.here)
        out = places._spec.with_dtype(x.dtype)
        return wrap(found.pick(ordered, groups).T.reshape(wanted.shape), out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        order, before, here = ctx.saved_tensors
        given = as_gradient(grad, ctx.out)._local_tensor
        given = given.reshape(len(given), -1).T
        result = given.new_zeros(order.shape)
        if order.shape[-1]:
            at = order.gather(-1, before.clamp(max=order.shape[-1] - 1))
            result.scatter_add_(-1, at, torch.where(here, given, 0))
        local = result.view(ctx.moved).movedim(list(range(-len(ctx.dims), 0)), ctx.dims)
        return wrap(local, ctx.spec), None, None


@operator(torch.quantile, Tensor.quantile, torch.nanquantile, Tensor.nanquantile, tensors="input q", partial="input q")
def _plan_quantile(
    call: Arguments,
    input: ShardTensorSpec,
    q: ShardTensorSpec | float,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
) -> Composed:
    if input.is_replicate():
        return DECLINED
    function: Callable[..., Tensor] = getattr(torch, call.name)
    number = 0 if isinstance(q, ShardTensorSpec) else q

    def quantile(x: ShardTensor, points: ShardTensor | None) -> Tensor:
        like = torch.ones([1] * x.ndim, dtype=x.dtype, device=x.device)
        at: Tensor = torch.full((), number, dtype=x.dtype, device=x.device) if points is None else points.full_tensor()
        function(like, at.detach(), dim, keepdim, interpolation=interpolation)  # torch's own errors
        if not x.numel():
            raise RuntimeError("quantile() input tensor must be non-empty")
        dims = reduced_dims(dim, x.ndim)
        x = as_operand(x, x.device_mesh)
        count = math.prod(x.shape[d] for d in dims)
        missing: Tensor = x.detach().isnan().sum(dims, keepdim=True) if dims else x.detach().isnan().to(torch.int64)
        missing = as_operand(missing, x.device_mesh)
        steps = at.reshape(-1, *[1] * x.ndim)
        if function is torch.nanquantile:
            ranks = (steps * (count - missing - 1)).clamp(min=0)
        else:
            ranks = torch.where(missing > 0, count - 1.0, steps * (count - 1))
        if interpolation in ("lower", "higher", "nearest"):
            ranks = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}[interpolation](ranks)
        below, above = ranks.detach().long(), ranks.detach().ceil().long()
        if interpolation in ("linear", "midpoint"):
            low, high = _AtPlaces.apply(x, torch.cat([below, above]), dims).chunk(2)
            result = torch.lerp(low, high, ranks - below if interpolation == "linear" else torch.full_like(ranks, 0.5))
        else:
            result = _AtPlaces.apply(x, below, dims)
        if not keepdim and dims:
            result = result.squeeze([d + 1 for d in dims])
        return result if at.ndim else result.squeeze(0)

    return Composed(quantile)


# -- searchsorted ------------------------------------------------------------------------------------------------------

# Places in a sorted sequence, ``searchsorted`` and ``bucketize``; and ``isin``, for which nothing has to be sorted.
#
# A place is how many elements of the sequence are smaller, a sum over its shards.


@operator(_aten.isin.Tensor_Tensor, _aten.isin.Tensor_Scalar)
def _against_a_list(call: AtenCall) -> AtenPlan:
    names = list(range(len(call.args[0].shape)))
    roles: dict[Path, Labels] = {(0,): names} if isinstance(call.args[0], (Tensor, ShardTensorSpec)) else {}
    if isinstance(call.args[1], (Tensor, ShardTensorSpec)):
        roles[(1,)] = [f"list {d}" for d in range(len(call.args[1].shape))]
    return labelled(call, roles, names)


@operator(_aten.bucketize.Tensor)
def _bucketize(call: AtenCall) -> AtenPlan:
    names = list(range(len(call.args[0].shape)))
    return labelled(call, {(1,): [INDEXED], (0,): names}, names)


@operator(_aten.searchsorted.Tensor, _aten.searchsorted.Scalar)
def _searchsorted(call: AtenCall) -> AtenPlan:
    number = call.func == _aten.searchsorted.Scalar
    names: list[Hashable] = [] if number else list(range(len(call.args[1].shape)))
    table = [INDEXED] if len(call.args[0].shape) == 1 else [*names[:-1], INDEXED]
    roles: dict[Path, Labels] = {(0,): table} if number else {(0,): table, (1,): names}
    return labelled(call, roles, names)


# The order of the table depends on data: the sorter's elements are gathered first.
def _register_sorted(op: OpOverload) -> None:
    @register(op)
    def _(sequence: Tensor, values: Tensor | float, **kwargs: Any) -> Tensor:
        sorter = kwargs.pop("sorter", None)
        if sorter is None:
            return DECLINED
        torch.searchsorted(  # torch's own errors
            torch.empty(sequence.shape, dtype=sequence.dtype, device="meta"),
            torch.empty(values.shape, device="meta") if isinstance(values, Tensor) else values,
            sorter=torch.empty(sorter.shape, dtype=sorter.dtype, device="meta"),
        )
        ordered = _aten.gather.default(sequence, -1, sorter)
        places: Tensor = op(ordered, values, **kwargs)
        return places


for _op in (_aten.searchsorted.Tensor, _aten.searchsorted.Scalar):
    _register_sorted(_op)
