"""What sharded systems have been found to get wrong, or to crash or hang on: each mistake once, against one device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from on_ranks import on_ranks
from seeded import seeded
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import shardtensor
from shardtensor import UnsupportedSharding, scatter_tensor
from shardtensor.testing import assert_matches_unsharded, count_communication, run_expecting_errors, shard, shared_mesh

pytestmark = pytest.mark.every_run


def numbers(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=seeded(seed))


def module(make):
    torch.manual_seed(0)
    return make().double()


# Name -> (function or module, shapes of its arguments, the dim that is cut, the cuts on two ranks).
UNEVEN, EVEN = [(5, 3), (7, 1), (0, 8)], [(4, 4)]
CASES = {
    "convolution, even shards": (lambda: nn.Conv2d(2, 3, 3, padding=1), [(1, 2, 8, 5)], 2, EVEN),
    "convolution, uneven shards": (lambda: nn.Conv2d(2, 3, 3, padding=1), [(1, 2, 8, 5)], 2, UNEVEN),
    "convolution, stride 2, odd shards": (lambda: nn.Conv2d(2, 3, 3, 2), [(1, 2, 8, 5)], 2, UNEVEN),
    "convolution, stride 2, padded": (lambda: nn.Conv2d(2, 3, 3, 2, 1), [(1, 2, 8, 5)], 2, UNEVEN),
    "convolution without padding": (lambda: nn.Conv2d(2, 3, 3), [(1, 2, 8, 5)], 2, UNEVEN + EVEN),
    "convolution, kernel 5 without padding": (lambda: nn.Conv2d(2, 3, 5), [(1, 2, 8, 5)], 2, UNEVEN + EVEN),
    "convolution, unbatched": (lambda: nn.Conv2d(2, 3, 3, padding=1), [(2, 8, 5)], 1, UNEVEN + EVEN),
    "convolution, even kernel": (lambda: nn.Conv2d(2, 3, 4, padding=1), [(1, 2, 8, 5)], 2, UNEVEN + EVEN),
    "convolution, odd padding": (lambda: nn.Conv2d(2, 3, 3, padding=2), [(1, 2, 8, 5)], 2, UNEVEN),
    "convolution, batch sharded unevenly": (lambda: nn.Conv2d(2, 3, 3, padding=1), [(8, 2, 4, 5)], 0, UNEVEN),
    "convolution, depthwise": (lambda: nn.Conv2d(2, 2, 3, padding=1, groups=2), [(1, 2, 8, 5)], 2, UNEVEN),
    "transposed convolution, kernel not the stride": (
        lambda: nn.ConvTranspose2d(2, 3, 3, 2, 1),
        [(1, 2, 8, 5)],
        2,
        UNEVEN,
    ),
    "halo wider than the shards": (lambda: nn.Conv1d(2, 3, 7, padding=9, dilation=3), [(1, 2, 8)], 2, UNEVEN),
    "max pooling 3, 2, 1": (lambda: nn.MaxPool2d(3, 2, 1), [(1, 2, 8, 5)], 2, UNEVEN + EVEN),
    "average pooling 3, 2, 1": (lambda: nn.AvgPool2d(3, 2, 1), [(1, 2, 8, 5)], 2, UNEVEN + EVEN),
    "adaptive pooling": (lambda: nn.AdaptiveAvgPool2d(3), [(1, 2, 8, 5)], 2, UNEVEN),
    "mse_loss": (F.mse_loss, [(8, 3), (8, 3)], 0, UNEVEN + EVEN),
    "smooth_l1_loss": (F.smooth_l1_loss, [(8, 3), (8, 3)], 0, UNEVEN + EVEN),
    "view that merges the dim before the sharded": (lambda x: x.view(16, 3).cos(), [(2, 8, 3)], 2, [(1, 2), (0, 3)]),
    "view that merges behind a batch of one": (lambda x: x.view(8, 3).cos(), [(1, 8, 3)], 1, UNEVEN),
    "flatten": (lambda x: x.flatten(2).cos(), [(1, 2, 8, 5)], 2, UNEVEN + EVEN),
    "sum over another dim": (lambda x: x.sum(0, keepdim=True) * x, [(3, 8)], 1, UNEVEN + EVEN),
    "mean over another dim": (lambda x: x.mean(0, keepdim=True) * x, [(3, 8)], 1, UNEVEN + EVEN),
    "mean over the sharded dim": (lambda x: x.mean(1, keepdim=True) * x, [(3, 8)], 1, UNEVEN + EVEN),
    "group norm of a large mean": (
        lambda x: F.group_norm(x + 1e4, 2),
        [(2, 4, 8, 3)],
        2,
        UNEVEN,
    ),
    "batch norm in training": (lambda: nn.BatchNorm2d(2), [(2, 2, 8, 3)], 2, UNEVEN + EVEN),
    "batch norm, batch sharded": (lambda: nn.BatchNorm1d(3), [(8, 3)], 0, UNEVEN),
    "softmax over the sharded dim": (lambda x: x.softmax(0), [(8, 3)], 0, UNEVEN + EVEN),
    "roll over the sharded dim": (lambda x: x.roll(3, 0).cos(), [(8, 3)], 0, UNEVEN + EVEN),
    "roll over all dims": (lambda x: x.roll((-2, 1), (0, 1)).cos(), [(8, 3)], 0, UNEVEN + EVEN),
    "flip": (lambda x: x.flip(0).cos(), [(8, 3)], 0, UNEVEN + EVEN),
    "transpose": (lambda x: x.transpose(0, 1).cos(), [(8, 3)], 0, UNEVEN),
    "permute": (lambda x: x.permute(2, 0, 1).cos(), [(3, 8, 2)], 1, UNEVEN),
    "cat": (lambda x, y: torch.cat([x, y], 0).cos(), [(8, 3), (8, 3)], 0, UNEVEN),
    "stack": (lambda x, y: torch.stack([x, y]).cos(), [(8, 3), (8, 3)], 0, UNEVEN),
    "where": (lambda x, y: torch.where(x > 0, x, y), [(8, 3), (8, 3)], 0, UNEVEN),
    "standard deviation": (lambda x: x.std(0), [(8, 3)], 0, UNEVEN),
    "matmul": (lambda x, y: x @ y.mT, [(2, 8, 3), (2, 8, 3)], 0, [(1, 1), (0, 2)]),
    "einsum": (lambda x: torch.einsum("bnc,bnd->bcd", x, x), [(2, 8, 3)], 1, UNEVEN),
    "argmax": (lambda x: x * (x.argmax(0, keepdim=True) + x.argmax()), [(8, 3)], 0, UNEVEN + EVEN),
    "attention-like softmax": (lambda x: (x @ x.mT).softmax(-1), [(2, 8, 3)], 0, [(1, 1), (2, 0)]),
    "embedding-like index": (lambda x: x[:, [2, 0, 2]], [(8, 3)], 0, UNEVEN),
    "cross entropy": (
        lambda x: F.cross_entropy(x, torch.tensor([0, 2, 1, -100, 1, 0, 2, 2])),
        [(8, 3)],
        0,
        UNEVEN,
    ),
}
# What these do to a permuted result is refused, not computed wrongly.
MAY_BE_REFUSED = {"view that merges the dim before the sharded"}


@pytest.mark.parametrize("name", list(CASES))
@on_ranks(2)
def test_never_again(name):
    function, shapes, dim, cuts = CASES[name]
    if getattr(function, "__code__", None) and not function.__code__.co_argcount:
        function = module(function)
    tensors = [numbers(*shape, seed=i) for i, shape in enumerate(shapes)]
    for sizes in cuts:
        try:
            assert_matches_unsharded(
                function,
                *tensors,
                mesh_shape=2,
                placements=[Shard(dim)],
                shard_sizes={0: sizes},
                rtol=1e-6 if "large mean" in name else None,  # one device is no better there
                atol=1e-6 if "large mean" in name else None,
            )
        except UnsupportedSharding:
            if name not in MAY_BE_REFUSED:
                raise


@on_ranks(4)
def test_shards_smaller_than_the_halo():
    for make in (lambda: nn.Conv2d(2, 3, 3, padding=1), lambda: nn.Conv2d(2, 3, 5, padding=2, stride=2)):
        assert_matches_unsharded(
            module(make), numbers(1, 2, 4, 5), mesh_shape=4, placements=[Shard(2)], shard_sizes={0: (1, 1, 1, 1)}
        )
        assert_matches_unsharded(
            module(make), numbers(1, 2, 5, 5), mesh_shape=4, placements=[Shard(2)], shard_sizes={0: (0, 4, 0, 1)}
        )


@on_ranks(2)
def test_python_numbers_are_those_of_the_whole_tensor():
    """Not of a rank's own part."""
    whole = numbers(8, 3)
    for sizes in UNEVEN + EVEN:
        x = shard(whole, shared_mesh(2), [Shard(0)], {0: sizes})
        assert x.mean().item() == pytest.approx(whole.mean().item(), rel=1e-12)
        assert float(x.sum()) == pytest.approx(float(whole.sum()), rel=1e-12)
        assert bool((x > whole.max() - 1e-9).any()) and not bool((x > 0).all())


@on_ranks(2)
def test_operands_cut_differently_are_not_broadcast():
    a, b = numbers(8, 3), numbers(8, 3, seed=1)
    x = shard(a, shared_mesh(2), [Shard(0)], {0: (7, 1)})
    y = shard(b, shared_mesh(2), [Shard(0)], {0: (1, 7)})
    torch.testing.assert_close((x + y).full_tensor(), a + b)  # 7 rows and 1 row must not broadcast
    torch.testing.assert_close((y * x).full_tensor(), a * b)


@on_ranks(1)
def test_a_world_of_one_pads_as_asked():
    """Padding other than half the kernel, on a world of one and more."""
    for ranks, sizes in ((1, (8,)),):
        for padding in (0, 1, 2, 3):
            assert_matches_unsharded(
                module(lambda: nn.Conv2d(2, 3, 3, padding=padding)),  # noqa: B023
                numbers(1, 2, 8, 5),
                mesh_shape=ranks,
                placements=[Shard(2)],
                shard_sizes={0: sizes},
            )


@on_ranks(2)
def test_double_backward_does_not_drop_terms():
    """Right, or an error: never a dropped gradient."""
    x = shard(numbers(8, 3), shared_mesh(2), [Shard(0)], {0: (5, 3)}, requires_grad=True)
    w = numbers(3, 3, seed=1).requires_grad_()
    plain = numbers(8, 3).requires_grad_()
    functions = {
        "pointwise": lambda t: (t.sin() * t).sum(),
        "linear": lambda t: F.linear(t, w).square().sum(),
        "convolution": lambda t: F.conv1d(t.t()[None], w[:, :, None].expand(3, 3, 3), padding=1).square().sum(),
        "norm": lambda t: F.layer_norm(t, (3,)).pow(3).sum(),
        "mean": lambda t: t.square().mean(),
    }
    for function in functions.values():
        (first,) = torch.autograd.grad(function(plain), plain, create_graph=True)
        (expected,) = torch.autograd.grad(first.square().sum(), plain)
        try:
            (first,) = torch.autograd.grad(function(x), x, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), x)
        except (UnsupportedSharding, RuntimeError) as error:
            texts = "Remedy", "cannot be differentiated twice", "not have been used"
            assert any(text in str(error) for text in texts)
            continue
        torch.testing.assert_close(second.full_tensor(), expected, rtol=1e-10, atol=1e-12)


@on_ranks(2)
def test_scatter_of_a_strided_source_is_not_scrambled():
    whole = numbers(6, 8).t()  # not contiguous
    rank = torch.distributed.get_rank()
    x = scatter_tensor(whole if rank == 0 else None, shared_mesh(2), (Shard(0),), shard_sizes={0: (5, 3)})
    assert torch.equal(x.full_tensor(), whole)


@on_ranks(2)
def test_a_convolution_of_a_shard_is_no_replica():
    x = shard(numbers(1, 2, 8, 5), shared_mesh(2), [Shard(2)], {0: (4, 4)})
    for function in (
        lambda: F.conv2d(x, numbers(3, 2, 1, 1, seed=1)),
        lambda: torch.ops.aten.convolution(x, numbers(3, 2, 1, 1), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    ):
        assert function().placements == (Shard(2),)
        assert function().shape == (1, 3, 8, 5)


@on_ranks(2)
def test_activations_are_not_gathered():
    """Pooling, norms and softmax send what they must, not the activation."""
    x = shard(numbers(1, 4, 64, 64), shared_mesh(2), [Shard(2)], {0: (40, 24)}, requires_grad=True)
    for function in (
        lambda t: F.max_pool2d(t, 3, 2, 1),
        lambda t: F.avg_pool2d(t, 3, 2, 1),
        lambda t: F.group_norm(t, 2),
        lambda t: F.batch_norm(t, None, None, training=True),
        lambda t: t.softmax(2),
        lambda t: t.roll(1, 2),
    ):
        with count_communication() as counted:
            function(x).sum().backward()
        assert counted.bytes_sent + counted.collective_bytes < x.to_local().numel() * 8 / 4


def permuting_view():
    x = shard(numbers(2, 3, 8), shared_mesh(2), [Shard(2)], {0: (5, 3)})
    x.flatten(1)


def test_a_view_that_would_permute_is_refused_or_right():
    whole = numbers(2, 3, 8).flatten(1)
    for outcome in run_expecting_errors(permuting_view, 2):
        assert isinstance(outcome, UnsupportedSharding) or outcome is None
        if outcome is not None:
            assert "S(2)[5, 3]" in str(outcome) and "Remedy" in str(outcome)
    assert whole.shape == (2, 24)


@on_ranks(2)
def test_partial_results_are_reduced_where_their_value_counts():
    """Who makes a Partial says so, and who needs the value gets it."""
    x = shard(numbers(8, 3), shared_mesh(2), [Shard(0)], {0: (7, 1)})
    assert x.mean().placements == (Partial(),)
    assert x.sum(0).exp().placements == (Replicate(),)
    torch.testing.assert_close(x.sum(0).exp().full_tensor(), numbers(8, 3).sum(0).exp())
    assert not shardtensor.context.gather_allowed()
