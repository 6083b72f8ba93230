"""Where autocast acts on an operator: to which dtype its operands are cast, before the ranks' work.

Autocast casts inside of torch's operators, which run on local tensors. But ranks have to know the dtype of the result,
and what is sent should be cast before. So a plan asks here for the dtype and casts its operands, see
:meth:`shardtensor.extend.Arguments.cast`; its local work then runs without autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from .._compat import hidden_from_program


def autocast_to(device_type: str) -> torch.dtype | None:
    """The dtype to which autocast casts the operands of matrix products on these devices, or None if it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """A context in which autocast is off for these devices."""
    off = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if off else nullcontext()


def autocast_dtype(
    function: Callable[..., Tensor],
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    device: torch.device | str,
) -> torch.dtype:
    """The dtype of the operands that autocast, which is on, has ``function`` compute with: that of its result.

    Which functions it casts differs by device, version, and even by whether a dim has length 1, as it may on one rank
    only. So torch is asked, with operands of these shapes; those of the smallest of the same kind will do.
    """
    with hidden_from_program():
        ones = [torch.ones(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes, strict=True)]
        return function(*ones).dtype
