"""Operators on each element: arithmetic, activations, softmax, dropout, random numbers, optimizers."""

from . import optimizers, pointwise, random, softmax  # noqa: F401
