"""Parameters that every rank holds whole: their gradients have to be summed over the ranks that share the input.

A plain weight that meets a sharded input gets, on each rank, only the contribution of that rank's shard. The sum over
the domain is done here, in the gradient's own way back, so ``.grad`` is plain and complete and optimizers, DDP and
FSDP see what they see on one device.

[Note: contributions] The gradient of a DTensor that is Replicate on a mesh dim comes back as ``Partial()`` there,
always, however it was used. Where ranks worked on different shards that is what they have. Where they all did the same
work, one keeps the gradient and the others get zeros: nothing is sent. So gradients of several uses add up as they
are, and FSDP2, which sums over the mesh dims it is given without asking for placements, reduces all of them rightly in
its own communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ._compat import AutogradFunction, alias
from .errors import different_meshes, refuse
from .redistribute import all_reduce, start_all_reduce
from .spec import ShardTensorSpec
from .tensor import ShardTensor, as_gradient, from_part, wrap

__all__ = ["GradientSum", "Kernel", "contributing", "local_parameters", "run_kernel", "unsummed_parameters"]


def local_parameters(op: str, spec: ShardTensorSpec, *parameters: Tensor | None) -> list[Tensor | None]:
    """Plain versions of replicated parameters for local work on an input with ``spec``, gradients seen to.

    Args:
        op: the operator's name, for errors.
        spec: of the sharded input. Gradients are summed over the mesh dims that shard it, in one all-reduce per mesh
            dim for all parameters together.
        parameters: plain tensors (equal on all ranks), replicated DTensors on the same mesh, or None.

    Raises:
        UnsupportedSharding: a parameter that is sharded, or on another mesh.
    """
    result, total = unsummed_parameters(op, spec, *parameters)
    return total.complete(result)


def unsummed_parameters(
    op: str, spec: ShardTensorSpec, *parameters: Tensor | None
) -> tuple[list[Tensor | None], GradientSum]:
    """:func:`local_parameters` for operators that sum the gradients in their own backward, while they do other work."""
    mesh_dims, grad_placements = contributing(spec)
    result: list[Tensor | None] = list(parameters)
    for i, p in enumerate(parameters):
        if isinstance(p, DTensor):
            if p.device_mesh != spec.mesh:
                raise different_meshes(op, [spec, p])
            if not all(q.is_replicate() for q in p.placements):
                raise refuse(
                    op, [spec, p], "the parameter is sharded", "redistribute it to Replicate() before the call"
                )
            result[i] = ShardTensor.from_dtensor(p).to_local(grad_placements=grad_placements)
    differentiable = bool(mesh_dims) and torch.is_grad_enabled()
    needed = [
        differentiable and p is not None and p.requires_grad and not isinstance(p, DTensor) for p in parameters
    ]
    return result, GradientSum(spec.mesh, mesh_dims, tuple(needed))


@lru_cache(maxsize=4096)
def contributing(spec: ShardTensorSpec) -> tuple[tuple[int, ...], tuple[Placement, ...]]:
    """The mesh dims whose ranks each contribute to a parameter's gradient, and how that gradient is placed."""
    mesh_dims = tuple(m for m, p in enumerate(spec.placements) if isinstance(p, Shard) and spec.mesh.size(m) > 1)
    return mesh_dims, tuple(Partial() if m in mesh_dims else Replicate() for m in range(spec.mesh.ndim))


class _SumGradients(AutogradFunction):
    """Identity whose backward sums the gradients over the mesh dims."""

    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, mesh_dims: Sequence[int], *tensors: Tensor) -> Any:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        ctx.mesh, ctx.mesh_dims = mesh, mesh_dims
        return tuple(alias(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        return (None, None, *start_sum(grads, ctx.mesh, ctx.mesh_dims)())


@dataclass(frozen=True, slots=True)
class GradientSum:
    """The sum over ranks that the gradients of an operator's parameters still need.

    Attributes:
        mesh, mesh_dims: over which it goes.
        needed: for each tensor of the operator, whether its gradient, if there is any, needs it.
    """

    mesh: DeviceMesh
    mesh_dims: tuple[int, ...]
    needed: tuple[bool, ...]

    def complete(self, parameters: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The parameters with the sum arranged on their gradients' way back."""
        result = list(parameters)
        if True not in self.needed:
            return result
        chosen = [i for i, p in enumerate(result) if self.needed[i] and p is not None and p.requires_grad]
        if chosen:
            completed = _SumGradients.apply(self.mesh, self.mesh_dims, *(result[i] for i in chosen))
            for i, p in zip(chosen, completed, strict=True):
                result[i] = p
        return result

    def start(self, grads: Sequence[Tensor | None]) -> Callable[[], list[Tensor | None]]:
        """Start it for the parameters' gradients; the function that is returned waits for it and gives all of them."""
        mine = [i for i, g in enumerate(grads) if g is not None and self.needed[i]]
        if not self.mesh_dims or not mine:
            return lambda: list(grads)
        finish = start_sum([grads[i] for i in mine], self.mesh, self.mesh_dims)

        def wait() -> list[Tensor | None]:
            result = list(grads)
            for i, total in zip(mine, finish(), strict=True):
                result[i] = total
            return result

        return wait


def start_sum(
    tensors: Sequence[Tensor | None], mesh: DeviceMesh, mesh_dims: Sequence[int]
) -> Callable[[], list[Tensor | None]]:
    """Each tensor summed over the mesh dims: one all-reduce per mesh dim and dtype for all of them together.

    The first is under way when this returns; the function that is returned waits, and gives the sums. Which of the
    tensors are None must be the same on every rank; it follows from the graph, which is.
    """
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i, t in enumerate(tensors):
        if t is not None:
            by_dtype.setdefault(t.dtype, []).append(i)
    under_way = []
    for members in by_dtype.values():
        flat = torch.cat([tensors[i].reshape(-1) for i in members])  # type: ignore[union-attr]
        flat = flat.detach() if flat.requires_grad else flat
        under_way.append((members, start_all_reduce(flat, mesh.get_group(mesh_dims[0]), overwrite=True)))

    def finish() -> list[Tensor | None]:
        result = list(tensors)
        for members, pending in under_way:
            flat = pending()
            for m in mesh_dims[1:]:
                flat = all_reduce(flat, mesh.get_group(m))
            parts: list[Tensor] = [tensors[i] for i in members]  # type: ignore[misc]
            for i, t, piece in zip(members, parts, flat.split_with_sizes([t.numel() for t in parts]), strict=True):
                total = piece if t.ndim == 1 else piece.view(t.shape)
                result[i] = _Total.apply(t, total) if t.requires_grad and torch.is_grad_enabled() else total
        return result

    return finish


# -- the sum while the operator does other work ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kernel:
    """The local work of an operator with a weight and a bias, whose gradients are sums over ranks.

    Attributes:
        forward: ``(x, weight, bias)``, plain ones, to the result and what else the backward pass needs. Differentiable.
        backward: ``(mask, grad, x, weight, bias, *kept)`` to this rank's gradients of ``x``, weight and bias where
            ``mask`` has True; it is called once for weight and bias, once for ``x``. Under autocast the dtypes differ.
    """

    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor | None, Tensor | None, Tensor | None]]


def run_kernel(
    kernel: Kernel,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    total: GradientSum,
    out: ShardTensorSpec,
) -> ShardTensor:
    """The kernel's result as a ShardTensor. Its backward starts the sum of the parameters' gradients before ``x``'s.

    Args:
        x: a ShardTensor, up to date, or what this rank has put together of one.
        weight, bias, total: what :func:`unsummed_parameters` returned.
        out: the spec of the result, but for its dtype.
    """
    return _WithParameters.apply(x, weight, bias, total, kernel, out)


class _WithParameters(AutogradFunction):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Any, weight: Any, bias: Any, total: GradientSum, kernel: Kernel, out: ShardTensorSpec
    ) -> Any:
        local = x._local_tensor if isinstance(x, ShardTensor) else x
        y, *kept = kernel.forward(local, weight, bias)
        device = local.device.type
        ctx.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        out = out.with_dtype(y.dtype)
        ctx.save_for_backward(x, weight, *kept)
        ctx.bias, ctx.total, ctx.kernel, ctx.out = bias, total, kernel, out  # a bias's values do not matter
        return wrap(y, out)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        x, weight, *kept = ctx.saved_tensors
        kernel, needed = ctx.kernel, ctx.needs_input_grad[:3]
        grad = as_gradient(grad, ctx.out)
        if torch.is_grad_enabled():
            return *_once_more(ctx, x, weight, grad.to_local()), None, None, None
        local = x._local_tensor if isinstance(x, ShardTensor) else x
        args = (grad._local_tensor, local, weight, ctx.bias, *kept)
        device = local.device.type
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            _, grad_w, grad_b = kernel.backward((False, *needed[1:]), *args)
            finish = ctx.total.start([grad_w, grad_b])
            grad_x = kernel.backward((True, False, False), *args)[0] if needed[0] else None
        if grad_x is not None and isinstance(x, ShardTensor):
            grad_x = wrap(grad_x, x._spec)
        return grad_x, *finish(), None, None, None


def _once_more(ctx: Any, x: Any, weight: Tensor | None, grad: Tensor) -> list[Tensor | None]:
    """The gradients for second derivatives: the same computation once more, and differentiated by autograd."""
    with torch.autocast(*ctx.autocast):
        local = x.to_local() if isinstance(x, ShardTensor) else x
        parameters = ctx.total.complete([weight, ctx.bias])
        y = ctx.kernel.forward(local, *parameters)[0]
    needed = ctx.needs_input_grad[:3]
    wanted = [t for t, need in zip((local, weight, ctx.bias), needed, strict=True) if need]
    found = torch.autograd.grad(y, wanted, grad, create_graph=True)
    # With an empty shard some of them depend on less; but what is differentiated again must communicate on every rank.
    nothing = y.new_zeros(())
    for t in (local, *parameters, grad):
        nothing = nothing if t is None else nothing + t.reshape(-1)[:0].sum()
    grads = iter([g + nothing.to(g.dtype) for g in found])
    result = [next(grads) if need else None for need in needed]
    if result[0] is not None and isinstance(x, ShardTensor):
        result[0] = from_part(result[0], x._spec)
    return result


class _Total(AutogradFunction):
    """The sum of all ranks' contributions. Whoever differentiates it does so on every rank alike."""

    @staticmethod
    def forward(ctx: Any, contribution: Tensor, total: Tensor) -> Tensor:  # type: ignore[override]
        return alias(total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None
