"""Group, batch and instance norm of shards with their channels last in memory, small and large ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import Shard

from shardtensor.testing import assert_matches_unsharded, run_distributed, shard, shared_mesh

# Name: shape, sizes of the shards of dim 2, multiple of the number of channels.
SHAPES = {
    "one sample": ((1, 6, 50, 24), (31, 19), 6),
    "two samples, on one rank too small ones": ((2, 8, 48, 32), (33, 15), 8),
    "one channel": ((2, 1, 96, 64), (96, 0), 1),
    "a volume": ((1, 4, 20, 8, 16), (9, 11), 4),
    "two volumes": ((2, 4, 24, 8, 16), (0, 24), 4),
    "few elements": ((2, 4, 5, 3), (4, 1), 4),
    "rows of one position": ((1, 8, 700, 1), (400, 300), 8),
    "one row": ((1, 8, 1, 640), (1, 0), 8),
    "a number of positions without divisors": ((1, 4, 1733, 1), (1033, 700), 4),
    "signals": ((2, 16, 600), (300, 300), 16),
}


def in_channels_last(x):
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def functions(channels):
    groups = 2 if channels % 2 == 0 else 1
    return {
        "group": (lambda x, w, b: F.group_norm(x, groups, w, b), 2),
        "group, no bias": (lambda x, w: F.group_norm(x, groups, w), 1),
        "group, no weight": (lambda x: F.group_norm(x, groups), 0),
        "group, as many as channels": (lambda x, w, b: F.group_norm(x, channels, w, b), 2),
        "batch": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), 2),
        "batch, no weight": (lambda x: F.batch_norm(x, None, None, None, None, True), 0),
        "instance": (lambda x, w, b: F.instance_norm(x, None, None, w, b), 2),
    }


@on_ranks(2)
def test_values_and_gradients():
    for name, (shape, sizes, channels) in SHAPES.items():
        torch.manual_seed(0)
        parameters = [torch.rand(channels, dtype=torch.float64) + 0.5 for _ in range(2)]
        # Not far from zero, and so far that rounding the mean counts.
        for shift in (0.3, 1e3):
            x = in_channels_last(torch.randn(shape, dtype=torch.float64) + shift)
            for kind, (function, number) in functions(channels).items():
                try:
                    assert_matches_unsharded(
                        function,
                        x,
                        *parameters[:number],
                        mesh_shape=2,
                        placements=[[Shard(2)], *[None] * number],
                        shard_sizes=[{0: sizes}, *[None] * number],
                        **({} if shift < 1 else {"rtol": 1e-7, "atol": 1e-7}),
                    )
                except AssertionError as error:
                    raise AssertionError(f"{kind} of {name}, mean {shift}: {error}") from error


def formats(shape, sizes, memory_format, dtype):
    """Whether results and gradients have the memory format of the input."""
    mesh = shared_mesh(2)
    x = torch.randn(shape).to(dtype).contiguous(memory_format=memory_format)
    found = {}
    for kind, (function, number) in functions(shape[1]).items():
        given = shard(x, mesh, [Shard(2)], {0: sizes}, requires_grad=True)
        y = function(given, *(torch.ones(shape[1]) for _ in range(number)))
        y.backward(y.detach())
        tensors = (y.to_local(), given.grad.to_local(), y, given.grad)
        found[kind] = [t.is_contiguous(memory_format=memory_format) for t in tensors], y.dtype == dtype
    return found


MIXED = pytest.mark.on_cpu("GPUs have no group norm of mixed dtypes")


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=MIXED)], ids=str)
def test_results_keep_the_memory_format(dtype):
    cases = [((1, 8, 64, 32), (37, 27), torch.channels_last), ((2, 4, 20, 8, 16), (9, 11), torch.channels_last_3d)]
    for shape, sizes, memory_format in cases:
        for found in run_distributed(formats, 2, shape, sizes, memory_format, dtype):
            assert all(all(kept) and same for kept, same in found.values()), found


@pytest.mark.parametrize("shape", [(1, 16, 128, 64), (2, 16, 128, 64)], ids=str)
@pytest.mark.parametrize(("mean", "least"), [(0.0, 2e-6), (3.0, 3e-6), (15.0, 2e-5), (17.0, 2e-5), (1e4, 5e-4)])
@on_ranks(2)
def test_precision_far_from_zero(mean, least, shape):
    """Largest errors of results and gradients, relative to float64's largest number, for each function."""
    torch.manual_seed(0)
    mesh, (channels, found) = shared_mesh(2), (shape[1], {})
    x = in_channels_last((torch.randn(shape, dtype=torch.float64) + mean).float())
    seed = in_channels_last(torch.randn(shape))
    for kind, (function, number) in functions(channels).items():
        results = []
        # Contiguous on one device: torch's instance norm is wrong where what its gradient gets has channels last.
        for make in (lambda t: t.contiguous().double(), lambda t: shard(t, mesh, [Shard(2)], {0: (100, 28)})):
            given = make(x).requires_grad_()
            y = function(given, *(torch.ones(channels, dtype=given.dtype) for _ in range(number)))
            (grad,) = torch.autograd.grad(y, given, make(seed))
            results.append([getattr(t, "full_tensor", lambda t=t: t)().double() for t in (y.detach(), grad)])
        found[kind] = [((t - e).abs().max() / e.abs().max()).item() for e, t in zip(*results, strict=True)]
    for kind, errors in found.items():
        assert max(errors) <= least, f"{kind}: {errors}"


@on_ranks(2)
def test_group_norm_of_an_input_without_gradient():
    """Of a small map; torch's kernel for channels last ends the process there, so one device has a row-major input."""
    x = torch.randn(3, 6, 5, 7, dtype=torch.float64)
    norm, one = (nn.GroupNorm(2, 6).double() for _ in range(2))
    local = x.to(memory_format=torch.channels_last)
    sharded = shard(local, shared_mesh(2), [Shard(0)], {0: (1, 2)})
    assert not sharded.to_local().is_contiguous()
    norm(sharded).square().sum().backward()
    one(x).square().sum().backward()
    for mine, expected in zip(norm.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-10, atol=0)
