"""What DDP and FSDP2 take from gradients, and when."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed import _composable_state
from torch.nn.parallel import DistributedDataParallel

from . import goes_into_graph
from .replaced import replace


class _FullySharded(WeakKeyDictionary[Any, Any]):
    """torch's states of the modules to which FSDP2 was applied, which remembers whether there was one.

    What it holds does not tell that: modules are in cycles, so they go when garbage is collected, which happens at
    another time on each rank. Ranks would decide differently when gradients are summed.
    """

    def __init__(self, found: Any) -> None:
        super().__init__(found)
        self.applied = len(self) > 0

    def __setitem__(self, module: Any, state: Any) -> None:
        super().__setitem__(module, state)
        self.applied = True


replace("torch.distributed._composable_state:_module_state_mapping", _FullySharded)
_fully_sharded: Any = _composable_state._module_state_mapping


def takes_gradient_late(plain: torch.Tensor) -> bool:
    """Whether a plain tensor may get its gradient, if it gets one, at the end of a backward pass.

    Not where gradients are taken before: a hook does, FSDP2 was applied, or DDP runs a forward pass. To a tracer all
    parameters are views of what it was given; what becomes of gradients follows after its graph.
    """
    if not plain.requires_grad:
        return True
    if _fully_sharded.applied or DistributedDataParallel._active_ddp_module is not None:
        return False
    return (plain.is_leaf and not plain._post_accumulate_grad_hooks) or goes_into_graph(plain)


def forget_fully_sharded() -> None:
    """As if FSDP2 had not been applied. Its modules must be gone. All ranks call it, or none."""
    _fully_sharded.applied = False
