"""Half precision: what shards cost beyond plain torch in the same dtype, and how exact the gradients of weights are.

    python benchmarks/bench_half.py [--only NAME] [--json FILE]

The first group is counted on an emulated CUDA device, as in ``bench_kernels.py``, forward and backward: what is beyond
plain torch in bfloat16 may be 1.1 times what it is in float32, and the conversion of contributions to float32 and of
their sums back, which is one kernel each for all weights of a bucket. In the step of the U-Net autocast is on.

The second group are errors of the gradients of weight and bias against float64, relative to their norms, over several
draws: of shards, of plain torch on the whole input, of its kernel on each shard with a sum in float32 by hand, and of
that with a sum in bfloat16, as in DDP. The value is the error in the default setting, relative to that by hand.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench_kernels import IMAGE, LARGE_IMAGE, TOKENS, Row, counts_of, globe
from report import Figure, chosen, finish, parser
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from shardtensor import half_precision
from shardtensor.testing import run_distributed, shard, shared_mesh

COUNTS = "half precision: beyond plain torch in the same dtype, forward and backward, 2 ranks"
ERRORS = "half precision: error of the gradients of weights, relative to that of torch's kernel by hand, 2 ranks"
AFTER_NORM = "half precision: the same of a convolution before a norm over shards, relative to one device's, 2 ranks"
SHARE = 1.1  # of what it is in float32, or of the error by hand

# -- kernels and bytes ---------------------------------------------------------------------------------------------

ROWS = {
    "conv2d 3x3": Row(lambda shape: nn.Conv2d(8, 8, 3, padding=1), IMAGE, 2, 0),
    "large conv2d 3x3": Row(lambda shape: nn.Conv2d(2, 2, 3, padding=1), LARGE_IMAGE, 2, 0),
    "conv3d 3x3x3": Row(lambda shape: nn.Conv3d(4, 4, 3, padding=1), (1, 4, 8, 16, 32), 2, 0),
    "transposed conv2d 3x3": Row(lambda shape: nn.ConvTranspose2d(8, 8, 3, 2, 1, 1), IMAGE, 2, 0),
    "transposed conv2d 2x2": Row(lambda shape: nn.ConvTranspose2d(8, 8, 2, 2), IMAGE, 2, 0),
    "group norm": Row(lambda shape: nn.GroupNorm(2, 8), (1, 8, 512, 512), 2, 0),
    "layer norm of features": Row(lambda shape: nn.LayerNorm(shape[-1]), TOKENS, 2, 0),
    "linear": Row(lambda shape: nn.Linear(shape[-1], 32), TOKENS, 2, 0),
    "step of the globe U-Net, autocast": Row(lambda shape: globe(), (1, 3, 128, 256), 2, 0),
}
WAYS = {"float32": "fast", "fast": "fast", "exact": "exact"}


def counts(name: str, way: str) -> dict[str, Any]:
    """Kernels by name and bytes of a row, of the plain operator and on shards; on a rank."""
    kind = "autocast" if name.endswith("autocast") else "dtype"
    changes: dict[str, Any] = {} if way == "float32" else {kind: torch.bfloat16}
    return counts_of(replace(ROWS[name], half_precision=WAYS[way], **changes))


@dataclass(frozen=True)
class Beyond:
    """What a rank runs beyond plain torch.

    Attributes:
        kernels, bytes: how many.
        share: the bytes relative to plain torch's.
        weights: how many numbers the parameters are.
    """

    kernels: int
    bytes: int
    share: float
    weights: int

    @classmethod
    def most(cls, found: Sequence[dict[str, Any]], name: str) -> Beyond:
        """That of the rank with most kernels."""
        weights = sum(p.numel() for p in ROWS[name].make(ROWS[name].shape).parameters())  # type: ignore[attr-defined]
        ranks = []
        for rank in found:
            (plain, plain_bytes, _), (ours, our_bytes, _) = rank["plain"], rank["sharded"]
            more = our_bytes - plain_bytes
            ranks.append(cls(sum(ours.values()) - sum(plain.values()), more, more / plain_bytes, weights))
        return max(ranks, key=lambda one: one.kernels)


def count_figures(name: str, found: dict[str, Beyond]) -> list[Figure]:
    single, fast, exact = (found[way] for way in WAYS)
    kernels = f"float32 {single.kernels}; exact {exact.kernels}"
    of_bytes = "; ".join(f"{way} {one.bytes / 1e3:.1f} kB, {one.share:.2f} of plain's" for way, one in found.items())
    most = SHARE * single.kernels + 2, (SHARE * single.bytes + 12 * fast.weights) / 1e3
    return [
        Figure(COUNTS, f"{name}: kernels", fast.kernels, "kernels", bar=most[0], note=kernels),
        Figure(COUNTS, f"{name}: bytes", fast.bytes / 1e3, "kB", bar=most[1], note=of_bytes),
    ]


# -- errors --------------------------------------------------------------------------------------------------------

Function = Callable[[Tensor, Tensor, Tensor], Tensor]
HEIGHT, DRAWS = 24, 4


def normalized(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A convolution, and a norm that removes the mean of each of its channels."""
    return F.group_norm(F.conv2d(x, weight, bias, padding=1), len(weight))


OPERATORS: dict[str, tuple[Function, tuple[int, ...], tuple[int, ...], int]] = {  # with shapes, and biases
    "conv2d": (partial(F.conv2d, padding=1), (2, 8, HEIGHT, 20), (8, 8, 3, 3), 8),
    "conv3d": (partial(F.conv3d, padding=1), (1, 4, HEIGHT, 6, 6), (4, 4, 3, 3, 3), 4),
    "transposed conv2d": (
        partial(F.conv_transpose2d, stride=2, padding=1, output_padding=1),
        (2, 8, HEIGHT, 20),
        (8, 8, 3, 3),
        8,
    ),
    "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (2, 64, HEIGHT, 20), (64,), 64),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (64,), w, b), (2, 8, HEIGHT, 64), (64,), 64),
    "linear": (F.linear, (2, 8, HEIGHT, 20), (16, 20), 16),
}
DATA = ("random", "offset", "cancelling")
MEANS = (0, 10, 100)  # of a convolution's input, in standard deviations
CASES = [*(f"{name}, {data}" for name in OPERATORS for data in DATA), *(f"norm after conv2d, mean {n}" for n in MEANS)]


def drawn(case: str, seed: int) -> tuple[Function, list[Tensor]]:
    """The function, and input, weight, bias and the result's gradient, the same on every rank."""
    name, _, data = case.partition(", ")
    generator = torch.Generator("cpu").manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu")

    function, shape, of_weight, of_bias = OPERATORS.get(name, (normalized, *OPERATORS["conv2d"][1:]))
    x, weight, bias = random(*shape), random(*of_weight), random(of_bias)
    grad = random(*function(x, weight, bias).shape)
    if data == "cancelling":  # the second half of the input has the first one's, and its gradients the opposite ones
        for t, sign in ((x, 1), (grad, -1)):
            first, second = t.chunk(2, 2)
            second.copy_(sign * first + 0.01 * random(*first.shape))
    elif data == "offset":
        x += 30
    elif data != "random":
        x += float(data.split()[-1])
        grad.chunk(2, 2)[0].add_(1)  # a loss that differs between north and south
    return function, [t.bfloat16().to(torch.get_default_device()) for t in (x, weight, bias, grad)]


def gradients(function: Function, x: Any, weight: Tensor, bias: Tensor, grad: Any) -> list[Tensor]:
    """Those of weight and bias."""
    weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    found = torch.autograd.grad(function(x, weight, bias), [weight, bias], grad, allow_unused=True)
    return [g for g in found if g is not None]


def contributions(function: Function, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Those of each half of the result, by torch's kernels; of each sample, as DDP's ranks have, where there is a norm
    over the shards.
    """
    x, weight, bias, grad = tensors
    if function is normalized:
        return [gradients(function, x[i : i + 1], weight, bias, grad[i : i + 1]) for i in range(2)]
    found, n = [], grad.shape[2] // 2
    for half in range(2):
        own = torch.zeros_like(grad)
        own.narrow(2, half * n, n).copy_(grad.narrow(2, half * n, n))
        found.append(gradients(function, x, weight, bias, own))
    return found


def errors(case: str) -> dict[str, float]:
    """Relative errors of the gradients of a case, on a rank."""
    mesh = shared_mesh(2)
    totals: dict[str, float] = defaultdict(float)
    for seed in range(DRAWS):
        function, tensors = drawn(case, seed)
        precise = gradients(function, *(t.double() for t in tensors))
        found = {"one device": gradients(function, *tensors)}
        x, grad = (shard(t, mesh, [Shard(2)]) for t in (tensors[0], tensors[3]))
        for way in ("fast", "exact"):
            with half_precision(way):
                found[way] = gradients(function, x, *tensors[1:3], grad)
        parts = contributions(function, tensors)
        if function is not normalized:
            found["by hand"] = [(a.float() + b.float()).to(a.dtype) for a, b in zip(*parts, strict=True)]
        found["DDP"] = [a + b for a, b in zip(*parts, strict=True)]
        for way, got in found.items():
            for g, exact in zip(got, precise, strict=True):
                if exact.norm() > 1e-6 * g.numel():  # a bias before a norm has no gradient
                    totals[way] += float(((g.double() - exact).norm() / exact.norm()).square()) / DRAWS
    return {way: total**0.5 for way, total in totals.items()}


def error_figure(case: str, found: dict[str, float]) -> Figure:
    note = ", ".join(f"{way} {error:.1e}" for way, error in found.items())
    if "by hand" not in found:
        return Figure(AFTER_NORM, case, found["fast"] / found["one device"], note=note, details=found)
    return Figure(ERRORS, case, found["fast"] / found["by hand"], bar=SHARE, note=note, details=found)


# -- the command ---------------------------------------------------------------------------------------------------


def measure(names: Sequence[str]) -> list[Figure]:
    sys.path[:0] = [str(Path(__file__).parents[1] / "tests")]
    from device import on
    from device.build import NotAvailable

    made: list[Figure] = []
    for name in (name for name in names if name in ROWS):
        try:
            with on("emulated"):
                found = {way: Beyond.most(run_distributed(counts, 2, name, way), name) for way in WAYS}
        except NotAvailable as error:
            made.append(Figure(COUNTS, name, None, "kernels", note=str(error)))
        else:
            made += count_figures(name, found)
    return made + [error_figure(case, run_distributed(errors, 2, case)[0]) for case in names if case in CASES]


def main() -> None:
    made = parser(__doc__)
    options = made.parse_args()
    finish(measure(chosen(options.only, [*ROWS, *CASES], made.error)), options)


if __name__ == "__main__":
    import bench_half  # ranks import what they call by its module

    bench_half.main()
