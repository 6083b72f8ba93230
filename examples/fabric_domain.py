"""Lightning Fabric with a domain axis: a network learns one step of heat flow on fields that are cut over ranks.

Fabric's ModelParallelStrategy makes a mesh of two axes, "data_parallel" and "tensor_parallel"; here the second one is
the domain. With --three-d it is split once more, into domain x tp, and linear layers are cut over the latter. The
network and its loss know nothing of either. Halfway, everything is saved, made anew and loaded again.

python examples/fabric_domain.py --devices 4                         Fabric starts the processes
torchrun --nproc-per-node 4 examples/fabric_domain.py --accelerator cpu --check
torchrun --nproc-per-node 8 examples/fabric_domain.py --accelerator cpu --three-d --check   (torch 2.13 or newer)
torchrun --nproc-per-node 4 examples/fabric_domain.py --precision bf16-mixed
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils.data import DataLoader, TensorDataset

from shardtensor import ShardTensor, scatter_tensor
from shardtensor.parallel import Parallelized, parallelize

HEIGHT, WIDTH, CHANNELS = 37, 24, 8
MAX_NORM = 0.5
# The largest relative difference of the losses from one process's. In bfloat16 sums of parts are rounded, too.
ALLOWED = {"32-true": 1e-6, "bf16-mixed": 2e-2, "bf16-true": 2e-2}


# -- what any program has ----------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """Two linear layers over the channels of each point."""

    def __init__(self, channels: int):
        super().__init__()
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x.movedim(1, -1)))).movedim(-1, 1)


class Block(nn.Sequential):
    def __init__(self, channels: int):
        super().__init__(nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(2, channels), Mlp(channels))


def make_network() -> nn.Module:
    first, last = nn.Conv2d(1, CHANNELS, 3, padding=1), nn.Conv2d(CHANNELS, 1, 3, padding=1)
    return nn.Sequential(first, Block(CHANNELS), Block(CHANNELS), last)


def make_fields(samples: int) -> TensorDataset:
    """Random temperatures (samples, 1, HEIGHT, WIDTH), and how much each place warms within a moment."""
    generator = torch.Generator().manual_seed(0)
    now = torch.randn(samples, 1, HEIGHT, WIDTH, generator=generator)
    kernel = torch.tensor([[[[0.0, 1, 0], [1, -4, 1], [0, 1, 0]]]]) / 4
    return TensorDataset(now, F.conv2d(now, kernel, padding=1))


# -- what Fabric is told -----------------------------------------------------------------------------------------------


class Domain:
    """How the ranks share samples: `parallelize` is given to the strategy, `cut` is called on each batch."""

    def __init__(self, three_d: bool):
        self.three_d = three_d
        self.mesh: dist.DeviceMesh | None = None
        self.done: Parallelized | None = None

    def parallelize(self, model: nn.Module, mesh: dist.DeviceMesh) -> nn.Module:
        if not self.three_d:
            self.done = parallelize(model, mesh, data="data_parallel", domain="tensor_parallel", units=[Block])
            return model
        if self.mesh is None:  # one mesh for all models: FSDP2 does not take an equal one for the same
            shape = (mesh["data_parallel"].size(), mesh["tensor_parallel"].size() // 2, 2)
            self.mesh = dist.init_device_mesh(mesh.device_type, shape, mesh_dim_names=("dp", "domain", "tp"))
        plan = {"*.up": "colwise", "*.down": "rowwise"}
        # All weights are DTensors on one mesh, so that their norms can be added up when gradients are clipped.
        self.done = parallelize(model, self.mesh, tensor="tp", plan=plan, units=[Block], spmd=True)
        return model

    def cut(self, batch: Tensor) -> ShardTensor:
        """All ranks of a domain have loaded the same batch; each takes its rows, in uneven parts."""
        assert self.done is not None
        mesh = self.done.inputs
        if not self.three_d:
            return scatter_tensor(batch, mesh, (Shard(2),), shard_sizes=rows(mesh.size()))
        # Here the mesh holds the data axis, too: the batches of all ranks along it make up one.
        sizes = rows(mesh["domain"].size())
        mine = batch.split(sizes, dim=2)[mesh["domain"].get_local_rank()].contiguous()
        batches = (len(batch),) * mesh["dp"].size()
        return ShardTensor.from_local(mine, mesh, (Shard(0), Shard(2), Replicate()), shard_sizes={0: batches, 1: sizes})


def rows(ranks: int) -> tuple[int, ...]:
    """HEIGHT rows, the first rank with the fewest."""
    parts = [HEIGHT * 2 * r // (ranks * (ranks + 1)) for r in range(1, ranks)]
    return (*parts, HEIGHT - sum(parts))


# -- training ----------------------------------------------------------------------------------------------------------


def set_up(fabric: L.Fabric, seed: int, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed + fabric.global_rank)  # parallelize makes the weights equal
    with fabric.init_module():
        model = make_network()
    model = fabric.setup(model.to(fabric.device))
    return model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=lr))


def train(
    fabric: L.Fabric,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[list[Tensor]],
    domain: Domain,
) -> list[float]:
    """Returns the mean loss of each step."""
    losses = []
    for now, change in batches:
        loss = F.mse_loss(model(domain.cut(now)), domain.cut(change))
        optimizer.zero_grad()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
        optimizer.step()
        losses.append(fabric.all_reduce(loss.detach().clone(), reduce_op="mean").item())
    return losses


def train_alone(fabric: L.Fabric, args: argparse.Namespace) -> list[float]:
    """The same in plain PyTorch: one process, the batches of all ranks in one, no break in the middle."""
    torch.manual_seed(args.seed)
    with fabric.init_module():
        model = make_network()
    model.to(fabric.device, torch.bfloat16 if args.precision == "bf16-true" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    losses = []
    for batch in DataLoader(make_fields(args.steps * args.batch * args.data_parallel), args.batch * args.data_parallel):
        now, change = (t.to(fabric.device) for t in batch)
        with torch.autocast(fabric.device.type, torch.bfloat16, enabled=args.precision == "bf16-mixed"):
            out = model(now.to(model[0].weight.dtype))
        loss = F.mse_loss(out.to(change.dtype), change)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        losses.append(loss.item())
    return losses


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--accelerator", default="auto", help="cpu, cuda, ...; default: what there is")
    add("--devices", type=int, default=4, help="processes on this machine, unless torchrun has started them")
    add("--data-parallel", type=int, default=2, metavar="N", help="ranks with batches of their own; default: 2")
    add("--three-d", action="store_true", help="cut linear layers over two ranks each, besides (torch 2.13 or newer)")
    add("--precision", choices=tuple(ALLOWED), default="32-true")
    add("--batch", type=int, default=2, help="samples per domain and step")
    add("--steps", type=int, default=10)
    add("--lr", type=float, default=0.01)
    add("--seed", type=int, default=0)
    add("--checkpoint", metavar="FOLDER", help="where to save halfway; default: a folder that is removed again")
    add("--check", action="store_true", help="repeat in one process, and compare the losses")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", args.devices))
    nodes = int(os.environ.get("WORLD_SIZE", devices)) // devices
    domain = Domain(args.three_d)
    strategy = ModelParallelStrategy(
        parallelize_fn=domain.parallelize,
        data_parallel_size=args.data_parallel,
        tensor_parallel_size=devices * nodes // args.data_parallel,
    )
    fabric = L.Fabric(
        accelerator=args.accelerator, devices=devices, num_nodes=nodes, strategy=strategy, precision=args.precision
    )
    fabric.launch()
    if fabric.device.type != "cpu":
        torch.backends.cudnn.allow_tf32 = False  # --check could not tell an error from rounding

    model, optimizer = set_up(fabric, args.seed, args.lr)
    fabric.print(domain.done)
    fields = make_fields(args.steps * args.batch * args.data_parallel)
    batches = iter(fabric.setup_dataloaders(DataLoader(fields, args.batch)))  # one batch per domain
    losses = train(fabric, model, optimizer, islice(batches, args.steps // 2), domain)

    folder = args.checkpoint or fabric.broadcast(tempfile.mkdtemp() if fabric.global_rank == 0 else None)
    path = Path(folder) / "halfway"
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": len(losses)})
    model, optimizer = set_up(fabric, args.seed + 1000, args.lr)
    rest = fabric.load(path, {"model": model, "optimizer": optimizer})
    assert rest == {"step": len(losses)}
    losses += train(fabric, model, optimizer, batches, domain)
    fabric.print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {args.steps} steps, saved and loaded in between")

    passed = True
    if args.check and fabric.global_rank == 0:
        worst = max(abs(a - b) / b for a, b in zip(losses, train_alone(fabric, args), strict=True))
        passed = worst <= ALLOWED[args.precision]
        print(
            f"{'PASS' if passed else 'FAIL'}: largest relative difference of the losses from one process's "
            f"{worst:.1e}, allowed for {args.precision}: {ALLOWED[args.precision]:.0e}"
        )
    fabric.barrier()
    if args.checkpoint is None and fabric.global_rank == 0:
        shutil.rmtree(folder)
    dist.destroy_process_group()
    # torch's gloo threads now and then abort the interpreter's own clean-up, after all work is done.
    sys.stdout.flush()
    os._exit(0 if passed else 1)


if __name__ == "__main__":
    main()
