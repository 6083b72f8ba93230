"""Between local tensors and ShardTensors, differentiably: what autograd sees of a conversion.

The functions take the class of tensors to make, ShardTensor.

[Note: gradients are global] A gradient is a ShardTensor like any other: a global value in some placement. The
gradient of a Partial is Replicate (each contribution has the derivative of the sum); every other gradient may arrive
in any layout, and whoever needs a particular one redistributes. In two places, ``from_local`` and leaf tensors,
gradients are put into the layout of the tensor they belong to.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from ._compat import AutogradFunction, TensorMeta, alias, same_memory, without_zero_tensor
from .copies import check_current
from .dispatch import wrapper
from .planning import has_owner, meta_of, spec_of
from .redistribute import redistribute_local
from .spec import ShardTensorSpec

__all__ = ["as_gradient", "from_dtensor", "from_local", "from_part", "promote", "redistributed", "to_local"]

D = TypeVar("D", bound=DTensor)


def from_part(cls: type[D], local: Tensor, spec: ShardTensorSpec) -> D:
    """What was computed from local parts as this rank's part of a ShardTensor."""
    if local.requires_grad and torch.is_grad_enabled():
        return from_local(cls, local, spec)
    return _wrapped(cls, local, spec)


def from_local(cls: type[D], local: Tensor, spec: ShardTensorSpec) -> D:
    """A local tensor of the caller's as this rank's part of a ShardTensor, which shares its memory."""
    made: D = _FromLocal.apply(cls, local, spec, None)
    return made


def to_local(tensor: Any, grad_spec: ShardTensorSpec, dtype: torch.dtype | None = None) -> Tensor:
    """The local tensor, as it is held or in ``dtype``, whose gradient will have the layout ``grad_spec``."""
    local: Tensor = _ToLocal.apply(tensor, grad_spec, dtype)
    return local


def from_dtensor(cls: type[D], dtensor: DTensor) -> D:
    """A DTensor as a ShardTensor; its gradient comes back as contributions."""
    if isinstance(dtensor, cls):
        return dtensor
    if not isinstance(dtensor, DTensor):
        raise TypeError(f"from_dtensor takes a DTensor, not {type(dtensor).__name__}; use from_local")
    spec = spec_of(dtensor)
    grad_spec = spec.for_contributions()
    local = dtensor.to_local(grad_placements=grad_spec.placements)
    made: D = _FromLocal.apply(cls, local, spec, grad_spec)
    return made


def redistributed(tensor: Any, target: ShardTensorSpec) -> Any:
    """``tensor`` in the layout of ``target``; itself where it has that already."""
    if tensor._viewed is not None:
        check_current("redistribute", tensor)
    spec = tensor._spec
    if spec.lies_like(target):
        return tensor
    # The layout of what may have another dtype: the eigenvectors of a real matrix are complex.
    return _Redistribute.apply(tensor, target.with_dtype(spec.tensor_meta.dtype))


def promote(cls: type[D], plain: Tensor, mesh: DeviceMesh) -> D:
    """A plain tensor, equal on every rank, as a replicated ShardTensor on ``mesh``."""
    if plain.device.type != mesh.device_type:
        raise ValueError(f"a plain tensor on {plain.device} meets a ShardTensor on a mesh of {mesh.device_type}")
    meta = TensorMeta(plain.shape, plain.stride(), plain.dtype)
    spec = ShardTensorSpec.of(mesh, [Replicate()] * mesh.ndim, meta, (None,) * mesh.ndim)
    made: D = _Promote.apply(cls, plain, spec)
    return made


def as_gradient(cls: type[DTensor], grad: Any, spec: ShardTensorSpec) -> Any:
    """A gradient, in whatever layout it arrives (a plain one counts as replicated), in the layout of ``spec``."""
    if grad is None:  # autograd hands undefined gradients to hooks, too
        return None
    return _laid_out(cls, grad, spec.for_gradient())


def _laid_out(cls: type[DTensor], grad: Any, target: ShardTensorSpec) -> Any:
    grad = from_dtensor(cls, grad) if isinstance(grad, DTensor) else promote(cls, grad, target.mesh)
    if grad._spec.lies_like(target):
        return grad
    return _Redistribute.apply(grad, grad._spec.replace(placements=target.placements, sizes=target.sizes))


def _wrapped(cls: type[D], local: Tensor, spec: ShardTensorSpec) -> D:
    if local.stride() != spec.stride and spec.is_replicate():
        spec = spec.replace(meta=meta_of(local))  # a whole tensor's views depend on its true strides
    return wrapper(cls, local, spec)


class _FromLocal(AutogradFunction):
    @staticmethod
    def forward(
        ctx: Any, cls: type[DTensor], local: Tensor, spec: ShardTensorSpec, grad_spec: ShardTensorSpec | None
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.cls = spec, cls
        ctx.grad_spec = spec.for_gradient() if grad_spec is None else grad_spec
        return _wrapped(cls, local.detach(), spec)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return None, None, None, None
        grad = _laid_out(ctx.cls, grad, ctx.grad_spec)
        if not torch.is_grad_enabled():
            return None, grad.to_local(), None, None
        # What the ranks contribute to a Partial is different: so is what they do with its one gradient.
        pairs = zip(ctx.spec.placements, ctx.grad_spec.placements, strict=True)
        contributed = [Partial() if p.is_partial() and q.is_replicate() else q for p, q in pairs]
        return None, grad.to_local(grad_placements=contributed), None, None


class _ToLocal(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, tensor: Any, grad_spec: ShardTensorSpec, dtype: torch.dtype | None) -> Tensor:
        # An absent gradient becomes zero: some kernels of torch give none on a rank without elements, and the others
        # would wait for that rank.
        ctx.cls, ctx.grad_spec = type(tensor), grad_spec
        local: Tensor = tensor._local_tensor
        return alias(local) if dtype is None or local.dtype is dtype else local.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return from_part(ctx.cls, grad, ctx.grad_spec), None, None


class _Redistribute(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, tensor: Any, target: ShardTensorSpec) -> Any:
        ctx.set_materialize_grads(False)
        ctx.cls, ctx.source = type(tensor), tensor._spec
        local = redistribute_local(tensor._local_tensor, tensor._spec, target)
        if same_memory(local, tensor._local_tensor):
            # A slice must not keep the whole tensor alive; an alias of the whole is one.
            local = alias(local) if local.shape == tensor._local_tensor.shape else local.clone()
        return wrapper(ctx.cls, local, target)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is not None and has_owner(ctx.source):  # nobody else needs it
            return _laid_out(ctx.cls, grad, ctx.source), None
        return as_gradient(ctx.cls, grad, ctx.source), None


class _Promote(AutogradFunction):
    """A plain tensor, equal on every rank, as a replicated ShardTensor; its gradient comes back plain and complete."""

    @staticmethod
    def forward(ctx: Any, cls: type[DTensor], plain: Tensor, spec: ShardTensorSpec) -> Any:
        ctx.set_materialize_grads(False)
        ctx.cls, ctx.spec = cls, spec
        return wrapper(cls, without_zero_tensor(plain.detach()), spec)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return None, None if grad is None else as_gradient(ctx.cls, grad, ctx.spec).to_local(), None
