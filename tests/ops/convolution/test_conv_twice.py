"""Second and third derivatives of convolution: gradient penalties, as one device has them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from on_ranks import on_ranks
from torch.distributed.tensor import Replicate, Shard

from shardtensor import ShardTensor, UnsupportedSharding
from shardtensor.testing import assert_matches_unsharded, count_communication, run_distributed, shard, shared_mesh

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}

# input shape, weight shape, options, mesh shape, dims per mesh dim, sizes
CASES = [
    ((1, 2, 9), (3, 2, 3), {"padding": 1}, 2, (2,), {0: (5, 4)}),
    ((2, 2, 7), (2, 2, 4), {"stride": 2}, 2, (2,), {0: (1, 6)}),
    ((1, 2, 8, 3), (4, 1, 3, 1), {"padding": (2, 0), "dilation": (2, 1), "groups": 2}, 2, (2,), {0: (7, 1)}),
    ((2, 2, 6, 5), (2, 2, 3, 3), {"padding": "same"}, 2, (2,), {0: (6, 0)}),
    ((2, 2, 6, 5), (2, 2, 1, 1), {}, 2, (0,), {0: (0, 2)}),
    ((1, 2, 6, 5), (2, 2, 3, 3), {"padding": 1}, 3, (3,), {0: (2, 1, 2)}),
    ((1, 2, 7, 6), (2, 2, 3, 3), {"padding": 1}, (2, 2), (2, 3), {0: (5, 2), 1: (3, 3)}),
    ((1, 1, 7, 6), (2, 1, 5, 3), {"padding": (2, 1), "stride": (2, 1)}, (2, 2), (3, 2), {0: (4, 2), 1: (4, 3)}),
    ((1, 2, 4, 3, 5), (2, 2, 3, 3, 3), {"padding": 1}, 2, (4,), {0: (2, 3)}),
    ((1, 2, 5, 5), (2, 2, 3, 3), {"padding": 1}, (2, 2), (2, None), {0: (3, 2)}),
]


def penalty(function):
    """The sum of squares of the gradients of ``function``'s cubes."""

    def squares(*tensors):
        grads = torch.autograd.grad(function(*tensors).pow(3).sum(), tensors, create_graph=True)
        return sum((grad * grad).sum() for grad in grads)

    return squares


def check(cases, times=1):
    for shape, weight, options, mesh_shape, dims, sizes in cases:
        torch.manual_seed(0)
        tensors = [torch.randn(s, dtype=torch.float64) for s in (shape, weight, weight[:1])]

        def function(x, w, b, options=options):
            return CONV[x.ndim - 2](x, w, b, **options)

        for _ in range(times):
            function = penalty(function)
        placements = [Replicate() if d is None else Shard(d) for d in dims]
        assert_matches_unsharded(
            function,
            *tensors,
            mesh_shape=mesh_shape,
            placements=[placements, None, None],
            shard_sizes=[sizes, None, None],
        )


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_of_input_weight_and_bias(ranks):
    run_distributed(check, ranks, [case for case in CASES if torch.Size(_ranks(case)).numel() == ranks])


def _ranks(case):
    mesh_shape = case[3]
    return mesh_shape if isinstance(mesh_shape, tuple) else (mesh_shape,)


@pytest.mark.on_device
def test_of_third_order():
    run_distributed(check, 2, CASES[:2], 2)


@on_ranks(2)
def test_of_a_constant_gradient_where_a_rank_has_no_outputs():
    """The gradient of a sum depends on the weight alone; the last rank has inputs and no outputs."""
    whole, kernel = torch.randn(2, 4, 6, 3, dtype=torch.float64), torch.randn(3, 4, 3, 3, dtype=torch.float64)
    for order in (2, 3):
        found = []
        for x in (whole.clone(), shard(whole, shared_mesh(2), [Shard(2)], {0: (5, 1)})):
            x, w = x.requires_grad_(), kernel.clone().requires_grad_()
            loss = F.conv2d(x.tanh(), w, stride=2, padding=1).sum()
            for _ in range(order - 1):
                (grad,) = torch.autograd.grad(loss, x, create_graph=True)
                loss = grad.square().sum()
            loss.backward()
            found.append((x.grad, w.grad))
        (expected, of_weight), (ours, our_weight) = found
        torch.testing.assert_close(ours.full_tensor(), expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(our_weight, of_weight, rtol=1e-10, atol=1e-10)


@pytest.mark.on_device
@on_ranks(2)
def test_of_a_plain_loss():
    """The gradient penalty of a weight; the loss and the weight are plain, so that torch calls the engine by itself."""
    torch.manual_seed(0)
    x, w = torch.rand(1, 2, 8, 6, dtype=torch.float64), torch.rand(2, 2, 3, 3, dtype=torch.float64)

    def penalty(x, w):
        y = F.conv2d(x, w, padding=1).pow(3)
        loss = (y.full_tensor() if isinstance(y, ShardTensor) else y).sum()
        (grad,) = torch.autograd.grad(loss, w, create_graph=True)
        return torch.autograd.grad(grad.pow(2).sum(), w)[0]

    sharded = shard(x, shared_mesh(2), [Shard(2)], {0: (5, 3)})
    w.requires_grad_()
    if torch.get_default_device().type != "cpu":
        with pytest.raises(UnsupportedSharding, match=r"conv2d: .*the device's thread.*Remedy: .*set_multithreading"):
            penalty(sharded, w)
    with torch.autograd.set_multithreading_enabled(False):
        torch.testing.assert_close(penalty(sharded, w), penalty(x, w), rtol=1e-10, atol=1e-12)


@on_ranks(2)
def test_messages():
    """Once more forward for a gradient that is to be differentiated; and then back, but for that one: the gradient does
    not depend on what it has fetched.
    """
    x = shard(torch.rand(1, 2, 8, 6), shared_mesh(2), [Shard(2)], {0: (5, 3)}, requires_grad=True)
    w = torch.rand(2, 2, 3, 3)
    counts = []
    for order in (1, 2):
        with count_communication() as counted:
            (grad,) = torch.autograd.grad(F.conv2d(x, w, padding=1).pow(3).sum(), x, create_graph=order == 2)
        counts.append(counted.messages)
    with count_communication() as counted:
        torch.autograd.grad(grad.square().sum(), x)
    assert (counts, counted.messages) == ([2, 3], 2)


@on_ranks(2)
def test_of_transposed_convolution_without_outputs():
    """Rank 0 has inputs, but no outputs."""
    torch.manual_seed(0)
    shapes = (1, 2, 7), (2, 2, 5), (2,)
    assert_matches_unsharded(
        penalty(lambda x, w, b: F.conv_transpose1d(x, w, b, padding=4)),
        *(torch.randn(shape, dtype=torch.float64) for shape in shapes),
        mesh_shape=2,
        placements=[[Shard(2)], None, None],
        shard_sizes=[{0: (1, 6)}, None, None],
    )


@pytest.mark.parametrize("frozen", [True, False])
@on_ranks(2)
def test_of_a_gradient_that_is_constant(frozen):
    """The gradient of a sum depends on the weight alone."""
    torch.manual_seed(0)
    x, w = torch.randn(1, 2, 8, 6, dtype=torch.float64), torch.randn(2, 2, 3, 3, dtype=torch.float64)
    w.requires_grad_(not frozen)

    def square(x):
        (grad,) = torch.autograd.grad(F.conv2d(x, w).sum(), x, create_graph=True)
        return grad.square().sum() + x.sum()

    assert_matches_unsharded(square, x, mesh_shape=2, placements=[Shard(2)], shard_sizes={0: (5, 3)})
