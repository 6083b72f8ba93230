"""The networks of torch_geometric: convolutions on graphs, pools, norms, and a network for meshes made of these.

A graph's edges are sharded, its nodes, or both, each with their own sizes. torch_geometric's compiled extensions are
not needed.
"""

from __future__ import annotations

import copy
import functools
import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import networks.oracle as oracle
from networks.oracle import assert_near, built, names, whole
from shardtensor import ShardTensor, UnsupportedSharding, partition
from shardtensor.neighbors import knn
from shardtensor.parallel import DomainParallel
from shardtensor.testing import count_communication, run_distributed, run_expecting_errors, shard, shared_mesh

PACKAGE = "torch_geometric.nn"
pytest.importorskip(PACKAGE)

NODES, EDGES, GRAPHS = 12, 29, 3
SIZES = {2: {"edge": (17, 12), "node": (5, 7)}, 3: {"edge": (16, 0, 13), "node": (0, 8, 4)}}
CUTS = {"edges": ("edge",), "nodes": ("node",), "both": ("edge", "node")}


@dataclass(frozen=True)
class Network:
    """A small one of its kind.

    Attributes:
        make: the network, from the module :data:`PACKAGE`.
        takes: the inputs, by their names in :func:`inputs`.
        call: the network's result for these, a tensor or several of which the first one counts.
        norms_train: as in the oracle.
        half: run in bfloat16, too.
    """

    make: Callable[[Any], nn.Module]
    takes: tuple[str, ...] = ("x", "edge_index")
    call: Callable[..., Any] = field(default=lambda network, *inputs: network(*inputs))
    norms_train: bool = False
    half: bool = False


def inputs() -> dict[str, tuple[Tensor, str, int]]:
    """Of a graph: tensors, what they belong to, and the dim that this is. Node 3 has no edges, two edges are loops."""
    edge_index = torch.randint(0, NODES - 1, (2, EDGES))
    edge_index += edge_index >= 3
    edge_index[:, :2] = torch.tensor([[0, 7], [0, 7]])
    normal = functools.partial(torch.randn, dtype=torch.float64)
    return {
        "x": (normal(NODES, 4), "node", 0),
        "pos": (normal(NODES, 3), "node", 0),
        "batch": (torch.arange(NODES) * GRAPHS // NODES, "node", 0),
        "edge_index": (edge_index, "edge", 1),
        "sorted_index": (edge_index[:, edge_index[1].argsort()], "edge", 1),
        "edge_weight": (normal(EDGES).exp(), "edge", 0),
        "edge_attr": (normal(EDGES, 3), "edge", 0),
        "edge_type": (torch.arange(EDGES) % 2, "edge", 0),
    }


def previewed(network: Network) -> oracle.Network:
    """For a count of what two ranks share: nodes on a ring have edges from the four next ones; both are sharded."""

    def call(model: nn.Module, x: Tensor) -> Any:
        n = len(x)
        targets = torch.arange(n)[:, None].expand(n, 4)
        edge_index = torch.stack([(targets + torch.tensor([-2, -1, 1, 2])).remainder(n).flatten(), targets.flatten()])
        edges = edge_index[0].double()
        graph = {
            "pos": (torch.ones(n, 3, dtype=x.dtype), "node", 0),
            "batch": (torch.arange(n) * GRAPHS // n, "node", 0),
            "edge_index": (edge_index, "edge", 1),
            "sorted_index": (edge_index, "edge", 1),
            "edge_weight": (edges.sin().exp(), "edge", 0),
            "edge_attr": (edges[:, None].expand(-1, 3).contiguous(), "edge", 0),
            "edge_type": (torch.arange(len(edges)) % 2, "edge", 0),
        }
        others = [(value, dim) for value, _, dim in (graph[name] for name in network.takes if name != "x")]
        if isinstance(x, ShardTensor):
            return network.call(model, x, *(shard(value, x.device_mesh, [Shard(dim)]) for value, dim in others))
        return network.call(model, x, *(value for value, _ in others))

    return oracle.Network(network.make, (2 * NODES, 4), 0, call, norms_train=network.norms_train, values=True)


class Of(nn.Module):
    """A function as a network."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def mlp(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(layer for a, b in zip(sizes, sizes[1:]) for layer in (nn.Linear(a, b), nn.Tanh())))


def mesh_graph_net(g: Any) -> nn.Module:
    """Encode, process, decode: edges are updated from both of their nodes, nodes from the sum of their edges."""

    class Block(g.MessagePassing):
        def __init__(self) -> None:
            super().__init__(aggr="add")
            self.of_edges = nn.Sequential(mlp(24, 8, 8), nn.LayerNorm(8))
            self.of_nodes = nn.Sequential(mlp(16, 8, 8), nn.LayerNorm(8))

        def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
            e = e + self.edge_updater(edge_index, x=x, e=e)
            return x + self.of_nodes(torch.cat([x, self.propagate(edge_index, e=e, size=(len(x),) * 2)], -1)), e

        def edge_update(self, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
            return self.of_edges(torch.cat([x_i, x_j, e], -1))

        def message(self, e: Tensor) -> Tensor:
            return e

    class MeshGraphNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nodes, self.edges, self.decoder = mlp(4, 8), mlp(3, 8), nn.Linear(8, 2)
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
            x, e = self.nodes(x), self.edges(edge_attr)
            for block in self.blocks:
                x, e = block(x, edge_index, e)
            return self.decoder(x)

    return MeshGraphNet()


def of_two_types(network: nn.Module, x: Tensor, pos: Tensor, edge_index: Tensor) -> Tensor:
    """Points with their own features are read by cells, and cells by cells."""
    edges = {("point", "to", "cell"): edge_index, ("cell", "to", "cell"): edge_index.flip(0)}
    return network({"cell": x, "point": pos}, edges)["cell"]


def hetero_conv(g: Any) -> nn.Module:
    layers = {("point", "to", "cell"): g.SAGEConv((3, 4), 5), ("cell", "to", "cell"): g.GATConv(4, 5)}
    return g.HeteroConv(layers, aggr="sum")


def hgt_conv(g: Any) -> nn.Module:
    return g.HGTConv(
        {"cell": 4, "point": 3}, 6, (["cell", "point"], [("point", "to", "cell"), ("cell", "to", "cell")]), 2
    )


def dense(network: nn.Module, x: Tensor, edge_index: Tensor) -> Tensor:
    adjacency = importlib.import_module("torch_geometric.utils").to_dense_adj(edge_index, max_num_nodes=len(x))
    return network(x[None], adjacency.to(x.dtype))


DEGREES = torch.tensor([1, 3, 5, 2])
WEIGHTED = ("x", "edge_index", "edge_weight")
ATTRIBUTED = ("x", "edge_index", "edge_attr")
TYPED = ("x", "edge_index", "edge_type")
PLACED = ("x", "pos", "edge_index")
GROUPED = ("x", "batch")

CONVOLUTIONS = {
    "GCNConv": Network(lambda g: g.GCNConv(4, 5), half=True),
    "GCNConv-weighted": Network(lambda g: g.GCNConv(4, 5), WEIGHTED),
    "GATConv": Network(lambda g: g.GATConv(4, 5, heads=2, edge_dim=3), ATTRIBUTED, half=True),
    "GATv2Conv": Network(lambda g: g.GATv2Conv(4, 5, heads=2, edge_dim=3), ATTRIBUTED),
    "GATv2Conv-unattributed": Network(lambda g: g.GATv2Conv(4, 5, heads=2)),
    "SAGEConv": Network(lambda g: g.SAGEConv(4, 5), half=True),
    "SAGEConv-max": Network(lambda g: g.SAGEConv(4, 5, aggr="max", project=True, normalize=True), half=True),
    "SAGEConv-lstm": Network(lambda g: g.SAGEConv(4, 5, aggr="lstm"), ("x", "sorted_index")),
    "SAGEConv-many": Network(lambda g: g.SAGEConv(4, 5, aggr=["mean", "min", "max", "std", "var", "sum", "mul"])),
    "SAGEConv-median": Network(lambda g: g.SAGEConv(4, 5, aggr="median")),
    "GINConv": Network(lambda g: g.GINConv(mlp(4, 8, 5), train_eps=True), half=True),
    "GINEConv": Network(lambda g: g.GINEConv(mlp(4, 8, 5), edge_dim=3), ATTRIBUTED),
    "EdgeConv": Network(lambda g: g.EdgeConv(mlp(8, 5)), half=True),
    "TransformerConv": Network(
        lambda g: g.TransformerConv(4, 5, heads=2, edge_dim=3, beta=True), ATTRIBUTED, half=True
    ),
    "ChebConv": Network(lambda g: g.ChebConv(4, 5, K=3), WEIGHTED),
    "NNConv": Network(lambda g: g.NNConv(4, 5, mlp(3, 20), aggr="mean"), ATTRIBUTED, half=True),
    "PNAConv": Network(
        lambda g: g.PNAConv(
            *(4, 6, ["mean", "min", "max", "std"], ["identity", "amplification", "attenuation"], DEGREES),
            edge_dim=3,
            towers=2,
            divide_input=True,
        ),
        ATTRIBUTED,
    ),
    "ResGatedGraphConv": Network(lambda g: g.ResGatedGraphConv(4, 5, edge_dim=3), ATTRIBUTED, half=True),
    "GraphConv": Network(lambda g: g.GraphConv(4, 5), WEIGHTED, half=True),
    "TAGConv": Network(lambda g: g.TAGConv(4, 5), WEIGHTED),
    "ARMAConv": Network(lambda g: g.ARMAConv(4, 5, num_stacks=2, num_layers=2), WEIGHTED),
    "CGConv": Network(lambda g: g.CGConv(4, 3, batch_norm=True), ATTRIBUTED, norms_train=True),
    "PointNetConv": Network(lambda g: g.PointNetConv(mlp(7, 6), mlp(6, 5)), PLACED),
    "GENConv": Network(
        lambda g: g.GENConv(4, 5, edge_dim=3, learn_t=True, msg_norm=True), ATTRIBUTED, norms_train=True
    ),
    "GENConv-power": Network(lambda g: g.GENConv(4, 5, aggr="powermean", learn_p=True), norms_train=True),
    "SGConv": Network(lambda g: g.SGConv(4, 5, K=2), WEIGHTED),
    "SSGConv": Network(lambda g: g.SSGConv(4, 5, 0.1, K=2), WEIGHTED),
    "APPNP": Network(lambda g: g.APPNP(2, 0.1), WEIGHTED),
    "MFConv": Network(lambda g: g.MFConv(4, 5)),
    "GatedGraphConv": Network(lambda g: g.GatedGraphConv(5, 2), WEIGHTED),
    "FiLMConv": Network(lambda g: g.FiLMConv(4, 5, num_relations=2), TYPED),
    "LEConv": Network(lambda g: g.LEConv(4, 5), WEIGHTED),
    "ClusterGCNConv": Network(lambda g: g.ClusterGCNConv(4, 5, 0.1)),
    "FAConv": Network(lambda g: g.FAConv(4), call=lambda network, x, edges: network(x, x.tanh(), edges)),
    "EGConv": Network(lambda g: g.EGConv(4, 8, num_heads=2, aggregators=["symnorm", "max", "std"])),
    "GeneralConv": Network(lambda g: g.GeneralConv(4, 5, 3, attention=True, heads=2), ATTRIBUTED),
    "PDNConv": Network(lambda g: g.PDNConv(4, 5, 3, 6), ATTRIBUTED),
    "AntiSymmetricConv": Network(lambda g: g.AntiSymmetricConv(4)),
    "FeaStConv": Network(lambda g: g.FeaStConv(4, 5, heads=2)),
    "GMMConv": Network(lambda g: g.GMMConv(4, 5, 3, 2), ATTRIBUTED),
    "AGNNConv": Network(lambda g: g.AGNNConv()),
    "LGConv": Network(lambda g: g.LGConv(), WEIGHTED),
    "RGCNConv": Network(lambda g: g.RGCNConv(4, 5, 2), TYPED),
    "FastRGCNConv": Network(lambda g: g.FastRGCNConv(4, 5, 2, num_bases=2), TYPED),
    "RGATConv": Network(lambda g: g.RGATConv(4, 5, 2), TYPED),
    "PointTransformerConv": Network(lambda g: g.PointTransformerConv(4, 5), PLACED),
    "MixHopConv": Network(lambda g: g.MixHopConv(4, 5), WEIGHTED),
    "DirGNNConv": Network(lambda g: g.DirGNNConv(g.SAGEConv(4, 5))),
    "SuperGATConv": Network(lambda g: g.SuperGATConv(4, 5, heads=2)),
    "WLConvContinuous": Network(lambda g: g.WLConvContinuous(), WEIGHTED),
    "HypergraphConv": Network(lambda g: g.HypergraphConv(4, 5)),
    "SignedConv": Network(
        lambda g: g.SignedConv(4, 5, first_aggr=True),
        call=lambda network, x, edges: network(x, edges[:, :14], edges[:, 14:]),
    ),
    "GPSConv": Network(
        lambda g: g.GPSConv(4, g.GINConv(mlp(4, 4)), heads=2),
        ("x", "edge_index", "batch"),
        norms_train=True,
    ),
    "HeteroConv": Network(hetero_conv, PLACED, of_two_types),
    "HGTConv": Network(hgt_conv, PLACED, of_two_types),
    "DenseGCNConv": Network(lambda g: g.DenseGCNConv(4, 5), call=dense),
}
NORMS = {
    "BatchNorm": Network(lambda g: g.BatchNorm(4), ("x",), norms_train=True),
    "InstanceNorm": Network(lambda g: g.InstanceNorm(4, affine=True), GROUPED),
    "LayerNorm": Network(lambda g: g.LayerNorm(4), GROUPED),
    "LayerNorm-graph": Network(lambda g: g.LayerNorm(4), ("x",)),
    "LayerNorm-node": Network(lambda g: g.LayerNorm(4, mode="node"), ("x",)),
    "GraphNorm": Network(lambda g: g.GraphNorm(4), GROUPED),
    "GraphSizeNorm": Network(lambda g: g.GraphSizeNorm(), GROUPED),
    "PairNorm": Network(lambda g: g.PairNorm(), GROUPED),
    "MeanSubtractionNorm": Network(lambda g: g.MeanSubtractionNorm(), GROUPED),
    "DiffGroupNorm": Network(lambda g: g.DiffGroupNorm(4, 2), ("x",), norms_train=True),
}
POOLS = {
    "global_add_pool": Network(lambda g: Of(g.global_add_pool), GROUPED, half=True),
    "global_mean_pool": Network(lambda g: Of(g.global_mean_pool), GROUPED, half=True),
    "global_max_pool": Network(lambda g: Of(g.global_max_pool), GROUPED, half=True),
    "AttentionalAggregation": Network(lambda g: g.AttentionalAggregation(mlp(4, 1)), GROUPED),
    "Set2Set": Network(lambda g: g.Set2Set(4, 2), GROUPED),
    "SortAggregation": Network(lambda g: g.SortAggregation(3), GROUPED),
    "SoftmaxAggregation": Network(lambda g: g.SoftmaxAggregation(learn=True), GROUPED),
    "TopKPooling": Network(lambda g: g.TopKPooling(4, 0.5)),
    "SAGPooling": Network(lambda g: g.SAGPooling(4, 0.5)),
}
MODELS = {
    "GCN": Network(lambda g: g.GCN(4, 8, 2, 5, jk="cat", norm="batch"), WEIGHTED, norms_train=True),
    "GAT": Network(lambda g: g.GAT(4, 8, 2, 5, v2=True, norm="graph_norm")),
    "PNA": Network(
        lambda g: g.PNA(4, 8, 2, 5, aggregators=["mean", "max"], scalers=["identity", "linear"], deg=DEGREES),
    ),
    "AttentiveFP": Network(lambda g: g.AttentiveFP(4, 8, 5, 3, 2, 2), (*ATTRIBUTED, "batch")),
    "DeepGCNLayer": Network(lambda g: g.DeepGCNLayer(g.GENConv(4, 4), g.LayerNorm(4), nn.ReLU())),
    "MeshGraphNet": Network(mesh_graph_net, ATTRIBUTED, half=True),
}
NETWORKS = CONVOLUTIONS | NORMS | POOLS | MODELS


def drawn(network: Network) -> list[tuple[Tensor, str, int]]:
    graph = inputs()
    return [graph[name] for name in network.takes]


def cut(parts: Sequence[tuple[Tensor, str, int]], ranks: int, which: Sequence[str]) -> list[Tensor]:
    """The inputs, of which those that belong to ``which`` are sharded."""
    result = []
    for value, of, dim in parts:
        exact = value.is_floating_point()
        if of in which:
            mesh, sizes = shared_mesh(ranks), SIZES[ranks][of]
            result.append(shard(value, mesh, [Shard(dim)], {0: sizes}, requires_grad=exact))
        else:
            result.append(value.clone().requires_grad_(exact))
    return result


def result_of(network: Network, model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    result = network.call(model, *inputs)
    return result[0] if isinstance(result, tuple) else result


def loss_of(y: Tensor) -> Tensor:
    """Not the same weight for all features: the mean square of rows of length 1 has no gradient but rounding errors."""
    return (y * torch.linspace(1, 2, y.shape[-1], dtype=y.dtype)).square().mean()


def check(name: str, ranks: int) -> None:
    """Compare a network on shards with itself in one process, as the oracle does: for each cut, the result, and the
    gradients of all inputs and parameters, and all buffers."""
    torch.manual_seed(0)
    network = NETWORKS[name]
    model = built(network.make, importlib.import_module(PACKAGE), norms_train=network.norms_train)
    parts = drawn(network)
    for which in CUTS.values():
        if not any(of in which for _, of, _ in parts):
            continue
        ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
        sharded, plain = cut(parts, ranks, which), cut(parts, ranks, ())
        y = result_of(network, ours, sharded)
        expected = result_of(network, theirs, plain)
        assert_near(whole(y), expected, 1e-9)
        loss_of(y).backward()
        loss_of(expected).backward()
        for key, a, b in zip(network.takes, sharded, plain, strict=True):
            if b.grad is not None:
                assert_near(whole(a.grad), b.grad, 1e-9, name=key)
        oracle.compare(ours, theirs, 1e-9)
    if network.half and ranks == 2:
        check_half(network, model, parts)


def check_half(network: Network, model: nn.Module, parts: Sequence[tuple[Tensor, str, int]]) -> None:
    """In bfloat16, with nodes and edges sharded."""

    def call(model: nn.Module, x: Tensor) -> Tensor:
        which = CUTS["both"] if isinstance(x, ShardTensor) else ()
        others = [v.detach().to(x.dtype) if v.is_floating_point() else v for v in cut(parts[1:], 2, which)]
        return result_of(network, model, [x, *others])

    x = parts[0][0]
    oracle.check_half(oracle.Network(network.make, x.shape, 0, call), model, x)


@pytest.mark.parametrize("name", names(NETWORKS, always=("GCNConv", "GATConv", "MeshGraphNet")))
def test_networks_are_exact(name):
    run_distributed(check, 2, name, 2, timeout=300.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_ranks_without_nodes_and_edges(name):
    run_distributed(check, 3, name, 3, timeout=300.0)


@on_ranks(2, timeout=300.0)
def test_layers_send_no_more_than_nodes():
    """With sharded edges and whole nodes, a layer sends the sums of its edges, as large as the nodes, and no edge."""
    torch.manual_seed(0)
    model = built(NETWORKS["MeshGraphNet"].make, importlib.import_module(PACKAGE))
    sharded = cut(drawn(NETWORKS["MeshGraphNet"]), 2, CUTS["edges"])
    with count_communication() as counted:
        model(*sharded)
    asked = {"all_gather": 1}  # which rows the targets name, once
    assert counted.collectives == asked | {"all_reduce": 2}
    assert counted.collective_bytes == 2 * NODES * 8 * 8 + 2 * 8


NEIGHBORS, WIDTH = 6, 8
PARTITIONED = {
    "GCNConv": (lambda g: g.GCNConv(WIDTH, WIDTH, add_self_loops=False), 1),
    "SAGEConv": (lambda g: g.SAGEConv(WIDTH, WIDTH), 1),
    "SAGEConv-max": (lambda g: g.SAGEConv(WIDTH, WIDTH, aggr="max"), 1),
    "GATConv": (lambda g: g.GATConv(WIDTH, WIDTH, add_self_loops=False), 1),
    "GINConv": (lambda g: g.GINConv(mlp(WIDTH, WIDTH)), 1),
    "TransformerConv": (lambda g: g.TransformerConv(WIDTH, WIDTH), 2),  # keys and values
    "GraphSAGE": (lambda g: g.GraphSAGE(WIDTH, WIDTH, 3), 3),
}


@pytest.mark.parametrize("name", names(PARTITIONED, always=("SAGEConv",)))
@on_ranks(2, timeout=300.0)
def test_partitioned_graphs_send_rows_only(name):
    """Of a partitioned graph, each layer sends the rows at the border, and nothing for sums at nodes."""
    make, layers = PARTITIONED[name]
    mesh, n = shared_mesh(2), 200
    positions = torch.rand(n, 2, generator=torch.Generator().manual_seed(0))
    nearest = knn(positions, positions, NEIGHBORS + 1)[1][:, 1:]
    edges = torch.stack([nearest.flatten(), torch.arange(n).repeat_interleave(NEIGHBORS)])
    found = partition(positions=positions, edge_index=edges, ranks=2)
    edge_index, sizes, _ = found.edges(edges)
    x = torch.randn(n, WIDTH, dtype=torch.float64)
    ours, theirs = shard(x, mesh, [Shard(0)], {0: found.sizes}, requires_grad=True), x.clone().requires_grad_()
    index = shard(edge_index, mesh, [Shard(1)], {0: sizes})
    model = built(make, importlib.import_module(PACKAGE))
    twin = copy.deepcopy(model)
    for _ in range(2):
        with count_communication() as forward:
            y = model(ours, index)
        with count_communication() as backward:
            y.square().mean().backward()
        expected = twin(theirs, edge_index)
        expected.square().mean().backward()
    assert_near(y.full_tensor(), expected, 1e-9)
    assert_near(ours.grad.full_tensor(), theirs.grad, 1e-9)
    oracle.compare(model, twin, 1e-9)
    read = layers * found.bytes_read(WIDTH, torch.float64)[torch.distributed.get_rank()]
    extra = sum(found.reads[torch.distributed.get_rank()]) * 8 * layers  # scores or degrees of the same nodes
    assert read <= forward.bytes_received <= read + extra, (forward, read)
    assert not forward.collective_bytes, forward
    # Its sums back; weights' gradients are summed, too.
    weights = sum(p.nbytes for p in model.parameters())
    assert backward.bytes_sent <= read + extra and backward.collective_bytes <= weights + 64, backward


NODES_AND_EDGES = {"x": Shard(0), "edge_index": Shard(1), "edge_weight": Shard(0)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, layouts",
    [
        ("GCNConv", {"edge_index": Shard(1)}),
        ("GCN", NODES_AND_EDGES),
        ("PNA", {"x": Shard(0), "edge_index": Shard(1)}),
        ("MeshGraphNet", {"edge_index": Shard(1), "edge_attr": Shard(0)}),
        ("TopKPooling", {"x": Shard(0)}),
    ],
)
@on_ranks(2, timeout=300.0)
def test_domain_parallel_takes_plain_graphs(name, layouts):
    """A network that is not changed, and gets what it gets on one device."""
    torch.manual_seed(0)
    network = NETWORKS[name]
    model = built(network.make, importlib.import_module(PACKAGE), norms_train=network.norms_train)
    twin, parts = copy.deepcopy(model), drawn(network)
    ours, theirs = cut(parts, 2, ()), cut(parts, 2, ())
    parallelize_module(model, shared_mesh(2), DomainParallel(inputs=layouts, outputs=Replicate()))
    y, expected = result_of(network, model, ours), result_of(network, twin, theirs)
    assert type(y) is Tensor
    assert_near(y, expected, 1e-9)
    y.square().mean().backward()
    expected.square().mean().backward()
    for a, b in zip(ours, theirs, strict=True):
        if b.grad is not None:
            assert_near(a.grad, b.grad, 1e-9)
    oracle.compare(model, twin, 1e-9)


REFUSED = {
    "products of graphs": (
        Network(lambda g: g.GraphUNet(4, 8, 5, 2)),
        "both",
        "no rank has all of this one's entries.*make it of plain tensors",
    ),
    "loop over edges": (
        Network(lambda g: g.EdgePooling(4), ("x", "edge_index", "batch")),
        "edges",
        "tolist: no rank holds all values",
    ),
}


def sparse(edge_index: Tensor) -> Tensor:
    utils = importlib.import_module("torch_geometric.utils")
    return utils.to_torch_csr_tensor(edge_index, size=(NODES, NODES)).double()


def refused(case: str) -> None:
    torch.manual_seed(0)
    network, which, _ = REFUSED[case]
    model = built(network.make, importlib.import_module(PACKAGE), norms_train=network.norms_train)
    sharded = cut(drawn(network), 2, CUTS[which])
    result_of(network, model, sharded)


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    for error in run_expecting_errors(refused, 2, case, timeout=300.0):
        assert isinstance(error, UnsupportedSharding) and re.search(REFUSED[case][2], str(error)), error


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["EdgeIndex", "sparse adjacency"])
@on_ranks(2, timeout=300.0)
def test_plain_edges_next_to_sharded_nodes(kind):
    """What stands for the edges and is plain, next to sharded nodes."""
    package, mesh = importlib.import_module(PACKAGE), shared_mesh(2)
    torch.manual_seed(0)
    given = inputs()
    x, edges = given["x"][0], given["edge_index"][0]
    if kind == "sparse adjacency":
        found = [sparse(edges), sparse(edges).to_sparse_coo()]
    else:  # torch_geometric's subclass of a tensor, which knows the order of the edges
        edges = importlib.import_module("torch_geometric").EdgeIndex(edges, sparse_size=(NODES, NODES))
        found = [edges, edges.sort_by("row").values, edges.sort_by("col").values]
    for i, index in enumerate(found):
        for name in ("GCNConv", "SAGEConv", "GATConv" if kind == "EdgeIndex" else "GraphConv"):
            network = getattr(package, name)(x.shape[1], 5).to(x.dtype)
            if kind == "sparse adjacency" and index.layout is torch.sparse_coo and name == "SAGEConv":
                continue  # a mean, for which torch_geometric makes a matrix anew
            leaf = x.clone().requires_grad_()
            expected = network(leaf, index)
            expected.square().sum().backward()
            sharded = shard(x, mesh, [Shard(0)], {0: SIZES[2]["node"]}).requires_grad_()
            result = network(sharded, index)
            result.square().sum().backward()
            assert_near(result.full_tensor(), expected, 1e-9, name=f"{name}, {kind} {i}")
            assert_near(sharded.grad.full_tensor(), leaf.grad, 1e-9, name=f"gradient of {name}, {kind} {i}")


@on_ranks(2, timeout=300.0)
def test_graph_unet_of_plain_edges():
    """Plain edges are multiplied with themselves on every rank; nodes that are left are chosen on shards."""
    package, mesh = importlib.import_module(PACKAGE), shared_mesh(2)
    torch.manual_seed(0)
    given = inputs()
    x, edges = given["x"][0], given["edge_index"][0]
    ours = built(lambda g: g.GraphUNet(4, 8, 5, 2), package)
    theirs, leaf = copy.deepcopy(ours), x.clone().requires_grad_()
    sharded = shard(x, mesh, [Shard(0)], {0: SIZES[2]["node"]}).requires_grad_()
    torch.manual_seed(1)
    result = ours(sharded, edges)
    torch.manual_seed(1)
    expected = theirs(leaf, edges)
    for y in (result, expected):
        y.square().sum().backward()
    assert_near(result.full_tensor(), expected, 1e-9)
    assert_near(sharded.grad.full_tensor(), leaf.grad, 1e-9)
    oracle.compare(ours, theirs, 1e-9)
