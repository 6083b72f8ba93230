"""Windows as a dim of their own: Tensor.unfold, F.unfold, F.fold.

A window along a sharded dim belongs to the rank that owns its middle; what it reads beyond the shard is fetched, as
for a convolution. F.unfold is two of these and a reshape that flattens the windows' rows and columns; so where the
columns are sharded, the input's longest other dim is sharded instead first, see shape/view.py's [Note: moved off].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...communication.halo import Fetch
from ...dispatch import planning
from ...dispatch.copied_views import Moved, mark_copied
from ...dispatch.registry import DECLINED
from ...dispatch.tensor import redistribute_to
from ...layout.intervals import intervals_of, map_boundaries
from ...layout.spec import ShardTensorSpec
from ...layout.windows import Window
from ...operators.declaration import Arguments, Composed, LocalPlan, Plan, operator
from ..common.stencil import keeping_sums, per_dim, with_sizes
from ..shape.view import carry, fitted, moved_off, wrap_dim

_aten = torch.ops.aten
Numbers = int | Sequence[int]


@operator(Tensor.unfold, tensors="self", partial="self")
def plan_unfold(call: Arguments, self: ShardTensorSpec, dimension: int, size: int, step: int) -> Plan:
    """Windows of a sharded dim, as a new last dim."""
    if not self.sharded_dims():
        return DECLINED
    meta = call.returned(Tensor.unfold, self, dimension, size, step)  # torch's own errors
    dim = wrap_dim(dimension, len(self.shape))
    if dim not in self.sharded_dims():
        return DECLINED
    spec = keeping_sums(self)
    m = spec.sharded_dims()[dim]
    window = Window(size=spec.shape[dim], kernel=size, stride=step)
    sizes = map_boundaries(spec.sizes_along(m), window.owned_boundary)
    fetch = Fetch.of(spec, {dim: [window.reads(out) for out in intervals_of(sizes)]})
    mine, ndim = sizes[spec.coordinate[m]], len(spec.shape)

    def windows(local: Tensor) -> Tensor:
        local = fetch(local)
        if mine:
            return local.unfold(dim, size, step)
        return local.narrow(dim, 0, 0).unsqueeze(-1).expand(*[-1] * ndim, size)

    local_plan = LocalPlan(windows, with_sizes(spec, meta, spec.tensor_meta.dtype, {dim: sizes}))
    local_plan.view = True

    def frames(x: Any) -> Any:
        return mark_copied(local_plan.run([redistribute_to(x, spec)]), x, Moved(again=frames))

    return Composed(frames)


@operator(torch.as_strided, Tensor.as_strided, tensors="input")
def _as_strided(
    call: Arguments,
    input: ShardTensorSpec,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Plan:
    """Frames: windows of one or several dims, and slices of others. Two dims of the result run along one that has
    windows. The whole tensor, and its first element. Of what is only slices torch has other operators, and without
    windows this one is refused.
    """
    if not input.sharded_dims() or storage_offset is not None or len(size) != len(stride):
        return DECLINED
    shape, strides = input.shape, input.tensor_meta.stride
    geometry = [(n, step) for n, step in zip(size, stride, strict=True) if n != 1]
    if geometry == [(n, step) for n, step in zip(shape, strides, strict=True) if n != 1]:
        return Composed(lambda x: x.view(size))
    if not geometry and shape.numel():
        return Composed(lambda x: x[(0,) * len(shape)].reshape(size))
    outer_first = sorted((d for d, n in enumerate(shape) if n > 1), key=lambda d: -strides[d])
    runs: dict[int, list[tuple[int, int, int]]] = {d: [] for d in range(len(shape))}  # step, dim of the result, length
    for k, (n, step) in enumerate(zip(size, stride, strict=True)):
        if n != 1:
            d = next((d for d in outer_first if 0 < strides[d] <= step and not step % strides[d]), None)
            if d is None or not n:
                return DECLINED
            runs[d].append((step // strides[d], k, n))
    lengths = [1 + sum(step * (n - 1) for step, _, n in runs[d]) for d in range(len(shape))]
    if max(map(len, runs.values())) != 2 or any(n > m for n, m in zip(lengths, shape, strict=True)):
        return DECLINED

    def parts(x: Tensor) -> Tensor:
        order, inner = [], []  # of the result's dims: those in place of the tensor's, and those of windows behind them
        for d, run in enumerate(runs.values()):
            (step, k, _), *within = sorted(run, reverse=True) or [(1, -1, 1)]
            x = x.narrow(d, 0, lengths[d])
            if within:
                ((every, j, n),) = within
                x = x.unfold(d, every * (n - 1) + 1, step)[..., ::every]
                inner.append(j)
            else:
                x = x[(slice(None),) * d + (slice(None, None, step),)]
            order.append(k)
        kept = [k for k in (*order, *inner) if k >= 0]
        x = x.reshape([n for n, k in zip(x.shape, (*order, *inner), strict=True) if k >= 0])
        return x.permute([kept.index(k) for k in sorted(kept)]).reshape(list(size))

    return Composed(parts)


@operator(torch.unfold_copy, _aten.unfold_copy, tensors="input", partial="input")
def plan_unfold_copy(call: Arguments, input: ShardTensorSpec, dimension: int, size: int, step: int) -> Plan:
    return Composed(lambda x: x.unfold(dimension, size, step).clone(memory_format=torch.contiguous_format))


@operator(_aten.unfold.default)
def _unfold_below_autograd(call: planning.AtenCall) -> planning.AtenPlan:
    spec = call.specs[0]
    dim = wrap_dim(call.args[1], len(spec.shape))
    return planning.AtenPlan(carry(call, spec, call.meta, {d: d for d in range(len(spec.shape)) if d != dim}))


@operator(_aten.unfold_backward.default)
def _unfold_backward(call: planning.AtenCall) -> planning.AtenPlan:
    spec = call.reduced()[(0,)]
    shape, dim = call.args[1:3]
    dim = wrap_dim(dim, len(shape))
    out = carry(call, spec, call.meta, {d: d for d in range(len(shape)) if d != dim})
    local = list(out.local_shape())
    return call.plan(out, {(0,): spec}, call=lambda g, _, *rest: _aten.unfold_backward.default(g, local, *rest))


@operator(F.unfold, tensors="input", partial="input")
def plan_unfold_images(
    call: Arguments,
    input: ShardTensorSpec,
    kernel_size: Numbers,
    dilation: Numbers = 1,
    padding: Numbers = 0,
    stride: Numbers = 1,
) -> Plan:
    ndim = len(input.shape)
    if not {ndim - 1, ndim - 2} & set(input.sharded_dims()):
        return DECLINED
    shape = call.returned(F.unfold, input, kernel_size, dilation, padding, stride).shape  # torch's own errors
    kernel, steps, pads, strides = (per_dim(v, 2) for v in (kernel_size, dilation, padding, stride))
    source = moved_off(input, {d: d for d in range(ndim - 1)})

    def unfold(x: Tensor) -> Tensor:
        x = redistribute_to(x, source)
        x = F.pad(x, (pads[1], pads[1], pads[0], pads[0])) if any(pads) else x
        for dim, size, apart, step in zip((ndim - 2, ndim - 1), kernel, steps, strides, strict=True):
            x = x.unfold(dim, (size - 1) * apart + 1, step)[..., ::apart]
        # (batch, channel, row, column, y, x) to (batch, (channel, y, x), (row, column))
        return x.permute(*range(ndim - 2), ndim, ndim + 1, ndim - 2, ndim - 1).reshape(shape)

    return Composed(unfold)


@operator(_aten.im2col.default, _aten.col2im.default)
def _columns(call: planning.AtenCall) -> planning.AtenPlan:
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
