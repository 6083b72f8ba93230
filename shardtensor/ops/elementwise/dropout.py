"""Dropout as devices other than the CPU run it; on the CPU it is a draw and a product, see random.py.

Its gradient is elementwise, see pointwise.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...dispatch.planning import AtenCall, AtenPlan, meta_of
from ...operators.declaration import operator
from .random import drawn_into, is_sharded

_aten = torch.ops.aten


@operator(_aten.native_dropout.default)
def plan_native_dropout(call: AtenCall) -> AtenPlan:
    spec = call.reduced()[(0,)]
    p, train = call.args[1], call.args[2]
    outs = [spec.replace(meta=meta_of(m)) for m in call.meta]
    sharded = is_sharded(spec)

    def dropout(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        if not sharded:
            return _aten.native_dropout.default(x, p, train)  # type: ignore[no-any-return]
        if train is False:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        mask = drawn_into(torch.empty_like(x, dtype=torch.bool), "bernoulli_", 1 - p, spec=spec)
        # A product of the three, which is one kernel on GPUs.
        return _aten.native_dropout_backward.default(x, mask, 1 / (1 - p) if p < 1 else 0.0), mask

    return call.plan(outs, {(0,): spec}, call=dropout)
