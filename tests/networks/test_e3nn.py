"""Layers of e3nn, whose features turn with space; more of them are in test_other_programs.py."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from networks.oracle import Network, all_exact
from networks.programs import of

PACKAGE = "e3nn"
torch.serialization.add_safe_globals([slice])  # which e3nn 0.4.4 has among the constants that it loads
pytest.importorskip(PACKAGE)

FEATURES = "4x0e+4x1o"  # four scalars and four vectors


def layer(module: str, name: str, *arguments: Any, shape: tuple[int, ...] = (33, 16), **options: Any) -> Network:
    options = {"tolerance": 1e-7, "reduced": 30.0, **options}  # Clebsch-Gordan coefficients in float32
    return Network(lambda _: getattr(importlib.import_module(f"e3nn.{module}"), name)(*arguments), shape, 0, **options)


def bessel(x: Tensor) -> Tensor:
    waves: Tensor = importlib.import_module("e3nn.math").soft_one_hot_linspace(x, -2, 2, 6, "bessel", True)
    return waves


def rotation(x: Tensor) -> Tensor:
    matrices: Tensor = importlib.import_module("e3nn.o3").quaternion_to_matrix(normalize(x, dim=1))
    return matrices


def product(network: nn.Module, x: Tensor) -> Tensor:
    pairs: Tensor = network(x, x[:, :3])
    return pairs


NETWORKS = {
    "Linear": layer("o3", "Linear", FEATURES, "3x0e+2x1o"),
    "Norm": layer("o3", "Norm", FEATURES),
    "TensorSquare": layer("o3", "TensorSquare", FEATURES),
    "FullTensorProduct": layer("o3", "FullTensorProduct", FEATURES, "1x1o", call=product),
    "BatchNorm": layer("nn", "BatchNorm", FEATURES, train=True),
    "NormActivation": layer("nn", "NormActivation", FEATURES, torch.sigmoid),
    "Gate": layer("nn", "Gate", "2x0e", [torch.tanh], "2x0e", [torch.sigmoid], "2x1o", shape=(33, 10)),
    "S2Activation": layer("nn", "S2Activation", "1x0e+1x1o+1x2e", torch.tanh, 8, shape=(33, 9)),
    "FullyConnectedNet": layer("nn", "FullyConnectedNet", [16, 8, 3], torch.tanh),
    "waves": of(bessel, (33,), 0),
    "rotation": of(rotation, (33, 4), 0),
}


test_networks_are_exact = all_exact(__name__, NETWORKS, always=("Norm",))
