"""Adapters of peft around linear layers and convolutions; more of them are in test_other_programs.py."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from networks.oracle import Network, all_exact
from networks.programs import layer

PACKAGE = "torch"
peft = pytest.importorskip("peft")


def adapted(layers: nn.Module, config: str, **options: Any) -> nn.Module:
    network: nn.Module = peft.get_peft_model(layers, getattr(peft, config)(**options))
    return network


def named(a: nn.Module, b: nn.Module, *between: nn.Module) -> nn.Module:
    layers = nn.Sequential()
    for name, each in zip("agb" if between else "ab", (a, *between, b), strict=True):
        layers.add_module(name, each)
    return layers


def adapter(config: str, targets: str = "ab", train: bool = False, tolerance: float = 1e-9, **options: Any) -> Network:
    return layer(
        lambda: adapted(
            named(nn.Linear(16, 24), nn.Linear(24, 16), nn.GELU()),
            f"{config}Config",
            target_modules=list(targets),
            **options,
        ),
        (2, 21, 16),
        1,
        train=train,
        tolerance=tolerance,
    )


DRAWN = {"r": 4, "init_weights": False}  # none of the adapter's weights starts at zero
NETWORKS = {
    "LoRA": adapter("Lora", r=4, init_lora_weights="gaussian"),
    "LoRA, training": adapter("Lora", r=4, init_lora_weights=False, train=True),
    "rsLoRA": adapter("Lora", r=4, use_rslora=True, init_lora_weights="pissa"),
    "LoRA, convolutions": layer(
        lambda: adapted(
            named(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)),
            "LoraConfig",
            target_modules=["a", "b"],
            r=2,
            use_dora=True,
            init_lora_weights=False,
        ),
        (2, 3, 24, 16),
        2,
    ),
    "AdaLora": adapter("AdaLora", init_r=4, target_r=2, total_step=10),
    "C3A": adapter("C3A", "a", block_size=8, tolerance=1e-6),  # its kernels pass through float32
    "Delora": adapter("Delora", r=4),
    "Glora": adapter("Glora", r=4),
    "Gralora": adapter("Gralora", gralora_k=2, **DRAWN),
    "HRA": adapter("HRA", **DRAWN),
    "Hira": adapter("Hira", **DRAWN),
    "Miss": adapter("Miss", **DRAWN),
    "PVeRA": adapter("Pvera", "b", r=4),
    "RandLora": adapter("RandLora", "b", r=4),
    "SHiRA": adapter("Shira", r=2),
    "VBLoRA": adapter("VBLoRA", "b", num_vectors=8, vector_length=8, topk=2, r=2),
    "WaveFT": adapter("WaveFT", "a", n_frequency=8),
}


test_networks_are_exact = all_exact(__name__, NETWORKS)
