"""Host time of operators and of training steps: ShardTensor against plain torch and steps by hand, next to bars.

    python benchmarks/bench_host.py [--only NAME] [--rounds N] [--number N] [--quick] [--json FILE]
    python benchmarks/bench_host.py --profile NAME [--sort total]

Measured is the CPU time of the calling thread (Python, dispatch and the kernels) of rank 0 of two, on the fake process
group: collectives start and complete without moving anything, so nobody is waited for. The other side of each row is
the same call in plain torch on a tensor of rank 0's local shape, with the same weights. Tensors are tiny (an image
shard is 1 x 8 x 8 x 16), so that kernels hardly count, and one thread computes.

Each round times, one after the other, plain torch, ShardTensor and a reference: a plain 3 x 3 convolution of that
shard. The best time is the minimum over the rounds, which a busy machine hardly moves; the median shows how busy it
was. Operators are called ``--number`` times per round, steps a tenth as often. The garbage collector stays on. Halos
hold whatever the memory held, as nothing is sent; denormal numbers are flushed so that they cost no time.

- Operators are relative to the run's best reference, so that their bars hold on any machine: 7.5 is 90 us where a plain
  convolution takes 12.
- Steps (zero the gradients, forward, loss, backward) are relative to the same step written by hand, on local tensors,
  which sends the same (``by_hand.py``). The note has the ratio to plain torch, which sends nothing, and the same with
  ``torch.optim.SGD.step`` included.

"before" is what this benchmark showed when the bars were set. The note also counts the collectives of one call.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from by_hand import OverRanks
from report import Figure, best_and_median, chosen, finish, parser
from timing import Run, device_type, host_time, take_device
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardtensor import ShardTensor
from shardtensor.testing import count_communication

GROUP = "host time, against plain torch"
BY_HAND = 1.35  # how long a step takes at most, relative to one by hand
REFERENCE = 12.0  # us, of the machine for which the bars are written
BEFORE = 11.4  # us, the reference when "before" was measured
IMAGE, TOKENS, VOLUME = (1, 8, 16, 16), (1, 32, 32), (1, 4, 8, 4, 4)  # global shapes; half of dim 2, 1, 2 is local

# Makes a tensor of this global shape, sharded along this dim, or of the local shape; it may require grad.
Place = Callable[..., Tensor]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: what is printed, and what ``--only`` and ``--profile`` look for.
        make: the call to time, on the tensors that it makes with the ``Place``.
        before, bar: microseconds of an operator on the machine of the bars; of a step the ratios to plain torch and to
            the step by hand.
        grad: whether autograd is on.
        step: whether it is a training step; ``make`` takes ``sgd`` and ``by_hand`` then, too.
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


def of_image(function: Callable[[Tensor], Any], place: Place, requires_grad: bool = False) -> Run:
    x = place(IMAGE, 2, requires_grad=requires_grad)
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
        self.larger = nn.Upsample(scale_factor=2, mode="bilinear")
        self.up = conv_norm_act(16, 8)
        self.head = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        return self.head(self.up(torch.cat([x, self.larger(self.lowest(x))], 1)))


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


def step(
    network: Callable[[], nn.Module],
    shape: Sequence[int],
    dim: int,
    place: Place,
    sgd: bool = False,
    by_hand: bool = False,
) -> Run:
    torch.manual_seed(0)
    model, x, target = network(), place(shape, dim), place(shape, dim)
    model = OverRanks(model, 0, 2) if by_hand else model
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def run() -> None:
        optimizer.zero_grad()
        train(model, x, target)
        if sgd:
            optimizer.step()

    return run


def train(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """Compute the gradients, of which there are none yet; returns the loss: by hand, that of this rank."""
    loss = F.mse_loss(model(x), target)
    if isinstance(model, OverRanks):
        model.backward(loss)
    else:
        loss.backward()
    return loss


# The network, the global shape of its inputs, which its outputs have, too, and the sharded dim.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Sequence[int], int]] = {
    "small U-Net": (UNet, IMAGE, 2),
    "conv-GN-SiLU x 6": (convolutions, IMAGE, 2),
    "conv3d-BN-ReLU x 6": (convolutions_3d, VOLUME, 2),
    "transformer encoder x 4": (transformer, TOKENS, 1),
    "MLP": (perceptron, TOKENS, 1),
}
STEPS = [
    Row(f"step: {name}", partial(step, *network), before, BY_HAND, grad=True, step=True)
    for (name, network), before in zip(NETWORKS.items(), (9.2, 9.6, 9.7, 6.5, 3.2), strict=True)
]

# -- measuring ---------------------------------------------------------------------------------------------------------


def placers() -> dict[str, Place]:
    mesh = init_device_mesh(device_type(), (2,))

    def plain(shape: Sequence[int], dim: int, requires_grad: bool = False) -> Tensor:
        local = [n // 2 if d == dim else n for d, n in enumerate(shape)]
        return torch.randn(local).requires_grad_(requires_grad)

    def sharded(shape: Sequence[int], dim: int, requires_grad: bool = False) -> Tensor:
        sizes = {0: (shape[dim] // 2,) * 2}
        x = ShardTensor.from_local(plain(shape, dim), mesh, [Shard(dim)], shard_sizes=sizes)
        return x.requires_grad_(requires_grad)

    return {"plain": plain, "sharded": sharded}


def measure(runs: dict[str, Run], numbers: dict[str, int], rounds: int, grad: bool) -> dict[str, list[float]]:
    """Seconds per call, by kind, one per round."""
    with torch.set_grad_enabled(grad):
        for run in [*runs.values()] * 3:  # fills the caches: plans, primitives, the allocator's blocks
            run()
        taken = [{kind: host_time(run, numbers[kind]) for kind, run in runs.items()} for _ in range(rounds)]
    return {kind: [times[kind] for times in taken] for kind in runs}


def sent(run: Run, grad: bool) -> int:
    with torch.set_grad_enabled(grad), count_communication() as counted:
        run()
    return counted.collectives.total()


def result(row: Row, places: dict[str, Place], reference: Run, rounds: int, number: int) -> Figure:
    """The times of a row; what they are relative to is not known yet."""
    runs = {kind: row.make(place) for kind, place in places.items()}
    note = f"collectives: {sent(runs['sharded'], row.grad)}"
    if row.step:
        runs |= {f"{kind} with SGD": row.make(place, sgd=True) for kind, place in places.items()}
        runs["by hand"] = row.make(places["plain"], by_hand=True)
    numbers = dict.fromkeys(runs, max(1, number // 10) if row.step else number) | {"reference": number}
    times = best_and_median(measure(runs | {"reference": reference}, numbers, rounds, row.grad))
    best = times["best"]
    ratio = best["sharded"] / best["plain"]
    if row.step:
        note = f"{ratio:.2f}x of plain torch, {best['sharded with SGD'] / best['plain with SGD']:.2f}x with SGD; {note}"
    note = f"{note}; before {row.before if row.step else row.before / BEFORE:.1f}x"
    bar = row.bar if row.step else row.bar / REFERENCE
    return Figure(GROUP, row.name, None, bar=bar, **times, note=note, details={"of plain torch": ratio})


def relative(figure: Figure, row: Row, reference: float) -> Figure:
    """The figure with its value: of a step relative to that by hand, of an operator to the reference."""
    against, base = ("the step by hand", figure.best["by hand"]) if row.step else ("a plain conv2d", reference)
    shown = {kind: time for kind, time in figure.best.items() if kind in ("plain", "sharded", "by hand")}
    return replace(figure, name=f"{row.name}, of {against}", value=figure.best["sharded"] / base, best=shown)


def results(rows: Sequence[Row], places: dict[str, Place], rounds: int, number: int) -> list[Figure]:
    found, reference = [], conv2d(places["plain"])
    for row in rows:
        print(f"measuring {row.name}", file=sys.stderr)
        found.append(result(row, places, reference, rounds, number))
    best = min(figure.best["reference"] for figure in found)
    return [relative(figure, row, best) for row, figure in zip(rows, found)]


# -- profile -----------------------------------------------------------------------------------------------------------


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
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=51)
    made.add_argument("--number", type=int, default=20, help="calls per round; of steps a tenth")
    made.add_argument("--profile", help="profile these rows instead, chosen as by --only", metavar="NAME")
    made.add_argument("--sort", choices=["own", "total"], default="own", help="of --profile: which time")
    options = made.parse_args()
    warnings.simplefilter("ignore")
    take_device(0)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    places, rounds = placers(), 2 if options.quick else options.rounds
    by_name = {row.name: row for row in [*OPERATORS, *STEPS]}
    rows = [by_name[name] for name in chosen(options.profile or options.only, by_name, made.error)]
    if options.profile is None:
        finish(results(rows, places, rounds, options.number), options)
        return
    for row in rows:
        profile(row, places["sharded"], rounds, options.number, options.sort)


if __name__ == "__main__":
    main()
