"""Dropout as devices other than the CPU run it; on the CPU it is a draw and a product, see random.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...operators import operator
from ...planning import Call, Plan, meta_of
from .pointwise import pointwise_plan
from .random import drawn_into, is_sharded

_aten = torch.ops.aten


@operator(_aten.native_dropout.default)
def _native_dropout(call: Call) -> Plan:
    spec = call.reduced()[(0,)]
    p, train = call.args[1], call.args[2]
    outs = [spec.replace(meta=meta_of(m)) for m in call.meta]

    def dropout(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        if not is_sharded(spec):
            return _aten.native_dropout.default(x, p, train)
        mask = torch.ones_like(x, dtype=torch.bool)
        if train is False:
            return x.clone(), mask
        mask = drawn_into(mask, "bernoulli_", 1 - p, spec=spec)
        return x * mask * (1 / (1 - p) if p < 1 else 0.0), mask

    return call.plan(outs, {(0,): spec}, call=dropout)


@operator(_aten.native_dropout_backward.default)
def _native_dropout_backward(call: Call) -> Plan:
    return pointwise_plan(call)
