"""Domain parallelism for PyTorch: shard the input over devices, leave the model alone, get the same numbers.

>>> from shardtensor import ShardTensor, scatter_tensor
"""

from . import debug, gradients, ops, patches, strategies  # noqa: F401  # all but patches fill the registry
from .context import allow_gather
from .drawing import visualize
from .errors import LocalSizeError, LostRankError, ThreadConflict, UnsupportedSharding
from .exchange import set_transport
from .history import take_turns
from .operators import Arguments, operator
from .ops.attention.sdpa import attention_method
from .patches import install
from .plan import Composed, LocalPlan, Plan
from .preview import advise, explain
from .registry import Support, register, registered, supports, unregister
from .replication import implicit_replication
from .scatter import scatter_tensor
from .spec import ShardTensorSpec
from .tensor import ShardTensor
from .timelines import timeline

install()

__version__ = "0.1.0"

__all__ = [
    # tensors
    "ShardTensor",
    "ShardTensorSpec",
    "scatter_tensor",
    # how operators run
    "LocalSizeError",
    "LostRankError",
    "ThreadConflict",
    "UnsupportedSharding",
    "allow_gather",
    "attention_method",
    "implicit_replication",
    "set_transport",
    "take_turns",
    # look before you train
    "advise",
    "explain",
    "visualize",
    "timeline",
    # which operators there are, and new ones
    "Arguments",
    "Composed",
    "LocalPlan",
    "Plan",
    "Support",
    "operator",
    "register",
    "registered",
    "supports",
    "unregister",
]
