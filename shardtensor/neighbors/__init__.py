"""Neighbours of points, and partitions of points and graphs: what irregular domains need before and between layers."""

from .nearest import knn, radius

__all__ = ["knn", "radius"]
