"""Training steps of whole networks on a GPU: nothing that the host waits for, or copies to it, in the steady state."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard

from shardtensor.testing import run_distributed, shard, shared_mesh

# By its path, as the tests have a package of this name.
_spec = spec_from_file_location("networks_of_benchmarks", Path(__file__).parents[2] / "benchmarks" / "networks.py")
benchmarks = sys.modules[_spec.name] = module_from_spec(_spec)
_spec.loader.exec_module(benchmarks)
NETWORKS, step = benchmarks.NETWORKS, benchmarks.step

# Smaller inputs than those of the benchmarks, of which each rank has an uneven part.
SIZES = {
    "globe U-Net": (96, 64),
    "3-D U-Net (MONAI)": (48, 16, 16),
    "AutoencoderKL decoder": (24, 16),
    "ViT": (96, 96),
    "SegFormer": (128, 64),
    "neighborhood attention": (96, 64),
    "Fourier operator": (48, 32),
}
OF_THE_DEVICE = ("sync", "h2d", "d2h", "mix", "message alone", "unwaited")


def steady(name):
    from device.emulated import counted

    network = NETWORKS[name]
    torch.manual_seed(0)
    model = network.make()
    x = torch.randn(*network.shape[:2], *SIZES[name])
    rows = x.shape[2]
    first = rows * 5 // 8 // 16 * 16
    sharded = shard(x, shared_mesh(2), [Shard(2)], {0: (first, rows - first)})
    for _ in range(2):
        step(network, model, sharded)
    with counted(OF_THE_DEVICE) as found:
        loss = step(network, model, sharded)
    expected = step(network, model, x) if not network.alone else None
    return found.of(*OF_THE_DEVICE), loss.full_tensor().item(), None if expected is None else expected.item()


@pytest.mark.parametrize("name", NETWORKS)
def test_the_third_step_of_a_network_stays_on_the_device(name, emulated):
    try:
        found = run_distributed(steady, 2, name, timeout=200)
    except Exception as error:
        if "ModuleNotFoundError" in str(error):
            pytest.skip(str(error).rpartition("ModuleNotFoundError: ")[2].splitlines()[0])
        raise
    for events, loss, expected in found:
        assert not events, events
        assert expected is None or abs(loss / expected - 1) < 1e-4
