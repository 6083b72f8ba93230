"""The Slurm scripts of docs/clusters.md as they are printed, with stand-ins for Slurm's commands and two nodes of two
processes on this machine, and a process that sees one device of several.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from pages import ROOT, Page

PAGE = Page("docs/clusters.md")
NODES, TASKS, DEVICES = 2, 2, 2  # tasks and devices of each node

SCONTROL = """#!{python}
import sys

assert sys.argv[1:3] == ["show", "hostnames"]
print(*sys.argv[3].split(","), sep="\\n")
"""

# Starts the tasks of all nodes. With --gpus-per-task=1, each sees one device.
SRUN = """#!{python}
import os, subprocess, sys

nodes, tasks = int(os.environ["SLURM_NNODES"]), int(os.environ["SLURM_NTASKS_PER_NODE"])
started = []
for task in range(nodes * tasks):
    told = {{"SLURM_PROCID": task, "SLURM_LOCALID": task % tasks, "SLURM_NODEID": task // tasks}}
    if "SLURM_GPUS_PER_TASK" in os.environ:
        told["CUDA_VISIBLE_DEVICES"] = task % tasks
    environment = os.environ | {{name: str(value) for name, value in told.items()}}
    started.append(subprocess.Popen(sys.argv[1:], env=environment))
sys.exit(max([abs(process.wait()) for process in started]))
"""

# After what the page does: a halo, and the sum of all shards. Each rank writes a file, as prints of ranks get mixed up.
PROGRAM = """
import os
from pathlib import Path
import torch
from torch.distributed.tensor import Shard
from shardtensor import scatter_tensor

first = torch.arange(14.0).view(1, 1, 7, 2) if mesh["domain"].get_local_rank() == 0 else None
x = scatter_tensor(first, mesh["domain"], (Shard(2),))
total = torch.nn.functional.avg_pool2d(x, 3, 1, 1).sum().item()
local = os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]
text = f"rank {dist.get_rank()} of {dist.get_world_size()}, {local} here, on {x.device}: {total:.4f}"
Path(f"{dist.get_rank()}.txt").write_text(text)
dist.destroy_process_group()
"""


def scripts():
    """Those of the page that Slurm runs, by a word for each."""
    texts = [block.text for block in PAGE.blocks if block.text.startswith("#!/bin/bash")]
    return {"torchrun" if "srun torchrun" in text else "a task per process": text for text in texts}


def environment_on(device, folder):
    """The environment of a program that runs as a reader starts it, on this device."""
    (folder / "sitecustomize.py").write_text("import device.emulated\n" if device == "emulated" else "")
    path = os.pathsep.join(map(str, (folder, ROOT / "tests", ROOT)))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def device(request):
    if request.param == "emulated":
        request.getfixturevalue("emulated")
    return request.param


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "emulated"], indirect=True)
@pytest.mark.parametrize("how", ["torchrun", "a task per process"])
def test_the_scripts_of_the_page(how, device, tmp_path):
    script, tasks = scripts()[how], 1 if how == "torchrun" else TASKS
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text.format(python=sys.executable))
        (tmp_path / name).chmod(0o755)
    block = next(block for block in PAGE.blocks if block.language == "python")  # that of the mesh
    (tmp_path / "train.py").write_text(block.text + PROGRAM)
    with socket.socket() as found:  # in place of the page's port, which may be taken here
        found.bind(("127.0.0.1", 0))
        script = script.replace("29500", str(found.getsockname()[1]))
    environment = environment_on(device, tmp_path)
    environment["PATH"] = os.pathsep.join(map(str, (tmp_path, Path(sys.executable).parent, os.environ["PATH"])))
    slurm = {"JOB_ID": 7, "JOB_NODELIST": "localhost,localhost", "NNODES": NODES, "NTASKS": NODES * tasks}
    slurm |= {"NTASKS_PER_NODE": tasks, "GPUS_ON_NODE": DEVICES, "CPUS_PER_TASK": 1}
    slurm |= {"GPUS_PER_TASK": 1} if "#SBATCH --gpus-per-task=1" in script else {}
    environment |= {f"SLURM_{name}": str(value) for name, value in slurm.items()}
    environment |= {"GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    index = [0, 0] if "GPUS_PER_TASK" in slurm else [0, 1]
    total = F.avg_pool2d(torch.arange(14.0).view(1, 1, 7, 2), 3, 1, 1).sum()
    for rank in range(4):
        on = "cpu" if device == "cpu" else f"cuda:{index[rank % 2]}"
        expected = f"rank {rank} of 4, {(str(rank % 2), '2')} here, on {on}: {total:.4f}"
        assert (tmp_path / f"{rank}.txt").read_text() == expected


ONE_DEVICE = """
from torch.distributed.device_mesh import init_device_mesh
from shardtensor import parallel

try:
    init_device_mesh("cuda", (1,))
except RuntimeError as error:
    print("alone:", error)
print("first:", parallel.device(), init_device_mesh("cuda", (1,)).device_type)
"""


def test_a_process_that_sees_one_device_of_four(emulated, tmp_path):
    """As the fourth task of a node with --gpus-per-task=1: torch's mesh alone takes the device that LOCAL_RANK says."""
    told = {"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "3", "RANK": "0", "WORLD_SIZE": "1"}
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1])}
    environment = environment_on("emulated", tmp_path) | told
    done = subprocess.run(
        [sys.executable, "-c", ONE_DEVICE], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == ["alone: CUDA error: invalid device ordinal", "first: cuda:0 cuda"], done.stderr
