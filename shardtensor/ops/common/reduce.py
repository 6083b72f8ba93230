"""What operators that reduce dims share: their result's spec, neutral elements, dtypes, and reductions over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard

from ..._compat import AutogradFunction, OpOverload
from ..._compat.c10d import group_along
from ...communication.redistribute import all_gather, start_all_reduce
from ...dispatch.aten_calls import run
from ...dispatch.planning import AtenCall, meta_of
from ...dispatch.registry import DECLINED
from ...dispatch.tensor import ShardTensor, as_gradient, wrap
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ...operators.arguments import Arguments
from ...operators.autocast import autocast_dtype
from ...operators.declaration import Composed


def reduced_dims(dim: int | Sequence[int] | None, ndim: int) -> list[int]:
    """Normalized dims of a reduction's ``dim`` argument; None and () mean all.

    Raises:
        IndexError, RuntimeError: dims that do not exist or are named twice, with torch's texts.
    """
    given = [dim] if isinstance(dim, int) else list(dim or ())
    room = max(ndim, 1)
    for d in given:
        if not -room <= d < room:
            raise IndexError(f"Dimension out of range (expected to be in range of [{-room}, {room - 1}], but got {d})")
    dims = sorted({d % room for d in given})
    if len(dims) < len(given):
        raise RuntimeError(f"a dim appears multiple times in the list of dims {tuple(given)}")
    return [d for d in dims if d < ndim] if dims else list(range(ndim))


def reduced_spec(spec: ShardTensorSpec, meta: Tensor, dims: Sequence[int], keepdim: bool, op: str) -> ShardTensorSpec:
    """Spec of a reduction's result: Partial where a sharded dim is reduced, the other dims as they are."""

    def axis(old: AxisLayout) -> AxisLayout:
        p = old.placement
        if not isinstance(p, Shard):
            return old
        if p.dim in dims:
            return AxisLayout(Partial(op))
        return old if keepdim else AxisLayout(Shard(p.dim - sum(d < p.dim for d in dims)), old.sizes)

    return spec.with_layout([axis(old) for old in spec.layout], meta_of(meta))


def neutral_element(op: str, dtype: torch.dtype) -> bool | int | float:
    """What an empty shard contributes."""
    if dtype == torch.bool:
        return op in ("min", "product")
    if op in ("sum", "product"):
        return int(op == "product")
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    return info.min if op == "max" else info.max


def check_dtype(call: AtenCall, **replaced: object) -> None:
    """Let torch's kernel check the dtype, on one element: ranks with empty shards would not call it.

    Args:
        replaced: keyword arguments that are others for one element.

    Raises:
        Exception: torch's own, on every rank alike.
    """
    device = call.specs[0].mesh.device_type

    def one(a: Any) -> Any:
        if isinstance(a, (Tensor, ShardTensorSpec)):
            meta = a.tensor_meta if isinstance(a, ShardTensorSpec) else a
            return torch.ones([1] * len(a.shape), dtype=meta.dtype, device=device)
        return a

    call.func(*map(one, call.args), **{**call.kwargs, **replaced})


def count_along(spec: ShardTensorSpec, dims: Sequence[int]) -> int:
    """How many elements one of the result is made of."""
    return math.prod(spec.shape[d] for d in dims)


def kernel_dtype(
    call: Arguments, function: Callable[..., Tensor], spec: ShardTensorSpec, *args: object, **kwargs: object
) -> torch.dtype:
    """The dtype of what ``function`` returns for tensors with ``spec``, from its kernel on one element.

    That is what autocast, which acts on the local work, makes it.

    Raises:
        Exception: torch's own, of dtypes that the kernel does not take: ranks with empty shards would not see them.
    """
    shapes, dtypes = [[1] * len(spec.shape)], [spec.tensor_meta.dtype]
    return autocast_dtype(lambda one: function(one, *args, **kwargs), shapes, dtypes, call.device)


def mesh_dims_of(spec: ShardTensorSpec, dims: Sequence[int]) -> list[int]:
    """The mesh dims that shard one of these tensor dims."""
    return [m for d, m in spec.sharded_dims().items() if d in dims]


def rank_reduction(spec: ShardTensorSpec, mesh_dims: Sequence[int]) -> Callable[[Tensor, str], Tensor]:
    """What reduces a local tensor over the ranks along these mesh dims: ``(local, op)`` to the reduction.

    ``local`` is a new tensor, which may become the result.
    """
    groups = [group_along(spec.mesh, m) for m in mesh_dims]

    def reduce(local: Tensor, op: str) -> Tensor:
        for group in groups:
            local = start_all_reduce(local, group, op, overwrite=True)()
        return local

    return reduce


def maximum_over(x: Tensor, dims: list[int] | tuple[int, ...]) -> Tensor:
    """The maxima over ``dims``, which stay with length 1; -inf where there is nothing."""
    if 0 in (x.shape[d] for d in dims):
        return x.new_full([1 if d in dims else n for d, n in enumerate(x.shape)], float("-inf"))
    return x.amax(dims, keepdim=True)


# -- pick --------------------------------------------------------------------------------------------------------------

# Operators that pick elements along a dim and tell where they were: values, indices and gradients.

_aten = torch.ops.aten


def plain_tuple(func: Callable[..., Sequence[Tensor]]) -> Callable[..., tuple[Tensor, ...]]:
    """``func`` with a tuple for its result, which is a tuple with names."""
    return lambda *args, **kwargs: tuple(func(*args, **kwargs))


class Selected(AutogradFunction):
    """``(values, indices)`` of an operator that picks elements along ``dim``; each gets its value's gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: ShardTensor, op: OpOverload, dim: int, removed: bool, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        values, indices = run(op, (x, *args), kwargs)
        ctx.spec, ctx.dim, ctx.removed, ctx.out = x._spec, dim, removed, values._spec
        ctx.cumulative = op in (_aten.cummax.default, _aten.cummin.default)
        ctx.save_for_backward(indices)
        ctx.mark_non_differentiable(indices)
        ctx.set_materialize_grads(False)
        return values, indices

    @staticmethod
    def backward(ctx: Any, grad: Any, _: Any) -> Any:
        if grad is None:
            return (None,) * 6
        (indices,) = ctx.saved_tensors
        grad = as_gradient(grad, ctx.out)
        if ctx.removed:
            grad, indices = grad.unsqueeze(ctx.dim), indices.unsqueeze(ctx.dim)
        return _ToPlaces.apply(grad, indices, ctx.spec, ctx.dim, ctx.cumulative), None, None, None, None, None


class _ToPlaces(AutogradFunction):
    """Gradients of elements that were picked along ``dim``, where these were; its own gradient picks there again."""

    @staticmethod
    def forward(
        ctx: Any, grad: ShardTensor, indices: ShardTensor, spec: ShardTensorSpec, dim: int, cumulative: bool
    ) -> Any:
        ctx.dim = dim
        ctx.save_for_backward(indices)
        local, index = grad._local_tensor, indices._local_tensor
        m = spec.sharded_dims().get(dim)
        if m is None:
            result = _scattered(local, index, spec, dim, 0)
        else:
            start, _ = spec.interval(m)
            result = _scattered(local, index, spec, dim, start)
            if cumulative:
                # A row's elements that point to an earlier rank all point to the same one there.
                earlier = index < start
                row = [1 if d == dim else n for d, n in enumerate(index.shape)]
                sums = torch.where(earlier, local, 0).sum(dim, keepdim=True)
                places = (
                    torch.where(earlier, index, -1).amax(dim, True) if index.shape[dim] else index.new_full(row, -1)
                )
                group = group_along(spec.mesh, m)
                for pair in zip(all_gather(sums, group), all_gather(places, group), strict=True):
                    result += _scattered(*pair, spec, dim, start)
        return wrap(result, spec)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (indices,) = ctx.saved_tensors
        return torch.gather(grad, ctx.dim, indices), None, None, None, None


def _scattered(values: Tensor, index: Tensor, spec: ShardTensorSpec, dim: int, start: int) -> Tensor:
    """A shard, which begins at ``start``, of zeros with the values added at their global indices along ``dim``."""
    result = values.new_zeros(spec.local_shape())
    if result.numel():
        inside = (index >= start) & (index < start + result.shape[dim])
        result.scatter_add_(dim, torch.where(inside, index - start, 0), torch.where(inside, values, 0))
    return result


def plan_picking(name: str, op: OpOverload, spec: ShardTensorSpec, dim: int, keepdim: bool | None) -> Composed:
    """The plan of ``torch.<name>``, which picks elements along ``dim``: its aten operator, with a gradient.

    Args:
        keepdim: None where the dim stays in any case.
    """
    if not spec.shape:
        return DECLINED
    (along,) = reduced_dims(dim, len(spec.shape))
    args: tuple[Any, ...] = (dim,) if keepdim is None else (dim, keepdim)
    result: Callable[..., Sequence[Tensor]] = getattr(torch.return_types, name)

    def pick(x: ShardTensor) -> Sequence[Tensor]:
        if torch.is_grad_enabled() and x.requires_grad:
            return result(Selected.apply(x, op, along, keepdim is False, args, {}))
        return result(run(op, (x, *args), {}))

    return Composed(pick)
