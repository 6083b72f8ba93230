"""Cumulative operators against one device; what operators along a dim exchange, and their errors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from alike import raises_alike
from on_ranks import on_ranks
from row_cases import CUTS, check_all, values
from torch.distributed.tensor import Partial, Shard

from shardtensor import UnsupportedSharding
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    shard,
    shared_mesh,
)


def cumulative_cases():
    x = values()
    one_zero, zeros = x.clone(), x.clone()
    one_zero[:, 4, 1:3] = 0
    zeros[0, 1, 0] = zeros[0, 7, 0] = 0
    zeros[1] = 0
    zeros[2, 5] = 0
    cases = []
    for dim in (0, 1, -1):
        cases += [
            (f"cumsum {dim}", lambda x, d=dim: x.cumsum(d), x),
            (f"cumprod {dim}", lambda x, d=dim: torch.cumprod(x, d), x),
            (f"cumprod {dim}, one zero in a row", lambda x, d=dim: x.cumprod(d), one_zero),
            (f"cumprod {dim}, zeros", lambda x, d=dim: x.cumprod(dim=d), zeros),
            (f"logcumsumexp {dim}", lambda x, d=dim: x.logcumsumexp(d), x),
        ]
    started = x.clone()
    started[:, :6] = float("-inf")
    cases += [
        ("logcumsumexp after -inf", lambda x: torch.logcumsumexp(x, 1), started),
        ("cumsum of integers", lambda x: x.cumsum(1), (x * 9).int()),
        ("cumsum of booleans", lambda x: x.cumsum(1), x > 0),
        ("cumsum, dtype", lambda x: x.cumsum(1, dtype=torch.float64), x.float()),
        ("cumprod, dtype", lambda x: x.cumprod(1, dtype=torch.float64), x.float()),
        ("cumprod of complex", lambda x: x.cumprod(1), torch.complex(x, x.flip(0))),
        ("cumprod of complex with zeros", lambda x: x.cumprod(1), torch.complex(zeros, zeros)),
    ]
    return cases


@pytest.mark.parametrize(("mesh_shape", "dims", "sizes"), CUTS)
@on_ranks("mesh_shape")
def test_cumulative(mesh_shape, dims, sizes):
    check_all(cumulative_cases(), mesh_shape, dims, sizes)
    with torch.no_grad():
        check_all(cumulative_cases(), mesh_shape, dims, sizes, check_grads=False)


@on_ranks(2)
def test_cumulative_in_half_precision_and_twice():
    mesh = shared_mesh(2)
    half = torch.full((4000, 1), 0.5, dtype=torch.float16)
    total = shard(half, mesh, [Shard(0)], {0: (3000, 1000)}).cumsum(0)
    torch.testing.assert_close(total.full_tensor(), half.float().cumsum(0).half())
    assert_matches_unsharded(lambda x: x.cumsum(0), values(), mesh_shape=2, placements=[Partial()])
    leaf, whole = shard(values(), mesh, [Shard(1)], {0: (2, 7)}, requires_grad=True), values().requires_grad_()
    second = []
    for t in (leaf, whole):
        (grad,) = torch.autograd.grad(t.cumsum(1).square().sum(), t, create_graph=True)
        second += torch.autograd.grad(grad.square().sum(), t)
    torch.testing.assert_close(second[0].full_tensor(), second[1])
    # A gradient that is cut otherwise.
    other = shard(values(), mesh, [Shard(0)], {0: (1, 3)})
    for function in (torch.cumsum, torch.cumprod, torch.logcumsumexp):
        leaf.grad = whole.grad = None
        function(leaf, 1).backward(other)
        function(whole, 1).backward(values())
        torch.testing.assert_close(leaf.grad.full_tensor(), whole.grad)


# -- what operators along a dim exchange, and errors ----------------------------------------------------------------


@on_ranks(2)
def test_what_travels():
    """``{name: forward and backward as (messages, their bytes, collectives, their bytes)}``"""
    mesh = shared_mesh(2)
    counts = {}
    for name, function in {
        "softmax": lambda x: x.softmax(1),
        "log_softmax": lambda x: x.log_softmax(1),
        "logsumexp": lambda x: x.logsumexp(1),
        "cumsum": lambda x: x.cumsum(1),
        "logcumsumexp": lambda x: x.logcumsumexp(1),
        "cumprod": lambda x: x.cumprod(1),
        "max": lambda x: x.max(1).values,
        "argmax": lambda x: x.argmax(1),
        "cummax": lambda x: x.cummax(1).values,
        "aminmax": lambda x: x.detach().aminmax(dim=1).max,
        "sort": lambda x: x.sort(1).values,
        "topk": lambda x: x.topk(2, 1).values,
        "softmax of whole rows": lambda x: x.softmax(0),
        "max of whole rows": lambda x: x.max(0).values,
        "sort of whole rows": lambda x: x.sort(0).values,
    }.items():
        x = shard(values().float(), mesh, [Shard(1)], {0: (6, 3)}, requires_grad=True)
        with count_communication() as forward:
            y = function(x)
        if y.requires_grad:
            grad = shard(torch.ones(y.shape), mesh, y.placements, y.shard_sizes)
        with count_communication() as backward:
            if y.requires_grad:
                torch.autograd.grad(y, x, grad)
        counts[name] = [
            (c.messages, c.bytes_sent, dict(c.collectives), c.collective_bytes) for c in (forward, backward)
        ]
    rows = 4 * 5  # of 9 elements, 6 on rank 0 and 3 on rank 1
    none = (0, 0, {}, 0)

    def reduced(n, size=4):
        return (0, 0, {"all_reduce": n}, n * size * rows)

    def gathered(n, size=4):
        return (0, 0, {"all_gather": n}, n * size * rows)

    rank = dist.get_rank()
    expected = {
        "softmax": [reduced(2), reduced(1)],
        "log_softmax": [reduced(2), reduced(1)],
        "logsumexp": [reduced(2), none],
        "cumsum": [gathered(1), gathered(1)],
        "logcumsumexp": [gathered(1), gathered(2)],
        # Backward: how many zeros come before (int64), and three scans.
        "cumprod": [gathered(1), (0, 0, {"all_gather": 4}, (8 + 3 * 4) * rows)],
        "max": [(0, 0, {"all_reduce": 2}, (4 + 8) * rows), none],
        "argmax": [(0, 0, {"all_reduce": 2}, (4 + 8) * rows), none],
        "cummax": [(0, 0, {"all_gather": 2}, (4 + 8) * rows)] * 2,
        "aminmax": [none, none],
        "softmax of whole rows": [none, none],
        "max of whole rows": [none, none],
        "sort of whole rows": [none, none],
    }
    for name, count in expected.items():
        assert counts[name] == count, name
    # Half of what the rank has goes to the other, and back: of 4 and of 5 rows, those that shard evenly are taken.
    n = (6, 3)[rank]
    for name in ("sort", "topk"):
        (messages, sent, collectives, other), (back, _, back_collectives, _) = counts[name]
        assert other == 0 and collectives["all_to_all"] == (3 if name == "sort" else 1) == messages
        assert back == back_collectives["all_to_all"] == (2 if name == "sort" else 1)
    assert counts["topk"][0][1] == 4 * n * rows // 2


def operand():
    return shard(torch.rand(8, 1), shared_mesh(2), [Shard(0)], {0: (8, 0)})


WHOLE = r"mode.*: tensor dim 0 must be unsharded, but mesh dim 0 shards it, and no free dim.*\[8, 0\].*Remedy"
NO_KERNEL = (RuntimeError, TypeError, NotImplementedError)
ERRORS = {
    "mode": (lambda x: x.mode(0), UnsupportedSharding, WHOLE),
    "dim": (lambda x: x.requires_grad_().softmax(2), IndexError, "Dimension out of range"),
    "k": (lambda x: x.expand(8, 8).topk(9, 0), RuntimeError, "k not in range|k out of range"),
    "max of complex": (lambda x: (x * 1j).max(0), NO_KERNEL, "omplex"),
    "argmax of complex": (lambda x: (x * 1j).argmax(0), NO_KERNEL, "omplex"),
    "cummax of complex": (lambda x: (x * 1j).cummax(0), NO_KERNEL, "omplex"),
    "softmax of integers": (lambda x: x.long().softmax(0), NO_KERNEL, "[Ii]nt|Long"),
    "logcumsumexp of integers": (lambda x: x.long().logcumsumexp(0), RuntimeError, "[Ii]nt|Long"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_the_same_on_every_rank(name):
    raises_alike(operand, name)


@on_ranks(2)
def test_tangents_of_logcumsumexp():
    """Along whole rows; torch's gradient in logarithms has no derivative where a gradient is zero."""
    x, tangent = torch.randn(2, 3, 5, dtype=torch.float64)
    x[0, 2] = -40.0
    expected = torch.func.jvp(lambda t: t.logcumsumexp(1), (x,), (tangent,))[1]
    operands = (shard(t, shared_mesh(2), [Shard(0)], {0: (1, 2)}) for t in (x, tangent))
    found = torch.func.jvp(lambda t: t.logcumsumexp(1), *((t,) for t in operands))[1]
    torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-10, atol=1e-12)


@on_ranks(2)
def test_second_derivatives_of_products_of_a_rank_without_elements():
    """That rank has them, too, as torch would not: a sum over gradients would wait for it."""
    x = torch.randn(2, 4, 7, dtype=torch.float64)
    mine = shard(x, shared_mesh(2), [Shard(0)], {0: (2, 0)}, requires_grad=True)
    one = x.clone().requires_grad_()
    for t in (mine, one):
        (first,) = torch.autograd.grad(t.cumprod(2).sin().sum(), t, create_graph=True)
        first.square().sum().backward()
    torch.testing.assert_close(mine.grad.full_tensor(), one.grad, rtol=1e-10, atol=1e-12)
