"""Operators on each element: arithmetic, activations, softmax, dropout, random numbers, optimizers."""

from . import activations, comparison, dropout, foreach, fused_optimizers, pointwise, random, softmax  # noqa: F401
