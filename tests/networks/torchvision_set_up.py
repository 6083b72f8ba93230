"""Lets torchvision be imported where its C++ operators cannot be loaded.

The default wheel of torchvision is built for CUDA. Next to a torch without CUDA its library does not load, and
``import torchvision`` fails at the operators that it adds a form without data to. These are declared here. No network
of the tests calls them: they choose among boxes that a network has found, after it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch


def lacks_operators() -> bool:
    """Whether torchvision is installed and its operators cannot be loaded."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return False
    libraries = list(Path(found.origin).parent.glob("_C*.so"))
    try:
        for library in libraries:
            torch.ops.load_library(library)
    except OSError:
        return True
    return not libraries


if lacks_operators():
    declared = torch.library.Library("torchvision", "DEF")  # kept: the operators go with it
    for name in ("nms", "qnms"):
        declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
