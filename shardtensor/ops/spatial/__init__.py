"""Operators on images and volumes: padding, interpolation, ``unfold`` and ``fold``."""

from . import interpolate, pad, unfold  # noqa: F401
