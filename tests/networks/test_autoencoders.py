"""The autoencoders of diffusers: of images, videos and sound."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "vae"))
from autoencoders import AUTOENCODERS, BLOCKS, CODER, IMAGE, VIDEO, WAN, there_and_back

from networks.oracle import Network, all_exact

PACKAGE = "diffusers"
pytest.importorskip(PACKAGE)



def with_options(enable: Callable[[Any], Any], **options: Any) -> Callable[[Any], nn.Module]:
    """An AutoencoderKL with a memory-saving option."""

    def make(d: Any) -> nn.Module:
        network = d.AutoencoderKL(latent_channels=4, sample_size=16, **BLOCKS, **CODER)
        enable(network)
        return network

    return make


# What some of them are held to instead.
SPECIAL = {
    "AutoencoderKLHunyuanImage": {"reduced": 1.0},
    "AutoencoderKLTemporalDecoder": {"reduced": 1.0},
    "AutoencoderKLLTXVideo": {"tolerance": 1e-5},
}
NETWORKS = {
    name: Network(kind.make, kind.shape, kind.dim, kind.there_and_back, **SPECIAL.get(name, {}))
    for name, kind in AUTOENCODERS.items()
}
NETWORKS |= {
    "AutoencoderKL, columns": Network(
        lambda d: d.AutoencoderKL(latent_channels=4, sample_size=32, **BLOCKS, **CODER),
        IMAGE,
        3,
        there_and_back,
    ),
    "AutoencoderKL, slices": Network(
        with_options(lambda network: network.enable_slicing()), (3, 3, 32, 32), call=there_and_back
    ),
    "AutoencoderKL, slices of a cut batch": Network(
        with_options(lambda network: network.enable_slicing()), (3, 3, 32, 32), 0, there_and_back
    ),
    "AutoencoderKL, tiles": Network(
        with_options(lambda network: network.enable_tiling()), IMAGE, call=there_and_back, reduced=1.0
    ),
    "AutoencoderKL, tiles, columns": Network(
        with_options(lambda network: network.enable_tiling()), IMAGE, 3, there_and_back, reduced=1.0
    ),
    "AsymmetricAutoencoderKL": Network(
        lambda d: d.AsymmetricAutoencoderKL(
            down_block_out_channels=(8, 16), up_block_out_channels=(8, 16), norm_num_groups=4, **CODER
        ),
        IMAGE,
        call=there_and_back,
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
        IMAGE,
        call=there_and_back,
        tolerance=1e-4,
    ),
    "AutoencoderTiny": Network(
        lambda d: d.AutoencoderTiny(
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            num_encoder_blocks=(1, 1),
            num_decoder_blocks=(1, 1),
        ),
        IMAGE,
        call=there_and_back,
    ),
    "AutoencoderRAE": Network(
        lambda d: d.AutoencoderRAE(
            encoder_hidden_size=64,
            encoder_num_hidden_layers=1,
            encoder_patch_size=4,
            decoder_hidden_size=16,
            decoder_num_hidden_layers=1,
            decoder_num_attention_heads=2,
            decoder_intermediate_size=32,
            patch_size=4,
            encoder_input_size=32,
            image_size=32,
        ),
        IMAGE,
        call=there_and_back,
    ),
    "VQModel": Network(
        lambda d: d.VQModel(latent_channels=4, num_vq_embeddings=16, **BLOCKS, **CODER),
        (2, 3, 32, 32),
        call=lambda network, x: network(x).sample,
    ),
    "ConsistencyDecoderVAE": Network(
        lambda d: d.ConsistencyDecoderVAE(
            encoder_block_out_channels=(8, 16),
            encoder_down_block_types=("DownEncoderBlock2D",) * 2,
            encoder_layers_per_block=1,
            encoder_norm_num_groups=4,
            decoder_block_out_channels=(8, 16),
            decoder_down_block_types=("ResnetDownsampleBlock2D",) * 2,
            decoder_up_block_types=("ResnetUpsampleBlock2D",) * 2,
            decoder_layers_per_block=1,
            decoder_norm_num_groups=4,
        ),
        IMAGE,
        call=there_and_back,
    ),
    "AutoencoderKLWan, residual": Network(
        lambda d: d.AutoencoderKLWan(
            is_residual=True, patch_size=2, **{**WAN, "dim_mult": [1, 1], "in_channels": 12, "out_channels": 12}
        ),
        VIDEO,
        3,
        there_and_back,
    ),
    "AutoencoderVidTok": Network(
        lambda d: d.AutoencoderVidTok(ch=8, ch_mult=[1, 2], num_res_blocks=1),
        (1, 3, 5, 32, 32),
        3,
        there_and_back,
    ),
    "AutoencoderVidTok, FSQ": Network(
        lambda d: d.AutoencoderVidTok(
            ch=8, ch_mult=[1, 2], num_res_blocks=1, regularizer="fsq", z_channels=2, codebook_size=64, double_z=False
        ),
        (1, 3, 5, 32, 32),
        3,
        lambda network, x: network(x).sample,
        tolerance=1e-4,
    ),
    "Kandinsky6SRVAE": Network(
        lambda d: d.Kandinsky6SRVAE(
            latent_channels=4,
            encoder_block_out_channels=(8, 16),
            decoder_block_out_channels=(8, 16),
            layers_per_block=1,
            temporal_compression_ratio=2,
            temporal_compression_start_level=0,
        ),
        VIDEO,
        3,
        there_and_back,
    ),
    "AutoencoderOobleck": Network(
        lambda d: d.AutoencoderOobleck(
            encoder_hidden_size=8,
            downsampling_ratios=[2, 4],
            channel_multiples=[1, 2],
            decoder_channels=8,
            decoder_input_channels=4,
        ),
        (1, 2, 512),
        call=there_and_back,
    ),
    "AutoencoderSAME": Network(
        lambda d: d.AutoencoderSAME(
            patch_size=4,
            encoder_channels=16,
            encoder_c_mults=(2,),
            encoder_strides=(4,),
            encoder_transformer_depths=(1,),
            latent_dim=8,
            dim_heads=16,
        ),
        (1, 2, 512),
        call=there_and_back,
    ),
    "Cosmos3AVAEAudioTokenizer": Network(
        lambda d: d.Cosmos3AVAEAudioTokenizer(
            vocoder_input_dim=4,
            dec_dim=8,
            dec_c_mults=(1, 2),
            dec_strides=(2, 4),
            enc_dim=8,
            enc_intermediate_dim=16,
            enc_num_layers=2,
            enc_num_blocks=1,
            enc_n_fft=16,
            enc_hop_length=4,
            enc_latent_dim=8,
            enc_c_mults=(1,),
            enc_strides=(2,),
        ),
        (1, 2, 512),
        call=there_and_back,
        tolerance=1e-6,  # its spectrogram is in float32
    ),
    "LongCatAudioDiTVae": Network(
        lambda d: d.LongCatAudioDiTVae(
            channels=8,
            c_mults=[1, 2],
            strides=[2, 2],
            latent_dim=4,
            encoder_latent_dim=8,
            downsampling_ratio=4,
        ),
        (1, 1, 512),
        call=there_and_back,
    ),
    "MMAudioVAE": Network(
        lambda d: d.MMAudioVAE(8, 4, 16, (1, 2), 1, 8000, 64, 16),
        (1, 1024),
        1,
        lambda network, x: there_and_back(network.float(), x.float()),  # it runs in float32 only
        tolerance=1e-5,
    ),
}

OTHER_DIMS = {
    "AutoencoderKLWan": {"frames": 2, "columns": 4},
    "AutoencoderKLCogVideoX": {"frames": 2, "columns": 4},
    "AutoencoderKLMochi": {"frames": 2, "columns": 4},
    "AutoencoderKLHunyuanVideo": {"frames": 2, "columns": 4},
    "AutoencoderKLLTX2Video": {"frames": 2, "columns": 4},
    "AutoencoderKLCosmos": {"frames": 2, "columns": 4},
    "AutoencoderKLMagvit": {"frames": 2, "columns": 4},
    "AutoencoderKLAllegro": {"frames": 2},
    "AutoencoderKLMiniMaxH3": {"frames": 2, "columns": 4},
    "AutoencoderKLKVAEVideo": {"frames": 2},
    "AutoencoderVidTok": {"frames": 2},
    "Kandinsky6SRVAE": {"frames": 2},
    "AutoencoderKLTemporalDecoder": {"frames": 0, "columns": 3},
    "AutoencoderDC": {"columns": 3},
    "AutoencoderRAE": {"columns": 3},
    "AutoencoderTiny": {"columns": 3},
    "VQModel": {"columns": 3},
    "AutoencoderKLLTX2Audio": {"frequencies": 3},
}
# Frames that are cut are read one by one, and each is summed over the ranks.
READ_BY_FRAME = {"AutoencoderKLWan": 5.0, "AutoencoderKLCogVideoX": 1.0}
NETWORKS |= {
    f"{name}, {what}": replace(
        NETWORKS[name],
        dim=dim,
        reduced=READ_BY_FRAME[name] if dim == 2 and name in READ_BY_FRAME else NETWORKS[name].reduced,
    )
    for name, dims in OTHER_DIMS.items()
    for what, dim in dims.items()
}
for _name in (
    *("AutoencoderKL", "AutoencoderKLFlux2", "AutoencoderTiny", "AutoencoderKLWan", "AutoencoderKLHunyuanVideo"),
    *("AutoencoderKLMochi", "AutoencoderKLCogVideoX", "AutoencoderKLLTX2Video", "VQModel", "AutoencoderDC"),
):
    NETWORKS[_name] = replace(NETWORKS[_name], half=True)


test_networks_are_exact = all_exact(__name__, NETWORKS, always=("AutoencoderKLLTX2Video, columns",))
