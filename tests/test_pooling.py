"""Pooling on shards against pooling on one device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from spatial_cases import check_cases, data
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from shardtensor import ShardTensor
from shardtensor.geometry import Window, intervals_of, map_cuts
from shardtensor.ops.pooling import adaptive_window, pool_reads
from shardtensor.ops.spatial import scaled_cut
from shardtensor.testing import (
    assert_matches_unsharded,
    count_communication,
    run_distributed,
    run_expecting_errors,
    shard,
    shared_mesh,
)

MAX = [F.max_pool1d, F.max_pool2d, F.max_pool3d]
AVG = [F.avg_pool1d, F.avg_pool2d, F.avg_pool3d]


def window_cases():
    """Fixed windows over awkward sizes, in one to three dims."""
    cases = []
    both = [
        {"kernel_size": 2},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
        {"kernel_size": 2, "stride": 3, "ceil_mode": True},
        {"kernel_size": 5, "stride": 1, "padding": 2},
        {"kernel_size": 5, "stride": 3, "padding": 2, "ceil_mode": True},
        {"kernel_size": 1, "stride": 2},
    ]
    only = {
        "max": [
            {"kernel_size": 3, "stride": 1, "padding": 1, "dilation": 2},
            {"kernel_size": 4, "stride": 3, "padding": 2, "dilation": 3, "ceil_mode": True},
        ],
        "avg": [
            {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False},
            {"kernel_size": 4, "stride": 3, "padding": 2, "ceil_mode": True, "count_include_pad": False},
        ],
    }
    for kind, functions in (("max", MAX), ("avg", AVG)):
        for ndim, function in enumerate(functions, 1):
            for kwargs in both + only[kind]:
                reach = (kwargs["kernel_size"] - 1) * kwargs.get("dilation", 1) + 1 - 2 * kwargs.get("padding", 0)
                for n in {1: (1, 2, 5, 7, 17, 33), 2: (5, 7, 17), 3: (5, 6)}[ndim]:
                    if n < reach:
                        continue
                    shape = (2, 3, n, n + 1, n + 2)[: ndim + 2]
                    fn = lambda x, function=function, kwargs=kwargs: function(x, **kwargs)  # noqa: E731
                    cases.append((f"{kind} {kwargs}", fn, shape, tuple(range(2, ndim + 2))))
    cases += [
        ("divisor", lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5), (2, 3, 9, 8), (2, 3)),
        ("divisor 3d", lambda x: F.avg_pool3d(x, 2, divisor_override=5), (2, 3, 5, 6, 4), (2, 3, 4)),
        ("unbatched max", lambda x: F.max_pool2d(x, 3, 1, 1), (3, 9, 8), (1, 2)),
        ("unbatched avg", lambda x: F.avg_pool1d(x, 3, 1, 1), (3, 9), (1,)),
        ("unequal", lambda x: F.max_pool2d(x, (3, 2), (2, 1), (1, 0)), (2, 3, 9, 8), (2, 3)),
        ("unequal avg", lambda x: F.avg_pool2d(x, (3, 2), (2, 1), (1, 0), ceil_mode=True), (2, 3, 9, 8), (2, 3)),
        ("module", nn.MaxPool2d(3, 2, 1), (2, 3, 9, 8), (2, 3)),
        ("avg module", nn.AvgPool3d(3, 2, 1), (2, 3, 9, 8, 5), (2, 3, 4)),
        ("indices", lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), (2, 3, 9, 8), (2, 3)),
        ("indices 1d", lambda x: F.max_pool1d(x, 3, 2, 1, return_indices=True), (2, 3, 9), (2,)),
        ("indices 3d", nn.MaxPool3d(3, 2, 1, return_indices=True), (2, 3, 9, 8, 5), (2, 3, 4)),
        ("torch.max_pool2d", lambda x: torch.max_pool2d(x, 2), (2, 3, 9, 8), (2, 3)),
        ("torch with indices", lambda x: torch.max_pool1d_with_indices(x, 2), (2, 3, 9), (2,)),
        ("lp", lambda x: F.lp_pool2d(x, 2.0, 3, 2), (2, 3, 9, 8), (2, 3)),
        ("ties", lambda x: F.max_pool2d(x.round() / 2, 4, 2, 1, return_indices=True), (2, 3, 11, 9), (2, 3)),
        ("all -inf", lambda x: F.max_pool2d(x * 0 - torch.inf, 3, 1, 1, return_indices=True)[1], (2, 3, 7, 5), (2, 3)),
    ]
    return cases


def adaptive_cases():
    """Adaptive windows: to one value, divisible, not divisible, larger than the input."""
    cases = []
    avg = [F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d]
    best = [F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d]
    for name, functions in (("adaptive avg", avg), ("adaptive max", best)):
        for ndim, function in enumerate(functions, 1):
            outs = {1: (1, 2, 3, 7, 9), 2: (1, (1, 4), (3, 1), (2, 4), (9, 3)), 3: (1, (1, 2, 3), (2, 1, 3), 3)}[ndim]
            for out in outs:
                fn = lambda x, function=function, out=out: function(x, out)  # noqa: E731
                cases.append((f"{name} {out}", fn, (2, 3, 8, 7, 6)[: ndim + 2], tuple(range(2, ndim + 2))))
    both = lambda out: lambda x: F.adaptive_max_pool2d(x, out, return_indices=True)  # noqa: E731
    ties = lambda out: lambda x: F.adaptive_max_pool2d(x.round() / 2, out, return_indices=True)  # noqa: E731
    cases += [(f"indices {out}", both(out), (2, 3, 8, 7), (2, 3)) for out in (1, (1, 3), (3, 1), (2, 3), (5, 9))]
    cases += [(f"ties {out}", ties(out), (2, 3, 8, 7), (2, 3)) for out in (1, (1, 3), (3, 1), (2, 3), (5, 9))]
    cases += [
        ("None", nn.AdaptiveAvgPool2d((None, 1)), (2, 3, 8, 7), (2, 3)),
        ("None max", nn.AdaptiveMaxPool2d((3, None)), (2, 3, 8, 7), (2, 3)),
        ("unbatched", lambda x: F.adaptive_avg_pool2d(x, 3), (3, 8, 7), (1, 2)),
        ("one channel", lambda x: F.adaptive_max_pool1d(x, 1), (2, 1, 8), (1, 2)),
        ("one channel avg", lambda x: F.adaptive_avg_pool2d(x, (1, 3)), (2, 1, 8, 5), (1, 2)),
        ("head", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), (2, 3, 8, 7), (2, 3)),
        ("torch", lambda x: torch.adaptive_max_pool1d(x, 2), (2, 3, 8), (2,)),
    ]
    return cases


def check_windows(mesh_shape):
    check_cases(window_cases(), mesh_shape)


def check_adaptive(mesh_shape):
    check_cases(adaptive_cases(), mesh_shape)


@pytest.mark.parametrize("mesh_shape", [1, 2, 3, 4, (2, 2)], ids=str)
def test_windows_match_one_device(mesh_shape):
    run_distributed(check_windows, 4 if mesh_shape == (2, 2) else mesh_shape, mesh_shape, timeout=200)


@pytest.mark.parametrize("mesh_shape", [1, 2, 3, 4, (2, 2)], ids=str)
def test_adaptive_windows_match_one_device(mesh_shape):
    run_distributed(check_adaptive, 4 if mesh_shape == (2, 2) else mesh_shape, mesh_shape, timeout=200)
