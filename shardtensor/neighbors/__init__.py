"""Neighbours of points, and partitions of points and graphs: what irregular domains need before and between layers."""

from . import geometric  # noqa: F401  # which gives torch_geometric's operators their forms
from .nearest import knn, radius

__all__ = ["knn", "radius"]
