"""Host time of operators and of training steps: ShardTensor against plain torch on the local shape, next to bars.

    python benchmarks/bench_host.py [--only NAME] [--rounds N] [--number N] [--json FILE]
    python benchmarks/bench_host.py --profile NAME [--sort total]

Measured is the CPU time of the calling thread (Python, dispatch and the kernels) of rank 0 of two, on the fake process
group: collectives start and complete without moving anything, so nobody is waited for. The other side of each row is
the same call in plain torch on a tensor of rank 0's local shape, with the same weights. Tensors are tiny (an image
shard is 1 x 8 x 8 x 16), so that kernels hardly count, and one thread computes.

Each round times, one after the other, plain torch, ShardTensor and a reference: a plain 3 x 3 convolution of that
shard. "best" is the minimum over the rounds, which a busy machine hardly moves; "median" is printed to show how busy it
was. Operators are called ``--number`` times per round, steps a tenth as often. The garbage collector stays on. Halos
hold whatever the memory held, as nothing is sent; denormal numbers are flushed so that they cost no time.

- Operators are in microseconds per call. Their bars are for a machine whose reference takes 12 us; "scaled" is the bar
  times this run's best reference / 12, and the best time is compared with that.
- Steps (zero the gradients, forward, loss, backward) are the ratio of ShardTensor's best to plain torch's best, which
  has no need of scaling; "SGD" is the same ratio with ``torch.optim.SGD.step`` included.

"before" is what this benchmark showed when the bars were set, at a reference of 11.4 us. "sent" counts the collectives
of one call. A missed bar is marked, and is no error: the exit code is 0.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardtensor import ShardTensor

REFERENCE_US = 12.0  # of the machine for which the bars are written
IMAGE, TOKENS, VOLUME = (1, 8, 16, 16), (1, 32, 32), (1, 4, 8, 4, 4)  # global shapes; half of dim 2, 1, 2 is local

Run = Callable[[], Any]
# Makes a tensor of this global shape, sharded along this dim, or of the local shape; it may require grad.
Place = Callable[..., Tensor]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: what is printed, and what ``--only`` and ``--profile`` look for.
        make: the call to time, on the tensors that it makes with the ``Place``.
        before, bar: microseconds of an operator on the machine of the bars; of a step the ratio to plain torch.
        grad: whether autograd is on.
        step: whether it is a training step; ``make`` takes ``sgd`` then, too.
    """

    name: str
    make: Callable[..., Run]
    before: float
    bar: float
    grad: bool = False
    step: bool = False


# -- operators ---------------------------------------------------------------------------------------------------------


def weights(*shapes: Sequence[int], requires_grad: bool = False) -> list[Tensor]:
    return [torch.randn(*shape).requires_grad_(requires_grad) for shape in shapes]


def conv2d(place: Place) -> Run:
    x, (weight, bias) = place(IMAGE, 2), weights((8, 8, 3, 3), (8,))
    return lambda: F.conv2d(x, weight, bias, padding=1)


def conv2d_backward(place: Place) -> Run:
    inputs = [place(IMAGE, 2, requires_grad=True), *weights((8, 8, 3, 3), (8,), requires_grad=True)]
    x, weight, bias = inputs
    seed = place(IMAGE, 2)
    return lambda: torch.autograd.grad(F.conv2d(x, weight, bias, padding=1), inputs, seed)


def group_norm(place: Place) -> Run:
    x, (weight, bias) = place(IMAGE, 2), weights((8,), (8,))
    return lambda: F.group_norm(x, 2, weight, bias)


def batch_norm(place: Place) -> Run:
    x, (weight, bias), mean, var = place(IMAGE, 2), weights((8,), (8,)), torch.zeros(8), torch.ones(8)
    return lambda: F.batch_norm(x, mean, var, weight, bias, training=True)


def linear(place: Place) -> Run:
    x, (weight, bias) = place(TOKENS, 1), weights((32, 32), (32,))
    return lambda: F.linear(x, weight, bias)


def layer_norm(place: Place) -> Run:
    x, (weight, bias) = place(TOKENS, 1), weights((32,), (32,))
    return lambda: F.layer_norm(x, (32,), weight, bias)


def of_image(function: Callable[[Tensor], Any], place: Place) -> Run:
    x = place(IMAGE, 2)
    return lambda: function(x)


def addition(place: Place) -> Run:
    x, y = place(IMAGE, 2), place(IMAGE, 2)
    return lambda: x + y


def view(place: Place) -> Run:
    x = place(IMAGE, 2)
    shape = (1, 2, 4, *x.shape[2:])
    return lambda: x.view(shape)


def upsampled(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)


OPERATORS = [
    Row("conv2d 3x3, forward", conv2d, 197, 90),
    Row("conv2d 3x3, forward + backward", conv2d_backward, 620, 350, grad=True),
    Row("group norm", group_norm, 235, 100),
    Row("batch norm, training", batch_norm, 315, 120),
    Row("interpolate, bilinear x 2", partial(of_image, upsampled), 227, 80),
    Row("max pool 2x2", partial(of_image, lambda x: F.max_pool2d(x, 2)), 51, 70),
    Row("max pool 3x3, stride 2", partial(of_image, lambda x: F.max_pool2d(x, 3, 2, 1)), 145, 70),
    Row("linear", linear, 27, 40),
    Row("layer norm", layer_norm, 20, 30),
    # These are to stay as they are; a tenth is for noise.
    Row("SiLU", partial(of_image, F.silu), 11, 12),
    Row("x + y", addition, 11, 12),
    Row("x * 2.0", partial(of_image, lambda x: x * 2.0), 15, 17),
    Row("view", view, 13, 14),
    Row("transpose", partial(of_image, lambda x: x.transpose(1, 2)), 11, 12),
    Row("slice", partial(of_image, lambda x: x[:, 1:5]), 15, 17),
]

# -- training steps ----------------------------------------------------------------------------------------------------


class UNet(nn.Module):
    """Two levels: two blocks at each on the way down, one on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(conv_norm_act(8, 8), conv_norm_act(8, 8))
        self.lowest = nn.Sequential(nn.MaxPool2d(2), conv_norm_act(8, 16), conv_norm_act(16, 8))
        self.up = conv_norm_act(16, 8)
        self.head = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        return self.head(self.up(torch.cat([x, upsampled(self.lowest(x))], 1)))


def conv_norm_act(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.SiLU())


def convolutions() -> nn.Module:
    return nn.Sequential(*(conv_norm_act(8, 8) for _ in range(6)))


def convolutions_3d() -> nn.Module:
    blocks = ((nn.Conv3d(4, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU()) for _ in range(6))
    return nn.Sequential(*(layer for block in blocks for layer in block))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, dim_feedforward=64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))


def step(network: Callable[[], nn.Module], shape: Sequence[int], dim: int, place: Place, sgd: bool = False) -> Run:
    torch.manual_seed(0)
    model, x, target = network(), place(shape, dim), place(shape, dim)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def run() -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), target).backward()
        if sgd:
            optimizer.step()

    return run


STEPS = [
    Row("step: small U-Net", partial(step, UNet, IMAGE, 2), 9.2, 3.0, True, True),
    Row("step: conv-GN-SiLU x 6", partial(step, convolutions, IMAGE, 2), 9.6, 3.5, True, True),
    Row("step: conv3d-BN-ReLU x 6", partial(step, convolutions_3d, VOLUME, 2), 9.7, 3.5, True, True),
    Row("step: transformer encoder x 4", partial(step, transformer, TOKENS, 1), 6.5, 2.5, True, True),
    Row("step: MLP", partial(step, perceptron, TOKENS, 1), 3.2, 2.0, True, True),
]

# -- measuring ---------------------------------------------------------------------------------------------------------


def placers() -> dict[str, Place]:
    mesh = init_device_mesh("cpu", (2,))

    def plain(shape: Sequence[int], dim: int, requires_grad: bool = False) -> Tensor:
        local = [n // 2 if d == dim else n for d, n in enumerate(shape)]
        return torch.randn(local).requires_grad_(requires_grad)

    def sharded(shape: Sequence[int], dim: int, requires_grad: bool = False) -> Tensor:
        sizes = {0: (shape[dim] // 2,) * 2}
        x = ShardTensor.from_local(plain(shape, dim), mesh, [Shard(dim)], shard_sizes=sizes)
        return x.requires_grad_(requires_grad)

    return {"plain": plain, "sharded": sharded}


def measure(runs: dict[str, Run], numbers: dict[str, int], rounds: int, grad: bool) -> list[dict[str, float]]:
    """Microseconds per call, by round."""
    with torch.set_grad_enabled(grad):
        for run in [*runs.values()] * 3:  # fills the caches: plans, primitives, the allocator's blocks
            run()
        return [{kind: timed(run, numbers[kind]) for kind, run in runs.items()} for _ in range(rounds)]


def timed(run: Run, number: int) -> float:
    start = time.thread_time()
    for _ in range(number):
        run()
    return (time.thread_time() - start) / number * 1e6


def sent(run: Run, grad: bool) -> int:
    with torch.set_grad_enabled(grad), CommDebugMode() as mode:
        run()
    return mode.get_total_counts()


def result(row: Row, places: dict[str, Place], reference: Run, rounds: int, number: int) -> dict[str, Any]:
    """What there is to know of a row, but for how its bar scales; times in microseconds."""
    runs = {kind: row.make(place) for kind, place in places.items()}
    messages = sent(runs["sharded"], row.grad)
    if row.step:
        runs |= {f"{kind} SGD": row.make(place, sgd=True) for kind, place in places.items()}
    numbers = dict.fromkeys(runs, max(1, number // 10) if row.step else number)
    times = measure(runs | {"reference": reference}, numbers | {"reference": number}, rounds, row.grad)
    best = {kind: min(t[kind] for t in times) for kind in times[0]}
    ratio = best["sharded"] / best["plain"]
    return {
        "name": row.name,
        "unit": "ratio" if row.step else "us",
        "value": ratio if row.step else best["sharded"],
        "before": row.before,
        "bar": row.bar,
        "ratio": ratio,
        "ratio_sgd": best["sharded SGD"] / best["plain SGD"] if row.step else None,
        "sent": messages,
        "best_us": best,
        "median_us": {kind: median(t[kind] for t in times) for kind in best},
    }


def compare_with_bars(results: list[dict[str, Any]], reference_us: float) -> None:
    """Add to each row its scaled bar, and whether it is missed."""
    for r in results:
        r["scaled_bar"] = r["bar"] * (reference_us / REFERENCE_US if r["unit"] == "us" else 1)
        r["missed"] = r["value"] > r["scaled_bar"]


# -- printing ----------------------------------------------------------------------------------------------------------

HEADER = (
    f"{'best and median in microseconds':32s}{'plain':>8s}{'median':>8s}{'sharded':>9s}{'median':>8s}{'ratio':>7s}"
    f"{'SGD':>6s}{'sent':>5s}{'before':>8s}{'bar':>6s}{'scaled':>8s}"
)


def line(r: dict[str, Any]) -> str:
    best, middle, ratio = r["best_us"], r["median_us"], r["unit"] == "ratio"
    sgd = f"{r['ratio_sgd']:6.2f}" if ratio else " " * 6
    digits = 1 if ratio else 0
    return (
        f"{r['name']:32s}{best['plain']:8.1f}{middle['plain']:8.1f}{best['sharded']:9.1f}{middle['sharded']:8.1f}"
        f"{r['ratio']:7.2f}{sgd}{r['sent']:5d}{r['before']:8.{digits}f}{r['bar']:6.{digits}f}"
        f"{r['scaled_bar']:8.1f}  {'missed' if r['missed'] else 'met'}"
    )


def profile(row: Row, place: Place, rounds: int, number: int, sort: str) -> None:
    """Print where the time of a row's ShardTensor calls goes."""
    run = row.make(place)
    calls = rounds * max(1, number // 10)
    profiler = cProfile.Profile()
    with torch.set_grad_enabled(row.grad):
        for _ in range(3):
            run()
        profiler.enable()
        for _ in range(calls):
            run()
        profiler.disable()
    functions: list[tuple[float, float, float, str]] = []
    for (path, number_in_file, name), (_, count, own, total, _) in pstats.Stats(profiler).stats.items():  # type: ignore
        where = "" if path == "~" else "/".join(path.split("/")[-2:]) + f":{number_in_file} "
        functions.append((own / calls * 1e6, total / calls * 1e6, count / calls, where + name))
    print(f"== {row.name}: per call (of {calls}), microseconds under the profiler, which slows Python down")
    print(f"{'own':>8s}{'total':>9s}{'calls':>8s}  all: {sum(own for own, *_ in functions):.0f}")
    for own, total, count, name in sorted(functions, key=lambda f: f[sort == "total"], reverse=True)[:25]:
        print(f"{own:8.1f}{total:9.1f}{count:8.1f}  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--number", type=int, default=20, help="calls per round; of steps a tenth")
    parser.add_argument("--only", help="the row of this name, or those whose name contains it", default="")
    parser.add_argument("--json", help="write the rows to this file, too", metavar="FILE")
    parser.add_argument("--profile", help="profile these rows instead, chosen as by --only", metavar="NAME")
    parser.add_argument("--sort", choices=["own", "total"], default="own", help="of --profile: which time")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    places = placers()
    wanted = args.only if args.profile is None else args.profile
    every = [*OPERATORS, *STEPS]
    rows = [row for row in every if wanted == row.name] or [row for row in every if wanted in row.name]
    if not rows:
        parser.error(f"no row's name contains {wanted!r}")
    if args.profile is not None:
        for row in rows:
            profile(row, places["sharded"], args.rounds, args.number, args.sort)
        return

    results, reference = [], conv2d(places["plain"])
    for row in rows:
        print(f"measuring {row.name}", file=sys.stderr)
        results.append(result(row, places, reference, args.rounds, args.number))
    reference_us = min(r["best_us"]["reference"] for r in results)
    compare_with_bars(results, reference_us)
    print(HEADER, *map(line, results), sep="\n")
    missed = sum(r["missed"] for r in results)
    print(f"reference (plain conv2d): {reference_us:.1f} us; {missed} of {len(rows)} bars missed")
    if args.json:
        about = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
        with open(args.json, "w") as file:
            json.dump({**about, "reference_us": reference_us, "rows": results}, file, indent=2)


if __name__ == "__main__":
    main()
