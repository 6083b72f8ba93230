"""What operators that reduce dims share: their result's spec, neutral elements, dtypes, and reductions over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard

from ...planning import Call, meta_of
from ...redistribute import all_reduce, redistribute_local
from ...spec import ShardTensorSpec
from ...tensor import run, wrap

_aten = torch.ops.aten


def reduced_dims(dim: Any, ndim: int) -> list[int]:
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
    placements: list[Any] = []
    sizes: list[Any] = []
    for m, p in enumerate(spec.placements):
        size = None
        if isinstance(p, Shard):
            if p.dim in dims:
                p = Partial(op)
            else:
                size = spec.sizes[m]
                p = p if keepdim else Shard(p.dim - sum(d < p.dim for d in dims))
        placements.append(p)
        sizes.append(size)
    return ShardTensorSpec.of(spec.mesh, placements, meta_of(meta), tuple(sizes))


def neutral_element(op: str, dtype: torch.dtype) -> Any:
    """What an empty shard contributes."""
    if dtype == torch.bool:
        return op in ("min", "product")
    if op in ("sum", "product"):
        return int(op == "product")
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    return info.min if op == "max" else info.max


def check_dtype(call: Call) -> None:
    """Let torch's kernel judge the dtype, on one element: ranks with empty shards would not call it.

    Raises:
        Exception: torch's own, on every rank alike.
    """
    device = call.specs[0].mesh.device_type

    def one(a: Any) -> Any:
        if isinstance(a, (Tensor, ShardTensorSpec)):
            meta = a.tensor_meta if isinstance(a, ShardTensorSpec) else a
            return torch.ones([1] * len(a.shape), dtype=meta.dtype, device=device)
        return a

    call.func(*map(one, call.args), **call.kwargs)


def count_along(spec: ShardTensorSpec, dims: Sequence[int]) -> int:
    n = 1
    for d in dims:
        n *= spec.shape[d]
    return n


def opted_dtype(function: Callable[..., Tensor], x: Any, dtype: Any, *args: Any) -> Any:
    """``dtype``, or where none is given the one that autocast, which acts above us, would choose for this function."""
    if dtype is not None or not torch.is_autocast_enabled(x.device.type):
        return dtype
    return function(torch.ones([1] * x.ndim, dtype=x.dtype, device=x.device), *args).dtype


def widened(x: Any) -> Any:
    half = x.dtype in (torch.float16, torch.bfloat16)
    return run(_aten._to_copy.default, (x,), {"dtype": torch.float32}) if half else x


def narrowed(x: Any, dtype: torch.dtype) -> Any:
    half = dtype in (torch.float16, torch.bfloat16)
    return run(_aten._to_copy.default, (x,), {"dtype": dtype}) if half else x


def resolved(x: Any) -> Any:
    """A Partial reduced; anything else as it is."""
    spec = x._spec
    target = spec.for_gradient()
    return wrap(redistribute_local(x._local_tensor, spec, target), target)


def mesh_dims_of(spec: ShardTensorSpec, dims: Sequence[int]) -> list[int]:
    """The mesh dims that shard one of these tensor dims."""
    return [m for d, m in spec.sharded_dims().items() if d in dims]


def reduce_over(local: Tensor, spec: ShardTensorSpec, mesh_dims: Sequence[int], op: str) -> Tensor:
    """``local`` reduced over the ranks along these mesh dims."""
    for m in mesh_dims:
        local = all_reduce(local, spec.mesh.get_group(m), op)
    return local


def maximum_over(x: Tensor, dims: Sequence[int]) -> Tensor:
    """The maxima over ``dims``, which stay with length 1; -inf where there is nothing."""
    if 0 in (x.shape[d] for d in dims):
        return x.new_full([1 if d in dims else n for d, n in enumerate(x.shape)], float("-inf"))
    return x.amax(dims, keepdim=True)
