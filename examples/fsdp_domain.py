"""FSDP2 and domain parallelism at once: land and sea on the globe, on a mesh of dp x domain ranks.

Ranks along `dp` train on regions of their own; along `domain` each region is cut into bands of latitude of different
heights. FSDP2 shards the weights. The network is that of examples/globe and knows nothing of either. The globe comes
with `pip install '.[examples]'`.

torchrun --nproc-per-node 4 examples/fsdp_domain.py                      2 x 2 ranks
torchrun --nproc-per-node 4 examples/fsdp_domain.py --check              compared with one process on the whole batch
torchrun --nproc-per-node 8 examples/fsdp_domain.py --mesh 2x4 --spmd    weights sharded over all, one reduction
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from shardtensor import parallel, scatter_tensor
from shardtensor.parallel import parallelize

sys.path.insert(0, str(Path(__file__).parent / "globe"))
sys.path.insert(0, str(Path(__file__).parent / "common"))
from layout import make_layout
from model import ConvNormAct, UNet

REGIONS = 8  # stripes of longitude; the batch


def load(resolution: int, dtype: torch.dtype, noise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The globe as a batch of regions: images (REGIONS, 3, H, W) and land (REGIONS, 1, H, W)."""
    if noise:
        generator = torch.Generator().manual_seed(0)
        image = torch.randint(256, (1, 3, resolution, 2 * resolution), dtype=torch.uint8, generator=generator)
        land = (image[:, :1] > 127).to(torch.uint8)
    else:
        try:
            import earth

            image, land = earth.load(resolution)
        except ModuleNotFoundError as error:
            raise SystemExit(f"{error}: the globe comes with pip install '.[examples]'; or use --noise") from None
    width = image.shape[-1] // REGIONS * REGIONS

    def regions(t: torch.Tensor) -> torch.Tensor:
        return torch.cat(t[..., :width].chunk(REGIONS, dim=-1)).contiguous()

    return regions(image).to(dtype) / 64 - 1, regions(land).to(dtype)


def make_model(args: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    torch.manual_seed(args.seed)
    return UNet(width=args.width).to(device, getattr(torch, args.dtype))


def train(model: torch.nn.Module, images: torch.Tensor, land: torch.Tensor, args: argparse.Namespace) -> list[float]:
    """Ordinary PyTorch, whatever the tensors are. Returns the loss before each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    losses = []
    for _ in range(args.steps):
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(images), land)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def scatter(batch: torch.Tensor | None, mesh: dist.DeviceMesh, args: argparse.Namespace) -> torch.Tensor:
    """The first rank of each domain sends every other one its part of the domain's batch; it alone has read it.

    With --spmd rank 0 sends all: the batch is cut over `dp` as well.
    """
    rows = make_layout({"rows": args.resolution}, mesh["domain"].size(), None, [args.rank_sizes]).sizes["rows"]
    if args.spmd:
        return scatter_tensor(batch, mesh, (Shard(0), Shard(2)), shard_sizes={1: rows})
    return scatter_tensor(batch, mesh["domain"], (Shard(2),), shard_sizes=rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--mesh", default="2x2", metavar="AxB", help="dp x domain")
    add("--spmd", action="store_true", help="DTensor weights, sharded over all ranks (torch 2.13 or newer)")
    add("--resolution", type=int, default=180, metavar="H", help="rows of the whole globe")
    add("--rank-sizes", metavar="A+B", help="rows per band, north to south; default: even")
    add("--noise", action="store_true", help="random pixels in place of the globe, which needs packages with its data")
    add("--steps", type=int, default=20)
    add("--lr", type=float, default=0.01)
    add("--width", type=int, default=8, help="channels at full size; a multiple of 4")
    add("--dtype", choices=("float32", "float64"), default="float32")
    add("--seed", type=int, default=0)
    add("--check", action="store_true", help="repeat in one process, and compare the losses")
    args = parser.parse_args()
    if REGIONS % int(args.mesh.split("x")[0]):
        parser.error(f"--mesh {args.mesh}: the {REGIONS} regions cannot be shared equally along dp")
    return args


def main() -> None:
    args = parse_arguments()
    device = parallel.device()
    if device.type != "cpu":
        torch.backends.cudnn.allow_tf32 = False  # --check could not tell an error from rounding
    dist.init_process_group(dist.get_default_backend_for_device(device))
    shape = tuple(map(int, args.mesh.split("x")))
    mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("dp", "domain"))
    first = dist.get_rank() == 0

    model = make_model(args, device)
    done = parallelize(model, mesh, units=[ConvNormAct], spmd=args.spmd, fsdp=("dp", "domain") if args.spmd else None)
    held, total = (sum(p.numel() for p in ps) for ps in (map(local, model.parameters()), model.parameters()))
    if first:
        print(f"{done}\nrank 0 holds {held} of {total} weights")

    images = land = None
    if first or (mesh["domain"].get_local_rank() == 0 and not args.spmd):
        images, land = (t.to(device) for t in load(args.resolution, getattr(torch, args.dtype), args.noise))
    whole = images, land
    if not args.spmd and images is not None:
        mine = mesh["dp"].get_local_rank()
        images, land = (t.chunk(shape[0])[mine] for t in (images, land))
    losses = torch.tensor(train(model, *(scatter(t, mesh, args) for t in (images, land)), args), dtype=torch.float64)
    losses = losses.to(device)
    if not args.spmd:  # each domain has the mean over its own regions
        dist.all_reduce(losses, group=mesh["dp"].get_group())
        losses /= shape[0]
    if first:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {args.steps} steps")

    passed = True
    if args.check:
        if first:
            alone = torch.tensor(train(make_model(args, device), *whole, args), dtype=torch.float64, device=device)
            worst = ((losses - alone).abs() / alone).max().item()
            allowed = {"float32": 1e-4, "float64": 1e-9}[args.dtype]
            passed = worst <= allowed
            print(
                f"{'PASS' if passed else 'FAIL'}: largest relative difference of the losses from one process's "
                f"{worst:.1e}, allowed for {args.dtype}: {allowed:.0e}"
            )
        dist.barrier()
    dist.destroy_process_group()
    # torch's gloo threads now and then abort the interpreter's own clean-up, after all work is done.
    sys.stdout.flush()
    os._exit(0 if passed else 1)


def local(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if hasattr(weight, "to_local") else weight


if __name__ == "__main__":
    main()
