"""What MONAI has around its networks: losses, inference in windows, diffusion, metrics, filters and transforms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from seeded import seeded
from torch import Tensor, nn

from networks.oracle import Network, all_exact, all_refused, integers, text
from networks.programs import load

PACKAGE = "monai"
pytest.importorskip(PACKAGE)

IMAGES, BINARY, VOLUME, POINTS = (2, 3, 24, 16), (1, 2, 12, 10), (1, 3, 8, 8, 8), (8, 6)


def exact(make: Callable[[Any], Any], shape: tuple[int, ...], dim: int = 2, **options: Any) -> Network:
    return Network(make, shape, dim, **{"tolerance": 1e-10, "reduced": 100.0, **options})


def of(function: Callable[[Any], Any], shape: tuple[int, ...], dim: int = 2, **options: Any) -> Network:
    """A function of the input alone."""
    return exact(lambda _: nn.Identity(), shape, dim, call=lambda _, x: function(x), **options)


def other(x: Tensor, draw: Callable[..., Tensor] = torch.randn) -> Tensor:
    """An input like this one, the same on every rank."""
    return draw(x.shape, generator=seeded(1), dtype=x.dtype)


def classes(x: Tensor) -> Tensor:
    """A class of each pixel, in a channel."""
    return torch.randint(0, x.shape[1], (x.shape[0], 1, *x.shape[2:]), generator=seeded(1))


def one_hot(x: Tensor) -> Tensor:
    return nn.functional.one_hot(classes(x)[:, 0], x.shape[1]).movedim(-1, 1).to(x.dtype)


# -- losses ----------------------------------------------------------------------------------------------------------


def loss(
    name: str,
    target: Callable[[Tensor], Tensor] = one_hot,
    shape: tuple[int, ...] = IMAGES,
    cut: int = 2,
    of: Callable[[Tensor], Tensor] = lambda x: x,
    tolerance: float = 1e-10,
    **options: Any,
) -> Network:
    """The loss ``name`` of what ``of`` makes of the input."""

    def call(criterion: nn.Module, x: Tensor) -> Any:
        y = of(x)
        return criterion(y, target(y))

    return exact(lambda m: getattr(m.losses, name)(**options), shape, cut, call=call, tolerance=tolerance)


def brighter(x: Tensor) -> Tensor:
    return other(x, torch.rand)


def boxes(x: Tensor) -> Tensor:
    return torch.cat([x[:, :2], x[:, :2] + x[:, 2:].abs() + 0.1], 1)


def unit_boxes(x: Tensor) -> Tensor:
    return torch.tensor([[0.0, 0.0, 1.0, 1.0]], dtype=x.dtype).expand(x.shape[0], 4)


DISTANCES = numpy.array([[0.0, 1.0, 1.0], [1.0, 0.0, 0.5], [1.0, 0.5, 0.0]])
LOSSES = {
    "DiceLoss": loss("DiceLoss", softmax=True),
    "DiceLoss, classes": loss(
        "DiceLoss",
        classes,
        to_onehot_y=True,
        softmax=True,
        include_background=False,
        jaccard=True,
        squared_pred=True,
        reduction="none",
    ),
    "GeneralizedDiceLoss": loss("GeneralizedDiceLoss", softmax=True),
    "GeneralizedWassersteinDiceLoss": loss(
        "GeneralizedWassersteinDiceLoss", lambda x: classes(x)[:, 0], dist_matrix=DISTANCES
    ),
    "DiceCELoss": loss("DiceCELoss", classes, softmax=True, to_onehot_y=True),
    "DiceFocalLoss": loss("DiceFocalLoss", sigmoid=True, tolerance=1e-6),  # which computes in float32
    "GeneralizedDiceFocalLoss": loss("GeneralizedDiceFocalLoss", sigmoid=True, tolerance=1e-6),
    "SoftclDiceLoss": loss("SoftclDiceLoss", softmax=True),
    "SoftDiceclDiceLoss": loss("SoftDiceclDiceLoss", sigmoid=True),
    "FocalLoss": loss("FocalLoss", classes, use_softmax=True, alpha=0.3, to_onehot_y=True, tolerance=1e-6),
    "TverskyLoss": loss("TverskyLoss", softmax=True, alpha=0.3, beta=0.7, batch=True),
    "LocalNormalizedCrossCorrelationLoss": loss(
        "LocalNormalizedCrossCorrelationLoss", other, spatial_dims=2, kernel_type="gaussian", kernel_size=5
    ),
    "LocalNormalizedCrossCorrelationLoss, box": loss(
        "LocalNormalizedCrossCorrelationLoss", other, spatial_dims=2, kernel_size=5
    ),
    "GlobalMutualInformationLoss": loss("GlobalMutualInformationLoss", brighter, of=torch.sigmoid),
    "GlobalMutualInformationLoss, splines": loss(
        "GlobalMutualInformationLoss", brighter, of=torch.sigmoid, kernel_type="b-spline"
    ),
    "JukeboxLoss": loss("JukeboxLoss", other, spatial_dims=2),
    "NACLLoss": loss("NACLLoss", lambda x: classes(x)[:, 0], classes=3, dim=2),
    "AsymmetricUnifiedFocalLoss": loss("AsymmetricUnifiedFocalLoss", of=lambda x: x[:, :2].softmax(1)),
    "SSIMLoss": loss("SSIMLoss", brighter, of=torch.sigmoid, spatial_dims=2, win_size=5, tolerance=1e-6),
    "MCCLoss": loss("MCCLoss", softmax=True),
    "LogHausdorffDTLoss": loss("LogHausdorffDTLoss", sigmoid=True, include_background=True),
    "BoundaryLoss": loss("BoundaryLoss", sigmoid=True),
    "BendingEnergyLoss": exact(lambda m: m.losses.BendingEnergyLoss(normalize=True), (1, 3, 12, 12, 12)),
    "DiffusionLoss": exact(lambda m: m.losses.DiffusionLoss(), (2, 2, 24, 16), 3),
    "ContrastiveLoss": loss("ContrastiveLoss", other, POINTS, 0),
    "BarlowTwinsLoss": loss("BarlowTwinsLoss", other, POINTS, 0),
    "MultiScaleLoss": loss("MultiScaleLoss", other, (1, 1, 16, 16, 16), loss=nn.MSELoss(), scales=[0, 1, 2]),
    "SURELoss": exact(
        lambda m: m.losses.SURELoss(perturb_noise=text(2, 1, 16, 12)),
        (2, 1, 16, 12),
        call=lambda criterion, x: criterion(lambda y: y.tanh() * 2, x, x.detach(), None),
    ),
    "AUCMLoss": loss("AUCMLoss", lambda x: (other(x) > 0).to(x.dtype), (13, 1), 0, torch.sigmoid),
    "BoxGIoULoss": loss("BoxGIoULoss", unit_boxes, (13, 4), 0, boxes, 1e-6),
    "PatchAdversarialLoss": exact(
        lambda m: m.losses.PatchAdversarialLoss(criterion="hinge"),
        (2, 1, 16, 12),
        call=lambda criterion, x: criterion([x, x[:, :, ::2] * 2], True, True),
    ),
}

# -- inference, diffusion --------------------------------------------------------------------------------------------


def convolutions(_: Any) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))


def inferred(
    make: Callable[[Any], Callable[..., Any]], shape: tuple[int, ...], dim: int = 2, **options: Any
) -> Network:
    return exact(
        convolutions, shape, dim, call=lambda network, x: make(load("monai.inferers"))(x, network), **options
    )


def unet(attention: bool) -> Callable[[Any], nn.Module]:
    options = {"num_res_blocks": 1, "channels": (8,), "norm_num_groups": 4, "num_head_channels": 8}
    return lambda m: m.networks.nets.DiffusionModelUNet(2, 1, 1, attention_levels=(attention,), **options)


def scheduler(name: str, **options: Any) -> Any:
    return getattr(load("monai.networks.schedulers"), name)(num_train_timesteps=20, **options)


def denoised(network: nn.Module, x: Tensor) -> Any:
    infer = load("monai.inferers").DiffusionInferer(scheduler("DDPMScheduler"))
    return infer(x, network, other(x), torch.tensor([3, 3]))


def sampled(name: str, options: dict[str, Any], network: nn.Module, x: Tensor) -> Any:
    steps = scheduler(name, **options)
    steps.set_timesteps(3)
    return load("monai.inferers").DiffusionInferer(steps).sample(x, network, steps, verbose=False)


INFERENCE = {
    "SlidingWindowInferer": inferred(
        lambda i: i.SlidingWindowInferer((16, 16), 2, 0.25, mode="gaussian"), (1, 1, 40, 32)
    ),
    "SlidingWindowInferer, constant": inferred(lambda i: i.SlidingWindowInferer((16, 12), 3, 0.5), (2, 1, 40, 30), 3),
    "SliceInferer": inferred(
        lambda i: i.SliceInferer(roi_size=(24, 16), spatial_dim=0), (1, 1, 6, 24, 16), 3, backward=False
    ),
    "SimpleInferer": inferred(lambda i: i.SimpleInferer(), (1, 1, 24, 16)),
    "PatchInferer": inferred(
        lambda i: i.PatchInferer(i.SlidingWindowSplitter((16, 16), 0.5)), (1, 1, 32, 32), backward=False
    ),
    "DiffusionInferer": exact(unet(True), (2, 1, 16, 16), call=denoised),
    **{
        f"DiffusionInferer, {name}": exact(
            unet(False), (2, 1, 16, 16), call=partial(sampled, name, options), backward=False, tolerance=1e-6
        )
        for name, options in {
            "DDIMScheduler": {},
            "DDPMScheduler": {},
            "PNDMScheduler": {"skip_prk_steps": True},
        }.items()
    },
}

# -- metrics ---------------------------------------------------------------------------------------------------------


def positive(x: Tensor) -> Tensor:
    return (x > 0).to(x.dtype)


def of_masks(name: str, shape: tuple[int, ...] = IMAGES, **options: Any) -> Network:
    return of(
        lambda x: getattr(load("monai.metrics"), name)(positive(x), positive(other(x)), **options),
        shape,
        backward=False,
    )


def metric(
    make: Callable[[Any], Callable[..., Any]],
    shape: tuple[int, ...] = IMAGES,
    dim: int = 2,
    of_both: Callable[[Tensor], Tensor] = lambda x: x,
    **options: Any,
) -> Network:
    return of(lambda x: make(load("monai.metrics"))(of_both(x), of_both(other(x))), shape, dim, **options)


METRICS = {
    **{
        name: of_masks(name)
        for name in ("compute_dice", "compute_iou", "compute_generalized_dice", "get_confusion_matrix")
    },
    "compute_hausdorff_distance": of_masks("compute_hausdorff_distance", BINARY, include_background=True),
    "compute_average_surface_distance": of_masks("compute_average_surface_distance", BINARY, include_background=True),
    "compute_roc_auc": of(
        lambda x: load("monai.metrics").compute_roc_auc(x[:, 0], positive(other(x)[:, 0])), (21, 1), 0, backward=False
    ),
    "SSIMMetric": metric(lambda m: m.SSIMMetric(2, win_size=5), (2, 1, 24, 16), of_both=torch.sigmoid, tolerance=1e-6),
    "PSNRMetric": metric(lambda m: m.PSNRMetric(1.0), of_both=torch.sigmoid),
    "MMDMetric": metric(lambda m: m.MMDMetric(), POINTS, 0),
    "RMSEMetric": metric(lambda m: m.RMSEMetric()),
    "MultiScaleSSIMMetric": metric(
        lambda m: m.MultiScaleSSIMMetric(2, kernel_size=3, weights=[0.5, 0.5]), (1, 1, 32, 32), of_both=torch.sigmoid
    ),
}

# -- filters, warps and transforms -----------------------------------------------------------------------------------


def filtered(make: Callable[[Any], Callable[..., Any]], **options: Any) -> Network:
    return of(lambda x: make(load("monai.networks.layers"))(x), (1, 2, 24, 16), **options)


def affine(x: Tensor) -> Any:
    matrix = torch.tensor([[1.0, 0.1, 0.1], [0.0, 0.9, 0.2]], dtype=x.dtype)
    return load("monai.networks.layers").AffineTransform(normalized=True)(x, matrix)


FILTERS = {
    "GaussianFilter": filtered(lambda layers: layers.GaussianFilter(2, 1.0)),
    "MedianFilter": filtered(lambda layers: layers.MedianFilter(1, spatial_dims=2)),
    "SavitzkyGolayFilter": filtered(lambda layers: layers.SavitzkyGolayFilter(5, 2, axis=2), tolerance=1e-6),
    "HilbertTransform": filtered(lambda layers: layers.HilbertTransform(2)),
    "apply_filter": filtered(lambda layers: lambda x: layers.apply_filter(x, torch.ones(3, 3, dtype=x.dtype))),
    "AffineTransform": of(affine, (1, 2, 24, 16)),
    "Warp": of(lambda x: load("monai.networks.blocks").Warp()(other(x)[:, :1], x), (1, 2, 24, 24)),
    "DVF2DDF": of(lambda x: load("monai.networks.blocks").DVF2DDF(3)(x), VOLUME),
    "MaxAvgPool": exact(lambda m: m.networks.blocks.MaxAvgPool(2, 2), (1, 3, 32, 24)),
    "SimpleASPP": exact(lambda m: m.networks.blocks.SimpleASPP(2, 3, 4), (1, 3, 32, 24), train=True),
    "one_hot": of(lambda x: load("monai.networks.utils").one_hot(x, 10), (2, 1, 13, 9), draw=integers(10)),
    "AsDiscrete": of(
        lambda x: load("monai.transforms").AsDiscrete(argmax=True, to_onehot=3)(x), (3, 13, 9), 1, backward=False
    ),
    "LabelFilter": of(
        lambda x: load("monai.transforms").LabelFilter([1, 2])(x), (1, 13, 9), 1, draw=integers(4)
    ),
}
NETWORKS = {**LOSSES, **INFERENCE, **METRICS, **FILTERS}
AS_ARRAY = "numpy: no rank holds all values"
AS_SUBCLASS = "as_subclass: a ShardTensor cannot be of class MetaTensor, too"
REFUSED = {
    "LogHausdorffDTLoss": AS_ARRAY,
    "compute_roc_auc": AS_ARRAY,
    "compute_hausdorff_distance": AS_SUBCLASS,
    "compute_average_surface_distance": AS_SUBCLASS,
    "AsDiscrete": AS_SUBCLASS,
    "LabelFilter": AS_SUBCLASS,
}


test_programs_are_exact = all_exact(__name__, [name for name in NETWORKS if name not in REFUSED], ["MaxAvgPool"])
test_what_is_refused_is_refused_on_every_rank = all_refused(__name__, REFUSED)
