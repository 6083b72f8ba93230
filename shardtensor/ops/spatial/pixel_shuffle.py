"""``pixel_shuffle``, ``pixel_unshuffle`` and ``channel_shuffle``: pixels become channels, and channels pixels."""

from __future__ import annotations

from typing import Any

import torch

from ...dispatch.planning import AtenCall, AtenPlan
from ...operators.declaration import operator
from ..shape.view import carry, fitted, moved_off

_aten = torch.ops.aten


@operator(_aten.pixel_shuffle.default, _aten.pixel_unshuffle.default, _aten.channel_shuffle.default)
def _shuffle(call: AtenCall) -> AtenPlan:
    """Blocks of ``r`` x ``r`` pixels to channels and back: both spatial dims, and the channels, stay dims."""
    spec, r = call.specs[0], call.args[1]
    n = len(spec.shape)
    dims: dict[int, Any] = {d: d for d in range(n)}
    if call.func == _aten.channel_shuffle.default:
        del dims[1]
    elif call.func == _aten.pixel_shuffle.default:
        dims.update({n - 3: (n - 3, 1, r * r), n - 2: (n - 2, r, 1), n - 1: (n - 1, r, 1)})
    else:
        dims.update({n - 3: (n - 3, r * r, 1), n - 2: (n - 2, 1, r), n - 1: (n - 1, 1, r)})
    source = fitted(moved_off(spec, dims), dims)
    out = carry(call, source, call.meta, dims)
    if 0 in out.local_shape():  # on which torch's kernels fail, or return other shapes
        shape = out.local_shape()
        return call.plan(out, {(0,): source}, call=lambda x, *_: x.new_empty(shape))
    return call.plan(out, {(0,): source})
