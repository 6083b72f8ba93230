"""Linear algebra: matrix products, decompositions, norms, distances."""

from . import cross, decomposition, distance, matmul, norm  # noqa: F401
