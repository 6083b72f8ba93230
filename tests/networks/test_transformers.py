"""The networks of transformers that see images."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from networks.oracle import Network, check, names
from shardtensor.testing import run_distributed

PACKAGE = "transformers"
pytest.importorskip(PACKAGE)

STAGES = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
SWIN = {"patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4, "image_size": 32}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def upernet(t: Any) -> nn.Module:
    backbone = t.ConvNextConfig(**STAGES, out_features=["stage1", "stage2", "stage3", "stage4"])
    sizes = {"hidden_size": 8, "auxiliary_in_channels": 16, "auxiliary_channels": 8, "pool_scales": [1, 2, 3]}
    return t.UperNetForSemanticSegmentation(t.UperNetConfig(backbone_config=backbone, num_labels=3, **sizes))


def dpt(t: Any) -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    neck = {"neck_hidden_sizes": [8] * 4, "fusion_hidden_size": 8, "reassemble_factors": [4, 2, 1, 0.5]}
    image = {"image_size": 64, "patch_size": 8, "backbone_out_indices": [0, 1, 2, 3], "is_hybrid": False}
    return t.DPTForDepthEstimation(t.DPTConfig(**sizes, **neck, **image, **NO_DROPOUT))


def logits(network: Any, x: Tensor) -> Tensor:
    return network(x).logits


NETWORKS = {
    "SegFormer": Network(
        lambda t: t.SegformerForSemanticSegmentation(
            t.SegformerConfig(
                **STAGES,
                **NO_DROPOUT,
                num_attention_heads=[1, 1, 2, 2],
                decoder_hidden_size=16,
                drop_path_rate=0.0,
                classifier_dropout_prob=0.0,
            )
        ),
        (2, 3, 64, 64),
        call=logits,
    ),
    "ConvNeXt": Network(
        lambda t: t.ConvNextForImageClassification(t.ConvNextConfig(**STAGES)), (2, 3, 64, 64), call=logits
    ),
    "ResNet": Network(
        lambda t: t.ResNetForImageClassification(
            t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
        ),
        (2, 3, 64, 64),
        call=logits,
    ),
    "UperNet": Network(upernet, (2, 3, 64, 64), call=logits),
    "DPT": Network(dpt, (2, 3, 64, 64), call=lambda network, x: network(x).predicted_depth),
    "Swinv2": Network(
        lambda t: t.Swinv2ForImageClassification(t.Swinv2Config(drop_path_rate=0.0, **SWIN)),
        (2, 3, 32, 32),
        call=logits,
    ),
    "Swin2SR": Network(
        lambda t: t.Swin2SRForImageSuperResolution(t.Swin2SRConfig(drop_path_rate=0.0, **SWIN | {"patch_size": 1})),
        (1, 3, 32, 32),
        call=lambda network, x: network(x).reconstruction,
    ),
    "Dinov2": Network(
        lambda t: t.Dinov2ForImageClassification(
            t.Dinov2Config(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=4)
        ),
        (2, 3, 32, 32),
        call=logits,
    ),
}


@pytest.mark.parametrize("name", names(NETWORKS, always=("SegFormer",)))
def test_networks_are_exact(name):
    run_distributed(check, 2, __name__, name, timeout=300.0)
