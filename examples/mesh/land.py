"""A graph network learns to tell land from sea: from the pixels of a picture to a mesh of the sphere, on it, and back.

python land.py                                   one process
torchrun --nproc-per-node 2 land.py              nodes, pixels and edges on two ranks
torchrun --nproc-per-node 2 land.py --compare    and what one process takes: time, memory, and bytes next to the least
torchrun --nproc-per-node 3 land.py --check      compared with one process, step by step
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from network import OnMesh
from sphere import LEVELS, Graph, nodes_of, rows_read
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))
import earth
import running

Step = Callable[[], float]


def step_on(args: argparse.Namespace, tensors: Sequence[Tensor]) -> tuple[OnMesh, Step]:
    """A fresh network and its training step, ordinary PyTorch; pixels, truth and edges are all plain or all sharded."""
    image, land, *edges = tensors
    torch.manual_seed(args.seed)  # equal weights on all ranks
    dtype = getattr(torch, args.dtype)
    network = OnMesh(nodes_of(args.level), width=args.width, layers=args.layers).to(image.device, dtype)
    optimizer = torch.optim.AdamW(network.parameters(), lr=args.lr)
    image, land = earth.normalise(image, dtype), land.to(dtype)

    def step() -> float:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(network(image, *edges), land)
        loss.backward()
        optimizer.step()
        return loss.item()

    return network, step


@torch.no_grad()
def predict(network: OnMesh, tensors: Sequence[Tensor]) -> Tensor:
    """1 where the network sees land, as bytes, which is all that ever gets gathered."""
    image, _, *edges = tensors
    return (network(earth.normalise(image, next(network.parameters()).dtype), *edges) > 0).to(torch.uint8)


def whole(args: argparse.Namespace, graph: Graph, device: torch.device) -> list[Tensor]:
    """Pixels (n, 3) and whether they are land (n, 1), in the graph's order, and the edges."""
    pixels = [graph.pixels.nodes(tensor[0].flatten(1).T) for tensor in earth.load(args.resolution)]
    edges = [each.edge_index for each in (graph.encode, graph.process, graph.decode)]
    return [tensor.contiguous().to(device) for tensor in (*pixels, *edges)]


def scattered(tensors: Sequence[Tensor | None], graph: Graph, device: torch.device) -> list[Tensor]:
    """Rank 0's tensors, which the others give as None, to all ranks."""
    from torch.distributed.tensor import Shard

    from shardtensor import scatter_tensor

    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    layouts = [(0, graph.pixels.sizes)] * 2 + [(1, e.sizes) for e in (graph.encode, graph.process, graph.decode)]
    return [
        scatter_tensor(tensor, mesh, [Shard(dim)], shard_sizes=sizes) for tensor, (dim, sizes) in zip(tensors, layouts)
    ]


# -- next to one process -----------------------------------------------------------------------------------------------


def least(args: argparse.Namespace, graph: Graph) -> int:
    """Bytes that a step has to send at least between all ranks: what each layer reads of others, and its gradient."""
    features = {"encode": args.width // 2, "process": args.width * args.layers, "decode": args.width}
    total = 0
    for name, width in features.items():
        sources = graph.pixels if name == "encode" else graph.nodes
        read = (len(rows_read(getattr(graph, name), sources, rank)) for rank in range(args.world_size))
        total += 2 * sum(read) * width * getattr(torch, args.dtype).itemsize
    return total


def compare(args: argparse.Namespace, graph: Graph, all_of_it: list[Tensor] | None, mine: list[Tensor]) -> None:
    """Print how two runs of the same steps differ: this one, and rank 0's alone on the whole graph."""
    sharded, plain = step_on(args, mine)[1], None
    losses = [sharded()]
    if all_of_it is not None:
        plain = step_on(args, all_of_it)[1]
        losses.append(plain())
    running.wait_for_all()
    with running.counting() as counted:
        sharded()
    sent = sum(running.of_all_ranks(counted.bytes_sent))
    memory = max(running.of_all_ranks(running.most_at_once(sharded, mine[0].device)))
    if plain is not None:
        alone = running.most_at_once(plain, mine[0].device)
        print(f"first loss: {losses[0]:.9f}, in one process {losses[1]:.9f}")
        print(f"tensors: {memory:.3f} GiB on the largest rank, {memory / alone:.2f} of one process's {alone:.3f} GiB")
        few = least(args, graph)
        print(f"sent: {sent / 1e3:.1f} kB per step, {sent / few:.2f} of the least, {few / 1e3:.1f} kB;", end=" ")
        print(f"and {counted.collective_bytes / 1e3:.1f} kB of gradients of weights to sum")
    running.compare_times(args, sharded, plain)


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--level", type=int, default=7, help="the mesh has 10 * 4**level + 2 nodes")
    add("--resolution", type=int, default=400, metavar="H", help="rows of the picture, of twice as many pixels")
    add("--steps", type=int, help="default: 60, 5 with --check")
    add("--lr", type=float, default=0.02)
    add("--width", type=int, default=16, help="features of a node; even")
    add("--layers", type=int, default=4, help="on the mesh")
    add("--dtype", choices=running.TOLERANCE, default="float32")
    add("--seed", type=int, default=0)
    add("--device", help="cpu, cuda, ...; default: the accelerator if there is one, else cpu")
    add("--output", default="mesh.png", help="where the picture goes")
    add("--check", action="store_true", help="no picture; repeat the steps in one process and compare")
    add("--compare", action="store_true", help="also what a step takes in one process")
    args = parser.parse_args(given)
    if args.steps is None:
        args.steps = 5 if args.check else 60
    running.add_world(args)
    try:
        if not 0 <= args.level <= LEVELS or not 1 <= args.resolution <= earth.FULL_HEIGHT:
            raise ValueError(f"--level must be from 0 to {LEVELS} and --resolution from 1 to {earth.FULL_HEIGHT}")
        if min(args.steps, args.layers) < 1 or args.width < 2 or args.width % 2:
            raise ValueError("--steps and --layers must be positive and --width even")
        if (args.check or args.compare) and not args.sharded:
            raise ValueError("--check and --compare compare with a sharded run: start it with torchrun")
    except ValueError as error:
        running.refuse(args, error)
    return args


def main() -> None:
    args = parse_arguments()
    device, first = running.start(args, minutes=600 if args.check else 10), args.rank == 0
    graph = Graph.of(args.level, args.resolution, args.world_size)  # from positions alone, on every rank
    all_of_it = whole(args, graph, device) if first else None
    if first:
        print(f"{sum(graph.nodes.sizes)} nodes, {sum(graph.pixels.sizes)} pixels, ", end="")
        print(f"edges {sum(graph.encode.sizes)} + {sum(graph.process.sizes)} + {sum(graph.decode.sizes)}")
        print(graph.nodes)
    mine = scattered(all_of_it or [None] * 5, graph, device) if args.sharded else all_of_it

    network, step = step_on(args, mine)
    history = running.repeat(step, args.steps, "training", quiet=not first, count=False)
    if first:
        print(f"loss {history.losses[0]:.4f} -> {history.losses[-1]:.4f}, {history.step_time:.2f} s per step")

    passed = True
    if args.compare:
        compare(args, graph, all_of_it, mine)
    if args.check:
        if first:
            plain = running.repeat(step_on(args, all_of_it)[1], args.steps, "one process", quiet=False, count=False)
            passed = running.same_losses(history.losses, plain.losses, args.dtype)
        dist.barrier()
    else:
        prediction = predict(network, mine)
        if args.sharded:
            prediction = prediction.full_tensor()
        if first:
            import view

            found, land = (graph.pixels.back(tensor) for tensor in (prediction, all_of_it[1]))
            accuracy = view.draw(args.output, graph, land, found, args.resolution)
            print(f"{accuracy:.2%} of the pixels are right ({1 - land.double().mean():.2%} are sea); see {args.output}")
    running.leave(args, passed)


if __name__ == "__main__":
    main()
