"""Losses: element by element, and over classes."""

from . import cross_entropy, elementwise  # noqa: F401
