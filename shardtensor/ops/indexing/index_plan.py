"""Plans of operators that read and write by index, and what each rank does with its part of the operands.

[Note: own entries] Where a dim that is indexed is sharded, each rank answers for the entries that it owns. Reading, it
contributes zeros for the others: the result is a Partial, or is summed at the owner of the block that is broadcast.
(The zeros are negative ones, the neutral element of floating-point addition, so that every value comes out as it was.)
Writing, the others' entries go to a sink, one more index at the end of a copy of the shard.

[Note: contributions] Where a rank has its own part of what is added to a sharded dim, it adds that into a block that is
neutral, and the blocks are reduced at their owners: all in one exchange if together they are no larger than the part,
and otherwise owner by owner, so that no rank holds more than one block of another rank.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from ..._compat import OpOverload
from ..._compat.c10d import group_along
from ...communication.exchange import plan_intervals
from ...communication.halo import Axis, Fetch
from ...communication.redistribute import redistribute_local, reduce_scatter
from ...communication.tracing import is_traced
from ...dispatch.planning import AtenCall, AtenPlan, Path, is_inplace, meta_of
from ...errors import PLAIN_TARGET, UnsupportedSharding
from ...layout.geometry import boundaries_of, intervals_of, map_boundaries, sizes_of
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ..common.reduce import neutral_element

# -- index layout ------------------------------------------------------------------------------------------------------

# How the operands of operators that read and write by index are laid out.
#
# [Note: labels] Every dim of every operand gets a label; dims that run together (a batch dim of ``gather``) share one,
# and the dims that are indexed have one that no other operand has. The layout follows, mesh dim by mesh dim:
#
# - The first operand, which is read or written, decides: where it is sharded along a label, all that have the label
#   are sharded alike. A dim that is indexed may be sharded, too. Where the first operand is replicated, the others
#   decide.
# - Operands that are sharded but lack the label *are broadcast*, one shard at a time: each rank's block goes to all,
#   so that nobody holds more than one block of another rank. The blocks' boundaries follow from the specs.
# - Where nothing is broadcast, nothing is sent.
# - What accumulates (a sum, a product, an extreme) *is contributed to*: each rank reduces its own part of the others
#   into a neutral tensor, and the ranks reduce these. If the first operand is replicated, the result is a Partial. If
#   its dim that is indexed is sharded, the contributions are sent to its owners where that is less than to broadcast
#   the others.
#
# [Note: large results] A Partial is as large as the result on every rank. If that is more than an even shard of what
# is read, the result is sharded along the longest dim that it has of the index, in the proportions of the dim that is
# indexed, and computed block by block.

Labels = Sequence[Hashable]
INDEXED = "indexed"  # the label of a dim that is indexed; None is that of a dim of length 1 that is expanded

Along = tuple[Hashable, tuple[int, ...]]  # a label, and the shard sizes of the dims that have it


def clipped(sizes: Sequence[int], n: int) -> tuple[int, ...]:
    """Sizes of a dim of length ``n`` that begins like one with ``sizes``; what is beyond belongs to the last rank.

    Example:
        >>> clipped((3, 2, 4), 4), clipped((3, 2), 7)
        ((3, 1, 0), (3, 4))
    """
    return sizes_of([min(b, n) for b in boundaries_of(sizes)[:-1]] + [n])


@dataclass(slots=True)
class IndexedAxis:
    """What happens on one mesh dim.

    Attributes:
        along: the label along which operands are sharded, and the sizes for the longest of them.
        indexed: the dim of the first operand that is sharded here although it is indexed.
        broadcast: the label of the operands that are broadcast block by block, and the blocks' sizes.
        keeps: the placement of a Partial of which entries are picked.
        contributes: the first operand, sharded along ``indexed``, gets what the ranks contribute of ``along``.
    """

    along: Along | None = None
    indexed: int | None = None
    broadcast: Along | None = None
    keeps: Partial | None = None
    contributes: bool = False


class IndexLayout:
    """The labels of one call, and what happens on each mesh dim."""

    def __init__(
        self, call: AtenCall, roles: Mapping[Path, Labels], out: Labels, accumulates: str | None, writes: bool
    ) -> None:
        self.call, self.roles, self.out = call, roles, out
        self.accumulates, self.writes = accumulates, writes
        self.first = next(iter(roles))
        self.mesh = call.specs[0].mesh
        self.specs = {path: call.tensors.get(path) or self._replicated(operand(call.args, path)) for path in roles}
        lengths: dict[Hashable, list[int]] = {}
        for path, labels in roles.items():
            for label, n in zip(labels, self.specs[path].shape, strict=True):
                lengths.setdefault(label, []).append(n)
        self.longest = {label: max(ns) for label, ns in lengths.items()}
        self.shortest = {label: min(ns) for label, ns in lengths.items()}
        self.axes: list[IndexedAxis] = []

    def _replicated(self, plain: Tensor) -> ShardTensorSpec:
        """As what a plain operand counts."""
        return ShardTensorSpec.make(self.mesh, [Replicate()] * self.mesh.ndim, plain.shape, plain.dtype)

    def taken(self) -> list[Hashable]:
        """The labels that mesh dims before have."""
        return [along[0] for axis in self.axes for along in (axis.along, axis.broadcast) if along is not None]

    def choose(self, m: int, reads: bool) -> IndexedAxis:
        """What happens on mesh dim ``m``; ``reads``: a dim that is indexed may be sharded."""
        axis = self._of_first(m, reads)
        for path in list(self.roles)[1:]:
            spec, p = self.specs[path], self.specs[path].placements[m]
            label = self.roles[path][p.dim] if isinstance(p, Shard) else None
            if label is not None and (axis.along is None or axis.along[0] not in self.roles[path]):
                self._add_operand(axis, path, m, (label, clipped(spec.sizes_along(m), self.longest[label])))
        return axis

    def _of_first(self, m: int, reads: bool) -> IndexedAxis:
        """What the first operand decides."""
        spec = self.specs[self.first]
        p = spec.placements[m]
        if not isinstance(p, Shard):
            return IndexedAxis()
        label = self.roles[self.first][p.dim]
        if label != INDEXED:
            return IndexedAxis(along=(label, clipped(spec.sizes_along(m), self.longest[label])))
        if not reads and spec.shape[p.dim] > 1:
            raise self._fixed(self.first, m)
        return IndexedAxis(indexed=p.dim if reads else None)

    def _add_operand(self, axis: IndexedAxis, path: Path, m: int, along: Along) -> None:
        """Let another operand, which is sharded along a label that is not decided yet, have it or be broadcast."""
        label, taken = along[0], self.taken()
        open_ = axis.along is None and axis.indexed is None
        if open_ and (label in self.out or self.accumulates) and label not in taken:
            axis.along = along
        elif axis.along is None and label not in taken and self._contributions_are_less(label):
            axis.along, axis.contributes = along, True
        elif axis.broadcast is None and label not in taken:
            axis.broadcast = along
        elif axis.broadcast is None or axis.broadcast[0] not in self.roles[path]:
            raise self._fixed(path, m)

    def _contributions_are_less(self, label: Hashable) -> bool:
        """Whether the ranks send each other less in contributions to the first operand than in parts of the others."""
        if not self.writes or not self.accumulates or label in self.roles[self.first]:
            return False
        parts = [
            self.specs[path] for path, labels in self.roles.items() if path in self.call.tensors and label in labels
        ]
        return self.specs[self.first].shape.numel() < sum(spec.shape.numel() for spec in parts)

    def _fixed(self, path: Path, m: int) -> UnsupportedSharding:
        dim = next(d for d, k in self.specs[path].sharded_dims().items() if k == m)
        return self.call.refuse(
            f"tensor dim {dim} of operand {path[0]}, sharded on mesh dim {m}, is read or written to by index",
            "redistribute to shard another dim",
        )

    def spread(self, m: int) -> None:
        """See [Note: large results]."""
        axis, ranks = self.axes[m], self.mesh.size(m)
        if axis.indexed is None or axis.broadcast is not None:
            return
        spec = self.specs[self.first]
        if self.call.meta.numel() * ranks <= spec.shape.numel():
            return
        taken = self.taken()
        index_labels = {label for path in self.roles if path != self.first for label in self.roles[path]}
        free = [label for label in self.out if label in index_labels and label is not None and label not in taken]
        if free:
            label = max(free, key=lambda label: self.shortest[label])
            n = self.longest[label]
            total = max(1, spec.shape[axis.indexed])
            axis.broadcast = label, clipped(map_boundaries(spec.sizes_along(m), lambda b: b * n // total), n)

    def target(self, path: Path) -> ShardTensorSpec:
        """The spec that an operand needs."""
        spec = self.specs[path]
        return spec.with_layout([self._target_axis(path, spec, m) for m in range(self.mesh.ndim)])

    def _target_axis(self, path: Path, spec: ShardTensorSpec, m: int) -> AxisLayout:
        axis, labels, is_first = self.axes[m], list(self.roles[path]), path == self.first
        if is_first and axis.indexed is not None:
            return spec.layout[m]
        if axis.along is not None and axis.along[0] in labels:
            return _along(axis.along, labels, spec.shape)
        if axis.broadcast is not None and axis.broadcast[0] in labels and isinstance(spec.placements[m], Shard):
            return _along(axis.broadcast, labels, spec.shape)
        if is_first and axis.keeps is not None:
            return AxisLayout(axis.keeps)
        if is_first and axis.along is not None and axis.along[0] not in self.out:
            return AxisLayout(Partial(self.accumulates or "sum"))
        return AxisLayout(Replicate())

    def result(self) -> ShardTensorSpec:
        """The spec of what is read."""
        base = self.call.specs[0]
        return base.with_layout([self._result_axis(m) for m in range(self.mesh.ndim)], meta_of(self.call.meta))

    def _result_axis(self, m: int) -> AxisLayout:
        axis, out = self.axes[m], list(self.out)
        split = axis.along if axis.indexed is None else axis.broadcast
        if split is not None and split[0] in out:
            return _along(split, out, self.call.meta.shape)
        if split is not None or (axis.indexed is not None and self.mesh.size(m) > 1):
            return AxisLayout(Partial(self.accumulates or "sum"))
        return AxisLayout(Replicate() if axis.keeps is None else axis.keeps)


def _along(along: Along, labels: Sequence[Hashable], shape: Sequence[int]) -> AxisLayout:
    """The layout of a tensor of ``shape``, whose dims have ``labels``, that is sharded along one of them."""
    dim = labels.index(along[0])
    return AxisLayout(Shard(dim), clipped(along[1], shape[dim]))


def operand(args: Sequence[Any], path: Path) -> Any:
    """The argument at ``path``."""
    for step in path:
        args = args[step]
    return args


# -- index plan --------------------------------------------------------------------------------------------------------

# Of dims that are indexed and sharded: the length, and where the part begins and ends that a rank answers for.
Own = dict[int, tuple[int, int, int]]


def _put(values: list[Any], path: Path, value: Any) -> None:
    for step in path[:-1]:
        values = values[step]
    values[path[-1]] = value


def _copied(args: Sequence[Any]) -> list[Any]:
    return [list(a) if isinstance(a, (list, tuple)) else a for a in args]


# -- from labels to a plan -----------------------------------------------------------------------------------


def labelled(
    call: AtenCall,
    roles: dict[Path, Labels],
    out: Labels,
    *,
    indexed: Mapping[Path, int] | None = None,
    writes: bool = False,
    accumulates: str | None = None,
    picks: bool = False,
    wraps: bool = False,
    counts: bool = False,
    in_blocks: bool = True,
) -> AtenPlan:
    """The plan of an operator whose tensors' dims have labels, see [Note: labels].

    Args:
        roles: the labels of each tensor, ShardTensor or plain; the first is the one that is read or written.
        out: those of the result.
        indexed: for each index tensor the dim of the first tensor that it indexes. Without, these must be free.
        writes: the result is the first tensor, changed.
        accumulates: how the operator reduces into its result ("sum", "product", "max", "min"; None: not at all); so
            that labels which the result lacks may be sharded, too.
        picks: the result consists of entries of the first tensor, so that a Partial stays one.
        wraps: negative indices count from the end.
        counts: the result is a sum of what each part of the first tensor gives.
        in_blocks: several calls, each with a part of the index, do the same as one.
    """
    if not roles.keys() >= call.tensors.keys():
        raise call.refuse("a ShardTensor is given by keyword", "give it by position")
    layout = IndexLayout(call, roles, out, accumulates, writes)
    first = layout.first
    for m in range(layout.mesh.ndim):
        layout.axes.append(layout.choose(m, reads=indexed is not None or counts))
    for m, axis in enumerate(layout.axes):
        if not writes:
            layout.spread(m)
        if axis.broadcast is not None and not in_blocks:
            raise call.refuse(
                f"the operands are sharded along different dims on mesh dim {m}, and it cannot work on parts of its "
                "index",
                "shard all operands alike along a dim that is not indexed",
            )
        placement = layout.specs[first].placements[m]
        if picks and isinstance(placement, Partial) and axis.along is None and axis.broadcast is None:
            axis.keeps = placement
    layouts = {path: layout.target(path) for path in roles}
    targets = {path: layouts[path] for path in call.tensors}
    if writes and first in targets:
        result = targets[first].replace(meta=meta_of(call.meta))
    else:
        result = layout.result()
    work: Callable[..., Any] = _IndexWork(layout, layouts, indexed or {}, wraps, result)
    inplace = is_inplace(call.func)
    if inplace:
        _check_written(call, layout, targets)
        if targets[first] != call.tensors[first]:
            work = _written_through(work, first, call.tensors[first], targets.pop(first))
        result = call.tensors[first]
    elif writes and accumulates != "sum" and (reduced := result.for_gradient()) != result:
        # At once, as torch's formulas for gradients read the result.
        work, result = _reduced(work, result, reduced), reduced
    return call.plan(result, targets, call=work, returns_self=inplace)


def _written_through(
    work: Callable[..., Tensor], first: Path, whole: ShardTensorSpec, partial: ShardTensorSpec
) -> Callable[..., Tensor]:
    """An in-place operator on a replicated tensor to which the ranks contribute: it gets what these amount to."""

    def write(*args: Any, **kwargs: Any) -> Tensor:
        values = _copied(args)
        target = operand(values, first)
        _put(values, first, redistribute_local(target, whole, partial))
        written: Tensor = target.copy_(redistribute_local(work(*values, **kwargs), partial, whole))
        return written

    return write


def _reduced(work: Callable[..., Tensor], partial: ShardTensorSpec, whole: ShardTensorSpec) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: redistribute_local(work(*args, **kwargs), partial, whole)


def _check_written(call: AtenCall, layout: IndexLayout, targets: Mapping[Path, ShardTensorSpec]) -> None:
    """UnsupportedSharding where what is written to would have to be another tensor."""
    first = layout.first
    if first not in call.tensors:
        raise call.refuse(*PLAIN_TARGET)
    # A replicated tensor may be contributed to.
    pairs = zip(call.tensors[first].layout, targets[first].layout, strict=True)
    if not all(own == new or (own.placement.is_replicate() and new.placement.is_partial()) for own, new in pairs):
        raise call.refuse(
            "what is written is sharded otherwise than the tensor it is written to",
            "use the out-of-place form, or redistribute first",
        )


class _IndexWork:
    """What a rank does with its local tensors."""

    def __init__(
        self,
        layout: IndexLayout,
        layouts: Mapping[Path, ShardTensorSpec],
        indexed: Mapping[Path, int],
        wraps: bool,
        result: ShardTensorSpec,
    ) -> None:
        self.func, self.roles, self.out, self.first = layout.call.func, layout.roles, list(layout.out), layout.first
        self.writes, self.wraps, self.result = layout.writes, wraps, result
        self.accumulates = layout.accumulates
        self.coordinate, self.mesh = result.coordinate, layout.mesh
        self.shortest = layout.shortest
        self.axes = layout.axes
        self.inplace = is_inplace(self.func)
        # What of a plain tensor this rank works on: ``(path, dim, start, stop)``.
        self.narrowings = [
            (path, d, *spec.interval(m))
            for path, spec in layouts.items()
            for d, m in spec.sharded_dims().items()
            if path not in layout.call.tensors
        ]
        # What this rank owns; and the index tensors that index it.
        spec = layout.call.tensors.get(self.first)
        self.own: Own = {}
        for m, axis in enumerate(self.axes):
            if axis.indexed is not None and spec is not None:
                self.own[axis.indexed] = (spec.shape[axis.indexed], *spec.interval(m))
        self.indexed = {path: dim for path, dim in indexed.items() if dim in self.own}
        self.contributed = [m for m, axis in enumerate(self.axes) if axis.contributes]
        self.blocks = {m: intervals_of(spec.sizes_along(m)) for m in self.contributed if spec is not None}
        self.at_once = [m for m in self.contributed if self._fits_a_shard(layout.call, m)]
        # The value is on the first rank; a plain tensor is on all.
        summed = [m for m, axis in enumerate(self.axes) if axis.along is not None and axis.along[0] not in self.out]
        self.starts_neutral = self.writes and spec is None and any(self.coordinate[m] for m in summed)
        self.broadcast = {m: axis.broadcast for m, axis in enumerate(self.axes) if axis.broadcast is not None}
        # Which operands are sharded along what is broadcast on a mesh dim, and each rank's interval.
        self.held = {
            (path, m): intervals_of(spec.sizes_along(m))
            for path, spec in layouts.items()
            for d, m in spec.sharded_dims().items()
            if m in self.broadcast and self.roles[path][d] == self.broadcast[m][0]
        }

    def _fits_a_shard(self, call: AtenCall, m: int) -> bool:
        """Whether contributions to all ranks are no larger than the shard that they are made of."""
        along = self.axes[m].along
        parts = [spec for path, spec in call.tensors.items() if along is not None and along[0] in self.roles[path]]
        largest = max(spec.shape.numel() for spec in parts)
        return call.tensors[self.first].shape.numel() * self.mesh.size(m) <= largest

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values = _copied(args)
        for path, d, a, b in self.narrowings:
            _put(values, path, operand(values, path).narrow(d, a, b - a))
        if not self.writes:
            return self._in_blocks([*self.broadcast], values, kwargs, self.own)
        if self.starts_neutral:
            plain = operand(values, self.first)
            _put(values, self.first, torch.full_like(plain, neutral_element(self.accumulates or "sum", plain.dtype)))
        if not self.own and not self.broadcast:
            return self.func(*values, **kwargs)
        target = operand(values, self.first)
        written = self._contributions(self.contributed, values, kwargs, self.own)
        if self.inplace:
            return target if written is target else target.copy_(written)
        return written.contiguous()

    def _contributions(self, mesh_dims: Sequence[int], values: list[Any], kwargs: dict[str, Any], own: Own) -> Tensor:
        """What is written to, with what all ranks contribute to this rank's part of it, see [Note: contributions]."""
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
            part = _copied(values)
            _put(part, self.first, room)
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
        values = _copied(values)
        _put(values, self.first, room)
        self._in_blocks([*self.broadcast], values, kwargs, own)
        for d in own:
            room = room.narrow(d, 0, room.shape[d] - 1)
        return room

    def _in_blocks(self, mesh_dims: Sequence[int], values: list[Any], kwargs: dict[str, Any], own: Own) -> Any:
        """The operator, once for each combination of blocks."""
        if not mesh_dims:
            return self._on_own(_copied(values), kwargs, own)
        m = mesh_dims[0]
        label, sizes = self.broadcast[m]
        ranks, rank, group = self.mesh.size(m), self.coordinate[m], group_along(self.mesh, m)
        indexed = self.axes[m].indexed is not None
        pieces: list[Tensor] = []
        for s, (a, b) in enumerate(intervals_of(clipped(sizes, self.shortest[label]))):
            if a == b:
                continue
            part = _copied(values)
            for path, labels in self.roles.items():
                if label not in labels:
                    continue
                d, value = list(labels).index(label), operand(values, path)
                if (path, m) in self.held:
                    transfers = plan_intervals(self.held[path, m], ((a, b),) * ranks, rank)
                    block = Fetch([Axis(d, m, transfers)], self.mesh, value.shape).read(value)[0]
                else:
                    block = value.narrow(d, a, b - a)
                _put(part, path, block)
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
        """The operator on what this rank owns, see [Note: own entries]."""
        here: Tensor | None = None
        for path, dim in self.indexed.items():
            n, a, b = own[dim]
            index = operand(values, path)
            if self.wraps:
                index = torch.where(index < 0, index + n, index)
            check_range(index, n, dim)
            inside = (index >= a) & (index < b)
            _put(values, path, torch.where(inside, index - a, b - a if self.writes else 0))
            if not self.writes:
                labels = list(self.roles[path])
                shape = [inside.shape[labels.index(label)] if label in labels else 1 for label in self.out]
                inside = inside.view(shape)
                here = inside if here is None else here & inside
        if self.writes:
            return _in_place(self.func)(*values, **kwargs)
        if here is not None:
            table = operand(values, self.first)
            for dim, (_, a, b) in own.items():
                if a == b:  # an entry to read in vain
                    row = table.new_zeros([1 if k == dim else n for k, n in enumerate(table.shape)])
                    table = torch.cat([table, row], dim)
            _put(values, self.first, table)
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


_PLAIN_FORM = {"_unsafe_index_put": "index_put", "_index_put_impl_": "index_put_"}


def _in_place(func: OpOverload) -> OpOverload:
    """The form of an operator that writes into its first argument."""
    if is_inplace(func):
        return func
    name = func._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, _PLAIN_FORM.get(name, name) + "_")
    form: OpOverload = getattr(packet, func._schema.overload_name or "default")
    return form
