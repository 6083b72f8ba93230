"""Where a ShardTensor meets what is not one: collectives of ``torch.distributed``, NumPy, DLPack, opt_einsum."""

from . import c10d, export, opt_einsum  # noqa: F401
