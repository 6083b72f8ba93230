"""``shardtensor.debug.check``: values that have to be equal on all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import shardtensor
from shardtensor import RanksDiffer, ShardTensor
from shardtensor.ranks.summaries import digest
from shardtensor.testing import count_communication, run_expecting_errors, shared_mesh


def model_and_optimizer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def differing(what):
    mesh = shared_mesh(3)
    rank = mesh.get_local_rank()
    model, optimizer = model_and_optimizer()
    target, whole = torch.arange(4.0), torch.ones(2)
    number = 0.5
    with torch.no_grad():
        if what == "weight" and rank == 1:
            model[0].weight[3, 2] += 1e-7
        elif what == "buffer" and rank == 2:
            model[1].num_batches_tracked += 1
        elif what == "zero" and rank == 1:
            target[0] = -0.0
        elif what == "rate":
            optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1)
        elif what == "state" and rank == 0:
            next(iter(optimizer.state.values()))["exp_avg"].mul_(2)
        elif what == "number" and rank == 1:
            number = 0.25
        elif what == "shape" and rank == 1:
            target = target[1:]
        elif what == "dtype" and rank == 1:
            target = target.double()
        elif what == "type":
            number = object()
    replicated = ShardTensor.from_local(whole, mesh, (Replicate(),), shard_sizes={})
    if what == "replicated" and rank == 1:
        whole[1] = 2  # whose values from_local has noted
    sharded = ShardTensor.from_local(torch.full((2,), float(rank)), mesh, (Shard(0),), shard_sizes={0: (2, 2, 2)})
    shardtensor.debug.check(model, optimizer, {"y": target}, [replicated, sharded], number)


CASES = {
    "weight": (RanksDiffer, r"tensors differ .*: 0.weight is \(4, 3\) with the digest \w+ on ranks 0, 2, .* on rank 1"),
    "buffer": (RanksDiffer, r"1.num_batches_tracked is \(\) with the digest \w+ on ranks 0, 1, \(\) with .* on rank 2"),
    "zero": (RanksDiffer, r"dict 2, y is \(4,\) with the digest \w+ on ranks 0, 2, .* on rank 1"),
    "replicated": (RanksDiffer, r"list 3\[0\] is \(2,\) with the digest \w+ on ranks 0, 2, .* on rank 1"),
    "rate": (ValueError, r"Adam 1, group 0, lr = 0.1 on rank 0, Adam 1, group 0, lr = 0.2 on rank 1"),
    "state": (RanksDiffer, r"Adam 1, state of parameter 0 of group 0, exp_avg is .* on rank 0, .* on ranks 1, 2. "),
    "number": (ValueError, r"float 4 = 0.5 on ranks 0, 2, float 4 = 0.25 on rank 1"),
    "shape": (ValueError, r"dict 2, y \(\(4,\), torch.float32, c[a-z]+\) on ranks 0, 2, dict 2, y \(\(3,\)"),
    "dtype": (ValueError, r"dict 2, y .*float32.* on ranks 0, 2, dict 2, y .*float64.* on rank 1"),
    "type": (TypeError, r"object 4: check takes modules, optimizers, tensors, numbers and strings, not object"),
}


@pytest.mark.parametrize("what", CASES)
def test_what_differs_is_named_on_every_rank(what):
    kind, text = CASES[what]
    for error in run_expecting_errors(differing, 3, what):
        assert type(error) is kind
        with pytest.raises(kind, match=text):
            raise error


@on_ranks(3)
def test_equal_values_pass_and_take_two_small_collectives():
    differing("nothing")
    mesh = shared_mesh(3)
    model, _ = model_and_optimizer()
    shardtensor.debug.check(model, mesh=mesh)
    with count_communication() as counted:
        shardtensor.debug.check(model, mesh=mesh)
    # A checksum of their names and shapes, and twice the fingerprint of what was communicated and noted.
    assert dict(counted.collectives) == {"all_gather": 2} and counted.collective_bytes == (1 + 2 * 2) * 8
    with pytest.raises(RuntimeError, match="no mesh was given"):
        shardtensor.debug.check(model)


@on_ranks(4)
def test_shards_are_compared_with_their_copies_only():
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("domain", "tp"))
    rank = dist.get_rank()
    column = mesh.get_local_rank("tp")
    # Shards along tp, with a copy of each along domain.
    weight = ShardTensor.from_local(
        torch.full((2,), float(column)), mesh, (Replicate(), Shard(0)), shard_sizes={1: (2, 2)}
    )
    shardtensor.debug.check(weight)
    if rank == 3:
        weight.to_local()[0] = 9
    with pytest.raises(RuntimeError, match=r"differ between ranks: ShardTensor 0 is .* on rank 1, .* on rank 3"):
        shardtensor.debug.check(weight)


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16, torch.bool, torch.uint8, torch.complex64), ids=str)
@pytest.mark.parametrize("elements", (0, 1, 3, 8, 1025))
def test_every_element_and_its_place_count(dtype, elements):
    values = (torch.arange(elements) % 7 == 3).to(dtype)
    assert digest(values) == digest(values.clone())
    for i in range(0, elements, max(1, elements // 5)):
        other = values.clone()
        other[i] = not bool(other[i])
        assert digest(other) != digest(values)
    if elements > 8:
        assert digest(values.roll(1)) != digest(values)
    wide = torch.stack([values, values], 1)
    assert (digest(wide[:, 1]) == digest(values) and digest(wide.t()) != digest(wide)) or elements < 8


def test_large_tensors_are_digested_part_by_part(monkeypatch):
    values = torch.randn(1000, dtype=torch.float64)
    whole = digest(values)
    monkeypatch.setattr("shardtensor.ranks.summaries._CHUNK", 64)
    assert digest(values) == whole
