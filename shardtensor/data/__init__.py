"""From files to shards: one rank reads and scatters (:class:`ShardLoader`), or each rank reads its own slice.

>>> from shardtensor.data import ShardLoader, SliceDataset, read, write
"""

from .loader import ShardLoader
from .slices import PendingWrite, SliceDataset, read, write

__all__ = ["PendingWrite", "ShardLoader", "SliceDataset", "read", "write"]
