"""shardtensor.parallel.init and device: a program's device, mesh, seeds, samplers and logs."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardtensor import parallel
from shardtensor.testing import run_distributed


def as_local_rank(local_rank, devices):
    """A process that torchrun or Slurm started as this one of its host, and that sees so many devices."""
    sees = mock.patch.object(torch.accelerator, "device_count", lambda: devices)
    return mock.patch.dict(os.environ, {"LOCAL_RANK": str(local_rank)}), sees


def device_of_a_process():
    before = torch.cuda.current_device()
    try:
        for local_rank, devices, index in ((3, 8, 3), (3, 1, 0), (0, 1, 0)):
            environment, sees = as_local_rank(local_rank, devices)
            with environment, sees:
                assert parallel.device() == parallel.device("cuda") == torch.device("cuda", index)
                mesh = init_device_mesh("cuda", (dist.get_world_size(),))  # which would call set_device(3)
                assert torch.cuda.current_device() == index and mesh.device_type == "cuda"
                assert parallel.device("cpu") == torch.device("cpu")
        environment, sees = as_local_rank(3, 2)
        with environment, sees, pytest.raises(RuntimeError, match=r"LOCAL_RANK=3, but this process sees 2 devices of"):
            parallel.device()
        with pytest.raises(RuntimeError, match="sees no device of type 'xpu': torch finds cuda"):
            parallel.device("xpu")
    finally:
        torch.cuda.set_device(before)


def test_the_device_of_a_process(emulated):
    run_distributed(device_of_a_process, 1)


def test_without_accelerators_the_device_is_the_cpu():
    with mock.patch.object(torch.accelerator, "current_accelerator", lambda check_available: None):
        assert parallel.device() == torch.device("cpu")
        with pytest.raises(RuntimeError, match="sees no device of type 'cuda': torch finds no accelerator"):
            parallel.device("cuda")
