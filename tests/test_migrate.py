"""Which lines of a program are to be changed: by names followed through imports, and by nothing else."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import pytest
import torch.distributed.tensor
from torch.distributed.tensor import experimental

from shardtensor.__main__ import main
from shardtensor.observe.migrate import ORIGINS, find


def found(source, **options):
    return [(finding.line, finding.name.rpartition(".")[2]) for finding in find(source, **options)]


def test_imports_and_uses_of_names_that_change():
    source = (
        "from physicsnemo.domain_parallel import (\n"
        "    ShardTensor,\n"
        "    scatter_tensor as scatter,\n"
        "    sync_module_over_mesh as sync,\n"
        ")\n"
        "sync(model, mesh)\n"
        "x = scatter(image, 0, mesh, placements)\n"
        "isinstance(x, ShardTensor)\n"
    )
    names = [(2, "ShardTensor"), (3, "scatter_tensor"), (4, "sync_module_over_mesh"), (6, "sync_module_over_mesh")]
    assert found(source) == names


def test_names_of_modules():
    source = (
        "import physicsnemo.domain_parallel as dp\n"
        "import torch\n"
        "import torch.distributed as dist\n"
        "class Mine(dp.ShardTensor): pass\n"
        "dist.all_reduce(x); torch.distributed.all_to_all(y, z)\n"
        "dist.barrier()\n"
    )
    assert found(source) == [(4, "ShardTensor"), (5, "all_reduce"), (5, "all_to_all")]
    assert found(source, origins=["physicsnemo"]) == [(4, "ShardTensor")]


def test_methods_and_arguments_count_in_files_that_import_the_peer_only():
    body = "x = make(part, sharding_shapes='infer')\ny = x.offsets(0) + z.register_function_handler(f, g)\n"
    names = [(1, "sharding_shapes="), (2, "offsets"), (2, "register_function_handler")]
    assert found("import physicsnemo.distributed; " + body) == names
    assert found("import numpy as np; " + body) == []
    assert found("from physicsnemo.distributed import DistributedManager as D; D()\n") == []


@pytest.mark.parametrize(
    "source",
    [
        "from .domain_parallel import ShardTensor\n",  # another package's own
        "import torch\nfrom torch.distributed.tensor import Shard, Replicate\ntorch.zeros(3)\n",
        "from shardtensor import ShardTensor, scatter_tensor\nscatter_tensor(None, 0, mesh)\n",
        "def send(x): ...\nsend(1)\nx.recv()\n",
    ],
)
def test_what_may_stay(source):
    assert found(source) == []


def test_old_homes():
    assert found("from modulus.distributed.shard_tensor import ShardTensor\n") == [(1, "ShardTensor")]
    assert found("from torch.distributed._tensor import DTensor\nDTensor(x)\n") == [(1, "DTensor"), (2, "DTensor")]


def test_what_is_to_be_written_exists():
    for origin in ORIGINS.values():
        for name in re.findall(r"\b(?:shardtensor|torch)(?:\.\w+)+", " ".join(origin.names.values())):
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), name


@pytest.mark.parametrize("name", ORIGINS["dtensor"].names)
def test_names_of_torch_exist(name):
    assert hasattr(torch.distributed.tensor, name) or hasattr(experimental, name)


@pytest.mark.parametrize("name", ORIGINS["messages"].names)
def test_messages_of_torch_exist(name):
    assert hasattr(torch.distributed, name)


def test_the_command(tmp_path, capsys):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("from torch.distributed.tensor import distribute_tensor\n")
    (tmp_path / "package" / "broken.py").write_text("def f(:\n")
    (tmp_path / "notes.txt").write_text("from torch.distributed.tensor import DTensor\n")
    assert main(["migrate", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    file = tmp_path / "package" / "train.py"
    assert shown.out.startswith(f"{file}:1: torch.distributed.tensor.distribute_tensor -> shardtensor.scatter_tensor(")
    assert shown.out.endswith("\n1 line to look at\n") and "broken.py:1: invalid syntax" in shown.err
    assert main(["migrate", str(file), "--only", "physicsnemo"]) == 0
    assert capsys.readouterr().out == "0 lines to look at\n"


def test_the_command_runs_as_a_module(tmp_path):
    (tmp_path / "x.py").write_text("import torch.distributed\ntorch.distributed.send(1, 2)\n")
    command = [sys.executable, "-W", "error", "-m", "shardtensor", "migrate", "x.py"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    assert shown.stdout.startswith("x.py:2: torch.distributed.send -> nothing if it moves a halo") and not shown.stderr
