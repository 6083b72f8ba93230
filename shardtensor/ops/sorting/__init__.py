"""Sorting, order statistics, quantiles, searching, distinct values and histograms."""

from . import histogram, quantile, searchsorted, sort, unique  # noqa: F401
