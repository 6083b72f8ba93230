"""The networks of timm, one of each family, its losses and its optimizers."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from networks.oracle import Network, all_exact

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
    fastvit_t8 ghostnet_100 hrnet_w18_small inception_next_atto lambda_resnet26t mobilenetv3_small_100 mobilevit_xxs
    nfnet_f0 poolformer_s12 pvt_v2_b0 regnety_002 repvgg_a0 resnet50d resnetv2_50x1_bit vgg11_bn xception41
"""
# Of one image, as they are slow. (torch's batch norm on CPUs takes a wrong gradient of one image whose gradient lies in
# memory with channels last, as in lambda_resnet26t.)
ONE_IMAGE = """
    convmixer_768_32 davit_tiny dpn48b eca_resnet33ts fbnetc_100 focalnet_tiny_srf gernet_s halonet26t hardcorenas_a
    inception_v3 lcnet_035 mambaout_femto mnasnet_small mobilenetv2_050 mobileone_s0 repvit_m0_9
    res2net50_26w_4s resnest14d rexnet_100 selecsls42 sequencer2d_s seresnext26d_32x4d skresnet18 starnet_s1
    swiftformer_xs tiny_vit_5m_224 tinynet_e vovnet39a
"""
ONE_IMAGE_TOLD = """
    botnet26t_256 convit_tiny nest_tiny pit_ti_224 resmlp_12_224 swinv2_cr_tiny_224
    tnt_s_legacy_patch16_224 visformer_tiny vit_medium_patch16_gap_240
"""
LARGE = {"halonet26t": 256, "inception_v3": 96}
OTHER_SIZES: dict[str, dict[str, Any]] = {
    "crossvit_tiny_240": {"img_size": 240},
    "eva02_tiny_patch14_224": {"img_size": 56},
    "samvit_base_patch16": {
        "img_size": 64,
        "depth": 1,
        "embed_dim": 24,
        "num_heads": 2,
        "global_attn_indexes": (),
        "window_size": 2,
    },
}
POOLED = {"convnextv2_atto": 1.0, "efficientnet_b0": 1.0, "nfnet_f0": 2.0}
TOKENS_SUMMED = {"edgenext_xx_small": 1.0, "efficientvit_b0": 1.0, "xcit_nano_12_p16_224": 5.0}  # linear attention
# Of 16 tokens the first rank has 12, so its gates are multiplied where the features are sharded, which are more even;
# the layer after sums them in each of 30 blocks. With 8 and 8 tokens nothing is summed but what is pooled (0.01).
GATES_SUMMED = {"gmlp_ti16_224": 5.1}
REDUCED = POOLED | TOKENS_SUMMED | GATES_SUMMED


def network(name: str, images: int, size: int = 64, reduced: float = 0.5, **options: Any) -> Network:
    def make(t: Any, **larger: Any) -> nn.Module:
        created: nn.Module = t.create_model(name, num_classes=5, **{**options, **larger})
        return created

    at_use = {"make": partial(make, img_size=4 * size), "shape": (images, 3, 4 * size, 4 * size)}
    return Network(
        make,
        (images, 3, size, size),
        tolerance=1e-5 if name == "efficientvit_b0" else 1e-9,
        reduced=REDUCED.get(name, reduced),
        at_use=at_use if "img_size" in options and size < 64 else {},
    )


MODELS = {
    **{name: network(name, 2, img_size=64, **options) for name, options in SHRUNK.items()},
    **{name: network(name, 2, img_size=64) for name in TOLD_THE_SIZE.split()},
    **{name: network(name, 2) for name in ANY_SIZE.split()},
    **{name: network(name, 1, LARGE.get(name, 64), 4.0) for name in ONE_IMAGE.split()},
    **{name: network(name, 1, 64, 4.0, img_size=64) for name in ONE_IMAGE_TOLD.split()},
    **{name: network(name, 1, options["img_size"], 4.0, **options) for name, options in OTHER_SIZES.items()},
}

# -- losses and optimizers ---------------------------------------------------------------------------------------------

CLASSES = torch.arange(12) % 5


def loss(name: str, targets: Tensor) -> Network:
    return Network(
        lambda t: getattr(importlib.import_module("timm.loss"), name)(),
        (12, 5),
        0,
        call=lambda loss, x: loss(x, targets),
        reduced=30.0,
    )


def trained(network: nn.Module, x: Tensor, name: str) -> Tensor:
    optimizer = importlib.import_module("timm.optim").create_optimizer_v2(network, opt=name, lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        network(x.detach()).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    return network(x)


LOSSES = {
    "JsdCrossEntropy": loss("JsdCrossEntropy", CLASSES[:4]),  # of three parts, two of them augmented
    "LabelSmoothingCrossEntropy": loss("LabelSmoothingCrossEntropy", CLASSES),
    **{
        name: loss(name, one_hot(CLASSES, 5).double())
        for name in ("SoftTargetCrossEntropy", "BinaryCrossEntropy", "AsymmetricLossMultiLabel")
    },
}
OPTIMIZERS = """
    adabelief adafactor adamp adan adopt kron lamb laprop lars lion lookahead_adam madgrad mars muon nadamw novograd
    rmsproptf sgdp
"""
NETWORKS = {
    **MODELS,
    **LOSSES,
    **{
        f"optimizer {name}": Network(
            lambda _: nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16)),
            (2, 21, 16),
            1,
            call=partial(trained, name=name),
            reduced=30.0,
        )
        for name in OPTIMIZERS.split()
    },
}


test_networks_are_exact = all_exact(__name__, NETWORKS, always=("optimizer lamb",))
