"""What cannot be in a graph is refused, before anything is sent: in a CUDA graph captured by hand, in a traced one.

A graph repeats kernels, collectives among them, on the same memory. It does not repeat what the host does. An operator
that only plans on the host may be captured, because its plan is the same each time. An operator that reads a value may
not, because the stream does not run during capture. Nor may one for which the host draws a number, because every replay
would use the same number. CUDA raises at some of these, in the middle of the operator. So such operators ask here
first, on every rank alike.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .._compat import NEEDS_VALUES, is_traced

OUTSIDE = "call it outside of the captured part"
_READS = "the host reads values, or how many there are, before it goes on"


def is_capturing(device: torch.device) -> bool:
    """Whether what is computed on the device now goes into a CUDA graph."""
    module = module_with_graphs(device.type)
    return module is not None and bool(module.is_initialized() and module.is_current_stream_capturing())


@cache
def module_with_graphs(device_type: str) -> Any:
    """The module of this type of device, such as torch.cuda, or None if it has no graphs."""
    module = getattr(torch, device_type, None)
    return module if hasattr(module, "is_current_stream_capturing") else None


def check_not_captured(operator: str, device: torch.device | str, reason: str = _READS, remedy: str = OUTSIDE) -> None:
    """RuntimeError where what is called on ``device`` is captured in a CUDA graph.

    Example:
        >>> check_not_captured("nonzero", torch.device("cpu"))
    """
    if is_capturing(torch.device(device)):
        raise RuntimeError(f"{operator}: a CUDA graph cannot contain this, because {reason}. Remedy: {remedy}.")


def check_has_values(operator: str, tensor: Tensor, remedy: str = OUTSIDE) -> None:
    """Raise where the host cannot read values that follow from ``tensor``: they are captured, or it has none.

    Raises:
        RuntimeError: what is called is captured in a CUDA graph.
        DataDependentOutputException: ``tensor`` is traced. torch.compile runs the operator in eager mode then.
    """
    if is_traced(getattr(tensor, "_local_tensor", tensor)):
        raise NEEDS_VALUES[0](f"{operator} of a ShardTensor")  # type: ignore[arg-type]  # it is only shown
    check_not_captured(operator, tensor.device, remedy=remedy)
