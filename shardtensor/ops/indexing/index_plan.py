"""Plans of operators that read and write by index, from the labels of their operands' dims."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import Partial

from ...communication.redistribute import redistribute_local
from ...dispatch.planning import AtenCall, AtenPlan, Path, is_inplace, operand
from ...errors import PLAIN_TARGET
from ...layout.spec import ShardTensorSpec
from ..common.named_dims import Labels
from .block_work import BlockWork
from .index_layout import IndexLayout, copied, put
from .row_work import RowWork, rows_of


def labelled(
    call: AtenCall,
    roles: dict[Path, Labels],
    out: Labels,
    *,
    indexed: Mapping[Path, int] | None = None,
    writes: bool = False,
    accumulates: str | None = None,
    picks: bool = False,
    wraps: bool = False,
    in_blocks: bool = True,
) -> AtenPlan:
    """The plan of an operator whose tensors' dims have labels, see index_layout.py.

    Args:
        roles: the labels of each tensor, ShardTensor or plain; the first is the one that is read or written.
        out: those of the result.
        indexed: for each index tensor the dim of the first tensor that it indexes. Without, these must be free.
        writes: the result is the first tensor, changed.
        accumulates: how the operator reduces into its result ("sum", "product", "max", "min"; None: not at all); so
            that labels which the result lacks may be sharded, too.
        picks: the result consists of entries of the first tensor, so that a Partial stays one.
        wraps: negative indices count from the end.
        in_blocks: several calls, each with a part of the index, do the same as one.
    """
    if not roles.keys() >= call.tensors.keys():
        raise call.refuse("a ShardTensor is passed by keyword", "pass it by position")
    layout = IndexLayout(call, roles, out, indexed or {}, accumulates, writes, wraps)
    first = layout.first
    for m, axis in enumerate(layout.axes):
        if not writes:
            layout.spread(m)
        if axis.broadcast is not None and not in_blocks:
            raise call.refuse(
                f"the operands are sharded along different dims on mesh dim {m}, and the operator cannot use parts "
                "of its index",
                "shard all operands alike along a dim that is not indexed",
            )
        placement = layout.specs[first].placements[m]
        if picks and isinstance(placement, Partial) and axis.along is None and axis.broadcast is None:
            axis.keeps = placement
    layout.settle()
    targets, result = {path: layout.layouts[path] for path in call.tensors}, layout.result
    rows = rows_of(layout)
    work: Callable[..., Any] = BlockWork(layout) if rows is None else RowWork(layout, *rows)
    keeps = None if rows is None else rows[1]
    inplace = is_inplace(call.func)
    if inplace:
        _check_written(call, layout, targets)
        if targets[first] != call.tensors[first]:
            work = _written_through(work, first, call.tensors[first], targets.pop(first))
        result = call.tensors[first]
    elif writes and accumulates != "sum" and (reduced := result.for_gradient()) != result:
        # At once, as torch's formulas for gradients read the result.
        work, result = _reduced(work, result, reduced), reduced
    return call.plan(result, targets, call=work, returns_self=inplace, keeps=keeps)


def _written_through(
    work: Callable[..., Tensor], first: Path, whole: ShardTensorSpec, partial: ShardTensorSpec
) -> Callable[..., Tensor]:
    """An in-place operator on a replicated tensor to which the ranks contribute: it gets what these amount to."""

    def write(*args: Any, **kwargs: Any) -> Tensor:
        values = copied(args)
        target = operand(values, first)
        put(values, first, redistribute_local(target, whole, partial))
        written: Tensor = target.copy_(redistribute_local(work(*values, **kwargs), partial, whole))
        return written

    return write


def _reduced(work: Callable[..., Tensor], partial: ShardTensorSpec, whole: ShardTensorSpec) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: redistribute_local(work(*args, **kwargs), partial, whole)


def _check_written(call: AtenCall, layout: IndexLayout, targets: Mapping[Path, ShardTensorSpec]) -> None:
    """UnsupportedSharding where what is written to would have to be another tensor."""
    first = layout.first
    if first not in call.tensors:
        raise call.refuse(*PLAIN_TARGET)
    # A replicated tensor may be contributed to.
    pairs = zip(call.tensors[first].layout, targets[first].layout, strict=True)
    if not all(own == new or (own.placement.is_replicate() and new.placement.is_partial()) for own, new in pairs):
        raise call.refuse(
            "the value and the tensor that it is written to have different layouts",
            "use the out-of-place form, or redistribute first",
        )
