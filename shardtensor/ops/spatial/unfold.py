"""Windows as a dim of their own: Tensor.unfold, F.unfold, F.fold.

A window along a sharded dim belongs to the rank that owns its middle; what it reads beyond the shard is borrowed, as
for a convolution. F.unfold is two of these and a reshape that flattens the windows' rows and columns; so where the
columns are sharded, the input's longest other dim is sharded instead first, see shape/view.py's [Note: moved off].
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...copies import mark_copied
from ...geometry import Window, intervals_of, map_cuts
from ...operators import operator
from ...planning import Call, Plan
from ...registry import register
from ...tensor import ShardTensor, redistribute_to
from ..common.stencil import borrow_dims, finish, on_meta, per_dim, settled
from ..shape.view import carry, fitted, moved_off, wrap_dim

__all__: list[str] = []

_aten = torch.ops.aten


@register(Tensor.unfold)
def _unfold(self: Any, dimension: int, size: int, step: int) -> Any:
    """Windows of a sharded dim, as a new last dim."""
    if not isinstance(self, ShardTensor) or not self._spec.sharded_dims():
        return NotImplemented
    meta = on_meta(self).unfold(dimension, size, step)  # torch's own errors
    dim = wrap_dim(dimension, self.ndim)
    if dim not in self._spec.sharded_dims():
        return NotImplemented
    x = settled(self, linear=True)
    spec = x._spec
    m = spec.sharded_dims()[dim]
    window = Window(size=spec.shape[dim], kernel=size, stride=step)
    sizes = map_cuts(spec.cut(m), window.cut)
    outputs = intervals_of(sizes)
    local = borrow_dims(x.to_local(), spec, {dim: [window.reads(out) for out in outputs]})
    if sizes[spec.coordinate[m]]:
        windows = local.unfold(dim, size, step)
    else:
        windows = local.narrow(dim, 0, 0).unsqueeze(-1).expand(*(-1 for _ in spec.shape), size)
    return mark_copied(finish(windows, x, meta, {dim: sizes}), self)


@register(torch.unfold_copy)
def _unfold_copy(input: Any, dimension: int, size: int, step: int, *, out: Any = None) -> Any:
    if out is not None or not isinstance(input, ShardTensor):
        return NotImplemented
    return input.unfold(dimension, size, step).clone(memory_format=torch.contiguous_format)


@operator(_aten.unfold.default)
def _unfold_below_autograd(call: Call) -> Plan:
    spec = call.specs[0]
    dim = wrap_dim(call.args[1], len(spec.shape))
    return Plan(carry(call, spec, call.meta, {d: d for d in range(len(spec.shape)) if d != dim}))


@operator(_aten.unfold_backward.default)
def _unfold_backward(call: Call) -> Plan:
    spec = call.reduced()[(0,)]
    shape, dim = call.args[1:3]
    dim = wrap_dim(dim, len(shape))
    out = carry(call, spec, call.meta, {d: d for d in range(len(shape)) if d != dim})
    local = list(out.local_shape())
    return call.plan(out, {(0,): spec}, call=lambda g, _, *rest: _aten.unfold_backward.default(g, local, *rest))


@register(F.unfold)
def _unfold_images(input: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Any:
    if not isinstance(input, ShardTensor) or not {input.ndim - 1, input.ndim - 2} & set(input._spec.sharded_dims()):
        return NotImplemented
    meta = F.unfold(on_meta(input), kernel_size, dilation, padding, stride)  # torch's own errors
    kernel, steps, pads, strides = (per_dim(v, 2) for v in (kernel_size, dilation, padding, stride))
    spec = input._spec
    x = redistribute_to(input, moved_off(spec, {d: d for d in range(input.ndim - 1)}))
    x = F.pad(x, (pads[1], pads[1], pads[0], pads[0])) if any(pads) else x
    n = x.ndim
    for dim, size, apart, step in zip((n - 2, n - 1), kernel, steps, strides, strict=True):
        x = x.unfold(dim, (size - 1) * apart + 1, step)[..., ::apart]
    # (batch, channel, row, column, y, x) to (batch, (channel, y, x), (row, column))
    return x.permute(*range(n - 2), n, n + 1, n - 2, n - 1).reshape(meta.shape)


@operator(_aten.im2col.default, _aten.col2im.default)
def _columns(call: Call) -> Plan:
    """With images and channels sharded: a channel's taps stay together."""
    spec = call.specs[0]
    channel = len(spec.shape) - (3 if call.func == _aten.im2col.default else 2)
    taps = math.prod(call.args[1 if call.func == _aten.im2col.default else 2])
    block = (channel, taps, 1) if call.func == _aten.im2col.default else (channel, 1, taps)
    dims: dict[int, Any] = {channel: block} if channel == 0 else {0: 0, channel: block}
    source = fitted(moved_off(spec, dims), dims)
    out = carry(call, source, call.meta, dims)
    if 0 in out.local_shape():
        shape = out.local_shape()
        return call.plan(out, {(0,): source}, call=lambda x, *_: x.new_zeros(shape))
    return call.plan(out, {(0,): source})
