"""Whole training steps on a GPU, in all wrappers: the weights of one device, and no race that streams could have."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from seeded import seeded
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from shardtensor.data import ShardLoader
from shardtensor.parallel import DomainParallel
from shardtensor.testing import run_distributed, shard, shared_mesh

SIZES = {0: (11, 5)}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.norms = nn.ModuleList([nn.GroupNorm(2, 8), nn.BatchNorm2d(8)])
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = F.gelu(self.norms[0](self.first(x)))
        x = F.gelu(self.norms[1](self.second(x)))
        tokens = x.flatten(2).transpose(1, 2)
        return self.head(tokens + F.scaled_dot_product_attention(tokens, tokens, tokens))


class Checkpointed(Network):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def images(n=2, dtype=torch.float64):
    return torch.randn(n, 3, 16, 12, generator=seeded(1), dtype=torch.float64).to(dtype)


def network(kind=Network, dtype=torch.float64):
    torch.manual_seed(0)
    return kind().to(dtype)


def plain(tensors):
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]


def train(model, x, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return plain([*model.parameters(), *model.buffers()])


def adam(model):
    # The gradient of a bias in front of a norm is noise, which a small eps would make steps of.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)


def compare(found, expected, rtol=1e-10):
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol)


def sharded(x, mesh):
    return shard(x, mesh, [Shard(2)], SIZES)


def alone():
    model = network()
    compare(train(model, sharded(images(), shared_mesh(2)), adam(model)), expected())


def expected(kind=Network):
    model = network(kind)
    return train(model, images(), adam(model))


def channels_last():
    model = network().to(memory_format=torch.channels_last)
    x = images().contiguous(memory_format=torch.channels_last)
    compare(train(model, sharded(x, shared_mesh(2)), adam(model)), expected())


def checkpointed():
    model = network(Checkpointed)
    compare(train(model, sharded(images(), shared_mesh(2)), adam(model)), expected(Checkpointed))


def fused():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, fused=True)
    compare(train(model, sharded(images(), shared_mesh(2)), optimizer), expected())


def on_two_axes(wrap):
    """Samples over one axis of the mesh, rows over the other."""
    mesh = shared_mesh((2, 2), ("data", "domain"))
    model = network()
    wrapped = wrap(model, mesh["data"])
    optimizer, x = adam(model), images(4)
    mine = x.chunk(2)[mesh.get_local_rank("data")]
    for _ in range(3):
        optimizer.zero_grad()
        wrapped(sharded(mine, mesh["domain"])).square().mean().backward()
        optimizer.step()
    # Each replica has the statistics of its own samples, so batch norm is that of a half of them.
    reference = network()
    stepped = adam(reference)
    for _ in range(3):
        stepped.zero_grad()
        for half in x.chunk(2):
            (reference(half).square().mean() / 2).backward()
        stepped.step()
    compare(plain(model.parameters()), plain(reference.parameters()))


def ddp():
    on_two_axes(lambda model, mesh: DistributedDataParallel(model, process_group=mesh.get_group()))


def fsdp2():
    def wrap(model, mesh):
        for layer in (model.first, model.second, model):
            fully_shard(layer, mesh=mesh)
        return model

    on_two_axes(wrap)


def scaled():
    """Half precision with a GradScaler, next to one device: the loss falls as there."""
    losses = []
    for x in (images(dtype=torch.float32), sharded(images(dtype=torch.float32), shared_mesh(2))):
        model = network(dtype=torch.float32)
        optimizer, scaler, seen = adam(model), torch.amp.GradScaler("cuda", init_scale=256.0), []
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append(float(plain([loss])[0]))
        losses.append(seen)
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=2e-2, atol=0)


def styled():
    mesh, model = shared_mesh(2), network()
    parallelize_module(model, mesh, DomainParallel(inputs=Shard(2), outputs=Replicate()))
    optimizer, reference = adam(model), expected()
    compare(train(model, images(), optimizer), reference)


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return torch.full((3, 16, 12), float(i), device="cpu", dtype=torch.float64)


def loaded():
    mesh, model = shared_mesh(2), network()
    torch.set_default_device("cpu")  # a DataLoader draws from the CPU's generator
    rank = dist.get_rank()
    loader = ShardLoader(
        torch.utils.data.DataLoader(Images(), batch_size=2) if rank == 0 else None,
        mesh,
        [Shard(2)],
    )
    seen = []
    for batch in loader:
        (x,) = batch if isinstance(batch, (list, tuple)) else (batch,)
        model(x).sum().backward()
        seen.append(float(x.mean().full_tensor()))
    assert seen == [0.5, 2.5, 4.5]


def captured():
    """A step in a CUDA graph, its communication included, as often as it is replayed."""
    mesh, model = shared_mesh(2), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = sharded(images(), mesh)

    def step():
        optimizer.zero_grad(set_to_none=False)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(2):
        step()
    reference = copy.deepcopy(model)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for _ in range(3):
        graph.replay()
    after = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(3):
        after.zero_grad()
        expected_loss = reference(x).square().mean()
        expected_loss.backward()
        after.step()
    compare([*plain([loss]), *model.parameters()], [*plain([expected_loss]), *reference.parameters()])


ON_TWO = [alone, channels_last, checkpointed, fused, scaled, styled, loaded, captured]


@pytest.mark.parametrize("work", ON_TWO, ids=lambda f: f.__name__)
def test_steps_are_those_of_one_device(work, emulated):
    run_distributed(work, 2, timeout=120)


@pytest.mark.parametrize("work", [ddp, fsdp2], ids=lambda f: f.__name__)
def test_wrappers_on_another_axis(work, emulated):
    run_distributed(work, 4, timeout=120)
