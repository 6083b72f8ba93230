"""Order across shards: the elements of given ranks in a row, and whole rows sorted; no process ever holds a row.

A *row* is a line of elements along the dims that are ordered; here it is the last dim of a matrix, of which every
process holds some columns. The *place* of an element is how many elements of its row stand before it in order.

*Counting.* Every element has a key: an integer in the order of the values, with NaN behind all of them. The key at a
place is found digit by digit. Each process counts how many of its keys lie below each candidate for the next digit, and
one all-reduce adds the counts up. The number of all-reduces depends on the dtype alone. Equal elements stand in the
order of the processes and then of the columns, as a stable sort on one device has them.

*Sorting.* From the places where each process' part of the sorted row begins, every process knows what to send where:
one all-to-all, in which no process receives more than its part. How much travels between two processes depends on data,
but on data that all of them have seen. The host reads these numbers, and nothing else: for a GPU it waits once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..._compat import constant_like, hidden_from_program, recomputed
from ...communication.redistribute import all_gather, all_reduce, swapped
from ...layout.caches import cached
from ...layout.intervals import boundaries_of
from ...ranks.cuda_graphs import check_has_values

_DIGIT = 4  # bits


def sort_keys(values: Tensor, descending: bool = False) -> Tensor:
    """int64 numbers in the order of the values: NaN greatest, 0 and -0 alike; the other way round if ``descending``."""
    if values.is_floating_point():
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.dtype.itemsize]
        raw = (values + 0.0).view(bits).long()
        limit = torch.iinfo(bits).max
        keys = torch.where(raw < 0, raw ^ limit, raw)  # the magnitude of negative numbers counts backwards
        keys = keys.masked_fill(values.isnan(), limit)
    else:
        keys = values.long()
    return ~keys if descending else keys


def _key_bits(dtype: torch.dtype) -> int:
    """The number of bits of a key of this dtype, sign included."""
    return 2 if dtype == torch.bool else 8 * dtype.itemsize + (dtype == torch.uint8)


@dataclass(frozen=True)
class Found:
    """Where the elements at certain places of the rows are; all tensors are ``(rows, places)``.

    Attributes:
        before: how many of this process' elements stand before the place: a position in its own sorted rows.
        everybody: ``before`` of every process, ``(processes, rows, places)``.
        here: whether this process has the element.
    """

    before: Tensor
    everybody: Tensor
    here: Tensor

    def pick(self, ordered: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
        """The elements found, of ``ordered``, this process' rows in order; the same on every process."""
        values = ordered.new_zeros(self.before.shape)
        if ordered.shape[-1]:
            at = self.before.clamp(max=ordered.shape[-1] - 1)
            values = torch.where(self.here, ordered.gather(-1, at), values)
        for group in groups:
            values = all_reduce(values, group)
        return values


@recomputed()
def find_places(keys: Tensor, dtype: torch.dtype, places: Tensor, groups: Sequence[dist.ProcessGroup]) -> Found:
    """Find the elements at ``places`` (rows, places) of the rows, by counting.

    Args:
        keys: this process' keys ``(rows, columns)``, each row ascending.
        dtype: of the values that the keys were made of.
        groups: the rows are spread over the processes along these, in the order of the first one's ranks, then the
            second one's and so on.
    """
    digits = -(-_key_bits(dtype) // _DIGIT)
    key = torch.full_like(places, -(1 << (digits * _DIGIT - 1)))
    steps = torch.arange(1, 1 << _DIGIT, device=keys.device)
    for digit in reversed(range(digits)):
        candidates = key.unsqueeze(-1) + (steps << (digit * _DIGIT))
        lower = torch.searchsorted(keys, candidates.flatten(1)).view(candidates.shape)
        for group in groups:
            lower = all_reduce(lower, group)
        key += (lower <= places.unsqueeze(-1)).sum(-1) << (digit * _DIGIT)
    lower = torch.searchsorted(keys, key)
    return _among_equals(lower, torch.searchsorted(keys, key, right=True) - lower, places, groups)


def _among_equals(lower: Tensor, equal: Tensor, places: Tensor, groups: Sequence[dist.ProcessGroup]) -> Found:
    """Of each process' ``equal`` elements, which come after ``lower`` others, those that stand before the place."""
    counts = torch.stack([lower, equal]).unsqueeze(0)
    here = 0
    for group in reversed(groups):
        here += dist.get_rank(group) * len(counts)
        counts = all_gather(counts, group).flatten(0, 1)
    lowers, equals = counts.unbind(1)
    first = equals.cumsum(0) - equals  # of the equal elements, how many stand before the process' own
    wanted = places - lowers.sum(0)
    everybody = lowers + (wanted - first).clamp(min=0).minimum(equals)
    mine = (wanted >= first[here]) & (wanted < first[here] + equals[here])
    return Found(everybody[here], everybody, mine)


def find_slices(keys: Tensor, dtype: torch.dtype, places: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Like :func:`find_places`, for slices that are compared column by column: ``Found.everybody``, ``(.., places)``.

    Args:
        keys: of this process' slices in order, ``(slices, columns)``.
        places: one-dimensional.
    """
    digits = -(-_key_bits(dtype) // _DIGIT)
    steps = torch.arange(1, 1 << _DIGIT, device=keys.device)
    place, start, stop = places.clone(), torch.zeros_like(places), torch.full_like(places, len(keys))
    for column in keys.T:
        windows = [column[a:b].contiguous() for a, b in zip(start.tolist(), stop.tolist(), strict=True)]

        def below(values: Tensor, right: bool = False, windows: list[Tensor] = windows) -> Tensor:
            return torch.stack([torch.searchsorted(w, v, right=right) for w, v in zip(windows, values, strict=True)])

        key = torch.full_like(place, -(1 << (digits * _DIGIT - 1)))
        for digit in reversed(range(digits)):
            lower = all_reduce(below(key.unsqueeze(-1) + (steps << (digit * _DIGIT))), group)
            key += (lower <= place.unsqueeze(-1)).sum(-1) << (digit * _DIGIT)
        lower, upper = below(key), below(key, right=True)
        place, start, stop = place - all_reduce(lower, group), start + lower, start + upper
    return _among_equals(start, stop - start, places, [group]).everybody


class Route:
    """The way of elements to where their sorted rows are, and back.

    Args:
        order: the positions of this process' elements in order, ``(rows, columns)``.
        everybody: how many elements of each process stand before each part of the sorted rows but the first,
            ``(processes, rows, processes - 1)``.
        own: how many columns each process has.
        need: how many columns of the sorted rows each process gets.
    """

    def __init__(
        self, order: Tensor, everybody: Tensor, own: Sequence[int], need: Sequence[int], group: dist.ProcessGroup
    ) -> None:
        (rows, length), self._rank, self._group = order.shape, dist.get_rank(group), group
        self.shape, self._own = (rows, need[self._rank]), order.shape
        columns = torch.arange(length, device=order.device).expand(rows, -1).contiguous()
        goes_to = torch.searchsorted(everybody[self._rank].contiguous(), columns, right=True)
        ends = _numbers(tuple(own), order).view(-1, 1, 1).expand(-1, rows, 1)
        counts = torch.cat([torch.zeros_like(ends), everybody, ends], dim=-1).diff()  # from, row, to
        totals = counts.sum(1).tolist()
        self._sends, self._receives = totals[self._rank], [of_rank[self._rank] for of_rank in totals]
        # Where the elements are that are sent, one process' after the other's, and to where those go that arrive.
        row = torch.arange(rows, device=order.device)
        at = order + row.unsqueeze(1) * length
        self._sent = at.flatten()[torch.argsort(goes_to.flatten(), stable=True)]
        from_each = counts[..., self._rank].flatten()
        comes_to = row.repeat(len(own)).repeat_interleave(from_each, output_size=sum(self._receives))
        self._merge = torch.argsort(comes_to, stable=True)

    def reorder(self, within: Tensor) -> None:
        """Put what arrives into another order within its rows: positions ``(rows, need[rank])``."""
        self._merge = self._merge.view(self.shape).gather(-1, within).flatten()

    def there(self, t: Tensor) -> Tensor:
        """What belongs to this process' part of the sorted rows, of ``t``, which lies as the elements did.

        Elements may be more than numbers: ``t`` may have further dims.
        """
        pieces = t.flatten(0, 1)[self._sent].split_with_sizes(self._sends)
        return torch.cat(self._swap(pieces, self._receives))[self._merge].view(*self.shape, *t.shape[2:])

    def back(self, t: Tensor) -> Tensor:
        """The way back: ``t``, which lies as the sorted rows, sent to where the elements came from."""
        merged = _put(t.flatten(0, 1), self._merge)
        arrived = torch.cat(self._swap(merged.split_with_sizes(self._receives), self._sends))
        return _put(arrived, self._sent).view(*self._own, *t.shape[2:])

    def _swap(self, pieces: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """One piece to every process, and one of these sizes from each."""
        shapes = [[(n, *pieces[self._rank].shape[1:])] for n in sizes]
        return [piece for (piece,) in swapped([[p] for p in pieces], shapes, self._rank, self._group)]


def _put(t: Tensor, index: Tensor) -> Tensor:
    """The inverse of ``t[index]``, where ``index`` is a permutation."""
    return torch.empty_like(t).index_copy_(0, index, t)


@cached(maxsize=256)
def _made(values: tuple[int, ...], device: torch.device) -> Tensor:
    """A tensor of them, made once: the host waits for what it copies to a GPU."""
    with hidden_from_program():
        return torch.tensor(values, dtype=torch.int64, device=device)


def _numbers(values: tuple[int, ...], like: Tensor) -> Tensor:
    """The same for use with ``like``, which a graph may hold."""
    return constant_like(_made(values, like.device), like)


class Sorted(Route):
    """Rows of numbers in order, spread over the processes of a group.

    Args:
        x: this process' part of the rows, ``(rows, columns)``.
        own, need, group: as for :class:`Route`.

    Attributes:
        values: this process' part of the sorted rows, ``(rows, need[rank])``.
    """

    def __init__(
        self, x: Tensor, own: Sequence[int], need: Sequence[int], descending: bool, group: dist.ProcessGroup
    ) -> None:
        check_has_values("a sort across shards", x)
        ordered, order = torch.sort(x, dim=-1, stable=True, descending=descending)
        places = _numbers(tuple(boundaries_of(need)[1:-1]), x).expand(len(x), -1)
        found = find_places(sort_keys(ordered, descending), x.dtype, places, [group])
        super().__init__(order, found.everybody, own, need, group)
        self.values, within = torch.sort(self.there(x), dim=-1, stable=True, descending=descending)
        self.reorder(within)
