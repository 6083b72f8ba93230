"""``x[index]`` and ``x[index] = value``, with numbers, slices, index tensors and masks along any dims.

Reading: everything but tensors comes first (views and entries), then index tensors look up, see gather.py. Writing:
the part that slices and numbers name is a view of the shard (a number on a sharded dim is a slice of length 1), and
index tensors or masks write into that.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...copies import mark_copied
from ...errors import refuse
from ...registry import register
from ...tensor import ShardTensor, redistribute_to
from ..common.alignment import as_operand, is_cut, laid_like
from .gather import flat_cumsum, look_up
from .index_operators import is_mask
from .masked_select import check_mask, selected

__all__: list[str] = []

_aten = torch.ops.aten


def _entries(x: Any, index: Any) -> list[tuple[Any, int | None]] | None:
    """The entries of an index with the dim that each one acts on; None where that is left to torch."""
    items = index if type(index) is tuple else (index,)
    used = 0
    for item in items:
        if is_mask(item):
            used += item.ndim
        elif isinstance(item, (Tensor, slice)) or _is_integer(item):
            used += 1
        elif item is not None and item is not Ellipsis:
            return None
    if used > x.ndim or sum(item is Ellipsis for item in items) > 1:
        return None
    result: list[tuple[Any, int | None]] = []
    dim = 0
    for item in items:
        if item is None or item is Ellipsis:
            result.append((item, None))
            dim += x.ndim - used if item is Ellipsis else 0
        else:
            result.append((item, dim))
            dim += item.ndim if is_mask(item) else 1
    return result


def _with_tensors(index: Any, device: torch.device) -> Any:
    """An index with lists of numbers and arrays made tensors, and what acts as a number made one."""

    def convert(item: Any) -> Any:
        if isinstance(item, Tensor):
            return item
        if (isinstance(item, list) and _of_numbers(item)) or hasattr(item, "__array__"):
            item = torch.as_tensor(item, device=device)
            return int(item) if not item.ndim and item.dtype != torch.bool else item
        return operator.index(item) if hasattr(item, "__index__") and not isinstance(item, bool) else item

    return tuple(convert(item) for item in index) if type(index) is tuple else convert(index)


def _is_view(index: Any) -> bool:
    """Whether an index has slices only, which are torch's affair."""
    items = index if type(index) is tuple else (index,)
    return all(type(item) is slice or item is None or item is Ellipsis for item in items)


def _of_numbers(items: list[Any]) -> bool:
    """Whether a list, which may hold lists, holds integers or truth values only, and some."""
    return bool(items) and all(_of_numbers(i) if isinstance(i, list) else isinstance(i, int) for i in items)


def _is_integer(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _entry(x: Any, dim: int, index: int) -> int:
    n = x.shape[dim]
    if not -n <= index < n:
        raise IndexError(f"index {index} is out of bounds for dimension {dim} with size {n}")
    return index % n


def _concerned(self: Any, entries: Sequence[tuple[Any, int | None]] | None) -> bool:
    """Whether numbers or tensors of an index act on a sharded dim."""
    if entries is None:
        return False
    sharded = self._spec.sharded_dims()
    for item, dim in entries:
        if dim is None or isinstance(item, slice):
            continue
        dims = range(dim, dim + (item.ndim if is_mask(item) else 1))
        if any(d in sharded for d in dims):
            return True
    return False


@register(Tensor.__getitem__)
def _getitem(self: Any, index: Any) -> Any:
    masked_by = [item for item in (index if type(index) is tuple else (index,)) if is_mask(item) and is_cut(item)]
    if not masked_by and (not isinstance(self, ShardTensor) or _is_view(index) or not self._spec.sharded_dims()):
        return NotImplemented
    if masked_by:
        self = as_operand(self, masked_by[0].device_mesh)
    index = _with_tensors(index, self.device)
    entries = _entries(self, index)
    if entries is None or not (masked_by or _concerned(self, entries)):
        return NotImplemented
    if any(isinstance(item, Tensor) for item, _ in entries):
        items, tensors = _part(self, entries, numbers_stay=False)
        x = self[tuple(items)] if any(item != slice(None) for item in items) else self
        if len(tensors) == 1 and is_mask(tensors[0][1]) and is_cut(tensors[0][1]):
            return selected(x, *tensors[0])
        return look_up(x, _indices(x, tensors))
    items, numbers = _part(self, entries, numbers_stay=True)
    x = self[tuple(items)]
    for dim, _ in reversed(numbers):
        x = torch.select(x, dim, 0)
    return x


def _part(
    x: Any, entries: Sequence[tuple[Any, int | None]], *, numbers_stay: bool
) -> tuple[list[Any], list[tuple[int, Any]]]:
    """An index without its tensors, and for each of these the dim of the part on which it acts.

    Args:
        numbers_stay: a number on a sharded dim becomes a slice of length 1, which keeps the dim.
    """
    sharded = x._spec.sharded_dims()
    consumed = sum(item.ndim if is_mask(item) else 1 for item, dim in entries if dim is not None)
    items: list[Any] = []
    tensors: list[tuple[int, Any]] = []
    at = 0
    for item, dim in entries:
        if isinstance(item, Tensor):
            n = item.ndim if is_mask(item) else 1
            tensors.append((at, item))
            items += [slice(None)] * n
            at += n
        elif _is_integer(item):
            if numbers_stay and dim in sharded:
                place = _entry(x, dim, item)  # type: ignore[arg-type]
                tensors.append((at, place))
                items.append(slice(place, place + 1))
                at += 1
            else:
                items.append(item)
        else:
            items.append(item)
            at += x.ndim - consumed if item is Ellipsis else 1
    return items, tensors


def _indices(x: Any, tensors: Sequence[tuple[int, Any]]) -> list[Tensor | None]:
    """One index for each dim of ``x``. A mask stands for the places where it is true."""
    result: list[Tensor | None] = [None] * x.ndim
    for dim, item in tensors:
        if not is_mask(item):
            result[dim] = item
            continue
        check_mask(x, dim, item)
        if isinstance(item, DTensor):
            if all(p.is_replicate() for p in item.placements):
                item = item.to_local()
        result[dim : dim + item.ndim] = item.nonzero().unbind(1)
    return result


# -- writing --------------------------------------------------------------------------------------------------


@register(Tensor.__setitem__)
def _setitem(self: Any, index: Any, value: Any) -> Any:
    if not isinstance(self, ShardTensor) or not self._spec.sharded_dims():
        return NotImplemented
    index = _with_tensors(index, self.device)
    entries = _entries(self, index)
    if entries is None or not _concerned(self, entries):
        return NotImplemented
    items, tensors = _part(self, entries, numbers_stay=True)
    part = self[tuple(items)]
    if not isinstance(value, Tensor):
        value = torch.tensor(value, dtype=self.dtype, device=self.device)
    if not any(isinstance(item, Tensor) for _, item in tensors):
        part.copy_(_with_numbers(value, part.ndim, [dim for dim, _ in tensors]))
        return None
    # A number beside index tensors has been taken out before torch looks which of these stand together.
    numbers = [dim for dim, item in tensors if not isinstance(item, Tensor)]
    if numbers:
        places = [(dim, item) for dim, item in tensors if isinstance(item, Tensor)]
        first = places[0][0]
        order = [d for d in range(part.ndim) if d not in numbers]
        at = order.index(first)
        order[at:at] = numbers
        part = part.permute(order)
        tensors = [(order.index(d), item) for d, item in places]
        zero = torch.zeros((), dtype=torch.int64, device=self.device)
        tensors += [(order.index(d), zero) for d in numbers]
        tensors.sort(key=lambda pair: pair[0])
    if len(tensors) == 1 and is_mask(tensors[0][1]) and is_cut(tensors[0][1]):
        part.copy_(masked(part, *tensors[0], value.to(self.dtype), False))
        return None
    _aten.index_put_.default(part, _indices(part, tensors), value)
    return None


def _with_numbers(value: Any, ndim: int, dims: Sequence[int]) -> Any:
    """A value for a part of ``ndim`` dims, of which it does not know ``dims``: they get length 1."""
    for d in sorted(dims, reverse=True):
        after = ndim - 1 - d
        if value.ndim > after:
            value = value.unsqueeze(value.ndim - after)
    while value.ndim > ndim and value.shape[0] == 1:
        value = value.squeeze(0)
    return value


def masked(x: Any, dim: int, mask: Any, values: Any, accumulate: bool) -> Any:
    """``x`` with the entries of its dims from ``dim`` on where ``mask`` is true replaced by ``values`` (or added)."""
    check_mask(x, dim, mask)
    mask = mask.bool()
    after = x.ndim - dim - mask.ndim  # dims of x behind those of the mask
    many = values.ndim > after and values.shape[values.ndim - 1 - after] != 1
    if many:
        count, n = int(mask.sum()), values.shape[values.ndim - 1 - after]
        if n != count:
            raise IndexError(f"shape mismatch: {n} values for the {count} entries that the mask selects")
        if not n:
            return x
        place = (flat_cumsum(mask.long()) - 1).clamp(min=0)
        lead = values.ndim - 1 - after
        values = look_up(values, [None] * lead + [place])
    elif values.ndim > after:
        for _ in range(mask.ndim - 1):
            values = values.unsqueeze(values.ndim - 1 - after)
    wide = mask
    for _ in range(after):
        wide = wide.unsqueeze(-1)
    if values.ndim == x.ndim:
        values = laid_like(values, x)
    return torch.where(wide, x + values if accumulate else values, x)


@register(torch.masked_scatter, Tensor.masked_scatter)
def _masked_scatter(input: Any, mask: Any, source: Any) -> Any:
    if not is_cut(input, mask, source):
        return NotImplemented
    if input.dtype != source.dtype or mask.dtype != torch.bool:
        raise RuntimeError(
            f"masked_scatter: expected self and source to have same dtypes and a bool mask, but got {input.dtype}, "
            f"{source.dtype} and {mask.dtype}"
        )
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    input, mask = input.expand(shape), mask.expand(shape)
    place = flat_cumsum(mask.long())
    needed = int(place.max()) if place.numel() else 0
    if needed > source.numel():
        raise RuntimeError("Number of elements of source < number of ones in mask")
    if not needed:
        return input.clone()
    values = look_up(source.reshape(-1), [(place - 1).clamp(min=0)])
    return torch.where(mask, laid_like(values, input), input)


@register(Tensor.masked_scatter_)
def _masked_scatter_in_place(self: Any, mask: Any, source: Any) -> Any:
    if not is_cut(self, mask, source):
        return NotImplemented
    if not isinstance(self, ShardTensor):
        reason = "a ShardTensor cannot be written into a plain tensor"
        raise refuse("masked_scatter_", [self, mask, source], reason, "use the out-of-place form")
    return self.copy_(_masked_scatter(self, mask, source))


def _put_sharded_mask(x: Any, indices: Any, values: Any, accumulate: bool) -> Any:
    """What ``index_put`` gives for one mask that is sharded; NotImplemented for everything else."""
    found = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(found) != 1 or not is_mask(found[0][1]) or not is_cut(found[0][1]) or not isinstance(values, Tensor):
        return NotImplemented
    return masked(x, *found[0], values, accumulate)


@register(torch.index_put, Tensor.index_put)
def _index_put(input: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    return _put_sharded_mask(input, indices, values, accumulate)


@register(torch.index_put_, Tensor.index_put_)
def _index_put_in_place(input: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    result = _put_sharded_mask(input, indices, values, accumulate)
    return result if result is NotImplemented else input.copy_(result)


# -- entries of a sharded dim, changed in place -------------------------------------------------------------------


def _register_in_place(name: str) -> None:
    """``x[:, 5] *= 2``: Python changes the entry, then writes it back. But an entry of a sharded dim is a copy.

    So what changes it is computed anew, and written to the tensor as well as to the copy.
    """
    out_of_place = getattr(Tensor, f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_"))

    @register(getattr(Tensor, name))
    def _(self: Any, *args: Any, **kwargs: Any) -> Any:
        source = getattr(self, "_entry_of", None)
        if source is None:
            return NotImplemented
        if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (self, *args)):
            raise refuse(
                name,
                self,
                "it is an entry of a sharded dim, a copy that has a gradient of its own",
                "write the result: x[:, 5] = x[:, 5] * 2 for x[:, 5] *= 2",
            )
        value = out_of_place(self, *args, **kwargs)
        if value.shape != self.shape or not torch.can_cast(value.dtype, self.dtype):
            raise RuntimeError(
                f"a result of shape {tuple(value.shape)} and {value.dtype} cannot be written to an entry of shape "
                f"{tuple(self.shape)} and {self.dtype}"
            )
        x, dim, index = source
        torch.narrow(x, dim, index, 1).copy_(value.unsqueeze(dim))
        self._local_tensor.copy_(redistribute_to(value, self._spec)._local_tensor)
        return mark_copied(self, x)


for _name in (
    *("add_", "sub_", "mul_", "div_", "floor_divide_", "remainder_", "pow_"),
    *("bitwise_and_", "bitwise_or_", "bitwise_xor_", "bitwise_left_shift_", "bitwise_right_shift_"),
    *("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"),
    *("__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"),
):
    _register_in_place(_name)
