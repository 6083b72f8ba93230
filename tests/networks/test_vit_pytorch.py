"""The networks of vit-pytorch: vision transformers, of images, videos and series."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from torch import Tensor, nn

from networks.oracle import Network, all_exact, cut
from shardtensor import UnsupportedSharding
from shardtensor.testing import run_expecting_errors

PACKAGE = "vit_pytorch"


def import_package() -> None:
    """The package imports torchvision, which has to fit torch's build, for augmentations that are not used here."""
    pytest.importorskip("einops")
    replaced = {name: sys.modules.get(name) for name in ("torchvision", "torchvision.transforms")}
    top, transforms = map(ModuleType, replaced)
    top.transforms = transforms  # type: ignore[attr-defined]
    sys.modules |= {"torchvision": top, "torchvision.transforms": transforms}
    try:
        pytest.importorskip(PACKAGE)
        importlib.import_module(f"{PACKAGE}.wwt")
    finally:
        for name, module in replaced.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


import_package()

SIZE = {
    "image_size": 32,
    "patch_size": 4,
    "num_classes": 5,
    "dim": 16,
    "depth": 2,
    "heads": 2,
    "mlp_dim": 32,
    "dim_head": 8,
}
VIDEO = {"image_size": 16, "image_patch_size": 4, "frames": 4, "frame_patch_size": 2}
IMAGE_SHAPE, VIDEO_SHAPE, SERIES = (2, 3, 32, 32), (2, 3, 4, 16, 16), (2, 3, 64)
VIDEO = {**{k: v for k, v in SIZE.items() if k not in ("image_size", "patch_size")}, **VIDEO}


def of(module: str, name: str, **options: Any) -> Any:
    """A function that makes a network."""
    return lambda package: getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)(**options)


def sized(module: str, name: str, **options: Any) -> Any:
    return of(module, name, **{**SIZE, **options})


def without(*left_out: str, **options: Any) -> dict[str, Any]:
    return {key: value for key, value in SIZE.items() if key not in left_out} | options


def in_float64(network: nn.Module, x: Tensor) -> Tensor:
    """For networks that make tensors in the default dtype."""
    torch.set_default_dtype(torch.float64)
    try:
        return network(x)
    finally:
        torch.set_default_dtype(torch.float32)


def in_float32(network: nn.Module, x: Tensor) -> Tensor:
    """For networks that convert to it."""
    return network.float()(x.float())


def ragged(network: nn.Module, x: Tensor, **options: Any) -> Tensor:
    """Images of several sizes, cut from one."""
    return network([x[0], x[0, :, :16], x[1, :, :, :16], x[1, :, :24, :16]], **options)


def mae(package: Any, **options: Any) -> nn.Module:
    encoder = sized("deepvit", "DeepViT", **options)(package)
    return of("mae", "MAE", encoder=encoder, decoder_dim=16, decoder_heads=2, decoder_dim_head=8)(package)


def simmim(package: Any) -> nn.Module:
    return of("simmim", "SimMIM", encoder=sized("deepvit", "DeepViT")(package))(package)


def efficient(package: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    options = without("depth", "heads", "mlp_dim", "dim_head", transformer=nn.TransformerEncoder(layer, 1))
    return of("efficient", "ViT", **options)(package)


NETWORKS = {
    "ViT": Network(sized("vit", "ViT"), IMAGE_SHAPE, half=True),
    "ViT, mean": Network(sized("vit", "ViT", pool="mean"), IMAGE_SHAPE, 3),
    "SimpleViT": Network(sized("simple_vit", "SimpleViT"), IMAGE_SHAPE, half=True),
    "flash": Network(sized("simple_flash_attn_vit", "SimpleViT"), IMAGE_SHAPE),
    "FFT": Network(sized("simple_vit_with_fft", "SimpleViT", freq_patch_size=4), IMAGE_SHAPE),
    "hyper connections": Network(
        sized("simple_vit_with_hyper_connections", "SimpleViT", num_residual_streams=2), IMAGE_SHAPE
    ),
    "patch dropout": Network(sized("simple_vit_with_patch_dropout", "SimpleViT"), IMAGE_SHAPE),
    "QK norm": Network(sized("simple_vit_with_qk_norm", "SimpleViT"), IMAGE_SHAPE),
    "register tokens": Network(sized("simple_vit_with_register_tokens", "SimpleViT"), IMAGE_SHAPE),
    "relative position": Network(sized("simple_vit_with_relative_proj_pos_bias", "SimpleViT"), IMAGE_SHAPE),
    "sparse gating": Network(sized("simple_vit_with_sparse_gating", "SimpleViTWithSparseGating"), IMAGE_SHAPE),
    "specialized class token": Network(sized("simple_vit_with_specialized_cls", "SimpleViT"), IMAGE_SHAPE),
    "value residual": Network(sized("simple_vit_with_value_residual", "SimpleViT"), IMAGE_SHAPE),
    "attention residual": Network(sized("simple_vit_attn_residual", "SimpleViTAttnResidual"), IMAGE_SHAPE),
    "attention residual, DCA": Network(sized("attn_residual_with_dca_simple_vit", "SimpleViT"), IMAGE_SHAPE),
    "orthogonal update": Network(sized("simple_vit_orthog_residual_update", "SimpleViT"), IMAGE_SHAPE),
    "SimpleUViT": Network(sized("simple_uvit", "SimpleUViT"), IMAGE_SHAPE),
    "ViT-5": Network(sized("vit_5", "ViT"), IMAGE_SHAPE),
    "nViT": Network(sized("normalized_vit", "nViT"), IMAGE_SHAPE),
    "decorrelated": Network(sized("vit_with_decorr", "ViT"), IMAGE_SHAPE, call=lambda network, x: first(network(x))),
    "keel": Network(sized("vit_with_keel_post_ln", "ViT"), IMAGE_SHAPE),
    "DetPool": Network(sized("vit_detpool", "ViTDetPool"), IMAGE_SHAPE, call=lambda network, x: first(network(x))),
    "patch merger": Network(sized("vit_with_patch_merger", "ViT", patch_merge_num_tokens=4), IMAGE_SHAPE),
    "ViT, small data": Network(sized("vit_for_small_dataset", "ViT"), IMAGE_SHAPE),
    "learnable memory": Network(sized("learnable_memory_vit", "ViT"), IMAGE_SHAPE),
    "parallel": Network(sized("parallel_vit", "ViT"), IMAGE_SHAPE),
    "adaptive tokens": Network(sized("ats_vit", "ViT", max_tokens_per_depth=(32, 16)), IMAGE_SHAPE),
    "DeepViT": Network(sized("deepvit", "DeepViT"), IMAGE_SHAPE),
    "CaiT": Network(sized("cait", "CaiT", cls_depth=1), IMAGE_SHAPE, half=True),
    "XCiT": Network(sized("xcit", "XCiT", cls_depth=1), IMAGE_SHAPE, half=True),
    "RvT": Network(sized("rvt", "RvT"), IMAGE_SHAPE),
    "JumboViT": Network(sized("jumbo_vit", "JumboViT"), IMAGE_SHAPE),
    "JetViT": Network(sized("jet_vit", "JetViT", dim_head=8), IMAGE_SHAPE),
    "LookViT": Network(
        of(
            "look_vit",
            "LookViT",
            dim=16,
            image_size=48,
            num_classes=5,
            depth=1,
            heads=2,
            patch_size=8,
            highres_patch_size=4,
            cross_attn_heads=2,
            dim_head=8,
            cross_attn_dim_head=8,
        ),
        (2, 3, 48, 48),
    ),
    "LoopedViT": Network(
        of(
            "looped_vit",
            "LoopedViT",
            **without("depth", pre_loop_depth=1, num_looped_blocks=1, post_loop_depth=1, loop_depth=2),
        ),
        IMAGE_SHAPE,
    ),
    "WWT": Network(sized("wwt", "WWT", num_slots=4), IMAGE_SHAPE, call=lambda network, x: first(network(x))),
    "CCT": Network(
        of(
            "cct",
            "CCT",
            img_size=32,
            embedding_dim=16,
            n_conv_layers=1,
            kernel_size=3,
            stride=1,
            padding=1,
            num_layers=1,
            num_heads=2,
            mlp_ratio=2,
            num_classes=5,
            positional_embedding="learnable",
        ),
        IMAGE_SHAPE,
    ),
    "CCT, sine": Network(
        of(
            "cct",
            "CCT",
            img_size=32,
            embedding_dim=16,
            n_conv_layers=2,
            kernel_size=7,
            num_layers=1,
            num_heads=2,
            mlp_ratio=2,
            num_classes=5,
            positional_embedding="sine",
        ),
        IMAGE_SHAPE,
    ),
    "CrossViT": Network(
        of(
            "cross_vit",
            "CrossViT",
            image_size=32,
            num_classes=5,
            sm_dim=16,
            lg_dim=24,
            sm_patch_size=4,
            sm_enc_heads=2,
            sm_enc_mlp_dim=32,
            lg_patch_size=8,
            lg_enc_depth=1,
            lg_enc_heads=2,
            lg_enc_mlp_dim=32,
            cross_attn_depth=1,
            cross_attn_heads=2,
            depth=1,
        ),
        IMAGE_SHAPE,
        half=True,
    ),
    "CrossFormer": Network(
        of(
            "crossformer",
            "CrossFormer",
            dim=(32, 32, 32, 32),
            depth=(1, 1, 1, 1),
            global_window_size=(4, 2, 2, 1),
            local_window_size=2,
            num_classes=5,
        ),
        (2, 3, 64, 64),
        call=in_float32,
        tolerance=1e-5,
    ),
    "CvT": Network(
        of(
            "cvt",
            "CvT",
            num_classes=5,
            s1_emb_dim=8,
            s2_emb_dim=16,
            s2_heads=2,
            s2_depth=1,
            s3_emb_dim=16,
            s3_heads=2,
            s3_depth=1,
        ),
        IMAGE_SHAPE,
        norms_train=True,
        half=True,
    ),
    "LeViT": Network(
        of(
            "levit",
            "LeViT",
            image_size=64,
            num_classes=5,
            dim=(16, 24),
            depth=1,
            heads=2,
            mlp_mult=2,
            stages=2,
            dim_key=8,
            dim_value=8,
        ),
        (2, 3, 64, 64),
    ),
    "MaxViT": Network(
        of("max_vit", "MaxViT", num_classes=5, dim=16, depth=(1, 1), dim_head=8, window_size=2), IMAGE_SHAPE, half=True
    ),
    "MaxViT, registers": Network(
        of("max_vit_with_registers", "MaxViT", num_classes=5, dim=16, depth=(1, 1), dim_head=8, window_size=2),
        IMAGE_SHAPE,
    ),
    "MobileViT": Network(
        of(
            "mobile_vit",
            "MobileViT",
            image_size=(64, 64),
            dims=[16, 16, 16],
            channels=[8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 16],
            num_classes=5,
            depths=(1, 1, 1),
        ),
        (2, 3, 64, 64),
        norms_train=True,
        half=True,
    ),
    "NaViT": Network(sized("na_vit", "NaViT"), IMAGE_SHAPE, call=ragged, half=True),
    "NaViT, grouped": Network(
        sized("na_vit", "NaViT"),
        IMAGE_SHAPE,
        call=lambda network, x: ragged(network, x, group_images=True, group_max_seq_len=80),
        half=True,
    ),
    "NesT": Network(
        of("nest", "NesT", **without("depth", "mlp_dim", num_hierarchies=2, block_repeats=1)), IMAGE_SHAPE, half=True
    ),
    "PiT": Network(sized("pit", "PiT", depth=(1, 1)), IMAGE_SHAPE),
    "RegionViT": Network(
        of(
            "regionvit",
            "RegionViT",
            dim=(16, 16, 32, 32),
            depth=(1, 1, 1, 1),
            window_size=2,
            num_classes=5,
            use_peg=True,
        ),
        (2, 3, 64, 64),
    ),
    "ScalableViT": Network(
        of(
            "scalable_vit",
            "ScalableViT",
            num_classes=5,
            dim=16,
            depth=(1, 1),
            heads=(2, 2),
            reduction_factor=(2, 1),
            window_size=(4, None),
            iwsa_dim_key=8,
            iwsa_dim_value=8,
            ssa_dim_key=8,
            ssa_dim_value=8,
        ),
        IMAGE_SHAPE,
    ),
    "SepViT": Network(
        of("sep_vit", "SepViT", num_classes=5, dim=16, depth=(1, 1), heads=(2, 2), dim_head=8), (1, 3, 56, 56)
    ),
    "T2TViT": Network(of("t2t", "T2TViT", **without("patch_size", t2t_layers=((7, 4), (3, 2)))), IMAGE_SHAPE),
    "TwinsSVT": Network(
        of(
            "twins_svt",
            "TwinsSVT",
            num_classes=5,
            s1_emb_dim=8,
            s1_patch_size=2,
            s1_local_patch_size=4,
            s1_global_k=4,
            s2_emb_dim=16,
            s2_local_patch_size=4,
            s2_global_k=4,
            s3_emb_dim=16,
            s3_local_patch_size=2,
            s3_global_k=2,
            s3_depth=1,
            s4_emb_dim=16,
            s4_local_patch_size=2,
            s4_global_k=2,
            s4_depth=1,
        ),
        IMAGE_SHAPE,
        half=True,
    ),
    "efficient": Network(efficient, IMAGE_SHAPE),
    "MAE": Network(
        mae,
        IMAGE_SHAPE,
        call=in_float64,
        at_use={"make": partial(mae, image_size=256), "shape": (2, 3, 256, 256)},
    ),
    "SimMIM": Network(simmim, IMAGE_SHAPE, reduced=1.0),  # half of the patches are read at random
    "ViT, video": Network(of("vit_3d", "ViT", **VIDEO), VIDEO_SHAPE, 3),
    "ViT, frames": Network(of("vit_3d", "ViT", **VIDEO), VIDEO_SHAPE, 2),
    "SimpleViT, video": Network(of("simple_vit_3d", "SimpleViT", **VIDEO), VIDEO_SHAPE, 3),
    "flash, video": Network(of("simple_flash_attn_vit_3d", "SimpleViT", **VIDEO), VIDEO_SHAPE, 3, half=True),
    "ViViT": Network(
        of("vivit", "ViViT", **{k: v for k, v in VIDEO.items() if k != "depth"}, spatial_depth=1, temporal_depth=1),
        VIDEO_SHAPE,
        3,
        half=True,
    ),
    "ViViT, attention": Network(
        of(
            "vivit",
            "ViViT",
            **{k: v for k, v in VIDEO.items() if k != "depth"},
            spatial_depth=1,
            temporal_depth=1,
            variant="factorized_self_attention",
        ),
        VIDEO_SHAPE,
        3,
    ),
    "ViViT, frames": Network(
        of("vivit", "ViViT", **{k: v for k, v in VIDEO.items() if k != "depth"}, spatial_depth=1, temporal_depth=1),
        VIDEO_SHAPE,
        2,
    ),
    "ViViT, MOSS": Network(
        of(
            "vivit_with_moss",
            "ViViT",
            **{k: v for k, v in VIDEO.items() if k != "depth"},
            spatial_depth=1,
            temporal_depth=1,
        ),
        VIDEO_SHAPE,
        3,
    ),
    "ViT, series": Network(
        of("vit_1d", "ViT", **without("image_size", "patch_size", seq_len=64, patch_size=4)), SERIES
    ),
    "SimpleViT, series": Network(of("simple_vit_1d", "SimpleViT", **without("image_size", seq_len=64)), SERIES),
    "VAT's ViT": Network(sized("vat", "ViT"), IMAGE_SHAPE),
}


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


# -- any number of dims, and what trains or watches a network ----------------------------------------------------------

SURFACE = {**without("image_size", "depth"), "ndim": 2, "input_shape": (32, 24), "patch_size": (8, 4), "depth": 1}
VOLUME = SURFACE | {"ndim": 3, "input_shape": (8, 16, 8), "patch_size": (4, 4, 2), "pool": "mean"}
COARSE = {"patch_size": 8}


def distilled(package: Any) -> nn.Module:
    teacher = nn.Sequential(nn.Conv2d(3, 5, 8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    student = sized("distill", "DistillableViT", **COARSE)(package)
    return of("distill", "DistillWrapper", teacher=teacher, student=student)(package)


def around(module: str, name: str, **options: Any) -> Any:
    """A module around a ViT."""

    def make(package: Any) -> nn.Module:
        network = sized("vit", "ViT", **COARSE)(package)
        return getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)(network, **options)

    return make


def mp3(package: Any) -> nn.Module:
    vit = of("mp3", "ViT", **without("dim_head", **COARSE, depth=1))(package)
    return of("mp3", "MP3", vit=vit, masking_ratio=0.5)(package)


def frozen(network: nn.Module, x: Tensor) -> Tensor:
    """With flex_attention, whose gradients torch takes on GPUs only."""
    return network.requires_grad_(False)(x)


NETWORKS |= {
    "patch dropout, training": Network(sized("vit_with_patch_dropout", "ViT", **COARSE), IMAGE_SHAPE, train=True),
    "distilled": Network(
        distilled, IMAGE_SHAPE, call=lambda network, x: network(x, torch.tensor([1, 4])), reduced=4.0
    ),
    "MP3": Network(mp3, IMAGE_SHAPE, train=True, reduced=4.0),
    "Recorder": Network(around("recorder", "Recorder"), IMAGE_SHAPE),
    "Extractor": Network(around("extractor", "Extractor"), IMAGE_SHAPE),
    "video as images": Network(around("accept_video_wrapper", "AcceptVideoWrapper"), (1, 3, 2, 32, 32), 3),
    **{
        f"ViTND, {positions}": Network(of(module, "ViTND", **SURFACE), (2, 3, 32, 24), call=frozen, backward=False)
        for positions, module in (("learned", "vit_nd"), ("rotary", "vit_nd_rotary"), ("polar", "vit_nd_pope"))
    },
    "ViTND, volume": Network(of("vit_nd", "ViTND", **VOLUME), (1, 3, 8, 16, 8), 3, frozen, backward=False),
}


test_networks_are_exact = all_exact(__name__, NETWORKS, always=("NaViT",))


# The tokens are a reshape that moves them between ranks, and positions are added in place to what is a copy there.
WRITTEN = of(
    "cct_3d",
    "CCT",
    img_size=16,
    num_frames=4,
    embedding_dim=16,
    n_conv_layers=1,
    num_layers=1,
    num_heads=2,
    num_classes=5,
    kernel_size=3,
    stride=1,
    padding=1,
    positional_embedding="learnable",
)


@pytest.mark.slow
@on_ranks(2, timeout=300.0)
def test_in_place_addition_to_moved_tokens():
    net, video = WRITTEN(PACKAGE).eval(), torch.randn(VIDEO_SHAPE)
    torch.testing.assert_close(net(cut(video, 3)).full_tensor(), net(video), rtol=1e-4, atol=1e-5)


def check_nested(module: str) -> None:
    """A network that makes nested tensors of its images says on every rank that it cannot."""
    torch.manual_seed(0)
    is_3d = module.endswith("3d")
    options = {"max_frames": 4, "frame_patch_size": 2} if is_3d else {}
    images = torch.randn(2, 3, *((4, 32, 32) if is_3d else (32, 32)))
    sized(module, "NaViT", **options)(PACKAGE).eval()(list(cut(images, images.ndim - 2)))


@pytest.mark.slow
@pytest.mark.parametrize("module", ["na_vit_nested_tensor", "na_vit_nested_tensor_3d"])
def test_nested_tensors_are_refused(module):
    for error in run_expecting_errors(check_nested, 2, module, timeout=300.0):
        assert isinstance(error, UnsupportedSharding)
        assert "torch.jagged" in str(error)
