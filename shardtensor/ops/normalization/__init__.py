"""Batch, instance, layer, group and RMS normalization."""

from . import batch_instance, layer_group_rms, sync_batch_norm  # noqa: F401
