"""A small one of each `AutoencoderKL*` of diffusers, with random weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Autoencoder:
    """How to make one, and what it takes.

    Attributes:
        make: the network, from the module `diffusers`.
        shape: of what it encodes: images (N, C, H, W), videos (N, C, T, H, W), or sound.
        dim: which dim of it is sharded: height, or time where there is no height.
        decoding: further arguments of `decode`.
    """

    make: Callable[[Any], nn.Module]
    shape: tuple[int, ...]
    dim: int = 2
    decoding: Mapping[str, Any] = field(default_factory=dict)

    def there_and_back(self, network: nn.Module, x: Tensor) -> Tensor:
        """What is left of an input that is encoded, to the most likely code, and decoded."""
        return there_and_back(network, x, **self.decoding)


def there_and_back(network: Any, x: Tensor, **options: Any) -> Tensor:
    y = network.decode(code_of(network, x), **options)
    return y.sample if hasattr(y, "sample") else y


def code_of(network: Any, x: Tensor) -> Tensor:
    """The latent of an input; of a distribution of them the most likely one."""
    code = network.encode(x)
    if hasattr(code, "latent_dist"):
        return code.latent_dist.mode()
    return code.latent if hasattr(code, "latent") else code.latents


BLOCKS = {"layers_per_block": 1, "block_out_channels": (8, 16), "norm_num_groups": 4}
CODER = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
WAN = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [True]}
HUNYUAN = {"latent_channels": 8, "block_out_channels": (32, 32), "layers_per_block": 1}
LTX = {
    "latent_channels": 8,
    "block_out_channels": (8, 8),
    "decoder_block_out_channels": (8, 8),
    "layers_per_block": (1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1),
    "spatio_temporal_scaling": (True, False),
    "decoder_spatio_temporal_scaling": (True, False),
    "decoder_inject_noise": (False,) * 3,
    "patch_size": 2,
}
IMAGE, VIDEO = (1, 3, 32, 32), (1, 3, 5, 32, 32)


def allegro(d: Any) -> nn.Module:
    """It runs in tiles only, which are large by default."""
    network = d.AutoencoderKLAllegro(
        down_block_types=("AllegroDownBlock3D",) * 2,
        up_block_types=("AllegroUpBlock3D",) * 2,
        temporal_downsample_blocks=(True, False),
        temporal_upsample_blocks=(False, True),
        temporal_compression_ratio=2,
        **BLOCKS,
    )
    network.enable_tiling()
    network.kernel, network.stride = (4, 16, 32), (2, 8, 16)
    return network


AUTOENCODERS = {
    "AutoencoderKL": Autoencoder(
        lambda d: d.AutoencoderKL(latent_channels=4, sample_size=32, **BLOCKS, **CODER), (2, 3, 32, 32)
    ),
    "AutoencoderKLFlux2": Autoencoder(lambda d: d.AutoencoderKLFlux2(latent_channels=4, **BLOCKS, **CODER), IMAGE),
    "AutoencoderKLHunyuanImage": Autoencoder(
        lambda d: d.AutoencoderKLHunyuanImage(3, 3, spatial_compression_ratio=2, sample_size=32, **HUNYUAN), IMAGE
    ),
    "AutoencoderKLKVAE": Autoencoder(
        lambda d: d.AutoencoderKLKVAE(channels=32, num_enc_blocks=1, num_dec_blocks=1, z_channels=4, ch_mult=(1, 1)),
        IMAGE,
    ),
    "AutoencoderKLTemporalDecoder": Autoencoder(
        lambda d: d.AutoencoderKLTemporalDecoder(
            block_out_channels=(32, 32), down_block_types=("DownEncoderBlock2D",) * 2
        ),
        (4, 3, 32, 32),
        2,
        {"num_frames": 2},
    ),
    "AutoencoderKLAllegro": Autoencoder(allegro, (1, 3, 6, 32, 32), 3),
    "AutoencoderKLCogVideoX": Autoencoder(
        lambda d: d.AutoencoderKLCogVideoX(
            block_out_channels=(8,) * 4,
            layers_per_block=1,
            norm_num_groups=4,
            latent_channels=4,
            sample_height=32,
            sample_width=32,
        ),
        VIDEO,
        3,
    ),
    "AutoencoderKLCosmos": Autoencoder(
        lambda d: d.AutoencoderKLCosmos(
            latent_channels=4,
            encoder_block_out_channels=(8, 16),
            decode_block_out_channels=(8, 16),
            attention_resolutions=(4,),
            resolution=16,
            num_layers=1,
            patch_size=2,
            spatial_compression_ratio=4,
            temporal_compression_ratio=4,
        ),
        (1, 3, 5, 16, 16),
        3,
    ),
    "AutoencoderKLHunyuanVideo": Autoencoder(
        lambda d: d.AutoencoderKLHunyuanVideo(
            latent_channels=4,
            down_block_types=("HunyuanVideoDownBlock3D",) * 3,
            up_block_types=("HunyuanVideoUpBlock3D",) * 3,
            spatial_compression_ratio=4,
            **{**BLOCKS, "block_out_channels": (8, 8, 16)},
        ),
        VIDEO,
        3,
    ),
    "AutoencoderKLHunyuanVideo15": Autoencoder(
        lambda d: d.AutoencoderKLHunyuanVideo15(spatial_compression_ratio=2, temporal_compression_ratio=1, **HUNYUAN),
        VIDEO,
        3,
    ),
    "AutoencoderKLHunyuanImageRefiner": Autoencoder(
        lambda d: d.AutoencoderKLHunyuanImageRefiner(
            spatial_compression_ratio=2, temporal_compression_ratio=1, **HUNYUAN
        ),
        VIDEO,
        3,
    ),
    "AutoencoderKLKVAEVideo": Autoencoder(
        lambda d: d.AutoencoderKLKVAEVideo(
            ch=32, ch_mult=(1, 1), num_res_blocks=1, z_channels=4, temporal_compress_times=2
        ),
        VIDEO,
        3,
    ),
    "AutoencoderKLLTXVideo": Autoencoder(
        lambda d: d.AutoencoderKLLTXVideo(down_block_types=("LTXVideoDownBlock3D",) * 2, **LTX), VIDEO, 3
    ),
    "AutoencoderKLLTX2Video": Autoencoder(
        lambda d: d.AutoencoderKLLTX2Video(
            down_block_types=("LTX2VideoDownBlock3D",) * 2,
            downsample_type=("spatial", "spatiotemporal"),
            upsample_factor=(1, 1),
            **LTX,
        ),
        VIDEO,
        3,
    ),
    "AutoencoderKLMagvit": Autoencoder(
        lambda d: d.AutoencoderKLMagvit(
            latent_channels=4,
            down_block_types=("SpatialDownBlock3D", "SpatialTemporalDownBlock3D"),
            up_block_types=("SpatialUpBlock3D", "SpatialTemporalUpBlock3D"),
            **BLOCKS,
        ),
        VIDEO,
        3,
    ),
    "AutoencoderKLMiniMaxH3": Autoencoder(
        lambda d: d.AutoencoderKLMiniMaxH3(
            latent_channels=4,
            block_out_channels=(8, 16),
            layers_per_block=1,
            spatial_downsample_factors=(2, 2),
            temporal_downsample_factors=(1, 2),
            norm_num_groups=4,
            decoder_num_layers=1,
            decoder_num_attention_heads=2,
            decoder_attention_head_dim=16,
            decoder_ffn_mult=2,
            clip_length=5,
            token_drop=1,
            latents_mean=(0.0,) * 4,
            latents_std=(1.0,) * 4,
        ),
        (1, 3, 10, 32, 32),
        3,
    ),
    "AutoencoderKLMochi": Autoencoder(
        lambda d: d.AutoencoderKLMochi(
            in_channels=15,
            encoder_block_out_channels=(32, 32),
            decoder_block_out_channels=(32, 32),
            latent_channels=4,
            layers_per_block=(1, 1, 1),
            temporal_expansions=(2,),
            spatial_expansions=(2,),
            add_attention_block=(False, True, True),
        ),
        (1, 3, 4, 32, 32),
        3,
    ),
    "AutoencoderKLQwenImage": Autoencoder(lambda d: d.AutoencoderKLQwenImage(**WAN), (1, 3, 1, 32, 32), 3),
    "AutoencoderKLQwenImage21": Autoencoder(
        lambda d: d.AutoencoderKLQwenImage21(
            decoder_base_dim=8, in_channels=3, out_channels=3, **{**WAN, "dim_mult": [1, 1]}
        ),
        (1, 3, 1, 32, 32),
        3,
    ),
    "AutoencoderKLWan": Autoencoder(lambda d: d.AutoencoderKLWan(**WAN), VIDEO, 3),
    "AutoencoderKLLTX2Audio": Autoencoder(
        lambda d: d.AutoencoderKLLTX2Audio(
            base_channels=8, ch_mult=(1, 2), num_res_blocks=1, resolution=32, latent_channels=4, mel_bins=16
        ),
        (1, 2, 32, 16),
    ),
    "AutoencoderKLKVAEAudio": Autoencoder(
        lambda d: d.AutoencoderKLKVAEAudio(
            encoder_dim=4,
            encoder_rates=[2, 4],
            latent_dim=16,
            codebook_dim=4,
            decoder_dim=16,
            decoder_rates=[4, 2],
            attn_num_heads=2,
        ),
        (1, 1, 512),
    ),
    "AutoencoderKLMiniMaxH3Audio": Autoencoder(
        lambda d: d.AutoencoderKLMiniMaxH3Audio(
            encoder_dim=4,
            encoder_rates=(2, 4),
            latent_dim=16,
            latent_channels=4,
            num_attention_heads=2,
            decoder_dim=16,
            decoder_rates=(4, 2),
            decoder_kernel_sizes=(8, 4),
            resblock_kernel_sizes=(3, 5),
            resblock_dilation_sizes=((1, 3), (1, 3)),
        ),
        (1, 1, 512),
    ),
}
