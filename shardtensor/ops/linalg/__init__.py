"""Linear algebra: matrix products, decompositions, norms, distances."""

from . import cross, decomposition, einsum, matmul, norm  # noqa: F401
