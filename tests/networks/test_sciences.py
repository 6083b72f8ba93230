"""Networks of weather, physics, earthquakes, motion and video. The name of each begins with that of its package."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import torch
from torch import Tensor, nn

from networks import torchvision_set_up  # noqa: F401  # before a package imports torchvision
from networks.oracle import Network, all_exact
from networks.programs import load

PACKAGE = "torch"


def science(make: Any, shape: tuple[int, ...], dim: int, **options: Any) -> Network:
    return Network(lambda _: make(), shape, dim, **{"reduced": 100.0, **options})


# -- weather -----------------------------------------------------------------------------------------------------------


def dgmr() -> nn.Module:
    """The generator, of four images of rain; it draws its latent map for one size."""
    stacks, sampler = load("dgmr.common"), load("dgmr.generators")
    network: nn.Module = sampler.Generator(
        stacks.ContextConditioningStack(1, 48),
        stacks.LatentConditioningStack((2, 2, 2), 96),
        sampler.Sampler(2, 96, 48),
    )
    return network


def rain(network: nn.Module, x: Tensor) -> Any:
    """The latent map has the size of the deepest map of the images."""
    network.latent_stack.shape = (2, x.shape[-2] // 32, x.shape[-1] // 32)
    return network(x)


def metnet() -> nn.Module:
    network: nn.Module = load("metnet").MetNet(
        input_channels=3,
        sat_channels=3,
        input_size=32,
        output_channels=2,
        hidden_dim=16,
        num_att_layers=1,
        num_att_heads=2,
        forecast_steps=3,
        temporal_dropout=0.0,
        use_preprocessor=False,
    )
    return network


SURFACE, STATIC, LEVELS = ("2t", "10u", "10v", "msl"), ("lsm", "z", "slt"), ("z", "u", "v", "t", "q")


def aurora() -> nn.Module:
    network: nn.Module = load("aurora").Aurora(
        encoder_depths=(1, 1),
        encoder_num_heads=(2, 4),
        decoder_depths=(1, 1),
        decoder_num_heads=(4, 2),
        window_size=(2, 2, 4),
        embed_dim=32,
        num_heads=2,
        use_lora=False,
    )
    return network


def forecast(network: nn.Module, x: Tensor) -> Any:
    """The next state of the atmosphere, of ``x`` (batch, history, levels, latitudes, longitudes)."""
    rows, columns = x.shape[-2:]
    fixed = torch.linspace(0, 1, rows * columns, dtype=x.dtype).view(rows, columns)
    given = load("aurora").Metadata(
        lat=torch.linspace(90, -90, rows),
        lon=torch.linspace(0, 360, columns + 1)[:-1],
        time=(datetime(2020, 6, 1, 12),),
        atmos_levels=(100, 250, 500, 850),
    )
    surface, levels = ({name: part for name in names} for names, part in ((SURFACE, x[:, :, 0]), (LEVELS, x)))
    result = network(load("aurora").Batch(surface, dict.fromkeys(STATIC, fixed), levels, given))
    return result.surf_vars, result.atmos_vars


# -- physics -----------------------------------------------------------------------------------------------------------


def avit() -> nn.Module:
    model: nn.Module = load("the_well.benchmark.models").AViT(
        3, 3, 2, (256, 64), hidden_dim=48, num_heads=2, processor_blocks=2
    )
    return model


def unet() -> nn.Module:
    model: nn.Module = load("the_well.benchmark.models").UNetClassic(3, 3, 2, (64, 32), init_features=4)
    return model


def healpix() -> nn.Module:
    """A U-Net of the twelve faces of a sphere, which each take their neighbours' pixels around them."""
    config = load("omegaconf").OmegaConf.create

    def part(name: str, **sizes: Any) -> dict[str, Any]:
        return {"_target_": f"physicsnemo.models.dlwp_healpix.layers.{name}", "_recursive_": False, **sizes}

    block = part("BasicConvBlock", kernel_size=3, n_layers=1)
    pool = {"_target_": "physicsnemo.nn.HEALPixMaxPool", "pooling": 2}
    encoder = part("UNetEncoder", conv_block=block, down_sampling_block=pool, n_channels=[8, 16])
    decoder = part(
        "UNetDecoder",
        conv_block=block,
        up_sampling_block=part("TransposedConvUpsample", upsampling=2),
        output_layer=part("BasicConvBlock", kernel_size=1, n_layers=1),
        n_channels=[16, 8],
    )
    network: nn.Module = load("physicsnemo.models.dlwp_healpix").HEALPixUNet(
        config(encoder), config(decoder), 3, 3, 0, 0, 1, 1
    )
    return network


# -- earthquakes, motion, video, images --------------------------------------------------------------------------------


def flownet() -> nn.Module:
    module = load("ptlflow.models.flownet.flownetc")
    network: nn.Module = module.FlowNetC()
    return network


def flow(network: nn.Module, x: Tensor) -> Any:
    return network({"images": x.unflatten(1, (2, 3))})["flows"]


def x3d() -> nn.Module:
    network: nn.Module = load("pytorchvideo.models.x3d").create_x3d(
        input_clip_length=4, input_crop_size=64, model_num_class=5, dropout_rate=0.0, depth_factor=1.0, head_dim_out=16
    )
    return nn.Sequential(*network.blocks[:-1])  # the head pools a window of one size


NETWORKS = {
    "dgmr, generator": science(dgmr, (1, 4, 1, 64, 64), 3, call=rain),
    "metnet": science(metnet, (1, 3, 3, 32, 32), 3),
    "aurora, tiny": science(aurora, (1, 2, 4, 32, 32), 3, call=forecast, tolerance=1e-5),
    "physicsnemo, HEALPix U-Net, faces": science(
        healpix, (1, 12, 1, 3, 16, 16), 1, call=lambda network, x: network([x])
    ),
    "the_well, AViT": science(avit, (1, 256, 64, 3), 1),
    "the_well, UNetClassic": science(unet, (1, 3, 64, 32), 2, norms_train=True),
    "seisbench, GPD": science(lambda: load("seisbench.models").GPD(), (2, 3, 400), 2),
    "seisbench, DeepDenoiser": science(lambda: load("seisbench.models").DeepDenoiser(), (2, 2, 31, 201), 3),
    "ptlflow, FlowNetC": science(flownet, (1, 6, 128, 64), 2, call=flow),
    "pytorchvideo, X3D": science(x3d, (1, 3, 4, 64, 64), 3),
    "torchsr, NinaSR": science(lambda: load("torchsr.models.ninasr").NinaSR(2, 8, 2), (1, 3, 64, 64), 2),
}


test_networks_are_exact = all_exact(__name__, NETWORKS, of_packages=True)
