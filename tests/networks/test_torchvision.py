"""The networks of torchvision: segmentation, optical flow, videos, detectors without the choice of boxes, and the
classifiers that are its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from networks.oracle import Network, all_exact

PACKAGE = "torchvision"
pytest.importorskip(PACKAGE)

PLAIN = {"weights": None, "num_classes": 5}
CLASSIFIERS = [
    "densenet121",
    "efficientnet_b0",
    "mnasnet0_5",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "regnet_x_400mf",
    "regnet_y_400mf",
    "resnet18",
    "resnext50_32x4d",
    "shufflenet_v2_x0_5",
    "squeezenet1_1",
]
SEGMENTATION = ["deeplabv3_mobilenet_v3_large", "deeplabv3_resnet50", "lraspp_mobilenet_v3_large"]
VIDEO = ["r3d_18", "mc3_18", "r2plus1d_18"]


def classifier(name: str) -> Network:
    pooled = 1.0 if name == "efficientnet_b0" else 0.5
    return Network(
        lambda v: getattr(v.models, name)(**PLAIN), (2, 3, 64, 64), norms_train=True, half=True, reduced=pooled
    )


def segmentation(name: str) -> Network:
    return Network(
        lambda v: getattr(v.models.segmentation, name)(weights_backbone=None, **PLAIN),
        (2, 3, 64, 64),
        call=lambda network, x: network(x)["out"],
        norms_train=True,
        half=True,
    )


def video(name: str) -> Network:
    return Network(
        lambda v: getattr(v.models.video, name)(num_classes=64),  # so many that their mean error in bfloat16 tells
        (1, 3, 6, 32, 32),
        3,
        norms_train=True,
        half=True,
    )


def found(network: Any, x: Tensor) -> Tensor:
    """Scores and offsets of all boxes, from which a detector chooses."""
    heads = network.head(list(network.backbone(x).values()))
    return torch.cat([head.flatten(1) for head in heads.values()], 1)


def pyramid(v: Any) -> nn.Module:
    make = v.models.detection.backbone_utils.resnet_fpn_backbone
    return make(backbone_name="resnet18", weights=None, norm_layer=nn.BatchNorm2d)


def detector(make: Callable[[Any], nn.Module], shape: tuple[int, ...] = (2, 3, 64, 64)) -> Network:
    return Network(make, shape, call=found, norms_train=True, half=True)


def proposed(network: Any, x: Tensor) -> Tensor:
    """What the network for regions proposes them from."""
    heads = network.rpn.head(list(network.backbone(x).values()))
    return torch.cat([each.flatten(1) for head in heads for each in head], 1)


def flow(network: nn.Module, x: Tensor) -> Tensor:
    """With coordinates in float64 as well. They are in float32 whatever the weights are, and there the gradients of two
    ranks and of one may lie on two sides of a kink: one device's own differ by 5e-3 from those in float64."""
    raft = importlib.import_module("torchvision.models.optical_flow.raft")
    coordinates = raft.make_coords_grid
    with mock.patch.object(raft, "make_coords_grid", lambda *args, **kwargs: coordinates(*args, **kwargs).double()):
        return network(x, x.roll(3, 3), num_flow_updates=2)[-1]


def mvit(v: Any, **options: bool) -> nn.Module:
    def block(heads: int, channels: tuple[int, int], q: int, kv: int) -> Any:
        return v.models.video.mvit.MSBlockConfig(heads, *channels, [3, 3, 3], [3, 3, 3], [1, q, q], [1, kv, kv])

    blocks = [block(1, (16, 16), 1, 2), block(2, (16, 32), 2, 1)]
    return v.models.video.MViT((32, 32), 4, blocks, num_classes=5, **options)


def mvit_v1(v: Any) -> nn.Module:
    return mvit(v, residual_pool=False, residual_with_cls_embed=True, rel_pos_embed=False, proj_after_attn=False)


def mvit_v2(v: Any) -> nn.Module:
    return mvit(v, residual_pool=True, residual_with_cls_embed=False, rel_pos_embed=True, proj_after_attn=True)


def swin(v: Any, **options: Any) -> nn.Module:
    return v.models.SwinTransformer([4, 4], 24, [2, 2], [2, 4], [4, 4], num_classes=5, **options)


def swin_v2(v: Any) -> nn.Module:
    parts = v.models.swin_transformer
    return swin(v, block=parts.SwinTransformerBlockV2, downsample_layer=parts.PatchMergingV2)


def maxvit(v: Any) -> nn.Module:
    return v.models.MaxVit(
        input_size=(64, 64),
        stem_channels=8,
        partition_size=4,
        block_channels=[8, 16],
        block_layers=[1, 1],
        head_dim=4,
        stochastic_depth_prob=0.0,
        num_classes=5,
    )


def vit(v: Any) -> nn.Module:
    return v.models.VisionTransformer(64, 8, 2, 2, 16, 32, num_classes=5)


def convnext(v: Any) -> nn.Module:
    setting = v.models.convnext.CNBlockConfig
    return v.models.ConvNeXt([setting(16, 32, 1), setting(32, None, 1)], num_classes=5)


NETWORKS = {
    **{name: classifier(name) for name in CLASSIFIERS},
    "alexnet": Network(lambda v: v.models.alexnet().features, (2, 3, 64, 64), half=True),
    "googlenet": Network(
        lambda v: v.models.googlenet(aux_logits=False, init_weights=False, **PLAIN),
        (2, 3, 64, 64),
        norms_train=True,
        half=True,
    ),
    "swin": Network(swin, (1, 3, 64, 64), half=True),
    "swin_v2": Network(swin_v2, (1, 3, 64, 64), half=True),
    "maxvit": Network(maxvit, (1, 3, 64, 64), half=True, norms_train=True),
    "vit": Network(vit, (1, 3, 64, 64), half=True),
    "convnext": Network(convnext, (1, 3, 64, 64), half=True),
    **{name: segmentation(name) for name in SEGMENTATION},
    "raft_small": Network(
        lambda v: v.models.optical_flow.raft_small(weights=None),
        (1, 3, 128, 128),
        call=flow,
        norms_train=True,
    ),
    **{name: video(name) for name in VIDEO},
    "mvit_v1": Network(mvit_v1, (1, 3, 4, 32, 32), 3, half=True),
    "mvit_v2": Network(mvit_v2, (1, 3, 4, 32, 32), 3, half=True),
    "swin3d": Network(
        lambda v: v.models.video.SwinTransformer3d([2, 4, 4], 24, [2, 2], [2, 4], [2, 4, 4], num_classes=5),
        (1, 3, 8, 32, 32),
        3,
        half=True,
    ),
    "fcos": detector(lambda v: v.models.detection.FCOS(pyramid(v), 5)),
    "retinanet": detector(lambda v: v.models.detection.RetinaNet(pyramid(v), 5)),
    "ssdlite": detector(lambda v: v.models.detection.ssdlite320_mobilenet_v3_large(weights_backbone=None, **PLAIN)),
    "proposals": Network(
        lambda v: v.models.detection.FasterRCNN(pyramid(v), 5),
        (2, 3, 64, 64),
        call=proposed,
        norms_train=True,
        half=True,
    ),
}


test_networks_are_exact = all_exact(__name__, NETWORKS)
