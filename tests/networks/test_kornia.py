"""What kornia computes of images: networks, detectors and descriptors of features, filters, warps and losses."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from seeded import seeded
from torch import Tensor, nn

from networks.oracle import Network, all_exact

PACKAGE = "kornia"
pytest.importorskip(PACKAGE)


class Function(nn.Module):
    """A function of what a convolution gives, so that a gradient passes."""

    def __init__(self, function: Callable[..., Any], channels: tuple[int, int] | None = (3, 3)) -> None:
        super().__init__()
        self.conv = nn.Conv2d(*channels, 3, padding=1) if channels else nn.Identity()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.conv(x))


class SpatialTransformer(nn.Module):
    """Warps an image by a homography that a network finds in it."""

    def __init__(self, k: Any) -> None:
        super().__init__()
        self.find = nn.Sequential(
            nn.Conv2d(3, 4, 5, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 8)
        )
        self.warp = k.geometry.transform.warp_perspective

    def forward(self, x: Tensor) -> Tensor:
        entries = nn.functional.pad(self.find(x) * 0.1, (0, 1))
        homography = torch.eye(3, dtype=x.dtype) + entries.view(-1, 3, 3)
        return self.warp(x, homography, x.shape[2:])


def part(path: str, *args: Any, **options: Any) -> Callable[[Any], Any]:
    """Makes what is at a path of the package, from arguments."""

    def make(k: Any) -> Any:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(f"kornia.{module}"), name)(*args, **options)

    return make


def image(path: str, *args: Any, shape: tuple[int, ...] = (2, 3, 24, 16), **options: Any) -> Network:
    return Network(part(path, *args, **options), shape, half=True)


def first(path: str, *args: Any, shape: tuple[int, ...] = (2, 3, 24, 16), **options: Any) -> Network:
    return Network(part(path, *args, **options), shape, call=lambda network, x: network(x)[0], half=True)


def function(
    path: str, *args: Any, shape: tuple[int, ...] = (2, 3, 24, 16), channels=(3, 3), **options: Any
) -> Network:
    """Called on the image, with further arguments."""

    def make(k: Any) -> nn.Module:
        module, _, name = path.rpartition(".")
        called = getattr(importlib.import_module(f"kornia.{module}"), name)

        def given(x: Tensor) -> Any:
            return called(x, *[a(x) if callable(a) else a for a in args], **options)

        return Function(given, channels)

    return Network(make, shape, half=True)


def described(network: nn.Module, x: Tensor) -> Tensor:
    """Descriptors have the length 1, so their mean square has no gradient."""
    return network(x).exp()


def patches(path: str, size: int, *args: Any, dim: int = 0, **options: Any) -> Network:
    return Network(part(path, *args, **options), (6, 1, size, size), dim, described, norms_train=True, half=True)


def other(x: Tensor) -> Tensor:
    """Another image of the same size."""
    return torch.rand(x.shape, generator=seeded(1), dtype=x.dtype)


def classes(x: Tensor) -> Tensor:
    """Of each pixel."""
    return torch.randint(x.shape[1], (x.shape[0], *x.shape[2:]), generator=seeded(1))


def binary(x: Tensor) -> Tensor:
    return (torch.rand((x.shape[0], *x.shape[2:]), generator=seeded(1)) > 0.5).long()


def loss(path: str, *args: Any, target=other, shape=(2, 3, 24, 16), channels=(3, 3), **options: Any) -> Network:
    def make(k: Any, target=target) -> nn.Module:
        criterion = part(f"losses.{path}", *args, **options)(k)
        return Function(lambda x: criterion(x, target(x)), channels)

    of_shards = partial(make, target=lambda x: x.flip(-1))
    return Network(make, shape, half=True, at_use={"make": of_shards} if target is other else {})


def matrix(rows: int, std: float = 0.05) -> Callable[[Tensor], Tensor]:
    """Near to the identity, for each image."""

    def make(x: Tensor) -> Tensor:
        noise = torch.randn(x.shape[0], rows, 3, generator=seeded(1), dtype=x.dtype)
        return torch.eye(3, dtype=x.dtype)[:rows] + std * noise

    return make


FILTERS = {
    "bilateral": image("filters.BilateralBlur", 3, 0.5, (1.5, 1.5)),
    "blur pool": image("filters.BlurPool2D", 3),
    "box": image("filters.BoxBlur", (3, 5)),
    "edge aware pool": Network(
        lambda k: Function(lambda x: k.filters.EdgeAwareBlurPool2D(3)(x.sigmoid())), (2, 3, 24, 16), half=True
    ),
    "Gaussian": image("filters.GaussianBlur2d", (5, 3), (1.5, 1.0)),
    "guided": Network(
        lambda k: Function(lambda x: k.filters.guided_blur(other(x), x, 3, 0.1)),
        (2, 3, 24, 16),
        half=True,
        at_use={"make": lambda k: Function(lambda x: k.filters.guided_blur(x.flip(-1), x, 3, 0.1))},
    ),
    "guided by itself": Network(
        lambda k: Function(lambda x: k.filters.guided_blur(x, x, 3, 0.1)), (2, 3, 24, 16), half=True
    ),
    "joint bilateral": Network(
        lambda k: Function(lambda x: k.filters.joint_bilateral_blur(x, other(x), 3, 0.5, (1.5, 1.5))),
        (2, 3, 24, 16),
        half=True,
    ),
    "Laplacian": image("filters.Laplacian", 5),
    "max blur pool": image("filters.MaxBlurPool2D", 3),
    "median": image("filters.MedianBlur", 3),
    "motion": image("filters.MotionBlur", 5, 30.0, 0.5),
    "motion of volumes": image("filters.MotionBlur3D", 3, (10.0, 20.0, 30.0), 0.5, shape=(1, 2, 8, 8, 8)),
    "Canny": first("filters.Canny"),
    "Sobel": image("filters.Sobel"),
    "gradient": image("filters.SpatialGradient"),
    "second gradient": image("filters.SpatialGradient", order=2),
    "gradient of volumes": Network(part("filters.SpatialGradient3d"), (1, 2, 8, 8, 8), half=True),
    "unsharp": image("filters.UnsharpMask", (3, 3), (1.5, 1.5)),
    "in range": image("filters.InRange", (-0.5,) * 3, (0.5,) * 3),
    "filter by FFT": function("filters.fft_conv", torch.ones(1, 3, 3, dtype=torch.float64)),
    "dilation": function("morphology.dilation", torch.ones(3, 3)),
    "opening": function("morphology.opening", torch.ones(3, 3)),
    "morphological gradient": function("morphology.gradient", torch.ones(3, 3)),
    "distances": image("contrib.DistanceTransform"),
}
FEATURES = {
    "Harris": image("feature.CornerHarris", 0.04),
    "GFTT": image("feature.CornerGFTT"),
    "Hessian": image("feature.BlobHessian"),
    "DoG": image("feature.BlobDoG", shape=(1, 1, 4, 16, 16)),
    "DoG of one": image("feature.BlobDoGSingle"),
    "KeyNet": image("feature.KeyNet", False, shape=(1, 1, 48, 32)),
    "HardNet": patches("feature.HardNet", 32, False),
    "HardNet8": patches("feature.HardNet8", 32, False, dim=2),
    "HyNet": patches("feature.HyNet", 32, False),
    "HyNet in rows": patches("feature.HyNet", 32, False, dim=2),
    "SOSNet": patches("feature.SOSNet", 32, False),
    "TFeat": patches("feature.TFeat", 32, False),
    "TFeat in rows": patches("feature.TFeat", 32, False, dim=2),
    "OriNet": patches("feature.OriNet", 32, False),
    "AffNet": Network(lambda k: k.feature.LAFAffNetShapeEstimator(False).features, (6, 1, 32, 32), 0),
    "MKD": patches("feature.MKDDescriptor", 32, whitening=None),
    "SIFT": patches("feature.SIFTDescriptor", 32, 32),
    "SIFT in rows": patches("feature.SIFTDescriptor", 32, 32, dim=2),
    "dense SIFT": Network(part("feature.DenseSIFTDescriptor"), (1, 1, 24, 16), call=described, half=True),
    "orientation": Network(part("feature.PatchDominantGradientOrientation", 32), (6, 1, 32, 32), 0),
    "DISK": Network(
        lambda k: k.feature.DISK(16),
        (1, 3, 32, 32),
        call=lambda network, x: torch.cat(network.heatmap_and_dense_descriptors(x), 1),
        half=True,
    ),
    "XFeat": Network(
        part("feature.xfeat.XFeatModel"),
        (1, 3, 64, 64),
        call=lambda network, x: network(x)[0] + x.mean(),
        norms_train=True,
        half=True,
    ),
    "ALIKED": Network(
        part("feature.ALIKED", "aliked-t16"),
        (1, 3, 64, 64),
        call=lambda network, x: network.extract_dense_map(x)[0].exp(),
        norms_train=True,
    ),
    "LoFTR": Network(
        lambda k: k.feature.LoFTR(None).backbone,
        (1, 1, 64, 64),
        call=lambda network, x: network(x)[1],
        norms_train=True,
        half=True,
    ),
    "LoFTR coarse": Network(
        lambda k: k.feature.LoFTR(None).loftr_coarse,
        (1, 24, 256),
        1,
        call=lambda network, x: network(x, x.flip(1))[0],
        reduced=1.0,
        half=True,
    ),
    "SOLD2": Network(
        lambda k: k.feature.SOLD2_detector(False).model,
        (1, 1, 64, 64),
        call=lambda network, x: network(x)["heatmap"],
        half=True,
    ),
    "DeFMO": Network(lambda k: k.feature.DeFMO(False).encoder, (1, 6, 64, 64), norms_train=True),
}
VIT = {"image_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
MODELS = {
    "ViT": Network(part("models.vit.VisionTransformer", **VIT), (2, 3, 32, 32)),
    "MobileViT": Network(part("models.vit_mobile.MobileViT"), (2, 3, 64, 64), norms_train=True, half=True),
    "TinyViT": Network(
        part(
            "contrib.TinyViT", 64, 3, 5, (16, 16, 32, 32), (1, 1, 2, 1), (1, 1, 2, 2), (4, 4, 4, 2), drop_path_rate=0.0
        ),
        (2, 3, 64, 64),
        norms_train=True,
        half=True,
    ),
    "RRDBNet": image("models.RRDBNet", 3, 3, 2, 8, 1, 4),
    "SmallSR": Network(part("models.small_sr.SmallSRNet", 3, pretrained=False), (1, 1, 24, 16), half=True),
    "DexiNed": Network(
        part("models.dexined.DexiNed", False),
        (1, 3, 32, 32),
        call=lambda network, x: torch.cat(network.get_features(x), 1),
        norms_train=True,
    ),
    "YuNet": Network(
        part("models.yunet.YuNet", "train", False),
        (2, 3, 64, 64),
        call=lambda network, x: torch.cat(list(network(x).values()), 2),
        norms_train=True,
        half=True,
    ),
    "EfficientViT": Network(
        part("models.efficient_vit.backbone.efficientvit_backbone_b0"),
        (1, 3, 64, 64),
        call=lambda network, x: network(x)["stage_final"],
        norms_train=True,
        tolerance=1e-4,
    ),
    "SAM": Network(
        part(
            "models.sam.architecture.image_encoder.ImageEncoderViT",
            64,
            patch_size=8,
            embed_dim=16,
            depth=2,
            num_heads=2,
            out_chans=8,
            use_rel_pos=True,
            window_size=3,
            global_attn_indexes=(1,),
        ),
        (1, 3, 64, 64),
        half=True,
    ),
    "patches": image("contrib.ExtractTensorPatches", 8, 4),
}
WARPS = {
    "spatial transformer": Network(SpatialTransformer, (2, 3, 24, 16), half=True),
    "perspective": function("geometry.transform.warp_perspective", matrix(3), (20, 18)),
    "affine": function("geometry.transform.warp_affine", matrix(2), (20, 18)),
    "homography": Network(
        lambda k: Function(lambda x: k.geometry.transform.HomographyWarper(24, 16)(x, matrix(3)(x))),
        (2, 3, 24, 16),
        half=True,
    ),
    "rotation": function("geometry.transform.rotate", lambda x: torch.tensor([30.0, -20.0], dtype=x.dtype)),
    "shear": function("geometry.transform.shear", lambda x: torch.tensor([[0.1, 0.2]] * 2, dtype=x.dtype)),
    "resize": function("geometry.transform.resize", (15, 20), antialias=True),
    "pyramid down": image("geometry.transform.PyrDown"),
    "pyramid up": image("geometry.transform.PyrUp"),
    "Laplacian pyramid": Network(
        lambda k: Function(lambda x: k.geometry.transform.build_laplacian_pyramid(x, 3)[1]), (2, 3, 32, 16), half=True
    ),
    "scale pyramid": Network(
        lambda k: Function(lambda x: k.geometry.transform.ScalePyramid(2, min_size=8)(x)[0][0], (1, 1)),
        (1, 1, 24, 24),
        half=True,
    ),
    "elastic": function(
        "geometry.transform.elastic_transform2d", lambda x: other(x)[:, :2] * 2 - 1, (9, 9), (4.0, 4.0)
    ),
    "thin plate": function(
        "geometry.transform.warp_image_tps",
        lambda x: other(x)[:, 0, :5, :2],
        lambda x: other(x)[:, 1, :5, :2] * 0.1,
        lambda x: other(x)[:, 2, :3, :2] * 0.1,
    ),
    "flow": function("geometry.transform.remap", lambda x: other(x)[:, 0] * 15, lambda x: other(x)[:, 1] * 23),
    "center": function("geometry.transform.center_crop", (10, 10)),
    "boxes": function(
        "geometry.transform.crop_and_resize",
        lambda x: torch.tensor([[[2.0, 3.0], [12.0, 3.0], [12.0, 20.0], [2.0, 20.0]]] * 2, dtype=x.dtype),
        (8, 8),
    ),
    "undistorted": function(
        "geometry.calibration.undistort_image",
        lambda x: torch.tensor([[[20.0, 0, 8], [0, 20, 12], [0, 0, 1]]] * 2, dtype=x.dtype),
        lambda x: torch.full((2, 4), 0.01, dtype=x.dtype),
    ),
    "places": function("geometry.subpix.spatial_soft_argmax2d"),
    "places around": image("geometry.subpix.ConvSoftArgmax2d", shape=(2, 3, 24, 16)),
    "points of depths": function(
        "geometry.depth.depth_to_3d",
        lambda x: torch.tensor([[[20.0, 0, 8], [0, 20, 12], [0, 0, 1]]] * 2, dtype=x.dtype),
        channels=(1, 1),
        shape=(2, 1, 24, 16),
    ),
    "flip": image("geometry.transform.Hflip"),
    "vertical flip": image("geometry.transform.Vflip"),
}
LOSSES = {
    "SSIM": loss("SSIMLoss", 5),
    "SSIM of volumes": loss("SSIM3DLoss", 3, shape=(1, 1, 8, 8, 8), channels=None),
    "MS-SSIM": loss("MS_SSIMLoss", sigmas=(0.5, 1.0)),
    "PSNR": loss("PSNRLoss", 1.0),
    "variation": function("losses.total_variation"),
    "dice": loss("DiceLoss", target=classes),
    "dice of each": loss("DiceLoss", "macro", target=classes),
    "Tversky": loss("TverskyLoss", 0.3, 0.7, target=classes),
    "focal": loss("FocalLoss", 0.5, reduction="mean", target=classes),
    "binary focal": loss(
        "BinaryFocalLossWithLogits", 0.5, reduction="mean", target=lambda x: (other(x) > 0.5).to(x.dtype)
    ),
    "Lovasz": loss("LovaszSoftmaxLoss", target=classes),
    "Lovasz hinge": loss("LovaszHingeLoss", target=binary, channels=(3, 1)),
    "Hausdorff": loss("HausdorffERLoss", k=3, target=lambda x: classes(x)[:, None]),
    "depth smoothness": loss(
        "InverseDepthSmoothnessLoss", channels=(3, 1), target=lambda x: other(x.expand(-1, 3, -1, -1))
    ),
    "Charbonnier": loss("CharbonnierLoss", "mean"),
    "Welsch": loss("WelschLoss", "sum"),
    "Cauchy": loss("CauchyLoss", "mean"),
    "Geman-McClure": loss("GemanMcclureLoss", "mean"),
    "divergence": Network(
        lambda k: Function(lambda x: k.losses.js_div_loss_2d(x.flatten(2).softmax(2).view_as(x), other(x).softmax(1))),
        (2, 3, 24, 16),
        half=True,
    ),
    "mutual information": Network(
        lambda k: Function(lambda x: k.losses.mutual_information_loss_2d(x, other(x), num_bins=8)),
        (1, 3, 24, 16),
        half=True,
    ),
}
COLORS = {
    name: Network(
        lambda k, name=name: Function(lambda x: getattr(k.color, name)()(x.sigmoid())), (2, 3, 24, 16), half=True
    )
    for name in [
        "RgbToGrayscale",
        "RgbToHsv",
        "RgbToHls",
        "RgbToLab",
        "RgbToLuv",
        "RgbToXyz",
        "RgbToYcbcr",
        "RgbToYuv",
        "RgbToLinearRgb",
    ]
} | {
    "YUV 4:2:0": Network(
        lambda k: Function(lambda x: k.color.Yuv420ToRgb()(*k.color.RgbToYuv420()(x.sigmoid()))),
        (2, 3, 24, 16),
        half=True,
    ),
    "raw": Network(
        lambda k: Function(lambda x: k.color.RawToRgb(k.color.CFA.BG)(x), (3, 1)), (2, 3, 24, 16), half=True
    ),
    "CLAHE": Network(
        lambda k: Function(
            lambda x: k.enhance.equalize_clahe(x.sigmoid(), grid_size=(2, 2), slow_and_differentiable=True)
        ),
        (1, 3, 32, 32),
        reduced=1.0,
    ),
    "JPEG": Network(
        lambda k: Function(
            lambda x: k.enhance.JPEGCodecDifferentiable()(x.sigmoid(), torch.tensor([50.0], dtype=x.dtype))
        ),
        (1, 3, 32, 32),
    ),
    "whitening": Network(lambda k: Function(lambda x: k.enhance.ZCAWhitening()(x, True)), (48, 3, 2, 2), 0),
    "contrast": image("enhance.AdjustContrast", 0.7),
    "gamma": Network(lambda k: Function(lambda x: k.enhance.AdjustGamma(0.7)(x.sigmoid())), (2, 3, 24, 16), half=True),
    "hue": Network(lambda k: Function(lambda x: k.enhance.AdjustHue(0.3)(x.sigmoid())), (2, 3, 24, 16), half=True),
    "histogram": Network(
        lambda k: Function(
            lambda x: k.enhance.histogram(
                x.flatten(1), torch.linspace(-1, 1, 8, dtype=x.dtype), torch.tensor(0.2, dtype=x.dtype)
            )
        ),
        (2, 3, 24, 16),
    ),
    "integral": function("enhance.integral_image"),
    "sharpness": function("enhance.sharpness", 0.5),
}
NETWORKS = {**FILTERS, **FEATURES, **MODELS, **WARPS, **LOSSES, **COLORS}


test_networks_are_exact = all_exact(__name__, NETWORKS)
