"""The networks of diffusers: U-Nets and diffusion transformers; its autoencoders are in test_autoencoders.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from networks.oracle import Network, all_exact, text

PACKAGE = "diffusers"
pytest.importorskip(PACKAGE)

BLOCKS = {"layers_per_block": 1, "block_out_channels": (8, 16), "norm_num_groups": 4}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}


def controlled(network: nn.Module, x: Tensor) -> Any:
    """By an image that is sharded as the latent is."""
    condition = nn.functional.interpolate(x[:, :3], scale_factor=2.0)
    return network(x, 3, encoder_hidden_states=text(1, 5, 8), controlnet_cond=condition, return_dict=False)


def flux_call(network: nn.Module, x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[1], dtype=torch.float64)
    places = torch.stack([torch.zeros_like(rows), rows // 8, rows % 8], 1)
    prompt = {"encoder_hidden_states": text(1, 6, 8), "pooled_projections": text(1, 8), "txt_ids": text(6, 3) * 0}
    return network(x, timestep=torch.tensor([0.5]).double(), img_ids=places, **prompt).sample


NETWORKS = {
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
    "DiTTransformer2D": Network(
        lambda d: d.DiTTransformer2DModel(
            in_channels=4, num_layers=1, sample_size=16, patch_size=2, norm_num_groups=4, **HEADS
        ),
        (2, 4, 16, 16),
        call=lambda network, x: (
            network(x, timestep=torch.tensor([3, 7]), class_labels=torch.tensor([1, 2])).sample
        ),
    ),
    "AuraFlowTransformer2D": Network(
        lambda d: d.AuraFlowTransformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            num_mmdit_layers=1,
            num_single_dit_layers=1,
            joint_attention_dim=8,
            caption_projection_dim=16,
            out_channels=4,
            pos_embed_max_size=64,
            **HEADS,
        ),
        (1, 4, 16, 16),
        call=lambda network, x: (
            network(x, encoder_hidden_states=text(1, 5, 8), timestep=torch.tensor([0.5]).double()).sample
        ),
    ),
    "Transformer2D": Network(
        lambda d: d.Transformer2DModel(
            in_channels=8, num_layers=1, norm_num_groups=4, cross_attention_dim=8, **HEADS
        ),
        (1, 8, 12, 9),
        call=lambda network, x: network(x, encoder_hidden_states=text(1, 5, 8)).sample,
    ),
    "TransformerTemporal": Network(
        lambda d: d.TransformerTemporalModel(in_channels=8, num_layers=1, norm_num_groups=4, **HEADS),
        (4, 8, 12, 9),
        call=lambda network, x: network(x, num_frames=4).sample,
    ),
    "PriorTransformer": Network(
        lambda d: d.PriorTransformer(
            num_layers=1, embedding_dim=8, num_embeddings=6, additional_embeddings=4, **HEADS
        ),
        (3, 8),
        0,
        lambda network, x: (
            network(
                x, torch.tensor([3, 5, 7]), proj_embedding=text(3, 8), encoder_hidden_states=text(3, 6, 8)
            ).predicted_image_embedding
        ),
    ),
    "UNet1D": Network(
        lambda d: d.UNet1DModel(
            sample_size=32, in_channels=2, out_channels=2, extra_in_channels=64, block_out_channels=(32, 32, 64)
        ),
        (1, 2, 64),
        call=lambda network, x: network(x, torch.tensor([3])).sample,
        reduced=30.0,
    ),
    "ControlNet": Network(
        lambda d: d.ControlNetModel(
            in_channels=4,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            cross_attention_dim=8,
            attention_head_dim=4,
            conditioning_embedding_out_channels=(4, 8),
            **BLOCKS,
        ),
        (1, 4, 16, 16),
        call=lambda network, x: network(
            x, 3, encoder_hidden_states=text(1, 5, 8), controlnet_cond=text(1, 3, 32, 32), return_dict=False
        ),
        at_use={"call": controlled, "shape": (1, 4, 64, 64)},
    ),
}

# -- transformers of videos: (batch, channels, frames, rows, columns) --------------------------------------------------

VIDEO = (1, 4, 3, 16, 16)
WIDE = {"num_attention_heads": 2, "attention_head_dim": 16}


def video(
    name: str, call: Callable[[Any, Tensor], Any], shape: tuple[int, ...] = VIDEO, dim: int = 3, **sizes: Any
) -> Network:
    """A transformer with ``sizes``, in which sines of times and places are computed in float32."""
    dtype = sizes.pop("dtype", torch.float64)
    return Network(lambda d: getattr(d, name)(**sizes), shape, dim, call, tolerance=1e-5, dtype=dtype)


def at_time(**options: Any) -> Callable[[Any, Tensor], Any]:
    """A call at one time step."""
    return lambda network, x: network(x, timestep=torch.tensor([0.5]).double(), **options).sample


def kandinsky_call(network: nn.Module, x: Tensor) -> Tensor:
    """In float32, as its blocks are whatever their weights are."""
    places = [torch.arange(x.shape[1]), torch.arange(x.shape[2] // 2), torch.arange(x.shape[3] // 2)]
    prompt = {"encoder_hidden_states": text(1, 6, 8).float(), "pooled_projections": text(1, 8).float()}
    return at_time(visual_rope_pos=places, text_rope_pos=torch.arange(6), **prompt)(network, x)


def cosmos_call(network: nn.Module, x: Tensor) -> Tensor:
    mask = torch.zeros(1, 1, *x.shape[-2:], dtype=torch.float64)
    return at_time(encoder_hidden_states=text(1, 6, 8), fps=16, padding_mask=mask)(network, x)


KEPT = torch.ones(1, 6, dtype=torch.bool)
VIDEOS = {
    "CogVideoXTransformer3D": video(
        "CogVideoXTransformer3DModel",
        lambda network, x: network(x, text(1, 6, 8), torch.tensor([3])).sample,
        (1, 3, 4, 16, 16),
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=8,
        num_layers=1,
        max_text_seq_length=6,
        use_rotary_positional_embeddings=True,
        **WIDE,
    ),
    "MochiTransformer3D": video(
        "MochiTransformer3DModel",
        at_time(encoder_hidden_states=text(1, 6, 8), encoder_attention_mask=KEPT),
        in_channels=4,
        num_layers=2,
        pooled_projection_dim=16,
        text_embed_dim=8,
        time_embed_dim=8,
        max_sequence_length=6,
        **WIDE,
    ),
    "HunyuanVideoTransformer3D": video(
        "HunyuanVideoTransformer3DModel",
        at_time(
            encoder_hidden_states=text(1, 6, 8),
            encoder_attention_mask=KEPT,
            pooled_projections=text(1, 8),
            guidance=torch.tensor([1.0]).double(),
        ),
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=8,
        pooled_projection_dim=8,
        rope_axes_dim=(4, 6, 6),
        **WIDE,
    ),
    "CosmosTransformer3D": video(
        "CosmosTransformer3DModel",
        cosmos_call,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        text_embed_dim=8,
        adaln_lora_dim=4,
        max_size=(4, 64, 64),
        extra_pos_embed_type=None,
        **WIDE,
    ),
    "Kandinsky5Transformer3D": video(
        "Kandinsky5Transformer3DModel",
        kandinsky_call,
        (1, 3, 16, 16, 4),
        2,
        in_text_dim=8,
        in_text_dim2=8,
        time_dim=16,
        model_dim=32,
        ff_dim=64,
        num_text_blocks=1,
        num_visual_blocks=1,
        axes_dims=(4, 6, 6),
        dtype=torch.float32,
    ),
    "EasyAnimateTransformer3D": video(
        "EasyAnimateTransformer3DModel",
        at_time(encoder_hidden_states=text(1, 6, 8)),
        in_channels=4,
        out_channels=4,
        patch_size=2,
        num_layers=1,
        mmdit_layers=1,
        time_embed_dim=8,
        text_embed_dim=8,
        **WIDE,
    ),
}
NETWORKS |= VIDEOS


test_networks_are_exact = all_exact(__name__, NETWORKS, always=("UNet2DCondition",))
