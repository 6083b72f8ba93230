"""Pipelines of diffusers with random weights: an image by DiTPipeline and AutoencoderKL, a video by WanPipeline and
AutoencoderKLWan. The autoencoders have the usual strides, a quarter to a sixth of the usual channels, and fewer blocks;
the networks in front of them, which make the code, are tiny. `learn` teaches an autoencoder one photograph.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from autoencoders import there_and_back
from torch import Tensor
from tqdm import tqdm


@dataclass(frozen=True)
class Job:
    """A pipeline, and how it is called.

    Attributes:
        pipeline: of diffusers.
        run: makes images (N, 3, H, W) or videos (N, 3, T, H, W), of values from 0 to 1.
        code: one that its autoencoder decodes.
        dim: the dim of height, of code and result.
        factor: pixels per element of the code.
    """

    pipeline: Any
    run: Callable[[], Tensor]
    code: Tensor
    dim: int
    factor: int


def initialized(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    for parameter in module.parameters():  # DiT starts with zeros, which give pictures of nothing
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    return module.to(dtype).eval()


def image(size: int, dtype: torch.dtype, device: torch.device) -> Job:
    """An image of `size` pixels in each direction. The same on every rank, whatever its device."""
    from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel

    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(32, 64, 128, 128),
        layers_per_block=2,
        norm_num_groups=8,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
    )
    shape = {"sample_size": size // 8, "patch_size": 4, "in_channels": 4, "out_channels": 4}
    transformer = DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=8, num_layers=1, **shape)
    vae, transformer = initialized(vae, dtype), initialized(transformer, dtype)
    pipeline = DiTPipeline(transformer, vae, DDIMScheduler()).to(device)

    def run() -> Tensor:
        generator = torch.Generator().manual_seed(1)
        result = pipeline([207], generator=generator, num_inference_steps=4, output_type="pt")
        return result.images

    code = torch.randn(1, 4, size // 8, size // 8, dtype=dtype)
    return Job(pipeline, run, code.to(device), 2, 8)


def video(size: int, dtype: torch.dtype, device: torch.device, frames: int = 5) -> Job:
    """Two videos of `size` pixels in each direction. For a batch of more than one, torch has oneDNN's kernels
    however small the shards are."""
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel

    torch.manual_seed(0)
    vae = AutoencoderKLWan(base_dim=16, z_dim=16, num_res_blocks=1)
    transformer = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=32,
        ffn_dim=32,
        num_layers=1,
    )
    vae, transformer = initialized(vae, dtype), initialized(transformer, dtype)
    scheduler = FlowMatchEulerDiscreteScheduler()
    pipeline = WanPipeline(tokenizer=None, text_encoder=None, vae=vae, scheduler=scheduler, transformer=transformer)
    pipeline = pipeline.to(device)
    prompt = torch.randn(2, 8, 32, dtype=dtype).to(device)  # what a text encoder would give

    def run() -> Tensor:
        result = pipeline(
            prompt_embeds=prompt,
            height=size,
            width=size,
            num_frames=frames,
            num_inference_steps=4,
            guidance_scale=1.0,
            generator=torch.Generator().manual_seed(1),
            output_type="pt",
        )
        return result.frames.transpose(1, 2)

    code = torch.randn(2, 16, (frames - 1) // 4 + 1, size // 8, size // 8, dtype=dtype)
    return Job(pipeline, run, code.to(device), 3, 8)


def photograph(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The portrait of Grace Hopper that matplotlib comes with, (1, 3, size, size) of values from 0 to 1."""
    from matplotlib.cbook import get_sample_data
    from PIL import Image

    picture = Image.open(get_sample_data("grace_hopper.jpg", asfileobj=False)).convert("RGB")
    side = min(picture.size)
    pixels = np.asarray(picture.resize((size, size), box=(0, 0, side, side)))
    return torch.tensor(pixels).permute(2, 0, 1)[None].to(device, dtype) / 255


@torch.enable_grad()
def learn(vae: torch.nn.Module, picture: Tensor, steps: int, quiet: bool) -> None:
    """Train an autoencoder until it decodes a picture's code to something like the picture."""
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3)
    for _ in tqdm(range(steps), desc="learning a photograph", unit="step", disable=quiet):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(there_and_back(vae, 2 * picture - 1), 2 * picture - 1).backward()
        optimizer.step()


JOBS = {"image": image, "video": video}
