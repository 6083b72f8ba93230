"""Tensors around local ones: how ShardTensors are made by the modules that their class stands on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from torch import Tensor
from torch.distributed.tensor import DTensor

from .._compat import new_wide_wrapper, new_wrapper
from ..communication.redistribute import rounded
from ..layout.spec import ShardTensorSpec

if TYPE_CHECKING:
    from .tensor import ShardTensor

Class = TypeVar("Class", bound=type)

_class: Any = DTensor


def makes_tensors(cls: Class) -> Class:
    """Decorator of ShardTensor: its instances are what is made here."""
    global _class
    _class = cls
    return cls


def is_shard_tensor(value: object) -> TypeGuard[ShardTensor]:
    """Whether it is a ShardTensor, rather than a plain tensor, another DTensor, or anything else."""
    return isinstance(value, _class)


def wrap(local: Tensor, spec: ShardTensorSpec) -> ShardTensor:
    """A ShardTensor around ``local``, which must have the shape that the spec says. Not differentiable."""
    if local.shape != spec.own_shape:
        raise RuntimeError(
            f"the local tensor has shape {tuple(local.shape)} instead of {tuple(spec.own_shape)}, for {spec} at "
            f"{spec.coordinate}. If it was resized or exchanged in place (to_local().resize_(), set_()), make a new "
            "ShardTensor with from_local instead; otherwise please report it"
        )
    make: Any = new_wrapper
    if local.dtype is not spec.tensor_meta.dtype:
        local = rounded(local, spec)
        make = new_wide_wrapper if spec.is_wide(local) else new_wrapper
    made: ShardTensor = make(_class, local, spec, requires_grad=False)
    return made
