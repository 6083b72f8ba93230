"""Sorting, order statistics, quantiles, searching, distinct values and histograms."""

from . import histogram, sort, unique  # noqa: F401
