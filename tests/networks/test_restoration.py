"""Networks of spandrel, which enlarge images or remove noise, haze, darkness or artefacts from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from networks.oracle import Network, all_exact, normal, uniform
from networks.programs import load

PACKAGE = "spandrel"
pytest.importorskip(PACKAGE)


def restored(
    architecture: str,
    shape: tuple[int, ...] = (1, 3, 32, 32),
    name: str = "",
    call: Callable[[nn.Module, Tensor], Any] = lambda network, x: network(x),
    train: bool = False,
    draw: Callable[[tuple[int, ...]], Tensor] = normal,
    **options: Any,
) -> Network:
    """A network of an architecture, which most often has the same name."""
    return Network(
        lambda _: getattr(load(f"spandrel.architectures.{architecture}"), name or architecture)(**options),
        shape,
        call=call,
        tolerance=1e-10,
        reduced=100.0,
        train=train,
        draw=draw,
    )


WINDOWS: dict[str, Any] = {"img_size": 32, "embed_dim": 16, "depths": (2,), "num_heads": (2,), "window_size": 8}
BLOCKS: dict[str, Any] = {"middle_blk_num": 1, "enc_blk_nums": [1, 1], "dec_blk_nums": [1, 1]}


def sorted_stably(network: nn.Module, x: Tensor) -> Any:
    """Tokens are sorted by category, without ``stable=True``: one device's sort has those of a category in any order,
    and that of shards in their own."""
    sort = torch.sort
    stable = lambda x, *dim, **options: sort(x, *dim, **options) if dim else sort(x, **{**options, "stable": True})  # noqa: E731
    with patch.object(torch, "sort", stable):
        return network(x)


NETWORKS = {
    "SPAN": restored("SPAN", num_in_ch=3, num_out_ch=3, feature_channels=8, upscale=2),
    "SAFMN": restored("SAFMN", dim=8, n_blocks=2, upscaling_factor=2),
    "NAFNet": restored("NAFNet", width=8, **BLOCKS),
    "KBNet": restored("KBNet", name="KBNet_s", width=8, **BLOCKS),
    "RCAN": restored(  # which writes to its input
        "RCAN", call=lambda network, x: network(x * 1), n_resgroups=1, n_resblocks=2, n_feats=16, reduction=4
    ),
    "Compact": restored("Compact", num_feat=8, num_conv=3, upscale=2),
    "OmniSR": restored("OmniSR", num_feat=16, block_num=1, res_num=1, window_size=8, up_scale=2),
    "DAT": restored(
        "DAT", img_size=32, embed_dim=16, split_size=[8, 16], depth=[2], num_heads=[2], expansion_factor=2, upscale=2
    ),
    "HAT": restored("HAT", **WINDOWS, upscale=2, upsampler="pixelshuffle", compress_ratio=2, squeeze_factor=2),
    "DRCT": restored("DRCT", **WINDOWS, upscale=2, gc=8),
    "CRAFT": restored(
        "CRAFT",
        window_size=8,
        embed_dim=16,
        depths=(2,),
        num_heads=(2,),
        split_size_0=4,
        split_size_1=8,
        upscale=2,
    ),
    "GRL": restored(
        "GRL",
        img_size=32,
        embed_dim=16,
        depths=[2],
        num_heads_window=[2],
        num_heads_stripe=[2],
        window_size=8,
        stripe_size=[8, 8],
        upscale=2,
    ),
    "ATD": restored(
        "ATD", **WINDOWS, call=sorted_stably, category_size=32, num_tokens=8, reducted_dim=4, upscale=2
    ),
    "DITN": restored("DITN", dim=8, ITL_blocks=1, SAL_blocks=1, UFONE_blocks=1, patch_size=8, upscale=2),
    "Uformer": restored("Uformer", img_size=32, embed_dim=8, depths=[1] * 9, win_size=4, num_heads=[1] * 9),
    "MixDehazeNet": restored("MixDehazeNet", (1, 3, 64, 64), embed_dims=[8, 16, 32, 16, 8], depths=[1] * 5),
    "RetinexFormer": restored("RetinexFormer", n_feat=8, stage=1, num_blocks=[1, 1, 1]),
    "SeemoRe": restored(
        "SeemoRe",
        in_chans=3,
        num_experts=2,
        num_layers=1,
        embedding_dim=8,
        scale=2,
        global_kernel_size=5,
        lr_space="exp",
        recursive=1,
    ),
    "FBCNN": restored("FBCNN", nc=[8, 8, 8, 512], nb=1),
    "SwiftSRGAN": restored("SwiftSRGAN", num_channels=8, num_blocks=1, upscale_factor=2),
    "RealCUGAN": restored("RealCUGAN", (1, 3, 40, 40), name="UpCunet2x"),
    "PLKSR": restored("PLKSR", train=True, dim=16, n_blocks=2, upscaling_factor=2),
    "LaMa": restored("LaMa", call=lambda network, x: network(x, (x[:, :1] > 0).to(x.dtype)), in_nc=4, out_nc=3),
    "MoSR": restored("MoSR", n_block=2, dim=8, upscale=2),
    "FDAT": restored("FDAT", embed_dim=16, num_groups=1, depth_per_group=1, num_heads=2, window_size=8, scale=2),
    "HVICIDNet": restored("HVICIDNet", draw=uniform, channels=(8, 8, 16, 16), heads=(1, 2, 2, 2)),
}


test_networks_are_exact = all_exact(__name__, NETWORKS)
