"""How a rank waits: it asks for a while, then sleeps, and what went wrong is raised in either case."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from shardtensor import ShardTensor
from shardtensor.ranks import waiting
from shardtensor.testing import run_distributed, run_expecting_errors, shard, shared_mesh, simulate_ranks

POLLS = pytest.mark.on_cpu("a device's stream waits, not the host")


def asked(monkeypatch, run):
    """How often ``run()`` let other threads run while it waited."""
    turns = []
    with monkeypatch.context() as patched:
        patched.setattr(waiting, "_give_way", lambda: turns.append(None))
        run()
    return len(turns)


def late(polling, delay, own_core=True):
    """Rank 0 waits for the others' numbers; returns them, and whether it asked."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(waiting, "POLLING" if own_core else "POLLING_ON_SHARED_CORES", polling)
        patched.setattr(waiting, "_has_own_core", lambda world_size: own_core)
        x = torch.full((3,), 1.0 + dist.get_rank())
        dist.barrier()
        if dist.get_rank() > 0:
            time.sleep(delay)
        work = dist.all_reduce(x, async_op=True)
        turns = asked(patched, lambda: waiting.wait_for(work, x, dist.group.WORLD))
    return x.tolist(), turns


@POLLS
@pytest.mark.on_gloo("only torch's own works are polled")
@pytest.mark.parametrize("own_core", [True, False])
@pytest.mark.parametrize("polling, delay", [(0.01, 0.1), (10.0, 0.1), (0.0, 0.1), (0.0, 1.2)])
def test_late_ranks_are_waited_for_longer_than_polling(polling, delay, own_core):
    (numbers, turns), *_ = run_distributed(late, 2, polling, delay, own_core)
    assert numbers == [3.0] * 3
    assert (turns > 0) == (polling > 0)


@pytest.mark.parametrize(
    "cores, local, world_size, own",
    [(2, None, 2, True), (2, None, 3, False), (2, "2", 64, True), (8, "8", 8, True), (8, "9", 9, False)],
)
def test_whether_a_host_has_a_core_for_each_rank(monkeypatch, cores, local, world_size, own):
    """The ranks of other hosts do not count where torchrun says how many are on this one."""
    monkeypatch.setattr(waiting.os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert waiting._has_own_core.__wrapped__(world_size) == own


def fails():
    group = dist.new_group(timeout=timedelta(seconds=1))
    x = torch.zeros(3)
    if dist.get_rank() == 0:
        waiting.wait_for(dist.all_reduce(x, group=group, async_op=True), x, group)
    else:
        time.sleep(2)


@POLLS
def test_what_goes_wrong_is_raised():
    errors = run_expecting_errors(fails, 2)
    assert errors[0] is not None and errors[1] is None


def halo():
    mesh = shared_mesh(dist.get_world_size())
    x = ShardTensor.from_local(torch.rand(1, 1, 4, 4), mesh, (Shard(2),), shard_sizes={0: (4,) * mesh.size()})
    weight = torch.rand(1, 1, 3, 3)
    with pytest.MonkeyPatch.context() as patched:
        return asked(patched, lambda: torch.nn.functional.conv2d(x, weight, padding=1))


def test_a_group_for_tests_is_not_polled():
    assert simulate_ranks(halo, 3) == [0, 0, 0]


@on_ranks(2, timeout=40)
def test_a_profiled_rank_does_not_wait_for_ever_in_activation_checkpointing():
    """Whose hooks for saved tensors are Python's, see the module's docstring."""
    x = shard(torch.randn(2, 8, 320, 24), shared_mesh(2), [Shard(2)], requires_grad=True)
    block = nn.Sequential(nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8))
    for _ in range(4):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            checkpoint(block, x, use_reentrant=False).sum().backward()
    assert any("all_gather" in event.key or "allgather" in event.key for event in profile.key_averages())
