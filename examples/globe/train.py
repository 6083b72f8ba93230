"""A U-Net learns to tell land from sea on one large picture, each rank holding only its own part of it.

python train.py                                           plain PyTorch, one process
torchrun --nproc-per-node 2 train.py                      two latitude bands
torchrun --nproc-per-node 2 train.py --uneven             bands of different heights
torchrun --nproc-per-node 2 train.py --compare            and how long a step takes in plain PyTorch on one process
torchrun --nproc-per-node 4 train.py --mesh 2x2 --check   latitude x longitude, compared with plain PyTorch
torchrun --nproc-per-node 2 train.py --attention          with natten's neighborhood attention at the lowest level
"""

import argparse
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import data
import torch
import torch.distributed as dist
import torch.nn.functional as F
from layout import Layout, make_layout
from model import UNet
from torch import Tensor, nn
from tqdm import tqdm

TOLERANCE = {"float32": 1e-4, "float64": 1e-9}
ROUNDS = 6  # of --compare
FULL_JOB = 675  # rows, by default
BAR = 0.6  # of one process's time, for a step of that on two even ranks


@dataclass
class History:
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def step_time(self) -> float:
        return statistics.median(self.seconds[1:] or self.seconds)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, image: Tensor, land: Tensor) -> float:
    """One step of ordinary PyTorch. Whether `image` and `land` are spread over ranks makes no difference here."""
    optimizer.zero_grad()
    loss = F.binary_cross_entropy_with_logits(model(image), land)
    loss.backward()
    optimizer.step()
    return loss.item()


def make_model(args: argparse.Namespace, sharded: bool) -> nn.Module:
    if not args.attention:
        return UNet(width=args.width)
    from attention import AttentionUNet, PlainAttention

    # On plain tensors natten needs an accelerator.
    return AttentionUNet(width=args.width, attention=None if sharded else PlainAttention)


def prepare(args: argparse.Namespace, image: Tensor, land: Tensor) -> tuple[nn.Module, Callable[[], float]]:
    """A fresh model and its step on bytes `image` and `land`; the seed makes its first weights equal on every rank."""
    torch.manual_seed(args.seed)
    dtype = getattr(torch, args.dtype)
    model = make_model(args, sharded=hasattr(image, "shard_sizes")).to(image.device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    image, land = data.normalise(image, dtype), land.to(dtype)
    return model, lambda: train_step(model, optimizer, image, land)


def train(args: argparse.Namespace, image: Tensor, land: Tensor, label: str, quiet: bool) -> tuple[nn.Module, History]:
    """Train a fresh model."""
    model, step = prepare(args, image, land)
    history = History()
    with tqdm(total=args.steps, desc=label, unit="step", disable=quiet) as bar:
        for _ in range(args.steps):
            start = time.perf_counter()
            history.losses.append(step())
            history.seconds.append(time.perf_counter() - start)
            bar.set_postfix(loss=f"{history.losses[-1]:.4f}", refresh=False)
            bar.update()
    return model, history


@torch.no_grad()
def predict(model: nn.Module, image: Tensor) -> Tensor:
    """1 where the model sees land, as bytes, which is all that ever gets gathered."""
    dtype = next(model.parameters()).dtype
    return (model(data.normalise(image, dtype)) > 0).to(torch.uint8)


def scatter(bytes_on_rank_0: Tensor | None, mesh: dist.DeviceMesh, layout: Layout) -> Tensor:
    """Rank 0's bytes to all ranks, every rank receiving its own part only."""
    from torch.distributed.tensor import Shard

    from shardtensor import scatter_tensor

    placements = [Shard(2), Shard(3)][: mesh.ndim]
    return scatter_tensor(bytes_on_rank_0, 0, mesh, placements, shard_sizes=layout.shard_sizes)


def peak_memory(device: torch.device) -> float:
    """GiB: what the accelerator held at most, or, on the CPU, what the whole process did."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


def compare_times(args: argparse.Namespace, whole: list[Tensor | None], mine: list[Tensor]) -> None:
    """Print how long a step takes on all ranks, and on rank 0 alone in plain PyTorch, one after the other in each of
    some rounds; the first one does not count."""
    _, sharded = prepare(args, *mine)
    plain = prepare(args, *whole)[1] if args.rank == 0 else None
    seconds: dict[str, list[float]] = {"sharded": [], "plain": []}
    for _ in range(ROUNDS):
        for kind, step in (("sharded", sharded), ("plain", plain)):
            dist.barrier()
            start = time.perf_counter()
            if step is not None:
                step()
            dist.barrier()
            seconds[kind].append(time.perf_counter() - start)
    if args.rank == 0:
        best = {kind: min(taken[1:]) for kind, taken in seconds.items()}
        middle = {kind: statistics.median(taken[1:]) for kind, taken in seconds.items()}
        ratio, bar = best["sharded"] / best["plain"], ""
        if args.layout == make_layout(FULL_JOB, 2, None, None, None) and not args.attention:
            bar = f"; to be at most {BAR}: {'met' if ratio <= BAR else 'missed'}"
        for kind, name in (("plain", "one process"), ("sharded", f"{args.world_size} ranks")):
            print(f"{name}: {best[kind]:.3f} s per step at best, {middle[kind]:.3f} s in the median")
        print(f"{args.world_size} ranks take {ratio:.2f} times as long as one process{bar}")


def compare_losses(sharded: History, plain: History, dtype: str) -> bool:
    """Print the two loss curves side by side; True if they agree."""
    print(f"\n{'step':>4}  {'sharded':>18}  {'plain PyTorch':>18}  {'relative difference':>19}")
    differences = [abs(a - b) / abs(b) for a, b in zip(sharded.losses, plain.losses)]
    for step, (a, b, difference) in enumerate(zip(sharded.losses, plain.losses, differences), start=1):
        print(f"{step:>4}  {a:>18.15f}  {b:>18.15f}  {difference:>19.1e}")
    worst, allowed = max(differences), TOLERANCE[dtype]
    passed = worst <= allowed  # False for nan as well
    verdict = "PASS" if passed else "FAIL"
    print(f"\n{verdict}: largest relative difference {worst:.1e}, allowed for {dtype}: {allowed:.0e}")
    return passed


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--resolution", type=int, default=FULL_JOB, metavar="H", help="rows, of twice as many columns; at most 2700")
    add("--rank-sizes", metavar="A+B", help="rows per band, north to south, such as 300+375; default: even")
    add("--mesh", metavar="AxB", help="bands of latitude x stripes of longitude, such as 2x2; default: bands only")
    add("--rank-sizes-lon", metavar="A+B", help="columns per stripe, west to east; default: even")
    add("--uneven", action="store_true", help="sizes in the proportions 2 : 7 : 12 : ... where none are given")
    add("--steps", type=int, help="default: 100, 60 with --attention, 10 with --check")
    add("--lr", type=float, default=0.01)
    add("--width", type=int, default=8, help="channels at full size; a multiple of 4")
    add("--attention", action="store_true", help="neighborhood attention at the lowest level; needs natten")
    add("--dtype", choices=TOLERANCE, default="float32")
    add("--seed", type=int, default=0)
    add("--device", help="cpu, cuda, ...; default: the accelerator if there is one, else cpu")
    add("--output", default="globe.png", help="where the picture goes")
    add("--check", action="store_true", help="no picture; repeat the steps in plain PyTorch and compare")
    add("--compare", action="store_true", help="also time a step in plain PyTorch on one process")
    args = parser.parse_args()
    if args.steps is None:
        args.steps = 10 if args.check else 60 if args.attention else 100
    args.world_size = int(os.environ.get("WORLD_SIZE", 1))
    args.rank = int(os.environ.get("RANK", 0))
    args.sharded = "RANK" in os.environ
    try:
        if not 32 <= args.resolution <= data.FULL_HEIGHT:
            raise ValueError(f"--resolution must be from 32 to {data.FULL_HEIGHT}")
        if args.steps < 1 or args.width < 4 or args.width % 4:
            raise ValueError("--steps must be positive and --width a multiple of 4")
        if args.attention:
            from attention import AttentionUNet

            if args.resolution < AttentionUNet.least():
                raise ValueError(f"--attention needs a --resolution of at least {AttentionUNet.least()}")
        if args.check and not args.sharded:
            raise ValueError("--check compares with a sharded run: start it with torchrun")
        if args.compare and not args.sharded:
            raise ValueError("--compare compares with a sharded run: start it with torchrun")
        sizes = args.rank_sizes, args.rank_sizes_lon, args.uneven
        args.layout = make_layout(args.resolution, args.world_size, args.mesh, *sizes)
    except ValueError as error:
        if args.rank == 0:
            parser.error(str(error))
        sys.exit(2)
    return args


def start(args: argparse.Namespace) -> torch.device:
    """The device of this process, and, under torchrun, the process group."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = torch.device(args.device or accelerator or "cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
        torch.backends.cudnn.allow_tf32 = False  # float32 that means it; --check could not tell an error from rounding
    if args.sharded:
        # With --check the others wait for rank 0, which has all the work to do alone.
        dist.init_process_group(
            dist.get_default_backend_for_device(device), timeout=timedelta(minutes=600 if args.check else 10)
        )
    return device


def main() -> None:
    args = parse_arguments()
    device, first = start(args), args.rank == 0
    image = land = None
    if first:
        image, land = (tensor.to(device) for tensor in data.load(args.resolution))
        print(f"{args.resolution} x {2 * args.resolution} pixels on {args.world_size} x {device.type}, {args.dtype}")

    my_image, my_land = image, land
    if args.sharded:
        names = ("latitude", "longitude")[: len(args.layout.mesh)]
        mesh = dist.init_device_mesh(device.type, args.layout.mesh, mesh_dim_names=names)
        my_image, my_land = (scatter(tensor, mesh, args.layout) for tensor in (image, land))

    model, history = train(args, my_image, my_land, "training", quiet=not first)

    memory = [peak_memory(device)]
    if args.sharded:
        memory = [None] * args.world_size
        dist.all_gather_object(memory, peak_memory(device))
    if first:
        print(f"loss {history.losses[0]:.4f} -> {history.losses[-1]:.4f}, {history.step_time:.2f} s per step")
        for rank, (gib, (top, bottom, left, right)) in enumerate(zip(memory, args.layout.boxes())):
            print(f"  rank {rank}: rows {top}-{bottom - 1}, columns {left}-{right - 1}, peak memory {gib:.2f} GiB")

    passed = True
    if args.compare:
        compare_times(args, [image, land], [my_image, my_land])
    if args.check:
        if first:
            _, plain = train(args, image, land, "plain PyTorch", quiet=False)
            print(f"plain PyTorch: {plain.step_time:.2f} s per step, peak memory {peak_memory(device):.2f} GiB")
            passed = compare_losses(history, plain, args.dtype)
        dist.barrier()
    else:
        prediction = predict(model, my_image)
        if args.sharded:
            prediction = prediction.full_tensor()
        if first:
            import plot

            accuracy = plot.draw(args.output, image, land, prediction, args.layout)
            print(f"{accuracy:.2%} of the pixels are right ({1 - land.double().mean():.2%} are sea); see {args.output}")
    if args.sharded:
        dist.destroy_process_group()
        # torch's gloo threads now and then abort the interpreter's own clean-up, after all work is done.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if passed else 1)


if __name__ == "__main__":
    main()
