"""Convolution on one rank: what it does, worked out from specs.

Small shards are put together with their halo, and convolved by one call of the kernel (``joined.py``): to call it takes
longer than to copy them. Large ones are convolved by parts (``by_parts.py``). Both ways send the same messages in the
same order, so each rank may take either.

[Note: owner computes] The rank that owns the input under the kernel's middle tap computes an output
(``Window.boundary``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from ...caches import cached
from ...errors import refuse
from ...exchange import plan_intervals
from ...geometry import Interval, Window, intersect, intervals_of, map_boundaries
from ...halo import Axis, Fetch, Halo
from ...spec import ShardTensorSpec
from ...strides import stride_like
from .by_parts import Border, ConvolutionByParts
from .joined import Convolution, JoinedConvolution
from .parts import Common, Geometry, check_arguments

__all__ = ["Pads", "plan_convolution", "stride_of"]

# Elements of a shard from which on it takes longer to copy it, or to compute its gradient, than to call some kernels.
WORTH_OVERLAPPING = 1 << 16

Pads = tuple[tuple[int, int], ...]


@cached(maxsize=1024)
def plan_convolution(
    spec: ShardTensorSpec,
    weight: tuple[int, ...],
    stride: tuple[int, ...],
    pads: Pads,
    dilation: tuple[int, ...],
    groups: int,
) -> Convolution:
    """Everything about a convolution that follows from specs and arguments; errors here are raised on all ranks."""
    name = f"conv{len(stride)}d"
    shape = spec.shape
    check_arguments(name, tuple(shape), weight, stride, pads, dilation, groups)
    windows = [
        Window(shape[2 + i], weight[2 + i], stride[i], dilation[i], before, after)
        for i, (before, after) in enumerate(pads)
    ]
    sharded = spec.sharded_dims()
    if 1 in sharded:
        raise refuse(
            name, spec, "the channels are sharded", "redistribute to shard a spatial dim or the batch, e.g. Shard(2)"
        )
    sizes = list(spec.sizes)
    axes: list[Axis] = []
    reads: dict[int, Interval] = {}
    outs: dict[int, Interval] = {}
    for dim, m in sharded.items():
        if dim == 0:
            continue
        window, cut = windows[dim - 2], spec.cut(m)
        out_cut = map_boundaries(cut, window.boundary)
        sizes[m] = out_cut
        out = intervals_of(out_cut)
        read = [window.reads(o) for o in out]
        need = [intersect(r, (0, shape[dim])) for r in read]
        rank = spec.coordinate[m]
        plan = plan_intervals(intervals_of(cut), tuple((a, b) if b > a else (0, 0) for a, b in need), rank)
        axes.append(Axis(dim, m, plan))
        reads[dim], outs[dim] = read[rank], out[rank]
    out_global = (shape[0], weight[0], *(w.outputs for w in windows))
    out_spec = ShardTensorSpec.of(
        spec.mesh,
        spec.placements,
        type(spec.tensor_meta)(torch.Size(out_global), stride_of(spec, out_global), spec.tensor_meta.dtype),
        tuple(sizes),
    )
    out_shape = out_spec.local_shape()
    common = Common(weight, stride, dilation, groups)
    return _on_this_rank(spec, out_spec, Geometry(common, spec.local_shape(), out_shape, windows, axes, reads, outs))


def _on_this_rank(spec: ShardTensorSpec, out_spec: ShardTensorSpec, geometry: Geometry) -> Convolution:
    """By parts where that pays, and outputs read no more than one side of the halo."""
    axes, shape = geometry.axes, geometry.shape
    large = math.prod(shape) >= WORTH_OVERLAPPING
    joined = partial(_joined, spec, out_spec, geometry, large)
    shard = geometry.shard()
    if not large or not any(axis.transfers.active for axis in axes) or shard is None or not geometry.divides():
        return joined()
    halo = Halo(axes, spec.mesh, shape)

    def border(i: int, k: int) -> Border | None:
        found = geometry.border(i, k)
        return None if found is None else Border(halo.outgoing(i, found[0]), found[1], axes[i].dim, k == 0)

    borders = tuple((border(i, 0), border(i, 1)) for i in range(len(axes)))
    sides = tuple((geometry.side(i, 0), geometry.side(i, 1)) for i in range(len(axes)))
    edges = (geometry.edge(i, part) for i, axis in enumerate(axes) for _, part in axis.transfers.sends)
    read = tuple(edge for edge in edges if edge is not None)
    return ConvolutionByParts(out_spec, geometry.out_shape, halo, shard, borders, sides, joined, read)


def _joined(spec: ShardTensorSpec, out_spec: ShardTensorSpec, geometry: Geometry, large: bool) -> JoinedConvolution:
    part, zeros = geometry.joined()
    fetch = Fetch(geometry.axes, spec.mesh, geometry.shape, zeros)
    saves = (1,) if fetch else (0, 1)
    # The gradient of a halo is sent before the parameters', see ConvolutionByParts.
    return JoinedConvolution(out_spec, geometry.out_shape, fetch, part, large and not fetch, saves)


def stride_of(spec: ShardTensorSpec, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of an output of ``shape``: channels-last where the input is."""
    meta = spec.tensor_meta
    return stride_like(torch.empty_strided(meta.shape, meta.stride, device="meta"), shape)
