"""What deepinv has for inverse problems: denoisers, measurements and their adjoints, losses, metrics, transforms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from seeded import seeded
from torch import Tensor, nn

from networks.oracle import Network, all_exact, all_refused, text
from networks.programs import drawn_whole, load

PACKAGE = "deepinv"
pytest.importorskip(PACKAGE)

SMALL, SQUARE = (1, 3, 24, 16), (1, 3, 32, 32)


Call = Callable[..., Any]


def exact(make: Callable[[Any], Any], shape: tuple[int, ...], call: Call, **options: Any) -> Network:
    return Network(make, shape, call=call, **{"tolerance": 1e-10, "reduced": 30.0, **options})


def other(x: Tensor) -> Tensor:
    """An image like this one, the same on every rank."""
    return torch.randn(x.shape, generator=seeded(1), dtype=x.dtype)


# -- denoisers -------------------------------------------------------------------------------------------------------


def of_image(network: nn.Module, x: Tensor) -> Any:
    return network(x)


def of_noisy(network: nn.Module, x: Tensor) -> Any:
    return network(x, 0.1)


def drawing(network: nn.Module, x: Tensor) -> Any:
    with drawn_whole():
        return network(x, 0.1)


def denoiser(name: str, shape: tuple[int, ...] = SQUARE, call: Call = of_noisy, **options: Any) -> Network:
    """The denoiser ``name``, of which ``options`` that a Network has not are the arguments."""
    ours = {key: options.pop(key) for key in ("train", "backward", "default", "dtype", "tolerance") if key in options}
    return exact(lambda d: getattr(d.models, name)(**options), shape, call, **ours)


def small_network(d: Any) -> nn.Module:
    network: nn.Module = d.models.DnCNN(3, 3, depth=2, nf=4, pretrained=None)
    return network


def equivariant(d: Any) -> nn.Module:
    network: nn.Module = d.models.EquivariantDenoiser(small_network(d), random=False)
    return network


OF_DIFFUSION = {"channel_mult": (1, 2), "num_blocks": 1, "attn_resolutions": (8,), "pretrained": None, "dropout": 0.0}
DENOISERS = {
    "Restormer": denoiser(
        "Restormer",
        dim=8,
        num_blocks=(1, 1, 1, 1),
        num_refinement_blocks=1,
        heads=(1, 1, 2, 2),
        pretrained=None,
    ),
    "SwinIR": denoiser(
        "SwinIR",
        img_size=32,
        embed_dim=12,
        depths=(2,),
        num_heads=(2,),
        window_size=8,
        pretrained=None,
        upsampler="",
    ),
    "ADMUNet": denoiser(
        "ADMUNet",
        (1, 3, 16, 16),
        img_resolution=16,
        model_channels=32,
        **OF_DIFFUSION,
    ),
    "SRResNet": denoiser("SRResNet", SMALL, of_image, train=True, num_blocks=1, feats=8),
    "UNet": denoiser(
        "UNet", (1, 3, 32, 24), train=True, in_channels=3, out_channels=3, scales=2, circular_padding=True
    ),
    "FFDNet": denoiser("FFDNet", (1, 3, 32, 24), n_conv_layers=3, nf=8, img_channels=3, pretrained=None),
    "DRUNet, smooth": denoiser(
        "DRUNet", train=True, in_channels=3, out_channels=3, nc=(4, 4, 4, 4), nb=1, act_mode="s", pretrained=None
    ),
    "PatchGAN": denoiser(
        "PatchGANDiscriminator", (1, 3, 64, 64), of_image, train=True, input_nc=3, ndf=8, n_layers=2
    ),
    "ICNN": denoiser("ICNN", call=of_image, in_channels=3, num_filters=8, num_layers=3),
    "ConvDecoder": denoiser(
        "ConvDecoder", (1, 8, 8, 6), of_image, img_size=(3, 32, 24), in_size=(8, 6), layers=3, channels=8
    ),
    "NCSNpp": denoiser(
        "NCSNpp",
        (1, 3, 16, 16),
        dtype=torch.float32,
        tolerance=1e-5,
        img_resolution=16,
        model_channels=32,
        **OF_DIFFUSION,
    ),
    "DScCP": denoiser("DScCP", SMALL, drawing, depth=3, n_channels_per_layer=8, pretrained=None),
    "GSDRUNet": denoiser("GSDRUNet", backward=False, default=torch.float64, nc=(4, 8, 8, 8), nb=1, pretrained=None),
    "equivariant": exact(equivariant, (1, 3, 24, 24), of_noisy),
    "wavelets": denoiser("WaveletDenoiser", (1, 3, 48, 32), level=2, wv="db4"),
    "several wavelets": denoiser(
        "WaveletDictDenoiser", (1, 3, 48, 32), backward=False, level=2, list_wv=["haar", "db2"], max_iter=3
    ),
    "TV, L1": denoiser("TVL1Denoiser", n_it_max=4),
    "bilateral": denoiser("BilateralFilter", call=of_image),
    "median": denoiser("MedianFilter", kernel_size=3),
    "noise by wavelets": denoiser("WaveletNoiseEstimator", call=of_image),
    "noise by patches": denoiser(
        "PatchCovarianceNoiseEstimator", (1, 1, 96, 80), of_image, backward=False, default=torch.float64
    ),
}

# -- measurements ----------------------------------------------------------------------------------------------------


def there_and_back(physics: Any, x: Tensor) -> Any:
    return physics.A_adjoint(physics.A(x))


def measured(
    make: Callable[[Any], Any], shape: tuple[int, ...], call: Call = there_and_back, **options: Any
) -> Network:
    return exact(lambda d: make(d.physics), shape, call, **options)


def blurred(padding: str, call: Call = there_and_back, **options: Any) -> Network:
    return exact(lambda d: d.physics.Blur(filter=text(1, 1, 5, 5).abs(), padding=padding), SMALL, call, **options)


def hazy(physics: Any, x: Tensor) -> Any:
    return physics((x, torch.full((1, 1, 40, 24), 0.5, dtype=x.dtype), torch.full((1,), 0.3, dtype=x.dtype)))


def norm(physics: Any, x: Tensor) -> Any:
    with drawn_whole():
        return physics.compute_norm(x, max_iter=5)


def coils() -> Tensor:
    return torch.complex(text(1, 3, 24, 16), text(1, 3, 24, 16))


MEASUREMENTS = {
    "Inpainting": measured(
        lambda p: p.Inpainting((3, 40, 24), mask=(text(1, 40, 24) > 0).double()), (1, 3, 40, 24)
    ),
    "Decolorize": measured(lambda p: p.Decolorize(), (1, 3, 40, 24)),
    "Haze": measured(lambda p: p.Haze(), (1, 3, 40, 24), hazy),
    "CompressiveSpectralImaging": measured(lambda p: p.CompressiveSpectralImaging((7, 24, 24)), (1, 7, 24, 24)),
    "MultiCoilMRI": measured(lambda p: p.MultiCoilMRI(coil_maps=coils(), img_size=(2, 24, 16)), (1, 2, 24, 16)),
    "SinglePixelCamera": measured(lambda p: p.SinglePixelCamera(m=20, img_size=(1, 16, 16)), (1, 1, 16, 16)),
    "Tomography": measured(
        lambda p: p.Tomography(angles=6, img_width=24, circle=False, adjoint_via_backprop=False), (1, 1, 24, 24)
    ),
    "CompressedSensing": measured(
        lambda p: p.CompressedSensing(m=20, img_size=(1, 12, 8)), (1, 1, 12, 8), dtype=torch.float32, tolerance=1e-5
    ),
    "StructuredRandom": measured(
        lambda p: p.StructuredRandom(img_size=(1, 12, 8), output_size=(1, 12, 8)), (1, 1, 12, 8)
    ),
    "SpaceVaryingBlur": measured(
        lambda p: p.SpaceVaryingBlur(
            filters=text(1, 1, 3, 5, 5).abs(), multipliers=text(1, 1, 3, 24, 16), padding="constant"
        ),
        (1, 1, 24, 16),
        at_use={
            "make": lambda _: load("deepinv.physics").SpaceVaryingBlur(
                filters=text(1, 1, 3, 5, 5).abs(), multipliers=text(1, 1, 3, 256, 64), padding="constant"
            ),
            "shape": (1, 1, 256, 64),
        },
    ),
    "HyperSpectralUnmixing": measured(lambda p: p.HyperSpectralUnmixing(E=15, C=8), (1, 15, 12, 9)),
    "Pansharpen": measured(lambda p: p.Pansharpen((3, 32, 32), factor=4), SQUARE),
    "Downsampling, pseudo-inverse": measured(
        lambda p: p.Downsampling(img_size=(3, 24, 16), factor=2, filter="gaussian", padding="circular"),
        SMALL,
        lambda physics, x: physics.A_dagger(physics.A(x)),
        tolerance=1e-8,  # of conjugate gradients, which stop at a residual
    ),
    **{f"Blur, {padding}": blurred(padding) for padding in ("reflect", "replicate", "valid")},
    "Blur, proximal": blurred(
        "circular", lambda physics, x: physics.prox_l2(x * 0.5, physics.A(x), 1.0), tolerance=1e-8
    ),
    "Blur, norm": blurred("circular", norm, backward=False),
}

# -- losses, metrics, transforms -------------------------------------------------------------------------------------


def descended(network: nn.Module, x: Tensor) -> Any:
    """Steps of proximal gradient descent with a denoiser."""
    deepinv = load("deepinv")
    physics = deepinv.physics.Blur(filter=text(1, 1, 3, 3).abs(), padding="circular")
    descent = deepinv.optim.optim_builder(
        "PGD",
        prior=deepinv.optim.prior.PnP(network),
        data_fidelity=deepinv.optim.data_fidelity.L2(),
        params_algo={"stepsize": 0.3, "g_param": 0.1},
        max_iter=3,
        unfold=False,
    )
    return descent(physics.A(x), physics)


def loss(make: Callable[[Any], Callable[..., Any]], network: nn.Module, x: Tensor) -> Any:
    """A loss of what a network makes of an image."""
    def model(y: Tensor, physics: Any) -> Any:
        return network(y, 0.1)

    deepinv = load("deepinv")
    physics = deepinv.physics.Denoising(deepinv.physics.GaussianNoise(0.0))  # of a shard, the noise would be another
    return make(deepinv)(x_net=network(x, 0.1), y=x, physics=physics, model=model)


def metric(name: str, given: Mapping[str, Any], **options: Any) -> Network:
    def call(_: nn.Module, x: Tensor) -> Any:
        return getattr(load("deepinv.loss.metric"), name)(**given)(x.sigmoid(), other(x).sigmoid())

    def of_shards(_: nn.Module, x: Tensor) -> Any:
        return getattr(load("deepinv.loss.metric"), name)(**given)(x.sigmoid(), x.flip(-1).sigmoid())

    return exact(lambda _: nn.Identity(), (1, 3, 48, 48), call, at_use={"call": of_shards}, **options)


def transform(name: str, module: str = "deepinv.transform") -> Network:
    def call(_: nn.Module, x: Tensor) -> Any:
        return getattr(load(module), name)(n_trans=1)(x)

    return exact(lambda _: nn.Identity(), (1, 3, 24, 24), call)


LOSSES = {
    "TVLoss": lambda d: d.loss.TVLoss(),
    "EILoss": lambda d: d.loss.EILoss(d.transform.Shift(n_trans=1)),
    "MCLoss": lambda d: d.loss.MCLoss(),
}
METRICS = [
    *("SSIM", "PSNR", "MSE", "NMSE", "MAE", "SpectralAngleMapper", "L1L2", "LpNorm", "BlurStrength"),
    *("SharpnessIndex", "CosineSimilarity"),
]
NETWORKS = {
    **DENOISERS,
    **MEASUREMENTS,
    "proximal gradient descent": exact(small_network, SMALL, descended, backward=False),
    **{name: exact(small_network, SMALL, partial(loss, make)) for name, make in LOSSES.items()},
    **{name: metric(name, {}) for name in METRICS},
    "ERGAS": metric("ERGAS", {"factor": 2}),
    "GMSD": metric("GMSD", {}, default=torch.float64),
    "HaarPSI": metric("HaarPSI", {}, dtype=torch.float32, tolerance=1e-5),  # for float32 only
    **{name: transform(name) for name in ("Rotate", "Shift", "Scale", "Reflect")},
    **{
        name: transform(name, "deepinv.transform.projective")
        for name in ("Homography", "Affine", "Similarity", "Euclidean", "PanTiltRotate")
    },
}
REFUSED = {
    "CompressiveSpectralImaging": "conv2d: the parameter is sharded",
}


test_networks_are_exact = all_exact(__name__, [name for name in NETWORKS if name not in REFUSED])
test_what_is_refused_is_refused_on_every_rank = all_refused(__name__, REFUSED)
