"""torchrun restarts a program of which a rank was killed: it resumes with the losses of the undisturbed run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardtensor

PROGRAM = Path(__file__).with_name("restarting.py")
STEPS = 8

pytestmark = pytest.mark.slow


def losses(folder, how, ranks, restarts=0):
    """What the program printed: step, number of ranks, loss; and torchrun's exit code."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", str(restarts), str(PROGRAM), str(folder), how]
    environment = os.environ | {"PYTHONPATH": str(Path(shardtensor.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    # Otherwise a rank that is up early finds the addresses of the attempt before.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    found = re.findall(r"loss of step (\d+) on (\d+): (\S+)", ended.stdout)
    return [(int(step), int(on), float(loss)) for step, on, loss in found], ended


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    found, ended = losses(tmp_path_factory.mktemp("undisturbed"), "whole", 2)
    assert ended.returncode == 0, ended.stderr
    assert [step for step, _, _ in found] == list(range(STEPS))
    return {step: loss for step, _, loss in found}


def assert_resumed(found, undisturbed, steps):
    assert [step for step, _, _ in found] == steps
    for step, _, loss in found:
        assert loss == pytest.approx(undisturbed[step], rel=1e-10)


def test_torchrun_restarts_from_the_last_checkpoint(tmp_path, undisturbed):
    found, ended = losses(tmp_path, "killed", 2, restarts=1)
    assert ended.returncode == 0, ended.stderr
    # The last checkpoint before step 5 is that of 4 steps.
    assert_resumed(found, undisturbed, [0, 1, 2, 3, 4, 4, 5, 6, 7])


@pytest.mark.parametrize("ranks", (1, 3))
def test_other_numbers_of_ranks_resume(tmp_path, undisturbed, ranks):
    found, ended = losses(tmp_path, "killed", 2)
    assert ended.returncode != 0 and [step for step, _, _ in found] == [0, 1, 2, 3, 4]
    found, ended = losses(tmp_path, "killed", ranks)
    assert ended.returncode == 0, ended.stderr
    assert_resumed(found, undisturbed, [4, 5, 6, 7])
    assert {on for _, on, _ in found} == {ranks}
