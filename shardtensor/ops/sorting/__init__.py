"""Sorting, order statistics, quantiles, distinct values and histograms."""

from . import histogram, quantile, sort, unique  # noqa: F401
