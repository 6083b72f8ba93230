"""Tensors that a program's own ``autograd.Function`` makes or writes to have the history that it gives them."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from on_ranks import on_ranks
from torch.distributed.tensor import Shard

from shardtensor.testing import assert_matches_unsharded, shard, shared_mesh


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
        out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
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


class Both(torch.autograd.Function):
    """``a += x``, then ``b = (b + a) * 2``"""

    @staticmethod
    def forward(ctx, a, b, x):
        a += x
        b += a
        b *= 2
        ctx.mark_dirty(a, b)
        return a, b

    @staticmethod
    def backward(ctx, grad_a, grad_b):
        grad = grad_a + 2 * grad_b
        return grad, 2 * grad_b, grad


class Scaled(torch.autograd.Function):
    """``out *= x``"""

    @staticmethod
    def forward(ctx, out, x):
        ctx.save_for_backward(out.clone(), x)
        out *= x
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        out, x = ctx.saved_tensors
        return grad * x, grad * out


class Unwatched(torch.autograd.Function):
    """``out[index] = x``, which autograd is not told of."""

    @staticmethod
    def forward(ctx, out, x, index):
        ctx.index = index
        out.data[index] = x
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad, grad[ctx.index], None


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


def plain_made_dirty(x, make):
    """Tensors to which the function is the first to write a sharded value, and views of them."""
    a, b = torch.zeros(7, 4, dtype=x.dtype), torch.ones(7, 4, dtype=x.dtype)
    rows, columns = a[1:], b.t()
    c, d = Both.apply(a, b, x * x)
    assert c is a and d is b
    b.mul_(x)
    c, d = Both.apply(a, b, x.sin())
    return a.sin(), rows * 2, columns.cos(), d


def plain_view_made_dirty(x, make):
    out = torch.ones(8, 4, dtype=x.dtype)
    y = Scaled.apply(out[1:], x * x)
    return out.sin(), y * x


def unwatched(x, make):
    """As the methods of torchdiffeq with a step of their own choice keep what they need."""
    out = torch.empty(7, 4, 3, dtype=x.dtype)
    out = Unwatched.apply(out, x, (..., 0))
    for i in (1, 2):
        y = x + (out[..., :i] * 0.5).sum(-1)
        out = Unwatched.apply(out, y.sin(), (..., i))
    return out.sum(-1) * x, out[..., 1]


def unwatched_from_the_last(x, make):
    """The second step starts from a view of what the first one kept."""
    y, f = x, x.cos()
    for _ in range(2):
        out = Unwatched.apply(torch.empty(7, 4, 2, dtype=x.dtype), f, (..., 0))
        y = y + (out[..., :1] * 0.5).sum(-1)
        out = Unwatched.apply(out, y.sin(), (..., 1))
        y, f = y + (out * 0.25).sum(-1), out[..., -1]
    return y, f


def written_before(x, make):
    """A first write that autograd does not see, to a tensor with a view and to one with a history."""
    out = torch.zeros(7, 4, dtype=x.dtype)
    v = out[1:]
    with torch.no_grad():
        out[...] = x
    out.mul_(x)
    other = x[:, 0].detach().full_tensor() if hasattr(x, "full_tensor") else x[:, 0].detach()
    history = other.clone().requires_grad_()
    z = history * 3
    with torch.no_grad():
        z[:2] = x[:2, 1]
    (gradient,) = torch.autograd.grad(z.sin().sum(), history)
    return out.sin(), v * 2, gradient * x[:, 0]


@pytest.mark.parametrize(("ranks", "sizes"), [(2, (5, 2)), (3, (0, 3, 4))])
@on_ranks("ranks")
def test_results_have_the_history_of_the_function(ranks, sizes):
    torch.manual_seed(0)
    x = torch.randn(7, 4, dtype=torch.float64)
    makers = itertools.cycle((squares, copied, by_columns))
    programs = [(read, part_of_it), *zip((read, again, apart, twice, hooked, written_later, added), makers)]
    programs += [(f, None) for f in (plain_made_dirty, plain_view_made_dirty, written_before)]
    programs += [(f, None) for f in (unwatched, unwatched_from_the_last)]
    for program, make in programs:
        assert_matches_unsharded(program, x, make, mesh_shape=ranks, placements=[Shard(0)], shard_sizes={0: sizes})


@on_ranks(2)
def test_inference_mode():
    x = shard(torch.ones(7, 4), shared_mesh(2), [Shard(0)], {0: (5, 2)})
    with torch.inference_mode():
        out = squares(x)
        out.mul_(2)
        out[:, 0] += x[:, 1]
        assert torch.equal(out.full_tensor(), torch.tensor([[3.0, 2.0, 2.0, 2.0]]).expand(7, 4))


@on_ranks(2)
def test_torchs_errors_are_the_same():
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
