"""Places in a sorted sequence, ``searchsorted`` and ``bucketize``; and ``isin``, for which nothing has to be sorted.

A place is how many elements of the sequence are smaller, a sum over its shards.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ..._compat import OpOverload
from ...dispatch.planning import AtenCall, AtenPlan, Path
from ...dispatch.registry import DECLINED, register
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import operator
from ..indexing.index_layout import INDEXED, Labels
from ..indexing.index_plan import labelled

_aten = torch.ops.aten


@operator(_aten.isin.Tensor_Tensor, _aten.isin.Tensor_Scalar)
def _against_a_list(call: AtenCall) -> AtenPlan:
    names = list(range(len(call.args[0].shape)))
    roles: dict[Path, Labels] = {(0,): names} if isinstance(call.args[0], (Tensor, ShardTensorSpec)) else {}
    if isinstance(call.args[1], (Tensor, ShardTensorSpec)):
        roles[(1,)] = [INDEXED] * len(call.args[1].shape)
    return labelled(call, roles, names)


@operator(_aten.bucketize.Tensor)
def _bucketize(call: AtenCall) -> AtenPlan:
    names = list(range(len(call.args[0].shape)))
    return labelled(call, {(1,): [INDEXED], (0,): names}, names, counts=True)


@operator(_aten.searchsorted.Tensor, _aten.searchsorted.Scalar)
def _searchsorted(call: AtenCall) -> AtenPlan:
    number = call.func == _aten.searchsorted.Scalar
    names: list[Hashable] = [] if number else list(range(len(call.args[1].shape)))
    table = [INDEXED] if len(call.args[0].shape) == 1 else [*names[:-1], INDEXED]
    roles: dict[Path, Labels] = {(0,): table} if number else {(0,): table, (1,): names}
    return labelled(call, roles, names, counts=True)


# The order of the table depends on data: the sorter's elements are gathered first.
def _register_sorted(op: OpOverload) -> None:
    @register(op)
    def _(sequence: Tensor, values: Tensor | float, **kwargs: Any) -> Tensor:
        sorter = kwargs.pop("sorter", None)
        if sorter is None:
            return DECLINED
        torch.searchsorted(  # torch's own errors
            torch.empty(sequence.shape, dtype=sequence.dtype, device="meta"),
            torch.empty(values.shape, device="meta") if isinstance(values, Tensor) else values,
            sorter=torch.empty(sorter.shape, dtype=sorter.dtype, device="meta"),
        )
        ordered = _aten.gather.default(sequence, -1, sorter)
        places: Tensor = op(ordered, values, **kwargs)
        return places


for _op in (_aten.searchsorted.Tensor, _aten.searchsorted.Scalar):
    _register_sorted(_op)
