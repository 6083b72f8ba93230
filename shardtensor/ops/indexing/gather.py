"""Reading by index, above autograd: ``gather``, ``index_select``, and what indices and tables need of them.

[Note: gradients of reads] torch's formulas add the gradient into zeros that know the shape of what was read, but not
its layout; they would be replicated. So where an indexed dim is sharded, the gradient is written into zeros of the same
layout: each rank keeps what belongs to its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._compat import AutogradFunction, OpOverload
from ...dispatch.registry import DECLINED
from ...dispatch.tensor import ShardTensor, run, wrap
from ...errors import PLAIN_TARGET
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Composed, operator
from ..shape.view import dim_of

_aten = torch.ops.aten


class Read(AutogradFunction):
    """``read(x, indices)``, whose gradient is ``write(zeros, indices, gradient)``."""

    @staticmethod
    def forward(
        ctx: Any, x: ShardTensor, read: Callable[..., Tensor], write: Callable[..., Tensor], *indices: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*indices)
        ctx.write, ctx.spec = write, x._spec.for_gradient()
        return read(x, indices)

    @staticmethod
    def backward(ctx: Any, grad: ShardTensor) -> Any:
        zeros = wrap(torch.zeros(ctx.spec.local_shape(), dtype=grad.dtype, device=grad.device), ctx.spec)
        return ctx.write(zeros, ctx.saved_tensors, grad), None, None, *(None for _ in ctx.saved_tensors)


def indexes_a_shard(spec: ShardTensorSpec, dims: Sequence[int]) -> bool:
    """Whether one of these dims, which are to be indexed, is sharded."""
    sharded = spec.sharded_dims()
    return any(d in sharded for d in dims)


def any_sharded(*specs: ShardTensorSpec | None) -> bool:
    """Whether one of the operands is sharded."""
    return any(spec is not None and bool(spec.sharded_dims()) for spec in specs)


def is_written(call: Arguments) -> bool:
    """Whether the operator writes to ``input``, as its name says.

    Raises:
        UnsupportedSharding: it does, and that is no ShardTensor yet.
    """
    in_place = call.name.endswith("_")
    if in_place and "input" in call.steps:  # by which it is made one
        raise call.refuse(*PLAIN_TARGET)
    return in_place


def written(call: Arguments, work: Callable[..., Tensor]) -> Composed:
    """The plan of an operator whose result is ``work(input, ...)``; of its in-place form, too."""
    if not is_written(call):
        return Composed(work)
    return Composed(lambda x, *others: x.copy_(work(x, *others)))


def gathered(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """``x[indices]``, one index or None for each of the first dims of ``x``; negative ones count from the end."""
    used = [index is not None for index in indices]
    if not isinstance(x, ShardTensor) or not indexes_a_shard(x._spec, [d for d, here in enumerate(used) if here]):
        found: Tensor = _aten.index.Tensor(x, list(indices))
        return found

    def placed(found: Sequence[Tensor]) -> list[Tensor | None]:
        rest = iter(found)
        return [next(rest) if here else None for here in used]

    result: Tensor = Read.apply(
        x,
        lambda t, found: run(_aten.index.Tensor, (t, placed(found)), {}),
        lambda zeros, found, grad: _aten.index_put.default(zeros, placed(found), grad, True),
        *(index for index in indices if index is not None),
    )
    return result


def _read_along(x: ShardTensor, dim: int, index: Tensor, read: OpOverload, write: Callable[..., Tensor]) -> Tensor:
    """``read(x, dim, index)``, whose gradient is ``write(zeros, dim, index, gradient)``."""
    entries: Tensor = Read.apply(
        x,
        lambda t, found: run(read, (t, dim, *found), {}),
        lambda zeros, found, grad: write(zeros, dim, *found, grad),
        index,
    )
    return entries


@operator(torch.gather, Tensor.gather, tensors="input index", partial="input index")
def _gather(
    call: Arguments,
    input: ShardTensorSpec,
    dim: int,
    index: ShardTensorSpec,
    *,
    sparse_grad: bool = False,
) -> Composed:
    lengths = {len(input.shape), len(index.shape)}
    if lengths == {0, 1} and (input.sharded_dims() or index.sharded_dims()):  # which torch lets run together
        shape = index.shape
        return Composed(lambda x, places: torch.gather(x.reshape(-1), dim, places.reshape(-1)).reshape(shape))
    d = dim_of(input, dim)
    if d is None or not indexes_a_shard(input, [d]):
        return DECLINED
    return Composed(lambda x, places: _read_along(x, d, places, _aten.gather.default, torch.scatter_add))


@operator(torch.index_select, Tensor.index_select, tensors="input index", partial="input index")
def _index_select(call: Arguments, input: ShardTensorSpec, dim: int, index: ShardTensorSpec) -> Composed:
    d = dim_of(input, dim)
    if d is None or not indexes_a_shard(input, [d]):
        return DECLINED
    shape = index.shape or (1,)
    read, write = _aten.index_select.default, torch.index_add
    return Composed(lambda x, places: _read_along(x, d, places.reshape(shape), read, write))


def flat_cumsum(x: Tensor) -> Tensor:
    """The running sum over all dims, the last one fastest."""
    if not x.ndim:
        return x
    sums = x.cumsum(-1)
    if x.ndim == 1:
        return sums
    rows = x.sum(-1)
    return sums + (flat_cumsum(rows) - rows).unsqueeze(-1)
