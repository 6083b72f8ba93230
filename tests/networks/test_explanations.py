"""Explanations and attacks of captum, whose gradients are taken by the method itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from networks.oracle import Network, all_exact
from networks.programs import drawn_whole, load

PACKAGE = "torch"
pytest.importorskip("captum")

IMAGES = (2, 3, 24, 16)
BANDS = (torch.arange(24) // 8).view(1, 1, 24, 1).repeat(1, 3, 1, 16)  # features that are left out together
STRIPES = torch.arange(6).view(1, 1, 6, 1).repeat(1, 1, 4, 1).expand(1, 3, 24, 16)
ONE_FEATURE = torch.zeros(1, 3, 24, 16, dtype=torch.long)


def classifier(_: Any) -> nn.Module:
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), *pooled)


def method(name: str, *arguments: Any) -> Any:
    return getattr(load("captum.attr"), name)(*arguments)


def explained(call: Callable[[Any, Tensor], Any], graph: bool, network: nn.Module, x: Tensor) -> Any:
    x = x.detach().requires_grad_() if graph else x
    numpy.random.seed(1)  # of which the methods take numbers, too
    with drawn_whole():
        return call(network, x)


def explanation(call: Callable[[Any, Tensor], Any], graph: bool = True, **options: Any) -> Network:
    """A method on a classifier. With ``graph``, the method differentiates the network's result by the image."""
    options = {"backward": False, "reduced": 30.0, **options}
    return Network(classifier, IMAGES, call=partial(explained, call, graph), **options)


def by_layer(name: str, **options: Any) -> Network:
    options = {"target": 1, **options}
    return explanation(lambda network, x: method(name, network, network[0]).attribute(x, **options))


def by_neuron(name: str, **options: Any) -> Network:
    return explanation(lambda network, x: method(name, network, network[0]).attribute(x, (1, 3, 4), **options))


def by_features(name: str, mask: Tensor, samples: int = 0, images: int = 2, **options: Any) -> Network:
    """Features are left out, as ``mask`` numbers them."""
    given = {"target": 1, "feature_mask": mask, **({"n_samples": samples} if samples else {})}
    return explanation(lambda network, x: method(name, network).attribute(x[:images], **given), graph=False, **options)


def infidelity(network: nn.Module, x: Tensor) -> Tensor:
    def perturbed(image: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(image) * 0.01, image - 0.01

    error: Tensor = load("captum.metrics").infidelity(network, perturbed, x, x * 0.1, target=1, n_perturb_samples=2)
    return error


def sensitivity(network: nn.Module, x: Tensor) -> Tensor:
    saliency = method("Saliency", network).attribute
    largest: Tensor = load("captum.metrics").sensitivity_max(saliency, x, target=1, n_perturb_samples=2)
    return largest


def attacked(network: nn.Module, x: Tensor, name: str, *steps: float, **options: Any) -> Tensor:
    attack = getattr(load("captum.robust"), name)(network, lower_bound=-2, upper_bound=2)
    changed: Tensor = attack.perturb(x, *steps, target=torch.tensor([1, 2]), **options)
    return changed


NETWORKS = {
    "DeepLiftShap": explanation(
        lambda network, x: method("DeepLiftShap", network).attribute(
            x, baselines=torch.cat([x, x * 0.5]).detach(), target=1
        )
    ),
    "GradientShap": explanation(
        lambda network, x: method("GradientShap", network).attribute(x, baselines=x.detach() * 0, target=1, n_samples=3)
    ),
    "LRP": explanation(  # which has no rule for Flatten
        lambda network, x: method("LRP", network[:3]).attribute(x, target=(1, 0, 0))
    ),
    "NoiseTunnel": explanation(
        lambda network, x: method("NoiseTunnel", method("Saliency", network)).attribute(
            x, nt_type="smoothgrad_sq", nt_samples=3, target=1
        )
    ),
    "Occlusion": explanation(
        lambda network, x: method("Occlusion", network).attribute(
            x, target=1, sliding_window_shapes=(3, 8, 8), strides=(3, 8, 8)
        ),
        graph=False,
    ),
    "FeatureAblation": by_features("FeatureAblation", STRIPES),
    "FeaturePermutation": by_features("FeaturePermutation", ONE_FEATURE),
    "ShapleyValueSampling": by_features("ShapleyValueSampling", BANDS, 2),
    # Linear regressions in float32.
    "KernelShap": by_features("KernelShap", BANDS, 6, 1, tolerance=1e-5),
    "Lime": by_features("Lime", BANDS, 6, 1, tolerance=1e-5),
    "LayerActivation": explanation(
        lambda network, x: method("LayerActivation", network, network[0]).attribute(x), graph=False
    ),
    **{name: by_layer(name) for name in ("GuidedGradCam", "LayerGradCam", "LayerDeepLift")},
    **{
        name: by_layer(name, n_steps=4)
        for name in ("LayerConductance", "LayerIntegratedGradients", "InternalInfluence")
    },
    "NeuronGradient": by_neuron("NeuronGradient"),
    "NeuronConductance": by_neuron("NeuronConductance", target=1, n_steps=4),
    "infidelity": explanation(infidelity, graph=False),
    "sensitivity": explanation(sensitivity),
    "FGSM": explanation(lambda network, x: attacked(network, x, "FGSM", 0.1)),
    "PGD": explanation(lambda network, x: attacked(network, x, "PGD", 0.2, 0.1, 3, random_start=True)),
}


test_networks_are_exact = all_exact(__name__, NETWORKS, always=("LayerGradCam",))
