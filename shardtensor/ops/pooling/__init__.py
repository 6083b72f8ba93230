"""Pooling over windows: fixed, adaptive and fractional; unpooling."""

from . import fractional_max_pool, pool, unpool  # noqa: F401
