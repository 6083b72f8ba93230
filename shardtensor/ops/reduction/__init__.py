"""Sums, means, variances, extremes and other reductions, and what is accumulated along a dim."""

from . import reductions, scan  # noqa: F401
