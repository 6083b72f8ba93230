"""Many cases on many layouts: in regular runs half of the cases on each layout, in slow runs the other half."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import pytest

T = TypeVar("T")


def in_halves(layouts: Iterable) -> list:
    """Parameters of each layout with a further one, the half of the cases to check there: of neighbours another one."""
    made = []
    for i, layout in enumerate(layouts):
        values, marks = getattr(layout, "values", layout), getattr(layout, "marks", ())
        values = values if isinstance(values, tuple) else (values,)
        for half in (0, 1):
            made.append(pytest.param(*values, half, marks=[*marks, *[pytest.mark.slow] * (half != i % 2)]))
    return made


def half_of(cases: Iterable[T], half: int) -> list[T]:
    """One of each two neighbours, in an order without a period: what alternates among the cases is in both halves."""
    return [case for i, case in enumerate(cases) if is_in(i, half)]


def is_in(number: int, half: int) -> bool:
    return number.bit_count() % 2 == half
