"""What the ranks that are alive are told about one that is not: the errors, on all of them, within the timeout."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from pathlib import Path
from unittest import mock

import pytest
import rank_programs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from shardtensor._compat.c10d import default_store
from shardtensor.ranks import failures
from shardtensor.ranks.waiting import LOOKING
from shardtensor.testing import run_distributed, run_expecting_errors, shard, shared_mesh

PROGRAM = Path(__file__).with_name("failing_rank.py")
OPERATOR = r"rank {}: .* in (conv2d|group_norm|linalg_cholesky) .*\(.*failing_rank.py:\d+\) was not completed: "
REMEDY = "The process group cannot be used any more; end the program, and restart it from a checkpoint."


def run(how, world):
    """Each rank's exit code and output, None for one that had to be ended; whether rank 1 outlived rank 0."""
    ranks = rank_programs.start(PROGRAM, world, how)
    outcomes, ended, runs_on = [None] * world, [None] * world, False
    try:
        for rank, process in enumerate(ranks):
            if how != "freeze" or rank != 1:
                output, _ = process.communicate(timeout=150)
                outcomes[rank], ended[rank] = (process.returncode, output), time.time()
            runs_on = runs_on or (rank == 0 and ranks[1].poll() is None)
    finally:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        frozen = "" if ranks[1].stdout.closed else ranks[1].stdout.read()
    # What a frozen rank has printed comes when it has been ended.
    output = outcomes[1][1] if outcomes[1] else frozen
    start = float(re.search(r"fails at (\S+)", output)[1])
    after = [None if end is None else end - start for end in ended]
    seconds = ", ".join("-" if s is None else f"{s:.1f} s" for s in after)
    print(f"{how} on {world} ranks: ended {seconds} after the fault")
    return outcomes, runs_on


SAYS = {
    "kill": "rank 1 has said nothing: it was killed, frozen, busy elsewhere, or cut off",
    "freeze": "rank 1 has said nothing: it was killed, frozen, busy elsewhere, or cut off",
    "raise": r"rank 1 raised ValueError: 4 of 4 points of .* are masked, .* \(.*failing_rank.py:\d+\)",
    "memory": r"rank 1 raised MemoryError: no more of it \(.*failing_rank.py:\d+\)",
    "end": "rank 1 has ended",
    "singular": r"rank 1 raised _?LinAlgError: .* \(.*failing_rank.py:\d+\)",
}


SLOW = [pytest.param(how, 2, marks=pytest.mark.slow) for how in SAYS if how != "kill"]
FAULTS = [("kill", 2), pytest.param("kill", 3, marks=pytest.mark.slow), *SLOW]


@pytest.mark.parametrize(("how", "world"), FAULTS)
def test_survivors_name_the_rank_and_the_operator(how, world):
    outcomes, runs_on = run(how, world)
    for rank in range(world):
        if rank == 1:
            continue
        code, output = outcomes[rank]
        assert code == 1, output
        error = output[output.rindex("LostRankError") :]
        assert re.search(OPERATOR.format(rank) + ".*" + SAYS[how], error), error
        assert REMEDY in error
        assert "step 1:" in output and "step 2:" not in output
    if how == "singular":  # whose rank 1 goes on; rank 0 has not waited for the transport
        assert "caught" in outcomes[1][1] and runs_on and "The transport says" not in outcomes[0][1]
    if how == "kill":
        assert outcomes[1][0] == -signal.SIGKILL
    if world == 3:
        assert "rank 2 failed" in outcomes[0][1] and "rank 0 failed" in outcomes[2][1]


def test_a_step_that_one_rank_leaves_out_is_named_on_both():
    outcomes, _ = run("skip", 2)
    for code, output in outcomes:
        assert code == 1, output
        assert re.search(
            r"the ranks have not done the same .*number \d+ was .* on rank 0, from_local of .* on rank 1", output
        ), output
        assert "step 1:" in output and "step 3:" not in output


def without_store(local_rank, local_size):
    """What this rank says where the store does not answer, as far as torchrun has told it of its host."""
    told = {"LOCAL_RANK": str(local_rank[dist.get_rank()]), "LOCAL_WORLD_SIZE": str(local_size[dist.get_rank()])}
    failures.watch()
    with mock.patch.dict(os.environ, told), mock.patch.object(failures, "_ask", lambda question: False):
        return str(failures.lost(dist.group.WORLD, RuntimeError("Timed out")))


def test_without_the_store_a_rank_knows_which_ranks_are_on_its_host():
    first, second, third = run_distributed(without_store, 3, (0, 1, 0), (2, 2, 1))
    for error in (first, second):
        assert f"; this host, {socket.gethostname()}, has ranks 0, 1; nothing can be heard of rank 2, on" in error
    assert f"; this host, {socket.gethostname()}, has rank 2; nothing can be heard of ranks 0, 1, on" in third
    for error in run_distributed(without_store, 3, (0, 1, 0), ("", "", "")):
        assert "has gone or is cut off. The process group cannot be used" in error


# -- what is no failure ------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_an_error_that_all_ranks_catch_is_no_reason_to_stop_waiting():
    """All ranks raise inside of an operator, catch it, and call it again, one of them later."""
    matrices = torch.eye(4).repeat(4, 1, 1)
    singular, regular = (shard(t, shared_mesh(2), [Shard(1)]) for t in (-matrices, matrices))
    with pytest.raises(torch.linalg.LinAlgError):
        torch.linalg.cholesky(singular)
    if dist.get_rank() == 1:
        time.sleep(2.5 * LOOKING)
    assert torch.equal(torch.linalg.cholesky(regular).full_tensor(), matrices)


def written_too_early():
    """A write to what one rank's graph has saved: the backward pass raises there, before another one communicates."""
    torch.manual_seed(0)
    lstm = nn.LSTM(4, 4, batch_first=True)
    x = shard(torch.randn(4, 3, 4), shared_mesh(2), [Shard(0)], {0: (1, 3)}, requires_grad=True)
    written = x * 1
    y, _ = lstm(written)
    with torch.no_grad():
        written.zero_()
    try:
        y.square().sum().backward()
    except RuntimeError:
        time.sleep(5 * LOOKING)  # the program goes on with something else
        raise


def test_a_backward_pass_that_only_one_rank_ends_is_told_to_those_that_wait_for_it():
    first, second = run_expecting_errors(written_too_early, 2)
    assert "modified by an inplace operation" in str(first)
    assert "was not completed: rank 0 raised RuntimeError: one of the variables needed for gradient" in str(second)


@on_ranks(2)
def test_a_recomputation_that_is_complete_is_not_told_as_an_error():
    mesh = shared_mesh(2)
    x, conv = shard(torch.randn(1, 2, 8, 4), mesh, [Shard(2)]).requires_grad_(), nn.Conv2d(2, 2, 3, padding=1)
    key = f"shardtensor/rank {dist.get_rank()}"
    x.sum().item()
    default_store().set(key, "nothing")
    checkpoint(lambda x: conv(F.gelu(conv(x))), x, use_reentrant=False).square().sum().backward()
    assert default_store().get(key) == b"nothing"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks on this system")
@on_ranks(2)
def test_a_forked_process_may_compute_and_is_told_not_to_communicate():
    """What becomes of a forked process that works on its shard, and then would communicate."""
    mesh = shared_mesh(2)
    x = shard(torch.ones(6), mesh, [Shard(0)])
    x.sum().item()
    said, says = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(says, f"{(x * 2).to_local().tolist()} ".encode())
        try:
            x.sum().item()
        except RuntimeError as error:
            os.write(says, str(error).encode())
        os._exit(0)
    os.close(says)
    os.waitpid(child, 0)
    with os.fdopen(said) as file:
        text = file.read()
    rank = dist.get_rank()
    total = x.sum().item()
    assert text.startswith(f"[2.0, 2.0, 2.0] this process was forked from that of rank {rank}"), text
    assert total == 6
