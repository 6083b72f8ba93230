"""The networks and the diffusion processes of denoising-diffusion-pytorch: losses of noised images, and steps back."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from networks import torchvision_set_up  # noqa: F401  # before the package imports torchvision
from networks.oracle import Network, all_exact
from networks.programs import drawn_whole

PACKAGE = "denoising_diffusion_pytorch"
pytest.importorskip(PACKAGE)

IMAGES, SERIES = (2, 3, 16, 16), (2, 3, 40)
HEADS = {"attn_dim_head": 8, "attn_heads": 2}
KARRAS = {"dim": 8, "dim_max": 16, "num_downsamples": 1, "num_blocks_per_stage": 1, "attn_dim_head": 8, "channels": 3}


def of(module: str, name: str, *arguments: Any, **options: Any) -> Any:
    return getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)(*arguments, **options)


def unet(**options: Any) -> nn.Module:
    return of("denoising_diffusion_pytorch", "Unet", dim=8, dim_mults=(1, 2), flash_attn=False, **HEADS, **options)


def unet_1d() -> nn.Module:
    return of("denoising_diffusion_pytorch_1d", "Unet1D", dim=8, dim_mults=(1, 2), channels=3, **HEADS)


def uvit() -> nn.Module:
    return of("simple_diffusion", "UViT", dim=8, dim_mults=(1, 2), vit_depth=1, vit_dropout=0.0, **HEADS)


def gaussian(**options: Any) -> nn.Module:
    return of("denoising_diffusion_pytorch", "GaussianDiffusion", unet(), image_size=16, **{"timesteps": 20, **options})


def times(x: Tensor) -> Tensor:
    return torch.full((x.shape[0],), 0.3, dtype=x.dtype)


def denoiser(make: Callable[[], nn.Module], shape: tuple[int, ...], dim: int = 2, **options: Any) -> Network:
    """A network of images and the times of their noise."""
    options = {"call": lambda network, x: network(x, times(x)), "reduced": 100.0, **options}
    return Network(lambda _: make(), shape, dim, **options)


def noised(call: Callable[[nn.Module, Tensor], Any], network: nn.Module, x: Tensor) -> Any:
    with drawn_whole():
        return call(network, x)


def process(
    make: Callable[[], nn.Module],
    shape: tuple[int, ...] = IMAGES,
    call: Callable[[Any, Tensor], Any] = lambda diffusion, x: diffusion(x),
    **options: Any,
) -> Network:
    """A loss of images between 0 and 1 that get noise of their own, or whatever ``call`` gives."""
    options = {"draw": partial(torch.rand, dtype=torch.float64), "reduced": 100.0, **options}
    return Network(lambda _: make(), shape, call=partial(noised, call), default=torch.float64, **options)


DENOISERS = {
    "KarrasUnet": denoiser(lambda: of("karras_unet", "KarrasUnet", image_size=16, attn_res=(8,), **KARRAS), IMAGES),
    "KarrasUnet, training": denoiser(
        lambda: of("karras_unet", "KarrasUnet", image_size=16, attn_res=(8,), dropout=0.0, **KARRAS),
        IMAGES,
        train=True,  # its weights are normalized in place
    ),
    "KarrasUnet1D": denoiser(
        lambda: of("karras_unet_1d", "KarrasUnet1D", seq_len=32, attn_res=(16,), **KARRAS), (2, 3, 32)
    ),
    "KarrasUnet3D": denoiser(
        lambda: of(
            "karras_unet_3d",
            "KarrasUnet3D",
            image_size=8,
            frames=4,
            attn_res=(4,),
            factorize_space_time_attn=True,
            **KARRAS,
        ),
        (1, 3, 4, 8, 8),
        3,
    ),
    "MPImageTransformer": denoiser(
        lambda: of("karras_unet", "MPImageTransformer", dim=16, depth=1, dim_head=8, heads=2),
        (1, 16, 12, 9),
        call=lambda network, x: network(x),
    ),
    "Unet1D": denoiser(unet_1d, SERIES),
    "Unet, conditioned on itself": denoiser(
        lambda: unet(self_condition=True, learned_sinusoidal_cond=True),
        (2, 3, 24, 16),
        call=lambda network, x: network(x, times(x), x * 0.5),
    ),
    "UViT": denoiser(uvit, IMAGES),
    "Unet, guided": denoiser(
        lambda: of("classifier_free_guidance", "Unet", dim=8, num_classes=4, dim_mults=(1, 2), **HEADS),
        IMAGES,
        call=lambda network, x: network.forward_with_cond_scale(x, times(x), torch.tensor([1, 3]), cond_scale=2.0),
    ),
}
PROCESSES = {
    "GaussianDiffusion1D": process(
        lambda: of("denoising_diffusion_pytorch_1d", "GaussianDiffusion1D", unet_1d(), seq_length=40, timesteps=20),
        SERIES,
        tolerance=1e-5,
    ),
    "GaussianDiffusion": process(lambda: gaussian(offset_noise_strength=0.1, min_snr_loss_weight=True)),
    "GaussianDiffusion, DDIM": process(
        lambda: gaussian(sampling_timesteps=3),
        call=lambda diffusion, x: diffusion.model_predictions(x, torch.tensor([3, 4]), clip_x_start=True),
    ),
    "GaussianDiffusion, a step": process(gaussian, call=lambda diffusion, x: diffusion.p_sample(x, 3), backward=False),
    "GaussianDiffusion, interpolation": process(
        lambda: gaussian(timesteps=3), call=lambda diffusion, x: diffusion.interpolate(x, x * 0.5, t=2), backward=False
    ),
    "ElucidatedDiffusion": process(
        lambda: of(
            "elucidated_diffusion",
            "ElucidatedDiffusion",
            unet(learned_sinusoidal_cond=True),
            image_size=16,
            num_sample_steps=3,
        )
    ),
    "LearnedGaussianDiffusion": process(
        lambda: of(
            "learned_gaussian_diffusion",
            "LearnedGaussianDiffusion",
            unet(learned_variance=True),
            image_size=16,
            timesteps=20,
            objective="pred_noise",
        )
    ),
    "WeightedObjectiveGaussianDiffusion": process(
        lambda: of(
            "weighted_objective_gaussian_diffusion",
            "WeightedObjectiveGaussianDiffusion",
            unet(out_dim=8),
            image_size=16,
            timesteps=20,
        )
    ),
    "simple GaussianDiffusion": process(
        lambda: of("simple_diffusion", "GaussianDiffusion", uvit(), image_size=16, num_sample_steps=3), train=True
    ),
    "ContinuousTimeGaussianDiffusion": process(
        lambda: of(
            "continuous_time_gaussian_diffusion",
            "ContinuousTimeGaussianDiffusion",
            unet(learned_sinusoidal_cond=True),
            image_size=16,
            noise_schedule="cosine",
        )
    ),
    "VParamContinuousTimeGaussianDiffusion": process(
        lambda: of(
            "v_param_continuous_time_gaussian_diffusion",
            "VParamContinuousTimeGaussianDiffusion",
            unet(learned_sinusoidal_cond=True),
            image_size=16,
        )
    ),
}
NETWORKS = {**DENOISERS, **PROCESSES}


test_networks_are_exact = all_exact(__name__, NETWORKS, always=("GaussianDiffusion",))
