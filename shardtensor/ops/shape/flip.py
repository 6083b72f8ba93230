"""``flip``, ``rot90`` and ``roll``: a sharded dim is exchanged, and keeps its sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...geometry import Interval, intersect, intervals_of, length
from ...redistribute import move_intervals
from ...registry import register
from ...spec import ShardTensorSpec
from ...tensor import run, wrap
from .cat import assemble
from .view import wrap_dim

_aten = torch.ops.aten


def rolled(own: Interval, shift: int, n: int) -> tuple[Interval, Interval]:
    """Where an interval of a dim of length ``n`` comes to lie when the dim is rolled: what stays below ``n``, the rest.

    Example:
        >>> rolled((2, 6), 5, 8)
        ((7, 8), (0, 3))
    """
    a, b = own[0] + shift, own[1] + shift
    stays, wraps = intersect((a, b), (0, n)), intersect((a - n, b - n), (0, n))
    return (stays if length(stays) else (0, 0)), (wraps if length(wraps) else (0, 0))


@register(_aten.roll.default)
def _roll(x: Any, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    """A sharded dim is rolled by one exchange, and keeps its sizes."""
    spec = x._spec
    sharded = spec.sharded_dims()
    if not sharded:
        return wrap(x._local_tensor.roll(shifts, dims), spec)
    if len(shifts) != len(dims):
        if dims or len(shifts) != 1:
            return _aten.roll.default(_meta(spec), shifts, dims)  # raises torch's own error
        return x.reshape(-1).roll(shifts, 0).reshape(x.shape)
    amounts: dict[int, int] = {}
    for d, shift in zip(dims, shifts, strict=True):
        d = wrap_dim(d, len(spec.shape))
        amounts[d] = amounts.get(d, 0) + shift
    local = x._local_tensor
    for d, shift in amounts.items():
        n = spec.shape[d]
        if d not in sharded:
            local = local.roll(shift, d)
        if d not in sharded or not n or not shift % n:
            continue
        m = sharded[d]
        rank = spec.coordinate[m]
        own = intervals_of(spec.cut(m))
        stays, wraps = zip(*(rolled(each, shift % n, n) for each in own), strict=True)
        k = length(stays[rank])
        parts = [(local.narrow(d, 0, k), stays), (local.narrow(d, k, local.shape[d] - k), wraps)]
        local = assemble(parts, d, own, rank, spec.mesh.get_group(m))
    # A copy in any case, as torch makes one.
    return wrap(local.clone() if local is x._local_tensor else local, spec)


def _meta(spec: ShardTensorSpec) -> Tensor:
    meta = spec.tensor_meta
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")


@register(_aten.flip.default)
def _flip(x: Any, dims: Sequence[int]) -> Any:
    """Reverse dims; a sharded one is exchanged, so that the result has the input's sizes."""
    spec = x._spec
    local = x._local_tensor.flip(list(dims))
    flipped = {wrap_dim(d, len(spec.shape)) for d in dims}
    for d, m in spec.sharded_dims().items():
        if d in flipped:
            need = intervals_of(spec.cut(m))
            total = spec.shape[d]
            own = [(total - b, total - a) for a, b in need]
            local = move_intervals(local, d, own, need, spec.coordinate[m], spec.mesh.get_group(m))
    return wrap(local, spec)


@register(_aten.rot90.default)
def _rot90(x: Any, k: int = 1, dims: Sequence[int] = (0, 1)) -> Any:
    """A quarter turn is a flip and a transposition; the sharding turns with the tensor."""
    spec = x._spec
    _aten.rot90.default(torch.empty(spec.shape, device="meta"), k, dims)  # torch's own errors
    a, b = dims
    if k % 4 == 0:
        return run(_aten.clone.default, (x,), {})
    if k % 4 == 2:
        return run(_aten.flip.default, (x, [a, b]), {})
    turned = run(_aten.flip.default, (x, [b if k % 4 == 1 else a]), {})
    return run(_aten.transpose.int, (turned, a, b), {})
