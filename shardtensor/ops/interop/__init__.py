"""Where a ShardTensor meets what is not one: collectives of ``torch.distributed``, NumPy, DLPack."""

from . import c10d, export  # noqa: F401
