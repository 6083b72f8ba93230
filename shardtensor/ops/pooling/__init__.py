"""Pooling over windows: fixed, adaptive and fractional; unpooling."""

from . import adaptive_pool, pool  # noqa: F401
