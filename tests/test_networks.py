"""Networks of other packages, unmodified, cut by rows: results and gradients are those of one device.

A few run always, the others with ``-m slow``. Those of MONAI and timm are skipped where these are not installed.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from shardtensor.testing import count_communication, run_distributed, shard, shared_mesh


@dataclass(frozen=True)
class Network:
    """A small one of its kind.

    Attributes:
        make: of the module that has its class.
        shape: of the input.
        dim: that is cut.
        call: the network's result for an input.
        tolerance: larger where the network computes in float32 whatever its weights are.
        reduced: bytes that are summed over ranks in all, relative to the input's: statistics, pooled features and the
            like, of which some networks have many for so small an image. No activation.
    """

    make: Callable[[Any], nn.Module]
    shape: tuple[int, ...]
    dim: int = 2
    call: Callable[[nn.Module, Tensor], Tensor] = field(default=lambda network, x: network(x))
    tolerance: float = 1e-9
    reduced: float = 0.5


def text(*shape: int) -> Tensor:
    """What a prompt gives, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


BLOCKS = {"layers_per_block": 1, "block_out_channels": (8, 16), "norm_num_groups": 4}
CODER = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
STAGES = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
SWIN = {"patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4, "image_size": 32}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def there_and_back(network: Any, x: Tensor) -> Tensor:
    code = network.encode(x)
    return network.decode(code.latent if hasattr(code, "latent") else code.latent_dist.mode()).sample


def upernet(t: Any) -> nn.Module:
    backbone = t.ConvNextConfig(**STAGES, out_features=["stage1", "stage2", "stage3", "stage4"])
    sizes = {"hidden_size": 8, "auxiliary_in_channels": 16, "auxiliary_channels": 8, "pool_scales": [1, 2, 3]}
    return t.UperNetForSemanticSegmentation(t.UperNetConfig(backbone_config=backbone, num_labels=3, **sizes))


def dpt(t: Any) -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    neck = {"neck_hidden_sizes": [8] * 4, "fusion_hidden_size": 8, "reassemble_factors": [4, 2, 1, 0.5]}
    image = {"image_size": 64, "patch_size": 8, "backbone_out_indices": [0, 1, 2, 3], "is_hybrid": False}
    return t.DPTForDepthEstimation(t.DPTConfig(**sizes, **neck, **image, **NO_DROPOUT))


def flux_call(network: nn.Module, x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[1], dtype=torch.float64)
    places = torch.stack([torch.zeros_like(rows), rows // 8, rows % 8], 1)
    prompt = {"encoder_hidden_states": text(1, 6, 8), "pooled_projections": text(1, 8), "txt_ids": text(6, 3) * 0}
    return network(x, timestep=torch.tensor([0.5]).double(), img_ids=places, **prompt).sample


DIFFUSERS = {
    "UNet2D": Network(
        lambda d: d.UNet2DModel(
            sample_size=32,
            in_channels=3,
            out_channels=3,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=4,
            **BLOCKS,
        ),
        (2, 3, 32, 32),
        call=lambda network, x: network(x, torch.tensor([3, 7])).sample,
    ),
    "UNet2DCondition": Network(
        lambda d: d.UNet2DConditionModel(
            sample_size=16,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=8,
            attention_head_dim=4,
            **BLOCKS,
        ),
        (2, 4, 16, 16),
        call=lambda network, x: network(x, 3, encoder_hidden_states=text(2, 5, 8)).sample,
    ),
    "UNet3DCondition": Network(
        lambda d: d.UNet3DConditionModel(
            sample_size=16,
            down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
            up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
            cross_attention_dim=8,
            attention_head_dim=4,
            **BLOCKS,
        ),
        (1, 4, 3, 16, 16),
        3,
        lambda network, x: network(x, 3, encoder_hidden_states=text(1, 5, 8)).sample,
    ),
    "AutoencoderKL": Network(
        lambda d: d.AutoencoderKL(latent_channels=4, sample_size=32, **BLOCKS, **CODER),
        (2, 3, 32, 32),
        call=there_and_back,
    ),
    "VQModel": Network(
        lambda d: d.VQModel(latent_channels=4, num_vq_embeddings=16, **BLOCKS, **CODER),
        (2, 3, 32, 32),
        call=lambda network, x: network(x).sample,
    ),
    "AutoencoderDC": Network(
        lambda d: d.AutoencoderDC(
            latent_channels=4,
            attention_head_dim=4,
            encoder_block_types=("ResBlock", "EfficientViTBlock"),
            decoder_block_types=("ResBlock", "EfficientViTBlock"),
            encoder_block_out_channels=(8, 16),
            decoder_block_out_channels=(8, 16),
            encoder_layers_per_block=(1, 1),
            decoder_layers_per_block=(1, 1),
            encoder_qkv_multiscales=((), (5,)),
            decoder_qkv_multiscales=((), (5,)),
        ),
        (1, 3, 32, 32),
        call=there_and_back,
        tolerance=1e-4,
    ),
    "AutoencoderKLCogVideoX": Network(
        lambda d: d.AutoencoderKLCogVideoX(
            block_out_channels=(8,) * 4,
            layers_per_block=1,
            norm_num_groups=4,
            latent_channels=4,
            sample_height=32,
            sample_width=32,
        ),
        (1, 3, 5, 32, 32),
        3,
        there_and_back,
    ),
    "AutoencoderKLWan": Network(
        lambda d: d.AutoencoderKLWan(
            base_dim=8, z_dim=4, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[False]
        ),
        (1, 3, 5, 32, 32),
        3,
        there_and_back,
    ),
    "WanTransformer3D": Network(
        lambda d: d.WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=8,
            freq_dim=16,
            ffn_dim=32,
            num_layers=1,
            cross_attn_norm=True,
            rope_max_seq_len=32,
        ),
        (1, 4, 3, 16, 16),
        3,
        lambda network, x: network(x, torch.tensor([3]), text(1, 6, 8)).sample,
        tolerance=1e-5,
    ),
    "FluxTransformer2D": Network(
        lambda d: d.FluxTransformer2DModel(
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=8,
            pooled_projection_dim=8,
            axes_dims_rope=(4, 4, 8),
        ),
        (1, 64, 4),
        1,
        flux_call,
    ),
    "SD3Transformer2D": Network(
        lambda d: d.SD3Transformer2DModel(
            sample_size=16,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            joint_attention_dim=8,
            caption_projection_dim=16,
            pooled_projection_dim=8,
            **HEADS,
        ),
        (1, 4, 16, 16),
        call=lambda network, x: network(x, text(1, 6, 8), text(1, 8), torch.tensor([3])).sample,
    ),
    "PixArtTransformer2D": Network(
        lambda d: d.PixArtTransformer2DModel(
            in_channels=4,
            num_layers=1,
            cross_attention_dim=16,
            sample_size=16,
            caption_channels=8,
            use_additional_conditions=False,
            **HEADS,
        ),
        (2, 4, 16, 16),
        call=lambda network, x: (
            network(x, encoder_hidden_states=text(2, 5, 8), timestep=torch.tensor([3, 7]), added_cond_kwargs={}).sample
        ),
    ),
    "SanaTransformer2D": Network(
        lambda d: d.SanaTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_cross_attention_heads=2,
            cross_attention_head_dim=8,
            cross_attention_dim=16,
            caption_channels=8,
            sample_size=16,
            **HEADS,
        ),
        (1, 4, 16, 16),
        call=lambda network, x: network(x, encoder_hidden_states=text(1, 5, 8), timestep=torch.tensor([3])).sample,
        tolerance=1e-4,
    ),
}


def logits(network: Any, x: Tensor) -> Tensor:
    return network(x).logits


TRANSFORMERS = {
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

VOLUME = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
MONAI = {
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
REDUCED = POOLED | TOKENS_SUMMED
TIMM = {
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

NETWORKS = {"diffusers": DIFFUSERS, "transformers": TRANSFORMERS, "monai.networks.nets": MONAI, "timm": TIMM}
ALWAYS = ("UNet2DCondition", "AutoencoderKLWan", "SegFormer")


def check(package: str, name: str) -> None:
    torch.manual_seed(0)
    network = NETWORKS[package][name]
    model = network.make(importlib.import_module(package)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # some start at zero, and some at whatever was in memory
            if not parameter.isfinite().all() or not 1e-9 < parameter.abs().max() < 1e3:
                nn.init.normal_(parameter, std=0.1)
    twin = copy.deepcopy(model)
    x = torch.randn(network.shape, dtype=torch.float64)
    first = x.shape[network.dim] * 5 // 8
    sizes = {0: (first, x.shape[network.dim] - first)}
    sharded = shard(x, shared_mesh(2), [Shard(network.dim)], sizes, requires_grad=True)
    x.requires_grad_()
    with count_communication() as counted:
        y = network.call(model, sharded)
    assert counted.collective_bytes < network.reduced * x.nbytes
    expected = network.call(twin, x)
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(y.full_tensor(), expected, rtol=0, atol=network.tolerance * scale)
    y.square().mean().backward()
    expected.square().mean().backward()
    torch.testing.assert_close(
        sharded.grad.full_tensor(), x.grad, rtol=0, atol=network.tolerance * float(x.grad.abs().max())
    )
    # Biases in front of norms have gradients of nothing but rounding.
    largest = max(float(p.grad.abs().max()) for p in twin.parameters() if p.grad is not None)
    for (key, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), key
        if q.grad is not None:
            close = {"rtol": 0, "atol": network.tolerance * largest}
            torch.testing.assert_close(p.grad, q.grad, **close, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize(
    ("package", "name"),
    [
        pytest.param(package, name, marks=() if name in ALWAYS else pytest.mark.slow)
        for package, networks in NETWORKS.items()
        for name in networks
    ],
)
def test_networks_are_exact(package, name):
    pytest.importorskip(package)
    run_distributed(check, 2, package, name, timeout=300.0)
