"""Peak memory of training steps of whole networks: each of two ranks against one process.

    python benchmarks/bench_memory.py [--only NAME] [--json FILE]

Each kind runs in processes of its own: one with the global input, then two with half of it each. The value is the
growth of the larger rank divided by the one process's. Growth is the largest resident set of the process
(``getrusage``) after two steps, less what was resident before the first one, when packages were imported, the process
group started and the network made. It holds everything that the steps leave or pass through: activations, gradients,
buffers of messages, plans, and pages of torch's code that no one had called before.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from networks import NETWORKS, step
from report import Figure, chosen, finish, parser
from timing import on_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from shardtensor import ShardTensor

GROUP = "peak memory of a training step on 2 ranks"
BAR = 0.55
MIB = 2**20


def peak() -> int:
    """Bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident() -> int:
    """Bytes; where the system does not tell, the largest so far."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * resource.getpagesize() if pages.exists() else peak()


def growth(mesh: DeviceMesh, name: str, steps: int) -> float | str:
    """MiB of the rank with the largest growth; the name of a package that is missing."""
    network, ranks = NETWORKS[name], mesh.size()
    torch.manual_seed(0)
    try:
        model = network.make()
    except ImportError as error:
        return str(error.name)
    x = torch.randn(network.shape if ranks == 1 else network.half)
    if ranks > 1 or network.alone:
        sizes = {0: (x.shape[network.dim],) * ranks}
        x = ShardTensor.from_local(x, mesh, (Shard(network.dim),), shard_sizes=sizes)
    dist.barrier()
    before = resident()
    for _ in range(steps):
        step(network, model, x)
    grown = torch.tensor((peak() - before) / MIB)
    dist.all_reduce(grown, op=dist.ReduceOp.MAX)
    return float(grown)


def measure(name: str, steps: int) -> Figure:
    print(f"measuring {name}", file=sys.stderr)
    title = f"{name}: peak beyond start, of one process's"
    one = on_ranks(growth, name, steps, ranks=1, keep_memory=False)
    if isinstance(one, str):
        return Figure(GROUP, title, None, bar=BAR, note=f"{one} is not installed")
    two = on_ranks(growth, name, steps, keep_memory=False)
    note = f"{one:.0f} MiB on one process, {two:.0f} MiB on each of two"
    return Figure(GROUP, title, two / one, bar=BAR, note=note, details={"one MiB": one, "two MiB": two})


def main() -> None:
    made = parser(__doc__)
    options = made.parse_args()
    names = chosen(options.only, NETWORKS, made.error)
    finish([measure(name, 1 if options.quick else 2) for name in names], options)


if __name__ == "__main__":
    main()
