"""Views, slices, joins, repetitions, flips, diagonals: what moves elements and changes none."""

from . import cat, diagonal, flip, repeat, slice, view  # noqa: F401
