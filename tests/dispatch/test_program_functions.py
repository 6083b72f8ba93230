"""What a program's own ``autograd.Function`` returns for plain weights are plain gradients, complete on every rank."""

from __future__ import annotations

import copy

import pytest
import torch
from on_ranks import on_ranks
from seeded import seeded
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardtensor import ShardTensor
from shardtensor.testing import assert_matches_unsharded, shard, shared_mesh


class Projected(torch.autograd.Function):
    """``sin(x @ w + b)``"""

    @staticmethod
    def forward(ctx, x, w, b, factor):
        ctx.save_for_backward(x, w, b)
        return (x @ w + b).sin() * factor

    @staticmethod
    def backward(ctx, grad):
        x, w, b = ctx.saved_tensors
        grad = grad * (x @ w + b).cos()
        return grad @ w.t(), x.flatten(0, -2).t() @ grad.flatten(0, -2), grad.flatten(0, -2).sum(0), None


class ProjectedApart(torch.autograd.Function):
    """The weight's sum over features alone, of two results; nothing for the bias, which is not used."""

    @staticmethod
    def forward(x, w, b):
        return x.detach() * 1, x * w.sum(1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])
        ctx.mark_non_differentiable(output[0])

    @staticmethod
    def backward(ctx, _, grad):
        x, w = ctx.saved_tensors
        sums = (x * grad).flatten(0, -2).sum(0)
        return grad * w.sum(1), sums.unsqueeze(1).expand(w.shape), None


class Into(torch.autograd.Function):
    """``out += x @ w``"""

    @staticmethod
    def forward(ctx, out, x, w):
        ctx.save_for_backward(x, w)
        out += x @ w
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad, grad @ w.t(), x.flatten(0, -2).t() @ grad.flatten(0, -2)


class Network(nn.Module):
    def __init__(self, program):
        super().__init__()
        generator = seeded(0)
        self.program = program
        self.w = nn.Parameter(torch.randn(4, 4, dtype=torch.float64, generator=generator))
        self.b = nn.Parameter(torch.randn(4, dtype=torch.float64, generator=generator))

    def forward(self, x):
        return self.program(x, self.w, self.b)


def once(x, w, b):
    return Projected.apply(x, w, b, 3.0)


def of_other_values(x, w, b):
    """Of plain tensors that are not leaves, twice, and next to an operator."""
    return Projected.apply(Projected.apply(x, w * 2, b.exp(), 1.0), w, b, 2.0) + x @ w


def apart(x, w, b):
    return ProjectedApart.apply(x.exp(), w, b)[1]


def penalized(x, w, b):
    x = x * 1
    slope, of_w = torch.autograd.grad(Projected.apply(x, w, b, 1.0).sin().sum(), (x, w), create_graph=True)
    assert type(of_w) is torch.Tensor
    return slope * x, of_w.sin() @ w


def into_a_view(x, w, b):
    out = torch.stack([x, x * 2])
    Into.apply(out[1], x, w)
    return out.sin()


def into_plain(x, w, b):
    out = torch.zeros(2, 7, 4, dtype=x.dtype)
    Into.apply(out, x, w)
    return Into.apply(out, x * x, w).sin()


@pytest.mark.parametrize(
    ("ranks", "dim", "sizes"), [(2, 1, (5, 2)), (2, 1, (0, 7)), (2, 2, (1, 3)), (3, 1, (0, 3, 4)), (3, 0, (1, 0, 1))]
)
@on_ranks("ranks")
def test_gradients_of_plain_weights(ranks, dim, sizes):
    torch.manual_seed(0)
    x = torch.randn(2, 7, 4, dtype=torch.float64)
    for program in (once, of_other_values, apart, penalized, into_a_view, into_plain):
        options = {"mesh_shape": ranks, "placements": [Shard(dim)], "shard_sizes": {0: sizes}}
        assert_matches_unsharded(Network(program), x, **options)


@pytest.mark.parametrize(("ranks", "sizes"), [(2, (5, 2)), (3, (0, 3, 4))])
@on_ranks("ranks")
def test_optimizers_step(ranks, sizes):
    torch.manual_seed(0)
    value = torch.randn(2, 7, 4, dtype=torch.float64)
    network = Network(of_other_values)
    twin = copy.deepcopy(network)
    x = shard(value, shared_mesh(ranks), [Shard(1)], {0: sizes})
    for model, given in ((network, x), (twin, value)):
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            model(given).square().mean().backward()
            optimizer.step()
    for p, q in zip(network.parameters(), twin.parameters(), strict=True):
        assert type(p.grad) is torch.Tensor
        torch.testing.assert_close(p, q, rtol=1e-12, atol=0)


@on_ranks(2)
def test_gradients_of_dtensors():
    """Those of DTensors are DTensors."""
    torch.manual_seed(0)
    value, mesh = torch.randn(2, 7, 4, dtype=torch.float64), shared_mesh(2)
    network = Network(once)
    once(value, network.w, network.b).sum().backward()
    x = shard(value, mesh, [Shard(1)], {0: (5, 2)}, requires_grad=True)
    for placement in (Replicate(), Shard(0)):
        w, b = (nn.Parameter(distribute_tensor(t.detach(), mesh, [placement])) for t in (network.w, network.b))
        once(x, w, b).sum().backward()
        for p, q in ((w, network.w), (b, network.b)):
            assert type(p.grad) is DTensor
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-12, atol=1e-12)
    assert type(x.grad) is ShardTensor
