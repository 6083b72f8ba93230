"""Peak memory of training steps of whole networks: each of two ranks against one process.

    python benchmarks/bench_memory.py [--only NAME] [--json FILE]

Each kind runs in processes of its own: "one" with the global input, "half" with half of it on one process, then two
with half of it each. The first value is the growth of the larger rank divided by the one process's. Growth is the
largest resident set of the process (``getrusage``) after two steps, less what was resident before the first one, when
packages were imported, the process group started and the network made. It holds everything that the steps leave or pass
through: activations, gradients, buffers of messages, plans, pages of torch's code that no one had called before, and
what the C library's heap keeps of freed memory. Half the input alone is the limit of what two ranks can reach.

The second value has tensors only: the most bytes that torch's allocator has given out at once in a step, of one rank on
a fake process group. It is the same in every run, and what a device's memory would hold.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch._dynamo  # torch imports it with the first shape that it infers by its references in Python, some 40 MiB
import torch.distributed as dist
from networks import NETWORKS, Network, step
from report import Figure, chosen, finish, parser
from timing import Run, on_rank_of_fake, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.profiler import ProfilerActivity, profile

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


def growth(mesh: DeviceMesh, name: str, kind: str, steps: int) -> float | str:
    """MiB of the rank with the largest growth; the name of a package that is missing."""
    network = NETWORKS[name]
    torch.manual_seed(0)
    try:
        model = network.make()
    except ImportError as error:
        return str(error.name)
    x = torch.randn(network.shape if kind == "one" else network.half)
    if mesh.size() > 1 or network.alone:
        x = sharded(network, x, mesh)
    dist.barrier()
    before = resident()
    for _ in range(steps):
        step(network, model, x)
    grown = torch.tensor((peak() - before) / MIB)
    dist.all_reduce(grown, op=dist.ReduceOp.MAX)
    return float(grown)


def sharded(network: Network, local: Tensor, mesh: DeviceMesh) -> ShardTensor:
    """A tensor of which every rank of the mesh holds as much as ``local``."""
    sizes = {0: (local.shape[network.dim],) * mesh.size()}
    return ShardTensor.from_local(local, mesh, (Shard(network.dim),), shard_sizes=sizes)


def tensors(mesh: DeviceMesh, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """The largest number of MiB of tensors at a time, of each kind of step."""
    found: dict[str, dict[str, float]] = {}
    me = init_device_mesh(mesh.device_type, (mesh.size(), 1), mesh_dim_names=("apart", "me"))["me"]
    for name in names:
        network = NETWORKS[name]
        try:
            model = network.make()
        except ImportError:
            continue
        one, half = torch.randn(network.shape), torch.randn(network.half)
        alone = [sharded(network, t, me) if network.alone else t for t in (one, half)]
        kinds = dict(zip(("one", "half"), alone, strict=True)) | {"two": sharded(network, half, mesh)}
        found[name] = {kind: most_of_step(network, model, x) for kind, x in kinds.items()}
    return found


def most_of_step(network: Network, model: nn.Module, x: Tensor) -> float:
    step(network, model, x)
    model.zero_grad()
    return most_at_once(lambda: step(network, model, x))


def most_at_once(run: Run) -> float:
    """The largest number of MiB of tensors at a time that ``run`` makes."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most / MIB


def measure(name: str, steps: int) -> Figure:
    print(f"measuring {name}", file=sys.stderr)
    title = f"{name}: peak beyond start, of one process's"
    grown = {}
    for kind, ranks in (("one", 1), ("half", 1), ("two", 2)):
        found = on_ranks(growth, name, kind, steps, ranks=ranks, keep_memory=False)
        if isinstance(found, str):
            return Figure(GROUP, title, None, bar=BAR, note=f"{found} is not installed")
        grown[kind] = found
    note = f"{listed(grown)}; half alone {grown['half'] / grown['one']:.2f}x"
    return Figure(GROUP, title, grown["two"] / grown["one"], bar=BAR, note=note, details=in_mib(grown))


def of_tensors(name: str, most: dict[str, float]) -> Figure:
    title, note = f"{name}: tensors, of one process's", f"{listed(most)}; half alone {most['half'] / most['one']:.2f}x"
    return Figure(GROUP, title, most["two"] / most["one"], bar=BAR, note=note, details=in_mib(most))


def listed(found: dict[str, float]) -> str:
    return f"one {found['one']:.0f} MiB, each of two {found['two']:.0f} MiB"


def in_mib(found: dict[str, float]) -> dict[str, float]:
    return {f"{kind} MiB": value for kind, value in found.items()}


def main() -> None:
    made = parser(__doc__)
    options = made.parse_args()
    names = chosen(options.only, NETWORKS, made.error)
    most, figures = on_rank_of_fake(tensors, names), []
    for name in names:
        figures.append(measure(name, 1 if options.quick else 2))
        if name in most:
            figures.append(of_tensors(name, most[name]))
    finish(figures, options)


if __name__ == "__main__":
    main()
