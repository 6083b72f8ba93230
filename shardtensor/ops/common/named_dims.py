"""How operands must lie for an operator, by labels of their dims, as in einsum's subscripts.

A :class:`Form` labels the dims of the operands and of the result: dims that run together have one label. Each mesh dim
shards one label, in all operands that have it; the others are replicated there. :func:`arrange` chooses it, for
operators of all families. The ways to choose from depend on what the family's local work can do:

| way | what happens | the result |
|---|---|---|
| :func:`shared` | all have a label along which one of them is sharded: the others are resharded | sharded alike |
| the same, and the label is summed over | the same | Partial(sum) |
| :func:`fresh` | all are resharded to a label along which nothing is sharded yet | the same |
| :func:`around_ring` | one of two is sent around, see [Note: ring] in ring.py | as the one that stays |
| :func:`gathering` | one of them stays, others are gathered, or refused by the caller | as that one |

Attention and operators with an index have ways of their own, in which keys, or an index, are sent. Plain operands are
sliced in all of them.

All mesh dims are decided together: of all combinations of ways the one that gathers the fewest operands, and then sends
the fewest bytes, all ranks together. Of equal ones it is that of the first operand, unless its shards are much coarser
and along other labels: a residual connection brings what attention has left in shards of two frames back to shards of
many rows. Along the same labels much more even shards are worth twice the bytes: the skip connection of a U-Net brings
the rows of a deep stage, which has fewer of them than there are ranks, back to all ranks. Of two operands that may be
sent around it is the second one, unless it is half as large again as the first. A sum that is larger than the operands'
shards counts as its all-reduce would. So where sharded features meet a replicated weight, rows are sharded instead. To
a fresh label an operand is resharded only if it is at least as long as there are ranks; to one that is summed over only
if the sum, which every rank holds in full, is no larger than the operands' shards. So no rank ever holds more than its
part of operands and result (a Partial aside) and one more shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from ..._compat import TensorMeta
from ...communication.redistribute import bytes_between
from ...dispatch.tensor import redistribute_to, to_part
from ...errors import UnsupportedSharding, refuse
from ...layout.caches import cached
from ...layout.intervals import chunk_sizes, clipped, map_boundaries, whole_blocks
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ...layout.strides import contiguous_stride

# Scores of queries and keys are read along the keys next: by a softmax, and by a product with values. Sharded
# along the queries, keys and values are sent; along the keys, the queries, and the result is summed, which is twice its
# size.
_ROWS_PREFERRED = 1.5

_MUCH_LESS = 0.8  # coarse
_MORE_BYTES = 2.0  # are worth it

Label = Hashable
Labels = Sequence[Label]


@dataclass(frozen=True, slots=True)
class Along:
    """A label that a mesh dim shards, and the shard sizes of the longest dim that has it."""

    label: Label
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Axis:
    """What one mesh dim shards.

    Attributes:
        along: in all operands that have its label.
        sent: in sharded operands that lack that label: they are sent to the others' ranks.
    """

    along: Along | None
    sent: Along | None = None

    def labels(self) -> list[Label]:
        return [one.label for one in (self.along, self.sent) if one is not None]


@dataclass(frozen=True, slots=True)
class Option:
    """What may be done on a mesh dim.

    Attributes:
        preferred: how much what is sent counts.
        sums: the ranks will have to sum the result.
    """

    axis: Axis
    preferred: float = 1.0
    sums: bool = False


Way = Callable[["Choice"], Iterator[Option]]


def shared(choice: Choice) -> Iterator[Option]:
    """A label that all have, with the sizes of one that is sharded along it."""
    for along in choice.offered():
        if not choice.lacking(along.label):
            yield from choice.alike(along)


def fresh(choice: Choice) -> Iterator[Option]:
    """The best label that all have, along which nothing is sharded, of those that are summed over and of others."""
    there = {along.label for along in choice.held.values()} | choice.later
    free = [x for x, n in choice.lengths.items() if x not in there and choice.may_shard(x) and n >= choice.ranks]
    for summed in (False, True):
        labels = [x for x in free if choice.form.summed(x) is summed and not choice.lacking(x)]
        if labels:
            yield from choice.alike(choice.evenly(choice.best(labels)))


def around_ring(choice: Choice) -> Iterator[Option]:
    """One of two operands is sent around the ranks, the other one stays.

    The result is put together from results of parts: side by side along its labels, added up along the others.
    """
    if len(choice.held) != 2:
        return
    first = next(iter(choice.held.values()))
    for along in reversed([*choice.offered()]):
        for sent in choice.lacking(along.label).values():
            if not choice.form.summed(along.label) and choice.may_shard(sent.label):
                yield Option(Axis(along, sent), 1.0 if along == first else _ROWS_PREFERRED)


def gathering(choice: Choice) -> Iterator[Option]:
    """A label of one of them: those that lack it are gathered, or refused by the caller."""
    options = [Option(Axis(along)) for along in choice.offered()]
    yield from options or [Option(Axis(None))]


@dataclass(frozen=True, slots=True)
class Form:
    """The dims of an operator's tensors by label.

    Attributes:
        terms: for each operand the labels of its dims, each once but for those that are whole. None is a dim of length
            1 that is broadcast.
        out: the labels of the result's dims. A label that is missing here is summed over.
        whole: labels along which nothing may be sharded.
        ways: what may be done on a mesh dim.
        leaders: how many operands, the first ones, decide where one of them is sharded; others follow. None: all.
        groups: labels whose longer dims have a group of entries for each of a shorter one's, which stay together: heads
            of queries that share keys. Of other labels a shorter dim is the beginning of the longest.
        whole_result: how often the bytes of a result count that all ranks have because they sum it: twice for that, by
            an all-reduce, and more where the work that follows is repeated.

    Example:
        >>> Form(("ik", "kj"), "ij").summed("k")
        True
    """

    terms: tuple[Labels, ...]
    out: Labels
    whole: frozenset[Label] = frozenset()
    ways: tuple[Way, ...] = (shared, fresh, around_ring)
    leaders: int | None = None
    groups: frozenset[Label] = frozenset()
    whole_result: float = 2.0

    def summed(self, label: Label) -> bool:
        return label not in self.out


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The layouts that the operands of a form need.

    Attributes:
        form: the operator's.
        targets: a spec for each operand.
        axes: what each mesh dim shards; None where it shards no operand.
        lengths: of each label.
    """

    form: Form
    targets: tuple[ShardTensorSpec, ...]
    axes: tuple[Axis | None, ...]
    lengths: dict[Label, int]

    def out_layout(self, labels: Labels) -> list[AxisLayout]:
        """The layout of a result whose dims have these labels, per mesh dim."""
        layout = []
        for axis in self.axes:
            found = [one for one in (axis.along, axis.sent) if one and one.label in labels] if axis else []
            if found:
                layout.append(AxisLayout(Shard(list(labels).index(found[0].label)), found[0].sizes))
            else:
                summed = axis is not None and axis.along is not None and self.form.summed(axis.along.label)
                layout.append(AxisLayout(Partial() if summed else Replicate()))
        return layout

    def out(self, shape: Sequence[int], dtype: torch.dtype, labels: Labels | None = None) -> ShardTensorSpec:
        """The spec of a result of this shape.

        Args:
            labels: of its dims, the last of which may have none; default: the form's.
        """
        meta = TensorMeta(torch.Size(shape), contiguous_stride(shape), dtype)
        return self.targets[0].with_layout(self.out_layout(self.form.out if labels is None else labels), meta)

    def gradient(self, i: int) -> ShardTensorSpec:
        """The layout in which the gradient of operand ``i`` arrives, once it has its target.

        Where it is replicated on ranks that do different work, each of them has a contribution, a Partial.
        """
        target = self.targets[i]
        shared = [m for m, axis in enumerate(self.axes) if axis and target.placements[m].is_replicate()]
        return target.with_axes({m: AxisLayout(Partial()) for m in shared}) if shared else target

    def local(self, i: int, tensor: Tensor) -> Tensor:
        """The local part of operand ``i``, redistributed to its target. Differentiable."""
        return to_part(redistribute_to(tensor, self.targets[i]), self.gradient(i))


# -- choosing -------------------------------------------------------------------------------------------------------


@cached(maxsize=4096)
def arrange(op: object, form: Form, specs: tuple[ShardTensorSpec, ...]) -> Arrangement:
    """The layouts that operands with these specs need for an operator of the form, where a Partial is reduced.

    Raises:
        UnsupportedSharding: one of them would have to be gathered.
    """
    search = _Search.of(form, specs)
    best: _Found | None = None
    for options in search.all_options(()):
        found = search.found(options)
        if best is None or found.is_better(best):
            best = found
        if not best.gathers and not best.cost:
            break
    if best is None:
        raise _refusal(op, form, specs, search.held[search.stuck], search.stuck)
    axes = tuple(None if option is None else option.axis for option in best.options)
    return Arrangement(form, best.targets, axes, search.lengths)


@dataclass(frozen=True, slots=True)
class _Found:
    """What may be done on all mesh dims.

    Attributes:
        gathers: how many shards of operands are gathered.
        cost: the bytes that all ranks send, and will send to sum the result.
    """

    options: tuple[Option | None, ...]
    targets: tuple[ShardTensorSpec, ...]
    gathers: int
    cost: float

    def is_better(self, other: _Found) -> bool:
        """Than one that comes first."""
        if self.gathers == other.gathers and self._labels() == other._labels():
            for one, another in ((self, other), (other, self)):
                if is_worth_evening(one._coarseness(), one.cost, another._coarseness(), another.cost):
                    return one is self
        mine, others = ((x.gathers, x.cost, x._count_of_sent()) for x in (self, other))
        if mine != others or self._labels() == other._labels():
            return mine < others
        return is_much_less(self._coarseness(), other._coarseness())

    def _along(self) -> list[Along]:
        return [option.axis.along for option in self.options if option and option.axis.along]

    def _labels(self) -> list[Label]:
        return [along.label for along in self._along()]

    def _count_of_sent(self) -> int:
        return sum(option is not None and option.axis.sent is not None for option in self.options)

    def _coarseness(self) -> float:
        return math.prod(coarseness(along.sizes) for along in self._along())


def coarseness(sizes: Sequence[int]) -> float:
    """The largest share that a rank has, if boundaries are off by one: what follows moves them by a few."""
    return (max(sizes) + 1) / max(1, sum(sizes))


def is_much_less(coarse: float, other: float) -> bool:
    """Whether shards are so much less coarse than others that it is worth sending something."""
    return round(coarse / other, 6) < _MUCH_LESS


def are_much_more_even(sizes: Sequence[int], others: Sequence[int]) -> bool:
    """Whether one rank has so much less of a dim with these sizes than one has with others.

    Example:
        >>> are_much_more_even((5, 3), (6, 2)), are_much_more_even((4, 4), (6, 2))
        (False, True)
    """
    return is_much_less(coarseness(sizes), coarseness(others))


def is_worth_evening(coarse: float, cost: float, other_coarse: float, other_cost: float) -> bool:
    """Whether shards are so much more even than others along the same dims that the bytes they cost are worth it."""
    return is_much_less(coarse, other_coarse) and cost <= _MORE_BYTES * other_cost


@dataclass(slots=True)
class _Search:
    """The search for the best of what may be done on all mesh dims.

    Attributes:
        lengths: of the labels.
        bytes, result: how many each operand has, and about how many the result.
        held: what each mesh dim shards of the operands now.
        blocks: of labels with groups, how long the groups are.
        stuck: the last mesh dim on which nothing could be done.
    """

    form: Form
    specs: tuple[ShardTensorSpec, ...]
    lengths: dict[Label, int]
    bytes: list[int]
    result: int
    held: list[dict[int, Along]]
    blocks: dict[Label, int]
    stuck: int = 0

    @classmethod
    def of(cls, form: Form, specs: tuple[ShardTensorSpec, ...]) -> _Search:
        all_lengths: dict[Label, list[int]] = {}
        for spec, term in zip(specs, form.terms, strict=True):
            for n, label in zip(spec.shape, term, strict=True):
                if label is not None:
                    all_lengths.setdefault(label, []).append(n)
        lengths = {label: max(ns) for label, ns in all_lengths.items()}
        grouped = form.groups & lengths.keys()
        blocks = {label: lengths[label] // (math.gcd(*all_lengths[label]) or 1) or 1 for label in grouped}
        held = [_held(form, lengths, blocks, specs, m) for m in range(specs[0].mesh.ndim)]
        itemsizes = [spec.tensor_meta.dtype.itemsize for spec in specs]
        of_operands = [spec.shape.numel() * itemsize for spec, itemsize in zip(specs, itemsizes, strict=True)]
        result = max(itemsizes) * math.prod(lengths.get(label, 1) for label in form.out)
        return cls(form, specs, lengths, of_operands, result, held, blocks)

    def all_options(self, before: tuple[Option | None, ...]) -> Iterator[tuple[Option | None, ...]]:
        """What may be done on the mesh dims, where ``before`` is done on the first ones."""
        m = len(before)
        if m == len(self.held):
            yield before
            return
        options: Sequence[Option | None] = [None]
        if self.held[m]:
            taken = frozenset(label for option in before if option for label in option.axis.labels())
            later = frozenset(along.label for others in self.held[m + 1 :] for along in others.values())
            sizes = self.lengths, self.bytes, self.result
            choice = Choice(self.form, *sizes, self.held[m], self._ranks(m), taken, later, self.blocks)
            options = choice.options() or choice.resharded().options()
        if not options:
            self.stuck = max(self.stuck, m)
        for option in options:
            yield from self.all_options((*before, option))

    def found(self, options: tuple[Option | None, ...]) -> _Found:
        """What these options lead to."""
        targets = tuple(
            spec.with_layout([_target(self.form, spec, term, o.axis if o else None, m) for m, o in enumerate(options)])
            for spec, term in zip(self.specs, self.form.terms, strict=True)
        )
        pairs = list(zip(self.specs, targets, strict=True))
        cost: float = sum(bytes_between(spec, target) for spec, target in pairs)
        for m, option in enumerate(options):
            if option is not None:
                cost += self._cost_of_work(options, option, targets, m)
        return _Found(options, targets, sum(_gathers(*pair) for pair in pairs), cost)

    def _cost_of_work(
        self, options: Sequence[Option | None], option: Option, targets: Sequence[ShardTensorSpec], m: int
    ) -> float:
        """The bytes that are sent on mesh dim ``m`` once all operands have their targets, and for the result's sum."""
        cost, sent, ranks = 0.0, option.axis.sent, self._ranks(m)
        for target, term in zip(targets, self.form.terms, strict=True):
            p = target.placements[m]
            if sent is not None and isinstance(p, Shard) and term[p.dim] == sent.label:
                cost += option.preferred * bytes_between(target, target.with_axes({m: AxisLayout(Replicate())}))
        if option.sums:
            out = self.form.out
            whole = [n for n, other in enumerate(options) if not (other and set(other.axis.labels()) & set(out))]
            copies = math.prod(self._ranks(n) for n in whole if n != m)
            cost += self.form.whole_result * (ranks - 1) * copies * self.result
        return cost

    def _ranks(self, m: int) -> int:
        ranks: int = self.specs[0].mesh.size(m)
        return ranks


def _gathers(spec: ShardTensorSpec, target: ShardTensorSpec) -> int:
    """On how many mesh dims the target needs a rank to have the shards of others."""
    pairs = zip(spec.placements, target.placements, strict=True)
    return sum(isinstance(p, Shard) and q.is_replicate() and spec.shape[p.dim] > 1 for p, q in pairs)


def _held(
    form: Form,
    lengths: Mapping[Label, int],
    blocks: Mapping[Label, int],
    specs: Sequence[ShardTensorSpec],
    m: int,
) -> dict[int, Along]:
    """What mesh dim ``m`` shards of each operand, unless one rank has all of it: of broadcast dims of length 1."""
    held = {}
    for i, spec in enumerate(specs):
        p = spec.placements[m]
        label = form.terms[i][p.dim] if isinstance(p, Shard) else None
        if not isinstance(p, Shard) or label is None:
            continue
        if label in form.whole and (spec.shape[p.dim] <= 1 or spec.mesh.size(m) == 1):
            continue
        sizes = _sizes(form, label, spec.sizes_along(m), lengths[label])
        if blocks.get(label, 1) > 1:
            # No boundary goes through a group.
            sizes = whole_blocks(sizes, blocks[label])
        held[i] = Along(label, sizes)
    return held


def _sizes(form: Form, label: Label, sizes: tuple[int, ...], n: int) -> tuple[int, ...]:
    """The sizes of a dim of length ``n`` next to a dim with the same label that has these."""
    total = sum(sizes)
    if n == total:
        return sizes
    return map_boundaries(sizes, lambda b: b * n // total) if label in form.groups and total else clipped(sizes, n)


def _target(form: Form, spec: ShardTensorSpec, term: Labels, axis: Axis | None, m: int) -> AxisLayout:
    """How an operand must lie on mesh dim ``m``."""
    p = spec.placements[m]
    for along in (axis.along, axis.sent if isinstance(p, Shard) else None) if axis else ():
        if along is not None and along.label in term:
            stays = isinstance(p, Shard) and term[p.dim] == along.label
            dim = p.dim if isinstance(p, Shard) and stays else list(term).index(along.label)
            return AxisLayout(Shard(dim), _sizes(form, along.label, along.sizes, spec.shape[dim]))
    return AxisLayout(Replicate())


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice of what one mesh dim shards.

    Attributes:
        form, lengths: the operator's, and of its labels.
        bytes: how many each operand has.
        result: how many bytes the result has, about.
        held: what the mesh dim shards of them now.
        ranks: how many the mesh dim has.
        taken: labels that mesh dims before it shard.
        later: labels that mesh dims behind it shard now.
        blocks: of labels with groups, how long the groups are.
    """

    form: Form
    lengths: dict[Label, int]
    bytes: Sequence[int]
    result: int
    held: dict[int, Along]
    ranks: int
    taken: frozenset[Label]
    later: frozenset[Label]
    blocks: Mapping[Label, int]

    def options(self) -> list[Option]:
        """All that may be done."""
        return [option for way in self.form.ways for option in way(self)]

    def resharded(self) -> Choice:
        """The choice once what must not be sharded is along the operand's best free label, where it has one."""
        busy = self.taken | self.later | self.form.whole
        held = dict(self.held)
        for i, along in self.held.items():
            labels = [x for x in self.form.terms[i] if x is not None and x not in busy]
            free = [x for x in labels if self.lengths[x] >= self.ranks]
            if along.label in self.form.whole and free:
                held[i] = self.evenly(self.best(free))
        return replace(self, held=held)

    def best(self, labels: Sequence[Label]) -> Label:
        """The one with the most even shards, to a tenth of their mean, and of several the longest.

        So two images of three channels are sharded as images.
        """

        def evenness(label: Label) -> tuple[float, int]:
            length = self.lengths[label]
            return -round(max(self.evenly(label).sizes) * self.ranks / length, 1), length

        return max(labels, key=evenness)

    def evenly(self, label: Label) -> Along:
        block = self.blocks.get(label, 1)
        return Along(label, tuple(block * n for n in chunk_sizes(self.lengths[label] // block, self.ranks)))

    def may_shard(self, label: Label) -> bool:
        return label not in self.taken and label not in self.form.whole

    def leading(self) -> dict[int, Along]:
        """What is sharded of the operands that decide."""
        leaders = {i: along for i, along in self.held.items() if self.form.leaders is None or i < self.form.leaders}
        return leaders or self.held

    def offered(self) -> Iterator[Along]:
        """What is sharded of the operands that decide, and may be of the others."""
        return (along for along in dict.fromkeys(self.leading().values()) if self.may_shard(along.label))

    def lacking(self, label: Label) -> dict[int, Along]:
        """The deciding operands that have no such dim, and what is sharded of them."""
        return {i: own for i, own in self.leading().items() if label not in self.form.terms[i]}

    def alike(self, along: Along) -> Iterator[Option]:
        """All sharded so, unless something is moved for a sum that is larger than the shards that are summed."""
        if not self.form.summed(along.label):
            yield Option(Axis(along))
            return
        held = self.leading()
        is_large = self.result * self.ranks > sum(self.bytes[i] for i in held)
        if not is_large or all(self.form.summed(own.label) for own in held.values()):
            # Whoever needs the values of the Partial will have the ranks sum them.
            yield Option(Axis(along), sums=is_large or any(own.label != along.label for own in held.values()))


def _refusal(
    op: object, form: Form, specs: Sequence[ShardTensorSpec], held: Mapping[int, Along], m: int
) -> UnsupportedSharding:
    for i, along in held.items():
        if along.label in form.whole:
            dim = list(form.terms[i]).index(along.label)
            return refuse(
                op,
                list(specs),
                no_other_dim(f"dim {dim} of operand {i}" if len(specs) > 1 else f"tensor dim {dim}", specs[i], m),
                f"redistribute it to Replicate() on mesh dim {m} if it is small, or shard another dim",
            )
    return refuse(
        op,
        list(specs),
        f"the operands are sharded on mesh dim {m} in a way that needs one of them unsharded",
        f"redistribute the smaller one to Replicate() on mesh dim {m}, or shard both along the same batch dim or "
        "the contracted dim with the same shard sizes",
    )


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


def no_other_dim(dim: str, spec: ShardTensorSpec, m: int) -> str:
    """The reason where mesh dim ``m`` shards ``dim``, such as "tensor dim 1", and can shard no other dim instead."""
    return (
        f"{dim} must be unsharded, but mesh dim {m} shards it, and no free dim has at least {spec.mesh.size(m)} "
        "elements to be sharded instead"
    )


# -- one operand, or several that are broadcast ---------------------------------------------------------------------


def free_dims(op: object, spec: ShardTensorSpec, *dims: int) -> ShardTensorSpec:
    """``spec`` with its longest dims that shard evenly instead of ``dims``, see [Note: whole rows] in sorting/sort.py.

    Raises:
        UnsupportedSharding: no free dim is at least as long as there are ranks.
    """
    labels = tuple(range(len(spec.shape)))
    free = arrange(op, Form((labels,), labels, frozenset(dims), (shared,)), (spec,)).targets[0]
    return spec.with_axes({m: free.layout[m] for m in spec.sharded_dims().values()})


def common_layout(specs: Sequence[ShardTensorSpec], meta: TensorMeta) -> ShardTensorSpec:
    """The spec of the result to which operands with ``specs`` broadcast, a tensor with ``meta``.

    Where they are sharded along dims that not all of them have, it is sharded as the first one: others would have to
    be gathered.
    """
    if all(spec is specs[0] for spec in specs) and meta == specs[0].tensor_meta:
        return specs[0]
    terms, out = batch_labels(meta.shape, *(spec.shape for spec in specs))
    layout = arrange("", Form(tuple(terms[1:]), out, ways=(gathering,)), tuple(specs)).out_layout(out)
    for m, axis in enumerate(layout):
        found = {own for spec in specs if (own := spec.layout[m]).placement.is_partial()}
        if found and not isinstance(axis.placement, Shard):
            layout[m] = found.pop() if len(found) == 1 else AxisLayout(Partial())
    return specs[0].with_layout(layout, meta)
