"""Checkpoints that are whole or not there: flipped bytes, killed processes and full disks are injected."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from test_rank_part import SHAPE, WORLDS, numbers, state
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Shard

from shardtensor.checkpoint import CheckpointReader, CheckpointWriter, latest
from shardtensor.testing import run_distributed, run_expecting_errors, shard, shared_mesh
from shardtensor.testing.failures import DistributedFailure

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is ")  # one process without a group
LARGE = 3 << 19  # elements of float64: 12 MiB, three blocks in all, and two on a rank


def save(cut, folder, seed=0):
    dcp.save(state(cut, numbers(*SHAPE, seed=seed)), storage_writer=CheckpointWriter(folder))


def load(cut, folder, seed=0):
    found = state(cut, torch.zeros(SHAPE, dtype=torch.float64))
    dcp.load(found, storage_reader=CheckpointReader(folder))
    assert found["step"] == 3 and torch.equal(found["x"].full_tensor(), numbers(*SHAPE, seed=seed))


def load_like_torch(cut, folder):
    found = state(cut, torch.zeros(SHAPE, dtype=torch.float64))
    dcp.load(found, checkpoint_id=folder)
    assert torch.equal(found["x"].full_tensor(), numbers(*SHAPE))


def test_a_checkpoint_is_read_with_other_numbers_of_ranks(tmp_path):
    folder = str(tmp_path / "new" / "step-3")
    run_distributed(save, 2, "uneven", folder)
    assert os.listdir(tmp_path / "new") == ["step-3"]
    for read in ("whole", "empty", "two dims"):
        run_distributed(load, WORLDS[read], read, folder)
    run_distributed(load_like_torch, 3, "empty", folder)


# -- flipped bytes -----------------------------------------------------------------------------------------------------


def large(value):
    return {"x": shard(value, shared_mesh(2), [Shard(0)], {0: (LARGE // 2 + 1, LARGE // 2 - 1)}), "about": {"lr": 0.1}}


def save_large(folder):
    dcp.save(large(torch.arange(LARGE, dtype=torch.float64)), storage_writer=CheckpointWriter(folder))


def load_large(folder):
    found = large(torch.zeros(LARGE, dtype=torch.float64))
    dcp.load(found, storage_reader=CheckpointReader(folder))
    assert torch.equal(found["x"].full_tensor(), torch.arange(LARGE, dtype=torch.float64))


def load_on_all(folder):
    """What :func:`load_large` raises; all ranks go on together afterwards."""
    try:
        load_large(folder)
    except CheckpointException as error:
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == 2
        return str(error)
    return ""


@contextmanager
def changed(path, change):
    whole = path.read_bytes()
    data = bytearray(whole)
    change(data)
    path.write_bytes(data)
    yield
    path.write_bytes(whole)


def flip(at):
    def change(data):
        data[int(at * (len(data) - 1))] ^= 4

    return change


def test_a_flipped_byte_of_any_file_is_an_error_on_all_ranks(tmp_path):
    folder = tmp_path / "step-1"
    run_distributed(save_large, 2, str(folder))
    files = sorted(folder.iterdir())
    assert [f.name for f in files] == [".manifest", ".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert run_distributed(load_on_all, 2, str(folder)) == ["", ""]
    for path in files:
        for at in (0, 0.4, 0.999, 1):
            with changed(path, flip(at)):
                for text in run_distributed(load_on_all, 2, str(folder)):
                    assert "DamagedCheckpoint" in text and f"{path} is damaged" in text, text
    for path in files[1:]:
        with changed(path, lambda data: data.pop()):
            for text in run_distributed(load_on_all, 2, str(folder)):
                assert f"{path} has" in text
        away = path.rename(tmp_path / "away")
        for text in run_distributed(load_on_all, 2, str(folder)):
            assert f"{path} is missing" in text
        away.rename(path)
    assert run_distributed(load_on_all, 2, str(folder)) == ["", ""]


def load_different(folders):
    load("uneven", folders[dist.get_rank()])


def test_ranks_that_read_different_checkpoints_are_told(tmp_path):
    folders = [str(tmp_path / "1"), str(tmp_path / "2")]
    for folder in folders:
        run_distributed(save, 2, "uneven", folder)
    for error in run_expecting_errors(load_different, 2, folders):
        assert "ranks [1] read another checkpoint than rank 0" in str(error)


def test_the_checkpoint_of_another_writer_is_an_error(tmp_path):
    dcp.save({"x": torch.ones(3)}, checkpoint_id=tmp_path / "1")
    with pytest.raises(CheckpointException, match=r"1/.manifest is missing.*dcp.load\(state, checkpoint_id=...\)"):
        dcp.load({"x": torch.ones(3)}, storage_reader=CheckpointReader(tmp_path / "1"))


# -- the last one ------------------------------------------------------------------------------------------------------


def alone(folder, value=1.0):
    dcp.save({"x": torch.full((9,), value)}, storage_writer=CheckpointWriter(folder))


def value_of(folder):
    found = {"x": torch.zeros(9)}
    dcp.load(found, storage_reader=CheckpointReader(folder))
    assert (found["x"] == found["x"][0]).all()
    return found["x"][0].item()


def test_the_last_complete_checkpoint(tmp_path):
    assert latest(tmp_path / "none") is None and latest(tmp_path) is None
    for name in ("step-9", "step-10", "08", "best", "step-11.incomplete"):
        alone(tmp_path / name)
    (tmp_path / "12").write_text("a file")
    assert latest(tmp_path) == tmp_path / "step-10"
    skipped = pytest.warns(UserWarning, match=r"skipped: .*step-10/__0_0.distcp has \d+ bytes, but \d+ were written")
    with changed(tmp_path / "step-10" / "__0_0.distcp", lambda data: data.pop()), skipped:
        assert latest(tmp_path) == tmp_path / "step-9"
    dcp.save({"x": torch.ones(3)}, checkpoint_id=tmp_path / "step-20")
    with pytest.warns(UserWarning, match=r"skipped: .*step-20/.manifest is missing"):
        assert latest(tmp_path) == tmp_path / "step-10"


def latest_on_all(folders):
    return latest(folders[dist.get_rank()])


def test_all_ranks_get_the_answer_of_the_first(tmp_path):
    alone(tmp_path / "a" / "7")
    file = tmp_path / "file"
    file.touch()
    folders = [str(tmp_path / name) for name in "ab"]
    assert run_distributed(latest_on_all, 2, folders) == [tmp_path / "a" / "7"] * 2
    assert run_distributed(latest_on_all, 2, folders[::-1]) == [None, None]
    for error in run_expecting_errors(latest_on_all, 2, [str(file), *folders]):
        assert isinstance(error, RuntimeError) and f"{file} cannot be read" in str(error)


def test_a_checkpoint_is_not_written_over(tmp_path):
    alone(tmp_path, 1.0)  # an empty folder
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointException, match="exists and is not empty"):
        alone(tmp_path, 2.0)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="use_collectives=True"):
        dcp.save({"x": torch.ones(1)}, storage_writer=CheckpointWriter(tmp_path / "1"), use_collectives=False)


def asynchronously(folder):
    x = state("uneven", numbers(*SHAPE))
    # The default group is refused on both ranks, before a thread sends anything; a group of its own is not.
    shard(torch.ones(3), shared_mesh(2), [Shard(0)]).sum().item()
    with pytest.raises(ValueError, match=r"group in which ShardTensors .*new_group\(backend='gloo'\), and pass"):
        dcp.async_save(x, storage_writer=CheckpointWriter(folder))
    future = dcp.async_save(x, storage_writer=CheckpointWriter(folder), process_group=dist.new_group(backend="gloo"))
    for _ in range(20):
        shard(torch.ones(3), shared_mesh(2), [Shard(0)]).sum().item()
    future.result()
    writer = CheckpointWriter("unused")
    dcp.save(x, storage_writer=writer, checkpoint_id=folder + "2")
    dcp.save(x, storage_writer=writer, checkpoint_id=folder + "3")


def test_saving_in_the_background_and_again_with_one_writer(tmp_path):
    run_distributed(asynchronously, 2, str(tmp_path / "1"))
    assert sorted(os.listdir(tmp_path)) == ["1", "12", "13"]
    for name in ("1", "12", "13"):
        run_distributed(load, 3, "empty", str(tmp_path / name))


# -- killed ------------------------------------------------------------------------------------------------------------


class Killed(CheckpointWriter):
    """Kills its process at one stage of a save."""

    def __init__(self, path, rank, stage):
        super().__init__(path)
        if dist.get_rank() == rank:
            method = getattr(self, stage)
            setattr(self, stage, lambda *args, **kwargs: (method(*args, **kwargs), os.kill(os.getpid(), 9)))


def save_killed(folder, rank, stage):
    dcp.save(large(torch.zeros(LARGE, dtype=torch.float64)), storage_writer=Killed(folder, rank, stage))


def survives(folder, rank, stage):
    run_distributed(save_large, 2, str(folder / "1"))
    with pytest.raises(DistributedFailure) as failed:
        run_distributed(save_killed, 2, str(folder / "2"), rank, stage)
    assert failed.value.dead[rank] == -9
    assert latest(folder) == folder / "1"
    run_distributed(load_large, 2, str(folder / "1"))
    run_distributed(save_large, 2, str(folder / "2"))  # removes what is left
    assert latest(folder) == folder / "2" and sorted(os.listdir(folder)) == ["1", "2"]
    run_distributed(load_large, 2, str(folder / "2"))


def test_a_rank_that_is_killed_after_its_data_leaves_the_last_checkpoint(tmp_path):
    survives(tmp_path, 1, "write_data")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "stage"), [(1, "prepare_local_plan"), (0, "prepare_global_plan"), (0, "write_data"), (1, "write_data")]
)
def test_a_rank_that_is_killed_at_another_stage_leaves_the_last_checkpoint(rank, stage, tmp_path):
    survives(tmp_path, rank, stage)


# In one process: a child is killed at its k-th call that opens, writes, syncs, moves or removes a file.
EVERY_CALL = """
import os, signal, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from test_checkpoint import alone, latest, value_of

folder = Path(sys.argv[1])
CALLS = {"open", "write", "flush", "fsync", "rename", "mkdir", "unlink", "rmdir", "close", "scandir", "listdir"}
alone(folder / "1", 1.0)
calls, finished = 0, False
while not finished:
    calls += 1
    child = os.fork()
    if child == 0:
        left = calls

        def count(frame, event, called):
            global left
            if event == "c_call" and called.__name__ in CALLS:
                left -= 1
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(count)
        alone(folder / "2", 2.0)
        os._exit(0)
    finished = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    last = latest(folder)
    assert last in (folder / "1", folder / "2") and value_of(folder / "1") == 1.0, (calls, last)
    assert value_of(last) == int(last.name)
    if last == folder / "2" and not finished:
        print("moved at", calls)
        for path in last.iterdir():
            path.unlink()
        last.rmdir()
print("calls", calls)
"""


def test_a_process_that_is_killed_at_any_call_leaves_a_complete_checkpoint(tmp_path):
    found = subprocess.run(
        [sys.executable, "-c", EVERY_CALL, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", Path(__file__).parent)))},
    )
    assert found.returncode == 0, found.stdout + found.stderr
    # Many calls were tried, and some of them after the folder had been moved to its place.
    assert int(found.stdout.split()[-1]) > 20 and "moved at" in found.stdout


# -- full disks --------------------------------------------------------------------------------------------------------


class FullDisk(CheckpointWriter):
    """On one rank, every write to a data file fails as on a full disk: it is the system that says so."""

    def __init__(self, path, rank, **options):
        super().__init__(path, **options)
        if dist.get_rank() == rank:
            create = self.fs.create_stream
            self.fs.create_stream = lambda path, mode: _onto_full(create(path, mode))


@contextmanager
def _onto_full(stream):
    with stream as file:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, file.fileno())
        os.close(full)
        yield file


def save_full(folder, rank, threads):
    writer = FullDisk(folder, rank, thread_count=threads, single_file_per_rank=threads == 1)
    try:
        dcp.save(large(torch.zeros(LARGE, dtype=torch.float64)), storage_writer=writer)
    except CheckpointException as error:
        total = torch.ones(1)
        dist.all_reduce(total)  # all ranks are here
        return [(rank, failure[0].errno) for rank, failure in error.failures.items()]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's device that is always full")
def test_a_full_disk_on_one_rank_is_an_error_on_all(tmp_path):
    run_distributed(save_large, 2, str(tmp_path / "1"))
    # With threads, torch's own writer drops what one of them raises, and with it the data.
    for rank, threads in ((1, 1), (0, 1), (1, 3)):
        for failures in run_distributed(save_full, 2, str(tmp_path / "2"), rank, threads):
            assert failures == [(rank, errno.ENOSPC)]
        assert latest(tmp_path) == tmp_path / "1"
    run_distributed(load_large, 2, str(tmp_path / "1"))


def save_limited(folder):
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    try:
        dcp.save(large(torch.zeros(LARGE, dtype=torch.float64)), storage_writer=CheckpointWriter(folder))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_a_file_that_grows_too_large_is_an_error_on_all_ranks(tmp_path):
    run_distributed(save_large, 2, str(tmp_path / "1"))
    for error in run_expecting_errors(save_limited, 2, str(tmp_path / "2")):
        assert isinstance(error, CheckpointException) and error.failures[1][0].errno == errno.EFBIG
        assert "2.incomplete/__1_0.distcp" in str(error)
    assert latest(tmp_path) == tmp_path / "1"


@pytest.mark.slow
def test_a_small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("cannot mount a file system here")
    try:
        alone(disk / "1", 1.0)
        with pytest.raises(CheckpointException, match="No space left on device"):
            dcp.save({"x": torch.zeros(1 << 19)}, storage_writer=CheckpointWriter(disk / "2"))
        assert latest(disk) == disk / "1" and value_of(disk / "1") == 1.0
        shutil.rmtree(disk / "2.incomplete")
        alone(disk / "2", 2.0)
        assert latest(disk) == disk / "2"
    finally:
        subprocess.run(["umount", str(disk)], check=True)
