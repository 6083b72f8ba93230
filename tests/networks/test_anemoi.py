"""Blocks of anemoi-models, which forecast the weather: from a grid to a mesh, on the mesh, and back to the grid.

Nodes and pixels are sharded in different sizes, edges like their targets; no graph here has its edges both ways. The
blocks are called as in one process: what distributes them in anemoi itself stays unused.
"""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import networks.oracle as oracle
from networks.oracle import assert_near, built, names
from shardtensor import partition
from shardtensor.neighbors import knn
from shardtensor.testing import count_communication, shard, shared_mesh

PACKAGE = "anemoi.models.layers.block"
pytest.importorskip(PACKAGE)

NODES, PIXELS, WIDTH, OF_EDGES = 60, 200, 8, 3
SHAPES = (None, None, None)  # for anemoi's own sharding


class Forecast(nn.Module):
    """Encoder, two layers of a processor, decoder.

    Args:
        mapper, layer: make a block between two kinds of nodes, and one on the mesh.
        options: what a block's call takes besides features, edges and ``size``.
        pairs: whether a layer on the mesh takes its size as a pair.
    """

    def __init__(self, mapper: Any, layer: Any, options: dict[str, Any], pairs: bool) -> None:
        super().__init__()
        self.encoder, self.decoder = mapper(), mapper()
        self.processor = nn.ModuleList(layer() for _ in range(2))
        self.options, self.of_mesh = options, (NODES, NODES) if pairs else NODES

    def forward(
        self, pixels: Tensor, nodes: Tensor, down: Tensor, on_mesh: Tensor, up: Tensor, *edges: Tensor
    ) -> Tensor:
        (_, x), _ = self.encoder((pixels, nodes), down, edges[0], SHAPES, size=(PIXELS, NODES), **self.options)
        for layer in self.processor:
            x, on_mesh = layer(x, on_mesh, edges[1], SHAPES, size=self.of_mesh, **self.options)
        (_, result), _ = self.decoder((x, pixels), up, edges[2], SHAPES, size=(NODES, PIXELS), **self.options)
        return result


def kernels() -> Any:
    return importlib.import_module("anemoi.models.layers.utils").load_layer_kernels()


def transformer(blocks: Any) -> nn.Module:
    """Attention over the edges of each node."""
    given = dict(in_channels=WIDTH, hidden_dim=16, out_channels=WIDTH, num_heads=2, edge_dim=OF_EDGES)
    given |= dict(layer_kernels=kernels(), graph_attention_backend="pyg")
    return Forecast(
        lambda: blocks.GraphTransformerMapperBlock(**given, shard_strategy="heads"),
        lambda: blocks.GraphTransformerProcessorBlock(**given),
        {"batch_size": 1},
        pairs=False,
    )


def convolution(blocks: Any) -> nn.Module:
    """Features of edges are updated from both ends, as in GraphCast and MeshGraphNet."""
    given = dict(in_channels=WIDTH, out_channels=WIDTH, num_chunks=1, layer_kernels=kernels())
    return Forecast(
        lambda: blocks.GraphConvMapperBlock(**given, update_src_nodes=False),
        lambda: blocks.GraphConvProcessorBlock(**given),
        {},
        pairs=True,
    )


NETWORKS = {"transformer": transformer, "convolution": convolution}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", names(NETWORKS))
@on_ranks("ranks", timeout=300.0)
def test_forecasts_are_exact_and_send_rows_only(name, ranks):
    generator, mesh = torch.Generator().manual_seed(0), shared_mesh(ranks)
    on_mesh, on_grid = (torch.rand(n, 2, generator=generator) for n in (NODES, PIXELS))
    among = torch.stack([knn(on_mesh, on_mesh, 6)[1][:, 1:].flatten(), torch.arange(NODES).repeat_interleave(5)])
    _, nearest = knn(on_mesh, on_grid, 3)
    nodes = partition(positions=on_mesh, edge_index=among, ranks=ranks)
    pixels = nodes.followers(nearest[:, 0])
    down = torch.stack([nearest.flatten(), torch.arange(PIXELS).repeat_interleave(3)])
    edges = nodes.edges(down.flip(0), sources=pixels), nodes.edges(among), pixels.edges(down, sources=nodes)
    of_edges = WIDTH if name == "convolution" else OF_EDGES
    parts = [(torch.randn(sum(s), n, dtype=torch.float64), 0, s) for s, n in (
        (pixels.sizes, WIDTH), (nodes.sizes, WIDTH), *zip([e.sizes for e in edges], (of_edges,) * 3)
    )]  # fmt: skip
    parts += [(e.edge_index, 1, e.sizes) for e in edges]
    plain = [value.clone().requires_grad_(value.is_floating_point()) for value, _, _ in parts]
    ours = [
        shard(value, mesh, [Shard(dim)], {0: sizes}, requires_grad=value.is_floating_point())
        for value, dim, sizes in parts
    ]
    network = built(NETWORKS[name], importlib.import_module(PACKAGE))
    twin = copy.deepcopy(network)
    network(*ours)  # finds out which rows travel
    with count_communication() as counted:
        found = network(*ours)
    expected = twin(*plain)
    assert_near(found.full_tensor(), expected, 1e-9)
    found.square().mean().backward()
    expected.square().mean().backward()
    for a, b in zip(ours, plain, strict=True):
        assert b.grad is None or a.grad is not None
        if b.grad is not None:
            assert_near(a.grad.full_tensor(), b.grad, 1e-9)
    oracle.compare(network, twin, 1e-9)
    # Rows of other ranks, in each layer once: keys and values, or features.
    rank, rows = dist.get_rank(), 0
    for each, sources, times in zip(edges, (pixels, nodes, nodes), (1, 2, 1)):
        ends = torch.tensor([0, *each.sizes]).cumsum(0)
        first = sum(sources.sizes[:rank])
        read = each.edge_index[0, ends[rank] : ends[rank + 1]].unique()
        rows += times * int(((read < first) | (read >= first + sources.sizes[rank])).sum())
    assert not counted.collective_bytes and found.shard_sizes == {0: pixels.sizes}
    assert counted.bytes_received == rows * WIDTH * 8 * (2 if name == "transformer" else 1)
