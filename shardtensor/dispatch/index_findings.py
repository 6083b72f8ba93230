"""What ranks have found out together about a tensor's values, kept with the tensor.

[Note: found] Which rows of other ranks an index reads is in its values. To find out takes communication, and the host.
So what was found is kept until the values change. Whether it is used must be known alike on all ranks without asking.
So this follows from what the program did with the tensor, and from nothing else:

- It is kept with the tensor, and goes where that goes: a new tensor has nothing. Views have it in common with the
  tensor that they are views of, each under the *steps* of the program by which it was taken (``edge_index[0]`` is
  ``select(0, 0)``), so a view that is taken anew each time finds what the last one found. Addresses, weak references
  and garbage collection, which differ between ranks, have no part in it.
- It counts for one version of the tensor. Operators that write raise the ShardTensor's version, which views share, on
  all ranks alike.
- What is dropped, the oldest first, depends on how often ranks found something out together; never on what one may do
  for itself, such as taking a view to print it.

A rank that writes to its local tensor (``to_local()``, or what it has given to ``from_local``) does something that the
others cannot know: all may have done so, or this one alone. So code that uses what was found compares it with the
values that are there, and raises.

What is found about a *plain* tensor every rank finds by itself, after all have compared whether it is the same tensor.
It is kept as long as the tensor lives; for a view it is kept with the tensor that torch says it is a view of.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from .._compat import OpOverload
from ..layout.caches import forgets
from ..layout.spec import ShardTensorSpec
from ..ranks.debug_mode import debug_enabled

T = TypeVar("T")

MAX_FOUND = 32  # for one tensor and its views
INDICES = (torch.int64, torch.int32)  # the dtypes of tensors of which something is found
_SAME = ("aten::detach", "aten::alias")  # views that are no steps
_of_plain: MutableMapping[Tensor, dict[Hashable, tuple[int, Any]]] = WeakTensorKeyDictionary()
forgets(_of_plain.clear)


class RowsKey(NamedTuple):
    """The key of the rows that ranks read by an index of what is sharded in ``sizes`` on a mesh dim.

    Attributes:
        layout, lengths: the layout of the index, and how it is divided where every rank has all of it.
    """

    mesh: DeviceMesh
    mesh_dim: int
    sizes: tuple[int, ...]
    layout: Hashable
    lengths: tuple[int, ...]


class Place:
    """Where what is found about one tensor is kept.

    Attributes:
        entries: of all views of one tensor: by steps and key the tensor's version, and what was found.
        steps: how this one was taken.
    """

    __slots__ = ("entries", "steps")

    def __init__(self, entries: dict[Hashable, tuple[int, Any]], steps: tuple[Hashable, ...] = ()) -> None:
        self.entries, self.steps = entries, steps


def found(tensor: Tensor, key: Hashable, find: Callable[[], T]) -> T:
    """What ``find()`` returned for these values of the tensor and this key, which is called if nothing is kept.

    Args:
        tensor: a ShardTensor or a plain tensor; or another DTensor, with which nothing is kept.
        key: the same on all ranks.
    """
    if _forgets(tensor):
        return find()
    place, version = _place_of(tensor), tensor._version
    entry = place.entries.get((place.steps, key))
    if entry is not None and entry[0] == version:
        result: T = entry[1]
        return result
    result = find()
    place.entries.pop((place.steps, key), None)
    while len(place.entries) >= MAX_FOUND:
        place.entries.pop(next(iter(place.entries)))
    place.entries[place.steps, key] = version, result
    return result


def is_kept(tensor: Tensor, key: Hashable) -> bool:
    """Whether :func:`found` has something; the same on all ranks."""
    if _forgets(tensor):
        return False
    place = _place_of(tensor)
    entry = place.entries.get((place.steps, key))
    return entry is not None and entry[0] == tensor._version


def all_kept(tensor: Tensor) -> list[tuple[Any, Any]]:
    """The keys and what was found about the tensor and its views, the last first; the same on all ranks."""
    if _forgets(tensor):
        return []
    entries: Any = _place_of(tensor).entries.items()
    return [(key, value) for (_, key), (version, value) in reversed(entries) if version == tensor._version]


def rows_read_by(index: Tensor, n: int, source: ShardTensorSpec) -> tuple[int, tuple[int, ...]] | None:
    """Of ``n`` rows that a plain index, or a part of the same tensor, has read: the mesh dim that shards them, and
    their sizes, the last ones that were new. None where it does not shard ``source``, which is to be added to them."""
    for key, _ in all_kept(index):
        if isinstance(key, RowsKey) and key.mesh == source.mesh and sum(key.sizes) == n:
            return (key.mesh_dim, key.sizes) if source.placements[key.mesh_dim].is_shard() else None
    return None


def _place_of(tensor: Any) -> Place:
    if not hasattr(tensor, "_found"):
        base = tensor._base
        if base is None or base.layout is not torch.strided:  # of sparse ones, all parts are views alike
            base = tensor
        steps = () if base is tensor else (tensor.storage_offset(), tensor.shape, tensor.stride())
        entries = _of_plain.setdefault(base, {})
        return Place(entries, steps)
    if tensor._found is None:
        tensor._found = Place({})
    place: Place = tensor._found
    return place


def _forgets(tensor: Tensor) -> bool:
    """Whether nothing is kept: the tensor has no version, or ranks are to compare all that they do."""
    keeps = hasattr(tensor, "_found") or not isinstance(tensor, DTensor)
    return not keeps or tensor.is_inference() or debug_enabled()


def note_views(views: object, viewed: Tensor, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Let a view, or a list of views, have in common with the viewed tensor what is found about their values."""
    if viewed.dtype not in INDICES or not hasattr(viewed, "_found") or viewed.is_inference():
        return
    place, step = _place_of(viewed), (func, _hashable(args[1:]), *sorted(kwargs.items()))
    for i, view in enumerate(views if isinstance(views, (list, tuple)) else [views]):
        if hasattr(view, "_found"):
            steps = place.steps if func._schema.name in _SAME else (*place.steps, (*step, i))
            view._found = Place(place.entries, steps)


def _hashable(values: Any) -> Hashable:
    return tuple(map(_hashable, values)) if isinstance(values, (list, tuple)) else values


def raise_versions(written: Iterable[Any]) -> None:
    """Raise the versions of DTensors in a list that an operator has written to, as torch does for plain tensors."""
    torch.autograd.graph.increment_version(t for t in written if isinstance(t, DTensor) and not t.is_inference())
