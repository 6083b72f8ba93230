"""Domain parallelism together with data parallelism (FSDP2) and tensor parallelism, on one mesh with named axes.

:func:`init` makes the mesh, and has what a training program needs of it. Each of its steps is a function of this module
or of torch, so a program may take them one by one.
"""

from ..ranks.equal_values import synchronize
from .capture import capture
from .domain_parallel import DomainParallel
from .prepare import Parallelized, clip_grad_norm_, contribute_gradients, parallelize, tensor_parallel
from .setup import Parallel, device, init

__all__ = [
    "DomainParallel",
    "Parallel",
    "Parallelized",
    "capture",
    "clip_grad_norm_",
    "contribute_gradients",
    "device",
    "init",
    "parallelize",
    "synchronize",
    "tensor_parallel",
]
