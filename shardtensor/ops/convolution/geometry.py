"""What a rank reads and computes of a convolution: worked out from specs, on every rank for itself.

[Note: owner computes] The rank that owns the input under the kernel's middle tap computes an output
(``Window.boundary``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ...communication.halo import Fetch
from ...errors import refuse
from ...layout.geometry import Interval, Window, intersect, intervals_of, length, map_boundaries
from ...layout.spec import ShardTensorSpec
from ...layout.strides import stride_like
from ..common.alignment import wide_dtype
from ..common.stencil import resized
from .halo_conv import ConvolutionPlan, LocalConvolution, SplitGradient, Strip

Pads = tuple[tuple[int, int], ...]

# How many times as many outputs as those that are computed once more a rank has, where its gradient is computed in two:
# for memory at any rate, and in half precision where the rest is to be spared the kernel of float32.
SHARE = {False: 32, True: 2}


def plan_convolution(
    spec: ShardTensorSpec,
    weight: tuple[int, ...],
    stride: tuple[int, ...],
    pads: Pads,
    dilation: tuple[int, ...],
    groups: int,
) -> ConvolutionPlan:
    """This rank's part of a convolution; errors are raised on all ranks.

    Args:
        weight: its shape.
        pads: zeros before and after each spatial dim of the global tensor.
    """
    name, shape = f"conv{len(stride)}d", spec.shape
    _check(name, tuple(shape), weight, stride, pads, dilation, groups)
    windows = {
        d: Window(shape[d], weight[d], stride[d - 2], dilation[d - 2], *pads[d - 2]) for d in range(2, len(shape))
    }
    sharded = spec.sharded_dims()
    if 1 in sharded:
        raise refuse(
            name, spec, "the channels are sharded", "redistribute to shard a spatial dim or the batch, e.g. Shard(2)"
        )
    sizes, needs = {}, {}
    held, outs = {d: (0, w.size) for d, w in windows.items()}, {d: (0, w.outputs) for d, w in windows.items()}
    for d, m in sharded.items():
        if d == 0:
            continue
        sizes[d] = map_boundaries(spec.sizes_along(m), windows[d].boundary)
        outputs, rank = intervals_of(sizes[d]), spec.coordinate[m]
        needs[d] = [_within(windows[d].reads(out), shape[d]) for out in outputs]
        held[d], outs[d] = needs[d][rank], outputs[rank]
    out_spec = output_spec(spec, (shape[0], weight[0], *(w.outputs for w in windows.values())), sizes)
    half = wide_dtype(spec.tensor_meta.dtype) != spec.tensor_meta.dtype
    local = _Local(out_spec.local_shape(), windows, stride, dilation, groups, half)
    convolve, zeros = local.convolution(held, outs), (0, 0)
    if convolve.zeros and needs:
        # Zeros along the dim that is fetched last come with what is fetched. (Along others they would travel.)
        last = [*needs][-1]
        zeros = local.around(last, held[last], outs[last])
        held[last] = held[last][0] - zeros[0], held[last][1] + zeros[1]
        convolve = local.convolution(held, outs)
    fetch = Fetch.of(spec, needs, zeros)
    return ConvolutionPlan(out_spec, fetch, convolve, local.split(fetch, fetch.shape, held, outs))


def _within(read: Interval, size: int) -> Interval:
    a, b = intersect(read, (0, size))
    return (a, b) if b > a else (0, 0)


def output_spec(spec: ShardTensorSpec, shape: Sequence[int], sizes: Mapping[int, tuple[int, ...]]) -> ShardTensorSpec:
    """The spec of a result of this global shape, channels-last where the input is.

    Args:
        sizes: of the shards, by tensor dim, where they differ from the input's.
    """
    meta = spec.tensor_meta
    stride = stride_like(torch.empty_strided(meta.shape, meta.stride, device="meta"), shape)
    return resized(spec, torch.empty_strided(shape, stride, device="meta"), meta.dtype, sizes)


Intervals = Mapping[int, Interval]  # by tensor dim, in global indices


@dataclass(frozen=True, slots=True)
class _Local:
    """How the kernel computes some outputs from some inputs.

    Attributes:
        out_shape: of this rank's outputs.
        windows: by spatial tensor dim.
        stride, dilation, groups: of the convolution.
        half: whether it is of half precision.
    """

    out_shape: Sequence[int]
    windows: Mapping[int, Window]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    half: bool

    def around(self, d: int, held: Interval, out: Interval) -> Interval:
        """How many zeros (negative: how many inputs less) what is held lacks of what the outputs read."""
        start, stop = self.windows[d].reads(out)
        return held[0] - start, stop - held[1]

    def convolution(self, held: Intervals, outs: Intervals) -> LocalConvolution:
        """The call of the kernel that gives the outputs ``outs`` of inputs that hold ``held``."""
        padding, zeros = [], []
        for d, window in self.windows.items():
            before, after = self.around(d, held[d], outs[d])
            # The kernel pads both ends alike.
            room = length(held[d]) + 2 * before - window.extent
            fits = before >= 0 and room // window.stride + 1 == length(outs[d])
            padding.append(before if fits else 0)
            zeros.append((0, 0) if fits else (before, after))
        shape = *self.out_shape[:2], *(length(outs[d]) for d in self.windows)
        if 0 in shape or not all(length(held[d]) for d in self.windows):
            padding, zeros = [0] * len(padding), []  # nothing is computed
        around = tuple(n for pair in reversed(zeros) for n in pair)
        arguments = self.stride, tuple(padding), self.dilation, False, (0,) * len(padding), self.groups
        return LocalConvolution(shape, arguments, around if any(around) else ())

    def split(self, fetch: Fetch, shape: Sequence[int], held: Intervals, outs: Intervals) -> SplitGradient | None:
        """How to compute the gradient of what is read in two; None where it is not worth it, or more than one dim.

        Args:
            shape: of what is read.
        """
        if len(fetch.axes) != 1 or 0 in (*shape, *self.out_shape):
            return None
        if len(self.windows) == 3 and not self.half:
            return None  # torch's kernels for few planes of a volume are ten times slower on the CPU
        d, transfers = fetch.axes[0].dim, fetch.axes[0].transfers
        own = transfers.own
        if not transfers.active or not length(own) or intersect(own, transfers.need) != own:
            return None
        shard = self.convolution({**held, d: own}, outs)
        received = [part for _, part in transfers.recvs]
        shared = [part for _, part in transfers.sends] if self.half else []
        touched = [self.windows[d].touching(part, outs[d]) for part in (*received, *shared)]
        few = SHARE[self.half] * sum(map(length, touched)) <= length(outs[d])
        if shard.zeros or not few or not all(map(length, touched)):
            return None

        def strip(part: Interval) -> Strip:
            outputs = self.windows[d].touching(part, outs[d])
            reads = intersect(self.windows[d].reads(outputs), held[d])
            reads = min(reads[0], part[0]), max(reads[1], part[1])
            return Strip(
                (d, outputs[0] - outs[d][0], length(outputs)),
                tuple(length(reads) if dim == d else n for dim, n in enumerate(shape)),
                self.convolution({**held, d: reads}, {**outs, d: outputs}),
                (d, part[0] - reads[0], length(part)),
            )

        edges = [((d, part[0] - own[0], length(part)), strip(part)) for part in shared]
        return SplitGradient(shard, tuple(map(strip, received)), tuple(edges))


def _check(
    name: str,
    shape: tuple[int, ...],
    weight: tuple[int, ...],
    stride: tuple[int, ...],
    pads: Sequence[Interval],
    dilation: tuple[int, ...],
    groups: int,
) -> None:
    """The errors that the whole tensor would give, in terms of the whole tensor."""
    if len(weight) != len(shape):
        raise RuntimeError(f"{name}: a weight of shape {weight} for an input of shape {shape}")
    if min(stride) < 1 or min(dilation) < 1 or groups < 1 or min(min(p) for p in pads) < 0:
        raise RuntimeError(
            f"{name}: stride {stride}, dilation {dilation} and groups {groups} must be positive, padding {pads} not "
            "negative"
        )
    if shape[1] != weight[1] * groups or weight[0] % groups:
        raise RuntimeError(
            f"{name}: weight {weight} with groups={groups} does not fit {shape[1]} input channels: "
            f"it expects {weight[1] * groups}, and output channels that are a multiple of groups"
        )
    padded = tuple(n + a + b for n, (a, b) in zip(shape[2:], pads, strict=True))
    extents = tuple((k - 1) * d + 1 for k, d in zip(weight[2:], dilation, strict=True))
    if any(e > n for e, n in zip(extents, padded, strict=True)):
        raise RuntimeError(
            f"{name}: kernel size {weight[2:]} (dilated to {extents}) is greater than the padded input {padded} of the "
            f"global tensor {shape}; use a smaller kernel or more padding"
        )
