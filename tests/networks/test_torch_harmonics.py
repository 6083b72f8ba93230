"""The layers and networks of torch-harmonics: transforms, convolutions and attention on the sphere."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from networks.oracle import Network, check, cut, names
from shardtensor import UnsupportedSharding
from shardtensor.testing import count_communication, run_distributed

PACKAGE = "torch_harmonics"
pytest.importorskip(PACKAGE)

# All in PyTorch, as built without its extension, whose operators DTensor has no sharding strategies for.
for place in ("disco.convolution", "attention.attention"):
    importlib.import_module(f"{PACKAGE}.{place}").optimized_kernels_is_available = lambda: False
importlib.import_module(f"{PACKAGE}.attention._layout")._OPTIMIZED = False

GRID = (12, 24)
FINE = (2, 3, *GRID)
SINGLE = 1e-5  # quadrature weights and Legendre polynomials are held in float32 somewhere


def layer(make: Any, dim: int, shape: tuple[int, ...] = FINE, **options: Any) -> Network:
    return Network(make, shape, dim, **{"reduced": 4.0, **options})


def coefficients(network: nn.Module, x: Tensor) -> Tensor:
    return torch.view_as_real(network(x))


def from_coefficients(network: nn.Module, x: Tensor) -> Tensor:
    return network(torch.complex(x, x.flip(0)))


def both(cases: dict[str, Any]) -> dict[str, Network]:
    """Each one with rows and with columns sharded."""
    return {
        f"{name}{along}": make(dim) for name, make in cases.items() for along, dim in ((" rows", -2), (" columns", -1))
    }


def convolution(dim: int, to: tuple[int, int] = GRID, **options: Any) -> Network:
    return layer(
        lambda p: p.DiscreteContinuousConvS2(3, 4, GRID, to, (2, 3), optimized_kernel=False, **options),
        dim,
    )


def transposed(dim: int) -> Network:
    return layer(
        lambda p: p.DiscreteContinuousConvTransposeS2(3, 4, (6, 12), GRID, (2, 3), optimized_kernel=False),
        dim,
        (2, 3, 6, 12),
        reduced=20.0,
    )


def model(name: str, in_single: bool = False, **options: Any) -> Any:
    given = {"img_size": (16, 32), "in_chans": 3, "out_chans": 2, **options}
    return lambda dim: layer(
        lambda p: getattr(importlib.import_module("torch_harmonics.examples.models"), name)(**given),
        dim,
        (2, 3, 16, 32),
        reduced=20.0,
        tolerance=1e-4 if in_single else SINGLE,
        dtype=torch.float32 if in_single else torch.float64,
    )


TRANSFORMS = both(
    {
        "RealSHT": lambda dim: layer(lambda p: p.RealSHT(*GRID), dim, call=coefficients),
        "RealSHT legendre": lambda dim: layer(
            lambda p: p.RealSHT(*GRID, grid="legendre-gauss"), dim, call=coefficients
        ),
        "InverseRealSHT": lambda dim: layer(
            lambda p: p.InverseRealSHT(*GRID, lmax=6, mmax=6), dim, (2, 3, 6, 6), call=from_coefficients
        ),
        "RealVectorSHT": lambda dim: layer(lambda p: p.RealVectorSHT(*GRID), dim, (3, 2, *GRID), call=coefficients),
        "InverseRealVectorSHT": lambda dim: layer(
            lambda p: p.InverseRealVectorSHT(*GRID, lmax=6, mmax=6), dim, (3, 2, 6, 6), call=from_coefficients
        ),
        "SpectralConvS2": lambda dim: layer(
            lambda p: p.SpectralConvS2(GRID, GRID, 3, 4), dim, tolerance=SINGLE
        ),
        "QuadratureS2": lambda dim: layer(lambda p: p.QuadratureS2(GRID), dim),
        "ResampleS2": lambda dim: layer(lambda p: p.ResampleS2(*GRID, 24, 48), dim),
        "ResampleS2 coarser": lambda dim: layer(lambda p: p.ResampleS2(*GRID, 7, 12), dim),
    }
)
LOCAL = both(
    {
        "DISCO": convolution,
        "DISCO coarser": lambda dim: convolution(dim, (6, 12)),
        "DISCO transposed": transposed,
        "AttentionS2": lambda dim: layer(
            lambda p: p.AttentionS2(4, 2, GRID, GRID), dim, (2, 4, *GRID)
        ),
    }
)
MODELS = both(
    {
        "SFNO": model("SphericalFourierNeuralOperator", embed_dim=8, num_layers=2, scale_factor=2),
        "SFNO normalized": model(
            "SphericalFourierNeuralOperator",
            embed_dim=8,
            num_layers=2,
            scale_factor=1,
            normalization_layer="instance_norm",
            pos_embed="spectral",
            residual_prediction=True,
        ),
        "LSNO": model("LocalSphericalNeuralOperator", True, embed_dim=8, num_layers=2, scale_factor=2),
        "UNet": model("SphericalUNet", embed_dims=[8, 16], depths=[1, 1]),
        "Transformer": model(
            "SphericalTransformer", True, embed_dim=8, num_layers=2, scale_factor=2, attention_mode="global"
        ),
        "Segformer": model(
            "SphericalSegformer", True, embed_dims=[8, 16], heads=[1, 2], depths=[1, 1], attention_mode="global"
        ),
    }
)
NETWORKS = {**TRANSFORMS, **LOCAL, **MODELS}


@pytest.mark.parametrize("name", names(NETWORKS, always=("RealSHT rows", "DISCO rows")))
def test_networks_are_exact(name):
    run_distributed(check, 2, __name__, name, timeout=300.0)


def check_neighborhood_attention():
    """An operator of the package's own, without a sharding strategy."""
    attention = importlib.import_module(PACKAGE).NeighborhoodAttentionS2(4, GRID, GRID, num_heads=2).double()
    for dim in (2, 3):
        sharded = cut(torch.randn(1, 4, *GRID, dtype=torch.float64), dim)
        with count_communication() as counted, pytest.raises(UnsupportedSharding, match="no distributed form is known"):
            attention(sharded)
        assert not counted.collectives


@pytest.mark.slow
def test_neighborhood_attention_is_refused():
    run_distributed(check_neighborhood_attention, 2, timeout=300.0)
