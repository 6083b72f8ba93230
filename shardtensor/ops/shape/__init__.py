"""Views, slices, joins, diagonals: what changes a tensor's shape and no element of it."""

from . import cat, diagonal, slice, view, view_copy  # noqa: F401
