"""Tensors whose layout is open until a sharded value is written to them, see ``implicit_replication``.

[Note: open layouts] Such a tensor is replicated, and is marked as open. Where the first sharded value is written to it,
it takes that value's sizes before the write: each rank keeps its slice, nothing is sent, and the tensor is an ordinary
sharded one from then on. The value may be written to a view of it; what the view sees of the tensor is told by strides
and offset of the local tensors, which are those of the whole one. All views that exist then are taken again, without
communication: a rank may have views that on another one are gone already. One that would need some is lost, and reading
it is refused.

An open tensor is the one object in which layout and local tensor change; whatever hands out its memory closes it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from .._compat import OpOverload, TensorMeta, tree_leaves
from ..communication.redistribute import redistribute_local
from ..errors import UnsupportedSharding
from ..layout.geometry import boundaries_of, chunk_sizes, map_boundaries, sizes_of
from ..layout.placements import AxisLayout
from ..layout.spec import ShardTensorSpec
from .copies import lose
from .planning import AtenCall, distributed_operands, meta_of, returning
from .registry import rule_of

# How a view is taken of the open tensor.
Take = Callable[[Tensor], Tensor]


class _Opening:
    """Marks an open tensor, or a view of one.

    Attributes:
        root: the open tensor, None in its own mark.
        take: how the view is taken of it.
        views: in the open tensor's own mark: its views, and how these are taken.
    """

    __slots__ = ("root", "take", "views")

    def __init__(self, root: Tensor | None = None, take: Take | None = None) -> None:
        self.root, self.take = root, take
        self.views: list[tuple[weakref.ref[Tensor], Take]] = []


def is_open(tensor: object) -> bool:
    """Whether a tensor, or the tensor that it is a view of, has an open layout."""
    return getattr(tensor, "_open", None) is not None


def leave_open(tensor: Any) -> None:
    """Mark a replicated ShardTensor, which shares its memory with no other tensor, as open."""
    tensor._open = _Opening()


def close(tensor: Any) -> None:
    """Keep the layout of an open tensor as it is, and with it that of its views."""
    root, _ = _root(tensor)
    for view, _ in _views(root):
        view._open = None
    root._open = None


def _root(tensor: Any) -> tuple[Any, Take | None]:
    opening = tensor._open
    return (tensor if opening.root is None else opening.root), opening.take


def _views(root: Any) -> list[tuple[Any, Take]]:
    return [(view, take) for ref, take in root._open.views if (view := ref()) is not None]


def note_open_views(out: Any, first: Any, take: Callable[[Tensor], Any]) -> None:
    """Mark what an operator returned as views of its first tensor, which is open; ``take`` calls the operator."""
    root, before = _root(first)
    for i, view in enumerate(tree_leaves(out)):

        def again(t: Tensor, i: int = i) -> Tensor:
            views: list[Tensor] = tree_leaves(take(t if before is None else before(t)))
            return views[i]

        view._open = _Opening(root, again)
        root._open.views.append((weakref.ref(view), again))


# -- the first sharded value ------------------------------------------------------------------------------------------


def decide(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Lay out the open tensor to which an in-place operator is about to write, if it writes a sharded value."""
    tensors = dict(distributed_operands(args, kwargs))
    if not any(spec.sharded_dims() for spec in tensors.values()):
        return
    written = args[0]
    axes = dict(_axes(func, args, kwargs, tensors))
    root, _ = _root(written)
    found: dict[int, AxisLayout] = {}
    taken: set[int] = set()
    for m, (dim, sizes) in axes.items():
        axis = (dim, sizes) if written is root else _seen_through(written, root, dim, sizes)
        if axis is not None and axis[0] not in taken:  # two dims of a view may be parts of one
            taken.add(axis[0])
            found[m] = AxisLayout(Shard(axis[0]), axis[1])
    if found:
        _lay_out(root, root._spec.with_axes(found))


def _lay_out(root: Any, target: ShardTensorSpec) -> None:
    views = _views(root)
    close(root)
    root._local_tensor, root._spec = redistribute_local(root._local_tensor, root._spec, target), target
    for view, take in views:
        try:
            new: Any = take(root)
        except UnsupportedSharding:
            lose(view, root)
            continue
        view._local_tensor, view._spec = new._local_tensor, new._spec
        view._copied, view._viewed = new._copied, new._viewed


def _axes(
    func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], tensors: dict[Any, ShardTensorSpec]
) -> Iterator[tuple[int, tuple[int, tuple[int, ...]]]]:
    """Along which dim, and how, the result would be sharded on a mesh dim if it were a new tensor."""
    new = returning(func)
    build = None if new is None else rule_of(new)
    if new is None or build is None:
        return
    call = AtenCall.of(new, args, kwargs, tensors)
    try:
        plan = build(call)
    except UnsupportedSharding:
        return
    result, first = plan.outputs, tensors[(0,)]
    for m, p in enumerate(result.placements):
        if isinstance(p, Shard):
            yield m, (p.dim, result.sizes_along(m))
        elif isinstance(p, Replicate):
            axis = _indexed_axis(call, first, [spec for path, spec in tensors.items() if path != (0,)], m)
            if axis is not None:
                yield m, axis


def _indexed_axis(
    call: AtenCall, first: ShardTensorSpec, others: Sequence[ShardTensorSpec], m: int
) -> tuple[int, tuple[int, ...]] | None:
    """Of a value that is written by index, and sharded along the index: the dim that is indexed, in proportion."""
    first_sharded = next((spec for spec in others if isinstance(spec.placements[m], Shard)), None)
    if first_sharded is None:
        return None
    place = call.args[1]
    if isinstance(place, (list, tuple)):  # index_put
        dims = [d for d, index in enumerate(place) if index is not None]
    elif isinstance(place, int) and len(call.args) > 2 and hasattr(call.args[2], "shape"):
        dims = [place % len(first.shape)]
    else:
        return None
    dim = max(dims, key=lambda d: first.shape[d])
    n, sizes = first.shape[dim], first_sharded.sizes_along(m)
    if n < first.mesh.size(m):
        return None
    return dim, map_boundaries(sizes, lambda b: b * n // max(1, sum(sizes)))


# -- through views ----------------------------------------------------------------------------------------------------


def _seen_through(view: Any, root: Any, dim: int, sizes: Sequence[int]) -> tuple[int, tuple[int, ...]] | None:
    """The dim of an open tensor that is dim ``dim`` of its view, and its sizes where the view has these.

    None where the view's dim is none of the tensor's own.
    """
    whole, part = meta_of(root._local_tensor), meta_of(view._local_tensor)
    offset = view._local_tensor.storage_offset() - root._local_tensor.storage_offset()
    found = _window(whole, part, offset, dim)
    if found is None:
        return None
    d, start, step = found
    return d, _around(sizes, start, step, whole.shape[d])


def _window(whole: TensorMeta, part: TensorMeta, offset: int, dim: int) -> tuple[int, int, int] | None:
    """Of a tensor's dim that is a view's dim ``dim``: the dim, where the view begins, and its step."""
    length = part.shape[dim]
    order = sorted((d for d, n in enumerate(whole.shape) if n > 1), key=lambda d: -whole.stride[d])
    for d in order:
        stride = whole.stride[d]
        start, offset = divmod(offset, stride) if stride else (0, offset)
        step, rest = divmod(part.stride[dim], stride) if stride else (0, 1)
        if step and not rest and start + (length - 1) * step < whole.shape[d]:
            others = [s for k, s in enumerate(part.stride) if k != dim and part.shape[k] > 1]
            # Of a dim that the view has split, no part is the dim.
            return None if any(stride <= s < stride * whole.shape[d] for s in others) else (d, start, step)
    return None


def _around(sizes: Sequence[int], start: int, step: int, n: int) -> tuple[int, ...]:
    """The sizes of a dim of length ``n`` whose entries ``start``, ``start + step``, ... are sharded in ``sizes``.

    Boundaries outside of these entries are where even shards have theirs, or as near to that as possible.

    Example:
        >>> _around((3, 0), 0, 1, 8), _around((2, 1), 4, 1, 8)
        ((4, 4), (6, 2))
    """
    length = sum(sizes)
    if length == n:
        return tuple(sizes)
    result = [0]
    for b, even in zip(boundaries_of(sizes)[1:-1], boundaries_of(chunk_sizes(n, len(sizes)))[1:-1]):
        if b == 0:
            result.append(min(even, start))
        elif b == length:
            result.append(max(even, start + step * (length - 1) + 1))
        else:
            result.append(start + step * b)
    return sizes_of([*result, n])
