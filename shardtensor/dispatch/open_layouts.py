"""Tensors whose layout is open until a sharded value is written to them: ``x.new_zeros``, and written tensors.

A replicated tensor takes the layout of a sharded value, too, if it cannot be written otherwise: see ``decide_anew``.

[Note: open layouts] Such a tensor is replicated, and is marked as open. When the first sharded value is written to it,
the tensor takes that value's sizes before the write: each rank keeps its slice, nothing is sent, and the tensor is an
ordinary sharded one from then on. The value may be written to a view of it. Strides and offset of the local tensors,
which are those of the whole tensor, tell what the view sees of it. All views that exist then are taken again, without
communication: a rank may have views that are gone already on another rank. A view that would need communication is
lost, and reading it is refused.

An open tensor is the one object in which layout and local tensor change. What hands out its memory closes it. What
``x.new_zeros`` makes is one number, seen as many times, until the tensor is laid out or something other than reading is
done to it: a rank may have no room for all rows.

A sum over an index, as in ``src.new_zeros(n, f).index_add_(0, index, src)``, says of its rows only how many there are,
not whose they are. If the index is sharded, its values tell: with the edges of a graph that lie with their targets,
each rank names nodes of its own. So the ranks tell each other once the first and the last row that each of them names.
If these intervals follow each other, the rows are sharded in the same way. They get the sizes of what has been read by
this index, or by another part of the same tensor (``x[edge_index[0]]``), if these sizes suit the intervals, or if the
intervals overlap. Otherwise the rows stay replicated, and the ranks' contributions are summed.

The rows of a plain index get the sizes of what it has read: nodes lie like the positions that edges were computed from.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from .._compat import (
    OpOverload,
    TensorMeta,
    count_with_memory_of,
    is_base_held,
    is_traced,
    tracing,
    tree_leaves,
    whole_of,
)
from .._compat.c10d import group_along
from ..communication.redistribute import all_gather, redistribute_local
from ..communication.row_halos import each_once
from ..errors import UnsupportedSharding
from ..layout.intervals import boundaries_of, chunk_sizes, map_boundaries, sizes_of
from ..layout.placements import AxisLayout
from ..layout.spec import ShardTensorSpec
from ..ranks.cuda_graphs import is_capturing
from .copied_views import lose
from .index_findings import RowsKey, all_kept, found, is_kept, rows_read_by
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
    fill(root)
    for view, _ in _views(root):
        view._open = None
    root._open = None


def fill(tensor: Any) -> None:
    """Give an open tensor memory for each of its elements."""
    local = tensor._local_tensor
    if local.numel() > 1 and not any(local.stride()):
        tensor._local_tensor = local.contiguous()


def _root(tensor: Any) -> tuple[Any, Take | None]:
    opening = tensor._open
    return (tensor if opening.root is None else opening.root), opening.take


def _views(root: Any) -> list[tuple[Any, Take]]:
    return [(view, take) for ref, take in root._open.views if (view := ref()) is not None]


def note_open_views(out: object, first: Tensor, take: Callable[[Tensor], Any]) -> None:
    """Mark what an operator returned as views of its first tensor, which is open; ``take`` calls the operator."""
    root, before = _root(first)
    for i, view in enumerate(tree_leaves(out)):

        def again(t: Tensor, i: int = i) -> Tensor:
            views: list[Tensor] = tree_leaves(take(t if before is None else before(t)))
            return views[i]

        view._open = _Opening(root, again)
        root._open.views.append((weakref.ref(view), again))


# -- replicated tensors -----------------------------------------------------------------------------------------------


def items_of(args: Sequence[Any]) -> Iterator[list[Any]]:
    """The arguments of an operator on lists for each item of the first one: lists of one item."""
    return ([[a[i]] if isinstance(a, list) and a else a for a in args] for i in range(len(args[0])))


def decide_anew(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Lay out a replicated tensor that is refused as the target of a sharded value: whether it has another layout now.

    It has not where something else has its memory, which would not see the write: another view, a local tensor that
    the program holds, or a graph. All ranks of a program that does the same on all have the same, once what waits for
    being collected is. A leaf that requires grad keeps the layout that its gradient will have.
    """
    written = args[0]
    if type(written) is list:
        if len(written) != 1:
            return any([decide_anew(func, item, kwargs) for item in items_of(args)])
        written = written[0]
    if not hasattr(written, "_open") or tracing():
        return False
    if not _open_alone(written):
        gc.collect()
        if not _open_alone(written):
            return False
    decide(func, args, kwargs)
    if unchanged := is_open(written):
        close(_root(written)[0])
    return not unchanged


def _open_alone(written: Any) -> bool:
    """Mark a tensor as open, with the one that it is a view of, if no other has their memory."""
    held = is_base_held(written)
    root: Any = whole_of(written)
    is_view = root is not written
    if root._viewed is not None or root._spec.partial_mesh_dims() or (root.requires_grad and root.is_leaf):
        return False
    if count_with_memory_of(written._local_tensor) != 1 + is_view:
        return False
    if not (is_view and held):
        leave_open(written)
        return True
    if not root._spec.is_replicate():
        return False
    take = taken_by_index(root._local_tensor, written._local_tensor)
    if take is None:
        return False
    leave_open(root)
    written._open = _Opening(root, take)
    root._open.views.append((weakref.ref(written), take))
    return True


def taken_by_index(whole: Tensor, view: Tensor) -> Take | None:
    """How a view is taken of a tensor by an index and an order of dims; None if it is another kind of view."""
    rest, strides = int(view.storage_offset() - whole.storage_offset()), whole.stride()
    index, kept = [slice(None)] * whole.ndim, []
    dims = [k for k in range(view.ndim) if view.shape[k] > 1]
    for d in sorted(range(whole.ndim), key=lambda d: -strides[d]):
        n, stride = whole.shape[d], max(1, strides[d])
        start, rest = divmod(rest, stride) if n > 1 else (0, rest)
        steps = {k: view.stride(k) // stride for k in dims if k not in kept and view.stride(k) % stride == 0}
        k = next((k for k, s in steps.items() if s > 0 and start + (view.shape[k] - 1) * s < n), None)
        length, step = (1, 1) if k is None else (view.shape[k], steps[k])
        index[d] = slice(start, start + (length - 1) * step + 1, step)
        kept += [] if k is None else [k]
    order = sorted((d for d in range(whole.ndim) if index[d].stop - index[d].start > 1), key=lambda d: -strides[d])

    def take(t: Tensor) -> Tensor:
        part = t[tuple(index[d] if d in order else index[d].start for d in range(t.ndim))]
        held = sorted(order)
        part = part.permute([held.index(order[kept.index(k)]) for k in dims])
        for k in range(view.ndim):
            part = part if view.shape[k] > 1 else part.unsqueeze(k)
        return part

    if len(kept) != len(dims) or 0 in view.shape:
        return None
    found = take(whole.detach())
    same = found.shape == view.shape and found.storage_offset() == view.storage_offset()
    return take if same and all(found.stride(k) == view.stride(k) for k in dims) else None


# -- the first sharded value ------------------------------------------------------------------------------------------


def decide(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Lay out the open tensor to which an in-place operator is about to write, if it writes a sharded value."""
    tensors = dict(distributed_operands(args, kwargs))
    if not any(spec.sharded_dims() for spec in tensors.values()):
        return
    written = args[0][0] if isinstance(args[0], list) else args[0]
    axes = dict(_axes(func, args, kwargs, tensors))
    root, _ = _root(written)
    found: dict[int, AxisLayout] = {}
    taken = set(root._spec.sharded_dims())
    for m, (dim, sizes) in axes.items():
        if not isinstance(root._spec.placements[m], Replicate):
            continue  # of a tensor that is sharded on another mesh dim
        axis = (dim, sizes) if written is root else _seen_through(written, root, dim, sizes)
        if axis is not None and axis[0] not in taken:  # two dims of a view may be parts of one
            taken.add(axis[0])
            found[m] = AxisLayout(Shard(axis[0]), axis[1])
    if found:
        _lay_out(root, root._spec.with_axes(found))


def _lay_out(root: Any, target: ShardTensorSpec) -> None:
    views = _views(root)
    root._local_tensor, root._spec = redistribute_local(root._local_tensor, root._spec, target), target
    close(root)
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
    result = plan.outputs[0] if isinstance(plan.outputs, list) else plan.outputs
    place, first = next(iter(tensors.items()))
    for m, p in enumerate(result.placements):
        if isinstance(p, Shard):
            yield m, (p.dim, result.sizes_along(m))
        elif isinstance(p, Replicate):
            axis = _indexed_axis(call, first, [spec for path, spec in tensors.items() if path != place], m)
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
    if n < first.mesh.size(m) or not any(sizes):
        return None
    return dim, map_boundaries(sizes, lambda b: b * n // sum(sizes))


# -- a sum over an index -----------------------------------------------------------------------------------------------

_aten = torch.ops.aten
# What reduces by index: in the arguments dim, index and source follow the tensor.
REDUCES_BY_INDEX = frozenset(
    {
        *(_aten.scatter_add_.default, _aten.scatter_reduce_.two, _aten.index_add_.default, _aten.index_reduce_.default),
        *(_aten.scatter_add.default, _aten.scatter_reduce.two, _aten.index_add.default, _aten.index_reduce.default),
    }
)


def decide_by_index(root: Any, dim: int, index: Any, source: Any = None, *_: object) -> None:
    """Lay out the open tensor into which an index reduces, by the rows that each rank names, or that it has read."""
    into, spec = root._spec, getattr(index, "_spec", None)
    if _root(root)[0] is not root or not into.shape:
        return
    dim %= len(into.shape)
    if into.is_replicate() and (axes := axes_like_read(root, dim, index, source)):
        _lay_out(root, into.with_axes(axes))
    if not isinstance(spec, ShardTensorSpec) or spec.mesh != into.mesh:
        return
    m = spec.sharded_dims().get(dim if len(spec.shape) == len(into.shape) else 0)
    if m is None:
        return
    n, local, key = into.shape[dim], index._local_tensor, ("intervals", m)
    if is_traced(local) or (is_capturing(local.device) and not is_kept(index, key)):
        return
    intervals = found(index, key, lambda: _named(local, spec, m))
    if any(low < 0 or high >= n for low, high in intervals if low <= high):
        raise IndexError(f"an index is out of range for dimension {dim} with size {n}")
    kept = [k for k, _ in all_kept(index) if isinstance(k, RowsKey) and k.mesh_dim == m]
    used = [k.sizes for k in kept if sum(k.sizes) == n]
    sizes = _rows_of_ranks(intervals, n, used)
    if sizes is not None:
        _lay_out(root, into.with_axes({m: AxisLayout(Shard(dim), sizes)}))


def axes_like_read(into: Tensor, dim: int, index: Any, source: Any, *_: object) -> dict[int, AxisLayout]:
    """How a tensor that every rank has is sharded to reduce ``source`` into it by a plain index, by mesh dim."""
    added = getattr(source, "_spec", None)
    if added is None or isinstance(index, DTensor) or not into.ndim:
        return {}
    read = rows_read_by(index, into.shape[dim], added)
    return {} if read is None else {read[0]: AxisLayout(Shard(dim % into.ndim), read[1])}


def _named(local: Tensor, spec: ShardTensorSpec, m: int) -> list[list[int]]:
    """The first and the last row that each rank's part of an index names; ``[0, -1]`` where it names none."""
    part = each_once(local)
    ends = torch.stack(part.aminmax()).long() if part.numel() else torch.tensor([0, -1], device=local.device)
    return all_gather(ends, group_along(spec.mesh, m)).tolist()


def _rows_of_ranks(
    intervals: Sequence[Sequence[int]], n: int, used: Sequence[tuple[int, ...]]
) -> tuple[int, ...] | None:
    """Which of ``n`` rows are which rank's, by the intervals that they name; None where these say nothing.

    Args:
        used: sizes in which others have so many rows; the last ones first.

    Example:
        >>> _rows_of_ranks([[0, 3], [5, 6], [0, -1]], 9, []), _rows_of_ranks([[0, 5], [5, 6]], 9, [])
        ((4, 5, 0), None)
        >>> _rows_of_ranks([[0, 3], [5, 6]], 9, [(2, 7), (5, 4)]), _rows_of_ranks([[0, 5], [3, 6]], 9, [(2, 7)])
        ((5, 4), (2, 7))
    """
    named = [(r, low, high) for r, (low, high) in enumerate(intervals) if low <= high]
    for sizes in used:
        bounds = boundaries_of(sizes)
        if all(bounds[r] <= low and high < bounds[r + 1] for r, low, high in named):
            return sizes
    if all(high < low for (_, _, high), (_, low, _) in zip(named, named[1:])):
        ends = [0] * len(intervals)
        for r, _, high in named:
            ends[r:] = [high + 1] * (len(ends) - r)
        last = named[-1][0] if named else len(ends) - 1
        ends[last:] = [n] * (len(ends) - last)
        return sizes_of([0, *ends])
    return used[0] if used else None


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
