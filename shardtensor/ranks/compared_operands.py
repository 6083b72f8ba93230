"""Plain tensors are compared when they first meet ShardTensors, at no cost of a message.

What an operator computes with a plain tensor is right only if all ranks hold the same one. With different seeds they do
not. So a digest of each plain tensor is noted when it is used first, and compared with the next number that the ranks
read, see [Note: values] in history.py.

The first use of a parameter is that of the object, on each mesh that spans other ranks: values that are equal on a part
of a mesh may differ on all of it. Other tensors may be new in each call, so they are looked at in the first runs of a
plan only, and cost later runs nothing. Nothing waits for the device until digests are compared. Tensors that are traced
or captured are left out, as their values cannot be read. ``SHARDTENSOR_CHECK_PARAMETERS=0``, on all ranks, switches the
comparison off.
"""

from __future__ import annotations

import os
import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._compat import hidden_from_program, is_traced
from .._compat.c10d import group_along
from ..errors import MOVE_THE_MODEL
from ..layout.caches import forgets
from .callers import called_from
from .cuda_graphs import is_capturing
from .history import forget_values, note_values
from .summaries import summary, tolerance_of

CALLS = 3  # how often something is looked at that may be another tensor each time

# The tensors that have been used, with what was noted of them; by id, as tensors cannot be compared as keys.
_Used: TypeAlias = "dict[int, tuple[weakref.ref[Tensor], Tensor]]"
_used: dict[tuple[str, ...], _Used] = {}  # by the names of the groups in which they were
forgets(_used.clear)
wanted = os.environ.get("SHARDTENSOR_CHECK_PARAMETERS", "1") not in ("", "0")


class PlainOperands:
    """The plain tensors among those of one plan, noted when they are used first.

    Args:
        name: of the operator.
        places: where they are among its tensors.
        parameters: whether there are parameters among them.
    """

    __slots__ = ("_left", "_mesh", "_name", "_parameters", "_used", "places")

    def __init__(self, name: str, mesh: DeviceMesh, places: Sequence[Any], parameters: bool) -> None:
        self._name, self._mesh, self.places, self._parameters = name, mesh, tuple(places), parameters
        self._left, self._used = CALLS, _used_on(mesh)

    @staticmethod
    def among(name: str, mesh: DeviceMesh, tensors: Iterable[tuple[Any, Tensor]]) -> PlainOperands | None:
        """Those among pairs of a place and the tensor there; None if there are none."""
        plain = {place: t for place, t in tensors if not isinstance(t, DTensor)}
        if not plain or not wanted or mesh.size() == 1:
            return None
        return PlainOperands(name, mesh, tuple(plain), any(isinstance(t, nn.Parameter) for t in plain.values()))

    def note(self, tensors: Sequence[Tensor] | Mapping[Any, Tensor]) -> bool:
        """Note those that have not been used before; whether this was the last run in which to look."""
        for place in self.places:
            if id(tensors[place]) not in self._used:
                self._note(tensors[place])
        if not self._left:
            return False
        self._left -= 1
        return not self._left and not self._parameters

    def _note(self, t: Tensor) -> None:
        is_parameter = type(t) is not Tensor and isinstance(t, nn.Parameter)
        if not is_parameter and not self._left:
            return
        if is_parameter and t.device.type != self._mesh.device_type:  # the kernel would raise, not on an empty shard
            raise RuntimeError(
                f"{self._name}: a parameter of shape {tuple(t.shape)} is on {t.device.type!r}, and the mesh of its "
                f"ShardTensors on {self._mesh.device_type!r}; {MOVE_THE_MODEL}"
            )
        what = f"the plain {'parameter' if is_parameter else 'tensor'} of {self._name}"
        held = note_copies(what, t, self._mesh, range(self._mesh.ndim), exactly=is_parameter)
        if held is not None:
            key, used = id(t), self._used
            used[key] = weakref.ref(t, lambda _: used.pop(key, None)), held


@lru_cache(256)
def _used_on(mesh: DeviceMesh) -> _Used:
    names = (group_along(mesh, m).group_name for m in range(mesh.ndim) if mesh.size(m) > 1)
    return _used.setdefault(tuple(names), {})


forgets(_used_on.cache_clear)


def note_copies(
    what: str, t: Tensor, mesh: DeviceMesh, mesh_dims: Iterable[int], *, exactly: bool = False
) -> Tensor | None:
    """Note what a tensor holds of which the ranks along these mesh dims have copies; returns the summary.

    Args:
        exactly: rounding errors count as differences.
    """
    along = [m for m in mesh_dims if mesh.size(m) > 1]
    if not along or not wanted or is_traced(t):
        return None
    lines = called_from()
    what += f" ({lines[0]}), {t.dtype}," if lines else f", {t.dtype},"
    return note_held(what, t, mesh, along, f"{zlib.crc32(repr(lines).encode()):x}", exactly=exactly)


def note_held(
    what: str, t: Tensor, mesh: DeviceMesh, mesh_dims: Iterable[int], where: str = "", *, exactly: bool = False
) -> Tensor | None:
    """The same of a tensor, whatever the settings, compared among the ranks that say the same of ``where``."""
    with hidden_from_program():
        if not t.numel() or is_capturing(t.device):
            return None
        held, tolerance = summary(t), 0.0 if exactly else tolerance_of(t.dtype)
        for m in mesh_dims:
            note_values(group_along(mesh, m).group_name, where, what, t.shape, tolerance, held)
    return held


def note_operand(name: str, t: Tensor, mesh: DeviceMesh) -> None:
    """Note a plain tensor that meets ShardTensors in a call without a plan, which would tell its first uses."""
    if not wanted or mesh.size() == 1 or id(t) in _used_on(mesh):
        return  # the usual case
    _without_plan(name, t.shape, t.dtype, mesh).note((t,))


@lru_cache(1024)
def _without_plan(name: str, shape: torch.Size, dtype: torch.dtype, mesh: DeviceMesh) -> PlainOperands:
    return PlainOperands(name, mesh, (0,), False)


forgets(_without_plan.cache_clear)


def forget_operands(tensors: Iterable[Any]) -> None:
    """Forget what was noted of the operands of a call that has failed on all ranks: no result depends on them."""
    for key in map(id, tensors):
        for used in _used.values():
            if key in used:
                forget_values(used.pop(key)[1])
