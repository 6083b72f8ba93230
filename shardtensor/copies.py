"""Views that are copies, and what is written to them or to what they view.

[Note: views that are copies] What stands for a view may be a copy. Where that follows from the specs (operands had to
be redistributed) nobody may write to it: the viewed tensor would not change. A reshape of a shard copies or not as the
shard's strides have it, on one rank and not on another; so every rank may write, and one with a copy writes it back.
The other way round, a copy is out of date once the viewed tensor has been written to. Its version counter tells so on
every rank alike: reading the copy is refused then, or, where the shard has it all, made up for.
"""

from __future__ import annotations

from typing import Any

import torch

from ._compat import not_for_graphs, same_memory
from .errors import refuse

__all__ = ["check_current", "check_written", "mark_copied", "note_copies", "stands_for_view", "write_back"]


def mark_copied(view: Any, viewed: Any) -> Any:
    """Remember that ``view`` stands for a view of ``viewed`` but is a copy, on some ranks at least."""
    return _noted(view, viewed, None)


def note_copies(view: Any, viewed: Any, *, moved: bool, may_copy: bool) -> Any:
    """Keep with a view how what is written to it comes back: ``(copy, original)`` for each copy on the way here.

    Args:
        moved: the viewed tensor was redistributed before.
        may_copy: this rank may have had to copy its part.
    """
    copies = getattr(viewed, "_copied", ())
    if moved or copies is None:
        return mark_copied(view, viewed)
    copy, original = view._local_tensor, viewed._local_tensor
    if may_copy and not same_memory(copy, original):
        copies = (*copies, (copy, original))
    return _noted(view, viewed, copies) if copies else view


def _noted(view: Any, viewed: Any, copies: Any) -> Any:
    view._copied, view._viewed = copies, (viewed, _version(viewed))
    not_for_graphs(view._local_tensor)  # which know nothing of this: flattening such a tensor is refused
    return view


def stands_for_view(tensor: Any) -> bool:
    """Whether a tensor is, or may be, a copy that stands for a view."""
    return getattr(tensor, "_viewed", None) is not None


def _version(tensor: Any) -> int:
    return 0 if tensor.is_inference() else tensor._version  # in inference mode nobody counts


def check_current(op: Any, tensor: Any) -> None:
    """Bring what stands for a view up to date before it is read.

    Raises:
        UnsupportedSharding: the viewed tensor was written to, and the new values are on other ranks.
    """
    viewed, version = tensor._viewed
    if stands_for_view(viewed):
        check_current(op, viewed)
    now = _version(viewed)
    if now == version:
        return
    if tensor._copied is None:
        raise refuse(
            op,
            tensor,
            "it stands for a view but is a copy on shards, and the viewed tensor has been written to since",
            "take the view again after the write, or clone() it before",
        )
    for copy, original in tensor._copied:
        copy.copy_(original.reshape(copy.shape))
    tensor._viewed = viewed, now


def check_written(func: torch._ops.OpOverload, written: Any) -> None:
    """UnsupportedSharding where what is to be written to is a copy on all ranks."""
    if getattr(written, "_copied", ()) is None:
        raise refuse(func, written, "it would write to a view that is a copy on shards", "use the out-of-place form")


def write_back(written: Any) -> None:
    """Bring what was written to a copy back to the tensor that it stands for a view of."""
    for copy, original in reversed(getattr(written, "_copied", ())):
        original.copy_(copy.view(original.shape))
