"""``implicit_replication``: tensors that a network makes itself become ShardTensors.

The functions that make tensors are called by a network without any ShardTensor, so neither ``__torch_function__`` nor a
rule sees them. A mode of torch's does. What torch's Python code and this package make for themselves, in the course of
an operator, a hook of FSDP2 or the backward pass, stays plain: the mode looks at the module that calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from .._compat import is_traced, not_in_graphs, same_memory, tracing
from ..layout.placements import given_mesh
from ..ranks.first_use import note_operand
from .open_layouts import leave_open
from .planning import flat
from .registry import FUNCTIONS
from .tensor import ShardTensor, promote
from .torch_functions import ENGINE

_RANDOM = frozenset(
    {
        *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal),
        *(torch.rand_like, torch.randn_like, torch.randint_like),
    }
)
_FACTORIES = _RANDOM | {
    *(torch.zeros, torch.ones, torch.empty, torch.full, torch.eye, torch.arange, torch.linspace, torch.logspace),
    *(torch.tril_indices, torch.triu_indices, torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like),
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full),
}
_FROM_NUMBERS = frozenset({torch.tensor, torch.as_tensor})
_NUMBERS = (bool, int, float, complex, list, tuple)

_PACKAGES = ("torch", __name__.partition(".")[0])
# torch's Python code through which a network computes: layers, functions, operators of tensors.
_COMPUTES = ("torch.nn.modules.", "torch.nn.functional", "torch.functional", "torch.overrides", "torch._tensor")


@not_in_graphs("enter shardtensor.implicit_replication() around the compiled function's call")
@contextmanager
def implicit_replication(mesh: DeviceMesh | None = None) -> Iterator[None]:
    """Make ShardTensors of the tensors that a network creates, so that sharded values can be written to them.

    Inside, ``torch.zeros``, ``ones``, ``empty``, ``full``, ``eye``, ``arange``, ``linspace``, ``rand``, ``randn``,
    ``randint``, ``randperm``, the like, and their ``*_like`` and ``new_*`` forms return replicated ShardTensors, and so
    do ``torch.tensor`` and ``as_tensor`` of numbers. Their layout is open, as is that of what is computed from them:
    the first sharded value that is written to such a tensor, or to a view of it, gives it its sizes, along the dims
    that both have, and nothing is gathered. Sums over an index (``scatter_add_``, ``index_add_``) are sharded where
    each rank's part of the index names rows of its own; otherwise the ranks' contributions are summed.

    The mode holds for the calling thread. Random tensors have the values of one device if all ranks have the same
    seed, which they must have in any case. Tensors on other devices than the mesh's, those that require grad, what
    torch's own Python code makes, and what is made of tensors and arrays remain plain. Enter it around the network's
    call, not where its parameters are made; activation checkpointing recomputes a network's part inside it if
    ``backward()`` is called inside it, too. In compiled functions it has no effect.

    Args:
        mesh: of the network's ShardTensors; default: the mesh of the surrounding ``with mesh:``.

    Raises:
        RuntimeError: no mesh is given, and none surrounds the call.

    Example::

        with shardtensor.implicit_replication(mesh):
            y = torch.zeros(x.shape[0], 8, *x.shape[2:])  # replicated
            y[:, :4] = x[:, :4]                           # sharded like x
    """
    with _Mode(given_mesh(mesh)):
        yield


class _Mode(TorchFunctionMode):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in ENGINE and ShardTensor in types:
            with self:  # for what is recomputed
                return FUNCTIONS[func](*args, **kwargs)
        result = func(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        internal = caller.partition(".")[0] in _PACKAGES
        if type(result) is ShardTensor:
            computed = result._spec.is_replicate() and (not internal or caller.startswith(_COMPUTES))
            if computed and result._open is None and not _is_old(result, args, kwargs):
                leave_open(result)
        elif not internal and self._makes(func, args, kwargs) and self._may_be_replicated(result):
            if func in _RANDOM:  # its seed may be another on each rank
                note_operand(func.__name__, result, self.mesh)
            result = promote(result, self.mesh)
            leave_open(result)
        return result

    @staticmethod
    def _makes(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call makes a tensor from nothing or from numbers; one of an array may share its memory."""
        given = args[0] if args else kwargs.get("data")
        return func in _FACTORIES or (func in _FROM_NUMBERS and isinstance(given, _NUMBERS))

    def _may_be_replicated(self, t: Any) -> bool:
        if not (type(t) is Tensor or is_traced(t)) or t.requires_grad or t.layout is not torch.strided or tracing():
            return False
        return bool(t.device.type == self.mesh.device_type)


def _is_old(result: ShardTensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a result may be one of the arguments, or a view of it."""
    if tracing() or result._viewed is not None:
        return True
    locals_ = [
        a._local_tensor if type(a) is ShardTensor else a
        for a in flat(args, kwargs)
        if isinstance(a, Tensor) and a.layout is torch.strided
    ]
    return any(same_memory(result._local_tensor, local) for local in locals_)
