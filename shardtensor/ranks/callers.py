"""From where an operator was called: lines of the program's own code, for errors."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType, TracebackType

import torch

_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = (os.path.join(_PACKAGE, ""), os.path.join(Path(torch.__file__).parent, ""), "<")


def is_of_program(file: str) -> bool:
    """Whether this is neither torch's nor a file of this package."""
    return not file.startswith(_LIBRARIES)


def called_from() -> list[str]:
    """The lines outside of torch that led here, innermost first."""
    frames = ((frame.f_code.co_filename, line) for frame, line in walk_stack(sys._getframe(1)))
    return [f"{file}:{line}" for file, line in frames if is_of_program(file)]


# What runs between a call with a ShardTensor and this package.
_BETWEEN = ("shardtensor.", "torch.overrides", "torch._tensor", "torch.utils._device")


def calling_module() -> str:
    """The module whose code calls a function or method of torch that this package has a handler for."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in walk_stack(sys._getframe(1)))
    return next((name for name in modules if not name.startswith(_BETWEEN)), "")


def calling_frame() -> FrameType | None:
    """The innermost frame outside of torch and of this package."""
    frames = (frame for frame, _ in walk_stack(sys._getframe(1)))
    return next((frame for frame in frames if is_of_program(frame.f_code.co_filename)), None)


def raised_at(traceback: TracebackType | None) -> str:
    """The innermost line outside of torch that an exception came through; "" where there is none."""
    found = ""
    for frame, line in walk_tb(traceback):
        file = frame.f_code.co_filename
        if is_of_program(file):
            found = f"{file}:{line}"
    return found
