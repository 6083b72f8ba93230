"""Convolutions and transposed convolutions, with halos of the neighbouring shards."""

from . import conv  # noqa: F401
