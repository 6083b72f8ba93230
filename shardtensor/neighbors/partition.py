"""``partition``: which node of a graph goes to which rank, so that ranks read few rows of each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .bisection import bisected, even_sizes, lexicographic
from .graph import adjacency, graph_coordinates, smallest_cut

_METHODS = ("auto", "metis")


class Edges(NamedTuple):
    """The edges of a graph as its :class:`Partition` has them.

    Attributes:
        edge_index: ``(2, e)``, sources and targets by their new numbers, in the order of the targets.
        sizes: how many each rank has: those whose target it has. They are the shard sizes of dim 1 of ``edge_index``,
            and of dim 0 of what belongs to edges.
        order: ``(e,)``, which edge is where: ``attributes[order]`` belongs to ``edge_index``.
    """

    edge_index: Tensor
    sizes: tuple[int, ...]
    order: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Partition:
    """The nodes of each rank, and the rows that a layer sends. Returned by :func:`shardtensor.partition`.

    Attributes:
        order: ``(n,)``, the old number of each node: ``x[order]`` has the nodes of rank 0 first, then those of rank 1,
            ...
        places: ``(n,)``, the new number of each node.
        sizes: the number of nodes of each rank: the shard sizes of dim 0.
        method: the method of the partition.
        edges_of: the number of edges to the nodes of each rank; None without edges.
        cut: the number of edges from nodes of other ranks; None without edges.
        reads: ``reads[r][s]`` is the number of nodes of rank ``s`` with edges to nodes of rank ``r``. Rank ``r``
            reads these rows in each layer, and sends their gradients back. None without edges.
    """

    order: Tensor
    places: Tensor
    sizes: tuple[int, ...]
    method: str
    edges_of: tuple[int, ...] | None = None
    cut: int | None = None
    reads: tuple[tuple[int, ...], ...] | None = None

    def nodes(self, x: Tensor) -> Tensor:
        """Put features of the nodes, ``(n, ...)``, in the order of the new numbers."""
        return x[self.order]

    def back(self, x: Tensor) -> Tensor:
        """Put features of the nodes in the order of the old numbers: the inverse of :meth:`nodes`."""
        return x[self.places]

    def edges(self, edge_index: Tensor, sources: Partition | None = None) -> Edges:
        """Renumber edges, and sort them by their targets.

        Args:
            edge_index: ``(2, e)``: sources and targets.
            sources: for a bipartite graph, the partition of the sources; ``self`` is that of the targets.

        Raises:
            ValueError, TypeError: not an ``edge_index``, or node numbers out of range.
        """
        others = self if sources is None else sources
        _check_edges(edge_index, len(others.order), len(self.order))
        index = torch.stack([others.places[edge_index[0]], self.places[edge_index[1]]])
        order = index[1].argsort(stable=True)
        index = index[:, order]
        return Edges(index, self._held(index[1]), order)

    def followers(self, nodes: Tensor) -> Partition:
        """Return the partition of items that belong to nodes, such as pixels: each is on the rank of its node.

        Args:
            nodes: ``(m,)``, int64: the old number of the node of each item.

        Raises:
            ValueError: not a vector of int64, or node numbers out of range.

        Example:
            >>> found = partition(positions=torch.tensor([[0.0], [9.0], [1.0]]), ranks=2)  # nodes 0 and 2, and 1
            >>> pixels = found.followers(torch.tensor([1, 2, 0, 0]))
            >>> pixels.sizes, pixels.order.tolist()
            ((3, 1), [2, 3, 1, 0])
        """
        _check_numbers("nodes", nodes, len(self.order))
        places = self.places[nodes]
        order = places.argsort(stable=True)
        return Partition(order, _inverse(order), self._held(places[order]), "their nodes")

    def _held(self, places: Tensor) -> tuple[int, ...]:
        """How many of these ascending places each rank has."""
        ends = torch.tensor(self.sizes, device=places.device).cumsum(0)
        return tuple(torch.searchsorted(places.contiguous(), ends).diff(prepend=ends.new_zeros(1)).tolist())

    def bytes_read(self, features: int, dtype: torch.dtype = torch.float32) -> tuple[int, ...]:
        """Return the bytes that each rank reads from others in the forward pass of a layer, for a number of features.

        Raises:
            ValueError: the partition was made without edges.
        """
        if self.reads is None:
            raise ValueError("the partition was made without edges: call partition(..., edge_index=edge_index)")
        return tuple(sum(row) * features * dtype.itemsize for row in self.reads)

    def __repr__(self) -> str:
        head = f"Partition of {len(self.order)} nodes over {len(self.sizes)} ranks by {self.method}"
        if self.reads is None or self.edges_of is None:
            return f"{head}: {', '.join(map(str, self.sizes))}"
        edges = sum(self.edges_of)
        lines = [f"{head}: {self.cut} of {edges} edges between ranks", "rank  nodes  edges  rows that it reads"]
        for r, row in enumerate(self.reads):
            read = ", ".join(f"{n} of rank {s}" for s, n in enumerate(row) if n) or "none"
            lines.append(f"{r:4d}  {self.sizes[r]:5d}  {self.edges_of[r]:5d}  {read}")
        return "\n".join(lines)


def partition(
    *,
    positions: Tensor | None = None,
    edge_index: Tensor | None = None,
    num_nodes: int | None = None,
    ranks: int,
    method: str = "auto",
) -> Partition:
    """Divide the nodes of a graph among ranks, so that few edges cross between ranks.

    The function takes plain tensors, the same on every rank, and returns the same result on every rank. Sizes differ by
    at most one node.

    - With ``positions``, it bisects the nodes along their widest dim, repeatedly (recursive coordinate bisection).
    - With ``edge_index``, the coordinates of a node are its distances, in edges, from eight nodes that are far apart.
      Each bisection is along the coordinate, sum or difference that cuts the fewest edges. Then nodes swap ranks if
      this cuts fewer edges.
    - With both, the positions are the coordinates of the nodes, and the rest is as with ``edge_index``.

    These methods suit meshes, grids and graphs of neighbours. METIS (``method="metis"``) is better for graphs without a
    geometry, such as social networks, but its sizes differ more.

    Args:
        positions: ``(n, d)``, floating-point.
        edge_index: ``(2, e)``, int64: sources and targets, as in PyTorch Geometric.
        num_nodes: ``n``; needed without positions.
        ranks: the number of ranks.
        method: "auto", or "metis", which needs the package pymetis.

    Raises:
        ValueError, TypeError: arguments that do not fit each other; positions that are not finite.
        ImportError: pymetis is not installed.

    Example:
        >>> import torch
        >>> chain = torch.tensor([[4, 2, 0, 3], [2, 0, 3, 1]])  # 4 - 2 - 0 - 3 - 1
        >>> found = partition(edge_index=chain, num_nodes=5, ranks=2)
        >>> found.sizes, found.order.tolist(), found.cut
        ((3, 2), [1, 3, 0, 2, 4], 1)
        >>> found.edges(chain).edge_index.tolist(), found.edges(chain).sizes
        ([[1, 2, 3, 4], [0, 1, 2, 3]], (3, 1))
    """
    n = _check(positions, edge_index, num_nodes, ranks, method)
    sizes = even_sizes(n, ranks)
    if method == "metis":
        assert edge_index is not None
        order, sizes = _by_metis(edge_index, n, ranks)
        name = "METIS"
    elif edge_index is None:
        assert positions is not None
        columns, name = positions.detach().double(), "coordinates"
        order = bisected(columns, sizes, start=lexicographic(columns))
    else:
        columns, name = edge_index.new_empty(n, 1), "distances in the graph"
        if positions is not None:
            columns, name = positions.detach().double(), "coordinates, across few edges"
        elif n:
            columns = graph_coordinates(*adjacency(edge_index, n))
        # Lines of equal coordinates, too, are divided into neighbours.
        order = bisected(columns, sizes, smallest_cut(edge_index, n), lexicographic(columns))
    places = _inverse(order)
    if edge_index is None:
        return Partition(order, places, sizes, name)
    return Partition(order, places, sizes, name, *_traffic(places[edge_index], sizes))


def _inverse(order: Tensor) -> Tensor:
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places


def _traffic(edge_index: Tensor, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], int, tuple[tuple[int, ...], ...]]:
    """The number of edges of each rank and between ranks, and the rows that ranks read from each other."""
    n, ranks = sum(sizes), len(sizes)
    rank_of = torch.arange(ranks, device=edge_index.device).repeat_interleave(
        torch.tensor(sizes, device=edge_index.device)
    )
    sources, readers = edge_index[0], rank_of[edge_index[1]]
    between = rank_of[sources] != readers
    rows: Tensor = torch.unique(readers[between] * n + sources[between])
    pairs = rows // max(n, 1) * ranks + rank_of[rows % max(n, 1)]
    reads = pairs.bincount(minlength=ranks * ranks).view(ranks, ranks)
    edges = readers.bincount(minlength=ranks)
    return tuple(edges.tolist()), int(between.sum()), tuple(map(tuple, reads.tolist()))


def _by_metis(edge_index: Tensor, n: int, ranks: int) -> tuple[Tensor, tuple[int, ...]]:
    import pymetis

    graph = pymetis.CSRAdjacency(*(t.tolist() for t in adjacency(edge_index, n)))
    _, found = pymetis.part_graph(ranks, adjacency=graph)
    owners = torch.as_tensor(found, dtype=torch.int64, device=edge_index.device)
    return owners.argsort(stable=True), tuple(owners.bincount(minlength=ranks).tolist())


# -- what is refused --------------------------------------------------------------------------------------------------


def _check(positions: Tensor | None, edge_index: Tensor | None, num_nodes: int | None, ranks: int, method: str) -> int:
    """How many nodes there are; errors where arguments do not fit each other."""
    if any(isinstance(t, DTensor) for t in (positions, edge_index)):
        raise TypeError("partition takes plain tensors, the same on every rank: pass full_tensor() of sharded ones")
    if method not in _METHODS:
        raise ValueError(f"partition: method {method!r}: choose 'auto' or 'metis'")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ValueError(f"partition: ranks must be an integer, at least 1, not {ranks!r}")
    if positions is None and (edge_index is None or num_nodes is None):
        raise ValueError("partition takes positions=, or edge_index= and num_nodes=, or positions= and edge_index=")
    if method == "metis" and edge_index is None:
        raise ValueError("partition: METIS divides graphs, pass edge_index=")
    if positions is not None:
        if positions.ndim != 2 or not positions.is_floating_point() or not positions.shape[1]:
            shown = f"{tuple(positions.shape)} of {positions.dtype}"
            raise ValueError(f"partition: positions must be (n, d), floating-point, d at least 1, not {shown}")
        if not bool(positions.isfinite().all()):
            raise ValueError("partition: positions are not finite (NaN or infinite)")
        if num_nodes not in (None, len(positions)):
            raise ValueError(f"partition: num_nodes is {num_nodes}, but there are {len(positions)} positions")
    n = num_nodes if positions is None else len(positions)
    assert n is not None
    if edge_index is not None:
        _check_edges(edge_index, n, n)
    return n


def _check_edges(edge_index: Tensor, sources: int, targets: int) -> None:
    if edge_index.ndim != 2 or edge_index.shape[0] != 2 or edge_index.dtype != torch.int64:
        shown = f"{tuple(edge_index.shape)} of {edge_index.dtype}"
        raise ValueError(f"edge_index must be (2, e) of int64, not {shown}")
    bipartite = [(edge_index[0], sources), (edge_index[1], targets)]
    for ends, n in bipartite if sources != targets else [(edge_index.flatten(), targets)]:
        _check_numbers("edge_index", ends, n)


def _check_numbers(name: str, nodes: Tensor, n: int) -> None:
    if nodes.ndim != 1 or nodes.dtype != torch.int64:
        raise ValueError(f"{name} must be (m,) of int64, not {tuple(nodes.shape)} of {nodes.dtype}")
    if nodes.numel() and not 0 <= int(nodes.min()) <= int(nodes.max()) < n:
        low, high = int(nodes.min()), int(nodes.max())
        raise ValueError(f"{name} names nodes {low} to {high}, but there are {n}: 0 to {n - 1}")
