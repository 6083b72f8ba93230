"""What operators depend on besides their arguments: settings, which every rank makes alike.

Plans are cached, and compiled graphs guarded, by the values of all settings (:func:`settings`). So a setting that
changes what operators do is a :class:`Setting`, never a bare module variable.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from ._compat import not_in_graphs

__all__ = ["Setting", "allow_gather", "gather_allowed", "settings"]

T = TypeVar("T")
_all: list[Setting[Any]] = []
_values: tuple[Any, ...] = ()


class Setting(Generic[T]):
    """A value that decides what operators do.

    Example:
        >>> method = Setting("auto")
        >>> with method.set_to("ring"):
        ...     method.value
        'ring'
        >>> method.value
        'auto'
    """

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value
        _all.append(self)
        _read_all()

    def set(self, value: T) -> None:
        """Change the value, for all threads."""
        self.value = value
        _read_all()

    @contextmanager
    def set_to(self, value: T) -> Iterator[None]:
        """Change the value inside the block."""
        previous = self.value
        self.set(value)
        try:
            yield
        finally:
            self.set(previous)


def _read_all() -> None:
    global _values
    _values = tuple(setting.value for setting in _all)


def settings() -> tuple[Any, ...]:
    """The values of all settings, hashable."""
    return _values


_gather = Setting(False)


@not_in_graphs("call the compiled function inside of shardtensor.allow_gather(); it is compiled anew for that")
@contextmanager
def allow_gather() -> Iterator[None]:
    """Let operators that have no distributed form gather their operands, compute, and shard the result again.

    Outside this context they raise :class:`UnsupportedSharding`. Every rank has to enter it alike. It holds for all
    threads of the process: on GPUs, autograd runs the backward pass in threads of its own.

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
