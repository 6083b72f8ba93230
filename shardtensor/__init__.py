"""Domain parallelism for PyTorch: shard the input over devices, leave the model alone, get the same numbers.

>>> from shardtensor import ShardTensor, scatter_tensor
"""

from .observe.command_line import answer_help

answer_help()  # before torch is imported, which takes seconds

from . import debug, extend, neighbors, ops  # noqa: F401
from .communication.exchange import set_transport
from .context import allow_gather, half_precision
from .dispatch import attributes, gradients, program_functions, uneven, user_strategies  # noqa: F401  # some put their hooks in place
from .dispatch.patches import install
from .dispatch.registry import supports
from .dispatch.scatter import distribute_tensor, gather_tensor, scatter_tensor
from .dispatch.tensor import ShardTensor
from .errors import LocalSizeError, LostRankError, RanksDiffer, ThreadConflict, UnsupportedSharding
from .layout.spec import ShardTensorSpec
from .neighbors.partition import Partition, partition
from .observe.drawing import visualize
from .observe.explain import advise, explain
from .observe.timelines import timeline
from .operators import transforms  # noqa: F401  # puts torch.func's transforms in place
from .ops.attention.sdpa import attention_method
from .ranks.history import take_turns

install()

__version__ = "0.1.0"

__all__ = [
    # tensors
    "ShardTensor",
    "ShardTensorSpec",
    "distribute_tensor",
    "gather_tensor",
    "scatter_tensor",
    # how operators run
    "LocalSizeError",
    "LostRankError",
    "RanksDiffer",
    "ThreadConflict",
    "UnsupportedSharding",
    "allow_gather",
    "attention_method",
    "half_precision",
    "set_transport",
    "take_turns",
    # graphs; shardtensor.neighbors has searches for neighbours
    "Partition",
    "partition",
    # look before you train
    "advise",
    "explain",
    "visualize",
    "timeline",
    # which operators there are; shardtensor.extend has what adds new ones
    "supports",
]


def __dir__() -> list[str]:
    """The public names, and the modules that are imported with them."""
    return [*__all__, "__version__", "debug", "extend", "neighbors"]
