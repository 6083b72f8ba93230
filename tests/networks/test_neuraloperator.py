"""The networks of neuraloperator: operators in Fourier space, on spheres and on point clouds, and their losses."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from seeded import seeded
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn.functional import mse_loss

from networks.oracle import Network, all_exact, assert_near
from shardtensor.testing import shard, shared_mesh

PACKAGE = "neuralop"
pytest.importorskip(PACKAGE)
quadrature = pytest.importorskip("torch_harmonics.quadrature")
filter_basis = pytest.importorskip("torch_harmonics.filter_basis")

# LocalNO imports two functions of torch-harmonics by names that 0.9 has replaced.
quadrature.__dict__.setdefault("_precompute_grid", quadrature._precompute_quadrature_weights)
filter_basis.__dict__.setdefault("MorletFilterBasis", filter_basis.HarmonicFilterBasis)

SMALL = {"in_channels": 3, "out_channels": 2, "hidden_channels": 8, "n_layers": 2}
SINGLE = 1e-5  # spectral convolutions keep their modes in complex64
SIZES = {1: (2, 3, 24), 2: (2, 3, 16, 13), 3: (1, 3, 8, 9, 10)}


def doubled(make: Callable[[Any], nn.Module]) -> Callable[[Any], nn.Module]:
    """Makes the network with modes in double precision, too, which ``double()`` leaves as they are."""
    return lambda package: make(package)._apply(lambda t: t.cdouble() if t.is_complex() else t)


def fno(n_dim: int = 2, dim: int = 2, **options: Any) -> Network:
    modes = (8, 6, 6)[:n_dim]
    return Network(
        lambda p: p.models.FNO(n_modes=modes, **{**SMALL, **options}),
        SIZES[n_dim],
        dim,
        tolerance=SINGLE,
    )


def tfno(factorization: str, implementation: str = "factorized", **options: Any) -> Network:
    return fno(factorization=factorization, implementation=implementation, rank=0.5, **options)


def uno(dim: int = 2, **options: Any) -> Network:
    given = {
        "uno_out_channels": [8, 8, 8],
        "uno_n_modes": [[6, 6]] * 3,
        "uno_scalings": [[1.0, 1.0], [0.5, 0.5], [2.0, 2.0]],
        "lifting_channels": 8,
        "projection_channels": 8,
        "channel_mlp_skip": "linear",
        **SMALL,
        "n_layers": 3,
        **options,
    }
    return Network(lambda p: p.models.UNO(**given), (2, 3, 16, 12), dim, tolerance=SINGLE)


def codano(dim: int = 2, **options: Any) -> Network:
    given = {
        "hidden_variable_codimension": 2,
        "lifting_channels": 4,
        "projection_channels": 4,
        "n_layers": 3,
        "n_heads": [2] * 3,
        "n_modes": [[6, 6]] * 3,
        "attention_scaling_factors": [0.5] * 3,
        "per_layer_scaling_factors": [[1, 1], [0.5, 0.5], [2, 2]],
        "use_horizontal_skip_connection": True,
        "horizontal_skips_map": {2: 0},
        **options,
    }
    ids = given.get("variable_ids")
    return Network(
        lambda p: p.models.CODANO(**copy.deepcopy(given)),  # which halves one of the numbers of modes in place
        (2, 3, 16, 16),
        dim,
        lambda network, x: network(x, None, ids),
        tolerance=SINGLE,
        reduced=1.5,  # statistics of 15 norms, and products of all pairs of tokens
    )


def local(dim: int = 2, **options: Any) -> Network:
    given = {"n_modes": (6, 6), "default_in_shape": (16, 16), **SMALL, **options}
    return Network(
        lambda p: importlib.import_module("neuralop.models.local_no").LocalNO(**given),
        (2, 3, 16, 16),
        dim,
        tolerance=SINGLE,
    )


def sfno(dim: int = 2, **options: Any) -> Network:
    given = {"n_modes": (6, 12), **SMALL, **options}
    return Network(lambda p: p.models.SFNO(**given), (2, 3, 12, 24), dim, tolerance=SINGLE, reduced=2.0)  # latitudes


def points(n: int, dim: int) -> Tensor:
    return torch.rand((n, dim), generator=seeded(2), dtype=torch.float64)


def lattice(n: int, dim: int) -> Tensor:
    return torch.stack(torch.meshgrid([torch.linspace(0, 1, n).double()] * dim, indexing="xy"), -1)


def in_double(network: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """For networks that make tensors of the default dtype and take them for their input's."""
    torch.set_default_dtype(torch.float64)
    try:
        return network(*args, **kwargs)
    finally:
        torch.set_default_dtype(torch.float32)


def gino_call(network: nn.Module, x: Tensor) -> Tensor:
    places, queries = points(x.shape[1], 2), points(9, 2) * 0.9
    return in_double(network, x=x, input_geom=places, latent_queries=lattice(8, 2), output_queries=queries)


def gino(**options: Any) -> Network:
    given = {
        "in_channels": 3,
        "out_channels": 2,
        "gno_coord_dim": 2,
        "in_gno_radius": 0.3,
        "out_gno_radius": 0.3,
        "in_gno_channel_mlp_hidden_layers": [8],
        "out_gno_channel_mlp_hidden_layers": [8],
        "fno_n_modes": (6, 6),
        "fno_hidden_channels": 8,
        "fno_n_layers": 2,
        "gno_embed_channels": 4,
        "gno_use_open3d": False,
        "gno_use_torch_scatter": False,
        **options,
    }
    return Network(lambda p: p.models.GINO(**given), (2, 24, 3), 1, gino_call, SINGLE, 6.0)


def fnogno_call(network: nn.Module, x: Tensor) -> Tensor:
    return in_double(network, lattice(8, 2), points(9, 2), x)


def fnogno(dim: int, **options: Any) -> Network:
    given = {
        "in_channels": 3,
        "out_channels": 2,
        "gno_coord_dim": 2,
        "gno_radius": 0.3,
        "gno_channel_mlp_hidden_layers": [8],
        "fno_n_modes": (6, 6),
        "fno_hidden_channels": 8,
        "fno_n_layers": 2,
        "gno_embed_channels": 4,
        "gno_use_open3d": False,
        "gno_use_torch_scatter": False,
        **options,
    }
    shape = (2, 8, 8, 3) if options.get("gno_batched") else (8, 8, 3)
    return Network(lambda p: p.models.FNOGNO(**given), shape, dim, fnogno_call, tolerance=SINGLE)


def uqno_call(network: nn.Module, x: Tensor) -> Tensor:
    return torch.cat(network(x), 1)


MODELS: dict[str, Network] = {
    "FNO1d": fno(1),
    "FNO2d": fno(2),
    "FNO2d columns": fno(2, 3),
    "FNO3d": fno(3),
    "FNO3d middle": fno(3, 3),
    "FNO3d last": fno(3, 4),
    "FNO instance norm": fno(norm="instance_norm"),
    "FNO group norm": fno(norm="group_norm", preactivation=True),
    "FNO batch norm": fno(norm="batch_norm"),
    "FNO padded": fno(domain_padding=0.25),
    "FNO padded columns": fno(dim=3, domain_padding=0.25),
    "FNO finer": fno(resolution_scaling_factor=2),
    "FNO finer columns": fno(dim=3, resolution_scaling_factor=[2, 0.5]),
    "FNO1d finer": fno(1, resolution_scaling_factor=[2, 0.5]),
    "FNO3d finer": fno(3, resolution_scaling_factor=[2, 0.5]),
    "FNO separable": fno(separable=True),
    "FNO no embedding": fno(positional_embedding=None),
    "FNO skips": fno(fno_skip="soft-gating", channel_mlp_skip="identity"),
    "FNO tanh": fno(stabilizer="tanh"),
    "FNO fewer modes": fno(max_n_modes=(10, 10)),
    "TFNO Tucker": tfno("tucker"),
    "TFNO Tucker columns": tfno("tucker", dim=3),
    "TFNO CP": tfno("cp"),
    "TFNO CP columns": tfno("cp", dim=3),
    "TFNO TT": tfno("tt"),
    "TFNO TT columns": tfno("tt", dim=3),
    "TFNO reconstructed": tfno("tucker", "reconstructed"),
    "UNO": uno(),
    "UNO columns": uno(3),
    "UNO padded": uno(domain_padding=0.2),
    "UQNO": Network(
        lambda p: p.models.UQNO(p.models.FNO(n_modes=(6, 6), **SMALL)),
        SIZES[2],
        2,
        uqno_call,
        tolerance=SINGLE,
    ),
    "CODANO": codano(),
    "CODANO columns": codano(3),
    "CODANO encoded": codano(
        use_positional_encoding=True,
        positional_encoding_dim=4,
        positional_encoding_modes=[6, 6],
        variable_ids=["a", "b", "c"],
        enable_cls_token=True,
    ),
    "LocalNO": local(),
    "LocalNO columns": local(3),
    "LocalNO differences": local(disco_layers=False),
    "LocalNO differences columns": local(3, disco_layers=False, conv_padding_mode="zeros"),
    "SFNO": sfno(),
    "SFNO columns": sfno(3),
    "SFNO dense": sfno(factorization="dense"),
    "GINO": gino(),
    "GINO nonlinear": gino(in_gno_transform_type="nonlinear", out_gno_transform_type="nonlinear_kernelonly"),
    "FNOGNO": fnogno(0),
    "FNOGNO columns": fnogno(1),
    "FNOGNO batched": fnogno(1, gno_batched=True),
}


def layer(module: str, name: str, *arguments: Any, shape: tuple[int, ...] = SIZES[2], **options: Any) -> Network:
    module = f"neuralop.{module}"
    return Network(
        lambda _: getattr(importlib.import_module(module), name)(*arguments),
        shape,
        **{"dim": 2, "reduced": 4.0, **options},
    )


def function(module: str, call: Callable[[Any, Tensor], Any], shape: tuple[int, ...], dim: int) -> Network:
    """Of the module, and of an input."""
    module = f"neuralop.{module}"
    called = lambda _, x: call(importlib.import_module(module), x)  # noqa: E731
    return Network(lambda _: nn.Identity(), shape, dim, called, reduced=4.0)


def conditioned(norm: Any, x: Tensor) -> Tensor:
    norm.set_embedding(torch.ones(4, dtype=x.dtype))
    result: Tensor = norm(x)
    return result


def burgers(package: Any, x: Tensor) -> Tensor:
    residual: Tensor = package.BurgersEqnLoss(method="fdm", loss=mse_loss, domain_length=[1.0, 1.0])(x)
    return residual


LAYERS: dict[str, Network] = {
    "AdaIN": layer("layers.normalization_layers", "AdaIN", 4, 3, shape=(1, 3, 16, 12), call=conditioned),
    "DomainPadding": layer(
        "layers.padding", "DomainPadding", 0.3, call=lambda padding, x: padding.unpad(padding.pad(x).sin())
    ),
    "FiniteDifferenceConvolution": layer(
        "layers.differential_conv", "FiniteDifferenceConvolution", 3, 4, 2, call=lambda slopes, x: slopes(x, 0.1)
    ),
    "GridEmbeddingND": layer("layers.embeddings", "GridEmbeddingND", 3, 2),
    "SinusoidalEmbedding": layer("layers.embeddings", "SinusoidalEmbedding", 2, 4, shape=(2, 13, 2), dim=1),
    "SoftGating": layer("layers.skip_connections", "SoftGating", 3, None, 2),
    "resample": function("layers.resample", lambda m, x: m.resample(x, 1.5, [-2, -1]), (2, 3, 16, 12), 2),
    "BurgersEqnLoss": function("losses.equation_losses", burgers, (2, 1, 16, 12), 2),
    "FiniteDiff": function(
        "losses.differentiation", lambda m, x: m.FiniteDiff(dim=2, h=(0.1, 0.1)).laplacian(x), (2, 16, 12), 1
    ),
    "FourierDiff": function(
        "losses.differentiation", lambda m, x: m.FourierDiff(dim=2, L=(1.0, 1.0)).dx(x), (2, 16, 12), 1
    ),
}
NETWORKS = {**{name: replace(network, make=doubled(network.make)) for name, network in MODELS.items()}, **LAYERS}


test_networks_are_exact = all_exact(__name__, NETWORKS)


def losses(n_dim: int) -> dict[str, Any]:
    """Of predictions and targets, both of which may be sharded."""
    package, found = importlib.import_module(PACKAGE).losses, {}
    for reduction in ("sum", "mean"):
        for p in (1, 2):
            lp = package.LpLoss(d=n_dim, p=p, reduction=reduction)
            found |= {f"L{p} {reduction}": lp, f"L{p} absolute {reduction}": lp.abs}
        h1 = package.H1Loss(d=n_dim, reduction=reduction)
        found |= {f"H1 {reduction}": h1, f"H1 absolute {reduction}": h1.abs}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("n_dim", [1, 2, 3])
@on_ranks(2, timeout=300.0)
def test_losses_are_exact(n_dim):
    shape = {1: (2, 3, 16), 2: (2, 3, 12, 10), 3: (2, 1, 8, 6, 6)}[n_dim]
    prediction, target = torch.randn(2, *shape, dtype=torch.float64, generator=seeded(0))
    for name, loss in losses(n_dim).items():
        leaf = prediction.clone().requires_grad_()
        expected = loss(leaf, target)
        expected.backward()
        for dim in (0, *range(2, len(shape))):
            sizes = {0: (shape[dim] - 1, 1) if dim == 0 else (shape[dim] - 2, 2)}
            for given in (target, shard(target, shared_mesh(2), [Shard(dim)], sizes)):
                x = shard(prediction, shared_mesh(2), [Shard(dim)], sizes).requires_grad_()
                found = loss(x, given)
                found.backward()
                assert_near(found.full_tensor(), expected, 1e-9, name=f"{name}, dim {dim}")
                assert_near(x.grad.full_tensor(), leaf.grad, 1e-9, name=f"gradient of {name}, dim {dim}")


@pytest.mark.slow
@on_ranks(2, timeout=300.0)
def test_differences_at_boundaries():
    """Differences at boundaries that are not periodic are written to single rows and columns."""
    loss = importlib.import_module(PACKAGE).losses.H1Loss(d=2, periodic_in_x=False, periodic_in_y=False)
    prediction, target = torch.randn(2, 2, 3, 12, 10, dtype=torch.float64, generator=seeded(0))
    expected = loss(prediction, target)
    for dim, sizes in ((2, (8, 4)), (3, (7, 3))):
        x, y = (shard(t, shared_mesh(2), [Shard(dim)], {0: sizes}) for t in (prediction, target))
        assert_near(loss(x, y).full_tensor(), expected, 1e-9, name=f"dim {dim}")
        leaf = prediction.clone().requires_grad_()
        loss(leaf, target).backward()
        loss(x.requires_grad_(), y).backward()
        assert_near(x.grad.full_tensor(), leaf.grad, 1e-9, name=f"gradient, dim {dim}")
