"""Pooling over windows: fixed, adaptive and fractional; unpooling."""

from . import adaptive_pool, fractional_max_pool, pool, unpool  # noqa: F401
