"""Padding and cropping: constant, reflect, replicate and circular, at any dims; sequences of several lengths.

The rank at a global end holds the padding of that end: a boundary ``b`` moves to ``b + left`` (within the new length),
but 0 stays 0 and the other end stays the end. Ranks with empty shards at an end get none of it. What is padded is read
from whoever holds it: for circular padding the ranks at the other end, for reflection perhaps a neighbour.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._compat import AutogradFunction, nn_functions, recomputed
from ...communication.exchange import plan_intervals
from ...communication.halo import Axis, Fetch, Narrow
from ...layout.intervals import Interval, boundaries_of, intersect, intervals_of, length, sizes_of
from ...layout.spec import ShardTensorSpec
from ...layout.strides import stride_like
from ...operators.declaration import Arguments, Composed, LocalPlan, Plan, operator
from ..common.stencil import keeping_sums, per_dim, result_dtype, with_sizes

# -- geometry ---------------------------------------------------------------------------------------------


def pad_sizes(sizes: Sequence[int], left: int, right: int) -> tuple[int, ...]:
    """Shard sizes after padding (cropping, where negative) the two global ends.

    If there is more padding before than after, a convolution follows that sees the past, and gives an output to the
    rank that has the input under its middle tap. With the padding all on the first rank, each such convolution would
    move the boundary by half of the padding, and after some layers the first rank would have everything. So the
    boundary moves by half of all padding, which that convolution takes back. The rows between are exchanged.

    Example:
        >>> pad_sizes((5, 0, 3), 1, 2), pad_sizes((0, 5, 3), 1, 2), pad_sizes((2, 5, 3), -3, 0)
        ((6, 0, 5), (0, 6, 5), (0, 4, 3))
        >>> pad_sizes((5, 3), 2, 0)  # for a causal convolution
        (6, 4)
    """
    n = sum(sizes)
    new = n + left + right
    shift = (left + right) // 2 if left > right >= 0 else left
    boundaries = [0 if b == 0 else new if b == n else min(max(b + shift, 0), new) for b in boundaries_of(sizes)]
    # Of an empty dim every boundary is both ends; its padding goes to the last rank.
    boundaries[-1] = new
    return sizes_of(boundaries)


def pad_reads(mode: str, n: int, pads: Interval, out: Interval) -> tuple[Interval, Interval, int]:
    """What a kernel has to be given to compute the outputs ``out`` of padding a dim of length ``n``, but by a circle.

    Returns:
        The input interval, what the kernel adds at its ends, and how many of its outputs come before the wanted ones.

    Example:
        >>> pad_reads("reflect", 7, (2, 1), (0, 3)), pad_reads("replicate", 7, (2, 1), (0, 2))
        (((0, 3), (2, 0), 0), ((0, 1), (2, 0), 0))
    """
    if not length(out):
        return (0, 0), (0, 0), 0
    a, b = out[0] - pads[0], out[1] - pads[0]
    start, stop = min(max(a, 0), n), max(min(b, n), 0)
    before, after = pads[0] if a < 0 else 0, pads[1] if b > n else 0
    reach = {"constant": (0, 0), "replicate": (1, 1), "reflect": (before + 1, after + 1)}[mode]
    if before:
        stop = max(stop, reach[0])
    if after:
        start = min(start, n - reach[1])
    return (start, stop), (before, after), a - start + before


def pad_sources(n: int, left: int, right: int) -> tuple[Interval, Interval]:
    """Which interval of a dim of length ``n`` that closes to a circle becomes the padding at its start and at its end.

    Negative ``left`` and ``right`` crop; what a circle closes over is what cropping leaves.

    Example:
        >>> pad_sources(7, 2, 1), pad_sources(7, 2, -1)
        (((5, 7), (0, 1)), ((4, 6), (0, 0)))
    """
    start, stop = max(-left, 0), n - max(-right, 0)
    return (stop - max(left, 0), stop), (start, start + max(right, 0))


# -- the plan ----------------------------------------------------------------------------------------------------------


class _Circle:
    """How one sharded dim of a local tensor is padded to a circle.

    Args:
        shape: of the local tensor.
        pads: what is added at the start and at the end.
        outs: what each rank has then.

    Attributes:
        shape: of the result.
    """

    def __init__(
        self, spec: ShardTensorSpec, dim: int, shape: Sequence[int], pads: Interval, outs: Sequence[Interval]
    ) -> None:
        start, end = pad_sources(spec.shape[dim], *pads)
        parts = [_parts(out, pads[0], spec.shape[dim]) for out in outs]
        pieces = list(zip((start[0], 0, end[0]), zip(*parts, strict=True), strict=True))
        needs = [[(at + a, at + b) for a, b in wanted] for at, wanted in pieces]
        self._fetches = [_fetch(spec, dim, shape, need) for need in needs if any(b > a for a, b in need)]
        here = outs[spec.coordinate[spec.sharded_dims()[dim]]]
        self._dim, self.shape = dim, tuple(length(here) if d == dim else n for d, n in enumerate(shape))

    def __call__(self, local: Tensor) -> Tensor:
        pieces = [fetch(local) for fetch in self._fetches]
        return _Joined.apply(self._dim, stride_like(local, self.shape), *pieces)


class _Joined(AutogradFunction):
    """``torch.cat(pieces, dim)`` in memory with these strides: pieces may lie otherwise, such as empty ones."""

    apply: ClassVar[Callable[..., Tensor]]

    @staticmethod
    def forward(ctx: Any, dim: int, stride: Sequence[int], *pieces: Tensor) -> Tensor:
        ctx.dim, ctx.sizes = dim, [t.shape[dim] for t in pieces]
        shape = [sum(ctx.sizes) if d == dim else n for d, n in enumerate(pieces[0].shape)]
        out = torch.empty_strided(shape, stride, dtype=pieces[0].dtype, device=pieces[0].device)
        return torch.cat(pieces, dim, out=out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, *grad.split_with_sizes(ctx.sizes, ctx.dim)


def _plan(call: Arguments, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Plan:
    """The plan of ``F.pad`` of the operand ``input``."""
    spec = call.tensors["input"]
    meta = call.returned(F.pad, spec, list(pad), mode=mode, value=value)
    ndim = len(spec.shape)
    pads = {ndim - 1 - i // 2: (pad[i], pad[i + 1]) for i in range(0, len(pad), 2)}
    linear = mode != "constant" or not value
    spec = call.redistribute("input", keeping_sums(spec) if linear else spec.for_gradient())
    sharded = {d: m for d, m in spec.sharded_dims().items() if any(pads.get(d, ()))}
    for d in sharded if mode == "circular" else ():
        if max(pads[d]) > spec.shape[d] + min(*pads[d], 0):
            reason = f"padding {pads[d]} crops dim {d} and wraps around what is left more than once"
            raise call.refuse(reason, "crop first, then pad")
    dtype = spec.tensor_meta.dtype
    if mode != "constant":
        dtype = result_dtype(call, dtype, lambda t: F.pad(t, [0] * len(pad), mode=mode), [1] * ndim)
    sizes = {d: pad_sizes(spec.sizes_along(m), *pads[d]) for d, m in sharded.items()}
    # What is left for one call of torch's: the free dims, and the global ends but of a circle.
    left = {d: p for d, p in pads.items() if d not in sharded}
    steps: list[Fetch | _Circle] = []
    wanted: list[Narrow] = []
    shape = spec.local_shape()
    for d in sorted(sharded, reverse=True):  # as torch pads, the last dim first
        outs, rank = intervals_of(sizes[d]), spec.coordinate[sharded[d]]
        if mode == "circular":
            steps.append(_Circle(spec, d, shape, pads[d], outs))
        else:
            reads = [pad_reads(mode, spec.shape[d], pads[d], out) for out in outs]
            steps.append(_fetch(spec, d, shape, [need for need, _, _ in reads]))
            need, left[d], drop = reads[rank]
            if length(need) + sum(left[d]) > sizes[d][rank]:
                wanted.append((d, drop, sizes[d][rank]))
        shape = steps[-1].shape
    flat = [left.get(ndim - 1 - i // 2, (0, 0))[i % 2] for i in range(len(pad))]
    out = with_sizes(spec, meta, dtype, sizes)
    empty, out_shape, casts = mode != "constant" and 0 in shape, out.local_shape(), dtype != spec.tensor_meta.dtype

    @recomputed()
    def padded(local: Tensor) -> Tensor:
        for step in steps:
            local = step(local)
        if any(flat):
            local = local.reshape(out_shape) if empty else F.pad(local, flat, mode=mode, value=value)
        for place in () if empty else wanted:
            local = local.narrow(*place)
        local = local.clone() if wanted else local  # dense, and without the rest
        return local.to(dtype) if casts else local

    return LocalPlan(padded, out)


def _parts(out: Interval, left: int, n: int) -> tuple[Interval, Interval, Interval]:
    """An output interval as what it holds of the padding before, of the input (input indices) and of the padding after.

    The padding is counted from its own start.
    """
    a, b = out[0] - left, out[1] - left
    before = intersect((a + left, b + left), (0, max(left, 0)))
    body = intersect((a, b), (0, n))
    after = intersect((a - n, b - n), (0, b - n))
    return before, body, after


def _fetch(spec: ShardTensorSpec, dim: int, shape: Sequence[int], need: Sequence[Interval]) -> Fetch:
    """What fetches ``need`` (per rank) of a sharded dim, where the other dims of the shard have other lengths."""
    m = spec.sharded_dims()[dim]
    need = tuple((a, b) if b > a else (0, 0) for a, b in need)
    transfers = plan_intervals(intervals_of(spec.sizes_along(m)), need, spec.coordinate[m])
    return Fetch([Axis(dim, m, transfers)], spec.mesh, shape)


# -- entry points ------------------------------------------------------------------------------------------------------

_nn, _aten = nn_functions, torch.ops.aten


@operator(*(F.pad, _nn.pad, _aten.pad, torch.constant_pad_nd, _aten.constant_pad_nd), tensors="input", partial="input")
def plan_pad(
    call: Arguments, input: ShardTensorSpec, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Plan:
    return _plan(call, pad, mode, value)


def _declare_pad(name: str, mode: str, n: int) -> None:
    @operator(getattr(_nn, name), getattr(_aten, name), tensors="input", partial="input")
    def plan_pad_in_one_mode(call: Arguments, input: ShardTensorSpec, padding: int | Sequence[int]) -> Plan:
        return _plan(call, per_dim(padding, 2 * n), mode)


for _n in (1, 2, 3):
    _declare_pad(f"reflection_pad{_n}d", "reflect", _n)
    _declare_pad(f"replication_pad{_n}d", "replicate", _n)


@operator(_nn.pad_sequence, _aten.pad_sequence, tensors="sequences", partial="sequences")
def plan_pad_sequence(
    call: Arguments,
    sequences: Sequence[ShardTensorSpec],
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> Composed:
    dtype = call.returned(_nn.pad_sequence, sequences, batch_first, padding_value, padding_side).dtype
    lengths = [spec.shape[0] for spec in sequences]
    n, dim = max(lengths), 0 if batch_first else 1
    # The first sharded tensor of a stack gives it its sizes. That of a short sequence, padded, would be uneven.
    first = max(range(len(lengths)), key=lambda i: (bool(sequences[i].sharded_dims()), lengths[i]))
    others = (0, 0) * (len(sequences[0].shape) - 1)

    def join(tensors: Sequence[Tensor]) -> Tensor:
        padded = []
        for t, k in zip(tensors, lengths, strict=True):
            ends = (0, n - k) if padding_side == "right" else (n - k, 0)
            padded.append(F.pad(t.to(dtype), (*others, *ends), value=padding_value) if k < n else t.to(dtype))
        stacked = torch.stack(padded[first:] + padded[:first], dim)
        return stacked.roll(first, dim) if first else stacked

    return Composed(join)
