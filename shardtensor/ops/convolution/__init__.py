"""Convolutions and transposed convolutions, with halos of the neighbouring shards."""

from . import conv, conv_transpose  # noqa: F401
