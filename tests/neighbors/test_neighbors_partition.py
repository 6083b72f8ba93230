"""``shardtensor.partition``: permutations, sizes, cuts, what ranks read, and a layer on the shards that it makes."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from on_ranks import on_ranks
from seeded import seeded
from torch.distributed.tensor import Shard

from shardtensor import partition, scatter_tensor
from shardtensor.layout.intervals import boundaries_of
from shardtensor.neighbors import knn
from shardtensor.neighbors.graph import adjacency, distances_from
from shardtensor.testing import run_distributed, shared_mesh


def grid(*shape, shuffled=True):
    """Positions of the nodes of a grid, and edges in both directions between next ones; the nodes in random order."""
    numbers = torch.arange(torch.Size(shape).numel())
    x = torch.stack(torch.unravel_index(numbers, shape), 1).double()
    ids = numbers.view(shape)
    pairs = [
        torch.stack([ids.narrow(d, i, n - 1).flatten() for i in order])
        for d, n in enumerate(shape)
        for order in ((0, 1), (1, 0))
    ]
    edges = torch.cat(pairs, 1)
    if not shuffled:
        return x, edges
    order = torch.randperm(len(x), generator=seeded(0))
    return x[order], order.argsort()[edges]


def of_neighbors(n, d, k):
    """Random points, and edges to each from its nearest."""
    x = torch.rand(n, d, dtype=torch.float64, generator=seeded(n))
    nearest = knn(x, x, k + 1)[1][:, 1:]
    return x, torch.stack([nearest.flatten(), torch.arange(n).repeat_interleave(k)])


def ways(x, edges):
    return ({"positions": x}, {"edge_index": edges, "num_nodes": len(x)}, {"positions": x, "edge_index": edges})


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("n", [1, 2, 5, 7, 17, 33, 97])
def test_every_node_once_in_even_sizes_and_the_same_each_time(n, ranks):
    x, edges = of_neighbors(n, 2, min(3, n - 1))
    for given in (*ways(x, edges), {"edge_index": edges[:, :0], "num_nodes": n}):
        found, again = (partition(**given, ranks=ranks) for _ in range(2))
        assert torch.equal(found.order.sort().values, torch.arange(n))
        assert torch.equal(found.places[found.order], torch.arange(n))
        assert sum(found.sizes) == n and max(found.sizes) - min(found.sizes) <= 1 and len(found.sizes) == ranks
        assert torch.equal(found.order, again.order) and repr(found) == repr(again)
        assert torch.equal(found.back(found.nodes(x)), x)


def test_no_nodes():
    empty = torch.empty(0, 3, dtype=torch.float64)
    for given in ways(empty, torch.empty(2, 0, dtype=torch.int64)):
        found = partition(**given, ranks=3)
        assert found.sizes == (0, 0, 0) and found.reads in (None, ((0, 0, 0),) * 3)


# Edges cut by straight lines: the best that is known, both directions of each edge counted.
BEST = [
    ((24, 24), 2, 48),
    ((24, 24), 3, 80),  # a third of it, then the rest across
    ((24, 24), 4, 96),
    ((24, 24), 8, 192),
    ((24, 24), 9, 192),
    ((40, 10), 2, 20),
    ((40, 10), 4, 60),
    ((40, 10), 5, 80),
    ((12, 12, 12), 2, 288),
    ((12, 12, 12), 8, 864),
]


@pytest.mark.parametrize(("shape", "ranks", "best"), BEST)
def test_few_edges_of_a_grid_are_cut(shape, ranks, best):
    x, edges = grid(*shape)
    for given in ways(x, edges):
        found = partition(**given, ranks=ranks)
        places = found.places[edges]
        ends = torch.tensor(boundaries_of(found.sizes)[1:])
        owners = torch.searchsorted(ends, places, right=True)
        cut = int((owners[0] != owners[1]).sum())
        assert cut <= 1.5 * best and found.cut in (None, cut)
        if "positions" in given and (shape, ranks) != ((24, 24), 3) and ranks != 9:
            assert cut <= 1.01 * best


def test_swaps_cut_fewer_edges_than_straight_lines():
    x, edges = of_neighbors(2000, 3, 6)
    straight = partition(positions=x, ranks=4)
    places = straight.places[edges] // 500
    lines = int((places[0] != places[1]).sum())
    for given in ways(x, edges)[1:]:
        assert partition(**given, ranks=4).cut < 0.85 * lines


def test_parts_that_are_not_connected_stay_together():
    x, edges = grid(5, 5)
    two = torch.cat([edges, edges + 25], 1)
    order = torch.randperm(50, generator=seeded(1))
    found = partition(edge_index=order[two], num_nodes=50, ranks=2)
    assert found.cut == 0 and found.reads == ((0, 0), (0, 0))


def test_what_ranks_read_is_counted():
    x, edges = of_neighbors(97, 2, 4)
    found = partition(positions=x, edge_index=edges, ranks=3)
    owner = dict(zip(found.order.tolist(), [r for r, n in enumerate(found.sizes) for _ in range(n)]))
    rows = {(owner[b], owner[a], a) for a, b in edges.T.tolist() if owner[a] != owner[b]}
    reads = [[sum((a, b) == (r, s) for a, b, _ in rows) for s in range(3)] for r in range(3)]
    assert [list(row) for row in found.reads] == reads and len(rows) > 10
    assert found.cut == sum(owner[a] != owner[b] for a, b in edges.T.tolist())
    assert found.edges_of == tuple(sum(owner[b] == r for b in edges[1].tolist()) for r in range(3))
    assert found.bytes_read(32) == tuple(sum(row) * 32 * 4 for row in reads)
    assert found.bytes_read(32, torch.float64) == tuple(sum(row) * 32 * 8 for row in reads)


def test_the_text_says_who_reads_what():
    x, edges = grid(4, 2, shuffled=False)
    assert repr(partition(positions=x, edge_index=edges, ranks=2)) == (
        "Partition of 8 nodes over 2 ranks by coordinates, across few edges: 4 of 20 edges between ranks\n"
        "rank  nodes  edges  rows that it reads\n"
        "   0      4     10  2 of rank 1\n"
        "   1      4     10  2 of rank 0"
    )
    assert repr(partition(positions=x, ranks=3)) == "Partition of 8 nodes over 3 ranks by coordinates: 3, 3, 2"


def test_edges_lie_with_their_targets():
    x, edges = of_neighbors(33, 2, 3)
    found = partition(edge_index=edges, num_nodes=33, ranks=4)
    edge_index, sizes, order = found.edges(edges)
    assert torch.equal(found.order[edge_index], edges[:, order])
    assert sizes == found.edges_of and sum(sizes) == edges.shape[1]
    assert torch.equal(order.sort().values, torch.arange(edges.shape[1]))
    nodes, places = boundaries_of(found.sizes), boundaries_of(sizes)
    for r in range(4):
        targets = edge_index[1, places[r] : places[r + 1]]
        assert ((nodes[r] <= targets) & (targets < nodes[r + 1])).all()
    assert (edge_index[1].diff() >= 0).all()


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("m", [0, 1, 7, 97])
def test_others_are_where_their_nodes_are(ranks, m):
    x, edges = of_neighbors(33, 2, 3)
    found = partition(positions=x, edge_index=edges, ranks=ranks)
    belongs = torch.randint(33, (m,), generator=seeded(m))
    others = found.followers(belongs)
    assert sum(others.sizes) == m and torch.equal(others.order.sort().values, torch.arange(m))
    assert torch.equal(others.back(others.nodes(belongs)), belongs)
    places, bounds, nodes = found.places[belongs[others.order]], boundaries_of(others.sizes), boundaries_of(found.sizes)
    assert (places.diff() >= 0).all()
    for r in range(ranks):
        part = places[bounds[r] : bounds[r + 1]]
        assert ((nodes[r] <= part) & (part < nodes[r + 1])).all()
    # Of a bipartite graph, to the nodes and from them.
    down = torch.stack([belongs, torch.arange(m)])
    for (edge_index, sizes, order), given, sources, targets in (
        (found.edges(down.flip(0), sources=others), down.flip(0), others, found),
        (others.edges(down, sources=found), down, found, others),
    ):
        assert torch.equal(sources.order[edge_index[0]], given[0, order])
        assert torch.equal(targets.order[edge_index[1]], given[1, order])
        assert sizes == others.sizes and (edge_index[1].diff() >= 0).all()


def test_others_that_belong_to_no_node_are_refused():
    found = partition(positions=torch.rand(5, 2), ranks=2)
    with pytest.raises(ValueError, match="nodes names nodes 0 to 5, but there are 5: 0 to 4"):
        found.followers(torch.tensor([0, 5]))
    with pytest.raises(ValueError, match=r"nodes must be \(m,\) of int64, not \(2,\) of torch.float32"):
        found.followers(torch.rand(2))
    with pytest.raises(ValueError, match="edge_index names nodes 2 to 2, but there are 2"):
        found.edges(torch.tensor([[2], [4]]), sources=found.followers(torch.tensor([0, 1])))


def test_distances_in_a_graph():
    edges = torch.tensor([[0, 1, 1, 4, 4], [1, 2, 2, 4, 5]])  # twice from 1 to 2, a loop; 3 is alone
    starts, neighbors = adjacency(edges, 6)
    assert starts.tolist() == [0, 1, 3, 4, 4, 5, 6] and neighbors.tolist() == [1, 0, 2, 1, 5, 4]
    assert distances_from(0, starts, neighbors).tolist() == [0, 1, 2, 6, 6, 6]


# -- a layer ----------------------------------------------------------------------------------------------------------


def layer(x, edge_index, weights):
    messages = torch.tanh(x[edge_index[0]] - x[edge_index[1]]) * weights
    return torch.zeros_like(x).index_add(0, edge_index[1], messages)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@on_ranks("ranks")
def test_a_layer_on_the_shards_gives_what_one_process_does(ranks):
    positions, edges = of_neighbors(97, 2, 4)
    x = torch.randn(97, 3, dtype=torch.float64, generator=seeded(0)).requires_grad_()
    weights = torch.randn(edges.shape[1], 1, dtype=torch.float64, generator=seeded(1))
    expected = layer(x, edges, weights)
    (gradient,) = torch.autograd.grad((expected**3).sum(), x)
    found = partition(positions=positions, edge_index=edges, ranks=ranks)
    edge_index, sizes, order = found.edges(edges)
    mesh = shared_mesh(ranks)
    nodes = scatter_tensor(found.nodes(x.detach()), mesh, (Shard(0),), shard_sizes={0: found.sizes})
    nodes.requires_grad_()
    index = scatter_tensor(edge_index, mesh, (Shard(1),), shard_sizes={0: sizes})
    of_edges = scatter_tensor(weights[order], mesh, (Shard(0),), shard_sizes={0: sizes})
    result = layer(nodes, index, of_edges)
    assert result.shape == expected.shape
    torch.testing.assert_close(found.back(result.full_tensor()), expected.detach(), rtol=1e-10, atol=1e-12)
    (result**3).sum().backward()
    torch.testing.assert_close(found.back(nodes.grad.full_tensor()), gradient, rtol=1e-10, atol=1e-12)


# -- METIS, and what is refused ---------------------------------------------------------------------------------------


def test_by_metis():
    pytest.importorskip("pymetis")
    for n, ranks in ((0, 2), (1, 3), (2, 7), (17, 3)):
        found = partition(edge_index=torch.randint(max(n, 1), (2, 2 * n)), num_nodes=n, ranks=ranks, method="metis")
        assert torch.equal(found.order.sort().values, torch.arange(n)) and len(found.sizes) == ranks
    # A mesh, and neighbours in space, of which it cuts fewer edges than a division by distances in the graph.
    for (x, edges), least in ((grid(24, 24), 0.9), (of_neighbors(3000, 3, 6), 1.0)):
        given = {"edge_index": edges, "num_nodes": len(x), "ranks": 4}
        found, again = (partition(**given, method="metis") for _ in range(2))
        assert torch.equal(found.order, again.order) and sum(found.sizes) == len(x)
        assert max(found.sizes) <= 1.1 * len(x) / 4 and found.cut * least <= partition(**given).cut


@pytest.mark.skipif(importlib.util.find_spec("pymetis") is not None, reason="pymetis is installed")
def test_metis_is_not_replaced_by_another_method():
    x, edges = grid(4, 4)
    with pytest.raises(ImportError, match="pymetis"):
        partition(edge_index=edges, num_nodes=16, ranks=2, method="metis")


X, EDGES = torch.zeros(5, 2), torch.tensor([[0, 1], [1, 4]])
REFUSED = [
    ({"ranks": 2}, ValueError, "takes positions=, or edge_index= and num_nodes="),
    ({"edge_index": EDGES, "ranks": 2}, ValueError, "takes positions=, or edge_index= and num_nodes="),
    ({"edge_index": EDGES, "num_nodes": 4, "ranks": 2}, ValueError, "names nodes 0 to 4, but there are 4: 0 to 3"),
    ({"edge_index": EDGES - 1, "num_nodes": 5, "ranks": 2}, ValueError, "names nodes -1 to 3"),
    ({"edge_index": EDGES.T[:1], "num_nodes": 5, "ranks": 2}, ValueError, r"must be \(2, e\) of int64, not \(1, 2\)"),
    ({"edge_index": EDGES.int(), "num_nodes": 5, "ranks": 2}, ValueError, "of torch.int32"),
    ({"positions": X.long(), "ranks": 2}, ValueError, r"positions must be \(n, d\), floating-point"),
    ({"positions": X / 0, "ranks": 2}, ValueError, "positions are not finite"),
    ({"positions": X, "num_nodes": 4, "ranks": 2}, ValueError, "num_nodes is 4, but there are 5 positions"),
    ({"positions": X, "ranks": 0}, ValueError, "ranks must be an integer, at least 1, not 0"),
    ({"positions": X, "ranks": 2, "method": "scotch"}, ValueError, "method 'scotch': choose 'auto' or 'metis'"),
    ({"positions": X, "ranks": 2, "method": "metis"}, ValueError, "METIS divides graphs, pass edge_index="),
]


@pytest.mark.parametrize(("arguments", "kind", "text"), REFUSED)
def test_what_does_not_fit_is_refused(arguments, kind, text):
    with pytest.raises(kind, match=text):
        partition(**arguments)


def test_bytes_take_edges():
    with pytest.raises(ValueError, match=r"made without edges: call partition\(\.\.\., edge_index=edge_index\)"):
        partition(positions=X, ranks=2).bytes_read(8)


def sharded_positions():
    partition(positions=scatter_tensor(X, shared_mesh(2), (Shard(0),)), ranks=2)


def test_shards_are_refused():
    with pytest.raises(Exception, match=r"takes plain tensors, the same on every rank: pass full_tensor\(\)"):
        run_distributed(sharded_positions, 2)
