"""Measures of images and point clouds, and wavelets: piq, geomloss, ptwt; torchmetrics has its own module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from seeded import seeded
from torch import Tensor, nn

from networks.oracle import Network, all_exact
from networks.programs import load

PACKAGE = "torch"

IMAGE, POINTS, WAVE = (1, 3, 96, 80), (1, 33, 3), (3, 64)


def of(function: Callable[[Tensor], Any], shape: tuple[int, ...], dim: int, **options: Any) -> Network:
    options = {"tolerance": 1e-10, "reduced": 100.0, **options}
    return Network(lambda _: nn.Identity(), shape, dim, call=lambda _, x: function(x), **options)


def other(x: Tensor) -> Tensor:
    """An input like this one, the same on every rank."""
    return torch.randn(x.shape, generator=seeded(1), dtype=x.dtype)


# -- images ----------------------------------------------------------------------------------------------------------


def compared(name: str, shape: tuple[int, ...] = IMAGE, tolerance: float = 1e-10, **options: Any) -> Network:
    """An image with a similar one."""

    def function(x: Tensor) -> Any:
        similar = (other(x) * 0.7 + x * 0.5).detach().sigmoid()
        return getattr(load("piq"), name)(x.sigmoid(), similar, data_range=1.0, **options)

    return of(function, shape, 2, tolerance=tolerance)


MEASURES = {
    "piq, fsim": compared("fsim"),
    "piq, srsim": compared("srsim", tolerance=1e-6),  # whose filters are in float32
    "piq, multi_scale_ssim": compared("multi_scale_ssim", (1, 1, 97, 81), kernel_size=3),
    "piq, information_weighted_ssim": compared("information_weighted_ssim", (1, 1, 177, 161)),
    "piq, gmsd": compared("gmsd"),
    "piq, rgb2lab": of(lambda x: load("piq").functional.rgb2lab(x.sigmoid()), (1, 3, 64, 48), 2),
    "piq, similarity_map": of(lambda x: load("piq").functional.similarity_map(x, other(x), 0.1), (1, 3, 64, 48), 2),
    "piq, FID": of(lambda x: load("piq").FID()(x, other(x)), (24, 6), 0, tolerance=1e-6, backward=False),
    "piq, PR": of(lambda x: load("piq").PR()(x, other(x)), (24, 6), 0, tolerance=1e-7, backward=False),  # in float32
}

# -- distributions ---------------------------------------------------------------------------------------------------


def distance(x: Tensor, kind: str, **options: Any) -> Any:
    return load("geomloss").SamplesLoss(kind, backend="tensorized", **options)(x, other(x))


def weighted(x: Tensor) -> Any:
    weights = torch.full((33,), 1 / 33, dtype=x.dtype)
    return load("geomloss").SamplesLoss("energy", backend="tensorized")(weights, x, weights, other(x))


DISTANCES = {
    "geomloss, Laplacian": of(lambda x: distance(x, "laplacian"), POINTS, 1),
    "geomloss, weights": of(weighted, (33, 3), 0),
    "geomloss, unbalanced": of(
        lambda x: distance(x, "sinkhorn", blur=0.3, reach=1.0, debias=False).sum(), POINTS, 1
    ),
}

# -- wavelets --------------------------------------------------------------------------------------------------------


def wavelets(
    function: Callable[[Any, Tensor], Any], shape: tuple[int, ...] = WAVE, dim: int = 1, **options: Any
) -> Network:
    return of(lambda x: function(load("ptwt"), x), shape, dim, **options)


def of_image(function: Callable[[Any, Tensor], Any]) -> Network:
    return wavelets(function, (2, 3, 48, 32), 2)


def mexican_hat(p: Any, x: Tensor) -> Any:
    return p.cwt(x, torch.tensor([1.0, 2.0, 4.0]), load("pywt").ContinuousWavelet("mexh"))[0]


WAVELETS = {
    "ptwt, wavedec": wavelets(lambda p, x: p.wavedec(x, "db3", level=2, mode="zero"), (3, 101)),
    "ptwt, waverec": wavelets(
        lambda p, x: p.waverec(p.wavedec(x, "sym4", level=2, mode="symmetric"), "sym4"), (3, 101)
    ),
    "ptwt, wavedec3": wavelets(lambda p, x: p.wavedec3(x, "haar", level=1), (1, 16, 12, 8)),
    "ptwt, waverec3": wavelets(lambda p, x: p.waverec3(p.wavedec3(x, "haar", level=1), "haar"), (1, 16, 12, 8), 2),
    "ptwt, iswt": wavelets(lambda p, x: p.iswt(p.swt(x, "db2", level=2), "db2")),
    "ptwt, WaveletPacket": wavelets(lambda p, x: p.WaveletPacket(x, "haar", maxlevel=2)["ad"]),
    "ptwt, cwt": wavelets(mexican_hat, tolerance=1e-6),
    "ptwt, MatrixWavedec": wavelets(lambda p, x: p.MatrixWavedec("db2", level=2)(x)),
    "ptwt, periodic": of_image(lambda p, x: p.wavedec2(x, "db2", level=1, mode="periodic")),
    "ptwt, constant": of_image(lambda p, x: p.wavedec2(x, "bior2.2", level=1, mode="constant")),
    "ptwt, fswavedec2": of_image(lambda p, x: p.fswavedec2(x, "haar", level=2)),
    "ptwt, WaveletPacket2D": of_image(lambda p, x: p.WaveletPacket2D(x, "haar", maxlevel=2)["ah"]),
}
NETWORKS = {**MEASURES, **DISTANCES, **WAVELETS}


test_programs_are_exact = all_exact(
    __name__, NETWORKS, ["piq, rgb2lab", "geomloss, Laplacian", "ptwt, WaveletPacket"], of_packages=True
)
