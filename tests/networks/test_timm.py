"""The networks of timm, one of each family."""

from __future__ import annotations

from typing import Any

import pytest

from networks.oracle import Network, check, names
from shardtensor.testing import run_distributed

PACKAGE = "timm"
pytest.importorskip(PACKAGE)

WINDOWS = {"window_size": 4, "embed_dim": 24, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 4, 8)}
SHRUNK: dict[str, dict[str, Any]] = {
    "swin_tiny_patch4_window7_224": WINDOWS,
    "beit_base_patch16_224": {"embed_dim": 24, "num_heads": 2, "depth": 1},
    "cait_xxs24_224": {"depth": 1},
}
TOLD_THE_SIZE = """
    coatnet_nano_rw_224 deit3_small_patch16_224 efficientformerv2_s0 gmlp_ti16_224 hiera_tiny_224 levit_128s
    maxvit_rmlp_pico_rw_256 mixer_s32_224 mvitv2_tiny twins_svt_small vit_tiny_patch16_224 vitamin_small_224 volo_d1_224
    xcit_nano_12_p16_224
"""
ANY_SIZE = """
    convnext_atto convnextv2_atto cspdarknet53 densenet121 dla34 edgenext_xx_small efficientnet_b0 efficientvit_b0
    fastvit_t8 ghostnet_100 hrnet_w18_small inception_next_atto mobilenetv3_small_100 mobilevit_xxs nfnet_f0
    poolformer_s12 pvt_v2_b0 regnety_002 repvgg_a0 resnet50d resnetv2_50x1_bit vgg11_bn xception41
"""
POOLED = {"convnextv2_atto": 1.0, "efficientnet_b0": 1.0, "nfnet_f0": 2.0}
TOKENS_SUMMED = {"edgenext_xx_small": 1.0, "efficientvit_b0": 1.0, "xcit_nano_12_p16_224": 5.0}  # linear attention
# Of 16 tokens the first rank has 12, so its gates are multiplied where the features are sharded, which are more even;
# the layer after sums them in each of 30 blocks. With 8 and 8 tokens nothing is summed but what is pooled (0.01).
GATES_SUMMED = {"gmlp_ti16_224": 5.1}
REDUCED = POOLED | TOKENS_SUMMED | GATES_SUMMED
NETWORKS = {
    name: Network(
        lambda t, name=name, options=options: t.create_model(name, num_classes=5, **options),
        (2, 3, 64, 64),
        tolerance=1e-5 if name == "efficientvit_b0" else 1e-9,
        reduced=REDUCED.get(name, 0.5),
    )
    for name, options in [
        *((name, {"img_size": 64, **options}) for name, options in SHRUNK.items()),
        *((name, {"img_size": 64}) for name in TOLD_THE_SIZE.split()),
        *((name, {}) for name in ANY_SIZE.split()),
    ]
}


@pytest.mark.parametrize("name", names(NETWORKS))
def test_networks_are_exact(name):
    run_distributed(check, 2, __name__, name, timeout=300.0)
