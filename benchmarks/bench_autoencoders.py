"""Decoding and encoding with autoencoders of diffusers: two ranks next to one process, and to DistVAE.

    python benchmarks/bench_autoencoders.py [--only NAME] [--seconds S] [--json FILE]

Images and videos of 256 x 256 pixels, latents of 32 x 32 (of LTX-2, which knows no other way, 8 x 8), float32, no
gradients. Depths are those of the published networks, or of diffusers' defaults; channels are a quarter of them, so
that a round takes seconds. Each round times, one after the other: "one", the plain network, on both processes at once;
"two", the network with `DomainParallel` on its encoder and decoder, the gather of the result
included; "DistVAE", which does the same, where it is installed and has a form of the network. A round's time is the
slower rank's.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report import Figure, best_and_median, chosen, finish, parser
from timing import Run, interleaved, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

sys.path.append(str(Path(__file__).parents[1] / "examples" / "vae"))

GROUP = "autoencoders of diffusers on 2 ranks, latents of 32 x 32"
OF_ONE, OF_DISTVAE = 0.65, 1.0  # at most


@dataclass(frozen=True)
class Family:
    """How to make a network, from the module ``diffusers``, and the shape and the sharded dim of what it encodes."""

    make: Callable[[Any], nn.Module]
    shape: tuple[int, ...] = (1, 3, 256, 256)
    dim: int = 2


def video(frames: int) -> dict[str, Any]:
    return {"shape": (1, 3, frames, 256, 256), "dim": 3}


CHANNELS = (32, 64, 128, 128)
BLOCKS = {"block_out_channels": CHANNELS, "layers_per_block": 2, "norm_num_groups": 8}
CODER = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
HUNYUAN = {"block_out_channels": CHANNELS, "layers_per_block": 2}
WAN = {"base_dim": 24, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2}
LTX = {
    "latent_channels": 32,
    "block_out_channels": CHANNELS[:3],
    "decoder_block_out_channels": CHANNELS[:2],
    "layers_per_block": (4, 3, 3, 3),
    "decoder_layers_per_block": (4, 3, 3),
    "spatio_temporal_scaling": (True, False, False),
    "decoder_spatio_temporal_scaling": (True, False),
    "decoder_inject_noise": (False,) * 3,
    "patch_size": 4,
}

FAMILIES = {
    "AutoencoderKL": Family(lambda d: d.AutoencoderKL(latent_channels=4, **BLOCKS, **CODER)),
    "AutoencoderKLFlux2": Family(lambda d: d.AutoencoderKLFlux2(latent_channels=32, **BLOCKS, **CODER)),
    "AutoencoderKLHunyuanImage": Family(
        lambda d: d.AutoencoderKLHunyuanImage(
            3, 3, latent_channels=32, spatial_compression_ratio=8, sample_size=256, **HUNYUAN
        )
    ),
    "AutoencoderKLKVAE": Family(lambda d: d.AutoencoderKLKVAE(channels=32)),
    "AutoencoderDC": Family(
        lambda d: d.AutoencoderDC(
            latent_channels=32,
            attention_head_dim=8,
            encoder_block_types=("ResBlock", "ResBlock", "ResBlock", "EfficientViTBlock"),
            decoder_block_types=("ResBlock", "ResBlock", "ResBlock", "EfficientViTBlock"),
            encoder_block_out_channels=CHANNELS,
            decoder_block_out_channels=CHANNELS,
            encoder_layers_per_block=(2, 2, 2, 3),
            decoder_layers_per_block=(2, 2, 2, 3),
            encoder_qkv_multiscales=((), (), (), (5,)),
            decoder_qkv_multiscales=((), (), (), (5,)),
        )
    ),
    "AutoencoderKLCogVideoX": Family(
        lambda d: d.AutoencoderKLCogVideoX(
            block_out_channels=(32, 64, 64, 128),
            norm_num_groups=8,
            layers_per_block=3,
            sample_height=256,
            sample_width=256,
        ),
        **video(5),
    ),
    "AutoencoderKLCosmos": Family(
        lambda d: d.AutoencoderKLCosmos(
            encoder_block_out_channels=CHANNELS, decode_block_out_channels=(64, 128, 128, 128), resolution=256
        ),
        **video(9),
    ),
    "AutoencoderKLHunyuanVideo": Family(
        lambda d: d.AutoencoderKLHunyuanVideo(block_out_channels=CHANNELS, norm_num_groups=8), **video(5)
    ),
    "AutoencoderKLHunyuanVideo15": Family(
        lambda d: d.AutoencoderKLHunyuanVideo15(
            latent_channels=32, spatial_compression_ratio=8, temporal_compression_ratio=4, **HUNYUAN
        ),
        **video(5),
    ),
    "AutoencoderKLLTXVideo": Family(
        lambda d: d.AutoencoderKLLTXVideo(down_block_types=("LTXVideoDownBlock3D",) * 3, **LTX), **video(9)
    ),
    "AutoencoderKLLTX2Video": Family(
        lambda d: d.AutoencoderKLLTX2Video(
            latent_channels=32, block_out_channels=(64, 128, 256, 512), decoder_block_out_channels=(64, 128, 256)
        ),
        **video(9),
    ),
    "AutoencoderKLMagvit": Family(
        lambda d: d.AutoencoderKLMagvit(block_out_channels=list(CHANNELS), norm_num_groups=8), **video(5)
    ),
    "AutoencoderKLMochi": Family(
        lambda d: d.AutoencoderKLMochi(
            encoder_block_out_channels=(32, 32, 64, 96), decoder_block_out_channels=(32, 64, 128, 192)
        ),
        **video(6),
    ),
    "AutoencoderKLQwenImage": Family(lambda d: d.AutoencoderKLQwenImage(**WAN), **video(1)),
    "AutoencoderKLWan": Family(lambda d: d.AutoencoderKLWan(**WAN), **video(5)),
}


def measure(name: str, mesh: DeviceMesh, budget: float, quick: bool) -> list[Figure]:
    titles = {way: f"{name}, {way}" for way in ("decode", "encode")}
    try:
        import diffusers
        from autoencoders import code_of
        from ways import by_distvae, by_shardtensor
    except ImportError as error:
        note = f"{error.name} is not installed"
        return [Figure(GROUP, f"{title}: of one process", None, bar=OF_ONE, note=note) for title in titles.values()]
    family = FAMILIES[name]
    torch.manual_seed(0)
    plain = family.make(diffusers).eval()
    networks = {"one": plain, "two": copy.deepcopy(plain)}
    by_shardtensor(networks["two"], mesh, family.dim)
    try:
        networks["DistVAE"] = copy.deepcopy(plain)
        by_distvae(networks["DistVAE"], mesh)
    except (ImportError, ValueError):
        del networks["DistVAE"]
    x = torch.randn(family.shape)
    with torch.no_grad():
        code = code_of(plain, x)
        ways: dict[str, Callable[[Any], Tensor]] = {
            "decode": lambda network: network.decode(code, return_dict=False)[0],
            "encode": lambda network: code_of(network, x),
        }
        figures = []
        for way, call in ways.items():
            runs: dict[str, Run] = {kind: lambda call=call, net=net: call(net) for kind, net in networks.items()}
            found = {kind: run() for kind, run in runs.items()}
            scale = float(found["one"].abs().max())
            off = {k: float((y - found["one"]).abs().max()) / scale for k, y in found.items() if k != "one"}
            times = best_and_median(interleaved(runs, budget, 1 if quick else 3, 10))
            best, note = times["best"], "largest difference " + ", ".join(f"{k} {v:.0e}" for k, v in off.items())
            note += f"; latent {' x '.join(map(str, code.shape))}"
            title, ours = titles[way], best["two"]
            figures.append(
                Figure(GROUP, f"{title}: of one process", ours / best["one"], bar=OF_ONE, **times, note=note)
            )
            if "DistVAE" in best:
                figures.append(Figure(GROUP, f"{title}: of DistVAE", ours / best["DistVAE"], bar=OF_DISTVAE))
    return figures


def work(mesh: DeviceMesh, names: Sequence[str], budget: float, quick: bool) -> list[Figure]:
    figures = []
    for name in names:
        if dist.get_rank() == 0:
            print(f"measuring {name}", file=sys.stderr)
        figures += measure(name, mesh, budget, quick)
    return figures


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--seconds", type=float, default=6.0, help="for the rounds of a row")
    options = made.parse_args()
    names = chosen(options.only, FAMILIES, made.error)
    finish(on_ranks(work, names, 0.1 if options.quick else options.seconds, options.quick), options)


if __name__ == "__main__":
    main()
