"""Reading and adding by an index along a sharded dim: rows travel, each once.

These operators index one sharded dim, and each rank of its mesh dim has a part of the index: either the index is
sharded, or it is whole on every rank, which takes the part that belongs to its part of the result or of what is added.
For its part a rank reads rows of its own shard and of others'. It fetches the rows of others, puts them behind its
shard, and calls the kernel once with the places of rows in both, see [Note: row halos] in communication/row_halos.py.
Operators that accumulate work backwards: each rank adds to its shard and to room behind it, and returns what it has
there. For half precision the room is in float32, as contributions are.

An entry of an index never asks for more than a row. If entries are rows, as in ``x[index]`` and ``index_add``, this
sends at most what blocks would. If an entry is less (``gather``, with an index for each element), it may send more; all
ranks know how much, and then blocks travel (block_work.py). Blocks also travel in a graph, and in a CUDA graph where
nothing is kept: no rank can look at an index there.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..._compat.c10d import group_along
from ...communication.row_halos import RowHalo, check_same_on_ranks
from ...communication.tracing import is_traced
from ...dispatch.index_findings import RowsKey, found, is_kept
from ...dispatch.planning import Path, operand
from ...layout.dtypes import wide_dtype
from ...layout.intervals import clipped, intervals_of, resized
from ...ranks.cuda_graphs import is_capturing
from ..common.named_dims import Along
from ..common.reduce import neutral_element
from .block_work import BlockWork
from .index_layout import IndexLayout, copied, in_place_form, put


def rows_of(layout: IndexLayout) -> tuple[int, Path] | None:
    """The mesh dim on which rows are exchanged, and the index that names them, or None."""
    if layout.writes and layout.accumulates is None:
        return None
    moving = [m for m, a in enumerate(layout.axes) if a.indexed is not None or a.broadcast is not None or a.contributes]
    if len(moving) != 1 or layout.mesh.size(moving[0]) == 1:
        return None
    (m,) = moving
    along = _split(layout, m)
    found = [path for path, dim in layout.indexed.items() if dim == layout.axes[m].indexed]
    if not found or along is None or along.label in layout.roles[layout.first]:  # the index of a part of each row
        return None
    return (m, found[0]) if along.label in layout.roles[found[0]] else None


def _split(layout: IndexLayout, m: int) -> Along | None:
    """The label of the index along which it is sharded, or divided, on a mesh dim."""
    axis = layout.axes[m]
    return axis.broadcast if axis.broadcast is not None else axis.along


class RowWork(BlockWork):
    """What a rank does with its local tensors where rows travel on a mesh dim, which ``index`` names."""

    def __init__(self, layout: IndexLayout, mesh_dim: int, index: Path) -> None:
        super().__init__(layout)
        self._index, self._dim, self._op = index, layout.indexed[index], self.accumulates or "sum"
        layouts, along = layout.layouts, _split(layout, mesh_dim)
        assert along is not None
        label, self._rank, ranks = along.label, self.coordinate[mesh_dim], self.mesh.size(mesh_dim)
        first, self._group = layouts[self.first], group_along(self.mesh, mesh_dim)
        self._sizes = first.sizes_along(mesh_dim)
        # What of the operands goes with this rank's part of the index: ``(path, dim, start, stop)``.
        lengths = clipped(along.sizes, self.shortest[label])
        start, stop = intervals_of(lengths)[self._rank]
        # Of an index that every rank holds whole: how it is divided, and where this rank's part is.
        self._split: tuple[int, tuple[int, ...]] | None = None
        self._own: tuple[int, int, int] | None = None
        self._narrowings = list(self.narrowings)
        for path, labels in self.roles.items():
            if label in labels:
                d = list(labels).index(label)
                is_part = layouts[path].sharded_dims().get(d) == mesh_dim
                if path == index and not (is_part and path in layout.call.tensors):
                    self._split, self._own = (d, lengths), (d, start, stop - start)
                    self._narrowings = [n for n in self._narrowings if n[:2] != (path, d)]
                    self._narrowings.append((path, d, 0, sum(lengths)))
                else:
                    begins = 0 if is_part else start
                    self._narrowings.append((path, d, begins, begins + stop - start))
        # Nothing that is this rank's alone.
        self._key = RowsKey(self.mesh, mesh_dim, self._sizes, layouts[index].layout, lengths)
        # The elements of a row, and how many elements would travel in blocks.
        self._row = first.shape.numel() // max(1, sum(self._sizes))
        if not self.writes:
            travel = layout.call.meta.numel()
        elif self.contributed:
            travel = first.shape.numel()
        else:
            travel = sum(layouts[path].shape.numel() for path, labels in self.roles.items() if label in labels)
        self._in_blocks_at_most = travel * (ranks - 1)

    def __call__(self, *args: Any, keeper: Any = None, **kwargs: Any) -> Any:
        index: Tensor = operand(args, self._index)
        if is_traced(index) or (is_capturing(index.device) and not is_kept(keeper, self._key)):
            return super().__call__(*args, **kwargs)
        values = copied(args)
        for path, d, a, b in self._narrowings:
            put(values, path, operand(values, path).narrow(d, a, b - a))
        index = operand(values, self._index)
        rows = found(keeper, self._key, lambda: self._find(index))
        rows.check(index.narrow(*self._own) if self._own else index)
        if rows.beyond or (rows.negative and not self.wraps):
            n = sum(self._sizes)
            raise IndexError(f"an index is out of range for dimension {self._dim} with size {n}")
        if rows.total * self._row > self._in_blocks_at_most:
            return super().__call__(*args, **kwargs)
        put(values, self._index, rows.places)
        return self._written_by_rows(values, kwargs, rows) if self.writes else self._read_by_rows(values, kwargs, rows)

    def _find(self, index: Tensor) -> RowHalo:
        if self._split:
            check_same_on_ranks(self.func, [index], self._group)
        return RowHalo(index, self._sizes, self._rank, self._group, self._split)

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
            for path in self.added:
                put(values, path, operand(values, path).to(dtype))
        in_place_form(self.func)(*values, **kwargs)
        written = rows.give_back(room, d, self._op)
        if self.inplace:
            return target if room is target else target.copy_(written)
        return written.to(target.dtype).contiguous()
