"""Meshes that tests share."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_meshes: dict[tuple[str, tuple[int, ...], tuple[str, ...] | None], DeviceMesh] = {}
_owner: dist.ProcessGroup | None = None


def shared_mesh(
    shape: int | tuple[int, ...], names: str | tuple[str, ...] | None = None, *, device_type: str | None = None
) -> DeviceMesh:
    """Return a mesh of this shape over the running process group, the same object each time.

    A new mesh makes new process groups, which live as long as the worker. A thousand tests with their own meshes would
    accumulate thousands of groups. Every rank of the world must call this in the same order, as for
    ``init_device_mesh``. ``device_type`` is by default that of ``torch.get_default_device()``: the CPU, or the type of
    :func:`on_device`.

    >>> def halves():
    ...     mesh = shared_mesh((2, 2), ("data", "domain"))
    ...     return mesh["domain"].size()
    >>> run_distributed(halves, 4)  # doctest: +SKIP
    [2, 2, 2, 2]
    """
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    names = (names,) if isinstance(names, str) else None if names is None else tuple(names)
    device_type = device_type or torch.get_default_device().type
    cache, key = cached_meshes(), (device_type, shape, names)
    if key not in cache:
        cache[key] = init_device_mesh(device_type, shape, mesh_dim_names=names)
    return cache[key]


def cached_meshes() -> dict[tuple[str, tuple[int, ...], tuple[str, ...] | None], DeviceMesh]:
    """The meshes made so far in the running process group, oldest first."""
    global _owner
    # simulate_ranks makes one process group after another; a mesh of one cannot be used in the next.
    if _owner is not dist.group.WORLD:
        _meshes.clear()
        _owner = dist.group.WORLD
    return _meshes
