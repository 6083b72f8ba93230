"""Taking parts: slice, narrow, split, select, unbind and their gradients, along any dims.

The entries of a slice stay with their owners: a boundary ``b`` of the input becomes the number of taken indices below
``b``. Nothing is sent, forward or backward, and the result is a view of the shard. The gradient gets the input's
layout, if that is known.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from ..._compat import AutogradFunction, FunctionContext, TensorMeta, is_traced
from ...dispatch.copied_views import Moved, mark_copied
from ...dispatch.planning import AtenCall, AtenPlan, argument, meta_of
from ...dispatch.registry import DECLINED
from ...dispatch.tensor import ShardTensor, as_gradient, wrap
from ...layout.intervals import Interval, intervals_of, map_boundaries, resized, sizes_of
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Composed, operator
from ..common.records import Key, note, recall
from .view import carry, dim_of, moved_off, wrap_dim

# -- slice sources -----------------------------------------------------------------------------------------------------

# Where slices were taken from, so that their gradients get the layout of the tensors that they are gradients of.
#
# The operator that computes a slice's gradient knows the input's shape, but not its shard sizes; and many shard sizes
# of the input give the same sizes of the slice. So a slice leaves a record of the layout of its input. The record is a
# hint. If the gradient arrives in another layout than the slice had, or if two inputs have slices of one layout, the
# gradient gets *a* layout, and code that needs a particular one redistributes.


def _keys(how: Hashable, shape: Sequence[int], part: ShardTensorSpec) -> tuple[Key, Key]:
    """The key for a part of exactly this layout, and that for any part with its placements.

    They hold how the part was taken, the source's shape, the part's placements and, if they matter, its sizes.
    """
    alike = (how, tuple(shape), part.placements)
    return (*alike, part.sizes), alike


def record_source(how: Hashable, source: ShardTensorSpec, part: ShardTensorSpec) -> None:
    """Note that a part, taken as ``how`` says, of a tensor with the spec ``source`` has gradients like ``part``."""
    for key in _keys(how, source.shape, part):
        note(source, key, source)


def source_of(how: Hashable, shape: Sequence[int], grad: ShardTensorSpec) -> ShardTensorSpec | None:
    """The spec of a tensor of ``shape`` that ``grad`` may be the gradient of a part of; None if none is recorded.

    It is one whose part has the layout of ``grad``, or failing that, the placements.
    """
    found: ShardTensorSpec | None = recall(grad, *_keys(how, shape, grad))
    return found


# -- slice -------------------------------------------------------------------------------------------------------------

_aten = torch.ops.aten

# -- geometry ---------------------------------------------------------------------------------------------


def boundary_of_slice(taken: range) -> Callable[[int], int]:
    """How a slice maps boundaries: to the number of taken indices below.

    Example:
        >>> boundary = boundary_of_slice(range(2, 7, 2))
        >>> [boundary(b) for b in (0, 2, 3, 5, 8)]
        [0, 0, 1, 2, 3]
    """
    return lambda b: max(0, min(len(taken), -((taken.start - b) // taken.step)))


def sizes_before_slice(taken: range, n: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Sizes of a dim of length ``n`` whose slice has ``sizes``: each rank gets what comes up to its last taken index.

    Example:
        >>> sizes_before_slice(range(2, 7, 2), 9, (1, 0, 2))
        (3, 0, 6)
    """
    boundaries, at = [0], 0
    for size in sizes[:-1]:
        at += size
        boundaries.append(0 if at == 0 else n if at == len(taken) else taken[at - 1] + 1)
    return sizes_of([*boundaries, n])


def _own_bounds(taken: range, own: Interval) -> Interval:
    """The part of a slice that lies in a shard, in the shard's own indices."""
    boundary = boundary_of_slice(taken)
    first, stop = boundary(own[0]), boundary(own[1])
    if stop <= first:
        return 0, 0
    return taken[first] - own[0], taken[stop - 1] + 1 - own[0]


# -- slice ------------------------------------------------------------------------------------------------


def _sliced(spec: ShardTensorSpec, meta: TensorMeta, dim: int, taken: range) -> ShardTensorSpec:
    m = spec.sharded_dims().get(dim)
    if m is None:
        return spec.replace(meta=meta)
    sizes = map_boundaries(spec.sizes_along(m), boundary_of_slice(taken))
    return spec.with_axes({m: spec.layout[m]._replace(sizes=sizes)}).replace(meta=meta)


def _narrow(dim: int, a: int, b: int) -> Callable[..., Tensor]:
    """What takes a part of a shard: a view. If it is empty, it does not keep the shard's memory, but a write to it
    counts as one to the shard, as on the other ranks."""

    def empty(x: Tensor, *_: Any, **__: Any) -> Tensor:
        part = x.narrow(dim, a, 0)
        if not is_traced(x):
            part.data = x.new_empty(part.shape)  # leaves the counter of writes, which is the shard's
        return part

    return empty if a == b else lambda x, *_, **__: x.narrow(dim, a, b - a)


@operator(_aten.slice.Tensor)
def _slice(call: AtenCall) -> AtenPlan:
    spec = call.specs[0]
    dim = wrap_dim(argument(call, 1, "dim", 0), len(spec.shape))
    start, end, step = argument(call, 2, "start", None), argument(call, 3, "end", None), argument(call, 4, "step", 1)
    taken = range(*slice(start, end, step).indices(spec.shape[dim]))
    out = _sliced(spec, meta_of(call.meta), dim, taken)
    if dim in spec.sharded_dims():
        record_source((dim, taken), spec, out.for_gradient())
    a, b = _own_bounds(taken, spec.own_interval(dim))
    if step == 1 or a == b:  # the quickest way to a slice
        return AtenPlan(out, call=_narrow(dim, a, b))
    return AtenPlan(out, call=lambda x, *_, **__: _aten.slice.Tensor(x, dim, a, b, step))


@operator(_aten.slice_backward.default)
def _slice_backward(call: AtenCall) -> AtenPlan:
    """The gradient of a slice: ``grad`` among zeros."""
    grad, (_, shape, dim, start, end, step) = call.reduced()[(0,)], call.args
    dim = wrap_dim(dim, len(shape))
    taken = range(*slice(start, end, step).indices(shape[dim]))
    m = grad.sharded_dims().get(dim)
    out = grad.replace(meta=meta_of(call.meta))
    if m is not None:
        source = source_of((dim, taken), shape, grad)
        sizes = sizes_before_slice(taken, shape[dim], grad.sizes_along(m)) if source is None else source.sizes_along(m)
        out = out.with_axes({m: grad.layout[m]._replace(sizes=sizes)})
    a, b = _own_bounds(taken, out.own_interval(dim))
    local = list(out.local_shape())
    target = _sliced(out, grad.tensor_meta, dim, taken)
    return call.plan(out, {(0,): target}, call=lambda g, *_: _aten.slice_backward.default(g, local, dim, a, b, step))


@operator(
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.unsafe_split.Tensor,
    _aten.unsafe_split_with_sizes.default,
)
def _split(call: AtenCall) -> AtenPlan:
    spec = call.specs[0]
    dim = wrap_dim(argument(call, 2, "dim", 0), len(spec.shape))
    own = spec.own_interval(dim)
    outputs, bounds, at = [], [], 0
    for meta in call.meta:
        taken = range(at, at + meta.shape[dim])
        at = taken.stop
        outputs.append(_sliced(spec, meta_of(meta), dim, taken))
        bounds.append(_own_bounds(taken, own))
    parts = [_narrow(dim, a, b) for a, b in bounds]
    return AtenPlan(outputs, call=lambda x, *_, **__: [part(x) for part in parts])


# The second argument has another name in each of the overloads.
_SPLIT_AT = ("tensor_indices_or_sections", "indices", "sections")


@operator(torch.tensor_split, Tensor.tensor_split, tensors=" ".join(("input", *_SPLIT_AT)), partial="input")
def _tensor_split(
    call: Arguments,
    input: ShardTensorSpec,
    tensor_indices_or_sections: ShardTensorSpec | Sequence[int] | int | None = None,
    dim: int = 0,
    *,
    indices: ShardTensorSpec | Sequence[int] | int | None = None,
    sections: ShardTensorSpec | Sequence[int] | int | None = None,
) -> Composed:
    """Only for indices in a ShardTensor: their values are read, so every rank must have them all."""
    places = [call.tensors[name] for name in _SPLIT_AT if name in call.tensors]
    if not places:
        return DECLINED
    if not places[0].is_replicate():
        raise call.refuse("the indices are not replicated", "pass a plain tensor or a list")

    def parts(x: Tensor, *given: Any) -> Sequence[Tensor]:
        (at,) = (t for t in given if t is not None)
        return torch.tensor_split(x, at.to_local().tolist(), dim)

    return Composed(parts)


# -- select: an entry of a sharded dim is the sum of what its owner has and of the others' zeros, see [Note: owners] ---


def _summed(spec: ShardTensorSpec, dim: int, index: int) -> ShardTensorSpec:
    """The spec of an entry of ``dim``, which is kept with length 1."""
    m = spec.sharded_dims()[dim]
    held = tuple(int(a <= index < b) for a, b in intervals_of(spec.sizes_along(m)))
    return spec.with_axes({m: AxisLayout(Partial(), held) if len(held) > 1 else AxisLayout(Replicate())})


def _without(spec: ShardTensorSpec, dim: int) -> ShardTensorSpec:
    """The spec of an entry without its dim."""
    meta = spec.tensor_meta
    shape, stride = ((*of[:dim], *of[dim + 1 :]) for of in (meta.shape, meta.stride))
    axes = {m: AxisLayout(Shard(d - (d > dim)), spec.sizes_along(m)) for d, m in spec.sharded_dims().items()}
    layout = [axes.get(m, axis) for m, axis in enumerate(spec.layout)]
    return spec.with_layout(layout, meta._replace(shape=torch.Size(shape), stride=stride))


def entry_of(x: Tensor | ShardTensorSpec, dim: int, index: int) -> int:
    """The number of an entry that may count from the end; torch's IndexError where there is none."""
    n = x.shape[dim]
    if not -n <= index < n:
        raise IndexError(f"index {index} is out of bounds for dimension {dim} with size {n}")
    return index % n


@operator(torch.select, Tensor.select, tensors="input", partial="input")
def _select_above_autograd(call: Arguments, input: ShardTensorSpec, dim: int, index: int) -> Composed:
    """As the slice of length 1, whose gradient gets the layout of the input."""
    d = dim_of(input, dim)
    if d is None or d not in input.sharded_dims() or not isinstance(index, int):
        return DECLINED
    at, meta = entry_of(input, d, index), input.tensor_meta
    taken = range(at, at + 1)
    kept = _sliced(input, meta._replace(shape=torch.Size(resized(meta.shape, d, 1))), d, taken)
    record_source((d, taken), input, kept.for_gradient())
    slot = _Slot(d, at, kept, _without(_summed(input, d, at), d), _read_entry(input, d, at))

    def entry(x: Tensor) -> Tensor:
        result: ShardTensor = mark_copied(_Entry.apply(x, slot), x, Moved(again=entry))
        result._entry_of = x, d, at  # type: ignore[attr-defined]  # for writing there, see getitem.py
        return result

    return Composed(entry)


@operator(torch.squeeze, Tensor.squeeze, tensors="input", partial="input")
def _squeeze_entry(call: Arguments, input: ShardTensorSpec, dim: int | None = None) -> Composed:
    """The only entry of a sharded dim, as of ``split(x, 1, dim)``."""
    d = dim_of(input, dim) if isinstance(dim, int) else None
    if d is None or d not in input.sharded_dims() or input.shape[d] != 1:
        return DECLINED
    return Composed(lambda x: torch.select(x, d, 0))


class _Slot(NamedTuple):
    """Where an entry is, and how it lies: with its dim ``kept``, and as the result is."""

    dim: int
    at: int
    kept: ShardTensorSpec
    result: ShardTensorSpec
    read: Callable[..., Tensor]


class _Entry(AutogradFunction):
    """Its gradient goes to the owner alone, and into zeros of the tensor's own shards."""

    apply: ClassVar[Callable[[Tensor, _Slot], Any]]

    @staticmethod
    def forward(ctx: FunctionContext, x: ShardTensor, slot: _Slot) -> ShardTensor:
        ctx.set_materialize_grads(False)
        ctx.slot, ctx.shape = slot, x.shape
        return wrap(slot.read(x._local_tensor), slot.result)

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor | None) -> tuple[Tensor | None, None]:
        if grad is None:
            return None, None
        dim, index, kept = ctx.slot[:3]
        part = as_gradient(grad.unsqueeze(dim), kept)
        return _aten.slice_backward.default(part, ctx.shape, dim, index, index + 1, 1), None


def _read_entry(spec: ShardTensorSpec, dim: int, index: int) -> Callable[..., Tensor]:
    """What this rank's shard has of an entry of a sharded dim: all of it, or zeros."""
    a, b = spec.own_interval(dim)
    local = spec.local_shape()
    shape = [*local[:dim], *local[dim + 1 :]]
    if a <= index < b:
        return lambda x, *_: x.select(dim, index - a).clone()
    return lambda x, *_: x.new_zeros(shape)


@operator(_aten.select.int)
def _select(call: AtenCall) -> AtenPlan:
    spec, index = call.specs[0], call.args[2]
    dim = wrap_dim(call.args[1], len(spec.shape))
    dims = {d: d - (d > dim) for d in range(len(spec.shape)) if d != dim}
    if dim not in spec.sharded_dims():
        return AtenPlan(carry(call, spec, call.meta, dims))
    index = wrap_dim(index, spec.shape[dim])
    out = carry(call, _summed(spec, dim, index), call.meta, dims)
    return AtenPlan(out, call=_read_entry(spec, dim, index), call_moves=True)


@operator(_aten.select_backward.default)
def _select_backward(call: AtenCall) -> AtenPlan:
    spec = call.reduced()[(0,)]
    dim = wrap_dim(call.args[2], len(call.args[1]))
    out = carry(call, spec, call.meta, {d: d + (d >= dim) for d in range(len(spec.shape))})
    shape = list(out.local_shape())
    return call.plan(out, {(0,): spec}, call=lambda g, _, *rest: _aten.select_backward.default(g, shape, *rest))


@operator(_aten.unbind.int)
def _unbind(call: AtenCall) -> AtenPlan:
    """A sharded dim is exchanged for another, see [Note: moved off] in view.py.

    If no other dim is long enough, each entry is a Partial.
    """
    spec = call.specs[0]
    dim = wrap_dim(argument(call, 1, "dim", 0), len(spec.shape))
    dims = {d: d - (d > dim) for d in range(len(spec.shape)) if d != dim}
    source = moved_off(spec, dims)
    if dim not in source.sharded_dims():
        return call.plan([carry(call, source, m, dims) for m in call.meta], {(0,): source})
    outputs = [carry(call, _summed(spec, dim, i), m, dims) for i, m in enumerate(call.meta)]
    a, b = spec.interval(spec.sharded_dims()[dim])
    shape = outputs[0].local_shape()

    def entries(x: Tensor, *_: int) -> list[Tensor]:
        return [x.select(dim, i - a) if a <= i < b else x.new_zeros(shape) for i in range(len(outputs))]

    return AtenPlan(outputs, call=entries, call_moves=True)
