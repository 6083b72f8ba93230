"""The schedulers of diffusers, each in a few steps with a convolution as the network."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from networks.oracle import Network, all_exact
from networks.programs import drawn_whole

PACKAGE = "diffusers"
diffusers = pytest.importorskip(PACKAGE)

IMAGES, TIMES = (2, 3, 16, 13), torch.tensor([3, 700])


def denoised(network: nn.Module, x: Tensor, name: str, **options: Any) -> Tensor:
    scheduler = getattr(diffusers, name)(**options)
    scheduler.set_timesteps(4)
    x = x * float(getattr(scheduler, "init_noise_sigma", 1.0))
    with drawn_whole():
        for t in scheduler.timesteps:
            scaled = scheduler.scale_model_input(x, t) if hasattr(scheduler, "scale_model_input") else x
            x = scheduler.step(network(scaled), t, x).prev_sample
    return x


def noised(network: nn.Module, x: Tensor) -> Tensor:
    noise = torch.randn(x.shape, dtype=x.dtype)
    result: Tensor = network(diffusers.DDPMScheduler().add_noise(x, noise, TIMES))
    return result


def velocity(network: nn.Module, x: Tensor) -> Tensor:
    noise = torch.randn(x.shape, dtype=x.dtype)
    result: Tensor = network(diffusers.DDIMScheduler().get_velocity(x, noise, TIMES))
    return result


def scheduled(call: Any) -> Network:
    # The tables of the schedulers are float32.
    return Network(lambda _: nn.Conv2d(3, 3, 3, padding=1), IMAGES, call=call, tolerance=1e-6, reduced=30.0)


SCHEDULERS = """
    CMStochasticIterative DDIM DDIMInverse DDPM DEISMultistep DPMSolverMultistep DPMSolverSinglestep
    EDMDPMSolverMultistep EDMEuler EulerAncestralDiscrete EulerDiscrete FlowMatchEulerDiscrete FlowMatchHeunDiscrete
    HeunDiscrete IPNDM KDPM2AncestralDiscrete KDPM2Discrete LCM LMSDiscrete PNDM SASolver TCD UnCLIP UniPCMultistep
"""
NETWORKS = {
    **{name: scheduled(partial(denoised, name=f"{name}Scheduler")) for name in SCHEDULERS.split()},
    "DDIM, thresholds": scheduled(partial(denoised, name="DDIMScheduler", thresholding=True)),
    "noise": scheduled(noised),
    "velocity": scheduled(velocity),
}


test_networks_are_exact = all_exact(__name__, NETWORKS, always=("DDIM",))
