"""Losses: element by element, over classes, and ``ctc_loss``."""

from . import cross_entropy, elementwise  # noqa: F401
