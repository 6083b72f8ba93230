"""What a rank does with its part of the operands of operators that read and write by index: blocks come one by one.

*Own entries.* If a dim that is indexed is sharded, each rank answers for the entries that it owns. In reading it
contributes zeros for the other entries, and the result is a Partial, or is summed at the owner of the block that is
broadcast. (The zeros are negative ones, the neutral element of floating-point addition, so that every value comes out
as it was.) In writing, the other entries go to a sink, one more index at the end of a copy of the shard.

*Contributions.* If a rank has its own part of what is added to a sharded dim, it adds that into a neutral block, and
the blocks are reduced at their owners. If all blocks together are no larger than the part, this is one exchange.
Otherwise it goes owner by owner, so that no rank holds more than one block of another rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial

from ..._compat.c10d import group_along
from ...communication.exchange import plan_intervals
from ...communication.halo import Axis, Fetch
from ...communication.redistribute import reduce_scatter
from ...communication.tracing import is_traced
from ...dispatch.planning import AtenCall, argument, is_inplace, operand
from ...layout.dtypes import wide_dtype
from ...layout.intervals import clipped, intervals_of
from ..common.reduce import neutral_element
from .index_layout import IndexLayout, copied, in_place_form, put

# Of dims that are indexed and sharded: the length, and where the part begins and ends that a rank answers for.
Own = dict[int, tuple[int, int, int]]


class BlockWork:
    """What a rank does with its local tensors."""

    def __init__(self, layout: IndexLayout) -> None:
        self.func, self.roles, self.out, self.first = layout.call.func, layout.roles, list(layout.out), layout.first
        self.writes, self.wraps, self.result = layout.writes, layout.wraps, layout.result
        self.accumulates = layout.accumulates
        self.coordinate, self.mesh = self.result.coordinate, layout.mesh
        self.shortest = layout.shortest
        self.axes = layout.axes
        self.inplace = is_inplace(self.func)
        # What of a plain tensor this rank works on: ``(path, dim, start, stop)``.
        self.narrowings = [
            (path, d, *spec.interval(m))
            for path, spec in layout.layouts.items()
            for d, m in spec.sharded_dims().items()
            if path not in layout.call.tensors
        ]
        # What this rank owns; and the index tensors that index it.
        spec = layout.call.tensors.get(self.first)
        self.own: Own = {}
        for m, axis in enumerate(self.axes):
            if axis.indexed is not None and spec is not None:
                self.own[axis.indexed] = (spec.shape[axis.indexed], *spec.interval(m))
        self.indexed = {path: dim for path, dim in layout.indexed.items() if dim in self.own}
        self.contributed = [m for m, axis in enumerate(self.axes) if axis.contributes]
        self.blocks = {m: intervals_of(spec.sizes_along(m)) for m in self.contributed if spec is not None}
        self.added = [path for path in self.roles if path != self.first and path not in layout.indexed]
        # Contributions are rounded once. And torch's kernel for products in half precision raises, on the CPU, where an
        # index has one element to reduce; of a shard that may be so on one rank only.
        self._rounds = bool(self.contributed) and self.accumulates in ("sum", "product")
        self._rounds |= argument(layout.call, 4, "reduce", "") == "prod"
        self.at_once = [m for m in self.contributed if self._fits_a_shard(layout.call, m)]
        # The value is on the first rank; a plain tensor is on all.
        summed = [m for m, axis in enumerate(self.axes) if axis.along is not None and axis.along.label not in self.out]
        self.starts_neutral = self.writes and spec is None and any(self.coordinate[m] for m in summed)
        self.broadcast = {m: axis.broadcast for m, axis in enumerate(self.axes) if axis.broadcast is not None}
        # Which operands are sharded along what is broadcast on a mesh dim, and each rank's interval.
        self.held = {
            (path, m): intervals_of(spec.sizes_along(m))
            for path, spec in layout.layouts.items()
            for d, m in spec.sharded_dims().items()
            if m in self.broadcast and self.roles[path][d] == self.broadcast[m].label
        }

    def _fits_a_shard(self, call: AtenCall, m: int) -> bool:
        """Whether contributions to all ranks are no larger than the shard that they are made of."""
        along = self.axes[m].along
        parts = [spec for path, spec in call.tensors.items() if along is not None and along.label in self.roles[path]]
        largest = max(spec.shape.numel() for spec in parts)
        return call.tensors[self.first].shape.numel() * self.mesh.size(m) <= largest

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values = copied(args)
        for path, d, a, b in self.narrowings:
            put(values, path, operand(values, path).narrow(d, a, b - a))
        if not self.writes:
            return self._in_blocks([*self.broadcast], values, kwargs, self.own)
        if self.starts_neutral:
            plain = operand(values, self.first)
            put(values, self.first, torch.full_like(plain, neutral_element(self.accumulates or "sum", plain.dtype)))
        target = operand(values, self.first)
        dtype = wide_dtype(target.dtype) if self._rounds else target.dtype
        if dtype != target.dtype:
            for path in (self.first, *self.added):
                put(values, path, operand(values, path).to(dtype))
        if not self.own and not self.broadcast:
            written: Tensor = self.func(*values, **kwargs)
        else:
            written = self._contributions(self.contributed, values, kwargs, self.own)
            written = written if self.inplace else written.contiguous()
        if self.inplace:
            return target if written is target else target.copy_(written)
        return written

    def _contributions(self, mesh_dims: Sequence[int], values: list[Any], kwargs: dict[str, Any], own: Own) -> Tensor:
        """What is written to, with what all ranks contribute to this rank's part of it."""
        if not mesh_dims:
            return self._written(values, kwargs, own)
        m, target, partial = mesh_dims[0], operand(values, self.first), Partial(self.accumulates or "sum")
        ranks, rank, group = self.mesh.size(m), self.coordinate[m], group_along(self.mesh, m)
        d = self.axes[m].indexed
        assert d is not None
        n, start, stop = own[d]
        blocks = self.blocks[m]
        rounds = [(0, n, blocks)]
        if m not in self.at_once:
            rounds = [
                (a, b, tuple((0, b - a) if r == s else (0, 0) for r in range(ranks))) for s, (a, b) in enumerate(blocks)
            ]
        total: Tensor = target
        for a, b, pieces in rounds:
            if a == b:
                continue
            shape = [b - a if k == d else size for k, size in enumerate(target.shape)]
            room = target.new_full(shape, neutral_element(partial.reduce_op, target.dtype))
            mine = a <= start and stop <= b
            if mine:
                room.narrow(d, start - a, stop - start).copy_(target)
            part = copied(values)
            put(part, self.first, room)
            room = self._contributions(mesh_dims[1:], part, kwargs, {**own, d: (n, a, b)})
            found = reduce_scatter(partial, d, pieces, rank, group, room)
            total = found if mine and start < stop else total
        return total

    def _written(self, values: list[Any], kwargs: dict[str, Any], own: Own) -> Tensor:
        """What is written to, with what this rank writes to the part that it answers for."""
        target = operand(values, self.first)
        room: Tensor = target if self.inplace and not own else target.clone()
        for d in own:  # the sink
            row = room.new_zeros([1 if k == d else n for k, n in enumerate(room.shape)])
            room = torch.cat([room, row], d)
        values = copied(values)
        put(values, self.first, room)
        self._in_blocks([*self.broadcast], values, kwargs, own)
        for d in own:
            room = room.narrow(d, 0, room.shape[d] - 1)
        return room

    def _in_blocks(self, mesh_dims: Sequence[int], values: list[Any], kwargs: dict[str, Any], own: Own) -> Any:
        """The operator, once for each combination of blocks."""
        if not mesh_dims:
            return self._on_own(copied(values), kwargs, own)
        m = mesh_dims[0]
        label, sizes = self.broadcast[m].label, self.broadcast[m].sizes
        ranks, rank, group = self.mesh.size(m), self.coordinate[m], group_along(self.mesh, m)
        indexed = self.axes[m].indexed is not None
        pieces: list[Tensor] = []
        for s, (a, b) in enumerate(intervals_of(clipped(sizes, self.shortest[label]))):
            if a == b:
                continue
            part = copied(values)
            for path, labels in self.roles.items():
                if label not in labels:
                    continue
                d, value = list(labels).index(label), operand(values, path)
                if (path, m) in self.held:
                    transfers = plan_intervals(self.held[path, m], ((a, b),) * ranks, rank)
                    block = Fetch([Axis(d, m, transfers)], self.mesh, value.shape).read(value)[0]
                else:
                    block = value.narrow(d, a, b - a)
                put(part, path, block)
            piece = self._in_blocks(mesh_dims[1:], part, kwargs, own)
            if not self.writes:
                if indexed:
                    d = self.out.index(label)
                    owners = [(0, b - a) if r == s else (0, 0) for r in range(ranks)]
                    piece = reduce_scatter(Partial(), d, owners, rank, group, piece)
                pieces.append(piece)
        if self.writes:
            return None
        if not pieces:
            meta = self.result.tensor_meta
            return operand(values, self.first).new_zeros(self.result.local_shape(), dtype=meta.dtype)
        if label not in self.out:  # it accumulates
            return sum(pieces[1:], pieces[0])
        return torch.cat(pieces, self.out.index(label)) if len(pieces) > 1 else pieces[0]

    def _on_own(self, values: list[Any], kwargs: dict[str, Any], own: Own) -> Any:
        """The operator on what this rank owns: other entries are read as zeros, and written to a sink."""
        here: Tensor | None = None
        for path, dim in self.indexed.items():
            n, a, b = own[dim]
            index = operand(values, path)
            if self.wraps:
                index = torch.where(index < 0, index + n, index)
            check_range(index, n, dim)
            inside = (index >= a) & (index < b)
            put(values, path, torch.where(inside, index - a, b - a if self.writes else 0))
            if not self.writes:
                labels = list(self.roles[path])
                shape = [inside.shape[labels.index(label)] if label in labels else 1 for label in self.out]
                inside = inside.view(shape)
                here = inside if here is None else here & inside
        if self.writes:
            return in_place_form(self.func)(*values, **kwargs)
        if here is not None:
            table = operand(values, self.first)
            for dim, (_, a, b) in own.items():
                if a == b:  # an entry to read in vain
                    row = table.new_zeros([1 if k == dim else n for k, n in enumerate(table.shape)])
                    table = torch.cat([table, row], dim)
            put(values, self.first, table)
        result = self.func(*values, **kwargs)
        if here is None:
            return result
        # Not by a product: what is read in vain may be infinite.
        return torch.where(here, result, -0.0 if result.is_floating_point() or result.is_complex() else 0).to(
            result.dtype
        )


def check_range(index: Tensor, n: int, dim: int) -> None:
    """Raise where an index is not in ``0..n``; ranks that hold the same index do so alike.

    Raises:
        IndexError: on the CPU, RuntimeError in a compiled graph. Other devices report it as for torch's own kernels.
    """
    inside = ((index >= 0) & (index < n)).all()
    if is_traced(index) or index.device.type != "cpu":
        torch.ops.aten._assert_async.msg(inside, f"an index is out of range for dimension {dim} with size {n}")
    elif not bool(inside):
        raise IndexError(f"an index is out of range for dimension {dim} with size {n}")
