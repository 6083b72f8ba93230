"""How the operands of operators that read and write by index are laid out.

Every dim of every operand gets a label. Dims that run together (a batch dim of ``gather``) share one, and the dims that
are indexed have one that no other operand has. The layout follows, mesh dim by mesh dim:

- The first operand, which is read or written, decides: where it is sharded along a label, all that have the label
  are sharded alike. A dim that is indexed may be sharded, too. Where the first operand is replicated, the others
  decide.
- Operands that are sharded but lack the label *are broadcast*, one shard at a time: each rank's block goes to all,
  so that nobody holds more than one block of another rank. The blocks' boundaries follow from the specs. Where an
  index can be looked at, only rows that it names travel, see row_work.py.
- Where nothing is broadcast, nothing is sent.
- What accumulates (a sum, a product, an extreme) *is contributed to*: each rank reduces its own part of the others
  into a neutral tensor, and the ranks reduce these. If the first operand is replicated, the result is a Partial. If
  its dim that is indexed is sharded, the contributions are sent to its owners where that is less than to broadcast
  the others.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from ..._compat import OpOverload
from ...dispatch.planning import AtenCall, Path, is_inplace, meta_of, operand
from ...errors import UnsupportedSharding
from ...layout.intervals import boundaries_of, map_boundaries, sizes_of
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec

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
    """The labels of one call, and what happens on each mesh dim; the arguments are those of ``labelled``.

    Attributes:
        layouts: the specs that the operands need, plain ones too (:meth:`settle` fills this and ``result`` in).
        result: the spec of what is returned.
    """

    layouts: dict[Path, ShardTensorSpec]
    result: ShardTensorSpec

    def __init__(
        self,
        call: AtenCall,
        roles: Mapping[Path, Labels],
        out: Labels,
        indexed: Mapping[Path, int],
        accumulates: str | None,
        writes: bool,
        wraps: bool,
    ) -> None:
        self.call, self.roles, self.out, self.indexed = call, roles, out, indexed
        self.accumulates, self.writes, self.wraps = accumulates, writes, wraps
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
            f"the index reads or writes along tensor dim {dim} of operand {path[0]}, which mesh dim {m} shards",
            "redistribute to shard another dim",
        )

    def spread(self, m: int) -> None:
        """Shard a large result, instead of leaving it Partial.

        A Partial is as large as the result on every rank. If that is more than an even shard of what is read, the
        result is sharded along the longest dim that it has of the index, in the proportions of the dim that is indexed.
        """
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

    def settle(self) -> None:
        """Work out the layouts of the operands and of the result, from what happens on each mesh dim."""
        self.layouts, meta = {path: self.target(path) for path in self.roles}, meta_of(self.call.meta)
        if self.writes and self.first in self.call.tensors:
            self.result = self.layouts[self.first].replace(meta=meta)
        else:
            self.result = self.call.specs[0].with_layout([self._result_axis(m) for m in range(self.mesh.ndim)], meta)

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


# -- arguments and forms of the operators ---


def put(values: list[Any], path: Path, value: Any) -> None:
    for step in path[:-1]:
        values = values[step]
    values[path[-1]] = value


def copied(args: Sequence[Any]) -> list[Any]:
    return [list(a) if isinstance(a, (list, tuple)) else a for a in args]


_PLAIN_FORM = {"_unsafe_index_put": "index_put", "_index_put_impl_": "index_put_"}


def in_place_form(func: OpOverload) -> OpOverload:
    """The form of an operator that writes into its first argument."""
    if is_inplace(func):
        return func
    name = func._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, _PLAIN_FORM.get(name, name) + "_")
    form: OpOverload = getattr(packet, func._schema.overload_name or "default")
    return form
