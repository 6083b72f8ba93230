"""A U-Net learns to tell land from sea on one large picture, each rank holding only its own part of it.

python train.py                                           plain PyTorch, one process
torchrun --nproc-per-node 2 train.py                      two latitude bands
torchrun --nproc-per-node 2 train.py --uneven             bands of different heights
torchrun --nproc-per-node 2 train.py --compare            and how long a step takes in plain PyTorch on one process
torchrun --nproc-per-node 4 train.py --mesh 2x2 --check   latitude x longitude, compared with plain PyTorch
torchrun --nproc-per-node 2 train.py --attention          with natten's neighborhood attention at the lowest level
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import UNet
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))
import earth
import running
from layout import Layout, make_layout

FULL_JOB = 675  # rows, by default
BAR = 0.6  # of one process's time, for a step of that on two even ranks


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
    image, land = earth.normalise(image, dtype), land.to(dtype)
    return model, lambda: train_step(model, optimizer, image, land)


def train(args: argparse.Namespace, image: Tensor, land: Tensor, label: str) -> tuple[nn.Module, running.History]:
    """Train a fresh model."""
    model, step = prepare(args, image, land)
    return model, running.repeat(step, args.steps, label, quiet=args.rank != 0, count=False)


@torch.no_grad()
def predict(model: nn.Module, image: Tensor) -> Tensor:
    """1 where the model sees land, as bytes, which is all that ever gets gathered."""
    dtype = next(model.parameters()).dtype
    return (model(earth.normalise(image, dtype)) > 0).to(torch.uint8)


def compare_times(args: argparse.Namespace, whole: list[Tensor | None], mine: list[Tensor]) -> None:
    """Print how long a step takes on all ranks, and on rank 0 alone in plain PyTorch."""
    plain = prepare(args, *whole)[1] if args.rank == 0 else None
    ratio = running.compare_times(args, prepare(args, *mine)[1], plain)
    if args.rank == 0 and args.layout == layout_of(FULL_JOB, 2) and not args.attention:
        print(f"on two idle cores at most {BAR} is expected: {'it is' if ratio <= BAR else 'it is more here'}")


def layout_of(height: int, ranks: int, mesh: str | None = None, *sizes: str | None, uneven: bool = False) -> Layout:
    return make_layout({"rows": height, "columns": 2 * height}, ranks, mesh, sizes, uneven)


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
    add("--dtype", choices=running.TOLERANCE, default="float32")
    add("--seed", type=int, default=0)
    add("--device", help="cpu, cuda, ...; default: the accelerator if there is one, else cpu")
    add("--output", default="globe.png", help="where the picture goes")
    add("--check", action="store_true", help="no picture; repeat the steps in plain PyTorch and compare")
    add("--compare", action="store_true", help="also time a step in plain PyTorch on one process")
    args = parser.parse_args()
    if args.steps is None:
        args.steps = 10 if args.check else 60 if args.attention else 100
    running.add_world(args)
    try:
        if not 32 <= args.resolution <= earth.FULL_HEIGHT:
            raise ValueError(f"--resolution must be from 32 to {earth.FULL_HEIGHT}")
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
        sizes = args.rank_sizes, args.rank_sizes_lon
        args.layout = layout_of(args.resolution, args.world_size, args.mesh, *sizes, uneven=args.uneven)
    except ValueError as error:
        running.refuse(args, error)
    return args


def main() -> None:
    args = parse_arguments()
    # With --check the others wait for rank 0, which has all the work to do alone.
    device, first = running.start(args, minutes=600 if args.check else 10), args.rank == 0
    image = land = None
    if first:
        image, land = (tensor.to(device) for tensor in earth.load(args.resolution))
        print(f"{args.resolution} x {2 * args.resolution} pixels on {args.world_size} x {device.type}, {args.dtype}")

    my_image, my_land = image, land
    if args.sharded:
        my_image, my_land = running.scatter([image, land], device, args.layout)

    model, history = train(args, my_image, my_land, "training")

    memory = running.of_all_ranks(running.peak_memory(device))
    if first:
        print(f"loss {history.losses[0]:.4f} -> {history.losses[-1]:.4f}, {history.step_time:.2f} s per step")
        for rank, (gib, ((top, bottom), (left, right))) in enumerate(zip(memory, args.layout.boxes())):
            print(f"  rank {rank}: rows {top}-{bottom - 1}, columns {left}-{right - 1}, peak memory {gib:.2f} GiB")

    passed = True
    if args.compare:
        compare_times(args, [image, land], [my_image, my_land])
    if args.check:
        if first:
            _, plain = train(args, image, land, "plain PyTorch")
            print(f"plain PyTorch: {plain.step_time:.2f} s per step, peak memory {running.peak_memory(device):.2f} GiB")
            passed = running.same_losses(history.losses, plain.losses, args.dtype)
        dist.barrier()
    else:
        prediction = predict(model, my_image)
        if args.sharded:
            prediction = prediction.full_tensor()
        if first:
            import plot

            accuracy = plot.draw(args.output, image, land, prediction, args.layout)
            print(f"{accuracy:.2%} of the pixels are right ({1 - land.double().mean():.2%} are sea); see {args.output}")
    running.leave(args, passed)


if __name__ == "__main__":
    main()
