"""Between local tensors and ShardTensors, differentiably: what autograd sees of a conversion.

[Note: gradients are global] A gradient is a ShardTensor like any other: a global value in some placement. The
gradient of a Partial is Replicate (each contribution has the derivative of the sum); every other gradient may arrive
in any layout, and whoever needs a particular one redistributes. In two places, ``from_local`` and leaf tensors,
gradients are put into the layout of the tensor they belong to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from .._compat import (
    AutogradFunction,
    DTensorSpec,
    TensorMeta,
    alias,
    new_wide_wrapper,
    new_wrapper,
    same_memory,
    saved_tensors_hooked,
    transforms_active,
)
from ..communication.redistribute import redistribute_local, rounded
from ..layout.spec import ShardTensorSpec
from ..layout.strides import dense_stride
from .copies import check_current
from .levels import InsideLevels
from .planning import has_owner, meta_of, reduced_by_dtensor, replicated_spec, spec_of

# -- wrapping ----------------------------------------------------------------------------------------------------------

# Tensors around local ones: how ShardTensors are made by the modules that their class stands on.

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
            f"{spec.coordinate}. If it was resized or exchanged in place (_local_tensor.resize_(), set_()), make a new "
            "ShardTensor with from_local instead; otherwise please report it"
        )
    if local._is_zerotensor():  # below __torch_dispatch__ kernels would read the memory that it lacks
        local = torch.zeros_like(local)
    make: Any = new_wrapper
    if local.dtype is not spec.tensor_meta.dtype:
        local = rounded(local, spec)
        make = new_wide_wrapper if spec.is_wide(local) else new_wrapper
    made: ShardTensor = make(_class, local, spec, requires_grad=False)
    return made


# -- conversions -------------------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from .tensor import ShardTensor


def from_part(local: Tensor, spec: ShardTensorSpec) -> ShardTensor:
    """What was computed from local parts as this rank's part of a ShardTensor. Differentiable."""
    if local.requires_grad and torch.is_grad_enabled():
        return from_local(local, spec)
    return wrap(local, spec if local.stride() == spec.tensor_meta.stride else _with_strides_of(local, spec))


def from_local(local: Tensor, spec: ShardTensorSpec) -> ShardTensor:
    """A local tensor of the caller's as this rank's part of a ShardTensor, which shares its memory."""
    made: ShardTensor = _FromLocal.apply(local, spec)
    return made


def to_part(
    tensor: Any,
    grad_spec: ShardTensorSpec,
    dtype: torch.dtype | None = None,
    *,
    may_be_absent: bool = False,
    guarded: bool = False,
) -> Tensor:
    """The local tensor of a ShardTensor as it is held, or in ``dtype``.

    Differentiable; ``grad_spec`` is the layout in which its gradient arrives.

    Args:
        may_be_absent: every rank has a gradient, or none has. Otherwise an absent one becomes zero: some kernels of
            torch give none on a rank without elements, and the others would wait for that rank.
        guarded: torch refuses what writes to the result, of which the ShardTensor would not know.
    """
    if tensor._viewed is not None:
        check_current("to_local", tensor, communicates=False)
    local: Tensor = tensor._local_tensor
    if torch.is_grad_enabled() and tensor.requires_grad:
        local = _ToLocal.apply(tensor, grad_spec, dtype, may_be_absent, guarded)
    elif dtype is not None:
        local = local.to(dtype)
    return local


def from_dtensor(dtensor: DTensor) -> ShardTensor:
    """A DTensor as a ShardTensor; its gradient comes back as contributions."""
    if is_shard_tensor(dtensor):
        return dtensor
    if not isinstance(dtensor, DTensor):
        raise TypeError(f"from_dtensor takes a DTensor, not {type(dtensor).__name__}; use from_local")
    dtensor = reduced_by_dtensor(dtensor)
    made: ShardTensor = _FromDTensor.apply(dtensor, spec_of(dtensor))
    return made


def to_dtensor(grad: Any, spec: ShardTensorSpec) -> DTensor:
    """A gradient as a DTensor, in this layout, that of torch.chunk's shards."""
    made: DTensor = _ToDTensor.apply(_laid_out(grad, spec))
    return made


def redistribute_to(tensor: Any, target: ShardTensorSpec) -> ShardTensor:
    """``tensor``, a ShardTensor, in the layout of ``target``, differentiably; itself where it has that already."""
    if tensor._viewed is not None:
        check_current("redistribute", tensor)
    spec, moved = tensor._spec, tensor
    if not spec.lies_like(target):
        # The layout of what may have another dtype: the eigenvectors of a real matrix are complex.
        moved = _Redistribute.apply(tensor, target.with_dtype(spec.tensor_meta.dtype))
    result: ShardTensor = moved
    return result


def promote(tensor: Tensor, mesh: DeviceMesh) -> ShardTensor:
    """A tensor as a ShardTensor: a plain one, equal on every rank, replicated on ``mesh``. Differentiable."""
    if isinstance(tensor, DTensor):
        return from_dtensor(tensor)
    if tensor.device.type != mesh.device_type:
        raise ValueError(f"a plain tensor on {tensor.device} meets a ShardTensor on a mesh of {mesh.device_type}")
    meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
    made: ShardTensor = _FromLocal.apply(tensor, replicated_spec(mesh, meta))
    return made


def as_gradient(grad: Any, spec: ShardTensorSpec) -> Any:
    """A gradient, in whatever layout it arrives (a plain one counts as replicated), in the layout of ``spec``.

    None, an undefined gradient, stays None.
    """
    target = spec._reduced or spec
    if grad is None or getattr(grad, "_spec", None) is target:
        return grad
    return _laid_out(grad, target)


def _laid_out(grad: Any, target: ShardTensorSpec) -> Any:
    if transforms_active():
        raise InsideLevels.at("backward", (grad, target), {})
    grad = promote(grad, target.mesh)
    if grad._spec.lies_like(target):
        return grad
    return _Redistribute.apply(grad, grad._spec.replace(placements=target.placements, sizes=target.sizes))


def _with_strides_of(local: Tensor, spec: ShardTensorSpec) -> ShardTensorSpec:
    """A whole tensor's views depend on its true strides."""
    return spec.replace(meta=meta_of(local)) if spec.is_replicate() else spec


def _wrap_detached(local: Tensor, spec: ShardTensorSpec) -> ShardTensor:
    return wrap(local.detach(), spec if local.stride() == spec.tensor_meta.stride else _with_strides_of(local, spec))


class _FromDTensor(AutogradFunction):
    """A DTensor as a ShardTensor. Both are the same global value, and so are their gradients, of every order.

    torch's ``to_local`` and ``from_local`` lead over local tensors, whose gradients are in a placement that depends on
    the order. Here each class is converted by the other's gradient.
    """

    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, spec: ShardTensorSpec) -> Any:
        ctx.set_materialize_grads(False)
        ctx.grad_spec = spec.for_contributions()
        return _wrap_detached(dtensor._local_tensor, spec)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return None if grad is None else to_dtensor(grad, ctx.grad_spec), None


class _ToDTensor(AutogradFunction):
    """A ShardTensor of torch.chunk's shards as a DTensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Any:
        ctx.set_materialize_grads(False)
        spec, local = tensor._spec, tensor.to_local()
        ctx.mesh = spec.mesh
        # The strides of a shard without elements say nothing, and autograd's copies depend on what the DTensor's are.
        order = local.stride() if local.numel() else spec.tensor_meta.stride
        meta = TensorMeta(spec.shape, dense_stride(spec.shape, order), local.dtype)
        made: Any = new_wrapper
        return made(DTensor, local.detach(), DTensorSpec(spec.mesh, spec.placements, meta), requires_grad=False)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad if grad is None else promote(_on_one_axis_each(grad), ctx.mesh)


def _on_one_axis_each(grad: Any) -> Any:
    """A gradient that DTensor's own operators sharded along one dim on several mesh dims, on the first of these."""
    if is_shard_tensor(grad) or not isinstance(grad, DTensor):
        return grad
    placements = list(grad.placements)
    for m, p in enumerate(placements):
        if p.is_shard() and p in placements[:m]:
            placements[m] = Replicate()
    return grad if placements == list(grad.placements) else grad.redistribute(placements=placements)


class _FromLocal(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: ShardTensorSpec, grad_spec: ShardTensorSpec | None = None) -> Any:
        ctx.set_materialize_grads(False)
        ctx.spec = spec
        ctx.grad_spec = spec.for_gradient() if grad_spec is None else grad_spec
        if saved_tensors_hooked():
            # A checkpoint recomputes when a saved tensor is asked for, until it has all of them. What torch's kernels
            # save depends on the shard, and some save nothing of an empty one: that rank would communicate less. Here
            # all ranks save something last, and ask for it first.
            ctx.save_for_backward(local.new_empty(0))
        return _wrap_detached(local, spec)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        _ = ctx.saved_tensors
        if grad is None:
            return None, None, None
        if getattr(grad, "_spec", None) is not ctx.grad_spec:
            grad = _laid_out(grad, ctx.grad_spec)
        if not torch.is_grad_enabled():
            return grad.to_local(), None, None
        return grad.to_local(grad_placements=_twice(ctx.spec, ctx.grad_spec)), None, None


def _twice(spec: ShardTensorSpec, grad_spec: ShardTensorSpec) -> list[Placement]:
    """How derivatives by the gradient in ``grad_spec`` of a tensor with this spec lie on the ranks.

    What they contribute to a Partial is different: so is what they do with its one gradient. Their contributions to a
    gradient all have the derivative of the sum.
    """
    found = list(grad_spec.placements)
    for m, (p, q) in enumerate(zip(spec.placements, grad_spec.placements, strict=True)):
        if q.is_partial():
            found[m] = Replicate()
        elif p.is_partial() and q.is_replicate():
            found[m] = Partial()
    return found


class _ToLocal(AutogradFunction):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Any,
        grad_spec: ShardTensorSpec,
        dtype: torch.dtype | None,
        may_be_absent: bool,
        guarded: bool,
    ) -> Tensor:
        ctx.set_materialize_grads(not may_be_absent)
        ctx.spec, ctx.grad_spec = tensor._spec, grad_spec
        local: Tensor = tensor._local_tensor
        if dtype is not None and local.dtype is not dtype:
            return local.to(dtype)
        return alias(local) if guarded else local.detach()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is not None and torch.is_grad_enabled():
            twice = ctx.grad_spec.replace(placements=_twice(ctx.spec, ctx.grad_spec))
            grad = _FromLocal.apply(grad, ctx.grad_spec, twice)
        elif grad is not None:
            grad = from_part(grad, ctx.grad_spec)
        return grad, None, None, None, None


class _Redistribute(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, tensor: Any, target: ShardTensorSpec) -> Any:
        ctx.set_materialize_grads(False)
        ctx.source = tensor._spec
        local = redistribute_local(tensor._local_tensor, tensor._spec, target)
        if same_memory(local, tensor._local_tensor):
            # A slice must not keep the whole tensor alive; an alias of the whole is one.
            local = alias(local) if local.shape == tensor._local_tensor.shape else local.clone()
        return wrap(local, target)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is not None and has_owner(ctx.source):  # nobody else needs it
            return _laid_out(grad, ctx.source), None
        return as_gradient(grad, ctx.source), None
