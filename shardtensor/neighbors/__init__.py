"""Neighbours of points, and partitions of points and graphs: what irregular domains need before and between layers.

- ``bisection``: points in runs of neighbours, boxes around them, and distances that are the same numbers everywhere.
- ``search``: searches among the points that are here.
- ``traffic``: which points travel to which ranks.
- ``nearest``: :func:`knn` and :func:`radius`.
- ``geometric``: the operators of torch_geometric's libraries: ``knn``, ``radius``, farthest point sampling.
- ``graph``: who is next to whom in a graph, how far apart nodes are, and where to divide them.
- ``partition``: :func:`shardtensor.partition`, which node goes to which rank.
"""

from . import geometric  # noqa: F401  # which gives torch_geometric's operators their forms
from .nearest import knn, radius

__all__ = ["knn", "radius"]
