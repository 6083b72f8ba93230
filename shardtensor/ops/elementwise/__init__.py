"""Operators on each element: arithmetic, activations, softmax, dropout, random numbers, optimizers."""

from . import activations, comparison, dropout, fused_optimizers, pointwise, random, softmax  # noqa: F401
