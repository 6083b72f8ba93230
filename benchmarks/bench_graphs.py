"""Graph networks whose nodes and edges are sharded: what ranks send, and two ranks next to one process.

    python benchmarks/bench_graphs.py [--only NAME] [--json FILE]

Bytes are those of one layer of message passing with 32 features, from the second step on, when it is known which rows
an index reads: sent by all ranks, divided by the least, which is each row once that another rank reads or adds to. Of a
grid of 200 x 200 nodes in row order each rank has the edges that end at its nodes; of random ones an even part. Growth
is that of a grid which has 8 rows of 64 nodes for each rank, of 4 to 1,024 ranks that are simulated one at a time: the
bytes that an inner rank receives in the forward pass and sends in the backward pass, by those on 4 ranks. A step
of a network like MeshGraphNet (an encoder, two layers that update edges and nodes with residuals, a decoder) is one of
training, on a mesh of triangles with 160,000 nodes and 956,802 edges; its memory is the most bytes of tensors at a
time, on the larger rank. Where anemoi-models is installed, a step of a block of its graph transformer, on a grid of 100
x 100 nodes with diagonals, is compared with the same block in one process, and with anemoi's own sharding of it, which
sends all queries, keys, values and edges to the ranks of their heads. Where PhysicsNeMo is, so is the MeshGraphNet
on its halo scatter, which keeps copies of other ranks' nodes, and sends sums at them to their owners and back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from bench_memory import most_at_once
from peers import INSIDE, anemoi_block, physicsnemo_halo
from report import Figure, best_and_median, chosen, finish, parser
from timing import Run, interleaved, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from shardtensor import ShardTensor
from shardtensor.testing import count_communication, simulate_ranks

GROUP = "graphs, nodes and edges sharded"
BAR_BYTES, BAR_TIME, BAR_MEMORY = 1.2, 0.62, 0.55
SIDE, FEATURES = 200, 32
ROWS, COLUMNS, GROWTH = 8, 64, (2, 4, 32, 256, 1024)
MESH_SIDE, HIDDEN, LAYERS = 400, 32, 2
NETWORK = "MeshGraphNet, 160,000 nodes"
PHYSICSNEMO = "MeshGraphNet, 160,000 nodes, next to PhysicsNeMo"
ANEMOI, ANEMOI_SIDE = "anemoi's graph transformer, 10,000 nodes", 100


# -- graphs ------------------------------------------------------------------------------------------------------------


def grid(side: int, diagonals: bool = False, rows: int | None = None) -> Tensor:
    """Source and target of the edges between neighbours, both ways, in the order of their targets."""
    node = torch.arange((rows or side) * side).view(-1, side)
    pairs = [(node[:, :-1], node[:, 1:]), (node[:-1], node[1:])]
    if diagonals:
        pairs.append((node[:-1, :-1], node[1:, 1:]))
    edges = torch.cat([torch.stack([a.reshape(-1), b.reshape(-1)]) for a, b in pairs], 1)
    edges = torch.cat([edges, edges.flip(0)], 1)
    return edges[:, edges[1].argsort(stable=True)]


def at_nodes(edges: Tensor, nodes: int, ranks: int) -> list[int]:
    """How many edges end at each rank's nodes, of which all have as many."""
    return (edges[1] * ranks // nodes).bincount(minlength=ranks).tolist()


def part(values: Tensor, dim: int, sizes: list[int], mesh: DeviceMesh) -> ShardTensor:
    """A ShardTensor of values that every rank has."""
    local = values.split(sizes, dim)[dist.get_rank()].contiguous()
    return ShardTensor.from_local(local, mesh, (Shard(dim),), shard_sizes={0: sizes})


# -- bytes -------------------------------------------------------------------------------------------------------------


def message_passing(linear: nn.Module, x: Tensor, edges: Tensor) -> Tensor:
    source, target = edges[0], edges[1]
    return torch.zeros_like(x).index_add(0, target, linear(torch.cat([x[source], x[target]], -1)))


def least(edges: Tensor, nodes: int, sizes: list[int]) -> tuple[int, int]:
    """How many rows have to travel, forward and backward."""
    ranks = len(sizes)
    sources, targets = (
        sum(int((ends.unique() * ranks // nodes != rank).sum()) for rank, ends in enumerate(row.split(sizes)))
        for row in edges
    )
    # Rows of sources and of targets, and contributions to targets; backward the adjoint of each.
    return sources + 2 * targets, sources + 2 * targets


def sent(mesh: DeviceMesh, random: bool) -> dict[str, float]:
    """The bytes that all ranks send in the third step, forward and backward, and the least that they could send."""
    ranks, nodes = mesh.size(), SIDE * SIDE
    edges = grid(SIDE)
    torch.manual_seed(0)
    if random:
        edges = torch.randint(nodes, edges.shape)
    count = edges.shape[1]
    even = [count // ranks + (rank < count % ranks) for rank in range(ranks)]
    sizes = even if random else at_nodes(edges, nodes, ranks)
    linear = nn.Linear(2 * FEATURES, FEATURES)
    x = part(torch.randn(nodes, FEATURES), 0, [nodes // ranks] * ranks, mesh).requires_grad_()
    index = part(edges, 1, sizes, mesh)
    for _ in range(3):
        with count_communication() as forward:
            y = message_passing(linear, x, index)
        with count_communication() as backward:
            y.square().sum().backward()
    bytes_sent = torch.tensor([forward.bytes_sent, backward.bytes_sent], dtype=torch.float64)
    dist.all_reduce(bytes_sent)
    rows = [n * FEATURES * 4 for n in least(edges, nodes, sizes)]
    return dict(zip(("forward", "backward", "least forward", "least backward"), [*bytes_sent.tolist(), *rows]))


def of_bytes(ranks: int, random: bool) -> list[Figure]:
    found = on_ranks(sent, random, ranks=ranks)
    figures = []
    for way in ("forward", "backward"):
        name = f"{'random edges' if random else 'grid'}, {ranks} ranks, {way}: bytes of the least"
        note = f"{found[way] / 1e3:.1f} kB"
        figures.append(Figure(GROUP, name, found[way] / found[f"least {way}"], bar=BAR_BYTES, note=note))
    return figures


# -- growth ------------------------------------------------------------------------------------------------------------


def strip(rank: int, ranks: int) -> Tensor:
    """The edges that end at one rank's rows of a grid, in the order of their targets."""
    row, column = torch.meshgrid(torch.arange(ROWS) + rank * ROWS, torch.arange(COLUMNS), indexing="ij")
    found = []
    for down, right in ((-1, 0), (0, -1), (0, 1), (1, 0)):
        i, j = row + down, column + right
        there = (i >= 0) & (i < ROWS * ranks) & (j >= 0) & (j < COLUMNS)
        found.append(torch.stack([(i * COLUMNS + j)[there], (row * COLUMNS + column)[there]]))
    edges = torch.cat(found, 1)
    return edges[:, edges[1].argsort(stable=True)]


def of_inner_rank() -> tuple[int, int]:
    """Bytes that this rank receives in the third forward pass, and sends in the backward pass after it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (ranks,))
    inner = 2 * ((COLUMNS - 1) * ROWS + COLUMNS * ROWS)
    sizes = [inner - COLUMNS * ((r == 0) + (r == ranks - 1)) for r in range(ranks)]
    edges = ShardTensor.from_local(strip(rank, ranks), mesh, (Shard(1),), shard_sizes={0: sizes})
    nodes = [ROWS * COLUMNS] * ranks
    x = ShardTensor.from_local(torch.randn(nodes[0], FEATURES), mesh, (Shard(0),), shard_sizes={0: nodes})
    x.requires_grad_()
    linear = nn.Linear(2 * FEATURES, FEATURES)
    for _ in range(3):
        with count_communication() as forward:
            y = message_passing(linear, x, edges)
        with count_communication() as backward:
            y.square().sum().backward()
    return forward.bytes_received, backward.bytes_sent


def of_growth() -> list[Figure]:
    found = {ranks: simulate_ranks(of_inner_rank, ranks, only=[ranks // 2])[0] for ranks in GROWTH}
    base = sum(found[4])
    return [
        Figure(
            GROUP,
            f"grid, {ranks} simulated ranks: an inner rank's bytes of those on 4",
            sum(both) / base,
            bar=1.0,
            note=f"{both[0] / 1e3:.1f} kB forward, {both[1] / 1e3:.1f} kB backward",
        )
        for ranks, both in found.items()
    ]


# -- a network ---------------------------------------------------------------------------------------------------------


def mlp(features: int, out: int = HIDDEN) -> nn.Module:
    return nn.Sequential(nn.Linear(features, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, out))


class MeshGraphNet(nn.Module):
    """Of nodes and edges with 3 features each."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes, self.edges, self.decoder = mlp(3), mlp(3), mlp(HIDDEN, 3)
        self.of_edges = nn.ModuleList(mlp(3 * HIDDEN) for _ in range(LAYERS))
        self.of_nodes = nn.ModuleList(mlp(2 * HIDDEN) for _ in range(LAYERS))

    def forward(
        self, x: Tensor, features: Tensor, edges: Tensor, corrected: Callable[[Tensor], Tensor] = lambda total: total
    ) -> Tensor:
        source, target = edges[0], edges[1]
        x, e = self.nodes(x), self.edges(features)
        for of_edges, of_nodes in zip(self.of_edges, self.of_nodes):
            e = e + of_edges(torch.cat([x[source], x[target], e], -1))
            total = torch.zeros_like(x).index_add(0, target, e)
            x = x + of_nodes(torch.cat([x, corrected(total)], -1))
        return self.decoder(x)


def training_step(mesh: DeviceMesh | None) -> Run:
    """A step on two ranks, or of this process alone."""
    torch.manual_seed(0)
    edges, nodes = grid(MESH_SIDE, diagonals=True), MESH_SIDE * MESH_SIDE
    inputs = [torch.randn(nodes, 3), torch.randn(edges.shape[1], 3), edges]
    if mesh is not None:
        sizes = at_nodes(edges, nodes, mesh.size())
        shards = ((0, [nodes // mesh.size()] * mesh.size()), (0, sizes), (1, sizes))
        inputs = [part(t, dim, n, mesh) for t, (dim, n) in zip(inputs, shards)]
    network = MeshGraphNet()

    def step() -> None:
        network.zero_grad()
        network(*inputs).square().mean().backward()

    return step


def compared(mesh: DeviceMesh, budget: float) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each kind, and the most MiB of tensors at a time."""
    two, one = training_step(mesh), training_step(None)
    times = interleaved({"two": two, "one": one}, budget, least=3, most=5, alone=("one",))
    memory = torch.tensor([most_at_once(two), 0.0])
    dist.all_reduce(memory, op=dist.ReduceOp.MAX)
    alone = most_at_once(one) if dist.get_rank() == 0 else 0.0
    return times, {"two": float(memory[0]), "one": alone}


def of_network(quick: bool) -> list[Figure]:
    times, memory = on_ranks(compared, 1.0 if quick else 25.0)
    both = best_and_median(times)
    faster, smaller = both["best"]["two"] / both["best"]["one"], memory["two"] / memory["one"]
    note = f"one {memory['one']:.0f} MiB, each of two {memory['two']:.0f} MiB"
    return [
        Figure(GROUP, f"{NETWORK}: two ranks' time of one process's", faster, bar=BAR_TIME, **both),
        Figure(GROUP, f"{NETWORK}: tensors, of one process's", smaller, bar=BAR_MEMORY, note=note),
    ]


# -- other packages' sharding ------------------------------------------------------------------------------------------


def blocks(mesh: DeviceMesh) -> dict[str, Run]:
    """A step of one block: of ShardTensors, as anemoi shards it, and of this process alone."""
    nodes, edges, group = ANEMOI_SIDE**2, grid(ANEMOI_SIDE, diagonals=True), mesh.get_group()
    torch.manual_seed(0)
    block, x, features = anemoi_block(HIDDEN, 3, 2), torch.randn(nodes, HIDDEN), torch.randn(edges.shape[1], 3)
    of_nodes, of_edges = [nodes // mesh.size()] * mesh.size(), at_nodes(edges, nodes, mesh.size())
    ours = [part(t, d, n, mesh) for t, d, n in ((x, 0, of_nodes), (features, 0, of_edges), (edges, 1, of_edges))]
    theirs = [t.split(n)[dist.get_rank()].clone() for t, n in ((x, of_nodes), (features, of_edges))]
    alone = [x, features]
    for t in (*ours[:2], *theirs, *alone):
        t.requires_grad_()
    shapes = [[[n, 1] for n in sizes] for sizes in (of_nodes, of_nodes, of_edges)]

    def step(tensors: list[Any], shapes: Any = (None,) * 3, group: Any = None) -> Tensor:
        block.zero_grad()
        loss: Tensor = block(*tensors, shapes, 1, nodes, group)[0].square().sum()
        loss.backward()
        return loss

    return {
        "two": lambda: step(ours),
        "theirs": lambda: step([*theirs, edges], shapes, group),
        "one": lambda: step([*alone, edges]),
    }


def borrowed(mesh: DeviceMesh) -> dict[str, Run]:
    """A step of the MeshGraphNet: of ShardTensors, on PhysicsNeMo's halo scatter, and of this process alone."""
    nodes, ranks, rank = MESH_SIDE**2, mesh.size(), mesh.get_local_rank()
    torch.manual_seed(0)
    edges, own = grid(MESH_SIDE, diagonals=True), nodes // ranks
    network, alone = MeshGraphNet(), [torch.randn(nodes, 3), torch.randn(edges.shape[1], 3), edges]
    sizes = at_nodes(edges, nodes, ranks)
    ours = [part(t, dim, n, mesh) for t, dim, n in zip(alone, (0, 0, 1), ([own] * ranks, sizes, sizes))]
    # Which nodes of others each rank's edges come from, by their owners.
    needs = [sources[sources // own != r].unique() for r, sources in enumerate(edges[0].split(sizes))]
    counts = [[int((need // own == owner).sum()) for need in needs] for owner in range(ranks)]
    lent = [need[need // own == rank] - rank * own for need in needs]
    corrected = physicsnemo_halo(lent, counts, own, mesh)
    source, target = edges.split(sizes, 1)[rank]
    borrowed = torch.searchsorted(needs[rank], source) + own
    rows = torch.stack([torch.where(source // own == rank, source - rank * own, borrowed), target - rank * own])
    x = torch.cat([alone[0][rank * own : (rank + 1) * own], alone[0][needs[rank]]])
    theirs = [x, alone[1].split(sizes)[rank], rows, corrected]

    def step(inputs: list[Any]) -> Tensor:
        network.zero_grad()
        # A copy's result is its owner's.
        loss: Tensor = network(*inputs)[: nodes if inputs is not theirs else own].square().sum() / nodes
        loss.backward()
        if inputs is theirs:  # in one message
            gradients = [p.grad for p in network.parameters()]
            dist.all_reduce(together := torch.cat([g.flatten() for g in gradients]))
            for gradient, total in zip(gradients, together.split([g.numel() for g in gradients])):
                gradient.copy_(total.view_as(gradient))
        return loss

    return {"two": lambda: step(ours), "theirs": lambda: step(theirs), "one": lambda: step(alone)}


def compared_with(
    mesh: DeviceMesh, budget: float, steps_of: Callable[[DeviceMesh], dict[str, Run]]
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of each kind, and the bytes that all ranks send in a step: nothing where the package is missing."""
    try:
        steps = steps_of(mesh)
    except ImportError:
        return {}, {}
    # A sum over one rank's nodes is that rank's loss.
    losses = torch.stack([steps["two"]().full_tensor(), steps["theirs"](), steps["one"]()]).detach()
    dist.all_reduce(total := losses[1].clone())
    torch.testing.assert_close(torch.stack([losses[0], total]), losses[2].expand(2), rtol=1e-4, atol=0.0)
    sent = []
    for kind in ("two", "theirs"):
        before = INSIDE.bytes_sent
        with count_communication() as counted:
            steps[kind]()
        sent.append(float(counted.bytes_sent + counted.collective_bytes + INSIDE.bytes_sent - before))
    dist.all_reduce(both := torch.tensor(sent, dtype=torch.float64))
    return interleaved(steps, budget, least=3, most=9, alone=("one",)), dict(zip(("two", "theirs"), both.tolist()))


def of_peer(
    name: str, way: str, package: str, steps_of: Callable[[DeviceMesh], dict[str, Run]], quick: bool
) -> list[Figure]:
    times, sent = on_ranks(compared_with, 1.0 if quick else 15.0, steps_of)
    names = [f"{name}: {what}" for what in (f"time of {way}", "bytes of it", "time of one process's")]
    if not times:
        return [Figure(GROUP, name, None, bar=bar, note="not installed") for name, bar in zip(names, (1.0, 1.0, None))]
    times[package] = times.pop("theirs")
    both, note = best_and_median(times), f"{sent['two'] / 1e3:.0f} kB, {package} {sent['theirs'] / 1e3:.0f} kB"
    best = both["best"]
    return [
        Figure(GROUP, names[0], best["two"] / best[package], bar=1.0, **both),
        Figure(GROUP, names[1], sent["two"] / sent["theirs"], bar=1.0, note=note),
        Figure(GROUP, names[2], best["two"] / best["one"], **both),
    ]


def main() -> None:
    made = parser(__doc__)
    options = made.parse_args()
    rows: dict[str, Callable[[], list[Figure]]] = {
        f"{'random edges' if random else 'grid'}, {ranks} ranks": partial(of_bytes, ranks, random)
        for random in (False, True)
        for ranks in (2, 4, 8)
    }
    rows["grid, simulated ranks"] = of_growth
    rows[NETWORK] = partial(of_network, options.quick)
    rows[ANEMOI] = partial(of_peer, ANEMOI, "anemoi's own sharding", "anemoi", blocks, options.quick)
    rows[PHYSICSNEMO] = partial(of_peer, PHYSICSNEMO, "its halo scatter", "PhysicsNeMo", borrowed, options.quick)
    figures: list[Any] = []
    for name in chosen(options.only, rows, made.error):
        print(f"measuring {name}", file=sys.stderr)
        figures += rows[name]()
    finish(figures, options)


if __name__ == "__main__":
    main()
