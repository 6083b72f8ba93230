"""The layers and networks of torch-harmonics: transforms, convolutions and attention on the sphere."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from networks.oracle import Network, all_exact
from shardtensor.testing import assert_matches_unsharded, count_communication, run_distributed, shard, shared_mesh

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


def neighborhood(dim: int, grid: tuple[int, int], to: tuple[int, int], resized: Any, **options: Any) -> Network:
    """On grids of a few points: the reference is a loop over points and neighbours. It computes in float32."""
    return layer(
        lambda p: p.NeighborhoodAttentionS2(4, grid, to, num_heads=2, **options),
        dim,
        (2, 4, *grid),
        call=lambda network, x: network(resized(x), x, x.flip(1)),
        tolerance=SINGLE,
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
        "RealSHT lobatto": lambda dim: layer(lambda p: p.RealSHT(*GRID, grid="lobatto"), dim, call=coefficients),
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
        "NeighborhoodAttentionS2": lambda dim: neighborhood(
            dim, (5, 6), (5, 6), lambda x: x.cos(), use_qknorm=True
        ),
        "NeighborhoodAttentionS2 coarser": lambda dim: neighborhood(dim, (5, 6), (3, 3), lambda x: x[..., ::2, ::2]),
        "NeighborhoodAttentionS2 finer": lambda dim: neighborhood(
            dim, (3, 3), (5, 6), lambda x: x.repeat_interleave(2, -2)[..., :5, :].repeat_interleave(2, -1)
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


test_networks_are_exact = all_exact(__name__, NETWORKS, ("RealSHT rows", "DISCO rows", "NeighborhoodAttentionS2 rows"))


def attention(grid: tuple[int, int], to: tuple[int, int]) -> Any:
    """By the package's kernels, where it has such."""
    torch.manual_seed(0)
    made = importlib.import_module(PACKAGE).NeighborhoodAttentionS2(4, grid, to, num_heads=2).requires_grad_(False)
    kernels = getattr(torch.ops.attention_kernels, "_neighborhood_s2_attention_optimized", None)
    made.attention_handle = kernels or made.attention_handle
    return lambda *tensors: made(*tensors)  # the operator cannot be copied


@pytest.mark.slow
@on_ranks(3, timeout=500.0)
def test_neighborhood_attention_in_any_layout():
    """Where operands lie differently, and shards are empty, or smaller than the neighborhood."""
    coarse, fine = (3, 3), (5, 6)
    batch, rows, columns, whole = ([p] for p in (Shard(0), Shard(2), Shard(3), Replicate()))
    places = [[rows, rows, rows], [whole, rows, rows], [rows, whole, whole]]
    places += [[rows, columns, batch], [batch, rows, whole]]
    for grid, to in ((fine, fine), (fine, coarse), (coarse, fine)):
        call, given = attention(grid, to), [torch.randn(3, 4, *n) for n in (to, grid, grid)]
        for placements in places:
            assert_matches_unsharded(call, *given, mesh_shape=3, placements=placements)
    for sizes in ((0, 1, 4), (1, 0, 4), (5, 0, 0)):
        assert_matches_unsharded(
            attention(fine, fine), given[0], mesh_shape=3, placements=[Shard(2)], shard_sizes={0: sizes}
        )


def halo() -> list[tuple[int, int]]:
    call, counts = attention((9, 6), (9, 6)), []
    x = shard(torch.randn(1, 4, 9, 6), shared_mesh(2), [Shard(2)], {0: (5, 4)}, requires_grad=True)
    with count_communication() as forward:
        y = call(x)
    with count_communication() as backward:
        y.sum().backward()
    for counted in (forward, backward):
        assert not counted.collective_bytes
        counts.append((counted.messages, counted.bytes_sent))
    return counts


def test_neighborhood_attention_sends_its_halo():
    """One latitude of keys and values, and back their gradient: one message to the neighbour each."""
    latitude = 6 * (4 + 4) * 4
    assert run_distributed(halo, 2, timeout=300.0) == [[(1, latitude)] * 2] * 2
