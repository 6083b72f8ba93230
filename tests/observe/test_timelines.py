"""A Chrome trace with one row per rank: what each did, sent and waited for."""

from __future__ import annotations

import json
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

import shardtensor
from shardtensor.ranks import history, waiting
from shardtensor.testing import count_communication, run_distributed, run_expecting_errors, shard, shared_mesh


def step(model, x):
    (model(x) + 1).square().mean().backward()


def made(sizes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 3, padding=1))
    return model, shard(torch.randn(1, 2, sum(sizes), 6), shared_mesh(len(sizes)), [Shard(2)], {0: sizes})


def traced(sizes, path):
    model, x = made(sizes)
    step(model, x)
    model.zero_grad()
    with count_communication() as counted:
        step(model, x)
    before = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with shardtensor.timeline(path):
        if dist.get_rank() == 1:
            time.sleep(1.0)
        step(model, x)
    assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before))
    return counted


def test_each_rank_has_a_row_with_its_operators_messages_and_waits(tmp_path):
    counts = run_distributed(traced, 3, (4, 2, 5), str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["ts"] >= 0 and event["dur"] >= 0 and event["pid"] == 0 for event in spans)
    for rank, counted in enumerate(counts):
        own = [event for event in spans if event["tid"] == rank]
        sent = [event["args"] for event in own if event["cat"] == "communication"]
        assert sum(args["messages"] for args in sent) == counted.messages
        assert sum(args["bytes"] for args in sent) == counted.bytes_sent + counted.collective_bytes
        operators = [(event["name"], event["args"]["phase"]) for event in own if event["cat"] == "operator"]
        assert operators.count(("conv2d", "forward")) == operators.count(("conv2d", "backward")) == 2
        assert ("group_norm", "forward") in operators and ("mean", "forward") in operators
    # Rank 1 was late, and its neighbours waited for it.
    waits = {rank: next(e for e in spans if e["tid"] == rank and e["cat"] == "wait") for rank in range(3)}
    assert all("wait for exchange of float32 in conv2d" in wait["name"] for wait in waits.values())
    late = next(event["ts"] for event in spans if event["tid"] == 1 and event["cat"] == "communication")
    for rank in (0, 2):
        assert waits[rank]["ts"] < late < waits[rank]["ts"] + waits[rank]["dur"] + 1000  # two clocks, within 1 ms


def nested_in_rows(path):
    sizes = (3, 4)
    with shardtensor.timeline(path):
        step(*made(sizes))


def test_spans_of_a_row_lie_in_each_other_or_apart(tmp_path):
    run_distributed(nested_in_rows, 2, str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for rank in range(2):
        spans = sorted((e["ts"], -e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == rank)
        ends = []
        for start, duration in spans:
            end = start - duration
            while ends and ends[-1] <= start + 0.01:
                ends.pop()
            assert not ends or end <= ends[-1] + 0.01  # microseconds: times are floats since 1970
            ends.append(end)


def off():
    """Nothing is left when the block is over, whether it ends well or not."""
    assert history.here.operator == "" and type(history.here) is history._Here
    assert waiting.observed and not shardtensor.observe.timelines._recording
    return history._observer, waiting._observer


def raising(path):
    model, x = made((3, 4))
    with shardtensor.timeline(path):
        model(x)
        raise KeyError("in the block")


def nested(path):
    with shardtensor.timeline(path), shardtensor.timeline(path):
        pass


def test_errors_leave_the_block_and_nothing_else(tmp_path):
    path = tmp_path / "trace.json"
    assert [type(e) for e in run_expecting_errors(raising, 2, str(path))] == [KeyError, KeyError]
    for error in run_expecting_errors(nested, 2, str(path)):
        assert isinstance(error, RuntimeError) and "recorded already" in str(error)
    assert run_distributed(off, 2) == [(None, None)] * 2
    assert not path.exists()


def test_a_process_alone(tmp_path):
    with shardtensor.timeline(tmp_path / "alone.json"):
        torch.ones(3).sum()
    events = json.loads((tmp_path / "alone.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["rank 0"]
    with pytest.raises(FileNotFoundError), shardtensor.timeline(tmp_path / "none" / "trace.json"):
        pass
