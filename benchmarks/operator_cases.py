"""The operators of ``bench_operators.py``, each written once for every kind of tensor."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """How a kind of tensor is made of what a rank has.

    Attributes:
        kind: "local", "ShardTensor", "DTensor", ...
        shard: a leaf that requires grad, of a shard and its dim.
        weight: one of a weight that is the same on all ranks, as a module has it.
        contribution: the same, but so that its gradient is not summed over the ranks.
        ranks: how many there are.
    """

    kind: str
    shard: Callable[[Tensor, int], Tensor]
    weight: Callable[[Tensor], Tensor]
    contribution: Callable[[Tensor], Tensor]
    ranks: int


class Work(NamedTuple):
    """A call, what it is differentiated for, and the gradient of its result."""

    call: Callable[[], Any]
    inputs: tuple[Tensor, ...]
    gradient: Tensor


@dataclass(frozen=True)
class Case:
    """One operator.

    Attributes:
        name: with the shape of a shard.
        make: the work on tensors of a kind.
        bars: "forward" and "forward + backward", as far as they are measured, with their bars.
        by_hand: the hand-written form: "halo", "ring" or "causal ring".
        methods: of attention, which are timed next to the one that is chosen by default.
        natten: whether natten's own kernel is compared with, too.
    """

    name: str
    make: Callable[[Place], Work]
    bars: dict[str, float | None] = field(default_factory=lambda: {"forward": None, "forward + backward": None})
    by_hand: str | None = None
    methods: tuple[str, ...] = ()
    natten: bool = False


def bars(forward: float, backward: float) -> dict[str, float | None]:
    return {"forward": forward, "forward + backward": backward}


def ones_like_result(call: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad():
        return torch.ones_like(call())


def conv2d(place: Place) -> Work:
    x, gradient = (place.shard(torch.randn(1, 16, 512, 256), 2) for _ in range(2))
    weight = place.contribution(torch.randn(16, 16, 3, 3))
    return Work(lambda: F.conv2d(x, weight, padding=1), (x, weight), gradient.detach())


def conv3d(place: Place) -> Work:
    # With fewer elements torch does not use oneDNN on the CPU.
    x, gradient = (place.shard(torch.randn(1, 16, 32, 64, 64), 2) for _ in range(2))
    weight = place.contribution(torch.randn(16, 16, 3, 3, 3))
    return Work(lambda: F.conv3d(x, weight, padding=1), (x, weight), gradient.detach())


def group_norm(place: Place) -> Work:
    x, gradient = (place.shard(torch.randn(1, 16, 512, 256), 2) for _ in range(2))
    weight, bias = (place.weight(torch.randn(16)) for _ in range(2))
    return Work(lambda: F.group_norm(x, 4, weight, bias), (x, weight, bias), gradient.detach())


def residual_block(place: Place) -> Work:
    x, gradient = (place.shard(torch.randn(1, 16, 512, 256), 2) for _ in range(2))
    first, second = (place.weight(torch.randn(16, 16, 3, 3) / 12) for _ in range(2))
    weight, bias = (place.weight(torch.randn(16)) for _ in range(2))

    def call() -> Tensor:
        y = F.silu(F.group_norm(F.conv2d(x, first, padding=1), 4, weight, bias))
        return x + F.conv2d(y, second, padding=1)

    return Work(call, (x, first, weight, bias, second), gradient.detach())


def layer_norm(place: Place) -> Work:
    x, gradient = (place.shard(torch.randn(8, 512, 256), 1) for _ in range(2))
    weight, bias = (place.weight(torch.randn(256)) for _ in range(2))
    return Work(lambda: F.layer_norm(x, (256,), weight, bias), (x, weight, bias), gradient.detach())


def linear(place: Place) -> Work:
    x, gradient = (place.shard(torch.randn(2, 1024, 256), 1) for _ in range(2))
    weight, bias = place.weight(torch.randn(256, 256) / 16), place.weight(torch.randn(256))
    return Work(lambda: F.linear(x, weight, bias), (x, weight, bias), gradient.detach())


def interpolate(place: Place) -> Work:
    x = place.shard(torch.randn(1, 16, 256, 128), 2)

    def call() -> Tensor:
        return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)

    return Work(call, (x,), ones_like_result(call))


def max_pool(place: Place) -> Work:
    x = place.shard(torch.randn(1, 16, 512, 256), 2)

    def call() -> Tensor:
        return F.max_pool2d(x, 3, 2, 1)

    return Work(call, (x,), ones_like_result(call))


def attention(place: Place, causal: bool = False) -> Work:
    shape = (1, 4, 1024, 64)
    ranks, local = place.ranks, place.kind == "local"
    q, gradient = (place.shard(torch.randn(shape), 2) for _ in range(2))
    k, v = (place.shard(torch.cat([torch.randn(shape)] * (ranks if local else 1), 2), 2) for _ in range(2))
    seen = None
    if causal and local:  # what the last rank's queries see
        seen = torch.arange(shape[2] * ranks) <= (shape[2] * (ranks - 1) + torch.arange(shape[2]))[:, None]

    def call() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=causal and not local)

    return Work(call, (q, k, v), gradient.detach())


neighborhood = argparse.Namespace(shape=(1, 64, 64, 4, 32), kernel=7)


def neighborhood_attention(place: Place) -> Work:
    import natten

    from shardtensor.ops.neighborhood.tiled import Dim, Neighborhood, tiled_attention

    size, kernel = neighborhood.shape[1], neighborhood.kernel
    gradient, *inputs = (place.shard(torch.randn(neighborhood.shape), 1) for _ in range(4))
    query, key, value = inputs
    dims = (Dim(Neighborhood(size, kernel), (0, size), (0, size)),) * 2

    def tiles() -> Tensor:
        scale = query.shape[-1] ** -0.5
        return tiled_attention(query, torch.cat([key, value], -1), dims, None, scale, False)[0]

    def call() -> Tensor:
        return natten.na2d(query, key, value, kernel_size=kernel)

    return Work(tiles if place.kind == "local" else call, tuple(inputs), gradient.detach())


CASES = {
    case.name: case
    for case in (
        Case("conv2d 3x3, 1x16x512x256 a rank", conv2d, bars(1.10, 1.10), by_hand="halo"),
        Case("conv3d 3x3x3, 1x16x32x64x64 a rank", conv3d),
        Case("group norm, 1x16x512x256 a rank", group_norm, bars(1.6, 1.6)),
        Case("residual block with group norm, 1x16x1024x256 in all", residual_block, bars(1.35, 1.4)),
        Case("layer norm, 8x512x256 a rank", layer_norm),
        Case("linear, 2x1024x256 a rank", linear),
        Case("interpolate, bilinear x 2, 1x16x256x128 a rank", interpolate),
        Case("max pool 3x3, stride 2, 1x16x512x256 a rank", max_pool),
        Case("attention, 1x4x1024x64 a rank", attention, by_hand="ring", methods=("ring", "heads", "fetch")),
        Case(
            "attention, causal, 1x4x1024x64 a rank",
            lambda place: attention(place, True),
            by_hand="causal ring",
            methods=("ring", "heads", "fetch"),
        ),
        Case("na2d 7x7, 64x64 a rank", neighborhood_attention, {"forward + backward": None}, natten=True),
    )
}
