"""A training program that saves and resumes: ``torchrun ... restarting.py FOLDER HOW``.

HOW: "whole", or "killed": the last rank kills itself at step 5, once; or "stopped", which nobody is told. Rank 0 prints
every loss.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from seeded import seeded
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from shardtensor import scatter_tensor
from shardtensor.checkpoint import CheckpointReader, CheckpointWriter, latest

STEPS, EVERY, KILLED_AT = 8, 2, 5
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


def main(folder: Path, how: str) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU(), nn.Conv2d(4, 2, 3, padding=1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    first = resume(folder, net, optimizer)
    for step in range(first, STEPS):
        is_last = dist.get_rank() == dist.get_world_size() - 1
        if how in SIGNALS and step == KILLED_AT and is_last and not (folder / how).exists():
            (folder / how).touch()
            os.kill(os.getpid(), SIGNALS[how])
        generator = seeded(step)
        image = torch.randn(1, 2, 13, 8, generator=generator) if dist.get_rank() == 0 else None
        x = scatter_tensor(image, mesh, (Shard(2),))
        optimizer.zero_grad()
        loss = (net(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        value = loss.item()
        if dist.get_rank() == 0:
            print(f"loss of step {step} on {mesh.size()}: {value:.12f}", flush=True)
        if step % EVERY == EVERY - 1:
            model_state, optimizer_state = get_state_dict(net, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state}
            dcp.save(state, storage_writer=CheckpointWriter(folder / f"step-{step + 1}"))
    dist.destroy_process_group()


def resume(folder: Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the last checkpoint, and return the step that follows it."""
    last = latest(folder)
    if last is None:
        return 0
    model_state, optimizer_state = get_state_dict(net, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, storage_reader=CheckpointReader(last))
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(last.name.removeprefix("step-"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
