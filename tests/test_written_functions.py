"""Tensors that a program's own ``autograd.Function`` makes or writes to have the history that it gives them."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from shardtensor.testing import assert_matches_unsharded, run_distributed, shard, shared_mesh


def squares(x):
    out = torch.zeros(x.shape, dtype=x.dtype)
    out[...] = x * x
    return out


def copied(x):
    return torch.zeros(x.shape, dtype=x.dtype).copy_(x * x)


def by_columns(x):
    out = torch.empty(x.shape, dtype=x.dtype)
    for i in range(x.shape[1]):
        out[:, i] = x[:, i] ** 2
    return out


def part_of_it(x):
    out = torch.zeros(2, *x.shape, dtype=x.dtype)
    out[1] = x * x
    return out[1]


class Made(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, make):
        out = make(x)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, _ = ctx.saved_tensors
        out = torch.zeros(x.shape, dtype=x.dtype)
        out[:, :2] = (2 * x * grad)[:, :2]
        out[:, 2:] = (2 * x * grad)[:, 2:]
        return out, None


class MadeApart(torch.autograd.Function):
    """With its context set up apart, and a second result that has no gradient."""

    @staticmethod
    def forward(x, make):
        signs = torch.zeros(x.shape, dtype=torch.long)
        signs += x.sign().long()
        return make(x), signs

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, grad, _):
        return 2 * ctx.saved_tensors[0] * grad, None


class Added(torch.autograd.Function):
    """``out[:, :4] += x * x``"""

    @staticmethod
    def forward(ctx, x, out):
        ctx.save_for_backward(x)
        out[:, :4] += x * x
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad[:, :4], grad


def read(x, make):
    y = Made.apply(x * 2, make)
    return y, y.sin() * x, torch.cat([y, x]), y[1:4], F.linear(y, torch.ones(3, 4, dtype=x.dtype)), y.detach() + x


def again(x, make):
    y = Made.apply(Made.apply(x, make), make)
    out = torch.zeros(7, 8, dtype=x.dtype)
    out[:, ::2] = y
    return out


def apart(x, make):
    y, signs = MadeApart.apply(x.exp() - 1, make)
    assert y.requires_grad and not signs.requires_grad
    return y * signs


def twice(x, make):
    (gradient,) = torch.autograd.grad(MadeApart.apply(x * 2, make)[0].sin().sum(), x, create_graph=True)
    return gradient


def written_later(x, make):
    y = MadeApart.apply(x * 2, make)[0]
    v = y[:, 1:]
    v.mul_(x[:, 1:])
    y[0] = y[0] * 3
    with torch.no_grad():
        y.add_(1)
    return y.exp(), v * 1


def hooked(x, make):
    y = Made.apply(x, make)
    y.register_hook(lambda grad: grad * 3)
    y.retain_grad()
    z = Made.apply(y, make)
    z.sum().backward(retain_graph=True)
    return z, y.grad * 1


def added(x, make):
    out = torch.zeros(7, 6, dtype=x.dtype)
    out[:, 1:5] = make(x)
    v = out[1:]
    y = Added.apply(x, out)
    assert y is out
    y.mul_(2)
    return out.sin(), v * 2, y


def compare(ranks, sizes):
    torch.manual_seed(0)
    x = torch.randn(7, 4, dtype=torch.float64)
    makers = itertools.cycle((squares, copied, by_columns))
    programs = [(read, part_of_it), *zip((read, again, apart, twice, hooked, written_later, added), makers)]
    for program, make in programs:
        assert_matches_unsharded(program, x, make, mesh_shape=ranks, placements=[Shard(0)], shard_sizes={0: sizes})


@pytest.mark.parametrize(("ranks", "sizes"), [(2, (5, 2)), (3, (0, 3, 4))])
def test_results_have_the_history_of_the_function(ranks, sizes):
    run_distributed(compare, ranks, ranks, sizes)


def torchs_errors():
    """What torch says of these on one device, it says on shards."""
    torch.manual_seed(0)
    v = torch.randn(7, 4, dtype=torch.float64)
    for x in (v.requires_grad_(), shard(v, shared_mesh(2), [Shard(0)], {0: (5, 2)}, requires_grad=True)):
        y = Made.apply(x, part_of_it)
        with pytest.raises(RuntimeError, match=r"is a view and is being modified inplace.*custom Function"):
            y.mul_(2)
        for make in (squares, copied):
            y = Made.apply(x, make)
            y.mul_(2)
            with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
                y.sum().backward()
        out = torch.zeros(7, 4, dtype=torch.float64)
        out[:, :2] = x[:, :2]
        y = Made.apply(out, torch.exp)
        out.add_(1)
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            y.sum().backward()


def inference():
    x = shard(torch.ones(7, 4), shared_mesh(2), [Shard(0)], {0: (5, 2)})
    with torch.inference_mode():
        out = squares(x)
        out.mul_(2)
        out[:, 0] += x[:, 1]
        assert torch.equal(out.full_tensor(), torch.tensor([[3.0, 2.0, 2.0, 2.0]]).expand(7, 4))


def test_inference_mode():
    run_distributed(inference, 2)


def test_torchs_errors_are_the_same():
    run_distributed(torchs_errors, 2)
