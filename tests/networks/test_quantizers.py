"""The quantizers of vector-quantize-pytorch, in training: codebooks are moving averages of what chose each code.

The codebook is float32, whatever the features are, so what is computed from it is right to float32's rounding.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from networks.oracle import Network, all_exact

PACKAGE = "vector_quantize_pytorch"
pytest.importorskip(PACKAGE)

TOKENS = (2, 21, 16)


def quantizer(name: str, *, shape: tuple[int, ...] = TOKENS, cut: int = 1, **options: Any) -> Network:
    """A quantizer of features, of which dim ``cut`` is cut."""
    of_network = {key: options.pop(key) for key in ("train", "tolerance", "backward") if key in options}
    options = {"dim": shape[1] if len(shape) == 4 else shape[2], **options}
    return Network(lambda p: getattr(p, name)(**options), shape, cut, reduced=30.0, **of_network)


def inner(module: str, name: str, shape: tuple[int, ...] = TOKENS, **options: Any) -> Network:
    """One that the package does not export."""
    of_network = {key: options.pop(key) for key in ("train", "tolerance", "dtype", "call") if key in options}
    made = lambda _: getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)(**options)  # noqa: E731
    return Network(made, shape, 1, reduced=30.0, **of_network)


def codebook(name: str = "VectorQuantize", **options: Any) -> Network:
    """A quantizer that learns its codes."""
    return quantizer(name, train=True, tolerance=1e-6, **{"codebook_size": 9, **options})


NETWORKS = {
    "VectorQuantize": codebook(threshold_ema_dead_code=0),
    "VectorQuantize, heads": codebook(heads=2, separate_codebook_per_head=True, codebook_dim=8),
    "VectorQuantize, image": codebook(
        shape=(2, 8, 13, 9), cut=2, accept_image_fmap=True, rotation_trick=False, orthogonal_reg_weight=0.1
    ),
    "VectorQuantize, learned": codebook(learnable_codebook=True, ema_update=False, commitment_weight=0.5),
    "VectorQuantize, k-means": codebook(codebook_size=5, kmeans_init=True, kmeans_iters=3, sync_codebook=False),
    "VectorQuantize, dead codes": codebook(threshold_ema_dead_code=2, sync_codebook=False),
    "ResidualVQ": codebook("ResidualVQ", num_quantizers=3, quantize_dropout=True),
    "GroupedResidualVQ": quantizer("GroupedResidualVQ", codebook_size=9, num_quantizers=2, groups=2),
    "LFQ": quantizer("LFQ", train=True, tolerance=1e-6, codebook_size=16),
    "LFQ, image": quantizer("LFQ", shape=(2, 4, 13, 9), cut=2, train=True, tolerance=1e-6, codebook_size=16),
    "ResidualLFQ": quantizer("ResidualLFQ", codebook_size=16, num_quantizers=2),
    "ResidualFSQ": quantizer("ResidualFSQ", levels=[5, 5, 3], num_quantizers=2),
    "SimVQ": quantizer("SimVQ", train=True, codebook_size=9),
    "ResidualSimVQ": quantizer("ResidualSimVQ", codebook_size=9, num_quantizers=2),
    "LatentQuantize": quantizer("LatentQuantize", shape=(2, 16, 13, 9), cut=2, train=True, levels=[5, 5, 8]),
    "RandomProjectionQuantizer": quantizer(
        "RandomProjectionQuantizer", backward=False, codebook_size=9, codebook_dim=4
    ),
    "BinaryMapper": inner(
        "binary_mapper",
        "BinaryMapper",
        (2, 21, 4),
        train=True,
        call=lambda mapper, x: mapper(x, deterministic=True),  # bits that are drawn would be others
        dtype=torch.float32,
        tolerance=1e-5,
        bits=4,
    ),
    "FSP": inner("finite_scalar_perturbation", "FSP", levels=[5, 5, 3], dim=16),
}


test_networks_are_exact = all_exact(__name__, NETWORKS, always=("GroupedResidualVQ",))
