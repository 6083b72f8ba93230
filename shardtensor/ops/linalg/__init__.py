"""Linear algebra: matrix products, decompositions, norms, distances."""

from . import cross, decomposition, distance, einsum, linear, matmul, norm  # noqa: F401
