"""Networks that find and segment objects: ultralytics, in training, and the encoders and memory of sam2."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from networks.oracle import Network, all_exact, text
from networks.programs import load

PACKAGE = "torch"

IMAGE, PAIR = (1, 3, 64, 64), (2, 3, 64, 64)


def exact(make: Any, shape: tuple[int, ...] = IMAGE, dim: int = 2, **options: Any) -> Network:
    return Network(lambda _: make(), shape, dim, **{"tolerance": 1e-10, "reduced": 100.0, **options})


def yolo(name: str, kind: str = "DetectionModel", **options: Any) -> Network:
    """In training, of two images: norms see 8 values of a channel at the least. Of one image, torch's own gradient of
    batch norm is wrong where tokens are taken of its result, as yolo12 does."""
    options = {"train": True, **options}
    return exact(lambda: getattr(load("ultralytics.nn.tasks"), kind)(f"{name}.yaml", verbose=False), PAIR, **options)


def hiera() -> nn.Module:
    encoder: nn.Module = load("sam2.modeling.backbones.hieradet").Hiera(
        embed_dim=16,
        num_heads=1,
        stages=(1, 1, 2, 1),
        global_att_blocks=(3,),
        window_pos_embed_bkg_spatial_size=(4, 4),
        window_spec=(4, 4, 4, 2),
    )
    return encoder


def positions(channels: int) -> nn.Module:
    encoding: nn.Module = load("sam2.modeling.position_encoding").PositionEmbeddingSine(channels)
    return encoding


def pyramid() -> nn.Module:
    package = load("sam2.modeling.backbones.image_encoder")
    neck = package.FpnNeck(positions(16), 16, [128, 64, 32, 16], fpn_top_down_levels=[2, 3])
    encoder: nn.Module = package.ImageEncoder(hiera(), neck)
    return encoder


def memory() -> nn.Module:
    package = load("sam2.modeling.memory_encoder")
    fuser = package.Fuser(package.CXBlock(16), 1)
    encoder: nn.Module = package.MemoryEncoder(8, down(), fuser, positions(8), in_dim=16)
    return encoder


def down() -> nn.Module:
    sampler: nn.Module = load("sam2.modeling.memory_encoder").MaskDownSampler(embed_dim=16)
    return sampler


def rotary() -> nn.Module:
    package = load("sam2.modeling.sam.transformer")
    attention: nn.Module = package.RoPEAttention(embedding_dim=16, num_heads=2, feat_sizes=(6, 6))
    return attention


def remembered(encoder: nn.Module, x: Tensor) -> Any:
    return encoder(text(1, 16, 4, 4), x)["vision_features"]


NETWORKS = {
    **{
        f"ultralytics, {name}": yolo(name)
        for name in ("yolov5n", "yolov8n", "yolov9t", "yolov10n", "yolo11n", "yolo12n")
    },
    "ultralytics, yolov8n-seg": yolo("yolov8n-seg", "SegmentationModel"),
    "ultralytics, yolov8n-cls": yolo("yolov8n-cls", "ClassificationModel"),
    "ultralytics, yolov8n-pose": yolo("yolov8n-pose", "PoseModel"),
    "ultralytics, yolov8n, boxes": yolo("yolov8n", train=False, call=lambda network, x: network(x)[0]),
    "sam2, Hiera": exact(hiera),
    "sam2, FpnNeck": exact(  # interpolates its top-down path in float32
        pyramid, call=lambda network, x: network(x)["backbone_fpn"], tolerance=1e-6
    ),
    "sam2, MaskDownSampler": exact(down, (1, 1, 64, 64)),
    "sam2, MemoryEncoder": exact(memory, (1, 1, 64, 64), call=remembered),
    "sam2, RoPEAttention": exact(
        rotary, (1, 36, 16), 1, call=lambda attention, x: attention(x, x * 2, x.sin()), tolerance=1e-6
    ),
}


test_networks_are_exact = all_exact(__name__, NETWORKS, of_packages=True)
