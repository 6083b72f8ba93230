"""Operators whose dims have names, as in einsum: the layouts that the operands need, and the local work.

A :class:`Form` labels the dims of the operands and of the result. Each mesh dim shards one label, in all operands that
have it; the others are replicated there. :func:`arrange` chooses it:

| the sharded operands | what happens | the result |
|---|---|---|
| are sharded along one label, or have one in common | plain ones are sliced, others resharded | sharded alike |
| the same, and the label is summed over | the same, or resharded to one that is not | Partial(sum), or sharded |
| have no label in common | one is sent around, see [Note: ring] in ring.py | as the one that stays |

Where there is a choice, the one that moves the fewest elements is taken, and of two operands that may be sent around
the second one, unless it is half as large again as the first; a sum that is larger than the operands' shards
counts as its all-reduce would. So where sharded features meet a replicated weight, rows are sharded instead. To a label
along which nothing is sharded yet an operand is resharded only if it has at least as many elements as there are ranks;
to one that is summed over only if the sum, which every rank holds in full, is no larger than the operands' shards. So
no rank ever holds more than its part of operands and result (a Partial aside) and one more shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from ..._compat import TensorMeta
from ...dispatch.tensor import ShardTensor, from_part, redistribute_to, to_part
from ...errors import UnsupportedSharding, refuse
from ...layout.caches import cached
from ...layout.intervals import chunk_sizes, intervals_of
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ...layout.strides import contiguous_stride
from ...operators.autocast import autocast_dtype
from ...operators.declaration import Arguments, LocalPlan
from .alignment import no_other_dim, wide_dtype
from .ring import Tour, part_by_part

# Scores of queries and keys are read along the keys next: by a softmax, and by a product with values. Sharded
# along the queries, keys and values are sent; along the keys, the queries, and the result is summed, which is twice its
# size.
_ROWS_PREFERRED = 1.5

Label = Hashable
Labels = tuple[Label, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """The dims of an operator's tensors by label.

    Attributes:
        terms: for each operand the labels of its dims, each once but for those that are whole. None is a dim of length
            1 that is broadcast.
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
class ShardedLabel:
    """A label that a mesh dim shards, and the shard sizes."""

    label: Label
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RingOperand:
    """An operand that is sent around the ranks of a mesh dim, which shards it as ``sharded`` says."""

    mesh_dim: int
    operand: int
    sharded: ShardedLabel


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The layouts that the operands of a form need.

    Attributes:
        form: the operator's.
        targets: a spec for each operand.
        sharded: for each mesh dim what it shards of the result, or of what is summed.
        rings: the operands that are sent around.
        lengths: of each label.
    """

    form: Form
    targets: tuple[ShardTensorSpec, ...]
    sharded: tuple[ShardedLabel | None, ...]
    rings: tuple[RingOperand, ...]
    lengths: dict[Label, int]

    def out(self, shape: Sequence[int], dtype: torch.dtype, labels: Sequence[Label] | None = None) -> ShardTensorSpec:
        """The spec of a result of this shape.

        Args:
            labels: of its dims, the last of which may have none; default: the form's.
        """
        labels = self.form.out if labels is None else labels
        layout = []
        for sharded in self.sharded:
            if sharded is not None and sharded.label in labels:
                layout.append(AxisLayout(Shard(labels.index(sharded.label)), sharded.sizes))
            else:
                summed = sharded is not None and self.form.summed(sharded.label)
                layout.append(AxisLayout(Partial() if summed else Replicate()))
        meta = TensorMeta(torch.Size(shape), contiguous_stride(shape), dtype)
        return self.targets[0].with_layout(layout, meta)

    def gradient(self, i: int) -> ShardTensorSpec:
        """The layout in which the gradient of operand ``i`` arrives, once it has its target.

        Where it is replicated on ranks that do different work, each of them has a contribution, a Partial.
        """
        target = self.targets[i]
        works = [m for m, sharded in enumerate(self.sharded) if sharded is not None]
        shared = [m for m in works if target.placements[m].is_replicate()]
        return target.with_axes({m: AxisLayout(Partial()) for m in shared}) if shared else target

    def local(self, i: int, tensor: Tensor) -> Tensor:
        """The local part of operand ``i``, redistributed to its target. Differentiable."""
        return to_part(redistribute_to(tensor, self.targets[i]), self.gradient(i))

    def local_work(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """``function`` for the local operands, part by part where one is sent around. Differentiable."""
        work = function
        for ring in self.rings:
            work = self._around_ring(work, ring)
        return work

    def _around_ring(self, function: Callable[..., Tensor], ring: RingOperand) -> Callable[..., Tensor]:
        at, label = ring.operand, ring.sharded.label
        target, intervals = self.targets[at], intervals_of(ring.sharded.sizes)
        p = target.placements[ring.mesh_dim]
        assert isinstance(p, Shard)
        dims = [term.index(label) if label in term and i != at else None for i, term in enumerate(self.form.terms)]

        def part_of(owner: int, part: Tensor, *others: Tensor) -> Tensor:
            a, b = intervals[owner]
            operands = [*others[:at], part, *others[at:]]
            pairs = zip(operands, dims, strict=True)
            return function(*(t if d is None else t.narrow(d, a, b - a) for t, d in pairs))

        into = None if self.form.summed(label) else self.form.out.index(label)
        tour = Tour(target.mesh, ring.mesh_dim, target.coordinate[ring.mesh_dim], p.dim, into, intervals)

        def call(*operands: Tensor) -> Tensor:
            return part_by_part(part_of, tour, operands[at], *operands[:at], *operands[at + 1 :])

        return call


# -- choosing -------------------------------------------------------------------------------------------------------


@cached(maxsize=4096)
def arrange(op: object, form: Form, specs: tuple[ShardTensorSpec, ...]) -> Arrangement:
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
    sharded: list[ShardedLabel | None] = []
    rings: list[RingOperand] = []
    taken: set[Label] = set()
    for m in range(mesh.ndim):
        held = _held(form, specs, m)
        if not held:
            sharded.append(None)
            continue
        later = {other.label for n in range(m + 1, mesh.ndim) for other in _held(form, specs, n).values()}
        elements = {i: specs[i].shape.numel() for i in held}
        choice = _Choice(form, lengths, elements, held, mesh.size(m), frozenset(taken), frozenset(later))
        options = choice.options()
        if not options:
            choice = choice.resharded()
            options = choice.options()
            if not options:
                raise _refusal(op, form, specs, held, m)
        best = min(options, key=lambda x: (x.cost, x.sent is not None, -lengths[x.sharded.label]))
        sharded.append(best.sharded)
        taken.add(best.sharded.label)
        if best.sent is not None:
            rings.append(RingOperand(m, best.sent, choice.held[best.sent]))
            taken.add(choice.held[best.sent].label)
    targets = tuple(_target(form, i, spec, sharded, rings) for i, spec in enumerate(specs))
    return Arrangement(form, targets, tuple(sharded), tuple(rings), lengths)


def _held(form: Form, specs: Sequence[ShardTensorSpec], m: int) -> dict[int, ShardedLabel]:
    """What mesh dim ``m`` shards of each operand, broadcast dims of length 1 aside: one rank has all of them."""
    held = {}
    for i, spec in enumerate(specs):
        p = spec.placements[m]
        if isinstance(p, Shard) and form.terms[i][p.dim] is not None:
            held[i] = ShardedLabel(form.terms[i][p.dim], spec.sizes_along(m))
    return held


@dataclass(frozen=True, slots=True)
class _Option:
    """What may be done on a mesh dim.

    Attributes:
        cost: how many elements a rank sends and receives for it.
        sharded: what the mesh dim shards then.
        sent: the operand that is sent around, if one is.
    """

    cost: float
    sharded: ShardedLabel
    sent: int | None = None


@dataclass(frozen=True, slots=True)
class _Choice:
    """The choice of what one mesh dim shards.

    Attributes:
        form, lengths: the operator's, and of its labels.
        elements: how many each sharded operand has.
        held: what the mesh dim shards of these now.
        ranks: how many the mesh dim has.
        taken: labels that mesh dims before it shard.
        later: labels that mesh dims behind it shard now.
    """

    form: Form
    lengths: dict[Label, int]
    elements: dict[int, int]
    held: dict[int, ShardedLabel]
    ranks: int
    taken: frozenset[Label]
    later: frozenset[Label]

    def options(self) -> list[_Option]:
        """All that may be done."""
        return [*self._along_one_label(), *self._around_ring()]

    def resharded(self) -> _Choice:
        """The choice once what must not be sharded is along the operand's longest free label, where it has one."""
        busy = self.taken | self.later | self.form.whole
        held = dict(self.held)
        for i, sharded in self.held.items():
            labels = [x for x in self.form.terms[i] if x is not None and x not in busy]
            free = [x for x in labels if self.lengths[x] >= self.ranks]
            if sharded.label in self.form.whole and free:
                held[i] = self._evenly(max(free, key=lambda x: self.lengths[x]))
        return replace(self, held=held)

    def _evenly(self, label: Label) -> ShardedLabel:
        return ShardedLabel(label, chunk_sizes(self.lengths[label], self.ranks))

    def _may_shard(self, label: Label) -> bool:
        return label not in self.taken and label not in self.form.whole

    def _along_one_label(self) -> Iterator[_Option]:
        """A label that all operands have, with the sizes of the largest one that is sharded along it."""
        largest_first = sorted(self.held, key=lambda i: -self.elements[i])
        for label, n in self.lengths.items():
            if not self._may_shard(label) or any(label not in self.form.terms[i] for i in self.held):
                continue
            there = [self.held[i] for i in largest_first if self.held[i].label == label]
            if not there and (n < self.ranks or label in self.later):
                continue
            sharded = there[0] if there else self._evenly(label)
            cost = self._cost(sharded)
            if cost is not None:
                yield _Option(cost, sharded)

    def _cost(self, sharded: ShardedLabel) -> float | None:
        """The elements that are moved; None where the sum would be larger than the shards that are summed."""
        moved = sum(self.elements[i] for i in self.held if self.held[i] != sharded) / self.ranks
        if not self.form.summed(sharded.label):
            return moved
        result = math.prod(self.lengths.get(label, 1) for label in self.form.out)
        exchanges = moved and not all(self.form.summed(own.label) for own in self.held.values())
        is_large = result * self.ranks > sum(self.elements.values())
        if exchanges and is_large:
            return None
        # Whoever needs the values of the Partial will have the ranks sum them.
        return moved + 2 * result if exchanges or is_large else moved

    def _around_ring(self) -> Iterator[_Option]:
        """One of two operands is sent around the ranks, the other one stays."""
        if not self.form.by_parts or len(self.held) != 2:
            return
        first = next(iter(self.held.values()))
        for sent, stays in zip(reversed(self.held), self.held.values(), strict=True):
            labels = (stays.label, self.held[sent].label)
            if labels[0] != labels[1] and not self.form.summed(stays.label) and all(map(self._may_shard, labels)):
                preferred = 1.0 if stays == first else _ROWS_PREFERRED
                yield _Option(preferred * self.elements[sent], stays, sent)


def _target(
    form: Form,
    i: int,
    spec: ShardTensorSpec,
    common: Sequence[ShardedLabel | None],
    rings: Sequence[RingOperand],
) -> ShardTensorSpec:
    """The layout that operand ``i`` needs: along the common labels, or its own where it is sent around."""
    layout = []
    term = form.terms[i]
    for m, of_all in enumerate(common):
        p = spec.placements[m]
        sharded = next((ring.sharded for ring in rings if (ring.mesh_dim, ring.operand) == (m, i)), of_all)
        if sharded is None or sharded.label not in term:
            layout.append(AxisLayout(Replicate()))
        else:
            stays = isinstance(p, Shard) and term[p.dim] == sharded.label
            layout.append(AxisLayout(p if stays else Shard(term.index(sharded.label)), sharded.sizes))
    return spec.with_layout(layout)


def _refusal(
    op: object, form: Form, specs: Sequence[ShardTensorSpec], held: dict[int, ShardedLabel], m: int
) -> UnsupportedSharding:
    for i, sharded in held.items():
        if sharded.label in form.whole:
            dim = list(form.terms[i]).index(sharded.label)
            return refuse(
                op,
                list(specs),
                no_other_dim(f"dim {dim} of operand {i}", specs[i], m),
                f"redistribute it to Replicate() on mesh dim {m} if it is small, or shard another dim",
            )
    return refuse(
        op,
        list(specs),
        f"the operands are sharded on mesh dim {m} in a way that needs one of them unsharded",
        f"redistribute the smaller one to Replicate() on mesh dim {m}, or shard both along the same batch dim or "
        "the contracted dim with the same shard sizes",
    )


# -- contraction -------------------------------------------------------------------------------------------------------

# Operators whose dims have names, as in einsum: their plans, by the layouts that named_dims.py chooses.

__all__ = [
    "Arrangement",
    "ContractionPlan",
    "Form",
    "Label",
    "arrange",
    "batch_labels",
    "plan_contraction",
]


class ContractionPlan(LocalPlan):
    """``function`` of local operands that have an arrangement's targets.

    Where half precision is summed over ranks, in the result or in the gradient of an operand, it runs in float32: see
    [Note: rounded once] in redistribute.py.
    """

    outputs: ShardTensorSpec

    def __init__(self, how: Arrangement, function: Callable[..., Tensor]) -> None:
        shape = [how.lengths.get(label, 1) for label in how.form.out]
        gradients = [how.gradient(i) for i in range(len(how.targets))]
        self.targets = how.targets
        self.cast_to = _dtype_of_autocast(how, function)
        super().__init__(how.local_work(function), how.out(shape, how.targets[0].tensor_meta.dtype), gradients)

    def run(self, tensors: Sequence[Any]) -> ShardTensor:
        # Some operators have arguments behind the operands that may be tensors, but are none in this call.
        operands = tensors[: len(self.targets)]
        dtype = self.cast_to or operands[0].dtype
        computed = torch.float32 if self._rounds_sums(dtype, operands) else self.cast_to
        if computed is None:
            result = self.function(*self.local_tensors(operands))
            return from_part(result, self.outputs.with_dtype(result.dtype))
        parts = [to_part(t, s or t._spec, computed) for t, s in zip(operands, self.gradients or (), strict=True)]
        with torch.autocast(parts[0].device.type, enabled=False):
            result = self.function(*parts)
        return from_part(result, self.outputs.with_dtype(dtype))

    def _rounds_sums(self, dtype: torch.dtype, operands: Sequence[ShardTensor]) -> bool:
        """Whether a result of this dtype, or a gradient, is rounded, and added up over ranks before that."""
        if wide_dtype(dtype) == dtype:
            return False
        graded = zip(operands, self.gradients or (), strict=True)
        summed = any(s is not None and s.partial_mesh_dims() and t.requires_grad for t, s in graded)
        return summed or bool(self.outputs.partial_mesh_dims())


def _dtype_of_autocast(how: Arrangement, function: Callable[..., Tensor]) -> torch.dtype | None:
    """The dtype to which autocast casts the operands; None where it is off."""
    device = how.targets[0].mesh.device_type
    if not torch.is_autocast_enabled(device):
        return None
    whole = how.form.whole
    shapes = [
        [n if label in whole else min(n, 2) for n, label in zip(spec.shape, term, strict=True)]
        for spec, term in zip(how.targets, how.form.terms, strict=True)
    ]
    return autocast_dtype(function, shapes, [spec.tensor_meta.dtype for spec in how.targets], device)


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
