"""Looking up by index, above autograd: gather, index_select, take, embedding, repeat_interleave.

[Note: gradients of lookups] torch's formulas add the gradient into zeros that know the shape of what was looked into,
but not how it was cut; they would be whole on every rank. So where a dim that is looked into is cut, the gradient is
written into zeros that are cut alike: each rank keeps what belongs to its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...dispatch import run, wrap
from ...errors import refuse
from ...registry import register
from ...spec import ShardTensorSpec
from ...tensor import ShardTensor, redistribute_to
from ..shape.view import wrap_dim

__all__ = ["flat_cumsum", "is_cut", "laid_like", "look_up", "looks_into_a_shard", "replicated"]

_aten = torch.ops.aten

Read = Callable[..., Any]


class _LookUp(torch.autograd.Function):
    """``read(x, indices)``, whose gradient is ``write(zeros, indices, gradient)``."""

    @staticmethod
    def forward(ctx: Any, x: Any, read: Read, write: Read, *indices: Tensor) -> Any:  # type: ignore[override]
        ctx.save_for_backward(*indices)
        ctx.write, ctx.spec = write, x._spec.for_gradient()
        return read(x, indices)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        zeros = wrap(torch.zeros(ctx.spec.local_shape(), dtype=grad.dtype, device=grad.device), ctx.spec)
        return ctx.write(zeros, ctx.saved_tensors, grad), None, None, *(None for _ in ctx.saved_tensors)


def looks_into_a_shard(x: Any, dims: Sequence[int]) -> bool:
    """Whether one of these dims of ``x``, which are to be looked into, is sharded."""
    return isinstance(x, ShardTensor) and any(d in x._spec.sharded_dims() for d in dims)


def look_up(x: Any, indices: Sequence[Tensor | None]) -> Any:
    """``x[indices]``, one index or None for each of the first dims of ``x``; negative ones count from the end."""
    dims = [d for d, index in enumerate(indices) if index is not None]
    given = list(indices)
    if not looks_into_a_shard(x, dims):
        return _aten.index.Tensor(x, given)

    def placed(found: Sequence[Tensor]) -> list[Tensor | None]:
        rest = iter(found)
        return [None if index is None else next(rest) for index in given]

    given = [None if index is None else True for index in given]  # type: ignore[misc]  # the tensors are saved
    return _LookUp.apply(
        x,
        lambda t, found: run(_aten.index.Tensor, (t, placed(found)), {}),
        lambda zeros, found, grad: _aten.index_put.default(zeros, placed(found), grad, True),
        *(index for index in indices if index is not None),
    )


def _dim_of(x: Any, dim: Any) -> int | None:
    return wrap_dim(dim, x.ndim) if isinstance(dim, int) and -x.ndim <= dim < x.ndim else None


@register(torch.gather, Tensor.gather)
def _gather(input: Any, dim: Any, index: Any, *, sparse_grad: bool = False, out: Any = None) -> Any:
    if out is None and is_cut(input, index) and {input.ndim, index.ndim} == {0, 1}:
        return torch.gather(input.reshape(-1), dim, index.reshape(-1)).reshape(index.shape)
    d = None if out is not None else _dim_of(input, dim)
    if d is None or not looks_into_a_shard(input, [d]):
        return NotImplemented
    return _LookUp.apply(
        input,
        lambda t, found: run(_aten.gather.default, (t, d, *found), {}),
        lambda zeros, found, grad: torch.scatter_add(zeros, d, *found, grad),
        index,
    )


@register(torch.index_select, Tensor.index_select)
def _index_select(input: Any, dim: Any, index: Any, *, out: Any = None) -> Any:
    d = None if out is not None else _dim_of(input, dim)
    if d is None or not looks_into_a_shard(input, [d]):
        return NotImplemented
    return _LookUp.apply(
        input,
        lambda t, found: run(_aten.index_select.default, (t, d, *found), {}),
        lambda zeros, found, grad: torch.index_add(zeros, d, *found, grad),
        index if index.ndim else index.reshape(1),
    )


# -- positions in the flattened tensor ------------------------------------------------------------------------


def _coordinates(index: Any, shape: Sequence[int]) -> list[Any]:
    """Positions in a flattened tensor of ``shape``, negative ones from its end, as one index for each dim.

    What is out of range is so in the first dim, too.
    """
    n = torch.Size(shape).numel()
    index = torch.where(index < 0, index + n, index)
    index = torch.where((index < 0) | (index >= n), n, index)
    places = []
    step = n
    for d, size in enumerate(shape):
        step //= max(1, size)
        place = torch.div(index, max(1, step), rounding_mode="floor")
        places.append(place if d == 0 else place % max(1, size))
    return places


def is_cut(*tensors: Any) -> bool:
    """Whether one of them is a ShardTensor with a sharded dim."""
    return any(isinstance(t, ShardTensor) and bool(t._spec.sharded_dims()) for t in tensors)


@register(torch.take, Tensor.take)
def _take(input: Any, index: Any, *, out: Any = None) -> Any:
    if out is not None or not is_cut(input, index):
        return NotImplemented
    if index.dtype != torch.int64:
        raise RuntimeError(f"take(): Expected a long tensor for index, but got {index.dtype}")
    return look_up(input if input.ndim else input.reshape(1), _coordinates(index, input.shape or (1,)))


def _put(op: Any, input: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    if not is_cut(input, index, source) or not input.ndim:
        return NotImplemented
    if index.dtype != torch.int64 or index.numel() != source.numel() or source.dtype != input.dtype:
        raise RuntimeError(
            f"put: a long index with as many elements as the source, which has the input's dtype, was expected; "
            f"got {tuple(index.shape)} {index.dtype}, {tuple(source.shape)} {source.dtype}, {input.dtype}"
        )
    return op(input, _coordinates(index, input.shape), source.reshape(index.shape), accumulate)


@register(torch.put, Tensor.put)
def _put_function(input: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    return _put(_aten.index_put.default, input, index, source, accumulate)


@register(Tensor.put_)
def _put_method(input: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    return _put(_aten.index_put_.default, input, index, source, accumulate)


@register(torch.take_along_dim, Tensor.take_along_dim)
def _take_along_dim(input: Any, indices: Any, dim: int | None = None, *, out: Any = None) -> Any:
    if out is not None or not is_cut(input, indices) or (input.ndim != indices.ndim and dim is not None):
        return NotImplemented
    if dim is None:
        return torch.take(input, indices.reshape(-1))
    d = _dim_of(input, dim)
    if d is None:
        return NotImplemented
    shape = torch.broadcast_shapes(*([1 if k == d else n for k, n in enumerate(t.shape)] for t in (input, indices)))
    indices = torch.where(indices < 0, indices + input.shape[d], indices)
    wide = [t.expand([t.shape[d] if k == d else n for k, n in enumerate(shape)]) for t in (input, indices)]
    return torch.gather(wide[0], d, wide[1])


def flat_cumsum(x: Any) -> Any:
    """The running sum over all dims, the last one fastest."""
    if not x.ndim:
        return x
    sums = x.cumsum(-1)
    if x.ndim == 1:
        return sums
    rows = x.sum(-1)
    return sums + (flat_cumsum(rows) - rows).unsqueeze(-1)


# -- tables ---------------------------------------------------------------------------------------------------


@register(F.embedding)
def _embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Of a table whose rows are sharded, or with gradients that depend on how often a row is asked for."""
    if weight.ndim != 2 or not (looks_into_a_shard(weight, [0]) or (scale_grad_by_freq and is_cut(input, weight))):
        return NotImplemented
    if max_norm is not None:
        raise refuse("embedding", [weight], "max_norm writes to the table", "renormalize the table beforehand")
    n = weight.shape[0]
    if padding_idx is not None and not -n <= padding_idx < n:
        raise AssertionError("padding_idx must be within num_embeddings")
    if looks_into_a_shard(weight, [0]):
        rows = _LookUp.apply(
            weight,
            lambda t, found: run(_aten.embedding.default, (t, *found), {}),
            lambda zeros, found, grad: _aten.index_put.default(zeros, list(found), grad, True),
            input,
        )
    else:
        rows = F.embedding(input, weight)
    if padding_idx is not None:
        padded = (input == padding_idx % n).unsqueeze(-1)
        rows = torch.where(padded, rows.detach(), rows)
    if scale_grad_by_freq and rows.requires_grad:
        spec = (weight if isinstance(weight, ShardTensor) else input)._spec
        counts = replicated(torch.zeros(n, dtype=torch.int64, device=weight.device), spec)
        flat = input.reshape(-1)
        counts = torch.index_add(counts, 0, flat, torch.ones_like(flat, dtype=torch.int64))
        often = look_up(counts, [input]).unsqueeze(-1)
        rows.register_hook(lambda grad: laid_like(grad, often) / often)
    return rows


def laid_like(t: Any, other: Any) -> Any:
    """``t`` cut as ``other`` is, a tensor whose dims run together with its first ones; as it is if that is not cut."""
    if not is_cut(t) or not is_cut(other):
        return t
    spec = other._spec.for_gradient()
    return redistribute_to(t, t._spec.replace(placements=spec.placements, sizes=spec.sizes))


def replicated(t: Tensor, spec: ShardTensorSpec) -> Any:
    """A plain tensor, equal on every rank and without a gradient, on the mesh of ``spec``."""
    return wrap(t, ShardTensorSpec.make(spec.mesh, spec.replicated().placements, t.shape, t.dtype))


@register(torch.combinations)
def _combinations(input: Any, r: int = 2, with_replacement: bool = False) -> Any:
    if not is_cut(input) or input.ndim != 1:
        return NotImplemented
    numbers = torch.combinations(torch.arange(input.shape[0], device=input.device), r, with_replacement)
    return look_up(input, [numbers])


# -- filled entries -------------------------------------------------------------------------------------------


@register(torch.index_fill, Tensor.index_fill)
def _index_fill(input: Any, dim: Any, index: Any, value: Any) -> Any:
    """With a value that requires grad, whose gradient by torch's formula looks for the index's different numbers."""
    d = _dim_of(input, dim)
    if d is None or not is_cut(index) or not isinstance(value, Tensor) or not value.requires_grad:
        return NotImplemented
    n = input.shape[d]
    mask = replicated(torch.zeros(n, dtype=torch.bool, device=index.device), index._spec)
    filled = torch.index_fill(mask, 0, index, True).reshape([n if k == d else 1 for k in range(input.ndim)])
    return torch.where(filled, value, input)


@register(Tensor.index_fill_)
def _index_fill_in_place(input: Any, dim: Any, index: Any, value: Any) -> Any:
    result = _index_fill(input, dim, index, value)
    return result if result is NotImplemented else input.copy_(result)


# -- repeated entries -----------------------------------------------------------------------------------------


@register(torch.repeat_interleave, Tensor.repeat_interleave)
def _repeat_interleave(
    input: Any, repeats: Any = None, dim: int | None = None, *, output_size: int | None = None
) -> Any:
    """A number of repeats stays with the owners; numbers for each entry are an index."""
    if not is_cut(input) or repeats is None:
        return NotImplemented
    if isinstance(repeats, DTensor):
        if not all(p.is_replicate() for p in repeats.placements):
            raise refuse(
                "repeat_interleave",
                [input, repeats],
                "how long the result is depends on the values of sharded repeats",
                "redistribute the repeats to Replicate()",
            )
        repeats = repeats.to_local()
    if dim is None:
        input, dim = input.reshape(-1), 0
    d = _dim_of(input, dim)
    if d is None:
        return NotImplemented
    if isinstance(repeats, Tensor) and repeats.numel() == 1:
        repeats = int(repeats)
    if isinstance(repeats, int):
        if repeats < 0:
            raise RuntimeError("repeats has to be non-negative")
        return input.unsqueeze(d + 1).expand(*input.shape[: d + 1], repeats, *input.shape[d + 1 :]).flatten(d, d + 1)
    if repeats.ndim != 1 or repeats.numel() != input.shape[d]:
        raise RuntimeError("repeats must have the same size as input along dim")
    return torch.index_select(input, d, torch.repeat_interleave(repeats, output_size=output_size))
