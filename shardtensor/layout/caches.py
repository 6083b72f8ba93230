"""Caches of what was worked out for the process groups of one world.

Plans and specs hold meshes and process groups, which are gone with the world that they were made in. A later mesh may
equal an earlier one, and would find what was cached for that, though its groups have other names. So all of it is
forgotten when the default process group changes.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

P = ParamSpec("P")
R = TypeVar("R")

# The default process group for which things are kept; None: nothing is.
world: Any = None
_clears: list[Callable[[], None]] = []


def check_world() -> None:
    """Forget everything if the world is another one than when this was called last."""
    global world
    now = dist.group.WORLD
    if now is not world:
        forget()
        world = now


def forget() -> None:
    """Empty all caches."""
    global world
    world = None
    for clear in _clears:
        clear()


def forgets(clear: Callable[[], None]) -> None:
    """Have ``clear`` called when everything is forgotten."""
    _clears.append(clear)


def cached(maxsize: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """``functools.lru_cache`` for what depends on specs or meshes. Arguments that cannot be hashed raise TypeError.

    Example:
        >>> @cached(maxsize=16)
        ... def doubled(n):
        ...     return 2 * n
        >>> doubled(3)
        6
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        remembered = lru_cache(maxsize)(function)
        forgets(remembered.cache_clear)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            check_world()
            return remembered(*args, **kwargs)  # type: ignore[arg-type]

        return call

    return decorate


atexit.register(forget)  # process groups are to go before the interpreter does
