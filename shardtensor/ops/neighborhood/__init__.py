"""Neighborhood attention, natten's: every token attends to a window around it."""

from . import attention  # noqa: F401
