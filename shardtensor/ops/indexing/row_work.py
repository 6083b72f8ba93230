"""Reading and adding by an index that is sharded like what it indexes: rows travel, each once.

[Note: by rows] Where one sharded dim is indexed, and the index is sharded on the same mesh dim, a rank reads rows of
its shard and of others' for its part of the index. It fetches the latter, puts them behind its shard, and calls the
kernel once with the places of rows in both, see [Note: row halos] in communication/rows.py. What accumulates works
backwards: each rank adds to its shard and to room behind it, and returns what it has there. For half precision the room
is in float32, as contributions are.

An entry of an index never asks for more than a row, so this sends at most what blocks would where entries are rows, as
in ``x[index]`` and ``index_add``. Where an entry is less (``gather``, with an index for each element), it may be more;
all ranks know how much, and then blocks travel. So they do in a graph, and in a CUDA graph where nothing is kept:
nobody can look at an index there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import Shard

from ..._compat.c10d import group_along
from ...communication.rows import RowHalo
from ...communication.tracing import is_traced
from ...dispatch.found import found, is_kept
from ...dispatch.planning import Path, operand
from ...layout.geometry import intervals_of, resized
from ...layout.placements import wide_dtype
from ...layout.spec import ShardTensorSpec
from ...ranks.cuda_graphs import is_capturing
from ..common.reduce import neutral_element
from .block_work import BlockWork
from .index_layout import Along, IndexLayout, clipped, copied, in_place_form, put


def rows_of(layout: IndexLayout, indexed: Mapping[Path, int]) -> int | None:
    """The mesh dim on which rows are exchanged, or None. See [Note: by rows]."""
    if len(indexed) != 1 or (layout.writes and layout.accumulates is None):
        return None
    ((path, dim),) = indexed.items()
    moving = [m for m, a in enumerate(layout.axes) if a.indexed is not None or a.broadcast is not None or a.contributes]
    if path not in layout.call.tensors or len(moving) != 1 or layout.mesh.size(moving[0]) == 1:
        return None
    m = moving[0]
    along, placement = _split(layout, m), layout.specs[path].placements[m]
    if layout.axes[m].indexed != dim or along is None or not isinstance(placement, Shard):
        return None
    if along[0] in layout.roles[layout.first]:  # the index of a part of each row
        return None
    return m if layout.roles[path][placement.dim] == along[0] else None


def _split(layout: IndexLayout, m: int) -> Along | None:
    """The label of the index along which it is sharded on a mesh dim."""
    axis = layout.axes[m]
    return axis.broadcast if axis.broadcast is not None else axis.along


class RowWork(BlockWork):
    """What a rank does with its local tensors where rows travel on a mesh dim.

    Attributes:
        index: the path of the index.
    """

    def __init__(
        self,
        layout: IndexLayout,
        layouts: Mapping[Path, ShardTensorSpec],
        indexed: Mapping[Path, int],
        wraps: bool,
        result: ShardTensorSpec,
        mesh_dim: int,
    ) -> None:
        super().__init__(layout, layouts, indexed, wraps, result)
        ((self.index, self._dim),) = indexed.items()
        self._op = self.accumulates or "sum"
        first, along = layouts[self.first], _split(layout, mesh_dim)
        assert along is not None
        label, self._rank, ranks = along[0], self.coordinate[mesh_dim], self.mesh.size(mesh_dim)
        self._group, self._sizes = group_along(self.mesh, mesh_dim), first.sizes_along(mesh_dim)
        # What of the operands goes with this rank's part of the index: ``(path, dim, start, length)``.
        parts = clipped(along[1], self.shortest[label])
        start, stop = intervals_of(parts)[self._rank]
        self._parts = []
        for path, labels in self.roles.items():
            if label in labels:
                d = list(labels).index(label)
                begins = 0 if layouts[path].sharded_dims().get(d) == mesh_dim else start
                self._parts.append((path, d, begins, stop - start))
        self._added = [path for path in self.roles if path not in (self.first, self.index)]
        self._key = (mesh_dim, self._sizes, layouts[self.index].layout, parts)  # nothing that is this rank's alone
        # The elements of a row, and how many elements would travel in blocks.
        self._row = first.shape.numel() // max(1, sum(self._sizes))
        if not self.writes:
            travel = layout.call.meta.numel()
        elif self.contributed:
            travel = first.shape.numel()
        else:
            travel = sum(spec.shape.numel() for path, spec in layouts.items() if label in self.roles[path])
        self._in_blocks_at_most = travel * (ranks - 1)

    def __call__(self, *args: Any, keeper: Any = None, **kwargs: Any) -> Any:
        index: Tensor = operand(args, self.index)
        if is_traced(index) or (is_capturing(index.device) and not is_kept(keeper, self._key)):
            return super().__call__(*args, **kwargs)
        values = copied(args)
        for path, d, a, b in self.narrowings:
            put(values, path, operand(values, path).narrow(d, a, b - a))
        for path, d, start, n in self._parts:
            put(values, path, operand(values, path).narrow(d, start, n))
        index = operand(values, self.index)
        rows = found(keeper, self._key, lambda: RowHalo(index, self._sizes, self._rank, self._group))
        rows.check(index)
        if rows.beyond or (rows.negative and not self.wraps):
            n = sum(self._sizes)
            raise IndexError(f"an index is out of range for dimension {self._dim} with size {n}")
        if rows.total * self._row > self._in_blocks_at_most:
            return super().__call__(*args, **kwargs)
        put(values, self.index, rows.places)
        return self._written_by_rows(values, kwargs, rows) if self.writes else self._read_by_rows(values, kwargs, rows)

    def _read_by_rows(self, values: list[Any], kwargs: dict[str, Any], rows: RowHalo) -> Tensor:
        put(values, self.first, rows.fetch(operand(values, self.first), self._dim))
        result: Tensor = self.func(*values, **kwargs)
        return result

    def _written_by_rows(self, values: list[Any], kwargs: dict[str, Any], rows: RowHalo) -> Tensor:
        target: Tensor = operand(values, self.first)
        d, own, halo = self._dim, target.shape[self._dim], len(rows.positions)
        dtype = wide_dtype(target.dtype) if self._op in ("sum", "product") else target.dtype
        room = target
        if not self.inplace or halo or dtype != target.dtype:
            room = target.new_empty(resized(target.shape, d, own + halo), dtype=dtype)
            room.narrow(d, 0, own).copy_(target)
            room.narrow(d, own, halo).fill_(neutral_element(self._op, dtype))
        put(values, self.first, room)
        if dtype != target.dtype:
            for path in self._added:
                put(values, path, operand(values, path).to(dtype))
        in_place_form(self.func)(*values, **kwargs)
        written = rows.give_back(room, d, self._op)
        if self.inplace:
            return target if room is target else target.copy_(written)
        return written.to(target.dtype).contiguous()
