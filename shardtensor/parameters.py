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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ._compat import AutogradFunction, alias
from .caches import cached
from .redistribute import start_sums
from .spec import ShardTensorSpec

__all__ = ["GradientSum", "contributing", "start_sum"]


@cached(maxsize=4096)
def contributing(spec: ShardTensorSpec) -> tuple[tuple[int, ...], tuple[Placement, ...]]:
    """The mesh dims whose ranks each contribute to a parameter's gradient, and how that gradient is placed."""
    mesh_dims = tuple(m for m, p in enumerate(spec.placements) if isinstance(p, Shard) and spec.mesh.size(m) > 1)
    return mesh_dims, tuple(Partial() if m in mesh_dims else Replicate() for m in range(spec.mesh.ndim))


class _SumGradients(AutogradFunction):
    """Identity whose backward sums the gradients over the mesh dims."""

    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, mesh_dims: Sequence[int], *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.mesh, ctx.mesh_dims = mesh, mesh_dims
        return tuple(alias(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
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

    def start(self, grads: Sequence[Tensor | None], *, overwrite: bool = False) -> Callable[[], list[Tensor | None]]:
        """Start it for the parameters' gradients; the function that is returned waits for it and gives all of them.

        Args:
            overwrite: the gradients are new tensors, which nothing else refers to.
        """
        result = list(grads)
        mine = [i for i, needed in enumerate(self.needed) if needed and grads[i] is not None]
        if not self.mesh_dims or not mine:
            return lambda: result
        finish = start_sum([grads[i] for i in mine], self.mesh, self.mesh_dims, overwrite=overwrite)

        def wait() -> list[Tensor | None]:
            for i, total in zip(mine, finish(), strict=True):
                result[i] = total
            return result

        return wait


def start_sum(
    tensors: Sequence[Tensor | None], mesh: DeviceMesh, mesh_dims: Sequence[int], *, overwrite: bool = False
) -> Callable[[], list[Tensor | None]]:
    """Each tensor summed over the mesh dims: one all-reduce per mesh dim and dtype for all of them together.

    The first is under way when this returns; the function that is returned waits, and gives the sums. Which of the
    tensors are None must be the same on every rank; it follows from the graph, which is.

    Args:
        overwrite: the tensors are new ones, which nothing else refers to.
    """
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i, t in enumerate(tensors):
        if t is not None:
            by_dtype.setdefault(t.dtype, []).append(i)
    first = mesh.get_group(mesh_dims[0])
    under_way = [
        (members, start_sums([tensors[i] for i in members], first, overwrite=overwrite))  # type: ignore[misc]
        for members in by_dtype.values()
    ]

    def finish() -> list[Tensor | None]:
        result = list(tensors)
        for members, pending in under_way:
            totals = pending()
            for m in mesh_dims[1:]:
                totals = start_sums(totals, mesh.get_group(m), overwrite=True)()
            for i, total in zip(members, totals, strict=True):
                t = tensors[i]
                differentiable = torch.is_grad_enabled() and t is not None and t.requires_grad
                result[i] = _Total.apply(t, total) if differentiable else total
        return result

    return finish


class _Total(AutogradFunction):
    """The sum of all ranks' contributions. Whoever differentiates it does so on every rank alike."""

    @staticmethod
    def forward(ctx: Any, contribution: Tensor, total: Tensor) -> Tensor:
        return alias(total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None
