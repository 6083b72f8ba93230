"""Domain parallelism for PyTorch: cut the input over devices, leave the model alone, get the same numbers.

>>> from shardtensor import ShardTensor, scatter_tensor
"""

from . import gradients, ops, patches  # the first two fill the registry
from .dispatch import allow_gather
from .errors import UnsupportedSharding
from .exchange import set_transport
from .ops.attention.sdpa import attention_method
from .registry import register, registered, unregister
from .scatter import scatter_tensor
from .spec import ShardTensorSpec
from .tensor import ShardTensor

patches.install()

__version__ = "0.1.0"

__all__ = [
    "gradients",
    "ops",
    "patches",
    "ShardTensor",
    "ShardTensorSpec",
    "UnsupportedSharding",
    "allow_gather",
    "attention_method",
    "register",
    "registered",
    "scatter_tensor",
    "set_transport",
    "unregister",
]
