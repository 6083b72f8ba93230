"""Reading and writing by index: index_select, gather, take, scatter, index_put and the like.

What the operands' dims have to do with each other is said by labels; index_layout.py finds from them how operands are
laid out, index_plan.py makes plans of that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..._compat import AutogradFunction, OpOverload, recomputed
from ...dispatch.aten_calls import run
from ...dispatch.planning import AtenCall, AtenPlan, Path, argument, is_inplace, operand, spec_of
from ...dispatch.registry import DECLINED, register
from ...dispatch.tensor import ShardTensor, redistribute_to, wrap
from ...errors import PLAIN_TARGET, refuse
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Composed, operator
from ...ranks.cuda_graphs import check_has_values
from ..common.alignment import broadcast_shape, is_sharded, reduced_value, replicated
from ..common.named_dims import Labels
from ..common.reduce import neutral_element
from ..shape.view import dim_of, wrap_dim
from .index_layout import INDEXED
from .index_plan import labelled

_aten = torch.ops.aten


# -- gather ------------------------------------------------------------------------------------------------------------

# Reading by index, above autograd: ``gather``, ``index_select``, and what indices and tables need of them.
#
# torch's formulas add the gradient into zeros that know the shape of what was read, but not its layout, so they would
# be replicated. If an indexed dim is sharded, the gradient is therefore written into zeros of the same layout: each
# rank keeps what belongs to its shard.


class Read(AutogradFunction):
    """``read(x, indices)``, whose gradient is ``write(zeros, indices, gradient)``."""

    @staticmethod
    @recomputed()
    def forward(
        ctx: Any, x: ShardTensor, read: Callable[..., Tensor], write: Callable[..., Tensor], *indices: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*indices)
        ctx.write, ctx.spec = write, x._spec.for_gradient()
        return read(x, indices)

    @staticmethod
    def backward(ctx: Any, grad: ShardTensor) -> Any:
        zeros = wrap(torch.zeros(ctx.spec.local_shape(), dtype=grad.dtype, device=grad.device), ctx.spec)
        indices = ctx.saved_tensors  # once, as checkpointing asks for
        return ctx.write(zeros, indices, grad), None, None, *(None for _ in indices)


def indexes_a_shard(spec: ShardTensorSpec, dims: Sequence[int]) -> bool:
    """Whether one of these dims, which are to be indexed, is sharded."""
    sharded = spec.sharded_dims()
    return any(d in sharded for d in dims)


def any_sharded(*specs: ShardTensorSpec | None) -> bool:
    """Whether one of the operands is sharded."""
    return any(spec is not None and bool(spec.sharded_dims()) for spec in specs)


def is_written(call: Arguments) -> bool:
    """Whether the operator writes to ``input``, as its name says.

    Raises:
        UnsupportedSharding: it does, and that is no ShardTensor yet.
    """
    in_place = call.name.endswith("_")
    if in_place and "input" in call.steps:  # by which it is made one
        raise call.refuse(*PLAIN_TARGET)
    return in_place


def written(call: Arguments, work: Callable[..., Tensor]) -> Composed:
    """The plan of an operator whose result is ``work(input, ...)``, and of its in-place form."""
    if not is_written(call):
        return Composed(work)
    return Composed(lambda x, *others: x.copy_(work(x, *others)))


def indexed(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """``x[indices]``, one index or None for each of the first dims of ``x``; negative ones count from the end."""
    used = [index is not None for index in indices]
    if not isinstance(x, ShardTensor) or not indexes_a_shard(x._spec, [d for d, here in enumerate(used) if here]):
        found: Tensor = _aten.index.Tensor(x, list(indices))
        return found

    def placed(found: Sequence[Tensor]) -> list[Tensor | None]:
        rest = iter(found)
        return [next(rest) if here else None for here in used]

    result: Tensor = Read.apply(
        x,
        lambda t, found: run(_aten.index.Tensor, (t, placed(found)), {}),
        lambda zeros, found, grad: _aten.index_put.default(zeros, placed(found), grad, True),
        *(index for index in indices if index is not None),
    )
    return result


def _read_along(x: ShardTensor, dim: int, index: Tensor, read: OpOverload, write: Callable[..., Tensor]) -> Tensor:
    """``read(x, dim, index)``, whose gradient is ``write(zeros, dim, index, gradient)``."""
    entries: Tensor = Read.apply(
        x,
        lambda t, found: run(read, (t, dim, *found), {}),
        lambda zeros, found, grad: write(zeros, dim, *found, grad),
        index,
    )
    return entries


@operator(torch.gather, Tensor.gather, tensors="input index", partial="input index")
def _gather(
    call: Arguments,
    input: ShardTensorSpec,
    dim: int,
    index: ShardTensorSpec,
    *,
    sparse_grad: bool = False,
) -> Composed:
    lengths = {len(input.shape), len(index.shape)}
    if lengths == {0, 1} and (input.sharded_dims() or index.sharded_dims()):  # which torch lets run together
        shape = index.shape
        return Composed(lambda x, places: torch.gather(x.reshape(-1), dim, places.reshape(-1)).reshape(shape))
    d = dim_of(input, dim)
    if d is None or not indexes_a_shard(input, [d]):
        return DECLINED
    return Composed(lambda x, places: _read_along(x, d, places, _aten.gather.default, torch.scatter_add))


@operator(torch.index_select, Tensor.index_select, tensors="input index", partial="input index")
def _index_select(call: Arguments, input: ShardTensorSpec, dim: int, index: ShardTensorSpec) -> Composed:
    d = dim_of(input, dim)
    if d is None or not indexes_a_shard(input, [d]):
        return DECLINED
    read, write = _aten.index_select.default, torch.index_add
    return Composed(lambda x, places: _read_along(x, d, places if places.ndim else places.reshape(1), read, write))


def flat_cumsum(x: Tensor) -> Tensor:
    """The running sum over all dims, the last one fastest."""
    if not x.ndim:
        return x
    sums = x.cumsum(-1)
    if x.ndim == 1:
        return sums
    rows = x.sum(-1)
    return sums + (flat_cumsum(rows) - rows).unsqueeze(-1)


# -- index operators ---------------------------------------------------------------------------------------------------

Indices = Sequence["Tensor | None"]


# -- along a dim ------------------------------------------------------------------------------------------

# What reductions are called as those of a Partial; a mean is none.
_KINDS = {"sum": "sum", "add": "sum", "prod": "product", "multiply": "product", "amax": "max", "amin": "min"}
_REDUCES = (
    _aten.scatter_reduce.two,
    _aten.scatter_reduce_.two,
    _aten.index_reduce.default,
    _aten.index_reduce_.default,
)


def _reduction(call: AtenCall) -> tuple[str | None, bool]:
    """How an operator with ``reduce=`` accumulates, and whether it has to see its index as a whole to do so."""
    kind = _KINDS.get(argument(call, 4, "reduce", ""))
    once = call.func in _REDUCES and (kind is None or not call.kwargs.get("include_self", True))
    return None if once else kind, once


@operator(
    *(_aten.gather.default, _aten.index_select.default),
    *(_aten.scatter.src, _aten.scatter.value, _aten.scatter.reduce, _aten.scatter.value_reduce),
    *(_aten.scatter_.src, _aten.scatter_.value, _aten.scatter_.reduce, _aten.scatter_.value_reduce),
    *(_aten.scatter_add.default, _aten.scatter_add_.default, _aten.scatter_reduce.two, _aten.scatter_reduce_.two),
    *(_aten.index_add.default, _aten.index_add_.default, _aten.index_copy.default, _aten.index_copy_.default),
    *(_aten.index_fill.int_Scalar, _aten.index_fill.int_Tensor),
    *(_aten.index_fill_.int_Scalar, _aten.index_fill_.int_Tensor),
    *(_aten.index_reduce.default, _aten.index_reduce_.default),
)
def _along_dim(call: AtenCall) -> AtenPlan:
    """``gather`` and ``scatter`` have an index for each element, the others one for each position along the dim."""
    ndim, name = len(call.args[0].shape), call.func._schema.name.removeprefix("aten::").rstrip("_")
    dim = wrap_dim(call.args[1], ndim)
    within, position = ([label if d == dim else d for d in range(ndim)] for label in (INDEXED, "position"))
    roles: dict[Path, Labels] = {(0,): within}
    if name == "gather" or name.startswith("scatter"):
        if any(len(a.shape) != ndim for a in call.args[2:4] if hasattr(a, "shape")):  # 0-dim tensors among 1-dim ones
            raise call.refuse("the operands differ in their number of dims", "give all of them the same")
        roles[(2,)] = position
    else:
        roles[(2,)] = ["position"] if len(call.args[2].shape) else []
    if len(call.args) > 3 and isinstance(call.args[3], (Tensor, ShardTensorSpec)):
        roles[(3,)] = position if len(call.args[3].shape) == ndim else []
    if name in ("gather", "index_select"):
        return labelled(call, roles, position, indexed={(2,): dim}, picks=True)
    kind, once = ("sum", False) if name in ("scatter_add", "index_add") else _reduction(call)
    indexed, wraps = {(2,): dim}, name == "index_fill"
    return labelled(
        call, roles, within, indexed=indexed, writes=True, accumulates=kind, wraps=wraps, in_blocks=not once
    )


# -- reductions that are more than one addition for each entry ---------------------------------------------------
# Other operators in a row, which have plans; so these are registered and have none themselves.


def _seen_in_parts(x: Tensor, others: Sequence[tuple[Tensor, int]]) -> list[Tensor]:
    """Those of ``others`` of which no rank has all that goes into its part of ``x``; each comes with its indexed dim.

    They are sharded along that dim, or along another one than a tensor before them on the same mesh dim.
    """
    dims = {m: d for d, m in spec_of(x).sharded_dims().items()} if isinstance(x, DTensor) else {}
    found = []
    for t, indexed in others:
        sharded = spec_of(t).sharded_dims() if isinstance(t, DTensor) else {}
        if any(d == dim_of(spec_of(t), indexed) or dims.setdefault(m, d) != d for d, m in sharded.items()):
            found.append(t)
    return found


def _register_reduce(op: OpOverload) -> None:
    """A mean, or one that leaves out what was there, in steps that can be done block by block of the index."""
    scatters = op._schema.name.startswith("aten::scatter")
    add, again = (torch.scatter_add, torch.scatter_reduce) if scatters else (torch.index_add, torch.index_reduce)

    @register(op)
    def _(x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True) -> Tensor:
        sharded = _seen_in_parts(x, [(index, dim if scatters else 0), (source, dim)])
        if not sharded or (reduce != "mean" and include_self):
            return DECLINED
        given = x
        if not isinstance(x, DTensor):
            if is_inplace(op):
                return DECLINED  # which refuses it
            x = replicated(x, spec_of(sharded[0]))
        exact = x.dtype.is_floating_point or x.dtype.is_complex
        count = torch.zeros_like(x, dtype=x.dtype if exact else torch.int64)
        count = add(count, dim, index, torch.ones_like(source, dtype=count.dtype))
        count = redistribute_to(count, spec_of(count).for_gradient())  # used more than once
        start: Tensor = x
        if not include_self:
            start = x.masked_fill(count != 0, neutral_element(_KINDS.get(reduce, "sum"), x.dtype))
        if reduce == "mean":
            count = count + (1 if include_self else (count == 0).to(count.dtype))
            mean = torch.div(add(start, dim, index, source), count, rounding_mode=None if exact else "floor")
            result = mean.to(x.dtype)
        else:
            result = again(start, dim, index, source, reduce)
        return given.copy_(result) if is_inplace(op) else result


for _op in _REDUCES:
    _register_reduce(_op)


def _register_fill(op: OpOverload) -> None:
    """One value wherever an index that is seen in parts says so, as in the formula of a maximum's gradient."""

    @register(op)
    def _(x: Tensor, dim: int, index: Tensor, value: complex) -> Tensor:
        if not isinstance(x, DTensor) or not _seen_in_parts(x, [(index, dim)]):
            return DECLINED
        named = torch.zeros_like(x, dtype=torch.int32)
        named = torch.scatter_add(named, dim, index, torch.ones_like(index, dtype=torch.int32)) != 0
        return x.masked_fill_(named, value) if is_inplace(op) else x.masked_fill(named, value)


for _op in (_aten.scatter.value, _aten.scatter_.value):
    _register_fill(_op)


# -- x[index] ---------------------------------------------------------------------------------------------


def _advanced(call: AtenCall) -> tuple[dict[Path, Labels], dict[Path, int], list[Hashable]]:
    """Labels of the tensor and its indices, the dims that these are of, and labels of what ``tensor[indices]`` is."""
    ndim, indices = len(call.args[0].shape), call.args[1]
    used = [d for d, index in enumerate(indices) if index is not None]
    width = max(len(indices[d].shape) for d in used)
    lengths = [1] * width
    for d in used:
        shape = indices[d].shape
        for j, n in enumerate(shape, width - len(shape)):
            lengths[j] = n if n != 1 else lengths[j]
    roles: dict[Path, Labels] = {(0,): [INDEXED if d in used else d for d in range(ndim)]}
    for d in used:
        shape = indices[d].shape
        first = width - len(shape)
        roles[1, d] = [f"index {first + j}" if n == lengths[first + j] else None for j, n in enumerate(shape)]
    # The indices' dims stand where the indexed dims are, or in front if those are apart.
    together = used[-1] - used[0] + 1 == len(used)
    at = used[0] if together else 0
    rest: list[Hashable] = [d for d in range(ndim) if d not in used]
    result = [*rest[:at], *(f"index {j}" for j in range(width)), *rest[at:]]
    return roles, {(1, d): d for d in used}, result


@operator(_aten.index.Tensor, _aten._unsafe_index.Tensor)
def _index(call: AtenCall) -> AtenPlan:
    roles, indexed, result = _advanced(call)
    return labelled(call, roles, result, indexed=indexed, picks=True, wraps=True)


@operator(
    _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default, _aten._unsafe_index_put.default
)
def _index_put(call: AtenCall) -> AtenPlan:
    roles, indexed, result = _advanced(call)
    values = call.args[2].shape
    lengths = {label: n for path, labels in roles.items() for label, n in zip(labels, operand(call.args, path).shape)}
    if len(values) > len(result):
        shape = [lengths[label] for label in result]
        text = f"value tensor of shape {list(values)} cannot be broadcast to indexing result of shape {shape}"
        raise RuntimeError(f"shape mismatch: {text}")
    trailing = result[len(result) - len(values) :]
    roles[(2,)] = [label if n == lengths.get(label, n) else None for label, n in zip(trailing, values, strict=True)]
    kind = "sum" if argument(call, 3, "accumulate", False) else None
    return labelled(call, roles, roles[(0,)], indexed=indexed, writes=True, accumulates=kind, wraps=True)


def is_mask(index: object) -> TypeGuard[Tensor]:
    """Whether an index is a mask; bytes count as masks, too."""
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def check_mask(x: Tensor, dim: int, mask: Tensor) -> None:
    """IndexError where the dims of ``x`` from ``dim`` on are not those of the mask."""
    if mask.shape != x.shape[dim : dim + mask.ndim]:
        raise IndexError(
            f"the mask of shape {tuple(mask.shape)} does not fit the dims {tuple(x.shape[dim : dim + mask.ndim])}"
        )


def numbers(op: OpOverload, x: Tensor, indices: Indices) -> list[Tensor | None]:
    """Masks as index tensors. A mask that is not sharded gives the same ones everywhere."""
    result: list[Tensor | None] = []
    for index in indices:
        if not is_mask(index):
            result.append(index)
            continue
        check_mask(x, len(result), index)
        spec = None
        if isinstance(index, DTensor):
            if spec_of(index).sharded_dims():
                raise refuse(
                    op,
                    [x, index],
                    "the number of entries that a sharded mask selects depends on its values",
                    "use torch.where or masked_fill, or redistribute the mask to Replicate()",
                )
            index, spec = reduced_value(index)
        check_has_values("an index with a mask", x)
        found = index.nonzero().unbind(1)
        # Where nothing else says so, the mask says what mesh there is.
        result.extend(found if spec is None else [replicated(t, spec) for t in found])
    return result


# How many entries a mask selects depends on data, so there is no plan before it is made numbers.
@register(_aten.index.Tensor)
def _index_by_mask(x: Tensor, indices: Indices) -> Tensor:
    if not any(is_mask(index) for index in indices):
        return DECLINED
    chosen: Tensor = run(_aten.index.Tensor, (x, numbers(_aten.index.Tensor, x, indices)), {})
    return chosen


def _register_put(op: OpOverload) -> None:
    @register(op)
    def _(x: Tensor, indices: Indices, values: Tensor, accumulate: bool = False, *rest: bool) -> Tensor:
        if not any(is_mask(index) for index in indices):
            return DECLINED
        mask = indices[0]
        if isinstance(x, ShardTensor) and len(indices) == 1 and mask is not None:
            if values.numel() == 1 and not accumulate:
                # One value wherever the mask says so: elementwise, with a mask that may be sharded.
                check_mask(x, 0, mask)
                for _ in range(x.ndim - mask.ndim):
                    mask = mask.unsqueeze(-1)
                fill = _aten.masked_fill_.Tensor if is_inplace(op) else _aten.masked_fill.Tensor
                filled: Tensor = fill(x, mask.bool(), values.reshape(()))
                return filled
        written: Tensor = run(op, (x, numbers(op, x, indices), values, accumulate), {})
        return written


for _op in (_aten.index_put.default, _aten.index_put_.default):
    _register_put(_op)


# -- with indices that may be out of range where a mask says so ---------------------------------------------------
# Other operators in a row, too.


def _clamped(x: Tensor, indices: Indices) -> list[Tensor | None]:
    return [i if i is None else i.clamp(-n, n - 1) for i, n in zip(indices, x.shape, strict=False)]


@register(_aten._unsafe_masked_index.default)
def _masked_index(x: Tensor, mask: Tensor, indices: Indices, fill: complex) -> Tensor:
    if not x.numel():
        return DECLINED
    chosen: Tensor = _aten.index.Tensor(x, _clamped(x, indices))
    return chosen.masked_fill(mask.logical_not(), fill)


@register(_aten._unsafe_masked_index_put_accumulate.default)
def _masked_index_put(x: Tensor, mask: Tensor, indices: Indices, values: Tensor) -> Tensor:
    if not x.numel():
        return DECLINED
    values = values.masked_fill(mask.logical_not(), 0)
    written: Tensor = _aten.index_put.default(x, _clamped(x, indices), values, True)
    return written


# Whether the value requires grad is nothing that plans know.
@register(torch.index_fill, Tensor.index_fill)
def _index_fill(input: Tensor, dim: int, index: Tensor, value: Tensor | complex) -> Tensor:
    """With a value that requires grad, whose gradient by torch's formula looks for the index's different numbers."""
    d = dim_of(input, dim)
    if d is None or not is_sharded(index) or not isinstance(value, Tensor) or not value.requires_grad:
        return DECLINED
    n = input.shape[d]
    mask = replicated(torch.zeros(n, dtype=torch.bool, device=index.device), spec_of(index))
    filled = torch.index_fill(mask, 0, index, True).reshape([n if k == d else 1 for k in range(input.ndim)])
    return torch.where(filled, value, input)


@register(Tensor.index_fill_)
def _index_fill_in_place(input: Tensor, dim: int, index: Tensor, value: Tensor | complex) -> Tensor:
    result = _index_fill(input, dim, index, value)
    return result if result is DECLINED else input.copy_(result)


# -- take --------------------------------------------------------------------------------------------------------------

# Reading and writing by positions: ``take`` and ``put`` in the flattened tensor, ``take_along_dim``.


def _coordinates(index: Tensor, shape: Sequence[int]) -> list[Tensor]:
    """Positions in a flattened tensor of ``shape``, negative ones from its end, as one index for each dim.

    What is out of range is so in the first dim, too.
    """
    n = torch.Size(shape).numel()
    index = torch.where(index < 0, index + n, index)
    index = torch.where((index < 0) | (index >= n), n, index)
    places = []
    step = n
    for d, size in enumerate(shape):
        step //= max(1, size)
        place = torch.div(index, max(1, step), rounding_mode="floor")
        places.append(place if d == 0 else place % max(1, size))
    return places


@operator(torch.take, Tensor.take, tensors="input index", partial="input index")
def _take(call: Arguments, input: ShardTensorSpec, index: ShardTensorSpec) -> Composed:
    if not any_sharded(input, index):
        return DECLINED
    if index.tensor_meta.dtype != torch.int64:
        raise RuntimeError(f"take(): Expected a long tensor for index, but got {index.tensor_meta.dtype}")
    shape = input.shape or (1,)

    def take(x: Tensor, places: Tensor) -> Tensor:
        return indexed(x if x.ndim else x.reshape(1), _coordinates(places, shape))

    return Composed(take)


@operator(torch.put, Tensor.put, Tensor.put_, tensors="input index source", partial="input index source")
def _put(
    call: Arguments,
    input: ShardTensorSpec,
    index: ShardTensorSpec,
    source: ShardTensorSpec,
    accumulate: bool = False,
) -> Composed:
    write = _aten.index_put_.default if is_written(call) else _aten.index_put.default
    if not any_sharded(input, index, source) or not input.shape:
        return DECLINED
    dtypes = [spec.tensor_meta.dtype for spec in (input, index, source)]
    if dtypes[1] != torch.int64 or index.shape.numel() != source.shape.numel() or dtypes[2] != dtypes[0]:
        raise RuntimeError(
            f"put: a long index with as many elements as the source, which has the input's dtype, was expected; "
            f"got {tuple(index.shape)} {dtypes[1]}, {tuple(source.shape)} {dtypes[2]}, {dtypes[0]}"
        )

    def put(x: Tensor, places: Tensor, values: Tensor) -> Tensor:
        result: Tensor = write(x, _coordinates(places, x.shape), values.reshape(places.shape), accumulate)
        return result

    return Composed(put)


@operator(torch.take_along_dim, Tensor.take_along_dim, tensors="input indices", partial="input indices")
def _take_along_dim(
    call: Arguments, input: ShardTensorSpec, indices: ShardTensorSpec, dim: int | None = None
) -> Composed:
    if not any_sharded(input, indices) or (len(input.shape) != len(indices.shape) and dim is not None):
        return DECLINED
    if dim is None:
        return Composed(lambda x, places: torch.take(x, places.reshape(-1)))
    d = dim_of(input, dim)
    if d is None:
        return DECLINED
    # Along the other dims, they are broadcast.
    shape = broadcast_shape(*([1 if k == d else n for k, n in enumerate(s.shape)] for s in (input, indices)))
    wide = [[s.shape[d] if k == d else n for k, n in enumerate(shape)] for s in (input, indices)]

    def take(x: Tensor, places: Tensor) -> Tensor:
        places = places.remainder(max(1, x.shape[d]))  # as torch wraps them where there is a dim
        return torch.gather(x.expand(wide[0]), d, places.expand(wide[1]))

    return Composed(take)


# -- combinations ------------------------------------------------------------------------------------------------------

# ``combinations``: entries gathered by the combinations of their positions.


@operator(torch.combinations, tensors="input", partial="input")
def _combinations(call: Arguments, input: ShardTensorSpec, r: int = 2, with_replacement: bool = False) -> Composed:
    if not input.sharded_dims() or len(input.shape) != 1:
        return DECLINED
    n, device = input.shape[0], call.device

    def combine(x: torch.Tensor) -> torch.Tensor:
        return indexed(x, [torch.combinations(torch.arange(n, device=device), r, with_replacement)])

    return Composed(combine)
