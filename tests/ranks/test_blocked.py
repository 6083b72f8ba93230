"""Ranks that wait for each other in FSDP2's or the program's own communication: who is named, meanwhile and after."""

from __future__ import annotations

import logging
import re
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import rank_programs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from shardtensor._compat.c10d import default_store
from shardtensor.ranks import blocked
from shardtensor.testing import run_distributed, shard, shared_mesh

PROGRAM = Path(__file__).with_name("uneven_batches.py")
HERE = r"\(\S*test_blocked.py:\d+\)"


def look(name, times=4):
    """What this rank warns of where its main thread is; all ranks look as often, one after the other."""
    texts, looks, store = [], blocked._Looks(dist.get_rank(), default_store()), default_store()
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("shardtensor").addHandler(handler)
    for turn in range(times):
        time.sleep(0.1)
        looks.look()
        store.add(f"{name}: {turn}", 1)
        while store.add(f"{name}: {turn}", 0) < dist.get_world_size():
            time.sleep(0.01)
    logging.getLogger("shardtensor").removeHandler(handler)
    store.set(blocked._key(dist.get_rank()), "")
    return texts


def uneven():
    """Rank 0 evaluates a batch more than rank 1, which waits in the sum of a metric."""
    mesh, metric = shared_mesh(2), dist.new_group(timeout=timedelta(seconds=30))
    model, x, texts = fully_shard(nn.Linear(2, 2), mesh=mesh), torch.ones(1, 2), []

    def look_and_help():
        texts.extend(look("uneven"))
        if dist.get_rank() == 1:  # so that the ranks do not wait for ever
            with torch.no_grad():
                model(x)

    thread = threading.Thread(target=look_and_help)
    thread.start()
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(x)
    dist.all_reduce(torch.ones(1), group=metric)
    thread.join()
    return texts


@pytest.mark.on_cpu("a device's stream waits, not the host")
def test_ranks_that_wait_for_each_other_are_named_while_they_wait():
    first, second = run_distributed(uneven, 2)
    gathers, sums = rf"all_gather\w+ {HERE}", rf"all_reduce {HERE}"
    assert re.match(rf"rank 0 has waited for \d s in {gathers}\. The others: {sums} on rank 1\. It goes on", first[0])
    assert re.match(rf"rank 1 has waited for \d s in {sums}\. The others: {gathers} on rank 0\. It goes on", second[0])


def late():
    """Rank 0 is busy while rank 1 waits for a number."""
    x, texts = shard(torch.ones(6), shared_mesh(2), [Shard(0)]), []
    x.sum().item()
    thread = threading.Thread(target=lambda: texts.extend(look("late")))
    thread.start()
    if dist.get_rank() == 0:
        thread.join()
    x.sum().item()
    thread.join()
    return texts


@pytest.mark.on_cpu("a device's stream waits, not the host")
def test_a_rank_that_waits_for_a_busy_one_says_so():
    first, second = run_distributed(late, 2)
    assert not first
    said = rf"rank 1 has waited for \d s in item of 1 float32 {HERE}\. The others: in no communication that is seen"
    assert re.match(said, second[0]), second


@pytest.mark.slow
@pytest.mark.on_cpu("a program of its own")
@pytest.mark.parametrize(("after", "world"), [("barrier", 4), ("sum along dp", 2), ("training", 2)])
def test_an_uneven_number_of_batches(after, world):
    """Every rank names the others' calls after some seconds, and with the error at the timeout."""
    ranks = rank_programs.start(PROGRAM, world, after)
    try:
        outputs = [process.communicate(timeout=150)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    gathers = r"all_gather\w+ \(\S*uneven_batches.py:\d+\)"
    name = {"barrier": "barrier", "sum along dp": "all_reduce", "training": r"reduce_scatter\w+"}[after]
    waits = rf"{name} \(\S*uneven_batches.py:\d+\)"
    for rank, output in enumerate(outputs):
        mine, theirs = (gathers, waits) if rank < world // 2 else (waits, gathers)
        assert re.search(rf"has waited for \d+ s in {mine}\. The others: .*{theirs} on rank", output), output
        lost = re.search(
            rf"^rank {rank}: {mine} was not completed: (.*) The process group cannot", output, re.MULTILINE
        )
        assert lost and re.search(r"rank \d (waits in|failed in|raised \w+: .*)", lost[1]), output
