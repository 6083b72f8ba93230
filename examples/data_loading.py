"""Two ways to get data into shards, on a mesh of dp x domain ranks: one rank reads, or every rank reads its own slice.

The data is an archive of made-up weather, written to a zarr store: waves that travel around the globe at speeds of
their own, hour by hour. A small network learns to forecast the next hour. Each `dp` rank has batches of its own; along
`domain` they are cut into bands of latitude of different heights.

torchrun --nproc-per-node 4 examples/data_loading.py             the first rank of each domain reads and scatters
torchrun --nproc-per-node 4 examples/data_loading.py --slices    every rank reads its own slice, and only that
torchrun --nproc-per-node 4 examples/data_loading.py --check     both, compared with one process; memory of each rank
"""

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zarr
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from shardtensor import parallel
from shardtensor.data import ShardLoader, read
from shardtensor.parallel import parallelize

CHANNELS, HEIGHT, WIDTH = 4, 181, 360
MIB = 2**20


def write_archive(path: str, hours: int) -> None:
    """(hours, CHANNELS, HEIGHT, WIDTH) float32: waves of some wave numbers that travel east and west, and noise."""
    random = np.random.default_rng(0)
    shape = hours, CHANNELS, HEIGHT, WIDTH
    archive = zarr.open_array(path, mode="w", shape=shape, chunks=(8, 1, 60, WIDTH), dtype="float32")
    latitude = np.linspace(np.pi / 2, -np.pi / 2, HEIGHT)[:, None]
    longitude = np.linspace(0, 2 * np.pi, WIDTH, endpoint=False)
    number = np.arange(1, 7)[:, None, None]
    strength, phase, speed = (random.normal(size=(CHANNELS, 6, 1, 1)) for _ in range(3))
    for hour in range(hours):
        waves = strength * np.cos(latitude) ** number * np.cos(number * longitude + phase + 0.3 * speed * hour)
        archive[hour] = waves.sum(1) + random.normal(scale=0.01, size=(CHANNELS, HEIGHT, WIDTH))


class Blocks(Dataset):
    """Batches of consecutive hours, of which every `every`-th begins one: (length, CHANNELS, HEIGHT, WIDTH)."""

    def __init__(self, path: str, length: int, every: int):
        self.archive, self.length, self.every = zarr.open_array(path, mode="r"), length, every

    def __len__(self) -> int:
        return (self.archive.shape[0] - self.length) // self.every + 1

    def hours(self, i: int) -> slice:
        return slice(i * self.every, i * self.every + self.length)

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.from_numpy(self.archive[self.hours(i)])


def sampler(blocks: Blocks, replicas: int, rank: int) -> DistributedSampler:
    """Which batches a rank along dp sees: the same for all ranks of its domain."""
    return DistributedSampler(blocks, num_replicas=replicas, rank=rank, seed=0)


def scattered(blocks: Blocks, mesh: dist.DeviceMesh, rows: tuple[int, ...]) -> ShardLoader:
    """Read on the first rank of each domain; the others get their bands from it, one batch ahead."""
    loader = None
    if mesh["domain"].get_local_rank() == 0:
        dp = mesh["dp"]
        loader = DataLoader(blocks, batch_size=None, sampler=sampler(blocks, dp.size(), dp.get_local_rank()))
    return ShardLoader(loader, mesh["domain"], (Shard(2),), shard_sizes=rows)


def sliced(blocks: Blocks, mesh: dist.DeviceMesh, rows: tuple[int, ...]) -> Iterator[torch.Tensor]:
    """Every rank reads its own band of each batch, and nothing is sent."""
    for i in sampler(blocks, mesh["dp"].size(), mesh["dp"].get_local_rank()):
        yield read(blocks.archive, mesh["domain"], (Shard(2),), index=blocks.hours(i), shard_sizes=rows)


def make_model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(CHANNELS, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, CHANNELS, 3, padding=1)
    return nn.Sequential(*layers).to(device)


def forecast_loss(model: nn.Module, fields: torch.Tensor) -> torch.Tensor:
    """Ordinary PyTorch, whatever the tensor is: how well the model tells the change from each hour to the next."""
    now, later = fields[:-1], fields[1:]
    return F.mse_loss(model(now), later - now)


def train(mesh: dist.DeviceMesh, batches, device: torch.device) -> list[float]:
    """The loss before each step, averaged over dp."""
    model = make_model(device)
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for fields in batches:
        optimizer.zero_grad()
        loss = forecast_loss(model, fields)
        loss.backward()
        optimizer.step()
        mean = loss.detach().full_tensor()
        dist.all_reduce(mean, group=mesh["dp"].get_group())
        losses.append(mean.item() / mesh["dp"].size())
    return losses


def train_alone(blocks: Blocks, replicas: int, device: torch.device) -> list[float]:
    """The same in one process, with the batches of all dp ranks."""
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in zip(*(sampler(blocks, replicas, r) for r in range(replicas))):
        optimizer.zero_grad()
        loss = torch.stack([forecast_loss(model, blocks[i].to(device)) for i in step]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# -- memory -----------------------------------------------------------------------------------------------------------


def resident(what: str) -> int:
    """Bytes of this process's memory: VmRSS, now; VmHWM, at most."""
    return int(re.search(rf"{what}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def measure_memory(path: str, mesh: dist.DeviceMesh, rows: tuple[int, ...]) -> tuple[int, int, int]:
    """Bytes that a rank needs at most to go through batches of 104 hours; those of a batch, and of its shard."""
    for _ in scattered(Blocks(path, 8, 8), mesh, rows):
        pass  # what is allocated once
    blocks = Blocks(path, 104, 4)  # malloc returns what is freed if it is larger than 32 MiB, and may keep the rest
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    shard = 0
    for fields in scattered(blocks, mesh, rows):
        shard = fields.to_local().nbytes
        fields.sum()  # something to compute meanwhile
    batch = blocks.length * CHANNELS * HEIGHT * WIDTH * 4
    return resident("VmHWM") - before, batch, shard


def check_memory(path: str, mesh: dist.DeviceMesh, rows: tuple[int, ...]) -> bool:
    """Print each rank's peak; whether the source's is a batch and two shards, and the others' two shards."""
    found: list[tuple[int, int, int]] = [(0, 0, 0)] * dist.get_world_size()
    dist.all_gather_object(found, measure_memory(path, mesh, rows))
    passed = True
    for rank, (peak, batch, shard) in enumerate(found):
        source = rank % mesh["domain"].size() == 0
        expected = 2 * shard + source * batch
        fits = peak <= expected + 32 * MIB
        passed = passed and fits
        if dist.get_rank() == 0:
            what = f"batch {batch / MIB:.0f} + " if source else ""
            print(
                f"{'PASS' if fits else 'FAIL'}: rank {rank} needs {peak / MIB:.0f} MiB at most to load: {what}two "
                f"shards of {shard / MIB:.0f} are {expected / MIB:.0f}, allowed 32 more"
            )
    return passed


def check_losses(name: str, losses: list[float], alone: list[float]) -> bool:
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, alone, strict=True))
    passed = worst <= 1e-4
    print(
        f"{'PASS' if passed else 'FAIL'}: {name}: largest relative difference of the losses from one process's "
        f"{worst:.1e}, allowed 1e-04"
    )
    return passed


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--mesh", default="2x2", metavar="AxB", help="dp x domain")
    add("--rows", metavar="A+B", help=f"rows of latitude per band, of {HEIGHT}; default: a third on the source")
    add("--slices", action="store_true", help="every rank reads its own slice")
    add("--hours", type=int, default=128, help="of weather in the archive")
    add("--check", action="store_true", help="compare both ways with one process; measure memory")
    args = parser.parse_args()
    args.shape = tuple(map(int, args.mesh.split("x")))
    if args.rows is None:
        domain = args.shape[1]
        first = HEIGHT // 3 if domain > 1 else HEIGHT
        others = np.diff(np.linspace(first, HEIGHT, max(domain, 2)).astype(int)).tolist()[: domain - 1]
        args.rows = (first, *others)
    else:
        args.rows = tuple(map(int, args.rows.split("+")))
    return args


def main() -> None:
    args = parse_arguments()
    device = parallel.device()
    if device.type != "cpu":
        torch.backends.cudnn.allow_tf32 = False
    dist.init_process_group(dist.get_default_backend_for_device(device))
    mesh = dist.init_device_mesh(device.type, args.shape, mesh_dim_names=("dp", "domain"))
    first = dist.get_rank() == 0

    folder = [tempfile.mkdtemp() if first else None]
    dist.broadcast_object_list(folder)
    path = str(Path(folder[0]) / "weather.zarr")
    if first:
        write_archive(path, args.hours)
    dist.barrier()
    blocks = Blocks(path, 4, 4)

    ways = {"scattered": scattered, "slices": sliced}
    losses = {}
    for name in ways if args.check else ["slices" if args.slices else "scattered"]:
        losses[name] = train(mesh, ways[name](blocks, mesh, args.rows), device)
        if first:
            print(f"{name}: loss {losses[name][0]:.4f} -> {losses[name][-1]:.4f} in {len(losses[name])} steps")

    passed = True
    if args.check:
        if device.type == "cpu" and os.access("/proc/self/clear_refs", os.W_OK):
            passed = check_memory(path, mesh, args.rows)
        elif first:
            print("memory is measured on Linux and the CPU only")
        if first:
            alone = train_alone(blocks, args.shape[0], device)
            passed = all([passed, *(check_losses(name, found, alone) for name, found in losses.items())])
        dist.barrier()
    if first:
        shutil.rmtree(folder[0])
    dist.destroy_process_group()
    # torch's gloo threads now and then abort the interpreter's own clean-up, after all work is done.
    sys.stdout.flush()
    os._exit(0 if passed else 1)


if __name__ == "__main__":
    main()
