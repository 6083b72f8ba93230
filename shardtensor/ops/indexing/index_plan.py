"""How operands of operators that look up and write by index lie beside each other, and what is passed round.

[Note: labels] Every dim of every operand gets a label; dims that run together (a batch dim of ``gather``) share one,
and the dims that are looked into have one that no other operand knows. The layout follows, mesh dim by mesh dim:

- The first operand, which is read or written, decides: where it is cut along a label, all that have the label are cut
  alike. A dim that is looked into may be cut, too. Where the first operand is whole, the others decide.
- Operands that are cut but lack the label *are passed round*: block by block, each rank's block goes to all, so that
  nobody holds more than one block of what is not its own. Block boundaries follow from the specs.
- Where nothing is passed, nothing travels.

[Note: own entries] Where a dim that is looked into is cut, each rank answers for the entries that it owns. Reading, it
contributes zeros for the others: the result is a Partial, or is summed at the owner of the block that is passed round.
(The zeros are negative ones, the neutral element of floating-point addition, so that every value comes out as it was.)
Writing, the others' entries go to a sink, one more index at the end of a copy of the shard.

[Note: large results] A Partial is as large as the result on every rank. If that is more than an even shard of what is
read, the result is cut along the longest dim that it has of the index, in the proportions of the dim that is looked
into, and computed block by block.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from ...geometry import cuts_of, intervals_of, map_cuts, sizes_of
from ...planning import Call, Path, Plan, is_inplace, meta_of
from ...redistribute import move_intervals, reduce_scatter
from ...spec import ShardTensorSpec
from ...tracing import is_traced

__all__ = ["LOOKED_UP", "Labels", "clipped", "labelled"]

Labels = Sequence[Hashable]
LOOKED_UP = "looked up"  # the label of what is indexed; None is that of a dim of length 1 that is broadcast

Cut = tuple[Hashable, tuple[int, ...]]


def clipped(sizes: Sequence[int], n: int) -> tuple[int, ...]:
    """Sizes of a dim of length ``n`` that begins like one with ``sizes``; what is beyond belongs to the last rank.

    Example:
        >>> clipped((3, 2, 4), 4), clipped((3, 2), 7)
        ((3, 1, 0), (3, 4))
    """
    return sizes_of([min(c, n) for c in cuts_of(sizes)[:-1]] + [n])


@dataclass(slots=True)
class _MeshDim:
    """What happens on one mesh dim.

    Attributes:
        cut: the label along which operands are cut, and the sizes for the longest of them.
        looked: the dim of the first operand that is cut here although it is looked into.
        passed: the label of the operands that are passed round, and their sizes.
        keeps: the placement of a Partial that is picked from.
    """

    cut: Cut | None = None
    looked: int | None = None
    passed: Cut | None = None
    keeps: Any = None


class _Layout:
    """The labels of one call, and what happens on each mesh dim."""

    def __init__(self, call: Call, roles: dict[Path, Labels], out: Labels, accumulates: bool, writes: bool) -> None:
        self.call, self.roles, self.out = call, roles, out
        self.accumulates, self.writes = accumulates, writes
        self.first = next(iter(roles))
        self.mesh = call.specs[0].mesh
        lengths: dict[Hashable, list[int]] = {}
        for path, labels in roles.items():
            for label, n in zip(labels, operand(call.args, path).shape, strict=True):
                lengths.setdefault(label, []).append(n)
        self.longest = {label: max(ns) for label, ns in lengths.items()}
        self.shortest = {label: min(ns) for label, ns in lengths.items()}
        self.dims: list[_MeshDim] = []

    def sharded(self, path: Path, m: int) -> Cut | None:
        """The label along which mesh dim ``m`` cuts an operand, if it does."""
        spec = self.call.tensors.get(path)
        p = spec.placements[m] if spec is not None else None
        if spec is None or not isinstance(p, Shard):
            return None
        return self.roles[path][p.dim], spec.cut(m)

    def choose(self, m: int, looks: bool) -> _MeshDim:
        """What happens on mesh dim ``m``; ``looks``: a dim that is looked into may be cut."""
        call, first, here = self.call, self.first, _MeshDim()
        taken = [c[0] for other in self.dims for c in (other.cut, other.passed) if c is not None]
        own = self.sharded(first, m)
        if own is not None and own[0] == LOOKED_UP:
            dim = call.tensors[first].placements[m].dim  # type: ignore[attr-defined]
            if looks:
                here.looked = dim
            elif call.tensors[first].shape[dim] > 1:
                raise self._fixed(first, m)
        elif own is not None:
            here.cut = own[0], clipped(own[1], self.longest[own[0]])
        for path in list(self.roles)[1:]:
            found = self.sharded(path, m)
            if found is None or found[0] is None or (here.cut is not None and here.cut[0] in self.roles[path]):
                continue
            # What is added to has to be whole on one rank and zero on the others: not so if it is plain.
            adds = self.accumulates and (first in call.tensors or found[0] in self.roles[first])
            whole = here.cut is None and here.looked is None
            if whole and (found[0] in self.out or adds) and found[0] not in taken:
                here.cut = found[0], clipped(found[1], self.longest[found[0]])
            elif here.passed is None and found[0] not in taken:
                here.passed = found[0], clipped(found[1], self.longest[found[0]])
            elif here.passed is None or here.passed[0] not in self.roles[path]:
                raise self._fixed(path, m)
        return here

    def _fixed(self, path: Path, m: int) -> Exception:
        dim = self.call.tensors[path].placements[m].dim  # type: ignore[attr-defined]
        return self.call.refuse(
            f"tensor dim {dim} of operand {path[0]}, sharded on mesh dim {m}, is looked up or written to by index",
            "redistribute to shard another dim",
        )

    def spread(self, m: int) -> None:
        """See [Note: large results]."""
        here, ranks = self.dims[m], self.mesh.size(m)
        if here.looked is None or here.passed is not None:
            return
        spec = self.call.tensors[self.first]
        if self.call.meta.numel() * ranks <= spec.shape.numel():
            return
        taken = [c[0] for other in self.dims for c in (other.cut, other.passed) if c is not None]
        index_labels = {label for path in self.roles if path != self.first for label in self.roles[path]}
        free = [label for label in self.out if label in index_labels and label is not None and label not in taken]
        if free:
            label = max(free, key=lambda label: self.shortest[label])
            n = self.longest[label]
            total = max(1, spec.shape[here.looked])
            here.passed = label, clipped(map_cuts(spec.cut(m), lambda c: c * n // total), n)

    def target(self, path: Path) -> ShardTensorSpec:
        """How an operand has to lie."""
        spec, labels = self.call.tensors[path], list(self.roles[path])
        placements: list[Any] = []
        sizes: list[Any] = []
        for m, here in enumerate(self.dims):
            p, size = Replicate(), None
            if path == self.first and here.looked is not None:
                p, size = spec.placements[m], spec.sizes[m]
            elif here.cut is not None and here.cut[0] in labels:
                p = Shard(labels.index(here.cut[0]))
                size = clipped(here.cut[1], spec.shape[p.dim])
            elif here.passed is not None and here.passed[0] in labels and isinstance(spec.placements[m], Shard):
                p = Shard(labels.index(here.passed[0]))
                size = clipped(here.passed[1], spec.shape[p.dim])
            elif path == self.first and here.keeps is not None:
                p = here.keeps
            elif path == self.first and here.cut is not None and here.cut[0] not in self.out:
                p = Partial()
            placements.append(p)
            sizes.append(size)
        return spec.replace(placements=placements, sizes=tuple(sizes))

    def result(self) -> ShardTensorSpec:
        """How the result of a lookup lies."""
        meta, out = self.call.meta, list(self.out)
        placements: list[Any] = []
        sizes: list[Any] = []
        for m, here in enumerate(self.dims):
            p, size = Replicate(), None
            split = here.cut if here.looked is None else here.passed
            if split is not None and split[0] in out:
                p = Shard(out.index(split[0]))
                size = clipped(split[1], meta.shape[p.dim])
            elif split is not None or (here.looked is not None and self.mesh.size(m) > 1):
                p = Partial()
            elif here.keeps is not None:
                p = here.keeps
            placements.append(p)
            sizes.append(size)
        return ShardTensorSpec(self.mesh, placements, meta_of(meta), tuple(sizes))


def operand(args: Any, path: Path) -> Any:
    """The argument at ``path``."""
    for step in path:
        args = args[step]
    return args


def _put(values: list[Any], path: Path, value: Any) -> None:
    for step in path[:-1]:
        values = values[step]
    values[path[-1]] = value


def _copied(args: Sequence[Any]) -> list[Any]:
    return [list(a) if isinstance(a, (list, tuple)) else a for a in args]


# -- from labels to a plan -----------------------------------------------------------------------------------


def labelled(
    call: Call,
    roles: dict[Path, Labels],
    out: Labels,
    *,
    indexed: Mapping[Path, int] | None = None,
    writes: bool = False,
    accumulates: bool = False,
    picks: bool = False,
    wraps: bool = False,
    counts: bool = False,
    in_blocks: bool = True,
) -> Plan:
    """The plan of an operator whose tensors' dims have labels, see [Note: labels].

    Args:
        roles: the labels of each tensor, ShardTensor or plain; the first is the one that is read or written.
        out: those of the result.
        indexed: for each index tensor the dim of the first tensor that it looks into. Without, these must be whole.
        writes: the result is the first tensor, changed.
        accumulates: the operator adds into its result, so that labels which the result lacks may be cut, too.
        picks: the result consists of entries of the first tensor, so that a Partial stays one.
        wraps: negative indices count from the end.
        counts: the result is a sum of what each part of the first tensor gives.
        in_blocks: several calls, each with a part of the index, do the same as one.
    """
    if not roles.keys() >= call.tensors.keys():
        raise call.refuse("a ShardTensor is given by keyword", "give it by position")
    layout = _Layout(call, roles, out, accumulates, writes)
    first, mesh = layout.first, layout.mesh
    for m in range(mesh.ndim):
        layout.dims.append(layout.choose(m, looks=indexed is not None or counts))
    for m, here in enumerate(layout.dims):
        if not writes:
            layout.spread(m)
        if here.passed is not None and not in_blocks:
            raise call.refuse(
                f"the operands are cut along different dims on mesh dim {m}, and it cannot work on parts of its index",
                "shard all operands alike along a dim that is not indexed",
            )
        spec = call.tensors.get(first)
        if picks and spec is not None and spec.placements[m].is_partial() and here.cut is None and here.passed is None:
            here.keeps = spec.placements[m]
    targets = {path: layout.target(path) for path in call.tensors}
    inplace = is_inplace(call.func)
    if inplace and (first not in call.tensors or targets[first] != call.tensors[first]):
        reason = "a ShardTensor cannot be written into a plain tensor"
        if first in call.tensors:
            reason = "what is written is cut otherwise than the tensor it is written to"
        raise call.refuse(reason, "use the out-of-place form, or redistribute first")
    if writes:
        result = targets[first].replace(meta=meta_of(call.meta)) if first in targets else layout.result()
    else:
        result = layout.result()
    work = _Work(layout, dict(indexed or {}), wraps, result)
    return call.plan(result, targets, call=work, returns_self=inplace)


class _Work:
    """What a rank does with its local tensors."""

    def __init__(
        self, layout: _Layout, indexed: Mapping[Path, int], wraps: bool, result: ShardTensorSpec
    ) -> None:
        self.func, self.roles, self.out, self.first = layout.call.func, layout.roles, list(layout.out), layout.first
        self.writes, self.wraps, self.result = layout.writes, wraps, result
        self.coordinate, self.mesh = result.coordinate, layout.mesh
        self.shortest = layout.shortest
        self.dims = layout.dims
        call = layout.call
        self.inplace = is_inplace(call.func)
        # What of a plain tensor this rank works on.
        self.cuts: list[tuple[Path, int, int, int]] = []
        for m, here in enumerate(self.dims):
            for path, labels in self.roles.items():
                if here.cut is not None and path not in call.tensors and here.cut[0] in labels:
                    d = list(labels).index(here.cut[0])
                    sizes = clipped(here.cut[1], operand(call.args, path).shape[d])
                    a, b = intervals_of(sizes)[self.coordinate[m]]
                    self.cuts.append((path, d, a, b - a))
        # Of the dims that are looked into and cut: the length, the own part; and the index tensors that look there.
        spec = call.tensors.get(self.first)
        self.own: dict[int, tuple[int, int, int]] = {}
        for m, here in enumerate(self.dims):
            if here.looked is not None and spec is not None:
                self.own[here.looked] = (spec.shape[here.looked], *spec.interval(m))
        self.indexed = {path: dim for path, dim in indexed.items() if dim in self.own}
        self.passing = [m for m, here in enumerate(self.dims) if here.passed is not None]
        # Which operands are cut along what is passed round, and how.
        self.held: dict[tuple[Path, int], tuple[tuple[int, int], ...]] = {}
        for m in self.passing:
            label, sizes = self.dims[m].passed  # type: ignore[misc]
            for path, labels in self.roles.items():
                spec = call.tensors.get(path)
                cut = self.dims[m].cut
                if spec is None or (path == self.first and self.dims[m].looked is not None):
                    continue
                if isinstance(spec.placements[m], Shard) and label in labels and not (cut and cut[0] in labels):
                    d = list(labels).index(label)
                    self.held[path, m] = intervals_of(clipped(sizes, spec.shape[d]))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values = _copied(args)
        for path, d, a, n in self.cuts:
            _put(values, path, operand(values, path).narrow(d, a, n))
        if not self.writes:
            return self._passed_round(self.passing, values, kwargs)
        if not self.own and not self.passing:
            return self.func(*values, **kwargs)
        target = operand(values, self.first)
        room = target if self.inplace and not self.own else target.clone()
        for d in self.own:  # the sink
            row = room.new_zeros([1 if k == d else n for k, n in enumerate(room.shape)])
            room = torch.cat([room, row], d)
        _put(values, self.first, room)
        self._passed_round(self.passing, values, kwargs)
        for d in self.own:
            room = room.narrow(d, 0, room.shape[d] - 1)
        if self.inplace:
            return target if room is target else target.copy_(room)
        return room.contiguous()

    def _passed_round(self, passing: Sequence[int], values: list[Any], kwargs: dict[str, Any]) -> Any:
        """The operator, once for each combination of blocks."""
        if not passing:
            return self._on_own(_copied(values), kwargs)
        m = passing[0]
        label, sizes = self.dims[m].passed  # type: ignore[misc]
        ranks, rank, group = self.mesh.size(m), self.coordinate[m], self.mesh.get_group(m)
        looked = self.dims[m].looked is not None
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
                    block = move_intervals(value, d, self.held[path, m], [(a, b)] * ranks, rank, group)
                else:
                    block = value.narrow(d, a, b - a)
                _put(part, path, block)
            piece = self._passed_round(passing[1:], part, kwargs)
            if not self.writes:
                if looked:
                    d = self.out.index(label)
                    owners = [(0, b - a) if r == s else (0, 0) for r in range(ranks)]
                    piece = reduce_scatter(piece, Partial(), d, owners, rank, group)
                pieces.append(piece)
        if self.writes:
            return None
        if not pieces:
            meta = self.result.tensor_meta
            return operand(values, self.first).new_zeros(self.result.local_shape(), dtype=meta.dtype)
        if label not in self.out:  # it accumulates
            return sum(pieces[1:], pieces[0])
        return torch.cat(pieces, self.out.index(label)) if len(pieces) > 1 else pieces[0]

    def _on_own(self, values: list[Any], kwargs: dict[str, Any]) -> Any:
        """The operator on what this rank owns, see [Note: own entries]."""
        here: Tensor | None = None
        for path, dim in self.indexed.items():
            n, a, b = self.own[dim]
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
            for dim, (_, a, b) in self.own.items():
                if a == b:  # an entry to look up in vain
                    row = table.new_zeros([1 if k == dim else n for k, n in enumerate(table.shape)])
                    table = torch.cat([table, row], dim)
            _put(values, self.first, table)
        result = self.func(*values, **kwargs)
        if here is None:
            return result
        # Not by a product: what is looked up in vain may be infinite.
        return torch.where(here, result, -0.0 if result.is_floating_point() or result.is_complex() else 0).to(
            result.dtype
        )


def check_range(index: Tensor, n: int, dim: int) -> None:
    """Raise where an index is not in ``0..n``; ranks that hold the same index do so alike.

    Raises:
        IndexError: on the CPU, RuntimeError in a compiled graph. Other devices report it as for torch's own kernels.
    """
    inside = ((index >= 0) & (index < n)).all()
    if is_traced(index):
        torch.ops.aten._assert_async.msg(inside, f"an index is out of range for dimension {dim} with size {n}")
    elif index.device.type != "cpu":
        torch.ops.aten._assert_async.default(inside)
    elif not bool(inside):
        raise IndexError(f"an index is out of range for dimension {dim} with size {n}")


_PLAIN_FORM = {"_unsafe_index_put": "index_put", "_index_put_impl_": "index_put_"}


def _in_place(func: torch._ops.OpOverload) -> Any:
    """The form of an operator that writes into its first argument."""
    if is_inplace(func):
        return func
    name = func._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, _PLAIN_FORM.get(name, name) + "_")
    return getattr(packet, func._schema.overload_name or "default")
