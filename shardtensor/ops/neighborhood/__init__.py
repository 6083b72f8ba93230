"""Neighborhood attention: natten's, where every token attends to a window around it, and torch-harmonics'."""

from . import attention, sphere  # noqa: F401
