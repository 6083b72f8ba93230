"""How the operands of operators that read and write by index are laid out.

Every dim of every operand has a label, see common/named_dims.py. Dims that run together (a batch dim of ``gather``)
share one, and the dims that are indexed have one that no other operand has. What may be done on a mesh dim is this:

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

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from ..._compat import OpOverload
from ...dispatch.planning import AtenCall, Path, is_inplace, meta_of, operand, replicated_spec
from ...layout.intervals import clipped, map_boundaries
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ..common.alignment import is_little
from ..common.named_dims import Along, Axis, Choice, Form, Labels, Option, arrange

_BLOCKS = 8  # times a result, that travel for it to be sharded
INDEXED = "indexed"  # the label of a dim that is indexed; None is that of a dim of length 1 that is expanded


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

    @staticmethod
    def of(axis: Axis | None) -> IndexedAxis:
        """What happens where a mesh dim shards so; labels of dims that are indexed are ``(INDEXED, dim)``."""
        if axis is None:
            return IndexedAxis()
        if (dim := _indexed_dim(axis.along)) is not None:
            return IndexedAxis(indexed=dim, broadcast=axis.sent)
        if (dim := _indexed_dim(axis.sent)) is not None:
            return IndexedAxis(axis.along, dim, contributes=True)
        return IndexedAxis(axis.along, broadcast=axis.sent)

    def taken(self) -> list[Hashable]:
        return [along.label for along in (self.along, self.broadcast) if along is not None]


def _numbered(labels: Labels) -> Labels:
    """The labels of the first operand or the result, each once."""
    return tuple((INDEXED, d) if label == INDEXED else label for d, label in enumerate(labels))


def _indexed_dim(along: Along | None) -> int | None:
    """The dim of the first operand that is sharded so, if it is one that is indexed."""
    label: Any = None if along is None else along.label
    return label[1] if isinstance(label, tuple) else None


@dataclass(frozen=True, slots=True)
class _AsFirst:
    """The first operand stays as it is; those without its label are broadcast, or contribute to it.

    Attributes:
        writes, accumulates: whether the operator writes to the first operand, and whether it accumulates.
    """

    writes: bool
    accumulates: bool

    def __call__(self, choice: Choice) -> Iterator[Option]:
        held, terms = choice.held, choice.form.terms
        for along in choice.offered():
            lacking = {i: own for i, own in held.items() if along.label not in terms[i]}
            splits = 0 in held or self.accumulates or along.label in choice.form.out
            if not lacking:
                yield Option(Axis(along) if splits else Axis(None, along))
                continue
            # Of each label with the sizes of the first one: an index that stays need not be looked at again.
            firsts: dict[Hashable, Along] = {}
            for own in lacking.values():
                firsts.setdefault(own.label, own)
            for blocks in firsts.values():
                if splits and choice.may_shard(blocks.label) and all(blocks.label in terms[i] for i in lacking):
                    yield Option(Axis(along, blocks))
                    contributed = _indexed_dim(along) is not None and blocks.label not in terms[0]
                    if self.writes and self.accumulates and contributed:
                        yield Option(Axis(blocks, along))


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
        plain = {path: operand(call.args, path) for path in roles if path not in call.tensors}
        self.specs = {
            path: replicated_spec(self.mesh, meta_of(plain[path])) if path in plain else call.tensors[path]
            for path in roles
        }
        lengths: dict[Hashable, list[int]] = {}
        for path, labels in roles.items():
            for label, n in zip(labels, self.specs[path].shape, strict=True):
                lengths.setdefault(label, []).append(n)
        self.longest = {label: max(ns) for label, ns in lengths.items()}
        self.shortest = {label: min(ns) for label, ns in lengths.items()}
        read, *others = roles.values()
        terms = (_numbered(read), *map(tuple, others))
        form = Form(terms, _numbered(out), ways=(_AsFirst(writes, bool(accumulates)),), leaders=1)
        how = arrange(call.func, form, tuple(self.specs.values()))
        self.layouts = dict(zip(roles, how.targets, strict=True))
        self.axes = [IndexedAxis.of(axis) for axis in how.axes]

    def spread(self, m: int) -> None:
        """Shard a large result, instead of leaving it Partial.

        A Partial is as large as the result on every rank, and each does alike what follows. So the result is sharded
        along the longest dim that it has of the index, in the proportions of the dim that is indexed, if it is more
        than an even shard of what is read; or if it takes longer to send than an exchange does, and the entries are
        rows, or enough of what is read for blocks of that to travel (tokens that are kept of an image's).
        """
        axis, ranks = self.axes[m], self.mesh.size(m)
        if axis.indexed is None or axis.broadcast is not None:
            return
        spec, entries = self.specs[self.first], self.call.meta.numel()
        taken = {label for axis in self.axes for label in axis.taken()}
        index_labels = {label for path in self.roles if path != self.first for label in self.roles[path]}
        free = [label for label in self.out if label in index_labels and label is not None and label not in taken]
        if entries * ranks <= spec.shape.numel():
            read = set(self.roles[self.first])
            if is_little(spec, entries) or (read & index_labels and spec.shape.numel() > _BLOCKS * entries):
                return
            free = [label for label in free if label not in read and self.shortest[label] >= ranks]
        if free:
            label = max(free, key=lambda label: self.shortest[label])
            n = self.longest[label]
            total = max(1, spec.shape[axis.indexed])
            sizes = map_boundaries(spec.sizes_along(m), lambda b: b * n // total)
            axis.broadcast = Along(label, clipped(sizes, n))

    def settle(self) -> None:
        """Work out the layouts of the first operand and of the result, from what happens on each mesh dim."""
        meta, first = meta_of(self.call.meta), self.layouts[self.first]
        replicated = [m for m, p in enumerate(first.placements) if p.is_replicate()]
        self.layouts[self.first] = first.with_axes({m: self._first_axis(self.axes[m]) for m in replicated})
        if self.writes and self.first in self.call.tensors:
            self.result = self.layouts[self.first].replace(meta=meta)
        else:
            self.result = self.call.specs[0].with_layout([self._result_axis(m) for m in range(self.mesh.ndim)], meta)

    def _first_axis(self, axis: IndexedAxis) -> AxisLayout:
        """Where the first operand is not sharded."""
        if axis.keeps is not None:
            return AxisLayout(axis.keeps)
        summed = axis.along is not None and axis.along.label not in self.out
        return AxisLayout(Partial(self.accumulates or "sum") if summed else Replicate())

    def _result_axis(self, m: int) -> AxisLayout:
        axis, out = self.axes[m], list(self.out)
        split = axis.along if axis.indexed is None else axis.broadcast
        if split is not None and split.label in out:
            dim = out.index(split.label)
            return AxisLayout(Shard(dim), clipped(split.sizes, self.call.meta.shape[dim]))
        if split is not None or (axis.indexed is not None and self.mesh.size(m) > 1):
            return AxisLayout(Partial(self.accumulates or "sum"))
        return AxisLayout(Replicate() if axis.keeps is None else axis.keeps)


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
