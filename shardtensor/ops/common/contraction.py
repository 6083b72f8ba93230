"""Operators whose dims have names, as in einsum: the layouts that the operands need, and the local work.

A :class:`Form` labels the dims of the operands and of the result. Each mesh dim shards one label, in all operands that
have it; the others are replicated there. :func:`arrange` chooses it:

| the sharded operands | what happens | the result |
|---|---|---|
| are sharded along one label, or have one in common | plain ones are sliced, others resharded | sharded alike |
| the same, and the label is summed over | the same, or resharded to one that is not | Partial(sum), or sharded |
| have no label in common | the smaller one is sent around, see [Note: ring] in ring.py | as the one that stays |

Where there is a choice, the one that moves the fewest elements is taken; a sum that is larger than the operands' shards
counts as its all-reduce would. So where sharded features meet a replicated weight, rows are sharded instead. To a label
along which nothing is sharded yet an operand is resharded only if it has at least as many elements as there are ranks;
to one that is summed over only if the sum, which every rank holds in full, is no larger than the operands' shards. So
no rank ever holds more than its part of operands and result (a Partial aside) and one more shard.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from ..._compat import TensorMeta
from ...errors import UnsupportedSharding, refuse
from ...geometry import Interval, chunk_sizes, intervals_of
from ...layout import AxisLayout
from ...operators import Arguments, LocalPlan
from ...spec import ShardTensorSpec
from ...strides import contiguous_stride
from ...tensor import ShardTensor, from_part, redistribute_to, to_part
from .alignment import as_operand, common_mesh
from .part_by_part import Tour, part_by_part

__all__ = [
    "Arrangement",
    "ContractionPlan",
    "Form",
    "Tour",
    "arrange",
    "batch_labels",
    "contract",
    "part_by_part",
    "plan_contraction",
]

Label = Hashable
Labels = tuple[Label, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """The dims of an operator's tensors by label.

    Attributes:
        terms: for each operand the labels of its dims. None stands for a dim of length 1 that is broadcast.
        out: the labels of the result's dims. A label that is missing here is summed over.
        whole: labels along which nothing may be sharded.
        by_parts: whether the result is put together from results of parts of an operand: side by side along the
            result's labels, added up along the others.

    Example:
        >>> Form(("ik", "kj"), "ij").summed("k")
        True
    """

    terms: tuple[Sequence[Label], ...]
    out: Sequence[Label]
    whole: frozenset[Label] = frozenset()
    by_parts: bool = True

    def summed(self, label: Label) -> bool:
        return label not in self.out


@dataclass(frozen=True, slots=True)
class Cut:
    """A label that a mesh dim shards, and the shard sizes."""

    label: Label
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Journey:
    """An operand that is sent around the ranks of a mesh dim, which shards it as ``cut`` says."""

    mesh_dim: int
    operand: int
    cut: Cut


@dataclass(frozen=True, slots=True)
class _Option:
    """What may be done on a mesh dim, and how many elements a rank sends and receives for it."""

    cost: float
    cut: Cut
    traveller: int | None = None


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The layouts that the operands of a form need.

    Attributes:
        form: the operator's.
        targets: a spec for each operand.
        cuts: for each mesh dim what it shards of the result, or of what is summed.
        journeys: the operands that are sent around.
        lengths: of each label.
    """

    form: Form
    targets: tuple[ShardTensorSpec, ...]
    cuts: tuple[Cut | None, ...]
    journeys: tuple[Journey, ...]
    lengths: dict[Label, int]

    def out(self, shape: Sequence[int], dtype: torch.dtype, labels: Sequence[Label] | None = None) -> ShardTensorSpec:
        """The spec of a result of this shape.

        Args:
            labels: of its dims, the last of which may have none; default: the form's.
        """
        labels = self.form.out if labels is None else labels
        placements: list[Any] = [Replicate() for _ in self.cuts]
        sizes: list[Any] = [None for _ in self.cuts]
        for m, cut in enumerate(self.cuts):
            if cut is not None and cut.label in labels:
                placements[m], sizes[m] = Shard(labels.index(cut.label)), cut.sizes
            elif cut is not None and self.form.summed(cut.label):
                placements[m] = Partial()
        meta = TensorMeta(torch.Size(shape), contiguous_stride(shape), dtype)
        return ShardTensorSpec.of(self.targets[0].mesh, placements, meta, tuple(sizes))

    def gradient(self, i: int) -> ShardTensorSpec:
        """The layout in which the gradient of operand ``i`` arrives, once it has its target.

        Where it is replicated on ranks that do different work, each of them has a contribution, a Partial.
        """
        target = self.targets[i]
        shared = [m for m, cut in enumerate(self.cuts) if cut is not None and target.placements[m].is_replicate()]
        return target.with_axes({m: AxisLayout(Partial()) for m in shared}) if shared else target

    def diagonal(self, i: int) -> list[tuple[int, int, int]]:
        """``(dim, start, length)`` narrowings of operand ``i``'s shard: a label that shards one of its dims and names
        another one, too, leaves of that only what belongs to the shard.
        """
        target, term = self.targets[i], self.form.terms[i]
        result = []
        for m, cut in enumerate(self.cuts):
            p = target.placements[m]
            if cut is not None and isinstance(p, Shard) and term[p.dim] == cut.label:
                start, stop = target.interval(m)
                result += [
                    (d, start, stop - start) for d, label in enumerate(term) if label == cut.label and d != p.dim
                ]
        return result

    def local(self, i: int, tensor: ShardTensor) -> Tensor:
        """The local part of operand ``i``, redistributed to its target. Differentiable."""
        local = to_part(redistribute_to(tensor, self.targets[i]), self.gradient(i))
        for place in self.diagonal(i):
            local = local.narrow(*place)
        return local

    def local_work(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """``function`` for the local operands, part by part where one is sent around. Differentiable."""
        work = function
        for journey in self.journeys:
            work = self._round(work, journey)
        diagonals = [(i, place) for i in range(len(self.targets)) for place in self.diagonal(i)]
        if not diagonals:
            return work

        def narrowed(*operands: Tensor) -> Tensor:
            parts = list(operands)
            for i, place in diagonals:
                parts[i] = parts[i].narrow(*place)
            return work(*parts)

        return narrowed

    def _round(self, function: Callable[..., Tensor], journey: Journey) -> Callable[..., Tensor]:
        at, label = journey.operand, journey.cut.label
        target, intervals = self.targets[at], intervals_of(journey.cut.sizes)
        p = target.placements[journey.mesh_dim]
        assert isinstance(p, Shard)
        dims = [[d for d, name in enumerate(term) if name == label] for term in self.form.terms]
        dims[at].remove(p.dim)

        def part_of(owner: int, part: Tensor, *others: Tensor) -> Tensor:
            operands = [*others[:at], part, *others[at:]]
            return function(*(_narrowed(t, d, intervals[owner]) for t, d in zip(operands, dims, strict=True)))

        into = None if self.form.summed(label) else self.form.out.index(label)
        tour = Tour(target.mesh, journey.mesh_dim, target.coordinate[journey.mesh_dim], p.dim, into, intervals)

        def call(*operands: Tensor) -> Tensor:
            return part_by_part(part_of, tour, operands[at], *operands[:at], *operands[at + 1 :])

        return call


def _narrowed(t: Tensor, dims: Sequence[int], interval: Interval) -> Tensor:
    for d in dims:
        t = t.narrow(d, interval[0], interval[1] - interval[0])
    return t


# -- geometry -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def arrange(op: Any, form: Form, specs: tuple[ShardTensorSpec, ...]) -> Arrangement:
    """The layouts that operands with these specs, none of them Partial, need for an operator of this form.

    Raises:
        UnsupportedSharding: one of them would have to be gathered.
    """
    mesh = specs[0].mesh
    lengths: dict[Label, int] = {}
    for spec, term in zip(specs, form.terms, strict=True):
        for n, label in zip(spec.shape, term, strict=True):
            if label is not None:
                lengths[label] = max(n, lengths.get(label, 0))
    cuts: list[Cut | None] = []
    journeys: list[Journey] = []
    taken: set[Label] = set()
    for m in range(mesh.ndim):
        held = _held(form, specs, m)
        if not held:
            cuts.append(None)
            continue
        later = {c.label for n in range(m + 1, mesh.ndim) for c in _held(form, specs, n).values()}
        options = list(_options(form, specs, held, lengths, mesh.size(m), taken, later))
        if not options:
            moved = _off_whole(form, held, lengths, mesh.size(m), taken | later)
            options = list(_options(form, specs, moved, lengths, mesh.size(m), taken, later))
            if not options:
                raise _refusal(op, form, specs, held, m)
            held = moved
        best = min(options, key=lambda x: (x.cost, x.traveller is not None, -lengths[x.cut.label]))
        cuts.append(best.cut)
        taken.add(best.cut.label)
        if best.traveller is not None:
            journeys.append(Journey(m, best.traveller, held[best.traveller]))
            taken.add(held[best.traveller].label)
    targets = tuple(_target(form, i, spec, cuts, journeys) for i, spec in enumerate(specs))
    return Arrangement(form, targets, tuple(cuts), tuple(journeys), lengths)


def _held(form: Form, specs: Sequence[ShardTensorSpec], m: int) -> dict[int, Cut]:
    """What mesh dim ``m`` shards of each operand, broadcast dims of length 1 aside: one rank has all of them."""
    held = {}
    for i, spec in enumerate(specs):
        p = spec.placements[m]
        if isinstance(p, Shard) and form.terms[i][p.dim] is not None:
            held[i] = Cut(form.terms[i][p.dim], spec.cut(m))
    return held


def _off_whole(
    form: Form, held: dict[int, Cut], lengths: dict[Label, int], ranks: int, busy: set[Label]
) -> dict[int, Cut]:
    """``held`` with what must not be sharded resharded to the operand's own longest free label, where it has one."""
    result = dict(held)
    for i, cut in held.items():
        free = [x for x in form.terms[i] if x is not None and x not in busy | form.whole and lengths[x] >= ranks]
        if cut.label in form.whole and free:
            label = max(free, key=lambda x: lengths[x])
            result[i] = Cut(label, chunk_sizes(lengths[label], ranks))
    return result


def _options(
    form: Form,
    specs: Sequence[ShardTensorSpec],
    held: dict[int, Cut],
    lengths: dict[Label, int],
    ranks: int,
    taken: set[Label],
    later: set[Label],
) -> Iterator[_Option]:
    size = {i: specs[i].shape.numel() for i in held}
    largest_first = sorted(held, key=lambda i: -size[i])
    result = 1
    for label in form.out:
        result *= lengths.get(label, 1)
    all_summed = all(form.summed(cut.label) for cut in held.values())
    for label, n in lengths.items():
        if label in taken or label in form.whole or any(label not in form.terms[i] for i in held):
            continue
        there = [held[i] for i in largest_first if held[i].label == label]
        if not there and (n < ranks or label in later):
            continue
        cut = there[0] if there else Cut(label, chunk_sizes(n, ranks))
        moved = sum(size[i] for i in held if held[i] != cut) / ranks
        if form.summed(label):
            exchanges, is_large = moved and not all_summed, result * ranks > sum(size.values())
            if exchanges and is_large:
                continue
            if exchanges or is_large:
                moved += 2 * result  # whoever needs the values of the Partial will have the ranks sum them
        yield _Option(moved, cut)
    if not form.by_parts or len(held) != 2:
        return
    for traveller, cut in zip(reversed(held), held.values(), strict=True):
        labels = (cut.label, held[traveller].label)
        if form.summed(cut.label) or cut.label == labels[1] or any(x in taken or x in form.whole for x in labels):
            continue
        yield _Option(size[traveller], cut, traveller)


def _target(
    form: Form, i: int, spec: ShardTensorSpec, cuts: Sequence[Cut | None], journeys: Sequence[Journey]
) -> ShardTensorSpec:
    placements: list[Any] = []
    sizes: list[Any] = []
    term = form.terms[i]
    for m, common in enumerate(cuts):
        p = spec.placements[m]
        cut = next((j.cut for j in journeys if (j.mesh_dim, j.operand) == (m, i)), common)
        if cut is None or cut.label not in term:
            placements.append(Replicate())
            sizes.append(None)
        else:
            stays = isinstance(p, Shard) and term[p.dim] == cut.label
            placements.append(p if stays else Shard(term.index(cut.label)))
            sizes.append(cut.sizes)
    return spec.replace(placements=placements, sizes=tuple(sizes))


def _refusal(
    op: Any, form: Form, specs: Sequence[ShardTensorSpec], held: dict[int, Cut], m: int
) -> UnsupportedSharding:
    for i, cut in held.items():
        if cut.label in form.whole:
            dim, ranks = list(form.terms[i]).index(cut.label), specs[0].mesh.size(m)
            return refuse(
                op,
                list(specs),
                f"it needs dim {dim} of operand {i} whole, which is sharded on mesh dim {m}, and there is no dim that "
                f"may be cut instead: one that is free and has at least as many elements as the {ranks} ranks",
                f"redistribute it to Replicate() on mesh dim {m} if it is small, or shard another dim",
            )
    return refuse(
        op,
        list(specs),
        f"the operands are cut on mesh dim {m} in a way that needs one of them whole",
        f"redistribute the smaller one to Replicate() on mesh dim {m}, or cut both along the same batch dim or the "
        "contracted dim with the same shard sizes",
    )


# -- above autograd ---------------------------------------------------------------------------------------------------


class ContractionPlan(LocalPlan):
    """``function`` of local operands that have an arrangement's targets."""

    outputs: ShardTensorSpec

    def __init__(self, how: Arrangement, function: Callable[..., Tensor]) -> None:
        shape = [how.lengths.get(label, 1) for label in how.form.out]
        gradients = [how.gradient(i) for i in range(len(how.targets))]
        self.targets = how.targets
        super().__init__(how.local_work(function), how.out(shape, how.targets[0].tensor_meta.dtype), gradients)

    def run(self, tensors: Sequence[Any]) -> ShardTensor:
        # Some operators have arguments behind the operands that may be tensors, but are none in this call.
        result = self.function(*self.local_tensors(tensors[: len(self.targets)]))
        return from_part(result, self.outputs.with_dtype(result.dtype))  # autocast decides by the operator

    def run_on(self, tensors: Sequence[ShardTensor]) -> ShardTensor:
        """:meth:`run` for operands that do not have their targets yet."""
        return self.run(list(map(redistribute_to, tensors, self.targets)))


def plan_contraction(
    call: Arguments, name: str, function: Callable[..., Tensor], form: Form, *operands: str
) -> ContractionPlan:
    """The plan of an operator of this form, whose tensors are ``operands``.

    The caller has had torch check their shapes and dtypes.
    """
    how = arrange(name, form, tuple(call.tensors[operand] for operand in operands))
    for operand, target in zip(operands, how.targets, strict=True):
        call.redistribute(operand, target)
    return ContractionPlan(how, function)


def contract(
    name: str, function: Callable[..., Tensor], form: Form, *operands: Tensor, mesh: DeviceMesh | None = None
) -> ShardTensor:
    """``function`` of the operands, ShardTensors and plain tensors, as a ShardTensor. Differentiable.

    The caller has had torch check the operands' shapes and dtypes, and at least one of them is a ShardTensor.
    """
    mesh = mesh or common_mesh(name, operands)
    assert mesh is not None
    tensors = [as_operand(t, mesh) for t in operands]
    how = arrange(name, form, tuple(t._spec for t in tensors))
    return ContractionPlan(how, function).run_on(tensors)


def batch_labels(*shapes: Sequence[int]) -> tuple[list[Labels], Labels]:
    """Labels of dims that are broadcast against each other, and of the result's.

    Example:
        >>> batch_labels((5, 1, 3), (2, 3))
        ([(-3, None, -1), (-2, -1)], (-3, -2, -1))
    """
    ndim = max(map(len, shapes))
    length = {d: max((s[d] for s in shapes if len(s) >= -d), key=lambda n: (n != 1, n)) for d in range(-ndim, 0)}
    terms: list[Labels] = [tuple(d if s[d] == length[d] else None for d in range(-len(s), 0)) for s in shapes]
    return terms, tuple(range(-ndim, 0))
