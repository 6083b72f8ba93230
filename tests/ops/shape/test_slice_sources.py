"""The record of where slices were taken from: what is found, how much work that is, and how much is kept."""

from __future__ import annotations

import sys

import torch
from torch.distributed.tensor import Replicate, Shard

from shardtensor import ShardTensorSpec
from shardtensor.ops.common import records
from shardtensor.ops.shape.slice import record_source, source_of
from shardtensor.testing import shard, shared_mesh, simulate_ranks

LENGTH = 400


def sharded(sizes, placement=None):
    placement = placement or Shard(0)
    shard_sizes = {0: sizes} if isinstance(placement, Shard) else None
    return ShardTensorSpec.make(shared_mesh(2), [placement], (sum(sizes), 3), torch.float32, shard_sizes=shard_sizes)


def answers():
    records._records.clear()
    long, short, other = (sharded(sizes) for sizes in ((5, 3), (2, 3), (1, 4)))
    assert source_of("head", (8, 3), short) is None
    for spec, part in ((long, short), (sharded((6, 2)), short)):
        record_source("first", spec, part)
    assert source_of("first", (8, 3), short) is long, "the first of two"
    assert source_of("first", (8, 3), other) is long, "another layout of the part, with its placements"
    assert source_of("first", (8, 3), sharded((5, 0), Replicate())) is None
    assert source_of("first", (9, 3), short) is None and source_of("second", (8, 3), short) is None
    # What was not found once is not found later, as on a rank that made its plan at once.
    record_source("head", long, short)
    assert source_of("head", (8, 3), short) is None
    return True


def test_the_first_source_of_a_layout_is_found_and_stays():
    assert all(simulate_ranks(answers, 2))


def kept_by_empty_parts():
    x = shard(torch.rand(8, 3), shared_mesh(2), [Shard(0)], {0: (5, 3)})
    parts = [x[:4], x[6:], *x.split((2, 6))]
    return [part.to_local().untyped_storage().nbytes() for part in parts if not part.to_local().numel()]


def test_an_empty_part_does_not_keep_the_shard_s_memory():
    assert simulate_ranks(kept_by_empty_parts, 2) == [[0], [0, 0]]


def calls_of(function):
    """How many functions of Python a call makes."""
    count = 0

    def seen(frame, event, arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def work_after(slices):
    """The calls that a new slice's backward makes after so many slices of other shard sizes."""
    records._records.clear()
    value, mesh = torch.zeros(LENGTH, 1), shared_mesh(2)

    def one(n):
        x = shard(value, mesh, [Shard(0)], {0: (n, LENGTH - n)}, requires_grad=True)
        y = x[3:-3]
        return calls_of(lambda: torch.autograd.grad(y, x, torch.ones_like(y)))

    return [one(n) for n in range(4, 4 + slices)][-1]


def test_a_backward_does_not_search_all_slices_that_there_were():
    few, many = (simulate_ranks(work_after, 2, n, only=[0])[0] for n in (20, 320))
    assert 0 < many <= few + 20  # caches that were filled meanwhile cost a few calls, a search hundreds


def full():
    records._records.clear()
    for n in range(1, 40):
        record_source("first", sharded((n, 1)), sharded((n, 0)))
        source_of("first", (n + 1, 3), sharded((n, 0)))
    (record,) = records._records.values()
    assert len(record.noted) == len(record.answers) == records.MAX_RECORDED
    assert source_of("first", (2, 3), sharded((1, 0))) is sharded((1, 1)), "nothing is dropped"
    assert source_of("first", (40, 3), sharded((39, 0))) is None, "nothing more is taken"
    return True


def test_the_record_is_bounded(monkeypatch):
    monkeypatch.setattr(records, "MAX_RECORDED", 16)
    assert all(simulate_ranks(full, 2, only=[1]))
