"""Normalization over sharded dims: precision of statistics and gradients, on shards large enough for every path."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from shardtensor.testing import assert_matches_unsharded, run_distributed, shard, shared_mesh

SHAPE, SIZES = (1, 4, 96, 128), {0: (61, 0, 35)}


def functions():
    weight, bias = torch.rand(4) + 0.5, torch.rand(4)
    rows = torch.rand(96, 128) + 0.5
    return {
        "group": lambda x: F.group_norm(x, 2, weight.to(x.dtype), bias.to(x.dtype)),
        "batch": lambda x: F.batch_norm(x, None, None, weight.to(x.dtype), bias.to(x.dtype), True),
        "instance": lambda x: F.instance_norm(x),
        "layer": lambda x: F.layer_norm(x, (96, 128), rows.to(x.dtype)),
        "rms": lambda x: F.rms_norm(x, (96, 128), rows.to(x.dtype), 1e-5),
    }


def errors(mean, spread, dtype, memory_format):
    """Largest errors of result and gradient, relative to the largest number of float64's: ours and torch's."""
    torch.manual_seed(0)
    mesh = shared_mesh(3)
    x, seed = torch.randn(2, *SHAPE, dtype=torch.float64)
    x, seed = (x * spread + mean).to(dtype), seed.to(dtype)
    local = [shard(t.contiguous(memory_format=memory_format), mesh, [Shard(2)], SIZES) for t in (x, seed)]

    def run(function, x, seed):
        x = x.detach().requires_grad_()
        y = function(x)
        (grad,) = torch.autograd.grad(y, x, seed)
        return [getattr(t, "full_tensor", lambda t=t: t)().double() for t in (y.detach(), grad)]

    result = {}
    for name, function in functions().items():
        exact, ours, torchs = (run(function, *given) for given in ((x.double(), seed.double()), local, (x, seed)))
        result[name] = [
            [((t - e).abs().max() / e.abs().max().clamp(min=1e-30)).item() for t, e in zip(found, exact, strict=True)]
            for found in (ours, torchs)
        ]
    return result


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("mean", "spread", "dtype", "least"),
    [
        (0.0, 1.0, torch.float32, 2e-6),
        (1e4, 1.0, torch.float32, 1e-3),
        (-3.0, 1e-6, torch.float32, 1e-3),  # a variance far below eps
        (0.0, 1e-9, torch.float32, 2e-6),
        (1e3, 0.0, torch.float32, 1e-6),  # all equal
        (5.0, 2.0, torch.bfloat16, 1e-2),
    ],
)
def test_precision(mean, spread, dtype, least, memory_format):
    for result in run_distributed(errors, 3, mean, spread, dtype, memory_format):
        for name, (ours, torchs) in result.items():
            for error, reference in zip(ours, torchs, strict=True):
                assert error <= max(1.1 * reference, least), f"{name}: {ours} against torch's {torchs}"


def check_large_shards():
    torch.manual_seed(0)
    x = torch.randn(2, 4, 96, 64, dtype=torch.float64) + 3
    weight, bias = torch.rand(2, 4, dtype=torch.float64)
    for t in (x, x.contiguous(memory_format=torch.channels_last), x.transpose(2, 3), x[:, :, ::2]):
        for function in (
            lambda x, w, b: F.group_norm(x, 2, w, b),
            lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
            lambda x, w, b: F.instance_norm(x, None, None, w, b),
        ):
            for dim in (2, 3):
                sizes = {0: (t.shape[dim] - 3, 3)}
                places = [[Shard(dim)], None, None]
                assert_matches_unsharded(
                    function, t, weight, bias, mesh_shape=2, placements=places, shard_sizes=[sizes, None, None]
                )


def test_large_shards_in_any_memory_format():
    run_distributed(check_large_shards, 2)
