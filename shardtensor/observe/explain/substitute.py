"""What a preview goes on with where an operator is refused: the result that one device has, sharded alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from ..._compat import AutogradFunction, tree_leaves, tree_map, without_modes
from ...dispatch.tensor import ShardTensor, wrap
from ...layout.spec import ShardTensorSpec


def substitute(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A result without meaning, of the shapes and dtypes that ``func`` has on global tensors.

    It is sharded like the first sharded argument: with its shard sizes where lengths are the same, with those of
    torch.chunk where they differ, and replicated where there is no such dim. Gradients of the arguments are zero.
    """
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        return None if name == "__setitem__" else args[0]  # in place; on shards it has not been done
    sharded = [t for t in tree_leaves((args, kwargs)) if isinstance(t, ShardTensor)]
    first = next((t._spec for t in sharded if not t._spec.is_replicate()), sharded[0]._spec)
    like = sharded[0]._local_tensor
    with without_modes(), torch.no_grad():
        reference = func(*tree_map(_global, args), **tree_map(_global, kwargs))

    def made(result: Any) -> Any:
        if not isinstance(result, Tensor):
            return result
        spec = _layout_like(first, result)
        local = like.new_zeros(spec.own_shape, dtype=result.dtype)
        differentiable = result.dtype.is_floating_point or result.dtype.is_complex
        parents = [t for t in sharded if t.requires_grad] if differentiable and torch.is_grad_enabled() else []
        return _Unrelated.apply(local, spec, *parents) if parents else wrap(local, spec)

    return tree_map(made, reference)


def _global(value: Any) -> Any:
    """A tensor without values of the shape that one device has."""
    if isinstance(value, ShardTensor):
        spec = value._spec
        return torch.empty_strided(spec.shape, spec.stride, dtype=value.dtype, device="meta")
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def _layout_like(spec: ShardTensorSpec, result: Tensor) -> ShardTensorSpec:
    placements: list[Any] = []
    sizes = {}
    for m, placement in enumerate(spec.placements):
        known = isinstance(placement, Shard) and placement.dim < result.ndim
        placements.append(placement if known else Replicate())
        if isinstance(placement, Shard) and known and spec.shape[placement.dim] == result.shape[placement.dim]:
            sizes[m] = spec.sizes_along(m)
    return ShardTensorSpec.make(spec.mesh, placements, result.shape, result.dtype, shard_sizes=sizes)


class _Unrelated(AutogradFunction):
    """A tensor that does not depend on its parents, in a graph as if it did."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: ShardTensorSpec, *parents: ShardTensor) -> Any:
        ctx.specs = [(t._spec.for_gradient(), t._local_tensor.dtype) for t in parents]
        ctx.like = local
        return wrap(local, spec)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        zeros = [wrap(ctx.like.new_zeros(spec.own_shape, dtype=dtype), spec) for spec, dtype in ctx.specs]
        return None, None, *zeros
