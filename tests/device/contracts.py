"""What CUDA's kernels demand of their arguments, and torch's CPU kernels do not."""

from __future__ import annotations

from typing import Any

NAMES: frozenset[str] = frozenset()


def check(name: str, arguments: tuple[Any, ...]) -> None:
    """Raise what CUDA's kernel raises where the operator ``name`` may not be called with these arguments."""
