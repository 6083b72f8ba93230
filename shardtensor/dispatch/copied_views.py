"""Views that are copies: what happens when such a view, or the tensor that it is a view of, is written to.

[Note: views that are copies] A result that represents a view may be a copy. If that follows from the specs, because
operands had to be redistributed, what is written to a reshape is redistributed back, and writing to any other view is
refused: the viewed tensor would not change. Whether a reshape of a shard copies may depend on the shard's strides, so
one rank may make a copy and another one not. Every rank may write then, and a rank with a copy writes it back. In the
other direction, a copy is out of date once the viewed tensor has been written to. The version counter shows this on
every rank alike. Before the copy is read it gets the new values, from the shard or by taking the view again, or reading
it is refused.

``x.data`` has a version counter of its own, so that graphs that have saved x do not notice what is written to it. So
once a program has taken the data of some tensor, writes to x, to x.data, to x.detach() and to views of these are
counted as well.

Three attributes of a ShardTensor hold this. ``_viewed`` is the tensor that it is a view of, with its version at the
time, or None. ``_copied`` has the copies that this rank made. If the view is a copy on all ranks, ``_copied`` says how
the view is written back and taken again. ``_writes`` is the count of writes that a tensor which is no view to autograd
shares with others, or None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from .._compat import (
    DisableTorchFunction,
    OpOverload,
    counting_writes,
    is_traced,
    not_for_graphs,
    same_memory,
    whole_of,
)
from ..errors import refuse

View = TypeVar("View", bound=Tensor)
# (copy, original) for each copy on the way from the viewed tensor, both local tensors.
Copies = tuple[tuple[Tensor, Tensor], ...]
# Called with the view and the viewed tensor: it has this one's values become the view's.
Back = Callable[[Tensor, Tensor], None]


class Moved(NamedTuple):
    """How a view that is a copy on all ranks is kept up to date.

    Attributes:
        back: writes the view back; None where that is refused.
        again: takes the view of the viewed tensor again; None where reading it is refused once that was written to.
    """

    back: Back | None = None
    again: Callable[[Any], Any] | None = None


_counting = False  # whether a program has taken the data of a tensor

_copy = counting_writes(Tensor.copy_)
_OUT_OF_DATE = Moved()  # once the viewed tensor is written to


def mark_copied(view: View, viewed: Tensor, copies: Copies | Moved = _OUT_OF_DATE) -> View:
    """Record that ``view`` represents a view of ``viewed`` but is a copy: on all ranks, or this one made ``copies``."""
    noted: Any = view  # these attributes are ShardTensor's, which is defined on top of this module
    noted._copied, noted._viewed = copies, (viewed, _version(viewed))
    not_for_graphs(noted._local_tensor)  # a graph has no such record, so flattening the tensor is refused
    return view


def note_copies(view: View, viewed: Tensor, *, moved: bool, may_copy: bool, how: Moved) -> View:
    """Record with a view the copies through which it was made, so that what is written to it can be written back.

    Args:
        moved: the viewed tensor was redistributed before.
        may_copy: this rank may have had to copy its part.
        how: the view is kept up to date where it is a copy on all ranks.
    """
    copies: Copies | Moved = getattr(viewed, "_copied", ())
    if isinstance(copies, Moved) and copies.back is None:
        return mark_copied(view, viewed, Moved(None, how.again))
    if moved or isinstance(copies, Moved):
        return mark_copied(view, viewed, how if moved or may_copy else _OF_A_COPY)
    copy, original = _local(view), _local(viewed)
    if may_copy and not same_memory(copy, original):
        copies = (*copies, (copy, original))
    return mark_copied(view, viewed, copies) if copies else view


# A view with the memory of a viewed tensor that is itself a copy: a write to the view is one to the viewed tensor.
_OF_A_COPY = Moved(lambda view, viewed: note_write(viewed))


def lose(view: Tensor, viewed: Tensor) -> None:
    """Record that ``view`` does not show what ``viewed`` holds any longer, and cannot: reading it is refused."""
    lost: Any = view
    lost._copied, lost._viewed = _OUT_OF_DATE, (viewed, -1)


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor._local_tensor
    return local


def represents_view(tensor: object) -> bool:
    """Whether a tensor represents a view but is, or may be, a copy."""
    return getattr(tensor, "_viewed", None) is not None


def share_writes(tensor: Tensor, same: Tensor) -> None:
    """Count what is written to a tensor and to another one with its memory, its ``.data`` or ``detach()``, together."""
    whole, other = cast(Any, whole_of(tensor)), cast(Any, same)
    if getattr(whole, "_writes", None) is None:  # it may be of another class
        whole._writes = [0]
    other._writes = whole._writes


def count_writes() -> None:
    """From now on: before, the version counters that tensors share count all of them."""
    global _counting
    _counting = True


def _version(tensor: Tensor) -> int:
    with DisableTorchFunction():
        version: int = 0 if tensor.is_inference() else tensor._version  # inference tensors have no version counter
    return version + _counted(tensor)[0] if _counting else version


def _counted(tensor: Tensor) -> list[int]:
    return getattr(whole_of(tensor), "_writes", None) or [0]


def check_current(op: object, tensor: Tensor, *, communicates: bool = True) -> None:
    """Bring a tensor that represents a view up to date before it is read.

    Args:
        communicates: whether all ranks call ``op``, so that the view can be taken again from other ranks.

    Raises:
        UnsupportedSharding: the viewed tensor was written to, and the view cannot be taken again.
    """
    recorded: Any = tensor
    viewed, version = recorded._viewed
    if represents_view(viewed):
        check_current(op, viewed, communicates=communicates)
    now = _version(viewed)
    if now == version:
        return
    copies: Copies | Moved = recorded._copied
    if isinstance(copies, Moved):
        # Where the viewed tensor is current, whatever was written went through it.
        if copies is not _OF_A_COPY and not (communicates and _taken_again(recorded, viewed, copies)):
            raise refuse(
                op,
                tensor,
                "it represents a view but is a copy on shards, and the viewed tensor has been written to since",
                "take the view again after the write, or clone() it before",
            )
    else:
        for copy, original in copies:
            _copy(copy, original.reshape(copy.shape))
    recorded._viewed = viewed, now


def _taken_again(recorded: Any, viewed: Any, how: Moved) -> bool:
    """Whether a copy has got the values that the view has now; decided by what all ranks know."""
    if how.again is None or is_traced(_local(recorded)):
        return False
    known = whole_of(recorded) is whole_of(viewed)
    if not known and torch.is_grad_enabled() and (recorded.requires_grad or viewed.requires_grad):
        return False  # its values would be new, but not its place in the graph, which autograd gives its own views
    with torch.no_grad():
        fresh = how.again(viewed)
        if fresh._spec != recorded._spec:
            return False
        _copy(_local(recorded), _local(fresh))
        if not known and not recorded.is_inference():
            torch.autograd.graph.increment_version(recorded)  # a graph that has saved it notices, as with a view
    return True


def check_written(func: OpOverload, written: Tensor) -> None:
    """UnsupportedSharding where the tensor to be written to represents a view but is a copy that stays one."""
    copies = getattr(written, "_copied", ())
    if isinstance(copies, Moved) and copies.back is None:
        raise refuse(
            func,
            written,
            "it would write to a view that is a copy on shards",
            "use the out-of-place form (x = x + y for x += y), or write to the tensor that it is a view of",
        )


def note_write(written: Tensor) -> None:
    """After a tensor was written to: where it is a copy, copy that back to the tensor that it represents a view of."""
    recorded: Any = written
    copies: Copies | Moved = getattr(written, "_copied", ())
    if isinstance(copies, Moved):
        assert copies.back is not None  # see check_written
        copies.back(written, recorded._viewed[0])
    else:
        for copy, original in reversed(copies):
            _copy(original, copy.view(original.shape))
    if _counting:
        _counted(written)[0] += 1
    if isinstance(copies, Moved) and not (viewed := recorded._viewed[0]).is_inference():
        recorded._viewed = viewed, _version(viewed) + 1  # which it has when torch is done with the write
