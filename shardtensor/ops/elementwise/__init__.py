"""Operators on each element by itself: pointwise ones, activations, random numbers, fused optimizers."""

from . import activations, fused_optimizers, pointwise, random  # noqa: F401
