"""How many kernels operators ask a device for: no more than when they were last counted."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardtensor import half_precision
from shardtensor.testing import run_distributed, shared_mesh

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
sys.path.append(BENCHMARKS)  # of the ranks, too, which import what they call
bench_kernels, bench_half = (importlib.import_module(name) for name in ("bench_kernels", "bench_half"))

# Kernels beyond the plain operator's, and collectives, forward and backward.
COUNTED = {
    "conv2d 3x3": (5, 3),
    "large conv2d 3x3": (5, 3),
    "large conv3d 3x3x3": (5, 3),
    "large transposed conv2d": (3, 3),
    "large conv2d 3x3, bfloat16": (6, 3),
    "group norm": (7, 2),
    "instance norm": (3, 2),
    "batch norm, training": (6, 2),
    "layer norm over a sharded dim": (9, 2),
    "softmax over shards": (7, 3),
    "var over shards": (8, 3),
    "bilinear x 2": (5, 2),
    "max pool 3x3, stride 2": (3, 2),
    "rfft2, product, irfft2": (11, 4),
    "attention, fetch": (8, 3),
    "attention, heads": (10, 4),
    "attention, ring": (12, 3),
    "attention, causal fetch": (7, 3),
    "attention, causal ring": (11, 3),
    "step of the globe U-Net": (180, 61),
}


@pytest.mark.parametrize("name", bench_kernels.ROWS)
def test_operators_ask_for_no_more_kernels(name, emulated):
    for found in run_distributed(bench_kernels.counts, 2, name):
        figure = bench_kernels.figure(name, found, chain=True)
        kernels, collectives = COUNTED[name]
        assert figure.value <= kernels and found["sharded"][2] <= collectives, figure.note


@pytest.mark.parametrize("name", bench_half.ROWS)
def test_half_precision_costs_as_much_beyond_plain_torch_as_float32(name, emulated):
    found = {}
    for way in bench_half.WAYS:
        found[way] = bench_half.Beyond.most(run_distributed(bench_half.counts, 2, name, way), name)
    for figure in bench_half.count_figures(name, found):
        assert figure.verdict == "met", (figure.value, figure.bar, figure.note)


class Convolutions(TorchDispatchMode):
    """The dtypes of the operands of all convolutions, and of their gradients."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "convolution" in func.name():
            self.dtypes += [t.dtype for t in args[:3] if isinstance(t, torch.Tensor)]
        return func(*args, **(kwargs or {}))


def convolutions_of_a_step(way):
    """Under autocast: how many operands there are, and how many of float32."""
    mesh, device = shared_mesh(2), torch.get_default_device().type
    net = bench_half.globe().to(device)
    x = bench_half.shard(torch.randn(1, 3, 64, 64), mesh, [bench_half.Shard(2)], requires_grad=True)
    with half_precision(way), Convolutions() as seen:
        with torch.autocast(device, torch.bfloat16):
            loss = net(x).float().square().mean()
        loss.backward()
    return len(seen.dtypes), seen.dtypes.count(torch.float32)


@pytest.mark.on_device
def test_no_convolution_runs_in_float32_under_autocast():
    for fast, exact in zip(*(run_distributed(convolutions_of_a_step, 2, way) for way in ("fast", "exact"))):
        assert fast[0] > 80 and fast[1] == 0, fast
        assert exact[1] > 0, exact
