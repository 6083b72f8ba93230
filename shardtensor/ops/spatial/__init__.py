"""Operators on images and volumes: padding, interpolation, grids, ``unfold``, ``pixel_shuffle``."""

from . import grid_sample, interpolate, pad, pixel_shuffle, unfold  # noqa: F401
