"""The decoders, encoders and losses of segmentation_models_pytorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from seeded import seeded
from torch import Tensor, nn

from networks.oracle import Network, all_exact

PACKAGE = "segmentation_models_pytorch"
pytest.importorskip(PACKAGE)

ENCODER = {"encoder_weights": None, "classes": 3}
SMALL = {"encoder_name": "resnet18", **ENCODER}
DECODERS: dict[str, dict[str, Any]] = {
    "Unet": {"decoder_channels": (64, 32, 16, 16, 16), "decoder_attention_type": "scse"},
    "UnetPlusPlus": {"decoder_channels": (64, 32, 16, 8, 8)},
    "MAnet": {"decoder_channels": (64, 32, 16, 8, 8), "decoder_pab_channels": 16},
    "Linknet": {},
    "FPN": {"decoder_pyramid_channels": 32, "decoder_segmentation_channels": 32},
    "PSPNet": {"psp_out_channels": 32},
    "DeepLabV3": {"decoder_channels": 32},
    "DeepLabV3Plus": {"decoder_channels": 32},
    "PAN": {"decoder_channels": 16},
    "UPerNet": {"decoder_channels": 32},
    "Segformer": {"decoder_segmentation_channels": 32},
}
ENCODERS = ["mit_b0", "tu-convnext_atto", "tu-hrnet_w18_small"]


def decoder(name: str, options: dict[str, Any]) -> Network:
    return Network(
        lambda s: getattr(s, name)(**SMALL, **options),
        (2, 3, 128, 128) if name == "PAN" else (2, 3, 64, 64),
        norms_train=True,
        # PAN has batch norms of two pooled values, and so plus or minus one by rounding. Of five inputs the errors are
        # 0.05, 0.08, 0.11, 0.23, 0.22 on one device, and 0.09, 0.13, 0.10, 0.12, 0.22 on two ranks.
        half=name != "PAN",
        reduced=1.0,
    )


def encoder(name: str) -> Network:
    return Network(
        lambda s: s.Unet(name, decoder_channels=(32, 16, 16, 8, 8), **ENCODER),
        (2, 3, 64, 64),
        norms_train=True,
        half=True,
        reduced=1.0,
    )


def masks(x: Tensor) -> Tensor:
    """Of each class."""
    return (torch.randn(x.shape, generator=seeded(1)) > 0).to(x.dtype)


def classes(x: Tensor) -> Tensor:
    """Of each pixel."""
    shape = (x.shape[0], *x.shape[2:])
    return torch.randint(x.shape[1], shape, generator=seeded(1))


class Scored(nn.Module):
    """A loss of what a convolution gives."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.loss = loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.conv(x), target)


def loss(name: str, *mode: str, **options: Any) -> Network:
    target = classes if mode == ("multiclass",) or name == "SoftCrossEntropyLoss" else masks
    return Network(
        lambda s: Scored(getattr(s.losses, name)(*mode, **options)),
        (2, 3, 24, 16),
        call=lambda network, x: network(x, target(x)),
        half=True,
    )


def lovasz(mode: str, **options: Any) -> Network:
    """In float32, as the sums of its masks are whatever the scores are."""
    target = classes if mode == "multiclass" else masks
    return Network(
        lambda s: Scored(s.losses.LovaszLoss(mode, **options)),
        (2, 3, 24, 16),
        call=lambda network, x: network.float()(x.float(), target(x).float()),
        tolerance=1e-5,
    )


NETWORKS = {
    **{name: decoder(name, options) for name, options in DECODERS.items()},
    "DPT": Network(
        lambda s: s.DPT(
            "tu-vit_tiny_patch16_224",
            decoder_intermediate_channels=(8, 16, 16, 16),
            decoder_fusion_channels=16,
            dynamic_img_size=True,
            **ENCODER,
        ),
        (2, 3, 64, 64),
        norms_train=True,
        half=True,
    ),
    **{name: encoder(name) for name in ENCODERS},
    "classes of the image": Network(
        lambda s: s.Unet(aux_params={"classes": 4}, decoder_channels=(32, 16, 16, 8, 8), **SMALL),
        (2, 3, 64, 64),
        call=lambda network, x: network(x)[1],
        norms_train=True,
        half=True,
    ),
    "dice of classes": loss("DiceLoss", "multiclass"),
    "dice of masks": loss("DiceLoss", "multilabel", log_loss=True),
    "Jaccard": loss("JaccardLoss", "multiclass"),
    "Tversky": loss("TverskyLoss", "multilabel", alpha=0.3, beta=0.7, gamma=1.5),
    "focal": loss("FocalLoss", "multiclass", alpha=0.25),
    "focal of masks": loss("FocalLoss", "multilabel", normalized=True),
    "Lovasz": lovasz("multiclass"),
    "Lovasz of each image": lovasz("multiclass", per_image=True),
    "Lovasz of masks": lovasz("multilabel"),
    "soft cross entropy": loss("SoftCrossEntropyLoss", smooth_factor=0.1),
    "soft binary": loss("SoftBCEWithLogitsLoss", smooth_factor=0.1),
    "Matthews": loss("MCCLoss"),
}


test_networks_are_exact = all_exact(__name__, NETWORKS)
