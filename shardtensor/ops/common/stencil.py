"""What pooling, padding and resampling share: operators that treat each spatial dim by itself.

Such an operator is called above autograd. It runs on a meta tensor of the global shape first, which gives the output's
shape and torch's own errors on every rank; then each rank borrows what its outputs read, one dim after the other
(so that corners come along), and a plain torch kernel does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate

from ..._compat import TensorMeta, untraced
from ...geometry import Interval, intervals_of
from ...halo import borrow
from ...spec import ShardTensorSpec
from ...tensor import ShardTensor, from_part, redistribute_to

__all__ = ["borrow_dims", "finish", "is_whole", "judged", "on_meta", "per_dim", "result_dtype", "scaled_cut", "settled"]


def settled(x: ShardTensor, *, linear: bool) -> ShardTensor:
    """``x`` with what is Partial reduced; a linear operator may be applied to the summands instead."""
    spec = x._spec
    placements = [
        Replicate() if p.is_partial() and not (linear and p.reduce_op == "sum") else p  # type: ignore[attr-defined]
        for p in spec.placements
    ]
    return redistribute_to(x, spec.replace(placements=placements))


def on_meta(x: ShardTensor) -> Tensor:
    """The global tensor without its data."""
    meta = x._spec.tensor_meta
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")


def judged(function: Callable[..., Any], x: ShardTensor, *args: Any, **kwargs: Any) -> Any:
    """What ``function`` returns for the global tensor without its data.

    Raises:
        Exception: torch's own, on every rank alike.
    """
    fixed = tuple((k, _hashable(v)) for k, v in kwargs.items())
    return _judged(function, x._spec.tensor_meta, tuple(map(_hashable, args)), fixed)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@lru_cache(maxsize=4096)
@untraced()
def _judged(function: Callable[..., Any], meta: TensorMeta, args: tuple[Any, ...], kwargs: tuple[Any, ...]) -> Any:
    x = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
    return function(x, *args, **dict(kwargs))


def is_whole(x: ShardTensor, ndim: int) -> bool:
    """Whether this rank holds the last ``ndim`` dims whole, and anything at all."""
    first = len(x._spec.shape) - ndim
    return x._local_tensor.numel() > 0 and not any(d >= first for d in x._spec.sharded_dims())


def result_dtype(local: Tensor, probe: Callable[[Tensor], Tensor], shape: Sequence[int]) -> torch.dtype:
    """The dtype that an operator gives: the input's, unless autocast has another idea.

    Autocast knows no meta tensors, and a rank with an empty shard runs no kernel; so ask ``probe``, the operator, with
    a tensor of the small ``shape``.
    """
    if not torch.is_autocast_enabled(local.device.type):
        return local.dtype
    with torch.no_grad():
        return probe(local.new_zeros(*shape)).dtype


def borrow_dims(local: Tensor, spec: ShardTensorSpec, needs: Mapping[int, Sequence[Interval]]) -> Tensor:
    """The shard with each sharded tensor dim of ``needs`` changed to the interval that this rank needs of it.

    Args:
        needs: ``{tensor dim: interval per rank of its mesh dim}``, within the global tensor.
    """
    for dim, need in needs.items():
        m = spec.sharded_dims()[dim]
        own = intervals_of(spec.cut(m))
        local = borrow(local, dim, own, need, spec.coordinate[m], spec.mesh.get_group(m))
    return local


def resized(spec: ShardTensorSpec, meta: Tensor, dtype: torch.dtype, sizes: Mapping[int, tuple[int, ...]]) -> Any:
    """The spec of a result with the global shape of ``meta``; ``sizes`` by tensor dim, where they differ."""
    new = list(spec.sizes)
    for dim, m in spec.sharded_dims().items():
        new[m] = sizes.get(dim, new[m])
    return spec.replace(meta=TensorMeta(meta.shape, meta.stride(), dtype), sizes=tuple(new))


def finish(local: Tensor, x: ShardTensor, meta: Tensor, sizes: Mapping[int, tuple[int, ...]]) -> ShardTensor:
    """A ShardTensor of the ranks' results, placed like ``x``."""
    return from_part(local, resized(x._spec, meta, local.dtype, sizes))


def per_dim(value: Any, n: int) -> tuple[Any, ...]:
    """One entry per dim of an argument that may be a number or a sequence of one."""
    entries = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return entries * n if len(entries) == 1 else entries


def scaled_cut(n: int, out: int) -> Callable[[int], int]:
    """How a dim of length ``n`` that becomes ``out`` long maps cuts: each output to where its centre lies.

    Example:
        >>> cut = scaled_cut(7, 14)
        >>> [cut(c) for c in (0, 3, 7)]
        [0, 6, 14]
    """
    # Outputs o with (o + 1/2) * n / out < c, counted in integers.
    return lambda c: max(0, min(out, -((n - 2 * c * out) // (2 * n))))
