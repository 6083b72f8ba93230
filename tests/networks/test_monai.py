"""The networks of MONAI, on volumes."""

from __future__ import annotations

import pytest

from networks.oracle import Network, check, names
from shardtensor.testing import run_distributed

PACKAGE = "monai.networks.nets"
pytest.importorskip(PACKAGE)

VOLUME = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
NETWORKS = {
    "UNet": Network(
        lambda m: m.UNet(**VOLUME, channels=(4, 8, 16), strides=(2, 2), num_res_units=1), (1, 1, 16, 16, 16)
    ),
    "UNETR": Network(
        lambda m: m.UNETR(1, 2, (32, 32, 32), feature_size=4, hidden_size=24, mlp_dim=32, num_heads=2),
        (1, 1, 32, 32, 32),
    ),
    "SwinUNETR": Network(
        lambda m: m.SwinUNETR(1, 2, feature_size=12, depths=(1,) * 4, num_heads=(1, 2, 2, 4), window_size=4),
        (1, 1, 64, 64, 64),
    ),
    "AttentionUnet": Network(
        lambda m: m.AttentionUnet(**VOLUME, channels=(4, 8, 16), strides=(2, 2)), (1, 1, 16, 16, 16)
    ),
    "SegResNet": Network(
        lambda m: m.SegResNet(**VOLUME, init_filters=8, blocks_down=(1, 1), blocks_up=(1,)), (1, 1, 16, 16, 16)
    ),
    "DynUNet": Network(
        lambda m: m.DynUNet(
            **VOLUME, kernel_size=[3, 3, 3], strides=[1, 2, 2], upsample_kernel_size=[2, 2], filters=[4, 8, 16]
        ),
        (1, 1, 16, 16, 16),
    ),
    "VNet": Network(lambda m: m.VNet(**VOLUME), (1, 1, 32, 32, 32)),
    "BasicUNet": Network(lambda m: m.BasicUNet(**VOLUME, features=(4, 4, 8, 8, 8, 4)), (1, 1, 32, 32, 32)),
    "HighResNet": Network(lambda m: m.HighResNet(**VOLUME), (1, 1, 16, 16, 16)),
    "MedNeXt": Network(
        lambda m: m.MedNeXt(**VOLUME, init_filters=4, blocks_down=(1,) * 4, blocks_bottleneck=1, blocks_up=(1,) * 4),
        (1, 1, 32, 32, 32),
    ),
}


@pytest.mark.parametrize("name", names(NETWORKS))
def test_networks_are_exact(name):
    run_distributed(check, 2, __name__, name, timeout=300.0)
