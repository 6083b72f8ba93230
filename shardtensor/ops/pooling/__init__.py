"""Pooling over windows, fixed and adaptive."""

from . import pool  # noqa: F401
