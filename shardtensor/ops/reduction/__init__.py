"""Sums, means, variances, extremes and other reductions, and what is accumulated along a dim."""

from . import extremum, logsumexp, reductions, scan, var  # noqa: F401
