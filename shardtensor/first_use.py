"""Plain parameters are compared when they are used first, at no cost of a message.

What an operator computes with a plain parameter is right only if all ranks hold the same one, and with other seeds they
do not. So the digest of each enters the history of the groups over which its gradient is summed, the first time that it
is; with the next number that the ranks read, they know whether it was the same everywhere. See [Note: history].
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ._compat import is_traced
from ._compat.c10d import group_along
from .cuda_graphs import is_capturing
from .equal_values import digest
from .history import record_call

__all__ = ["note_parameters"]

_used: dict[int, weakref.ref[Tensor]] = {}  # by id: tensors cannot be compared as keys
_wanted = os.environ.get("SHARDTENSOR_CHECK_PARAMETERS", "1") not in ("", "0")


def note_parameters(tensors: Sequence[Any], mesh: DeviceMesh, mesh_dims: Sequence[int]) -> None:
    """Note those that are used for the first time. Every rank of the groups calls it alike."""
    for t in tensors:
        if id(t) not in _used and _wanted:
            _note(t, mesh, mesh_dims)


def _note(t: Tensor, mesh: DeviceMesh, mesh_dims: Sequence[int]) -> None:
    if not t.is_leaf or is_traced(t) or is_capturing(t.device):
        return
    key = id(t)
    _used[key] = weakref.ref(t, lambda _: _used.pop(key, None))
    text = f"first use of a plain parameter {tuple(t.shape)} with the digest {digest(t) % 2**64:016x}"
    for m in mesh_dims:
        if mesh.size(m) > 1:
            record_call(group_along(mesh, m).group_name, text)
