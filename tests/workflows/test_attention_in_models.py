"""How models use attention: positions as rotations, biases and embeddings; windows; attention written out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from shardtensor import ShardTensor
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    shard,
    shared_mesh,
)

LENGTH, WIDTH, HEADS = 9, 8, 2


def data(*shape):
    return torch.randn(*shape, dtype=torch.float64)


class Block(nn.Module):
    """Pre-norm attention and MLP; ``positions`` is one of the ways to tell the model where a token is."""

    def __init__(self, positions: str):
        super().__init__()
        self.positions = positions
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        angles = torch.arange(LENGTH, dtype=torch.float64)[:, None] * 10.0 ** -torch.arange(2, dtype=torch.float64)
        self.register_buffer("cos", torch.cat([angles.cos()] * 2, -1))
        self.register_buffer("sin", torch.cat([angles.sin()] * 2, -1))
        if positions == "bias":
            distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH) + LENGTH - 1
            self.register_buffer("distance", distance)
            self.table = nn.Parameter(torch.randn(2 * LENGTH - 1, HEADS))
        if positions == "embedding":
            self.embedding = nn.Parameter(torch.randn(1, LENGTH, WIDTH))

    def rotate(self, t):
        a, b = t.chunk(2, dim=-1)
        return t * self.cos + torch.cat([-b, a], dim=-1) * self.sin

    def attend(self, q, k, v):
        if self.positions == "bias":
            return F.scaled_dot_product_attention(q, k, v, self.table[self.distance].permute(2, 0, 1).unsqueeze(0))
        if self.positions == "written out":
            shares = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(dim=-1)
            return shares @ v
        if self.positions == "einsum":
            shares = torch.einsum("bhle,bhse->bhls", q, k).softmax(dim=-1)
            return torch.einsum("bhls,bhse->bhle", shares, v)
        return F.scaled_dot_product_attention(q, k, v)

    def forward(self, x):
        if self.positions == "embedding":
            x = x + self.embedding
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        if self.positions == "rotation":
            q, k = self.rotate(q), self.rotate(k)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


@pytest.mark.parametrize("positions", ["rotation", "bias", "embedding", "written out", "einsum"])
@on_ranks(2)
def test_positions(positions):
    torch.manual_seed(0)
    model = Block(positions).double()
    for sizes in ({0: (6, 3)}, {0: (0, 9)}):
        assert_matches_unsharded(
            model, data(2, LENGTH, WIDTH), mesh_shape=2, placements=[Shard(1)], shard_sizes=sizes
        )


@on_ranks(2)
def test_training_with_a_sharded_embedding():
    """The embedding is cut like the activations; after steps of an optimizer all parameters are one device's."""
    torch.manual_seed(0)
    whole, x, target = Block("embedding").double(), data(2, LENGTH, WIDTH), data(2, LENGTH, WIDTH)
    sizes, mesh = {0: (6, 3)}, shared_mesh(2)
    model = Block("embedding").double()
    model.load_state_dict(whole.state_dict())
    model.embedding = nn.Parameter(shard(whole.embedding, mesh, [Shard(1)], sizes))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (whole, model)]
    for _ in range(3):
        losses = []
        for m, optimizer, inputs in (
            (whole, optimizers[0], (x, target)),
            (model, optimizers[1], tuple(shard(t, mesh, [Shard(1)], sizes) for t in (x, target))),
        ):
            optimizer.zero_grad()
            loss = F.mse_loss(m(inputs[0]), inputs[1])
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        assert abs(losses[0] - losses[1]) < 1e-12
    assert model.embedding.grad.shard_sizes == sizes
    for (name, a), b in zip(whole.named_parameters(), model.parameters()):
        b = b.full_tensor() if isinstance(b, ShardTensor) else b
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-11, msg=name)


# -- windows -----------------------------------------------------------------------------------------------------------


def windows_of(x, size):
    batch, height, width, channels = x.shape
    x = x.view(batch, height // size, size, width // size, size, channels)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, size, size, channels)


def from_windows(windows, size, height, width):
    batch = windows.shape[0] // (height * width // size**2)
    x = windows.view(batch, height // size, width // size, size, size, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(batch, height, width, -1)


class Windowed(nn.Module):
    """A block of shifted windows as Swin writes it."""

    def __init__(self, size: int, shift: int, height: int, width: int):
        super().__init__()
        self.size, self.shift = size, shift
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn((2 * size - 1) ** 2, HEADS))
        at = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")).flatten(1)
        apart = (at[:, :, None] - at[:, None, :]) + size - 1
        self.register_buffer("index", apart[0] * (2 * size - 1) + apart[1])
        region = torch.zeros(1, height, width, 1, dtype=torch.float64)
        if shift:
            for i, rows in enumerate((slice(-size), slice(-size, -shift), slice(-shift, None))):
                for j, columns in enumerate((slice(-size), slice(-size, -shift), slice(-shift, None))):
                    region[:, rows, columns] = 3 * i + j
        region = windows_of(region, size).view(-1, size * size)
        self.register_buffer("mask", ((region[:, None] != region[:, :, None]) * -100.0))

    def forward(self, x):
        _, height, width, channels = x.shape
        tokens = self.size**2
        y = self.norm(x)
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), (1, 2))
        y = windows_of(y, self.size).view(-1, tokens, channels)
        qkv = self.qkv(y).reshape(-1, tokens, 3, HEADS, channels // HEADS).permute(2, 0, 3, 1, 4)
        scores = qkv[0] * (channels // HEADS) ** -0.5 @ qkv[1].transpose(-2, -1)
        scores = scores + self.table[self.index.view(-1)].view(tokens, tokens, -1).permute(2, 0, 1).unsqueeze(0)
        count = self.mask.shape[0]
        scores = scores.view(-1, count, HEADS, tokens, tokens) + self.mask.unsqueeze(1).unsqueeze(0)
        shares = scores.view(-1, HEADS, tokens, tokens).softmax(dim=-1)
        y = self.out((shares @ qkv[2]).transpose(1, 2).reshape(-1, tokens, channels))
        y = from_windows(y.view(-1, self.size, self.size, channels), self.size, height, width)
        if self.shift:
            y = torch.roll(y, (self.shift, self.shift), (1, 2))
        return x + y


@on_ranks(2)
def test_windows():
    """Along the rows of an image: nothing is sent but the rows that a shift moves, or that a cut is moved by."""
    torch.manual_seed(0)
    sent = []
    for shift in (0, 2):
        model = Windowed(4, shift, 12, 8).double()
        for batch, dim, sizes in (
            (1, 1, (8, 4)),  # whole windows
            (1, 1, (7, 5)),  # the cut is moved to the nearest window
            (1, 1, (0, 12)),
            (2, 1, (8, 4)),  # several images: their windows are put in one dim, which rows do not lead
            (1, 2, (4, 4)),
        ):
            x = data(batch, 12, 8, WIDTH)
            assert_matches_unsharded(model, x, mesh_shape=2, placements=[Shard(dim)], shard_sizes={0: sizes})
            with count_communication() as counted, torch.no_grad():
                model(shard(x, shared_mesh(2), [Shard(dim)], {0: sizes}))
            sent.append((counted.messages, counted.bytes_sent))
    a_row = 8 * WIDTH * 8
    straight, shifted = sent[:5], sent[5:]
    assert straight[0] == (0, 0)
    assert straight[1] == (1, a_row)  # there from the second rank, or back from the first
    assert straight[2] == (0, 0)
    assert shifted[0] == (2, 2 * 2 * a_row)  # two rows to the neighbour, and back
    assert shifted[2] == (0, 0)


@on_ranks(4)
def test_two_mesh_dims():
    torch.manual_seed(0)
    for positions in ("rotation", "written out"):
        assert_matches_unsharded(
            Block(positions).double(),
            data(3, LENGTH, WIDTH),
            mesh_shape=(2, 2),
            placements=[Shard(0), Shard(1)],
            shard_sizes={0: (1, 2), 1: (7, 2)},
        )
    assert_matches_unsharded(
        Block("bias").double(),
        data(2, LENGTH, WIDTH),
        mesh_shape=(2, 2),
        placements=[Replicate(), Shard(1)],
        shard_sizes={1: (7, 2)},
    )
