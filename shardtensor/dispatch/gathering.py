"""What :func:`shardtensor.allow_gather` allows: operators run on whole tensors, their results sharded again.

Operators without a rule run so on Partials, too: to reduce these takes no permission.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._compat import OpOverload, tree_map
from ..communication.redistribute import redistribute_local
from ..errors import refuse
from ..layout.spec import ShardTensorSpec
from ..layout.strides import lies_dense
from .copied_views import mark_copied, note_write
from .planning import distributed_operands, is_inplace, meta_of, returns_view, spec_of
from .tensor import wrap

_aten = torch.ops.aten

# They take elements by their places in memory.
STRIDED = (_aten.as_strided.default, _aten.as_strided_copy.default, _aten.as_strided_scatter.default)


def gathered(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Gather the operands, compute, and shard what still has the shape of the first sharded operand.

    What an in-place operator writes to gets its part of the result.
    """
    inplace, specs = is_inplace(func), [spec for _, spec in distributed_operands(args, kwargs)]
    later = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments[1:])
    if later or (inplace and not isinstance(args[0], DTensor)):
        raise refuse(
            func,
            specs,
            "it would write to an operand other than the first, or one that is not a ShardTensor",
            "use the out-of-place form",
        )
    pattern = next(spec for spec in specs if not spec.is_replicate())

    if func in STRIDED and isinstance(args[0], DTensor):
        places = {k: v for k, v in kwargs.items() if k != "src"}
        _check_known(func, spec_of(args[0]), *(a for a in args[1:] if not isinstance(a, Tensor)), **places)

    def whole(a: object) -> object:
        return redistribute_local(a._local_tensor, spec_of(a), spec_of(a).replicated()) if isinstance(a, DTensor) else a

    plain_args, plain_kwargs = tree_map(whole, (tuple(args), kwargs))
    if inplace:
        written, spec = args[0], spec_of(args[0])
        value = plain_args[0].clone()
        func(value, *plain_args[1:], **plain_kwargs)
        written._local_tensor.copy_(redistribute_local(value, spec.replicated(), spec))
        note_write(written)
        return written if func._schema.returns else None

    def shard(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        if value.layout != torch.strided:
            raise refuse(func, pattern, "a ShardTensor cannot be sparse", "call it on full_tensor()")
        spec = pattern.replicated().replace(meta=meta_of(value))
        if value.shape != pattern.shape:
            return wrap(value, spec)
        target = spec.with_layout(pattern.for_gradient().layout)
        return wrap(redistribute_local(value, spec, target), target)

    result = tree_map(shard, func(*plain_args, **plain_kwargs))
    return tree_map(lambda view: mark_copied(view, args[0]), result) if returns_view(func) else result


def _check_known(
    func: OpOverload,
    spec: ShardTensorSpec,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> None:
    """Raise where an operator of :data:`STRIDED` may take what one device has in memory around the elements."""
    reason, remedy = "", "call it on contiguous(), with the strides of that"
    if storage_offset is not None:
        reason = "a ShardTensor has no memory of its own, in which storage_offset could be a place"
        remedy = "leave out storage_offset if it is the tensor's own"
    elif not lies_dense(spec.shape, spec.tensor_meta.stride):
        reason = f"there are gaps between its elements (strides {tuple(spec.tensor_meta.stride)})"
    elif 0 not in size and sum((n - 1) * step for n, step in zip(size, stride, strict=True)) >= spec.shape.numel():
        reason = f"size {tuple(size)} and stride {tuple(stride)} reach beyond its elements"
        remedy = "call it on a tensor that has all elements"
    if reason:
        raise refuse(func, spec, reason, remedy)
