"""A mesh of the sphere, the pixels of a picture on it, and the graph of both, divided among ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shardtensor import Partition, partition
from shardtensor.neighbors import knn
from shardtensor.neighbors.partition import Edges

LEVELS = 9  # of which the finest mesh has 2.6 million nodes
NEAREST = 3  # nodes around each pixel


def nodes_of(level: int) -> int:
    """How many nodes a mesh has."""
    return 10 * 4**level + 2


def icosphere(level: int) -> tuple[Tensor, Tensor]:
    """An icosahedron whose triangles are divided in four, so many times: nodes, (n, 3) on the unit sphere, in float64,
    and triangles, (20 * 4**level, 3)."""
    golden = (1 + math.sqrt(5)) / 2
    ends = torch.tensor([[1.0, golden], [1.0, -golden], [-1.0, golden], [-1.0, -golden]], dtype=torch.float64)
    zero = torch.zeros(4, 1, dtype=torch.float64)
    nodes = torch.cat([torch.cat([zero, ends], 1).roll(turn, 1) for turn in range(3)])
    nodes = nodes / nodes.norm(dim=1, keepdim=True)
    near = torch.cdist(nodes, nodes) < 1.1  # the 30 edges; a triangle is three nodes that are near each other
    triples = torch.combinations(torch.arange(12), 3)
    faces = triples[near[triples[:, [0, 1, 2]], triples[:, [1, 2, 0]]].all(1)]
    for _ in range(level):
        after = faces.roll(-1, 1)  # the other end of each triangle's three sides
        sides = torch.minimum(faces, after) * len(nodes) + torch.maximum(faces, after)
        sides, middle = sides.unique(return_inverse=True)
        middle = middle + len(nodes)
        new = nodes[sides // len(nodes)] + nodes[sides % len(nodes)]
        nodes = torch.cat([nodes, new / new.norm(dim=1, keepdim=True)])
        corners = [torch.stack([faces[:, i], middle[:, i], middle[:, i - 1]], 1) for i in range(3)]
        faces = torch.cat([*corners, middle])
    return nodes, faces


def neighbors_of(faces: Tensor) -> Tensor:
    """The edges of triangles, (2, e): each side both ways."""
    n, after = int(faces.max()) + 1, faces.roll(-1, 1)
    pairs = torch.cat([(faces * n + after).flatten(), (after * n + faces).flatten()]).unique()
    return torch.stack([pairs // n, pairs % n])


def pixels_of(height: int) -> Tensor:
    """The middles of the pixels of earth.py's grid, (2 * height**2, 3) on the unit sphere, row by row."""
    latitude = math.pi / 2 - (torch.arange(height, dtype=torch.float64) + 0.5) * math.pi / height
    longitude = (torch.arange(2 * height, dtype=torch.float64) + 0.5) * math.pi / height - math.pi
    rings = [latitude.cos()[:, None] * longitude.cos(), latitude.cos()[:, None] * longitude.sin()]
    return torch.stack([*rings, latitude.sin()[:, None].expand(-1, 2 * height)], 2).view(-1, 3)


@dataclass
class Graph:
    """Pixels, nodes, and the edges between them, each with its target's rank.

    Attributes:
        pixels, nodes: which of them each rank has, and their new order.
        encode, process, decode: edges from pixels to nodes, between nodes, and from nodes to pixels.
        positions: of the nodes, (n, 3), in their new order.
        faces: triangles of nodes by their new numbers.
    """

    pixels: Partition
    nodes: Partition
    encode: Edges
    process: Edges
    decode: Edges
    positions: Tensor
    faces: Tensor

    @staticmethod
    def of(level: int, height: int, ranks: int) -> Graph:
        """The same on every rank."""
        nodes, faces = icosphere(level)
        among = neighbors_of(faces)
        found = partition(positions=nodes, edge_index=among, ranks=ranks)
        pixels = pixels_of(height)
        _, nearest = knn(nodes, pixels, NEAREST)
        belong = found.followers(nearest[:, 0])  # each pixel to the rank that has the nearest node
        down = torch.stack([nearest.flatten(), torch.arange(len(pixels)).repeat_interleave(NEAREST)])
        return Graph(
            belong,
            found,
            found.edges(down.flip(0), sources=belong),
            found.edges(among),
            belong.edges(down, sources=found),
            found.nodes(nodes),
            found.places[faces],
        )


def rows_read(edges: Edges, sources: Partition, rank: int) -> Tensor:
    """The sources of other ranks that a rank's edges come from, each once: what it has to read, at least."""
    ends = torch.tensor([0, *edges.sizes]).cumsum(0)
    read = edges.edge_index[0, ends[rank] : ends[rank + 1]].unique()
    first = sum(sources.sizes[:rank])
    return read[(read < first) | (read >= first + sources.sizes[rank])]
