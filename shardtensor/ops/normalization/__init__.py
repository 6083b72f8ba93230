"""Batch, instance, layer, group and RMS normalization."""

from . import batch_instance, layer_group_rms  # noqa: F401
