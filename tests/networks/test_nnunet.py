"""The networks of nnU-Net, which its package dynamic_network_architectures holds."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from networks.oracle import Network, all_exact

PACKAGE = "dynamic_network_architectures.architectures.unet"
pytest.importorskip(PACKAGE)

STAGES = {"n_stages": 3, "features_per_stage": (4, 8, 8), "kernel_sizes": 3, "num_classes": 2}
LAYERS = {"conv_bias": True, "nonlin": nn.LeakyReLU, "nonlin_kwargs": {"negative_slope": 0.01, "inplace": True}}
INSTANCE = {"norm_op_kwargs": {"eps": 1e-5, "affine": True}}
TWO = {"input_channels": 2, "conv_op": nn.Conv2d, "norm_op": nn.InstanceNorm2d, **STAGES, **LAYERS, **INSTANCE}
THREE = {**TWO, "conv_op": nn.Conv3d, "norm_op": nn.InstanceNorm3d, "input_channels": 1}
# As planned for images of few slices: neither their kernels nor their strides reach across these at first.
ANISOTROPIC = {"kernel_sizes": ((1, 3, 3), (3, 3, 3), (3, 3, 3)), "strides": ((1, 1, 1), (1, 2, 2), (2, 2, 2))}
PLAIN = {"strides": (1, 2, 2), "n_conv_per_stage": 2, "n_conv_per_stage_decoder": 2}
RESIDUAL = {"strides": (1, 2, 2), "n_blocks_per_stage": (1, 2, 2), "n_conv_per_stage_decoder": 1}


def all_scales(network: Any, x: Tensor) -> Tensor:
    """What deep supervision weighs: a loss of the result of each scale."""
    return sum(y.flatten(2).square().mean(2) / 2**i for i, y in enumerate(network(x)))


def plain(options: dict[str, Any]) -> Any:
    return lambda d: d.PlainConvUNet(**options)


def residual(options: dict[str, Any]) -> Any:
    return lambda d: d.ResidualEncoderUNet(**options)


NETWORKS = {
    "PlainConvUNet-2d": Network(plain(TWO | PLAIN), (2, 2, 24, 20), half=True),
    "PlainConvUNet-2d-width": Network(plain(TWO | PLAIN), (2, 2, 24, 20), 3),
    "PlainConvUNet-2d-batch-norm": Network(
        plain(TWO | PLAIN | {"norm_op": nn.BatchNorm2d}), (2, 2, 24, 20), norms_train=True
    ),
    "PlainConvUNet-2d-deep": Network(plain(TWO | PLAIN | {"deep_supervision": True}), (2, 2, 24, 20), call=all_scales),
    "PlainConvUNet-3d": Network(plain(THREE | PLAIN), (1, 1, 16, 16, 12), half=True),
    "PlainConvUNet-3d-anisotropic": Network(plain(THREE | PLAIN | ANISOTROPIC), (1, 1, 6, 16, 12), 3),
    "PlainConvUNet-3d-slices": Network(plain(THREE | PLAIN | ANISOTROPIC), (1, 1, 6, 16, 12), 2),
    "ResidualEncoderUNet-2d": Network(residual(TWO | RESIDUAL), (2, 2, 24, 20), half=True),
    "ResidualEncoderUNet-3d": Network(residual(THREE | RESIDUAL), (1, 1, 16, 16, 12)),
    "ResidualEncoderUNet-3d-deep": Network(
        residual(THREE | RESIDUAL | {"deep_supervision": True}), (1, 1, 16, 16, 12), call=all_scales
    ),
    "ResidualEncoderUNet-3d-anisotropic": Network(
        residual(THREE | RESIDUAL | ANISOTROPIC | {"deep_supervision": True}), (1, 1, 6, 16, 12), 3, all_scales
    ),
    "ResidualUNet-3d": Network(
        lambda d: d.ResidualUNet(**THREE | RESIDUAL | {"n_conv_per_stage_decoder": (1, 1)}), (1, 1, 16, 16, 12)
    ),
}


test_networks_are_exact = all_exact(__name__, NETWORKS, always=("PlainConvUNet-2d-deep",))
