"""What operators depend on besides their arguments: settings, which every rank makes alike.

Plans are cached, and compiled graphs guarded, by the values of all settings (:func:`settings`). So a setting that
changes what operators do is a :class:`Setting`, never a bare module variable.

A setting that is made inside a block holds for the code of that block alone: not for other threads, and not for other
tasks of asyncio. A thread may run in a copy of the block's context (asyncio.to_thread; each new thread, where Python
has no GIL), so settings know their thread. But a backward pass may run in threads of autograd's own (one for each GPU),
on behalf of the thread that called ``backward()``. What :func:`keep_for_backward` has kept, torch hands to these
threads: which thread has called, and its settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import get_ident
from typing import Any, Generic, TypeVar

from ._compat import backward_pass, keep_for_backward, kept_for_backward, not_in_graphs

T = TypeVar("T")


class _Values:
    """The values of all settings, of which some are changed.

    Attributes:
        base: those that are not changed.
        changed: by the setting's index.
        all: by the setting's index.
        deciding: those that plans depend on.
        thread: in which they were changed.
    """

    __slots__ = ("all", "base", "changed", "deciding", "thread")

    def __init__(self, base: tuple[Any, ...], changed: dict[int, Any]) -> None:
        self.base, self.changed, self.thread = base, changed, get_ident()
        self.all = tuple(changed.get(i, value) for i, value in enumerate(base))
        self.deciding = tuple(value for value, setting in zip(self.all, _all) if setting.decides)


_all: list[Setting[Any]] = []
_unchanged = _Values((), {})
# None: nothing was read here yet; UNCHANGED: nothing was changed here, where its ``deciding`` is what holds.
UNCHANGED = _Values((), {})
_here: ContextVar[_Values | None] = ContextVar("shardtensor's settings", default=None)
# What holds here: :func:`settings` asks, and so does who calls it often, without the call.
read_settings = _read = _here.get


class Setting(Generic[T]):
    """A value that decides what operators do.

    Args:
        decides: whether plans depend on it.

    Example:
        >>> method = Setting("auto")
        >>> with method.set_to("ring"):
        ...     method.value
        'ring'
        >>> method.value
        'auto'
    """

    __slots__ = ("_index", "decides")

    def __init__(self, value: T, *, decides: bool = True) -> None:
        self._index, self.decides = len(_all), decides
        _all.append(self)
        self.set_everywhere(value)

    @property
    def value(self) -> T:
        """The value here."""
        values = _unchanged if _read() is UNCHANGED else _current()
        here: T = values.all[self._index]
        return here

    def set(self, value: T) -> Any:
        """Change the value for this block of code alone. Returns what :meth:`restore` takes."""
        before = _read()
        _keep(_Values(_unchanged.all, {**_current().changed, self._index: value}))
        return before

    def set_everywhere(self, value: T) -> None:
        """Change the value wherever it was not changed by :meth:`set`."""
        global _unchanged
        base = _unchanged.all
        _unchanged = _Values((*base[: self._index], value, *base[self._index + 1 :]), {})
        UNCHANGED.deciding = _unchanged.deciding

    def restore(self, before: Any) -> None:
        """Undo what :meth:`set` has done, which returned ``before``, and all that was set since then."""
        _keep(before)

    @contextmanager
    def set_to(self, value: T) -> Iterator[None]:
        """Change the value inside the block."""
        before = self.set(value)
        try:
            yield
        finally:
            self.restore(before)


def settings() -> tuple[Any, ...]:
    """The values of the settings that plans depend on, hashable."""
    here = _read()
    if here is UNCHANGED:
        return UNCHANGED.deciding
    if here is not None and here.base is _unchanged.all and here.thread == get_ident():
        return here.deciding
    return _current().deciding


def _current() -> _Values:
    found = _read()
    if found is None or (found is not UNCHANGED and found.thread != get_ident()):
        found = None
        kept = kept_for_backward()
        if kept is not None and kept[0] != get_ident():
            found = kept[1]  # this is one of autograd's threads, which works for many
        elif backward_pass() < 0:
            _keep(UNCHANGED)
    if found is None or found is UNCHANGED:
        return _unchanged
    return found if found.base is _unchanged.all else _Values(_unchanged.all, found.changed)


def _keep(values: _Values | None) -> None:
    _here.set(values)
    if caller_of_backward() == get_ident():
        keep_for_backward((get_ident(), values))


def caller_of_backward() -> int:
    """The identifier of this thread; in one of autograd's, of the thread that called ``backward()``."""
    kept = kept_for_backward()
    return get_ident() if kept is None else kept[0]


_gather = Setting(False)


@not_in_graphs("call the compiled function inside of shardtensor.allow_gather(); it is compiled anew for that")
@contextmanager
def allow_gather() -> Iterator[None]:
    """Let operators that have no distributed form gather their operands, compute, and shard the result again.

    Outside this context they raise :class:`UnsupportedSharding`. All ranks must enter the context. It applies to the
    calling thread and to the backward passes that this thread starts, but not to other threads.

    Example:
        >>> import shardtensor
        >>> with shardtensor.allow_gather():
        ...     pass  # y = torch.linalg.svdvals(x)
    """
    with _gather.set_to(True):
        yield


def gather_allowed() -> bool:
    """Whether the calling code is inside :func:`allow_gather`."""
    return _gather.value


_half_precision = Setting("fast")


@not_in_graphs("call the compiled function inside of shardtensor.half_precision(); it is compiled anew for that")
@contextmanager
def half_precision(name: str) -> Iterator[None]:
    """Choose how a rank computes its contribution to the gradient of a weight in bfloat16 or float16.

    The ranks' contributions are summed in float32 in any case, and the sum is rounded. All ranks must choose alike. The
    choice applies to the forward pass of operators in the calling thread, and holds for their backward pass.

    Args:
        name: "fast" (default): by torch's kernel for the operands' dtype, which computes in float32 and rounds its
            result. So each contribution is rounded once. "exact": from operands that are converted to float32. So only
            the sum is rounded, as on one device; bytes and time of these kernels are those of float32. Where a kernel
            gives float32 at no cost, such as that of linear layers on CUDA, both are exact. See docs/how-it-works.md.

    Raises:
        ValueError: another name.

    Example:
        >>> import shardtensor
        >>> with shardtensor.half_precision("exact"):
        ...     pass  # loss = model(x).mean()
    """
    if name not in ("fast", "exact"):
        raise ValueError(f"half precision {name!r}: choose 'fast' or 'exact'")
    with _half_precision.set_to(name):
        yield


def contributions_are_exact() -> bool:
    """Whether the calling code is inside ``half_precision("exact")``."""
    return _half_precision.value == "exact"
