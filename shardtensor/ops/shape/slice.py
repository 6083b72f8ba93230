"""Taking parts: slice, narrow, split, select, unbind and their gradients, along any dims.

[Note: slices stay where they are] A slice of a sharded dim keeps its owners: a cut ``c`` of the input becomes the
number of taken indices below ``c``. Nothing travels, forward or backward, and the result is a view of the shard.

[Note: cuts of gradients] The gradient's operator knows the input's shape, but not how it was cut; and many cuts of the
input give the same cut of the slice. So a slice remembers the cuts that it was made from. That is a hint: when the
gradient arrives otherwise than the slice was cut, or when two inputs share their slice, the gradient gets *a* cut, and
whoever needs a particular one redistributes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from ...copies import mark_copied
from ...errors import refuse
from ...geometry import map_cuts, sizes_of
from ...operators import operator
from ...planning import Call, Plan, argument, meta_of
from ...redistribute import redistribute_local
from ...registry import register
from ...spec import ShardTensorSpec
from ...tensor import ShardTensor, redistribute_to, run, wrap
from .view import carry, moved_off, wrap_dim

__all__ = ["cut_of_slice", "cut_of_sliced", "remember", "remembered"]

_aten = torch.ops.aten

# -- geometry ---------------------------------------------------------------------------------------------


def cut_of_slice(taken: range) -> Callable[[int], int]:
    """How a slice maps cuts: to the number of taken indices below.

    Example:
        >>> cut = cut_of_slice(range(2, 7, 2))
        >>> [cut(c) for c in (0, 2, 3, 5, 8)]
        [0, 0, 1, 2, 3]
    """
    return lambda c: max(0, min(len(taken), -((taken.start - c) // taken.step)))


def cut_of_sliced(taken: range, n: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Sizes of a dim of length ``n`` whose slice has ``sizes``: each rank gets what lies up to its last taken index.

    Example:
        >>> cut_of_sliced(range(2, 7, 2), 9, (1, 0, 2))
        (3, 0, 6)
    """
    cuts, at = [0], 0
    for size in sizes[:-1]:
        at += size
        cuts.append(0 if at == 0 else n if at == len(taken) else taken[at - 1] + 1)
    return sizes_of([*cuts, n])


def _bounds(taken: range, own: tuple[int, int]) -> tuple[int, int]:
    """The part of a slice that lies in a shard, in the shard's own indices."""
    cut = cut_of_slice(taken)
    first, stop = cut(own[0]), cut(own[1])
    if stop <= first:
        return 0, 0
    return taken[first] - own[0], taken[stop - 1] + 1 - own[0]


# -- slice ------------------------------------------------------------------------------------------------

MAX_REMEMBERED = 16384


class _Memory:
    """What has been taken from where on one mesh, see [Note: cuts of gradients].

    All ranks must remember alike, though they build their plans anew at different times. The ranks of a mesh make the
    same calls, so what is new is new to all of them. Nothing is forgotten: a full memory takes nothing more. And an
    answer, once given, stays.
    """

    def __init__(self) -> None:
        self.sources: dict[Any, list[ShardTensorSpec]] = {}
        self.answers: dict[Any, list[ShardTensorSpec]] = {}
        self.count = 0


_memories: dict[Any, _Memory] = {}


def _memory(spec: ShardTensorSpec) -> _Memory:
    return _memories.setdefault((id(spec.mesh), spec.mesh, spec.coordinate), _Memory())


def remember(key: Any, spec: ShardTensorSpec) -> None:
    """Note that what ``key`` describes was taken from a tensor with this spec."""
    memory = _memory(spec)
    known = memory.sources.get((key, spec.shape), [])
    if memory.count < MAX_REMEMBERED and not any(s.lies_like(spec) for s in known):
        memory.sources[key, spec.shape] = [*known, spec]
        memory.count += 1


def remembered(key: Any, grad: ShardTensorSpec, shape: Sequence[int]) -> list[ShardTensorSpec]:
    """The specs of tensors of ``shape`` from which what ``key`` describes had been taken when its gradient first came
    with the spec ``grad``.
    """
    memory = _memory(grad)
    answer = memory.answers.get((key, grad, tuple(shape)))
    if answer is None and len(memory.answers) < MAX_REMEMBERED:
        answer = memory.answers[key, grad, tuple(shape)] = memory.sources.get((key, tuple(shape)), [])
    return answer or []


def _sliced(spec: ShardTensorSpec, meta: Any, dim: int, taken: range) -> ShardTensorSpec:
    m = spec.sharded_dims().get(dim)
    sizes = list(spec.sizes)
    if m is not None:
        sizes[m] = map_cuts(spec.cut(m), cut_of_slice(taken))
    return spec.replace(meta=meta, sizes=tuple(sizes))


@operator(_aten.slice.Tensor)
def _slice(call: Call) -> Plan:
    spec = call.specs[0]
    dim = wrap_dim(argument(call, 1, "dim", 0), len(spec.shape))
    start, end, step = argument(call, 2, "start", None), argument(call, 3, "end", None), argument(call, 4, "step", 1)
    taken = range(*slice(start, end, step).indices(spec.shape[dim]))
    m = spec.sharded_dims().get(dim)
    if m is not None:
        remember((dim, taken), spec)
    a, b = _bounds(taken, (0, spec.shape[dim]) if m is None else spec.interval(m))
    out = _sliced(spec, meta_of(call.meta), dim, taken)
    return Plan(out, call=lambda x, *_, **__: _aten.slice.Tensor(x, dim, a, b, step))


@operator(_aten.slice_backward.default)
def _slice_backward(call: Call) -> Plan:
    """The gradient of a slice: ``grad`` among zeros."""
    grad, (_, shape, dim, start, end, step) = call.reduced()[(0,)], call.args
    dim = wrap_dim(dim, len(shape))
    taken = range(*slice(start, end, step).indices(shape[dim]))
    known = remembered((dim, taken), grad, shape)
    alike = [s for s in known if s.for_gradient().placements == grad.placements]
    exact = [s for s in alike if _sliced(s, grad.tensor_meta, dim, taken).sizes == grad.sizes]
    m = grad.sharded_dims().get(dim)
    sizes = list(grad.sizes)
    if m is not None:
        source = next(iter(exact or alike), None)
        sizes[m] = cut_of_sliced(taken, shape[dim], grad.cut(m)) if source is None else source.sizes[m]
    out = grad.replace(meta=meta_of(call.meta), sizes=tuple(sizes))
    a, b = _bounds(taken, (0, shape[dim]) if m is None else out.interval(m))
    local = list(out.local_shape())
    target = _sliced(out, grad.tensor_meta, dim, taken)
    return call.plan(out, {(0,): target}, call=lambda g, *_: _aten.slice_backward.default(g, local, dim, a, b, step))


@operator(
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.unsafe_split.Tensor,
    _aten.unsafe_split_with_sizes.default,
)
def _split(call: Call) -> Plan:
    spec = call.specs[0]
    dim = wrap_dim(argument(call, 2, "dim", 0), len(spec.shape))
    m = spec.sharded_dims().get(dim)
    own = (0, spec.shape[dim]) if m is None else spec.interval(m)
    outputs, bounds, at = [], [], 0
    for meta in call.meta:
        taken = range(at, at + meta.shape[dim])
        at = taken.stop
        outputs.append(_sliced(spec, meta_of(meta), dim, taken))
        bounds.append(_bounds(taken, own))
    return Plan(outputs, call=lambda x, *_, **__: [_aten.slice.Tensor(x, dim, a, b) for a, b in bounds])


@register(torch.tensor_split, Tensor.tensor_split)
def _tensor_split(input: Any, indices_or_sections: Any = None, dim: int = 0, **kwargs: Any) -> Any:
    """Only for indices in a ShardTensor: their values are read, so every rank must have them all."""
    indices = kwargs.get("tensor_indices_or_sections", indices_or_sections)
    if not isinstance(indices, DTensor):
        return NotImplemented
    if not all(p.is_replicate() for p in indices.placements):
        raise refuse("tensor_split", [input, indices], "the indices are not whole", "pass a plain tensor or a list")
    return torch.tensor_split(input, indices.to_local().tolist(), dim)


# -- select: an entry of a sharded dim is the sum of what its owner has and of the others' zeros -----------------


def _summed(spec: ShardTensorSpec, dim: int) -> ShardTensorSpec:
    """The spec of an entry of ``dim``, which is kept with length 1."""
    m = spec.sharded_dims()[dim]
    placements, sizes = list(spec.placements), list(spec.sizes)
    placements[m] = Partial() if spec.mesh.size(m) > 1 else Replicate()
    sizes[m] = None
    return spec.replace(placements=placements, sizes=tuple(sizes))


def _entry(x: Any, dim: int, index: int) -> tuple[int, int]:
    """The normalized arguments of a select from a sharded dim; torch's own error where there is no such entry."""
    dim, n = wrap_dim(dim, x.ndim), x.shape[dim]
    if not -n <= index < n:
        raise IndexError(f"index {index} is out of bounds for dimension {dim} with size {n}")
    return dim, index % n


def _is_sharded(x: Any, dim: Any) -> bool:
    return (
        isinstance(x, ShardTensor)
        and isinstance(dim, int)
        and -x.ndim <= dim < x.ndim
        and dim % x.ndim in x._spec.sharded_dims()
    )


@register(torch.select, Tensor.select)
def _select_function(input: Any, dim: Any, index: Any) -> Any:
    if not _is_sharded(input, dim) or not isinstance(index, int):
        return NotImplemented
    dim, index = _entry(input, dim, index)
    row = torch.narrow(input, dim, index, 1)
    entry = mark_copied(redistribute_to(row, _summed(row._spec, dim)).squeeze(dim), input)
    entry._entry_of = input, dim, index  # for what is to be written there
    return entry


@register(_aten.select.int)
def _select_below_autograd(x: Any, dim: int, index: int) -> Any:
    if not _is_sharded(x, dim):
        return NotImplemented
    dim, index = _entry(x, dim, index)
    row = run(_aten.slice.Tensor, (x, dim, index, index + 1), {})
    target = _summed(row._spec, dim)
    entry = wrap(redistribute_local(row._local_tensor, row._spec, target), target)
    return mark_copied(run(_aten.squeeze.dim, (entry, dim), {}), x)


@operator(_aten.select.int)
def _select(call: Call) -> Plan:
    spec = call.specs[0]
    dim = wrap_dim(call.args[1], len(spec.shape))
    return Plan(carry(call, spec, call.meta, {d: d - (d > dim) for d in range(len(spec.shape)) if d != dim}))


@operator(_aten.select_backward.default)
def _select_backward(call: Call) -> Plan:
    spec = call.reduced()[(0,)]
    dim = wrap_dim(call.args[2], len(call.args[1]))
    out = carry(call, spec, call.meta, {d: d + (d >= dim) for d in range(len(spec.shape))})
    shape = list(out.local_shape())
    return call.plan(out, {(0,): spec}, call=lambda g, _, *rest: _aten.select_backward.default(g, shape, *rest))


@operator(_aten.unbind.int)
def _unbind(call: Call) -> Plan:
    """Of a sharded dim, see [Note: moved off] in view.py. Where no other dim is long enough, short Partials."""
    spec = call.specs[0]
    dim = wrap_dim(argument(call, 1, "dim", 0), len(spec.shape))
    dims = {d: d - (d > dim) for d in range(len(spec.shape)) if d != dim}
    source = moved_off(spec, dims)
    if dim not in source.sharded_dims():
        return call.plan([carry(call, source, m, dims) for m in call.meta], {(0,): source})
    entry = _summed(spec, dim)
    outputs = [carry(call, entry, m, dims) for m in call.meta]
    a, b = spec.interval(spec.sharded_dims()[dim])
    shape = outputs[0].local_shape()

    def entries(x: Tensor, *_: Any) -> list[Tensor]:
        return [x.select(dim, i - a) if a <= i < b else x.new_zeros(shape) for i in range(len(outputs))]

    return Plan(outputs, [((0,), spec, spec)], call=entries)  # with an input that moves: they are copies
