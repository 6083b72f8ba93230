"""The keys that a block mask names, fetched from the ranks that own them.

[Note: named keys] A block mask lists for each block of rows the blocks of keys of which something is seen. These lists
are values, and every rank has them whole. So once for each mask the ranks compare whether theirs are equal, and each
works out which keys the rows of every rank need; that is kept with the lists, see [Note: found] in
dispatch/index_findings.py. From then on a call has one exchange, in which each key travels once, as rows that an index
reads do, see [Note: row halos] in communication/row_halos.py. A shard may end inside a block.

What is fetched is put in the place that it has between the first and the last key that the rank needs. Keys in between
that no block names are zeros: no row sees them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..._compat.c10d import group_along
from ...communication.row_halos import RowHalo, check_same_on_ranks, check_unwritten
from ...communication.tracing import is_traced
from ...dispatch.index_findings import found, is_kept
from ...layout.intervals import Interval, boundaries_of, intervals_of, length
from ...layout.spec import ShardTensorSpec
from ...ranks.cuda_graphs import check_not_captured
from ..common.alignment import cast, wide_dtype

_DIMS = 4
_BATCH, _HEADS, _KEYS = 0, 1, 2
_WRITTEN = (
    "the lists of a block mask were changed by something that raises no version (numpy, .data, a collective), and the "
    "keys that they named before would be fetched. Remedy: make a new block mask, on all ranks."
)

# How many blocks are seen in part, and which; the same of blocks that are seen entirely, None where there are no such.
Lists = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def named_keys(
    name: str,
    lists: Lists,
    block: tuple[int, int],
    query: ShardTensorSpec,
    key: ShardTensorSpec,
    mesh_dim: int,
    shown: Callable[[], Tensor],
) -> NamedKeys | None:
    """The exchange of the keys that a mask names, along the mesh dim that shards rows and keys.

    None where there is one block of keys, the lists have no values yet, or all ranks need all keys. They do also where
    some rows see a key that the mask does not name.

    Args:
        name: of the operator, for errors.
        block: how many rows and keys are a block.
        shown: returns which keys the rows of this rank see, ``(batch, heads, keys)``.

    Raises:
        RanksDiffer: on all ranks, which have different masks.
        RuntimeError: it is captured in a CUDA graph, and nothing was found before.
    """
    if block[1] >= key.shape[_KEYS] or 0 in key.own_shape[:_KEYS] or is_traced(lists[0]):
        return None
    counts, keeper, *full = lists
    group = group_along(key.mesh, mesh_dim)
    # The other lists are the same as long as they are the same tensors: what was found keeps these.
    others = tuple((id(t), t._version) for t in (counts, *full) if t is not None)
    found_for = (mesh_dim, group.group_name, query.shape, query.layout, key.shape, key.layout, block, others)
    if not is_kept(keeper, found_for):
        reason = "which keys are sent is in the values of its block mask"
        check_not_captured(name, keeper.device, reason, "call it with this mask before the capture, too")

    def find() -> NamedKeys:
        keys = NamedKeys(lists, block, query, key, mesh_dim, group)
        # torch's kernels for eager mode look at no lists: rows may see more keys than these name.
        more, given = keys.lacks(shown()), [t for t in lists if t is not None]
        keys.all_of_them |= check_same_on_ranks(name, given, group, "the block mask", more)
        return keys

    keys = found(keeper, found_for, find)
    keys.check(lists)
    return None if keys.all_of_them else keys


class NamedKeys:
    """The keys that the rows of this rank need. Made without communication; the arguments are :func:`named_keys`'s.

    Attributes:
        interval: from the first key that is needed to the last one, in whole blocks; empty where there is none.
        all_of_them: whether all ranks need all keys.
    """

    def __init__(
        self,
        lists: Lists,
        block: tuple[int, int],
        query: ShardTensorSpec,
        key: ShardTensorSpec,
        mesh_dim: int,
        group: dist.ProcessGroup,
    ) -> None:
        rank, sizes, rows = key.coordinate[mesh_dim], key.sizes_along(mesh_dim), query.sizes_along(mesh_dim)
        named = _named(lists, block, intervals_of(rows), query, key)
        # Dims of the keys along which the mask differs: a row of the halo is a key of one of their entries.
        leads = [d for d in (_BATCH, _HEADS) if named.shape[1 + d] > 1]
        self._order = [*leads, _KEYS, *(d for d in range(_DIMS) if d not in (*leads, _KEYS))]
        self._leads, n = len(leads), named.shape[1] * named.shape[2]
        needs = [_keys_of(mine.flatten(0, 1), block[1], key.shape[_KEYS]) for mine in named]
        bounds = torch.tensor(boundaries_of(sizes), device=named.device)
        index = torch.cat([_positions(lead, keys, bounds, n) for lead, keys in needs])
        lengths = [len(keys) for _, keys in needs]
        self._halo = RowHalo(index, [n * size for size in sizes], rank, group, (0, lengths))
        self.all_of_them = self._halo.total == (len(sizes) - 1) * n * key.shape[_KEYS]
        lead, keys = needs[rank]
        self.interval: Interval = (int(keys.min()), int(keys.max()) + 1) if len(keys) else (0, 0)
        self._places = self._halo.places
        self._into = lead * length(self.interval) + keys - self.interval[0]
        self._needed, self._width, self._groups = named[rank], block[1], key.own_shape[_HEADS]
        self._tensors = lists  # what it was found for, see :func:`named_keys`
        self._rows = slice(*_blocks_of(intervals_of(rows)[rank], block[0]))
        self._before = [t.clone() for t in self._of_own_rows(lists)]

    def _of_own_rows(self, lists: Lists) -> list[Tensor]:
        counts, indices, *full = lists
        return [t[..., self._rows] for t in (counts, full[0]) if t is not None] + [
            t[..., self._rows, :] for t in (indices, full[1]) if t is not None
        ]

    def check(self, lists: Lists) -> None:
        """RuntimeError where the lists of this rank's rows have other values than this was made of."""
        for now, before in zip(self._of_own_rows(lists), self._before, strict=True):
            check_unwritten(now, before, _WRITTEN)

    def lacks(self, shown: Tensor) -> bool:
        """Whether there is a key among ``(batch, heads, keys)`` that is not needed on this rank."""
        batch, heads, n = shown.shape
        needed = self._needed.repeat_interleave(self._width, -1)[..., :n]
        grouped = shown.view(batch, self._groups, heads // self._groups, n).any(2)
        return bool((grouped & ~needed).any())

    def fetch(self, local: Tensor) -> Tensor:
        """The keys in :attr:`interval`, out of the shard and those of others; ``(batch, heads, keys, features)``."""
        rows = self._halo.fetch(self._flat(local), 0)
        n = math.prod(local.shape[d] for d in self._order[: self._leads]) * length(self.interval)
        room = rows.new_zeros(n, *rows.shape[1:]).index_copy_(0, self._into, rows.index_select(0, self._places))
        return self._unflat(room, local.shape)

    def give_back(self, grad: Tensor, own: int) -> Tensor:
        """The adjoint: the gradient of the shard, which has ``own`` keys; added up and returned in a wide dtype."""
        room = self._flat(cast(grad, wide_dtype(grad.dtype)))
        n = math.prod(grad.shape[d] for d in self._order[: self._leads]) * own
        rows = room.new_zeros(n + len(self._halo.positions), *room.shape[1:])
        rows.index_copy_(0, self._places, room.index_select(0, self._into))
        return self._unflat(self._halo.give_back(rows, 0), grad.shape)

    def _flat(self, keys: Tensor) -> Tensor:
        """Keys as rows: of each entry of the dims along which the mask differs all, one after the other."""
        return keys.permute(self._order).flatten(0, self._leads)

    def _unflat(self, rows: Tensor, like: Sequence[int]) -> Tensor:
        leads = [like[d] for d in self._order[: self._leads]]
        each = len(rows) // max(1, math.prod(leads))
        return rows.view(*leads, each, *rows.shape[1:]).permute([self._order.index(d) for d in range(_DIMS)])


def _named(
    lists: Lists, block: tuple[int, int], rows: Sequence[Interval], query: ShardTensorSpec, key: ShardTensorSpec
) -> Tensor:
    """Whether the rows of each rank need a block of keys: ``(ranks, batch, heads of keys, blocks)`` on this rank.

    Dims of batch and heads along which the mask does not differ have length 1.
    """
    blocks = -(-key.shape[_KEYS] // block[1])
    named = _listed(lists[0], lists[1], blocks)
    if lists[2] is not None and lists[3] is not None:
        named |= _listed(lists[2], lists[3], blocks)
    named = named[(None,) * (_DIMS - named.ndim)]
    for d in (_BATCH, _HEADS):
        if named.shape[d] > 1:
            start, stop = query.own_interval(d)
            named = named.narrow(d, start, stop - start)
    if named.shape[_HEADS] > 1:
        batch, heads, *others = named.shape
        groups = key.own_shape[_HEADS]
        named = named.view(batch, groups, heads // groups, *others).any(_HEADS + 1)
    return torch.stack([named[:, :, slice(*_blocks_of(own, block[0]))].any(2) for own in rows])


def _listed(counts: Tensor, indices: Tensor, blocks: int) -> Tensor:
    """Whether a list has a block; of each list as many entries count as ``counts`` says."""
    counted = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    places = torch.where(counted & (indices < blocks), indices, blocks).long()
    dense = torch.zeros((*counts.shape, blocks + 1), dtype=torch.bool, device=indices.device)
    return dense.scatter_(-1, places, True)[..., :-1]


def _blocks_of(rows: Interval, height: int) -> Interval:
    """The blocks in which rows lie."""
    start, stop = rows
    return (start // height, -(-stop // height)) if stop > start else (0, 0)


def _keys_of(named: Tensor, width: int, n: int) -> tuple[Tensor, Tensor]:
    """The keys in named blocks, of ``(entries, blocks)``: of each its entry and its place among the ``n`` keys."""
    entry, block = named.nonzero().unbind(1)
    keys = (block.unsqueeze(1) * width + torch.arange(width, device=block.device)).flatten()
    inside = keys < n
    return entry.repeat_interleave(width)[inside], keys[inside]


def _positions(entry: Tensor, keys: Tensor, bounds: Tensor, entries: int) -> Tensor:
    """Where keys are among the rows of all ranks; each rank has those of an entry next to each other."""
    owner = torch.bucketize(keys, bounds[1:], right=True)
    start = bounds[owner]
    return entries * start + entry * (bounds[owner + 1] - start) + keys - start
