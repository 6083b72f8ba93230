"""Searches for neighbours on two ranks against one process.

    python benchmarks/bench_neighbors.py [--only NAME] [--budget SECONDS] [--quick] [--json FILE]

Points are random in a cube, and each looks for its nearest ones. "two" is ``shardtensor.neighbors`` on two ranks, "one"
the same function on one process with all points, and "tree" SciPy's ``cKDTree(x).query(x, k)`` there, where SciPy is
installed. In the rows named "partitioned" rank 0 has one half of the cube, as :func:`shardtensor.partition` makes it;
in those named "in random order" all points matter to both ranks.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from report import Figure, best_and_median, chosen, finish, parser
from timing import Run, interleaved, on_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from shardtensor import ShardTensor, partition
from shardtensor.neighbors import knn, radius
from shardtensor.testing import count_communication

GROUP = "neighbours, on 2 ranks"
ROWS = {
    f"{name}, {how}": (search, how)
    for name, search in {"16 nearest": lambda x: knn(x, x, 16), "within a distance": None}.items()
    for how in ("partitioned", "in random order")
}


def measured(mesh: DeviceMesh, name: str, n: int, budget: float) -> dict[str, Any]:
    """Times of each kind, and what this rank sends."""
    search, how = ROWS[name]
    if search is None:  # about as many neighbours
        r = (16 / n / (4 / 3 * torch.pi)) ** (1 / 3)

        def search(x: torch.Tensor) -> Any:
            return radius(x, x, r)

    whole = torch.rand(n, 3, generator=torch.Generator().manual_seed(0))
    sizes = (n // 2, n - n // 2)
    if how == "partitioned":
        found = partition(positions=whole, ranks=2)
        whole, sizes = found.nodes(whole), found.sizes
    local = whole.split_with_sizes(list(sizes))[mesh.get_rank()].clone()
    x = ShardTensor.from_local(local, mesh, (Shard(0),), shard_sizes={0: sizes})
    runs: dict[str, Run] = {"two": lambda: search(x), "one": lambda: search(whole)}
    with contextlib.suppress(ImportError):
        from scipy.spatial import cKDTree

        if ROWS[name][0] is not None:
            runs["tree"] = lambda: cKDTree(whole.numpy()).query(whole.numpy(), 16)
    with count_communication() as counted:
        search(x)
    times = interleaved(runs, budget, alone=("one", "tree"))
    return {"times": times, "messages": counted.messages, "points": counted.bytes_received // 20}


def row(name: str, n: int, budget: float) -> Figure:
    found = on_ranks(measured, name, n, budget)
    best = best_and_median(found["times"])
    other = "tree" if "tree" in best["best"] else "one"
    note = f"{n} points; {found['messages']} messages, {found['points']} points of the other rank" + (
        "; by runs of neighbours, as SciPy is not installed" if other == "one" and "nearest" in name else ""
    )
    return Figure(
        GROUP, f"{name}: times as fast as one process", best["best"][other] / best["best"]["two"], **best, note=note
    )


if __name__ == "__main__":
    made = parser(__doc__)
    made.add_argument("--budget", type=float, default=20.0, help="seconds for each row")
    options = made.parse_args()
    n, budget = (5000, 0.5) if options.quick else (200_000, options.budget)
    finish([row(name, n, budget) for name in chosen(options.only, ROWS, made.error)], options)
