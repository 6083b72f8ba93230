"""shardtensor.parallel.init and device: a program's device, mesh, seeds, samplers and logs."""

from __future__ import annotations

import os
from collections import namedtuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from shardtensor import parallel
from shardtensor.testing import run_distributed


def as_local_rank(local_rank, devices):
    """A process that torchrun or Slurm started as this one of its host, and that sees so many devices."""
    sees = mock.patch.object(torch.accelerator, "device_count", lambda: devices)
    return mock.patch.dict(os.environ, {"LOCAL_RANK": str(local_rank)}), sees


@on_ranks(1)
def test_the_device_of_a_process(emulated):
    before = torch.cuda.current_device()
    try:
        for local_rank, devices, index in ((3, 8, 3), (3, 1, 0), (0, 1, 0)):
            environment, sees = as_local_rank(local_rank, devices)
            with environment, sees:
                assert parallel.device() == parallel.device("cuda") == torch.device("cuda", index)
                mesh = init_device_mesh("cuda", (dist.get_world_size(),))  # which would call set_device(3)
                assert torch.cuda.current_device() == index and mesh.device_type == "cuda"
                assert parallel.device("cpu") == torch.device("cpu")
        environment, sees = as_local_rank(3, 2)
        with environment, sees, pytest.raises(RuntimeError, match=r"LOCAL_RANK=3, but this process sees 2 devices of"):
            parallel.device()
        with pytest.raises(RuntimeError, match="sees no device of type 'xpu': torch finds cuda"):
            parallel.device("xpu")
    finally:
        torch.cuda.set_device(before)


def test_without_accelerators_the_device_is_the_cpu():
    with mock.patch.object(torch.accelerator, "current_accelerator", lambda check_available: None):
        assert parallel.device() == torch.device("cpu")
        with pytest.raises(RuntimeError, match="sees no device of type 'cuda': torch finds no accelerator"):
            parallel.device("cuda")


# -- init --------------------------------------------------------------------------------------------------------------


def of_shape(**given):
    made = parallel.init(device_type="cpu", **given)
    return made.mesh.mesh_dim_names, tuple(made.mesh.shape), tuple(made.inputs.mesh_dim_names), made.is_first


@on_ranks(4)
def test_the_mesh():
    first = dist.get_rank() == 0
    assert of_shape(domain=2) == (("dp", "domain"), (2, 2), ("domain",), first)
    assert of_shape(domain="4") == (("dp", "domain"), (1, 4), ("domain",), first)  # as from argparse
    assert of_shape() == of_shape(dp=1) == of_shape(domain=4)
    assert of_shape(dp=4) == (("dp", "domain"), (4, 1), ("domain",), first)
    assert of_shape(tp=2) == (("dp", "domain", "tp"), (1, 2, 2), ("domain", "tp"), first)
    with mock.patch.dict(os.environ, {"SHARDTENSOR_DOMAIN": "2", "SHARDTENSOR_TP": "2"}):
        assert of_shape() == (("dp", "domain", "tp"), (1, 2, 2), ("domain", "tp"), first)
        assert of_shape(domain=4, tp=1) == of_shape(**{"domain": 4, "tp": 1, "dp": 1})
    for given, said in (
        ({"domain": 3}, "domain=3 x tp=1"),
        ({"dp": 2, "domain": 4}, "dp=2 x domain=4 x tp=1"),
        ({"tp": 0}, "tp=0"),
    ):
        with pytest.raises(ValueError, match=f"4 ranks are not a mesh of .*{said}.*; sizes are positive"):
            parallel.init(device_type="cpu", **given)
    with pytest.raises(ValueError, match=r"do not agree on the mesh and the seed: .*'domain': 4.* on ranks 1, 2, 3;"):
        parallel.init(device_type="cpu", domain=4 if dist.get_rank() else 2)


def numbers():
    made = parallel.init(device_type="cpu", domain=2, seed=7)
    drawn = int(torch.randint(1 << 40, ()))
    parallel.init(device_type="cpu", domain=2, seed=None)  # leaves the generator alone
    samples = range(10)
    own = list(made.sampler(samples, shuffle=False))
    members = list(made.sampler(samples, members=2, shuffle=True, seed=3))
    with pytest.raises(ValueError, match="members=3 do not divide the 2 domains"):
        made.sampler(samples, members=3)
    return drawn, own, members


def test_seeds_and_samples_are_those_of_a_domain():
    results = run_distributed(numbers, 4)
    drawn, own, members = zip(*results)
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
    assert own[0] == own[1] == [0, 2, 4, 6, 8] and own[2] == own[3] == [1, 3, 5, 7, 9]
    assert members[0] == members[1] == members[2] == members[3] and sorted(members[0]) == list(range(10))


Pair = namedtuple("Pair", "x y")


def whole_batch():
    x = torch.arange(2.0 * 3 * 7).reshape(2, 3, 7)
    return {"pair": Pair(x, [x[0, 0], 5]), "array": np.ones((7, 2)), "name": "a"}


LAYOUTS = {"pair": Pair(Shard(2), [Shard(0), Replicate()]), "array": Replicate(), "name": Replicate()}


@pytest.mark.on_device
@on_ranks(4)
def test_a_batch_of_any_structure():
    made = parallel.init(domain=2, tp=2)
    first = made.mesh["domain"].get_local_rank() == 0 and made.mesh["tp"].get_local_rank() == 0
    for given in (whole_batch() if first else None, whole_batch()):
        batch = made.scatter(given, LAYOUTS, shard_sizes={"pair": (5, 2), "array": None, "name": None})
        assert type(batch["pair"]) is Pair and batch["name"] == "a" and batch["pair"].y[1] == 5
        x, y, array = batch["pair"].x, batch["pair"].y[0], batch["array"]
        assert x.device == made.device and x.placements == (Shard(2), Replicate()) and x.shard_sizes == {0: (5, 2)}
        for tensor, whole in ((x, whole_batch()["pair"].x), (y, whole_batch()["pair"].y[0]), (array, torch.ones(7, 2))):
            assert torch.equal(tensor.full_tensor().cpu().double(), whole.cpu().double())
    one = made.scatter(torch.ones(4, 6), Shard(1), shard_sizes=(1, 5))
    assert one.shard_sizes == {0: (1, 5)}
    with pytest.raises(TypeError, match="complex cannot be sent to the other ranks"):
        made.scatter([1j] if first else None, Replicate())
    with pytest.raises(ValueError, match=r"batch\[1\]: Shard\(2\) on mesh dim 0: the tensor has only 1 dims"):
        made.scatter([torch.ones(1, 2, 3), torch.ones(3)], Shard(2))


@on_ranks(4)
def test_ranks_of_a_domain_with_different_batches_are_told():
    made = parallel.init(device_type="cpu", domain=2)
    batch = torch.full((2, 4), float(dist.get_rank()))
    text = (
        r"ranks \[[13]\] have another batch than rank [02], .*; theirs would be lost.*leave the loader out of prepare"
    )
    with pytest.raises(ValueError, match=text):
        made.scatter(batch, Shard(1))
    same = torch.full((2, 4), float(made.mesh["dp"].get_local_rank()))
    assert made.scatter(same, Shard(1)).shape == (2, 4)


@pytest.mark.on_device
@on_ranks(4)
def test_a_step_is_that_of_one_device():
    made = parallel.init(domain=2)
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)).double().to(made.device)
    steps = made.parallelize(model)
    assert "weights and buffers: rank 0's on all ranks of dp=2 x domain=2" in str(steps)
    whole = torch.randn(4, 2, 9, dtype=torch.float64, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    mine = whole.chunk(2)[made.mesh["dp"].get_local_rank()]
    model(made.scatter(mine, Shard(2))).square().mean().backward()
    gradients = [p.grad.full_tensor().cpu() for p in model.parameters()]
    state = [p.detach().full_tensor().cpu() for p in model.parameters()]
    one = nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)).double().to("cpu")
    for p, values in zip(one.parameters(), state, strict=True):
        p.data.copy_(values)
    one(whole).square().mean().backward()
    for p, gradient in zip(one.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, p.grad, rtol=1e-10, atol=1e-12)
    made.log("loss", 1.5)
    with pytest.raises(ValueError, match=r"axes are \('dp', 'domain'\): a tensor axis needs a plan"):
        made.parallelize(model, plan={"*": "colwise"})


# -- a model that was left on the CPU ----------------------------------------------------------------------------------


@on_ranks(2)
def test_a_model_on_the_cpu(emulated):
    made = parallel.init(domain=2)
    model = nn.Conv1d(2, 4, 3, padding=1).to("cpu")
    x = made.scatter(torch.ones(1, 2, 9), Shard(2), shard_sizes=(9, 0))
    with pytest.raises(
        RuntimeError, match=r"conv1d: a parameter of shape \(4, 2, 3\) is on 'cpu', and .* model.to\(dev"
    ):
        model(x)
    for prepare in (made.parallelize, lambda model: parallel.synchronize(model, made.mesh)):
        with pytest.raises(
            ValueError, match=r"weight is on 'cpu', and the mesh on '\w+'; move it first: model.to\(device\)"
        ):
            prepare(model)
    assert model.to(made.device)(x).shape == (1, 4, 9)
