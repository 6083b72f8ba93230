"""What pooling, padding and resampling share: operators that treat each spatial dim by itself.

Such an operator is planned above autograd. torch runs it on the global tensor without its data, which gives the
output's shape and torch's own errors on every rank; then each rank fetches what its outputs read, one dim after the
other (so that corners come along), and a plain torch kernel does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate

from ..._compat import TensorMeta, constant_like, untraced
from ...layout import AxisLayout
from ...operators import Arguments
from ...spec import ShardTensorSpec

__all__ = [
    "Constant",
    "keeping_sums",
    "per_dim",
    "resized",
    "result_dtype",
    "scaled_boundary",
]


def keeping_sums(spec: ShardTensorSpec) -> ShardTensorSpec:
    """The spec with its Partials reduced, but for sums: a linear operator may be applied to the contributions."""
    others = [m for m, p in enumerate(spec.placements) if isinstance(p, Partial) and p.reduce_op != "sum"]
    return spec.with_axes({m: AxisLayout(Replicate()) for m in others})


def result_dtype(
    call: Arguments, dtype: torch.dtype, probe: Callable[[Tensor], Tensor], shape: Sequence[int]
) -> torch.dtype:
    """The dtype that an operator gives: the input's, unless autocast has another idea.

    Autocast knows no meta tensors; so ask ``probe``, the operator, with a tensor of the small ``shape``.
    """
    if call.autocast() is None:
        return dtype
    with torch.no_grad(), untraced():
        return probe(torch.zeros(*shape, dtype=dtype, device=call.device)).dtype


def resized(
    spec: ShardTensorSpec, meta: Tensor, dtype: torch.dtype, sizes: Mapping[int, tuple[int, ...]]
) -> ShardTensorSpec:
    """The spec of a result with the global shape of ``meta``; shard ``sizes`` by tensor dim, where they differ."""
    sharded = spec.sharded_dims()
    layout = list(spec.layout)
    for dim, new in sizes.items():
        layout[sharded[dim]] = layout[sharded[dim]]._replace(sizes=new)
    return spec.with_layout(layout, TensorMeta(meta.shape, meta.stride(), dtype))


class Constant:
    """A small tensor that follows from specs, made when a plan is, outside of any trace."""

    __slots__ = ("_data",)

    def __init__(self, make: Callable[[], Tensor]) -> None:
        with torch.no_grad(), untraced():
            self._data = make()

    def like(self, tensor: Tensor) -> Tensor:
        """The constant, for use with ``tensor``."""
        return constant_like(self._data, tensor)


def per_dim(value: Any, n: int) -> tuple[Any, ...]:
    """One entry per dim of an argument that may be a number or a sequence of one."""
    entries = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return entries * n if len(entries) == 1 else entries


def scaled_boundary(n: int, out: int) -> Callable[[int], int]:
    """How a dim of length ``n`` that becomes ``out`` long maps boundaries: each output to where its centre lies.

    Example:
        >>> boundary = scaled_boundary(7, 14)
        >>> [boundary(b) for b in (0, 3, 7)]
        [0, 6, 14]
    """
    # Outputs o with (o + 1/2) * n / out < b, counted in integers.
    return lambda b: max(0, min(out, -((n - 2 * b * out) // (2 * n))))
