"""How many kernels operators ask a device for: no more than when they were last counted."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from shardtensor.testing import run_distributed

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
sys.path.append(BENCHMARKS)  # of the ranks, too, which import what they call
bench_kernels = importlib.import_module("bench_kernels")

# Kernels beyond the plain operator's, and collectives, forward and backward.
COUNTED = {
    "conv2d 3x3": (5, 3),
    "large conv2d 3x3": (5, 3),
    "large conv3d 3x3x3": (5, 3),
    "large transposed conv2d": (3, 3),
    "large conv2d 3x3, bfloat16": (13, 3),
    "group norm": (7, 2),
    "instance norm": (3, 2),
    "batch norm, training": (6, 2),
    "layer norm over a sharded dim": (9, 2),
    "softmax over shards": (7, 3),
    "var over shards": (8, 3),
    "bilinear x 2": (5, 2),
    "max pool 3x3, stride 2": (3, 2),
    "rfft2, product, irfft2": (11, 4),
    "attention, fetch": (6, 2),
    "attention, heads": (10, 4),
    "attention, ring": (12, 3),
    "attention, causal fetch": (5, 2),
    "attention, causal ring": (11, 3),
    "step of the globe U-Net": (180, 61),
}


@pytest.mark.parametrize("name", bench_kernels.ROWS)
def test_operators_ask_for_no_more_kernels(name, emulated):
    for found in run_distributed(bench_kernels.counts, 2, name):
        figure = bench_kernels.figure(name, found, chain=True)
        kernels, collectives = COUNTED[name]
        assert figure.value <= kernels and found["sharded"][2] <= collectives, figure.note
