"""Views that are copies: what happens when such a view, or the tensor that it is a view of, is written to.

[Note: views that are copies] A result that represents a view may be a copy. Where that follows from the specs (operands
had to be redistributed), what is written to a reshape is redistributed back, and writing to any other view is refused:
the viewed tensor would not change. A reshape of a shard copies or not depending on the shard's strides, on one rank and
not on another; so every rank may write, and one with a copy writes it back. In the other direction, a copy is out of
date once the viewed tensor has been written to. The version counter shows this on every rank alike: reading the copy is
then refused, or, where the shard has all of the new values, the copy is updated.

Two attributes of a ShardTensor hold this. ``_viewed`` is the tensor that it is a view of, with its version at the time,
or None. ``_copied`` has the copies that this rank made, or, where the view is a copy on all ranks, the function that
writes it back, None where there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from .._compat import OpOverload, not_for_graphs, same_memory
from ..errors import refuse

View = TypeVar("View", bound=Tensor)
# (copy, original) for each copy on the way from the viewed tensor, both local tensors.
Copies = tuple[tuple[Tensor, Tensor], ...]
# Called with the view and the viewed tensor: it has this one's values become the view's.
Back = Callable[[Any, Any], None]


def mark_copied(view: View, viewed: Tensor, copies: Copies | Back | None = None) -> View:
    """Record that ``view`` represents a view of ``viewed`` but is a copy: on all ranks, or this one made ``copies``."""
    noted: Any = view  # these attributes are ShardTensor's, which is defined on top of this module
    noted._copied, noted._viewed = copies, (viewed, _version(viewed))
    not_for_graphs(_local(view))  # a graph has no such record, so flattening the tensor is refused
    return view


def note_copies(view: View, viewed: Tensor, *, moved: bool, may_copy: bool, back: Back | None) -> View:
    """Record with a view the copies through which it was made, so that what is written to it can be written back.

    Args:
        moved: the viewed tensor was redistributed before.
        may_copy: this rank may have had to copy its part.
        back: writes the view back where it is a copy, if there is such a function.
    """
    copies: Copies | Back | None = getattr(viewed, "_copied", ())
    if copies is None:
        return mark_copied(view, viewed)
    if moved or not isinstance(copies, tuple):
        return mark_copied(view, viewed, back if moved or may_copy else _of_a_copy)
    copy, original = _local(view), _local(viewed)
    if may_copy and not same_memory(copy, original):
        copies = (*copies, (copy, original))
    return mark_copied(view, viewed, copies) if copies else view


def _of_a_copy(view: Any, viewed: Any) -> None:
    """Write back a view that has the memory of the viewed tensor, which is a copy itself."""
    write_back(viewed)


def lose(view: Tensor, viewed: Tensor) -> None:
    """Record that ``view`` does not show what ``viewed`` holds any longer, and cannot: reading it is refused."""
    lost: Any = view
    lost._copied, lost._viewed = None, (viewed, -1)


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return local


def represents_view(tensor: object) -> bool:
    """Whether a tensor represents a view but is, or may be, a copy."""
    return getattr(tensor, "_viewed", None) is not None


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors have no version counter


def check_current(op: object, tensor: Tensor) -> None:
    """Bring a tensor that represents a view up to date before it is read.

    Raises:
        UnsupportedSharding: the viewed tensor was written to, and the new values are on other ranks.
    """
    recorded: Any = tensor
    viewed, version = recorded._viewed
    if represents_view(viewed):
        check_current(op, viewed)
    now = _version(viewed)
    if now == version:
        return
    if recorded._copied is _of_a_copy:  # of one that is current, so whatever was written went through it
        recorded._viewed = viewed, now
        return
    if not isinstance(recorded._copied, tuple):
        raise refuse(
            op,
            tensor,
            "it represents a view but is a copy on shards, and the viewed tensor has been written to since",
            "take the view again after the write, or clone() it before",
        )
    for copy, original in recorded._copied:
        copy.copy_(original.reshape(copy.shape))
    recorded._viewed = viewed, now


def check_written(func: OpOverload, written: Tensor) -> None:
    """UnsupportedSharding where the tensor to be written to represents a view but is a copy that stays one."""
    if getattr(written, "_copied", ()) is None:
        raise refuse(
            func,
            written,
            "it would write to a view that is a copy on shards",
            "use the out-of-place form (x = x + y for x += y), or write to the tensor that it is a view of",
        )


def write_back(written: Tensor) -> None:
    """Copy what was written to a copy back to the tensor that it represents a view of."""
    copies: Copies | Back = getattr(written, "_copied", ())
    if not isinstance(copies, tuple):
        recorded: Any = written
        viewed, _ = recorded._viewed
        copies(written, viewed)
        if not viewed.is_inference():
            recorded._viewed = viewed, _version(viewed) + 1  # which it has when torch is done with the write
        return
    for copy, original in reversed(copies):
        original.copy_(copy.view(original.shape))
