"""A network of MONAI learns to tell the tissues of a brain, each rank holding only its own part of the volume.

python segment.py                                             plain PyTorch, one process
torchrun --nproc-per-node 4 segment.py --mesh 2x2             left and right x back and front
torchrun --nproc-per-node 4 segment.py --mesh 2x2 --uneven    parts of different sizes
torchrun --nproc-per-node 4 segment.py --mesh 2x2 --compare   and how long a step takes in plain PyTorch on one process
torchrun --nproc-per-node 4 segment.py --mesh 2x2 --check     losses and weights compared with plain PyTorch
torchrun --nproc-per-node 2 segment.py --network SegResNet    another network
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import volume
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))
import running
from layout import Layout, add_options, make_layout


def unet(width: int) -> nn.Module:
    from monai.networks.nets import UNet

    channels = tuple(width * 2**level for level in range(4))
    return UNet(3, 1, len(volume.TISSUES), channels=channels, strides=(2, 2, 2), num_res_units=2)


def segresnet(width: int) -> nn.Module:
    from monai.networks.nets import SegResNet

    return SegResNet(3, init_filters=width, out_channels=len(volume.TISSUES), blocks_down=(1, 2, 2, 2))


# Of --check: biases in front of norms have gradients of nothing but rounding, which AdamW makes steps of: in float64 of
# about 1e-8, in float32 of any size.
WEIGHTS = 1e-6
NETWORKS = {"UNet": unet, "SegResNet": segresnet}  # as MONAI has them


def prepare(args: argparse.Namespace, image: Tensor, tissue: Tensor) -> tuple[nn.Module, Callable[[], float]]:
    """A fresh network and its step; the seed makes its first weights equal on every rank."""
    from monai.losses import DiceCELoss

    torch.manual_seed(args.seed)
    dtype = getattr(torch, args.dtype)
    model = NETWORKS[args.network](args.width).to(image.device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    criterion = DiceCELoss(to_onehot_y=True, softmax=True)
    image = image.to(dtype)

    def step() -> float:
        optimizer.zero_grad()
        loss = criterion(model(image), tissue)
        loss.backward()
        optimizer.step()
        return loss.item()

    return model, step


def train(args: argparse.Namespace, image: Tensor, tissue: Tensor, label: str) -> tuple[nn.Module, running.History]:
    model, step = prepare(args, image, tissue)
    count = hasattr(image, "shard_sizes")
    return model, running.repeat(step, args.steps, label, quiet=args.rank != 0, count=count)


@torch.no_grad()
def predict(model: nn.Module, image: Tensor) -> tuple[Tensor, Tensor]:
    """The score of each tissue in every voxel, and the most likely tissue, uint8."""
    scores = model(image.to(next(model.parameters()).dtype))
    return scores, scores.argmax(1, keepdim=True).to(torch.uint8)


def difference(args: argparse.Namespace, model: nn.Module, image: Tensor, scores: Tensor) -> Tensor:
    """By voxel, how far scores are from those that a network of the same weights gives in plain PyTorch, of the largest
    one."""
    twin, _ = prepare(args, image, image)
    twin.load_state_dict(model.state_dict())
    expected, _ = predict(twin, image)
    return (scores - expected).abs().amax(1, keepdim=True) / expected.abs().max()


def dice(prediction: Tensor, truth: Tensor) -> dict[str, float]:
    """By tissue, how much two volumes overlap: 1 where they are equal. Only numbers of voxels are summed over ranks."""
    scores = {}
    for index, name in enumerate(volume.TISSUES[1:], start=1):
        found, there = prediction == index, truth == index
        scores[name] = 2 * (found & there).sum().item() / (found.sum().item() + there.sum().item())
    return scores


@torch.no_grad()
def same_weights(sharded: nn.Module, plain: nn.Module, dtype: str) -> bool:
    """Print how far the weights are from each other, of the largest one; True if that is little enough."""
    largest = max(q.abs().max().item() for q in plain.parameters())
    pairs = zip(sharded.parameters(), plain.parameters(), strict=True)
    differences = [(p - q).abs().max().item() / largest for p, q in pairs]
    return running.verdict("difference of the weights, of the largest one,", differences, WEIGHTS, dtype)


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--resolution", type=int, default=2, metavar="MM", help="width of a voxel, from 1 mm to 8")
    add_options(parser, volume.DIMS)
    add("--network", choices=NETWORKS, default="UNet")
    add("--width", type=int, default=8, help="channels at full size; a multiple of 8")
    add("--steps", type=int, help="default: 60, 5 with --check")
    add("--lr", type=float, default=0.01)
    add("--dtype", choices=running.TOLERANCE, help="default: float32, float64 with --check")
    add("--seed", type=int, default=0)
    add("--device", help="cpu, cuda, ...; default: the accelerator if there is one, else cpu")
    add("--output", default="brain.png", help="where the picture goes")
    add("--check", action="store_true", help="no picture; repeat the steps in plain PyTorch and compare")
    add("--compare", action="store_true", help="also time a step in plain PyTorch on one process")
    args = parser.parse_args(given)
    args.steps = args.steps if args.steps is not None else 5 if args.check else 60
    args.dtype = args.dtype or ("float64" if args.check else "float32")
    running.add_world(args)
    try:
        if not 1 <= args.resolution <= 8:
            raise ValueError("--resolution must be from 1 to 8")
        if args.steps < 1 or args.width < 8 or args.width % 8:
            raise ValueError("--steps must be positive and --width a multiple of 8")
        if (args.check or args.compare) and not args.sharded:
            raise ValueError("--check and --compare are about a sharded run: start it with torchrun")
    except ValueError as error:
        running.refuse(args, error)
    return args


def main() -> None:
    args = parse_arguments()
    # With --check the others wait for rank 0, which has all the work to do alone.
    device, first = running.start(args, minutes=600 if args.check else 10), args.rank == 0
    image = tissue = shape = None
    if first:
        image, tissue = (each.to(device) for each in volume.load(args.resolution))
        shape = image.shape[2:]
    shape = running.of_all_ranks(shape)[0]
    try:
        sizes = args.sizes.split(",") if args.sizes else ()
        layout = make_layout(dict(zip(volume.DIMS, shape)), args.world_size, args.mesh, sizes, args.uneven)
    except ValueError as error:
        running.refuse(args, error)
    if first:
        voxels = f"{len(image)} scans of {' x '.join(map(str, shape))} voxels"
        print(f"{voxels} on {args.world_size} x {device.type}, {args.network}, {args.dtype}")

    mine = [image, tissue]
    if args.sharded:
        mine = running.scatter(mine, device, layout)
    model, history = train(args, *mine, "training")
    ranks = running.of_all_ranks((running.peak_memory(device), history.messages, history.sent))
    if first:
        report(history, ranks, layout)

    passed = True
    if args.compare:
        plain = prepare(args, image, tissue)[1] if first else None
        running.compare_times(args, prepare(args, *mine)[1], plain)
    if args.check:
        if first:
            twin, plain = train(args, image, tissue, "plain PyTorch")
            passed = running.same_losses(history.losses, plain.losses, args.dtype)
            if args.dtype == "float64":
                passed = same_weights(model, twin, args.dtype) and passed
        dist.barrier()
    else:
        scores, prediction = predict(model, mine[0])
        overlaps = dice(prediction, mine[1])
        if args.sharded:
            scores, prediction = scores.full_tensor(), prediction.full_tensor()
        if first:
            import slices

            print("Dice: " + ", ".join(f"{name} {overlap:.4f}" for name, overlap in overlaps.items()))
            errors = difference(args, model, image, scores) if args.compare else None
            slices.draw(args.output, image, tissue, prediction, errors, layout, overlaps)
            print(f"see {args.output}")
    running.leave(args, passed)


def report(history: running.History, ranks: list[tuple[float, int, int]], layout: Layout) -> None:
    """Print what the training took, and what each rank held and sent."""
    print(f"loss {history.losses[0]:.4f} -> {history.losses[-1]:.4f}, {history.step_time:.2f} s per step")
    for rank, ((gib, messages, sent), box) in enumerate(zip(ranks, layout.boxes())):
        part = " x ".join(str(stop - start) for start, stop in box)
        print(f"  rank {rank}: {part} voxels, peak memory {gib:.2f} GiB; a step sends "
              f"{messages} messages, {sent / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
