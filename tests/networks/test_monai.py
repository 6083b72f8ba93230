"""The networks of MONAI, on volumes and on images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from networks.oracle import Network, all_exact, integers, text
from networks.programs import drawn_whole

PACKAGE = "monai.networks.nets"
pytest.importorskip(PACKAGE)

VOLUME = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
NETWORKS: dict[str, Network] = {
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


# -- on images, and with what surrounds a network: codes, conditions, class ids, discriminators ------------------------

PLANE = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
UNET = {"num_res_blocks": 1, "channels": (8, 16), "attention_levels": (False, True), "norm_num_groups": 4}
UNET = UNET | {"num_head_channels": 8}
SEARCHED = {"num_depths": 2, "channel_mul": 0.25, "spatial_dims": 2}
CODER = {"hidden_size": 24, "mlp_dim": 32, "num_heads": 2, "spatial_dims": 2}
DECODER = {"decoder_hidden_size": 24, "decoder_mlp_dim": 32, "decoder_num_layers": 1, "decoder_num_heads": 2}


def exact(make: Callable[[Any], nn.Module], shape: tuple[int, ...], dim: int = 2, **options: Any) -> Network:
    return Network(make, shape, dim, **{"tolerance": 1e-10, "reduced": 30.0, **options})


def encoder(layers: int = 0) -> nn.Module:
    more = [layer for _ in range(layers) for layer in (nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))]
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2), *more, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def of_bags(m: Any, layers: int = 0) -> nn.Module:
    network: nn.Module = m.MILModel(
        2, "att_trans", pretrained=False, backbone=encoder(layers), backbone_num_features=8, trans_blocks=1
    )
    return network


def drawing(network: nn.Module, *inputs: Tensor) -> Any:
    with drawn_whole():
        return network(*inputs)


def at_times(network: nn.Module, x: Tensor) -> Any:
    return network(x, torch.tensor([3, 7]))


def of_two_sizes(network: nn.Module, x: Tensor) -> Any:
    return network([[x[0], x[1][:, :16]]])


NETWORKS |= {
    "BasicUNetPlusPlus": exact(
        lambda m: m.BasicUNetPlusPlus(**PLANE, features=(4, 4, 8, 8, 8, 4), deep_supervision=True), (1, 1, 32, 32)
    ),
    "AHNet": exact(
        lambda m: m.AHNet(**PLANE, psp_block_num=2, layers=(1, 1, 1, 1), upsample_mode="bilinear"),
        (1, 1, 64, 64),
        train=True,
    ),
    "AutoEncoder": exact(
        lambda m: m.AutoEncoder(
            **PLANE, channels=(4, 8, 16), strides=(2, 2, 2), num_inter_units=2, inter_channels=[8, 8], norm="batch"
        ),
        (2, 1, 32, 24),
        train=True,
    ),
    "VarAutoEncoder": exact(
        lambda m: m.VarAutoEncoder(
            spatial_dims=2, in_shape=(1, 32, 32), out_channels=1, latent_size=4, channels=(4, 8), strides=(2, 2)
        ),
        (2, 1, 32, 32),
        train=True,
        call=drawing,
    ),
    "MaskedAutoEncoderViT": exact(
        lambda m: m.MaskedAutoEncoderViT(1, (32, 32), 8, num_layers=1, **CODER, **DECODER),
        (2, 1, 32, 32),
        at_use={
            "make": lambda m: m.MaskedAutoEncoderViT(1, (256, 256), 8, num_layers=1, **CODER, **DECODER),
            "shape": (2, 1, 256, 256),
        },
    ),
    "ViTAutoEnc": exact(lambda m: m.ViTAutoEnc(1, (32, 32), 16, num_layers=2, **CODER), (1, 1, 32, 32)),
    "VQVAE": exact(  # which looks for codes in float32
        lambda m: m.VQVAE(
            2,
            1,
            1,
            channels=(8, 8),
            num_res_layers=1,
            num_res_channels=(8, 8),
            downsample_parameters=((2, 4, 1, 1),) * 2,
            upsample_parameters=((2, 4, 1, 1, 0),) * 2,
            num_embeddings=8,
            embedding_dim=4,
        ),
        (2, 1, 32, 24),
        train=True,
        dtype=torch.float32,
        tolerance=1e-5,
    ),
    "ViT, classes": exact(
        lambda m: m.ViT(1, (32, 32), 8, num_layers=2, classification=True, **CODER), (1, 1, 32, 32)
    ),
    "NaViT": exact(lambda m: m.NaViT(32, 8, 3, 24, 32, 1, 2, spatial_dims=2), (2, 1, 32, 32), call=of_two_sizes),
    "DiffusionModelUNet": exact(lambda m: m.DiffusionModelUNet(2, 1, 1, **UNET), (2, 1, 16, 16), call=at_times),
    "DiffusionModelUNet, conditioned": exact(
        lambda m: m.DiffusionModelUNet(
            3, 1, 1, **UNET, with_conditioning=True, cross_attention_dim=6, resblock_updown=True
        ),
        (1, 1, 8, 8, 8),
        call=lambda network, x: network(x, torch.tensor([3]), context=text(1, 4, 6)),
    ),
    "ControlNet": exact(
        lambda m: m.ControlNet(2, 1, **UNET, conditioning_embedding_num_channels=(4,)),
        (2, 1, 16, 16),
        call=lambda network, x: network(x, torch.tensor([3, 7]), controlnet_cond=x.tanh()),
    ),
    "FlexibleUNet": exact(
        lambda m: m.FlexibleUNet(3, 2, "efficientnet-b0", decoder_channels=(16, 8, 8, 4, 4)),
        (1, 3, 64, 64),
        train=True,
    ),
    "Quicknat": exact(lambda m: m.Quicknat(num_classes=3, num_filters=4, se_block=None), (1, 1, 32, 32)),
    "RegUNet": exact(lambda m: m.RegUNet(2, 2, 4, 2, out_channels=2), (1, 2, 32, 32)),
    "LocalNet": exact(lambda m: m.LocalNet(2, 2, 4, extract_levels=(0, 1, 2), out_channels=2), (1, 2, 32, 32)),
    "GlobalNet": exact(  # whose reference grid is in float32
        lambda m: m.GlobalNet([32, 32], 2, 2, 4, 2), (1, 2, 32, 32), dtype=torch.float32, tolerance=1e-5
    ),
    "VoxelMorph": exact(
        lambda m: m.VoxelMorph(
            m.VoxelMorphUNet(2, 2, 32, channels=(8, 8, 8, 8), final_conv_channels=(8, 8)),
            integration_steps=3,
            spatial_dims=2,
        ),
        (1, 1, 32, 32),
        call=lambda network, x: network(x, text(1, 1, 32, 32)),
    ),
    "Restormer": exact(
        lambda m: m.restormer.Restormer(2, 1, 1, dim=8, num_blocks=(1, 1), heads=(1, 2), num_refinement_blocks=1),
        (1, 1, 32, 32),
    ),
    "SegResNetVAE": exact(
        lambda m: m.SegResNetVAE((16, 16, 16), vae_nz=8, init_filters=8, blocks_down=(1, 1), blocks_up=(1,)),
        (1, 1, 16, 16, 16),
        train=True,
        call=drawing,
    ),
    "SegResNetDS": exact(
        lambda m: m.SegResNetDS(init_filters=4, blocks_down=(1, 1, 1), dsdepth=2), (1, 1, 16, 16, 16), train=True
    ),
    "SPADENet": exact(
        lambda m: m.SPADENet(2, 1, 1, 3, (32, 32), [8, 16], z_dim=4, is_vae=True, spade_intermediate_channels=8),
        (1, 3, 32, 32),
        call=lambda network, x: drawing(network, x.softmax(1), x[:, :1]),
    ),
    "DecoderOnlyTransformer": exact(
        lambda m: m.DecoderOnlyTransformer(10, 40, 16, 2, 2), (2, 21), 1, draw=integers(10)
    ),
    "MultiScalePatchDiscriminator": exact(
        lambda m: m.MultiScalePatchDiscriminator(2, 2, 2, 4, 1, kernel_size=3, minimum_size_im=32),
        (2, 1, 32, 32),
        train=True,
    ),
    "DiNTS": exact(
        lambda m: m.DiNTS(m.TopologyInstance(num_blocks=4, **SEARCHED), 1, 2, spatial_dims=2), (1, 1, 32, 32)
    ),
    "DiNTS, search": exact(
        lambda m: m.DiNTS(m.TopologySearch(num_blocks=3, **SEARCHED), 1, 2, spatial_dims=2), (1, 1, 32, 32)
    ),
    "Regressor": exact(lambda m: m.Regressor((1, 32, 32), 3, (4, 8), (2, 2)), (2, 1, 32, 32)),
    "Critic": exact(lambda m: m.Critic((1, 32, 32), (4, 8), (2, 2)), (2, 1, 32, 32)),
    "Generator": exact(lambda m: m.Generator((8,), (4, 4, 4), (4, 1), (2, 2)), (5, 8), 0),
    "ResNet": exact(
        lambda m: m.ResNet("basic", [1, 1, 1, 1], [4, 4, 8, 8], n_input_channels=1, num_classes=3),
        (2, 1, 32, 16, 16),
        train=True,
    ),
    "DenseNet": exact(
        lambda m: m.DenseNet(2, 1, 3, init_features=8, growth_rate=4, block_config=(2, 2)),
        (2, 1, 32, 32),
        train=True,
    ),
    "MILModel": exact(
        of_bags,
        (1, 5, 3, 16, 16),
        3,
        at_use={"make": lambda m: of_bags(m, 4), "shape": (1, 5, 3, 256, 256)},
    ),
}


test_networks_are_exact = all_exact(__name__, NETWORKS)
