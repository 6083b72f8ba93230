"""What a rank holds in a training step on 1, 2, 4 and 8 ranks, and the largest input that fits, counted.

    python benchmarks/bench_capacity.py [--only NAME] [--json FILE]

``shardtensor.explain`` runs the network as a rank of each mesh, with tensors that have no values, so inputs may be
large. Counted are the weights, their gradients, two states of AdamW for each weight, the rank's part of the input, and
what autograd keeps for the backward pass: of the rank in the middle, which has two neighbours. Temporary memory of
kernels and of the backward pass is not counted, so an input fits if it leaves a fifth of the device: in the steps of
``bench_memory.py`` the peak of the U-Net's tensors is 1.19 times what is counted here. The figures are the same in
every run.

From the same counts, ``advise``'s model of an H100 gives times: of the same input on more ranks (strong scaling), and
of an input that grows with the ranks (weak scaling). These are modelled, not measured.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from networks import globe
from report import Figure, chosen, finish, parser
from torch import Tensor, nn

from shardtensor import explain
from shardtensor.observe.explain import Explanation
from shardtensor.observe.machines import MACHINES

GROUP = "memory of a rank in a training step, counted"
STRONG, WEAK = (f"{kind} scaling of a training step, by the model of an H100" for kind in ("strong", "weak"))
LARGEST = "the largest input of a training step that fits, counted"
RANKS = 1, 2, 4, 8
DEVICES = 24, 80  # GiB
LEFT = 0.8  # of a device, for what is counted
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A network, and inputs of any size for it.

    Attributes:
        make: imports its package, and makes the module, on the meta device.
        shape: of the input, by its size. Shards of every size are of whole units on up to 8 ranks: of the strides, or
            of a latent's rows.
        dim: which dim is sharded.
        sample: what a reader calls the size: that of the image, volume or video.
        size: the one whose memory is listed by the number of ranks.
        power: with which power of the size memory grows.
    """

    make: Callable[[], nn.Module]
    shape: Callable[[int], tuple[int, ...]]
    dim: int
    sample: Callable[[int], tuple[int, ...]]
    size: int
    power: int

    def shown(self, size: int) -> str:
        return " x ".join(f"{n:,}" for n in self.sample(size))


class Decoder(nn.Module):
    """The part of an autoencoder that makes a video of a latent."""

    def __init__(self, autoencoder: Any) -> None:
        super().__init__()
        self.decoder = autoencoder.decoder

    def forward(self, latent: Tensor) -> Tensor:
        video: Tensor = self.decoder(latent)
        return video


def unet() -> nn.Module:
    return globe(width=32)


def segresnet() -> nn.Module:
    from monai.networks.nets import SegResNet

    return SegResNet(init_filters=16, in_channels=1, out_channels=3)


def video_decoder() -> nn.Module:
    from diffusers import AutoencoderKLLTXVideo

    return Decoder(AutoencoderKLLTXVideo())


CASES = {
    "image, U-Net of examples/globe, 32 channels": Case(
        unet, lambda n: (1, 3, 128 * n, 256 * n), 2, lambda n: (128 * n, 256 * n), 24, 2
    ),
    "volume, SegResNet of MONAI, 16 channels": Case(
        segresnet, lambda n: (1, 1, 64 * n, 64 * n, 64 * n), 2, lambda n: (64 * n,) * 3, 5, 3
    ),
    "video, LTX-Video's decoder of diffusers": Case(
        video_decoder, lambda n: (1, 128, 8, 8 * n, 12 * n), 3, lambda n: (57, 256 * n, 384 * n), 2, 2
    ),
}


def preview(case: Case, size: int, ranks: int, parts: int = 1) -> Explanation:
    """Of the rank in the middle; the input is so many times as long in the sharded dim."""
    shape = list(case.shape(size))
    shape[case.dim] *= parts
    with torch.device("meta"):
        model, x = case.make(), torch.empty(shape)
    found = explain(model, x, mesh=ranks, shard=case.dim, backward=True, only=[ranks // 2])
    assert not found.refused and not found.stopped, (found.refused, found.stopped)
    return found


def held(found: Explanation) -> float:
    """GiB of the only rank."""
    (rank,) = found.ranks
    return found.memory(rank) / GIB


def seconds(found: Explanation) -> float:
    """Of the only rank, by the model."""
    return MACHINES["h100"].seconds(found, *found.ranks)


def largest(case: Case, ranks: int, limit: float, known: dict[int, float]) -> int:
    """The largest size of which a rank holds at most ``limit`` GiB; ``known`` has what was counted, and gets more."""
    size = case.size
    while True:
        if size not in known:
            known[size] = held(preview(case, size, ranks))
        if known[size] <= limit and known.get(size + 1, 0) > limit:
            return size
        if known[size] > limit and (size == 1 or known.get(size - 1, limit + 1) <= limit):
            return size - 1
        guess = math.floor(size * (limit / known[size]) ** (1 / case.power))
        size = max(1, guess if guess != size else size + (1 if known[size] <= limit else -1))


def of_case(name: str, sizes: bool) -> list[Figure]:
    case, figures = CASES[name], []
    try:
        alone = seconds(preview(case, case.size, 1))
    except ImportError as error:
        return [Figure(GROUP, name, None, note=f"{error.name} is not installed")]
    for ranks in RANKS:
        print(f"counting {name} on {ranks}", file=sys.stderr)
        found, longer = preview(case, case.size, ranks), preview(case, case.size, ranks, ranks)
        known, of = {case.size: held(found)}, {"case": name, "ranks": ranks}
        on = f"{ranks} rank{'s' * (ranks > 1)}"
        title = f"{name}, {case.shown(case.size)}: {on}"
        figures.append(Figure(GROUP, title, known[case.size], "GiB", details=of))
        figures.append(Figure(STRONG, title, alone / seconds(found), "times", details=of))
        figures.append(Figure(WEAK, f"{title}, as many times the input", alone / seconds(longer), "times", details=of))
        for device in DEVICES if sizes else ():
            size = largest(case, ranks, LEFT * device, known)
            shown = case.shown(size)
            figures.append(
                Figure(
                    LARGEST,
                    f"{name}: {on} of {device} GiB",
                    math.prod(case.sample(size)) / 1e6,
                    "million",
                    note=f"{shown}, {known[size]:.1f} GiB",
                    details=of | {"device": device, "size": shown},
                )
            )
    return sorted(figures, key=lambda figure: (GROUP, LARGEST, STRONG, WEAK).index(figure.group))


def main() -> None:
    made = parser(__doc__)
    options = made.parse_args()
    names = chosen(options.only, CASES, made.error)
    finish([figure for name in names for figure in of_case(name, not options.quick)], options)


if __name__ == "__main__":
    main()
