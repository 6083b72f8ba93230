"""A network learns how the winds of the world go from month to month, and then goes through the year by itself.

python forecast.py                                                  plain PyTorch, one process
torchrun --nproc-per-node 2 forecast.py --compare                   two bands of latitude; times one process, too
torchrun --nproc-per-node 2 forecast.py --stop 60                   the first 60 of 100 steps, and a checkpoint
torchrun --nproc-per-node 4 forecast.py --resume --mesh 2x2         the others on four ranks
torchrun --nproc-per-node 3 forecast.py --check --dtype float64     compared with plain PyTorch, step by step
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import fields
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zarr
from forecaster import Forecast
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import Shard

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))
import running
from layout import add_options, make_layout

from shardtensor.checkpoint import CheckpointReader, CheckpointWriter, latest
from shardtensor.data import read, write


def mean_square(error: Tensor) -> Tensor:
    """Over the sphere: rows of cells are as long as the cosine of their latitude."""
    rows = torch.linspace(-torch.pi / 2, torch.pi / 2, error.shape[-2], dtype=error.dtype, device=error.device)
    weight = rows.cos().clamp_min(0)
    return (error.square() * (weight / weight.mean())[:, None]).mean()


class Training:
    """A network, its optimizer, and the months that it learns; tensors may be spread over ranks or not."""

    def __init__(self, args: argparse.Namespace, months: Tensor) -> None:
        torch.manual_seed(args.seed)  # equal weights on all ranks
        self.months = months
        self.model = Forecast(months.shape[1], args.width).to(months.device, months.dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.taken = 0
        self._args = args

    def step(self) -> float:
        """From each month to the next; from December to January. The learning rate rises, and falls to nothing."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._args.lr * math.sin(math.pi * (self.taken + 0.5) / self._args.steps)
        self.optimizer.zero_grad()
        loss = mean_square(self.model(self.months, torch.arange(12)) - self.months.roll(-1, 0))
        loss.backward()
        self.optimizer.step()
        self.taken += 1
        return loss.item()

    def save(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.save(state, storage_writer=CheckpointWriter(folder / f"step-{self.taken}"))

    def load(self, folder: str) -> None:
        """What any number of ranks has saved."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, storage_reader=CheckpointReader(folder))
        set_state_dict(
            *(self.model, self.optimizer), model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.taken = int(Path(folder).name.removeprefix("step-"))


@torch.no_grad()
def go_through_the_year(model: nn.Module, months: Tensor, out: zarr.Array, sharded: bool) -> list[tuple[float, float]]:
    """From January on, each month from the one before, into an array; by month the error of the network, and that of
    January itself, in m/s."""
    x, errors = months[:1], []
    for month in range(len(months)):
        if month:
            x = model(x, torch.tensor([month - 1]))
        if sharded:
            write(out, x[0], index=month)
        else:
            out[month] = x[0].cpu().numpy()
        truth = months[month : month + 1]
        squares = [mean_square(guess - truth).item() for guess in (x, months[:1])]
        errors.append(tuple(fields.SCALE * square**0.5 for square in squares))
    return errors


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add_options(parser, ("latitudes", "longitudes"))
    add("--steps", type=int, help="of the whole training; default: 100, 10 with --check")
    add("--stop", type=int, help="after so many of them; default: after all")
    add("--lr", type=float, default=0.01, help="the largest one")
    add("--width", type=int, default=24, help="channels; a multiple of 4")
    add("--dtype", choices=running.TOLERANCE, default="float32")
    add("--seed", type=int, default=0)
    add("--device", help="cpu, cuda, ...; default: the accelerator if there is one, else cpu")
    add("--folder", type=Path, default=Path("runs/wind"), help="of the data, the checkpoints and the forecast")
    add("--resume", action="store_true", help="go on from the last checkpoint in the folder, on any number of ranks")
    add("--output", default="wind.png", help="where the picture goes")
    add("--check", action="store_true", help="no picture; repeat the steps in plain PyTorch and compare")
    add("--compare", action="store_true", help="also time a step in plain PyTorch on one process")
    args = parser.parse_args(given)
    args.steps = (10 if args.check else 100) if args.steps is None else args.steps
    args.stop = args.steps if args.stop is None else args.stop
    running.add_world(args)
    try:
        if not 0 < args.stop <= args.steps or args.width < 4 or args.width % 4:
            raise ValueError("--stop must be from 1 to --steps, and --width a multiple of 4")
        if (args.check or args.compare) and not args.sharded:
            raise ValueError("--check and --compare compare with a sharded run: start it with torchrun")
        dims = {"latitudes": fields.LATITUDES, "longitudes": fields.LONGITUDES}
        sizes = args.sizes.split(",") if args.sizes else []
        args.layout = make_layout(dims, args.world_size, args.mesh, sizes, args.uneven)
    except ValueError as error:
        running.refuse(args, error)
    return args


def load_months(args: argparse.Namespace, device: torch.device) -> tuple[Tensor, Tensor]:
    """The months on this process, and those that it trains with: of these each rank reads its own part."""
    path, dtype = args.folder / "winds.zarr", getattr(torch, args.dtype)
    if args.rank == 0:
        args.folder.mkdir(parents=True, exist_ok=True)
        fields.convert(path)
    running.wait_for_all()
    array = zarr.open_array(path, mode="r")
    if not args.sharded:
        whole = torch.from_numpy(array[:]).to(device, dtype)
        return whole, whole
    mesh = dist.init_device_mesh(device.type, args.layout.mesh)
    placements = [Shard(2 + axis) for axis in range(mesh.ndim)]
    mine = read(array, mesh, placements, shard_sizes=args.layout.shard_sizes, dtype=dtype)
    return torch.from_numpy(array[:]).to(device, dtype) if args.check or args.compare else mine, mine


def main() -> None:
    args = parse_arguments()
    # With --check the others wait for rank 0, which has all the work to do alone.
    device, first = running.start(args, minutes=600 if args.check else 10), args.rank == 0
    try:
        whole, months = load_months(args, device)
    except ValueError as error:
        running.refuse(args, error)
    training = Training(args, months)
    checkpoints = args.folder / "checkpoints"
    last = latest(checkpoints) if args.resume else None
    if last is not None:
        training.load(last)
    steps = args.stop - training.taken
    if first:
        print(f"12 months of {fields.LATITUDES} x {fields.LONGITUDES} cells on {args.world_size} x {device.type}")
        print(f"{'from scratch' if last is None else f'on from {last}'}, {steps} steps")
    history = running.repeat(training.step, steps, "training", quiet=not first, count=args.sharded)
    if first and history.losses:
        print(f"loss {history.losses[0]:.5f} -> {history.losses[-1]:.5f}, {history.step_time:.2f} s per step")

    passed = True
    if args.compare:
        plain: Callable[[], float] | None = Training(args, whole).step if first else None
        running.compare_times(args, Training(args, months).step, plain)
    if args.check:
        if first:
            alone = running.repeat(Training(args, whole).step, args.steps, "plain PyTorch", quiet=False, count=False)
            passed = running.same_losses(history.losses, alone.losses, args.dtype)
        running.wait_for_all()
    else:
        training.save(checkpoints)
        path = args.folder / "year.zarr"
        if first:
            zarr.open_array(path, mode="w", shape=months.shape, chunks=(1, 2, 20, 144), dtype="float32")
        running.wait_for_all()
        errors = go_through_the_year(training.model, months, zarr.open_array(path, mode="r+"), args.sharded)
        if first:
            import view

            for name, (network, january) in zip(fields.MONTHS, errors):
                print(f"{name}: off by {network:5.2f} m/s; January's winds by {january:5.2f}")
            view.draw(args.output, zarr.open_array(path, mode="r")[:], args.folder / "winds.zarr", args.layout)
            print(f"see {args.output}; the forecast is in {path}, the checkpoint in {checkpoints}")
    running.leave(args, passed)


if __name__ == "__main__":
    main()
