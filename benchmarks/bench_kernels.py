"""Kernels and bytes that a device is asked for beyond the plain operator's, forward and backward, next to bars.

    python benchmarks/bench_kernels.py [--only NAME] [--chain] [--json FILE]

Counted, not timed, on any machine: two ranks compute on an emulated CUDA device (``tests/device``), on which every
operator that launches a kernel counts as one, and so do copies. The plain operator has a rank's shard. Of each row the
third call is counted, when plans are made, on the rank that launches most. Bytes are those that kernels read and
write, relative to the plain operator's. ``--chain`` prints which kernels they are.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from report import Figure, chosen, finish, parser
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from shardtensor import ShardTensor, attention_method, half_precision
from shardtensor.testing import count_communication, run_distributed, shared_mesh

GROUP = "kernels beyond the plain operator's, forward and backward, 2 ranks"
IMAGE, TOKENS = (1, 8, 128, 256), (2, 4, 512, 32)  # shapes of a shard
LARGE_IMAGE, LARGE_VOLUME = (1, 2, 1024, 1024), (1, 2, 32, 128, 256)  # of whose bytes no more copies are to be made


@dataclass(frozen=True)
class Row:
    """An operator.

    Attributes:
        make: a module or function of the tensors, for their shape.
        shape, dim: of each tensor's shard, and what is sharded.
        bar: how many kernels at most.
        tensors: how many there are.
        bytes: at most how many times the plain operator's.
        collectives: at most how many, of a network's step.
        dtype: of tensors and parameters.
        autocast: the dtype of autocast, None for none.
        half_precision: the setting.
    """

    make: Callable[[Sequence[int]], Callable[..., Any]]
    shape: tuple[int, ...]
    dim: int
    bar: int
    tensors: int = 1
    bytes: float | None = None
    collectives: int | None = None
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    half_precision: str = "fast"


def spectral(shape: Sequence[int]) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.fft.irfft2(torch.fft.rfft2(x) * 2.0, s=x.shape[-2:])


def attention(method: str = "auto", causal: bool = False) -> Callable[[Sequence[int]], Callable[..., Tensor]]:
    """Around a ring of two ranks there are two blocks, with two kernels each."""

    def attend(*tensors: Tensor) -> Tensor:
        with attention_method(method):
            return F.scaled_dot_product_attention(*tensors, is_causal=causal)

    return lambda shape: attend


def bilinear(shape: Sequence[int]) -> Callable[[Tensor], Tensor]:
    return partial(F.interpolate, scale_factor=2, mode="bilinear", align_corners=False)


def globe() -> nn.Module:
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "globe"))
    from model import UNet

    return UNet()


ROWS = {
    "conv2d 3x3": Row(lambda shape: nn.Conv2d(8, 8, 3, padding=1), IMAGE, 2, 4),
    "large conv2d 3x3": Row(lambda shape: nn.Conv2d(2, 2, 3, padding=1), LARGE_IMAGE, 2, 4, bytes=1.3),
    "large conv3d 3x3x3": Row(lambda shape: nn.Conv3d(2, 2, 3, padding=1), LARGE_VOLUME, 2, 5, bytes=1.5),
    "large transposed conv2d": Row(lambda shape: nn.ConvTranspose2d(2, 2, 3, 2, 1, 1), LARGE_IMAGE, 2, 5, bytes=1.5),
    "large conv2d 3x3, bfloat16": Row(
        lambda shape: nn.Conv2d(2, 2, 3, padding=1), LARGE_IMAGE, 2, 6, bytes=1.7, dtype=torch.bfloat16
    ),
    "group norm": Row(lambda shape: nn.GroupNorm(2, 8), IMAGE, 2, 7),
    "instance norm": Row(lambda shape: nn.InstanceNorm2d(8, affine=True), IMAGE, 2, 7),
    "batch norm, training": Row(lambda shape: nn.BatchNorm2d(8), IMAGE, 2, 7),
    "layer norm over a sharded dim": Row(lambda shape: nn.LayerNorm(shape[2:]), IMAGE, 2, 8),
    "softmax over shards": Row(lambda shape: nn.Softmax(2), IMAGE, 2, 8),
    "var over shards": Row(lambda shape: partial(torch.var, dim=(2, 3)), IMAGE, 2, 8),
    "bilinear x 2": Row(bilinear, IMAGE, 2, 4),
    "max pool 3x3, stride 2": Row(lambda shape: nn.MaxPool2d(3, 2, 1), IMAGE, 2, 4),
    "rfft2, product, irfft2": Row(spectral, IMAGE, 2, 6),
    "attention, fetch": Row(attention(), TOKENS, 2, 6, tensors=3),
    "attention, heads": Row(attention("heads"), TOKENS, 2, 10, tensors=3),
    "attention, ring": Row(attention("ring"), TOKENS, 2, 12, tensors=3),
    "attention, causal fetch": Row(attention("fetch", causal=True), TOKENS, 2, 12, tensors=3),
    "attention, causal ring": Row(attention("ring", causal=True), TOKENS, 2, 12, tensors=3),
    "step of the globe U-Net": Row(lambda shape: globe(), (1, 3, 128, 256), 2, 183, collectives=40),
}


def counts(name: str) -> dict[str, Any]:
    """Kernels by name, bytes and collectives of a row, for the plain operator and on shards; on a rank."""
    return counts_of(ROWS[name])


def counts_of(row: Row) -> dict[str, Any]:
    """The same of any row."""
    from device.emulated import counted

    mesh = shared_mesh(2)
    device, result = torch.device("cuda", dist.get_rank()), {}
    sizes = {0: (row.shape[row.dim],) * 2}
    for kind in ("plain", "sharded"):
        torch.manual_seed(0)
        tensors = [torch.randn(row.shape, device=device, dtype=row.dtype) for _ in range(row.tensors)]
        if kind == "sharded":
            tensors = [ShardTensor.from_local(t, mesh, [Shard(row.dim)], shard_sizes=sizes) for t in tensors]
        module = row.make(tensors[0].shape)
        module = module.to(device, row.dtype) if isinstance(module, nn.Module) else module
        # As in a network, what goes in is another operator's result: gradients of leaves may be copied once more.
        tensors = [t.requires_grad_().clone() for t in tensors]
        inputs = [*tensors, *(module.parameters() if isinstance(module, nn.Module) else [])]

        def run(module: Callable[..., Any] = module, tensors: Sequence[Tensor] = tensors) -> Tensor:
            with torch.autocast("cuda", row.autocast, enabled=row.autocast is not None):
                y: Tensor = module(*tensors)
            return y

        with half_precision(row.half_precision):
            for _ in range(2):
                y = run()
                grad = y.detach().clone()
                torch.autograd.grad(y, inputs, grad)
            with counted() as seen, count_communication() as sent:
                torch.autograd.grad(run(), inputs, grad)
        kernels = {name: n for (event, name), n in seen.events.items() if event == "kernel"}
        result[kind] = kernels, seen.bytes, sum(sent.collectives.values())
    return result


def figure(name: str, found: dict[str, Any], chain: bool = False) -> Figure:
    row, (plain, plain_bytes, _), (ours, our_bytes, collectives) = ROWS[name], found["plain"], found["sharded"]
    beyond, times = sum(ours.values()) - sum(plain.values()), our_bytes / plain_bytes
    note = f"{times:.2f}x the bytes" + ("" if row.bytes is None else f" (at most {row.bytes})")
    note += f"; collectives: {collectives}" + ("" if row.collectives is None else f" (at most {row.collectives})")
    note += f"; all kernels: {sum(ours.values())}" if row.collectives is not None else ""
    if chain:
        more = Counter(ours)
        more.subtract(plain)
        note += "; " + ", ".join(f"{n:+d} {kernel.removeprefix('aten::')}" for kernel, n in more.items() if n)
    return Figure(GROUP, name, beyond, "kernels", bar=row.bar, note=note, details={"bytes": times})


def most(figures: Sequence[Figure]) -> Figure:
    """That of the rank with most kernels."""
    return max(figures, key=lambda found: found.value or 0)


def measure(names: Sequence[str], chain: bool = False) -> list[Figure]:
    sys.path[:0] = [str(Path(__file__).parents[1] / "tests")]
    from device import on
    from device.build import NotAvailable

    try:
        with on("emulated"):
            return [most([figure(name, found, chain) for found in run_distributed(counts, 2, name)]) for name in names]
    except NotAvailable as error:
        return [Figure(GROUP, name, None, "kernels", bar=ROWS[name].bar, note=str(error)) for name in names]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--chain", action="store_true", help="print which kernels")
    options = made.parse_args()
    names = chosen(options.only, ROWS, made.error)
    finish(measure(names, options.chain), options)


if __name__ == "__main__":
    import bench_kernels  # ranks import what they call by its module

    bench_kernels.main()
