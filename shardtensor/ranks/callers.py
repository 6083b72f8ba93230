"""From where an operator was called: lines of the program's own code, for errors."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import TracebackType

import torch

_PACKAGE = str(Path(__file__).parents[1])
_OPERATORS = os.path.join(_PACKAGE, "ops", "")
_LIBRARIES = (_PACKAGE, str(Path(torch.__file__).parent), "<")


def called_from() -> tuple[str, list[str]]:
    """The family of the operator that runs, and the lines outside of torch that led to it, innermost first.

    The function is no part of it: ranks with empty or small shards may take another way through an operator.
    """
    family, lines = "", []
    for frame, line in walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if file.startswith(_OPERATORS):
            family = family or file.removeprefix(_OPERATORS).split(os.sep)[0]
        elif not file.startswith(_LIBRARIES):
            lines.append(f"{file}:{line}")
    return family, lines


def raised_at(traceback: TracebackType | None) -> str:
    """The innermost line outside of torch that an exception came through; "" where there is none."""
    found = ""
    for frame, line in walk_tb(traceback):
        file = frame.f_code.co_filename
        if not file.startswith(_LIBRARIES):
            found = f"{file}:{line}"
    return found
