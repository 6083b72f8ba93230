"""``x[index]`` and ``x[index] = value``, with numbers, slices, index tensors and masks along any dims.

Reading: everything but tensors comes first (views and entries), then index tensors gather, see index_operators.py.
Writing: the part that slices and numbers name is a view of the shard (a number on a sharded dim is a slice of length
1), and index tensors or masks write into that.

``Tensor.__getitem__`` and ``Tensor.__setitem__`` are registered and have no plans: before Python 3.12 slices cannot be
hashed, so there is no key to keep a plan under. What they are made of has plans.
"""

from __future__ import annotations

import operator as python_operator
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...dispatch.copied_views import mark_copied
from ...dispatch.registry import DECLINED, register
from ...dispatch.tensor import ShardTensor
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Composed, operator
from ...ranks.cuda_graphs import check_has_values
from ..common.alignment import as_operand, broadcast_shape, is_sharded, same_layout
from ..shape.slice import entry_of
from .index_operators import any_sharded, check_mask, flat_cumsum, indexed, is_mask, written
from .masked_select import selected

_aten = torch.ops.aten

_FULL = slice(None)

# What an index consists of: a number, a slice, a tensor, None or an ellipsis; and the dim that it acts on, if any.
Entry = tuple[Any, "int | None"]


def _items(index: object) -> tuple[Any, ...]:
    return index if type(index) is tuple else (index,)


def _entries(x: Tensor, items: Sequence[Any]) -> list[Entry] | None:
    """The entries of an index with the dim that each one acts on; None where that is left to torch.

    An ellipsis is as many full slices.
    """
    used = 0
    for item in items:
        if isinstance(item, (Tensor, slice)) or _is_integer(item):
            used += _dims_of(item)
        elif item is not None and item is not Ellipsis:
            return None
    if used > x.ndim or sum(item is Ellipsis for item in items) > 1:
        return None
    result: list[Entry] = []
    dim = 0
    for item in items:
        for entry in [slice(None)] * (x.ndim - used) if item is Ellipsis else [item]:
            result.append((entry, None if entry is None else dim))
            dim += 0 if entry is None else _dims_of(entry)
    return result


def _dims_of(item: object) -> int:
    """How many dims an entry acts on that acts on some."""
    return item.ndim if is_mask(item) else 1


def _with_tensors(items: Sequence[Any], device: torch.device) -> list[Any]:
    """The items of an index with lists of numbers and arrays made tensors, and what acts as a number made one."""

    def convert(item: Any) -> object:
        if isinstance(item, Tensor):
            return item
        if (isinstance(item, list) and _of_numbers(item)) or hasattr(item, "__array__"):
            item = torch.as_tensor(item, device=device)
            return int(item) if not item.ndim and item.dtype != torch.bool else item
        return python_operator.index(item) if hasattr(item, "__index__") and not isinstance(item, bool) else item

    return [convert(item) for item in items]


def _is_view(items: Sequence[Any]) -> bool:
    """Whether an index has slices only: torch itself calls the operators for those."""
    return all(type(item) is slice or item is None or item is Ellipsis for item in items)


def _of_numbers(items: Sequence[object]) -> bool:
    """Whether a list, which may hold lists, holds integers or truth values only, and some."""
    return bool(items) and all(_of_numbers(i) if isinstance(i, list) else isinstance(i, int) for i in items)


def _is_integer(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _concerns_shards(x: ShardTensor, entries: Sequence[Entry] | None) -> bool:
    """Whether numbers or tensors of an index act on a sharded dim."""
    sharded = x._spec.sharded_dims()
    for item, dim in entries or ():
        if dim is not None and not isinstance(item, slice):
            if any(d in sharded for d in range(dim, dim + _dims_of(item))):
                return True
    return False


def _is_sharded_mask(item: object) -> TypeGuard[ShardTensor]:
    return is_mask(item) and is_sharded(item)


@register(Tensor.__getitem__)
def _getitem(self: Tensor, index: object) -> Tensor:
    given = _items(index)
    if type(self) is ShardTensor and (only := _only_number(given, len(self._spec.shape))) is not None:
        return torch.select(self, *only) if only[0] % len(self._spec.shape) in self._spec.sharded_dims() else DECLINED
    masks = [item for item in given if _is_sharded_mask(item)]
    if masks:
        x = as_operand(self, masks[0].device_mesh)
    elif isinstance(self, ShardTensor) and not _is_view(given) and self._spec.sharded_dims():
        x = self
    else:
        return DECLINED
    entries = _entries(x, _with_tensors(given, x.device))
    if entries is None or not (masks or _concerns_shards(x, entries)):
        return DECLINED
    if any(isinstance(item, Tensor) for item, _ in entries):
        items, tensors = _part(x, entries, numbers_stay=False)
        part: Tensor = x[tuple(items)] if any(item != slice(None) for item in items) else x
        if len(tensors) == 1 and _is_sharded_mask(tensors[0][1]):
            return selected(part, *tensors[0])
        return indexed(part, _indices(part, tensors))
    items, numbers = _part(x, entries, numbers_stay=True)
    part = x[tuple(items)]
    for dim, _ in reversed(numbers):
        part = torch.select(part, dim, 0)
    return part


def _only_number(items: Sequence[Any], ndim: int) -> tuple[int, int] | None:
    """The dim and the number of an index such as ``x[:, 5]`` or ``x[..., -1]``; None of any other."""
    found, last, ellipses = None, len(items) - 1, 0
    for place, item in enumerate(items):
        if item is Ellipsis:
            ellipses += 1
        elif type(item) is int:
            if found is not None:
                return None
            found = (place - last - 1 if ellipses else place), item
        elif type(item) is not slice or item != _FULL:
            return None
    return found if ellipses < 2 and len(items) - ellipses <= ndim else None


def _part(x: ShardTensor, entries: Sequence[Entry], *, numbers_stay: bool) -> tuple[list[Any], list[tuple[int, Any]]]:
    """An index without its tensors, and for each of these the dim of the part on which it acts.

    Args:
        numbers_stay: a number on a sharded dim becomes a slice of length 1, which keeps the dim.
    """
    sharded = x._spec.sharded_dims()
    items: list[Any] = []
    tensors: list[tuple[int, Any]] = []
    at = 0
    for item, dim in entries:
        if isinstance(item, Tensor):
            n = _dims_of(item)
            tensors.append((at, item))
            items += [slice(None)] * n
            at += n
        elif _is_integer(item):
            if numbers_stay and dim in sharded:
                place = entry_of(x, dim, item)
                tensors.append((at, place))
                items.append(slice(place, place + 1))
                at += 1
            else:
                items.append(item)
        else:
            items.append(item)
            at += 1
    return items, tensors


def _indices(x: Tensor, tensors: Sequence[tuple[int, Tensor]]) -> list[Tensor | None]:
    """One index for each dim of ``x``. A mask is replaced by the places where it is true."""
    result: list[Tensor | None] = [None] * x.ndim
    for dim, item in tensors:
        if not is_mask(item):
            result[dim] = item
            continue
        check_mask(x, dim, item)
        if isinstance(item, DTensor) and all(p.is_replicate() for p in item.placements):
            item = item.to_local()
        check_has_values("an index with a mask", x)
        result[dim : dim + item.ndim] = item.nonzero().unbind(1)
    return result


# -- writing --------------------------------------------------------------------------------------------------


@register(Tensor.__setitem__)
def _setitem(self: Tensor, index: object, value: Any) -> object:
    given = _items(index)
    masks = any(map(_is_sharded_mask, given))  # as which an open tensor is laid out
    if not isinstance(self, ShardTensor) or not (masks or self._spec.sharded_dims()):
        return DECLINED
    entries = _entries(self, _with_tensors(given, self.device))
    if entries is None or not (masks or _concerns_shards(self, entries)):
        return DECLINED
    items, chosen = _part(self, entries, numbers_stay=True)
    part: Tensor = self[tuple(items)]
    if isinstance(value, (int, float, complex)):  # written by a kernel: a copy would have the host wait for a GPU
        value = torch.full((), value, dtype=self.dtype, device=self.device)
    elif not isinstance(value, Tensor):
        value = torch.tensor(value, dtype=self.dtype, device=self.device)
    tensors = [(dim, item) for dim, item in chosen if isinstance(item, Tensor)]
    numbers = [dim for dim, item in chosen if not isinstance(item, Tensor)]
    if not tensors:
        part.copy_(_with_numbers(value, part.ndim, numbers))
        return None
    value = value.squeeze(tuple(range(_leading_ones(value))))  # as torch's assignment does for index tensors
    if numbers:
        part, tensors = _numbers_as_tensors(part, tensors, numbers)
    if len(tensors) == 1 and _is_sharded_mask(tensors[0][1]):
        part.copy_(masked(part, *tensors[0], value.to(self.dtype), False))
        return None
    _aten.index_put_.default(part, _indices(part, tensors), value)
    return None


def _leading_ones(value: Tensor) -> int:
    return next((dim for dim, n in enumerate(value.shape) if n != 1), value.ndim)


def _numbers_as_tensors(
    part: Tensor, tensors: Sequence[tuple[int, Tensor]], numbers: Sequence[int]
) -> tuple[Tensor, list[tuple[int, Tensor]]]:
    """Make the numbers of an index, whose dims are kept with length 1, index tensors along with the others.

    torch takes numbers out before it sees which index tensors come together; so the kept dims are moved to these.
    """
    order = [d for d in range(part.ndim) if d not in numbers]
    at = order.index(tensors[0][0])
    order[at:at] = numbers
    zero = torch.zeros((), dtype=torch.int64, device=part.device)
    found = [(order.index(d), item) for d, item in tensors] + [(order.index(d), zero) for d in numbers]
    return part.permute(order), sorted(found, key=lambda pair: pair[0])


def _with_numbers(value: Tensor, ndim: int, dims: Sequence[int]) -> Tensor:
    """A value for a part of ``ndim`` dims, of which it does not know ``dims``: they get length 1."""
    for d in sorted(dims, reverse=True):
        after = ndim - 1 - d
        if value.ndim > after:
            value = value.unsqueeze(value.ndim - after)
    while value.ndim > ndim and value.shape[0] == 1:
        value = value.squeeze(0)
    return value


def masked(x: Tensor, dim: int, mask: Tensor, values: Tensor, accumulate: bool) -> Tensor:
    """``x`` with the entries of its dims from ``dim`` on where ``mask`` is true replaced by ``values`` (or added)."""
    check_mask(x, dim, mask)
    mask = mask.bool()
    after = x.ndim - dim - mask.ndim  # dims of x behind those of the mask
    lead = values.ndim - 1 - after
    n = values.shape[lead] if lead >= 0 else 1
    if n != 1:
        count = int(mask.sum())
        if n != count:
            raise IndexError(f"shape mismatch: {n} values for the {count} entries that the mask selects")
    if n > 1:
        place = (flat_cumsum(mask.long()) - 1).clamp(min=0)
        values = indexed(values, [None] * lead + [place])
    elif lead >= 0:  # one value for all entries, or none for none, which is where gradients go
        values = values.select(lead, 0) if n else values.sum(lead)
        for _ in range(mask.ndim):
            values = values.unsqueeze(lead)
    wide = mask
    for _ in range(after):
        wide = wide.unsqueeze(-1)
    if values.shape == x.shape:
        values = same_layout(values, x)
    return torch.where(wide, x + values if accumulate else values, x)


@operator(
    *(torch.masked_scatter, Tensor.masked_scatter, Tensor.masked_scatter_),
    tensors="input mask source",
    partial="input mask source",
)
def _masked_scatter(
    call: Arguments, input: ShardTensorSpec, mask: ShardTensorSpec, source: ShardTensorSpec
) -> Composed:
    """How many values are used depends on data."""
    if not any_sharded(input, mask, source):
        return DECLINED
    dtypes = [spec.tensor_meta.dtype for spec in (input, source, mask)]
    if dtypes[0] != dtypes[1] or dtypes[2] != torch.bool:
        raise RuntimeError(
            f"masked_scatter: expected self and source to have same dtypes and a bool mask, but got {dtypes[0]}, "
            f"{dtypes[1]} and {dtypes[2]}"
        )
    shape = broadcast_shape(input.shape, mask.shape)

    def scatter(x: Tensor, where: Tensor, values: Tensor) -> Tensor:
        x, where = x.expand(shape), where.expand(shape)
        place = flat_cumsum(where.long())
        needed = int(place.max()) if place.numel() else 0
        if needed > values.numel():
            raise RuntimeError("Number of elements of source < number of ones in mask")
        if not needed:
            return torch.where(where, values.sum(), x)  # where no value goes, and gradients do
        found = indexed(values.reshape(-1), [(place - 1).clamp(min=0)])
        return torch.where(where, same_layout(found, x), x)

    return written(call, scatter)


@operator(
    *(torch.index_put, Tensor.index_put, torch.index_put_, Tensor.index_put_),
    tensors="input indices values",
    partial="input indices values",
)
def _index_put(
    call: Arguments,
    input: ShardTensorSpec,
    indices: Sequence[ShardTensorSpec | None],
    values: ShardTensorSpec,
    accumulate: bool = False,
) -> Composed:
    """Of one mask that is sharded; other indices go below autograd."""
    found = [(dim, spec) for dim, spec in enumerate(indices) if isinstance(spec, ShardTensorSpec)]
    if len(found) != 1 or "values" not in call.tensors:
        return DECLINED
    ((dim, mask),) = found
    if not mask.sharded_dims() or mask.tensor_meta.dtype not in (torch.bool, torch.uint8):
        return DECLINED
    return written(call, lambda x, found, new: masked(x, dim, found[dim], new, accumulate))


# -- entries of a sharded dim, changed in place -------------------------------------------------------------------

# What operators write whose other form is none of the entry alone.
_WRITTEN: dict[str, Callable[..., Tensor]] = {
    "copy_": lambda entry, source, *_, **__: source.to(entry.dtype).expand(entry.shape),
    "fill_": lambda entry, value: _WRITTEN["copy_"](entry, torch.as_tensor(value, device=entry.device)),
    "zero_": torch.zeros_like,
}


def _register_in_place(name: str) -> None:
    """``x[:, 5] *= 2``: Python changes the entry, then writes it back. But an entry of a sharded dim is a copy.

    So what changes it is computed anew, and written to the tensor as well as to the copy. That depends on the tensor
    that is changed, not on its spec alone; so there is no plan.
    """
    other = f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_")
    out_of_place = _WRITTEN.get(name) or getattr(Tensor, other)

    @register(getattr(Tensor, name))
    def _(self: Tensor, *args: object, **kwargs: object) -> Tensor:
        source = getattr(self, "_entry_of", None)
        if source is None or not isinstance(self, ShardTensor):
            return DECLINED
        entry = self.clone() if torch.is_grad_enabled() else self  # which may be saved for a gradient
        value = as_operand(out_of_place(entry, *args, **kwargs), self.device_mesh)
        if value.shape != self.shape or not torch.can_cast(value.dtype, self.dtype):
            raise RuntimeError(
                f"a result of shape {tuple(value.shape)} and {value.dtype} cannot be written to an entry of shape "
                f"{tuple(self.shape)} and {self.dtype}"
            )
        x, dim, index = source
        torch.narrow(x, dim, index, 1).copy_(value.unsqueeze(dim))
        how, self._copied, self._viewed = self._copied, (), None  # this write is one to the copy
        _aten.copy_.default(self, value)
        return mark_copied(self, x, how)


for _name in (
    *_WRITTEN,
    *("add_", "sub_", "mul_", "div_", "floor_divide_", "remainder_", "pow_", "clamp_", "masked_fill_"),
    *("bitwise_and_", "bitwise_or_", "bitwise_xor_", "bitwise_left_shift_", "bitwise_right_shift_"),
    *("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"),
    *("__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"),
):
    _register_in_place(_name)
