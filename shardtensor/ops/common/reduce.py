"""What operators that reduce dims share: their result's spec, neutral elements, dtypes, and reductions over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard

from ..._compat.c10d import group_along
from ...communication.redistribute import all_reduce
from ...dispatch.planning import AtenCall, meta_of
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ...operators.arguments import Arguments, autocast_dtype


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


def reduce_over(local: Tensor, spec: ShardTensorSpec, mesh_dims: Sequence[int], op: str) -> Tensor:
    """``local`` reduced over the ranks along these mesh dims."""
    return rank_reduction(spec, mesh_dims)(local, op)


def rank_reduction(spec: ShardTensorSpec, mesh_dims: Sequence[int]) -> Callable[[Tensor, str], Tensor]:
    """:func:`reduce_over` made ready for a plan: ``(local, op)`` to the reduction over the ranks."""
    groups = [group_along(spec.mesh, m) for m in mesh_dims]

    def reduce(local: Tensor, op: str) -> Tensor:
        for group in groups:
            local = all_reduce(local, group, op)
        return local

    return reduce


def maximum_over(x: Tensor, dims: list[int] | tuple[int, ...]) -> Tensor:
    """The maxima over ``dims``, which stay with length 1; -inf where there is nothing."""
    if 0 in (x.shape[d] for d in dims):
        return x.new_full([1 if d in dims else n for d, n in enumerate(x.shape)], float("-inf"))
    return x.amax(dims, keepdim=True)
