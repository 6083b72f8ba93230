"""Domain parallelism for PyTorch: cut the input over devices, leave the model alone, get the same numbers.

>>> from shardtensor import ShardTensor, scatter_tensor
"""

from . import gradients, ops, patches  # the first two fill the registry
from .context import allow_gather
from .errors import UnsupportedSharding
from .exchange import set_transport
from .operators import Arguments, Composed, LocalPlan, Plan, operator
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
    "Arguments",
    "Composed",
    "LocalPlan",
    "Plan",
    "ShardTensor",
    "ShardTensorSpec",
    "UnsupportedSharding",
    "allow_gather",
    "attention_method",
    "operator",
    "register",
    "registered",
    "scatter_tensor",
    "set_transport",
    "unregister",
]
