"""``softmax``, ``log_softmax`` and ``logsumexp`` against one device, also along sharded dims."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from on_ranks import on_ranks
from row_cases import CUTS, check_all, values
from torch.distributed.tensor import Partial, Shard

from shardtensor.testing import assert_matches_unsharded, shard, shared_mesh


def softmax_cases():
    x = values()
    masked = x.clone()
    masked[:, 2:] = float("-inf")  # whole shards hold nothing else
    large = 1000 * x
    cases = []
    for dim in (0, 1, -1):
        for label, t in (("", x), (", large", large), (", masked", masked)):
            cases += [
                (f"softmax {dim}{label}", lambda x, d=dim: x.softmax(d), t),
                (f"log_softmax {dim}{label}", lambda x, d=dim: F.log_softmax(x, d), t),
                (f"logsumexp {dim}{label}", lambda x, d=dim: x.logsumexp(d), t),
            ]
        cases += [
            (f"softmin {dim}", lambda x, d=dim: F.softmin(x, dim=d), x),
            (f"logsumexp {dim}, keepdim", lambda x, d=dim: torch.logsumexp(x, d, keepdim=True), x),
            (f"module {dim}", torch.nn.Softmax(dim), x),
        ]
    cases += [
        ("logsumexp of two dims", lambda x: x.logsumexp((0, 1)), x),
        ("logsumexp of all dims", lambda x: x.logsumexp((0, 1, 2)), x),
        ("logsumexp of complex", lambda x: x.logsumexp(1), torch.complex(x, x.flip(0))),
        ("square of softmax", lambda x: x.softmax(1).square().sum(), x),
    ]
    return cases


@pytest.mark.parametrize(("mesh_shape", "dims", "sizes"), CUTS)
@on_ranks("mesh_shape")
def test_softmax(mesh_shape, dims, sizes):
    check_all(softmax_cases(), mesh_shape, dims, sizes)
    # Rows without a finite element: NaN where torch has it.
    nothing = values()
    nothing[1] = float("-inf")
    nothing[2, :, 1] = float("inf")
    nothing[3, 4, 2] = float("nan")
    cases = [(f.__name__, lambda x, f=f: f(x, 1), nothing) for f in (torch.softmax, torch.log_softmax, torch.logsumexp)]
    check_all(cases, mesh_shape, dims, sizes)


@on_ranks(2)
def test_softmax_in_half_precision_twice_and_without_grad():
    mesh = shared_mesh(2)
    x = values()
    # Half precision: the sum of 4000 equal weights needs more digits than the numbers have.
    for dtype in (torch.float16, torch.bfloat16):
        half = torch.zeros(4000, 2, dtype=dtype)
        for function in (torch.softmax, torch.log_softmax):
            sharded = function(shard(half, mesh, [Shard(0)], {0: (3000, 1000)}), 0)
            assert sharded.dtype == dtype
            torch.testing.assert_close(sharded.full_tensor(), function(half, 0), rtol=1e-3, atol=0)
        total = shard(half, mesh, [Shard(0)], {0: (3000, 1000)}).logsumexp(0)
        torch.testing.assert_close(total.full_tensor(), half.logsumexp(0))
    wide = shard(half, mesh, [Shard(0)], {0: (0, 4000)}).softmax(0, dtype=torch.float64)
    assert wide.dtype == torch.float64 and wide.shard_sizes == {0: (0, 4000)}
    # A Partial is reduced first.
    assert_matches_unsharded(lambda x: x.softmax(1), x, mesh_shape=2, placements=[Partial()])
    # A plain gradient counts as replicated.
    for function in (torch.softmax, torch.log_softmax):
        leaf, whole = shard(x, mesh, [Shard(1)], {0: (2, 7)}, requires_grad=True), x.clone().requires_grad_()
        function(leaf, 1).backward(x.cos())
        function(whole, 1).backward(x.cos())
        torch.testing.assert_close(leaf.grad.full_tensor(), whole.grad)
        # Once more: torch's formulas for the second derivative.
        grads = []
        for t in (leaf, whole):
            (grad,) = torch.autograd.grad(function(t, 1).square().sum(), t, create_graph=True)
            (second,) = torch.autograd.grad(grad.square().sum(), t)
            grads.append(second)
        torch.testing.assert_close(grads[0].full_tensor(), grads[1])
    with torch.inference_mode():
        sharded = shard(x, mesh, [Shard(1)], {0: (2, 7)})
        torch.testing.assert_close(F.softmax(sharded, 1).full_tensor(), x.softmax(1))
