"""Linear algebra: matrix products, decompositions, distances."""

from . import decomposition, distance, matmul  # noqa: F401
