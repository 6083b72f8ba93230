"""What a program does before its model: its device, its mesh with named axes, seeds, samplers."""

from __future__ import annotations

import os

import torch


def device(type: str | None = None) -> torch.device:
    """The device of this process, which is made the current one.

    On a host with accelerators it is the one that ``LOCAL_RANK`` numbers, as torchrun sets it, or the only one that
    this process sees (Slurm's ``--gpus-per-task=1``). Elsewhere it is the CPU. Call it before ``init_device_mesh``,
    which would call ``set_device(LOCAL_RANK)`` also where there is one device.

    Args:
        type: ``"cpu"`` to stay on the CPU, or the type of an accelerator. Default: the accelerator that
            torch finds, otherwise the CPU.

    Raises:
        RuntimeError: this process sees no such accelerator, or fewer than ``LOCAL_RANK`` asks for.

    Example::

        device = shardtensor.parallel.device()
        mesh = init_device_mesh(device.type, (4,), mesh_dim_names=("domain",))
        model = Model().to(device)
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if type == "cpu" or (type is None and found is None):
        return torch.device("cpu")
    if found is None or type not in (None, found.type):
        raise RuntimeError(f"this process sees no device of type {type!r}: torch finds {found or 'no accelerator'}")
    count, local_rank = torch.accelerator.device_count(), int(os.environ.get("LOCAL_RANK", 0))
    index = 0 if count == 1 else local_rank
    if index >= count:
        raise RuntimeError(
            f"LOCAL_RANK={local_rank}, but this process sees {count} devices of type {found.type!r}: start at most "
            f"{count} processes on this host, or show each process one device of its own"
        )
    torch.accelerator.set_device_index(index)
    return torch.device(found.type, index)
