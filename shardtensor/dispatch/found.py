"""What ranks have found out together about a tensor's values, kept with the tensor.

[Note: found] Which rows an index reads of other ranks is in its values; to find out takes communication, and the host.
So what was found is kept until the values change. Whether it is used must be known alike on all ranks without asking,
so it follows from what the program did with the tensor, and from nothing else:

- It is kept with the tensor, and goes where that goes: a new tensor has nothing. Views have it in common with the
  tensor that they are views of, each under the *steps* of the program by which it was taken (``edge_index[0]`` is
  ``select(0, 0)``), so a view that is taken anew each time finds what the last one found. Addresses, weak references
  and garbage collection, which differ between ranks, have no part in it.
- It counts for one version of the tensor. Operators that write raise the ShardTensor's version, which views share, on
  all ranks alike.
- What is dropped, the oldest first, depends on how often ranks found something out together; never on what one may do
  for itself, such as taking a view to print it.

A rank that writes to its local tensor (``to_local()``, or what it has given to ``from_local``) does something that the
others cannot know; all may have done so, or this one. The local tensor's version shows it here, so this rank raises.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._compat import OpOverload, same_memory
from ..ranks.debug_mode import debug_enabled
from .copies import version_of

T = TypeVar("T")

MAX_FOUND = 32  # for one tensor and its views


class _Origin:
    """A tensor that is no view, for it and its views.

    Attributes:
        local: its local tensor.
        found: under steps and key: the version of the tensor, the local tensor's, and what was found.
    """

    __slots__ = ("found", "local")

    def __init__(self, local: Tensor) -> None:
        self.local = local
        self.found: dict[Hashable, tuple[int, int, Any]] = {}


class Place:
    """Where what is found about one tensor is kept.

    Attributes:
        steps: how the tensor was taken from its origin.
        seen: the versions of the tensor and of its local tensor when it was made, or something was last looked for.
    """

    __slots__ = ("origin", "seen", "steps")

    def __init__(self, origin: _Origin, steps: tuple[Hashable, ...] = ()) -> None:
        self.origin, self.steps = origin, steps
        self.seen = (-1, 0)

    def keep(self, key: Hashable, entry: tuple[int, int, Any]) -> None:
        found = self.origin.found
        found.pop((self.steps, key), None)
        while len(found) >= MAX_FOUND:
            found.pop(next(iter(found)))
        found[self.steps, key] = entry


def place_of(tensor: Any) -> Place:
    """Where what is found about a ShardTensor is kept."""
    if tensor._found is None:
        tensor._found = Place(_Origin(tensor._local_tensor))
    place: Place = tensor._found
    return place


def is_kept(tensor: Any, key: Hashable) -> bool:
    """Whether :func:`found` has something; the same on all ranks."""
    if _forgets(tensor):
        return False
    place = place_of(tensor)
    entry = place.origin.found.get((place.steps, key))
    return entry is not None and entry[0] == tensor._version


def found(operator: object, tensor: Any, key: Hashable, find: Callable[[], T]) -> T:
    """What ``find()`` returned for these values of the tensor and this key, which is called if nothing is kept.

    Args:
        operator: who asks, for errors.
        tensor: a ShardTensor, or another DTensor, with which nothing is kept.
        key: the same on all ranks.

    Raises:
        RuntimeError: on this rank, which has written to its local tensor since.
    """
    if _forgets(tensor):
        return find()
    place = place_of(tensor)
    version, own, origin = tensor._version, version_of(tensor._local_tensor), version_of(place.origin.local)
    entry = place.origin.found.get((place.steps, key))
    if entry is not None and entry[0] == version:
        if entry[1] != origin or (place.seen[0] == version and place.seen[1] != own):
            raise RuntimeError(
                f"{operator}: this rank's local tensor of an index, {tensor._spec}, was written to, and other ranks "
                "cannot know it: they would exchange the rows that it named before. Remedy: write to the ShardTensor "
                "(index.copy_(new)) or make a new one (from_local), on all ranks."
            )
        place.seen = version, own
        result: T = entry[2]
        return result
    place.seen = version, own
    made = find()
    place.keep(key, (version, origin, made))
    return made


def _forgets(tensor: Any) -> bool:
    """Whether nothing is kept: it has no version, or ranks are to compare all that they do."""
    return not hasattr(tensor, "_found") or tensor.is_inference() or debug_enabled()


_INDICES = (torch.int64, torch.int32)  # the dtypes of tensors of which something is found
# Views of the same values.
_SAME = ("aten::detach", "aten::alias")


def note_views(view: Any, viewed: Any, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Let a view, or a list of views, have in common with the viewed tensor what is found about their values."""
    if viewed.dtype not in _INDICES or not hasattr(viewed, "_found") or viewed.is_inference():
        return
    place, step = place_of(viewed), (func, _hashable(args[1:]), *sorted(kwargs.items()))
    for i, one in enumerate(view if isinstance(view, (list, tuple)) else [view]):
        if hasattr(one, "_found"):
            same = func._schema.name in _SAME
            one._found = Place(place.origin, place.steps if same else (*place.steps, (*step, i)))
            one._found.seen = viewed._version, version_of(one._local_tensor)


def _hashable(values: Any) -> Hashable:
    return tuple(map(_hashable, values)) if isinstance(values, (list, tuple)) else values


def lent(tensor: Any) -> Tensor:
    """The local tensor of a view, for the user, who may write to it: what is written shows at the origin, too."""
    local: Tensor = tensor._local_tensor
    place = tensor._found
    if place is None or place.origin.local is local or not same_memory(local, place.origin.local):
        return local
    same: Tensor = place.origin.local.as_strided(local.shape, local.stride(), local.storage_offset())
    return same
