"""Ranks that have not done the same are told with the next number that they read."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import LostRankError, RanksDiffer, ShardTensor, scatter_tensor
from shardtensor.data.batches import scatter_batch
from shardtensor.debug import check
from shardtensor.ranks.history import as_text, difference, fingerprint, forget_history, record
from shardtensor.testing import count_communication, run_distributed, run_expecting_errors, shard, shared_mesh

SIZES = {2: (9, 7), 3: (9, 2, 5)}


def image(mesh):
    return shard(torch.randn(1, 8, 16, 8), mesh, [Shard(2)], {0: SIZES[mesh.size()]})


# -- what only one rank does -------------------------------------------------------------------------------------------


def otherwise(x, mesh, what):
    """On rank 1 something else than on the others, which communicates as much."""
    odd = mesh.get_local_rank() == 1
    conv = nn.Conv2d(8, 8, 3, padding=1)
    if what == "another operator":
        return F.max_pool2d(x, 3, 1, 1) if odd else F.avg_pool2d(x, 3, 1, 1)
    if what == "another order":
        first, second = (F.max_pool2d, F.avg_pool2d) if odd else (F.avg_pool2d, F.max_pool2d)
        return second(first(x, 3, 1, 1), 3, 1, 1)
    if what == "another layout":
        return x.redistribute(placements=(Shard(1 if odd else 3),))
    if what == "another dtype":
        local = x.to_local().to(torch.bfloat16 if odd else torch.float16)
        return ShardTensor.from_local(local, mesh, (Shard(2),), shard_sizes={0: SIZES[mesh.size()]}).float()
    if what == "another batch":
        parts = range(2, 4) if odd else range(3)
        made = [ShardTensor.from_local(torch.ones(k), mesh, (Replicate(),), shard_sizes={}) for k in parts]
        return x * made[-1].sum()
    if what == "another precision":  # of contributions to a sum, which are held in float32 in any case
        with torch.autocast(torch.get_default_device().type, torch.bfloat16, enabled=odd):
            return F.linear(x, torch.ones(8, 8))
    if what.startswith("another seed"):
        torch.manual_seed(mesh.get_local_rank())
        whole = x.redistribute(placements=(Replicate(),))
        return x + (torch.randn_like(whole) if what.endswith("noise") else whole.clone().uniform_())
    if what.startswith("another weight"):
        if what.endswith("hook"):  # its gradient is summed by the operator, not with those of others
            conv.weight.register_post_accumulate_grad_hook(lambda p: None)
        with torch.no_grad():
            conv.weight[0, 0, 0, 0] += float(odd)
        return conv(x)
    raise AssertionError(what)


TEXTS = {
    "another operator": r"exchange of float32 in avg_pool2d to \(1, 8, 16, 8\).* on rank.* 0.*, exchange of float32 "
    r"in max_pool2d to .* on rank 1",
    "another order": r"exchange of float32 in avg_pool2d .* on rank.* 0.*, exchange of float32 in max_pool2d .* on "
    r"rank 1",
    "another layout": r"in redistribute \(1, 8, 16, 8\).* to .*S\(3\).* on rank.* 0.*S\(1\).* on rank 1",
    "another dtype": r"from_local of \(1, 8, 16, 8\) float16 .* on rank.* 0.*, from_local of .* bfloat16 .* on rank 1",
    "another batch": r"from_local of \(0,\) .* on rank.* 0.*, from_local of \(2,\) .* on rank 1",
    "another precision": r"item of 1 float32 on rank.* 0.*, item of 1 bfloat16 on rank 1",
    "another seed, noise": r"random numbers from the state (\w+) for copies on rank.* 0.*, random numbers from "
    r"the state (?!\1)\w+ for copies on rank 1",
    "another weight": r"tensors differ between ranks: the plain parameter of conv2d \(\S+test_history.py:\d+\), "
    r"torch.float32, is \(8, 8, 3, 3\) with the digest (\w+) on rank.* 0.*, .* (?!\1)\w+ on rank 1. A plain "
    r"tensor .*synchronize\(model, mesh\)",
}
TEXTS["another seed, in place"] = TEXTS["another seed, noise"]
TEXTS["another weight, with a hook"] = TEXTS["another weight"]


def differ(what, ask):
    mesh = shared_mesh(dist.get_world_size())
    x = image(mesh)
    x.sum().item()
    y = otherwise(x, mesh, what)
    if ask == "item":
        y.square().mean().item()
    elif ask == "from_local":
        ShardTensor.from_local(torch.ones(2), mesh, (Shard(0),))
    elif ask == "scatter":
        scatter_tensor(torch.ones(2) if mesh.get_local_rank() == 0 else None, mesh, (Shard(0),))
    elif ask == "batch":
        scatter_batch({"x": torch.ones(2)} if mesh.get_local_rank() == 0 else None, mesh, (Shard(0),))
    elif ask == "full_tensor":
        y.full_tensor()
    elif ask == "check":
        check(nn.Linear(2, 2), mesh=mesh)


@pytest.mark.parametrize("ranks", (2, 3))
@pytest.mark.parametrize("what", TEXTS)
def test_what_one_rank_does_otherwise_is_named_on_all_with_the_next_number(what, ranks):
    for error in run_expecting_errors(differ, ranks, what, "item"):
        assert isinstance(error, RuntimeError)
        text = TEXTS[what]
        if not text.startswith("tensors"):
            text = rf"the ranks have not done the same .*{text}.* Every rank must call the same operators"
        with pytest.raises(RuntimeError, match=text):
            raise error


@pytest.mark.parametrize("ask", ("from_local", "scatter", "batch", "full_tensor", "check"))
def test_every_call_that_compares_or_gathers_tells(ask):
    for error in run_expecting_errors(differ, 2, "another operator", ask):
        assert isinstance(error, RuntimeError)
        assert "number" in str(error) and "max_pool2d" in str(error)


def one_batch_more(debug):
    """Rank 0's loader is longer; every call has been made before."""
    mesh = shared_mesh(2)
    with mock.patch.dict("os.environ", SHARDTENSOR_DEBUG=str(int(debug))):
        for step in range(2 + (mesh.get_local_rank() == 0)):
            batch = scatter_batch({"x": torch.full((5,), float(step))}, mesh, (Shard(0),))
            total = batch["x"].sum()
            if step == 0:
                total.item()
        total.item()


@pytest.mark.parametrize("debug", (False, True))
def test_a_batch_that_only_one_rank_has_is_named_on_both(debug):
    for error in run_expecting_errors(one_batch_more, 2, debug):
        assert isinstance(error, RanksDiffer | LostRankError)
        number = r"number \d+ was scatter of a batch .* on rank 0, (all-reduce|item) .* on rank 1"
        assert re.search(number, str(error)), error


# -- what is left alone ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", (2, 3))
@on_ranks("ranks")
def test_ranks_that_do_the_same_are_left_alone(ranks):
    mesh = shared_mesh(dist.get_world_size())
    x = image(mesh).requires_grad_()
    net = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, stride=2))
    for _ in range(3):
        loss = net(x).square().mean()
        loss.backward()
        if mesh.get_local_rank() == 1:  # what a rank computes and prints for itself
            str(x * 2 + x.to_local().sum())
            with pytest.raises(RuntimeError):
                x.to_local().view(3, 5)
        loss.item()
    with torch.no_grad():
        net(x).sum().item()
    counted = fingerprint(mesh.get_group().group_name)
    gathered = [None] * mesh.size()
    dist.all_gather_object(gathered, counted)
    assert counted[0] > 20 and len(set(gathered)) == 1


def after_an_error():
    mesh = shared_mesh(2)
    x = image(mesh)
    with pytest.raises(RanksDiffer, match="have not done the same"):
        otherwise(x, mesh, "another operator")
    return x.sum().item()


def test_what_was_told_is_not_told_again():
    a, b = run_distributed(after_an_error, 2)
    assert a == b


@on_ranks(2)
def test_it_takes_no_message_of_its_own():
    mesh = shared_mesh(2)
    x = image(mesh)
    conv = nn.Conv2d(8, 8, 3, padding=1)
    conv(x)
    with count_communication() as counted:
        loss = conv(x).square().mean()
    assert dict(counted.collectives) == {"all_to_all": 1}
    with count_communication() as counted:
        loss.item()
    assert dict(counted.collectives) == {"all_gather": 1} and counted.collective_bytes == 32


# -- numbers that are read ---------------------------------------------------------------------------------------------


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int16, torch.complex128)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_ranks(3)
def test_numbers_of_every_dtype_and_layout(dtype):
    mesh = shared_mesh(3)
    rank = mesh.get_local_rank()
    numbers = torch.tensor([2, 3, 5]).to(dtype)
    if dtype.is_complex:
        numbers = numbers * (1 + 2j)
    reduced = {"sum": numbers.sum(dtype=dtype), "product": numbers.prod(dtype=dtype)}
    if not dtype.is_complex:
        reduced |= {"max": numbers.max(), "min": numbers.min()}
    for op, expected in reduced.items():
        part = ShardTensor.from_local(numbers[rank], mesh, (Partial(op),))
        found = part.item()
        assert found == expected.item() and type(found) is type(expected.item())
    for owner in range(3):
        sizes = tuple(int(r == owner) for r in range(3))
        local = numbers[owner : owner + sizes[rank]]
        x = ShardTensor.from_local(local, mesh, (Shard(0),), shard_sizes={0: sizes})
        assert x.item() == numbers[owner].item()


# -- the text ----------------------------------------------------------------------------------------------------------


def texts(*histories):
    """What is said of ranks that have recorded these, in one process."""
    logs = []
    for kinds in histories:
        forget_history()
        for kind in kinds:
            record("group", kind, torch.float32)
        logs.append(as_text("group"))
    forget_history()
    return difference(dict(enumerate(logs)))


def test_the_first_difference_is_shown():
    assert texts("abc", "abc") is None
    assert "number 1 was b of float32 on rank 0, x of float32 on rank 1" in texts("abc", "axc")
    assert "(3 times on rank 0, 2 times on rank 1): number 2 was c of float32 on rank 0, nothing on rank 1" in texts(
        "abc", "ab"
    )
    assert "b of float32 on ranks 0, 2, x of float32 on rank 1" in texts("abc", "axc", "abc")
    long = "a" * 1000
    assert "earlier than what is kept" in texts("x" + long, "y" + long)
    assert "earlier than what is kept" in texts(long + "b" * 500, long)
    assert "number 1000 was b of float32 on rank 0, nothing on rank 1" in texts(long + "b", long)
