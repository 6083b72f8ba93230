"""Convolution over sharded spatial dims, of any kernel, stride, dilation, padding, groups and shard sizes.

What a rank reads and computes, worked out from specs; torch's functions, above autograd, and the aten operators below
it; transposed convolution. What is done with tensors stands in ``halo_conv.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ..._compat import TensorMeta
from ...communication.halo import Fetch, Narrow
from ...context import contributions_are_exact
from ...dispatch.planning import spec_of
from ...dispatch.registry import DECLINED, register
from ...dispatch.tensor import as_gradient, wrap
from ...errors import refuse
from ...layout.caches import cached
from ...layout.intervals import Interval, chunk_sizes, intersect, intervals_of, length, map_boundaries
from ...layout.spec import ShardTensorSpec
from ...layout.strides import stride_like
from ...layout.windows import Window
from ...operators.declaration import Arguments, Composed, Plan, operator
from ..common.alignment import is_little, wide_dtype
from ..common.named_dims import are_much_more_even, free_dims
from ..common.stencil import per_dim, with_sizes
from .halo_conv import ConvolutionPlan, LocalConvolution, OwnersGradient, SplitGradient, Strip

# -- geometry ----------------------------------------------------------------------------------------------------------

# What a rank reads and computes of a convolution: worked out from specs, on every rank for itself.
# An output is computed by the rank that owns the input under the kernel's middle tap (``Window.owned_boundary``).

Pads = tuple[tuple[int, int], ...]


def owners_compute(dtype: torch.dtype) -> bool:
    """Whether the owners of the inputs compute their gradients: where a sum over ranks would be rounded twice."""
    return wide_dtype(dtype) != dtype


def worth_splitting(device: str) -> tuple[int, int]:
    """From which shards on a rank's gradient is computed in two.

    Smaller ones cost more of the host's time than they save: a kernel for each peer. On the CPU with one thread the two
    ways take the same time at 2 ** 18 elements, one third less in two at 2 ** 22.

    Returns:
        How many times as many outputs as those that are computed once more a rank is to have, and how many elements.
    """
    return (32, 1 << 18) if device == "cpu" else (8, 1 << 21)


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
        sizes[d] = map_boundaries(spec.sizes_along(m), windows[d].owned_boundary)
        outputs, rank = intervals_of(sizes[d]), spec.coordinate[m]
        needs[d] = [intersect(windows[d].reads(out), (0, shape[d])) for out in outputs]
        held[d], outs[d] = needs[d][rank], outputs[rank]
    out_spec = output_spec(spec, (shape[0], weight[0], *(w.outputs for w in windows.values())), sizes)
    local = _Local(out_spec.local_shape(), windows, stride, dilation, groups)
    convolve, zeros = local.convolution(held, outs), (0, 0)
    if convolve.zeros and needs:
        # Zeros along the dim that is fetched last come with what is fetched. (Along others they would travel.)
        last = [*needs][-1]
        zeros = local.around(last, held[last], outs[last])
        held[last] = held[last][0] - zeros[0], held[last][1] + zeros[1]
        convolve = local.convolution(held, outs)
    fetch, split, owners = Fetch.of(spec, needs, zeros), None, None
    if needs and owners_compute(spec.tensor_meta.dtype):
        owners = owners_gradient(
            spec, out_spec, {d: windows[d] for d in needs}, local.given, local.convolution, held, outs
        )
    elif len(needs) == 1 and 0 not in out_spec.local_shape():
        (d,) = needs
        split = split_gradient(
            spec, fetch, windows[d], outs[d], lambda part, out: local.alone(d, part, out, held, outs)
        )
    return ConvolutionPlan(out_spec, fetch, convolve, split, owners)


def output_spec(spec: ShardTensorSpec, shape: Sequence[int], sizes: Mapping[int, tuple[int, ...]]) -> ShardTensorSpec:
    """The spec of a result of this global shape, channels-last where the input is.

    Args:
        sizes: of the shards, by tensor dim, where they differ from the input's.
    """
    meta = spec.tensor_meta
    stride = stride_like(torch.empty_strided(meta.shape, meta.stride, device="meta"), shape)
    return with_sizes(spec, torch.empty_strided(shape, stride, device="meta"), meta.dtype, sizes)


Intervals = Mapping[int, Interval]  # by tensor dim, in global indices


@dataclass(frozen=True, slots=True)
class _Local:
    """How the kernel computes some outputs from some inputs.

    Attributes:
        out_shape: of this rank's outputs.
        windows: by spatial tensor dim.
        stride, dilation, groups: of the convolution.
    """

    out_shape: Sequence[int]
    windows: Mapping[int, Window]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

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

    def given(self, d: int, part: Interval, out: Interval) -> Interval:
        """The outputs along ``d`` that the kernel gives of the inputs ``part`` alone, where ``out`` are to be among
        them: it pads both ends alike, so there are more before these and after them.
        """
        window, (before, after) = self.windows[d], self.around(d, part, out)
        more = max(0, -(before // window.stride), -((before - after) // window.stride))
        room = length(part) + 2 * (before + more * window.stride) - window.extent
        return out[0] - more, out[0] - more + room // window.stride + 1

    def alone(self, d: int, part: Interval, out: Interval, held: Intervals, outs: Intervals) -> Alone:
        """The call that gives the outputs ``out`` along ``d`` of the inputs ``part`` alone, among zeros."""
        whole = self.windows[d]
        window, taps = whole.between(part, out)
        local = replace(self, windows={**self.windows, d: window})
        given = local.given(d, part, out)
        found = cropped(local.convolution({**held, d: part}, {**outs, d: given}), d, given, out)
        return found, None if window.kernel == whole.kernel else (d, taps[0], length(taps))


def cropped(convolve: LocalConvolution, d: int, given: Interval, out: Interval) -> LocalConvolution:
    """The call with only the outputs ``out`` along ``d`` of those that it gives."""
    shape = *convolve.out_shape[:d], length(out), *convolve.out_shape[d + 1 :]
    crop, place = [*convolve.crop] or [0] * 2 * (len(shape) - 2), 2 * (len(shape) - 1 - d)
    crop[place] += given[0] - out[0]
    crop[place + 1] += out[1] - given[1]
    return replace(convolve, out_shape=shape, crop=tuple(crop) if any(crop) else ())


# A call of the kernel, and which taps of the weight it has, if not all.
Alone = tuple[LocalConvolution, Narrow | None]


def split_gradient(
    spec: ShardTensorSpec,
    fetch: Fetch,
    window: Window | TransposedWindow,
    out: Interval,
    alone: Callable[[Interval, Interval], Alone],
) -> SplitGradient | None:
    """How to compute the gradients in two; None where it is not worth it, or inputs are fetched along several dims.

    Args:
        spec: of the input.
        window: along the dim that is fetched.
        out: this rank's outputs along that dim.
        alone: the kernel that gives some outputs of some inputs alone, with the taps that lie between them.
    """
    if len(fetch.axes) != 1 or 0 in fetch.shape:
        return None
    device = spec.mesh.device_type
    if len(fetch.shape) == 5 and device == "cpu":
        return None  # torch's kernels for few planes of a volume are ten times slower there
    share, elements = worth_splitting(device)
    d, transfers = fetch.axes[0].dim, fetch.axes[0].transfers
    own = transfers.own
    if not transfers.active or not length(own) or intersect(own, transfers.need) != own:
        return None
    received = [part for _, part in transfers.recvs]
    touched = [length(window.touching(part, out)) for part in received]
    if share * sum(touched) > length(out) or not all(touched) or math.prod(fetch.shape) < elements:
        return None
    shard, taps = alone(own, out)
    if shard.zeros or shard.crop or taps is not None:
        return None

    def strip(part: Interval) -> Strip:
        outputs = window.touching(part, out)
        return Strip((d, outputs[0] - out[0], length(outputs)), *alone(part, outputs))

    return SplitGradient(shard, tuple(map(strip, received)))


def owners_gradient(
    spec: ShardTensorSpec,
    out_spec: ShardTensorSpec,
    windows: Mapping[int, Window | TransposedWindow],
    given: Callable[[int, Interval, Interval], Interval],
    convolution: Callable[[Intervals, Intervals], LocalConvolution],
    held: Intervals,
    outs: Intervals,
) -> OwnersGradient:
    """How the owners of the inputs compute the gradients.

    Args:
        spec: of the input.
        windows: along the sharded dims.
        given: the outputs along a dim that the kernel gives of some inputs alone, where some outputs are to be among
            them.
        convolution: the call of the kernel that gives some outputs of some inputs.
        held, outs: what this rank reads and computes, also along dims that are not sharded.
    """
    held, outs, crops = {**held}, {**outs}, {}
    reading: dict[int, list[Interval]] = {}
    sharded = spec.sharded_dims()
    for d, window in windows.items():
        m, reading[d] = sharded[d], []
        of_kernel, parts = [], intervals_of(spec.sizes_along(m))
        for part, own in zip(parts, intervals_of(out_spec.sizes_along(m)), strict=True):
            out = window.touching(part, (0, window.outputs)) if length(part) else (0, 0)
            of_kernel.append(given(d, part, out) if length(out) else (0, 0))
            # What the kernel gives besides reads no input: zeros will do, or the gradients that a rank has itself.
            more = intersect(own, of_kernel[-1])
            reading[d].append((min(out[0], more[0]), max(out[1], more[1])) if length(more) else out)
        rank = spec.coordinate[m]
        held[d], outs[d], crops[d] = parts[rank], of_kernel[rank], reading[d][rank]
    last = [*windows][-1]
    out = crops.pop(last)  # along the dim that is fetched last such zeros come with what is fetched
    zeros = (out[0] - outs[last][0], outs[last][1] - out[1]) if length(out) else (0, 0)
    convolve = convolution(held, outs)
    for d, out in crops.items():
        convolve = cropped(convolve, d, outs[d], out) if length(out) else convolve
    return OwnersGradient(Fetch.of(out_spec, reading, zeros), convolve)


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


# -- conv --------------------------------------------------------------------------------------------------------------

_aten = torch.ops.aten


# -- entry points above autograd --------------------------------------------------------------------------------------


def plan_batched(
    call: Arguments,
    input: ShardTensorSpec,
    weight: TensorMeta,
    bias: TensorMeta | None,
    again: Callable[..., Any],
    make: Callable[[ShardTensorSpec], ConvolutionPlan],
    *,
    transposed: bool = False,
) -> Plan:
    """The plan of a convolution of a batched input, transposed or not.

    Args:
        again: the operator, of other tensors with the same options.
        make: makes the plan, given the spec that the input has when it runs.
    """
    if input.tensor_meta.dtype.is_complex and weight.dtype.is_complex:
        return Composed(lambda x, w, b: _as_real_convolution(again, x, w, b, transposed=transposed))
    # The batch or a spatial dim is sharded instead of the channels, see [Note: whole rows] in sort.py.
    target = free_dims(call.name, input, 1)
    even = _evened(target)
    worth = even != target and not is_little(input, make(target).outputs.shape.numel())
    call.redistribute("input", even if worth else target)
    call.cast(call.autocast(), "input", *(["weight"] if bias is None else ["weight", "bias"]))
    return make(call.tensors["input"])


def _evened(spec: ShardTensorSpec) -> ShardTensorSpec:
    """The spec with even shards along a dim of which a rank has less than a quarter of an even shard.

    [Note: nearly nothing] A slice is a view and sends nothing, so it may leave nearly all to one rank: of an image with
    its mirror image behind it, which is cut to a multiple of a window. A convolution is where work begins. Whether a
    slice has left such sizes or the program has chosen them cannot be known: a note of slices would not be the same on
    all ranks, as a rank may slice alone, to print a part. So the sizes decide, and those that a program chooses for
    ranks of different speed are kept.
    """
    axes = {}
    for dim, m in spec.sharded_dims().items():
        sizes = spec.sizes_along(m)
        even = chunk_sizes(spec.shape[dim], len(sizes))
        if min(sizes) * 4 * len(sizes) < sum(sizes) and are_much_more_even(even, sizes):
            axes[m] = spec.layout[m]._replace(sizes=even)
    return spec.with_axes(axes)


def _as_real_convolution(
    convolve: Callable[..., Any], x: Any, weight: Tensor, bias: Tensor | None, *, transposed: bool = False
) -> Any:
    """A complex convolution as a real one of twice the channels, real and imaginary parts side by side.

    So the halo is exchanged once. Kernels for complex numbers do not exist on every device.

    Args:
        convolve: the convolution of real tensors, with the options given.
        transposed: whether it is transposed: the weight has input channels first then.
    """

    def interleaved(t: Any) -> Any:
        return torch.view_as_real(t).movedim(-1, 2).flatten(1, 2)

    real, imaginary = weight.real, weight.imag
    # Rows: real and imaginary part of an output channel; columns: those of an input channel. Transposed: vice versa.
    first, second = (imaginary, -imaginary) if transposed else (-imaginary, imaginary)
    rows = [torch.stack([real, first], 2).flatten(1, 2), torch.stack([second, real], 2).flatten(1, 2)]
    w = torch.stack(rows, 1).flatten(0, 1)
    b = None if bias is None else torch.view_as_real(bias.resolve_conj()).flatten()
    y = convolve(interleaved(x.resolve_conj()), w, b)
    return torch.view_as_complex(y.unflatten(1, (-1, 2)).movedim(2, -1).contiguous())


def _per_spatial_dim(value: Any, n: int, name: str, what: str) -> tuple[int, ...]:
    values = (value,) * n if isinstance(value, int) else tuple(value)
    if len(values) == 1:
        values *= n
    if len(values) != n:
        raise RuntimeError(f"{name}: {what} {value} must be one number or {n}")
    return values


def _pads(
    padding: Any, n: int, name: str, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Pads:
    if isinstance(padding, str):
        if padding == "valid":
            return ((0, 0),) * n
        if padding != "same":
            raise ValueError(f"{name}: padding {padding!r}; it must be numbers, 'valid' or 'same'")
        if any(s != 1 for s in stride):
            raise RuntimeError(f"{name}: padding='same' is not supported for strided convolutions")
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((t // 2, t - t // 2) for t in totals)
    return tuple((p, p) for p in _per_spatial_dim(padding, n, name, "padding"))


def _plan(
    call: Arguments,
    input: ShardTensorSpec,
    weight: TensorMeta,
    bias: TensorMeta | None,
    stride: int | Sequence[int],
    padding: str | int | Sequence[int],
    dilation: int | Sequence[int],
    groups: int,
    again: Callable[..., Any],
) -> Plan:
    n, shape = len(weight.shape) - 2, tuple(weight.shape)
    name = f"conv{n}d"
    strides, dilations = _per_spatial_dim(stride, n, name, "stride"), _per_spatial_dim(dilation, n, name, "dilation")
    pads = _pads(padding, n, name, shape[2:], strides, dilations)

    def make(x: ShardTensorSpec) -> ConvolutionPlan:
        if call.autocast() is None and weight.dtype != x.tensor_meta.dtype:
            raise RuntimeError(
                f"{call.name}: input of {x.tensor_meta.dtype} and weight of {weight.dtype} should be the same"
            )
        return plan_convolution(x, shape, strides, pads, dilations, groups)

    return plan_batched(call, input, weight, bias, again, make)


def _declare(n: int) -> None:
    function = getattr(torch, f"conv{n}d")

    @operator(function, getattr(_aten, f"conv{n}d"), tensors="input", parameters="weight bias")
    def plan_conv(
        call: Arguments,
        input: ShardTensorSpec,
        weight: TensorMeta,
        bias: TensorMeta | None = None,
        stride: int | Sequence[int] = 1,
        padding: str | int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> Plan:
        if len(input.shape) not in (n + 1, n + 2) or len(weight.shape) != n + 2:
            raise RuntimeError(
                f"conv{n}d: expected a {n + 1}-D (unbatched) or {n + 2}-D (batched) input and a {n + 2}-D weight, got "
                f"shapes {tuple(input.shape)} and {tuple(weight.shape)}"
            )

        def again(x: Any, w: Any, b: Any) -> Any:
            return function(x, w, b, stride, padding, dilation, groups)

        if len(input.shape) == n + 1:
            return Composed(lambda x, w, b: again(x.unsqueeze(0), w, b).squeeze(0))
        return _plan(call, input, weight, bias, stride, padding, dilation, groups, again)


for _n in (1, 2, 3):
    _declare(_n)


# Called by name, the operator goes through the same plans, so that its gradients are complete as well.
@operator(torch.convolution, _aten.convolution, _aten.convolution.default, tensors="input", parameters="weight bias")
def plan_convolution_of_any_dims(
    call: Arguments,
    input: ShardTensorSpec,
    weight: TensorMeta,
    bias: TensorMeta | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Plan:
    """``torch.convolution``, transposed or not."""
    if transposed:
        function = getattr(torch, f"conv_transpose{len(weight.shape) - 2}d")
        return Composed(lambda x, w, b: function(x, w, b, stride, padding, output_padding, groups, dilation))

    def again(x: Any, w: Any, b: Any) -> Any:
        return torch.convolution(x, w, b, stride, padding, dilation, False, output_padding, groups)

    return _plan(call, input, weight, bias, stride, padding, dilation, groups, again)


# -- below autograd ---------------------------------------------------------------------------------------------------
# The catch-all, for callers that come past every function above: same kernels, strips exchanged anew.


@cached(maxsize=1024)
def _contributing_plan(exact: bool, spec: ShardTensorSpec, *args: Any) -> ConvolutionPlan:
    plan = plan_convolution(spec, *args)
    plan.decide_precision(spec.mesh.device_type, contributes=True)
    return plan


@register(_aten._convolution.default)
def _traced_convolution(input: Any, weight: Any, bias: Any, *options_and_kernels: Any) -> Any:
    """What a traced module calls. Behind the options it says which kernels may be used."""
    return _aten.convolution.default(input, weight, bias, *options_and_kernels[:6])


def gradients_of_convolution(
    grad: Any, input: Any, weight: Any, stride: Any, padding: Any, dilation: Any, groups: int, mask: Sequence[bool]
) -> Any:
    """By the plan: of the input, and contributions to those of weight and bias, where the mask says so.

    NotImplemented where the plan would first prepare an operand.
    """
    if not isinstance(input, DTensor) or (isinstance(weight, DTensor) and not spec_of(weight).is_replicate()):
        return DECLINED
    spec = spec_of(input)
    if spec.partial_mesh_dims() or 1 in spec.sharded_dims():
        return DECLINED
    n = weight.ndim - 2
    pads = tuple((p, p) for p in _per_spatial_dim(padding, n, "convolution", "padding"))
    stride, dilation = (_per_spatial_dim(v, n, "convolution", "stride or dilation") for v in (stride, dilation))
    plan = _contributing_plan(contributions_are_exact(), spec, tuple(weight.shape), stride, pads, dilation, groups)
    x, w = (t._local_tensor if isinstance(t, DTensor) else t for t in (input, weight))
    with torch.no_grad():
        local = as_gradient(grad, plan.outputs)._local_tensor
        halo = plan.fetch.read(x)[1] if plan.owners is None else ()
        gx, gw, gb = plan.backward(mask, [local], x, w, *halo)
    placements = [Partial() if isinstance(p, Shard) else Replicate() for p in spec.placements]

    def parameter(g: Tensor | None) -> Any:
        return None if g is None else wrap(g, ShardTensorSpec.make(spec.mesh, placements, g.shape, g.dtype))

    return None if gx is None else wrap(gx, spec), parameter(gw), parameter(gb)


# -- conv transpose ----------------------------------------------------------------------------------------------------

# Transposed convolution over sharded spatial dims.
#
# Output ``o`` sums the inputs ``i`` with ``o = i * stride - padding + t * dilation`` for some tap ``t``. A rank
# fetches the inputs that reach its outputs and runs the kernel of torch on them, with the padding that leaves out what
# lies outside; what no padding expresses is cropped afterwards, which is a copy. An output belongs to the rank that
# owns the input in the middle of those that reach it: a kernel as long as its stride doubles (or triples ...) the size
# of every shard, and so does one of 3 with stride 2 and padding 1.

Numbers = int | Sequence[int]


@dataclass(frozen=True, slots=True)
class TransposedWindow:
    """A transposed convolution along one tensor dim, the adjoint of a convolution of its outputs.

    The numbers are those of the global tensor.

    Example:
        >>> w = TransposedWindow(size=5, kernel=4, stride=2, dilation=1, padding=1, extra=0)
        >>> w.outputs, map_boundaries((2, 3), w.owned_boundary), w.reads((4, 10))
        (10, (4, 6), (1, 5))
    """

    size: int
    kernel: int
    stride: int
    dilation: int
    padding: int
    extra: int

    @property
    def extent(self) -> int:
        return (self.kernel - 1) * self.dilation + 1

    @property
    def outputs(self) -> int:
        return (self.size - 1) * self.stride - 2 * self.padding + self.extent + self.extra

    @property
    def adjoint(self) -> Window:
        """The convolution of the outputs."""
        return Window(self.outputs, self.kernel, self.stride, self.dilation, self.padding, self.padding)

    def owned_boundary(self, b: int) -> int:
        """Where a boundary of the input falls in the output."""
        if b <= 0:
            return 0
        if b >= self.size:
            return self.outputs
        shift, two = divmod(self.extent - self.stride, 2)
        shift -= self.padding
        if two and shift < 0:  # of the two that are as close, the one that keeps the sizes in proportion
            shift += 1
        return max(0, min(self.outputs, b * self.stride + shift))

    def reads(self, out: Interval) -> Interval:
        """The inputs that reach the outputs ``out``."""
        return self.adjoint.touching(out, (0, self.size)) if length(out) else (0, 0)

    def margins(self, part: Interval, out: Interval) -> Interval:
        """Zeros to add before and after (negative: to crop) what the kernel makes of ``part``, to get ``out``."""
        start, stop = self.adjoint.reads(part)
        return start - out[0], out[1] - stop

    def options(self, part: Interval, out: Interval) -> tuple[int, int, Interval]:
        """The kernel's padding and output padding for ``part``, and the margins that are left then.

        Example:
            >>> w = TransposedWindow(size=5, kernel=3, stride=2, dilation=1, padding=1, extra=1)
            >>> w.margins((0, 3), (0, 5)), w.options((0, 3), (0, 5))
            ((-1, -1), (1, 0, (0, 0)))
        """
        before, after = self.margins(part, out)
        extra = after - before
        if before <= 0 <= extra < self.stride:  # an output padding must be less
            return -before, extra, (0, 0)
        if before >= 0 or after > 0:
            return 0, 0, (before, after)
        # There is more to crop at one end than the padding at both ends leaves out.
        return (-before, 0, (0, extra)) if extra < 0 else (-after, 0, (-extra, 0))

    def zeros(self, part: Interval, out: Interval) -> Interval:
        """How many inputs of zeros before and after ``part`` let the kernel leave out all that ``out`` has not.

        Example:
            >>> w = TransposedWindow(size=6, kernel=3, stride=2, dilation=1, padding=1, extra=1)
            >>> w.options((0, 4), (0, 6)), w.zeros((0, 4), (0, 6)), w.options((-1, 4), (0, 6))
            ((1, 0, (0, -1)), (1, 0), (3, 1, (0, 0)))
        """
        before, after = self.margins(part, out)
        first = max(0, -(-before // self.stride), -((after - before) // self.stride))
        return first, max(0, (after - before) // self.stride + first)

    def touching(self, part: Interval, out: Interval) -> Interval:
        """Those of the outputs ``out`` that the inputs ``part`` reach."""
        return intersect(self.adjoint.reads(part), out)

    def between(self, part: Interval, out: Interval) -> tuple[TransposedWindow, Interval]:
        """The window with only the taps by which inputs ``part`` may reach the outputs ``out``, and which these are.

        Example:
            >>> w = TransposedWindow(size=6, kernel=3, stride=2, dilation=1, padding=1, extra=1)
            >>> w.between((3, 4), (0, 6))[1]
            (0, 1)
        """
        window, taps = self.adjoint.between(out, part)
        return replace(self, kernel=window.kernel, padding=window.before), taps


def _declare_transposed(n: int) -> None:
    name = f"conv_transpose{n}d"
    function = getattr(torch, name)

    @operator(function, getattr(torch.ops.aten, name), tensors="input", parameters="weight bias")
    def plan_conv_transpose(
        call: Arguments,
        input: ShardTensorSpec,
        weight: TensorMeta,
        bias: TensorMeta | None = None,
        stride: Numbers = 1,
        padding: Numbers = 0,
        output_padding: Numbers = 0,
        groups: int = 1,
        dilation: Numbers = 1,
    ) -> Plan:
        meta = call.returned(function, input, weight, bias, stride, padding, output_padding, groups, dilation)
        numbers = [per_dim(value, n) for value in (stride, padding, output_padding, dilation)]

        def again(x: Any, w: Any, b: Any) -> Any:
            return function(x, w, b, *numbers[:3], groups, numbers[3])

        def make(x: ShardTensorSpec) -> ConvolutionPlan:
            dtypes = {"input": x.tensor_meta.dtype, "weight": weight.dtype}
            if bias is not None:
                dtypes["bias"] = bias.dtype
            if call.autocast() is None and len(set(dtypes.values())) > 1:
                shown = ", ".join(f"{what} of {dtype}" for what, dtype in dtypes.items())
                raise RuntimeError(f"{call.name}: {shown} should be of the same dtype")
            return _plan_transposed(x, weight, tuple(meta.shape), numbers, groups)

        if len(input.shape) == n + 1:
            return Composed(lambda x, w, b: again(x.unsqueeze(0), w, b).squeeze(0))
        return plan_batched(call, input, weight, bias, again, make, transposed=True)


def _plan_transposed(
    spec: ShardTensorSpec, weight: TensorMeta, shape: tuple[int, ...], numbers: Sequence[Sequence[int]], groups: int
) -> ConvolutionPlan:
    """This rank's part.

    Args:
        shape: of the global result.
        numbers: stride, padding, output padding and dilation per spatial dim.
    """
    stride, dilation = tuple(numbers[0]), tuple(numbers[3])
    windows, sizes, needs = {}, {}, {}
    held, outs = {}, {}
    for d, m in spec.sharded_dims().items():
        if d < 2:
            continue
        step, padding, extra, spread = (values[d - 2] for values in numbers)
        windows[d] = TransposedWindow(spec.shape[d], weight.shape[d], step, spread, padding, extra)
        sizes[d] = map_boundaries(spec.sizes_along(m), windows[d].owned_boundary)
        outputs, rank = intervals_of(sizes[d]), spec.coordinate[m]
        needs[d] = [windows[d].reads(out) for out in outputs]
        held[d], outs[d] = needs[d][rank], outputs[rank]
    out_spec = output_spec(spec, shape, sizes)
    local_shape = out_spec.local_shape()

    def convolution(held: Intervals, outs: Intervals) -> LocalConvolution:
        padding, extra, crop = list(numbers[1]), list(numbers[2]), [0] * 2 * len(stride)
        result = list(local_shape)
        for d, window in windows.items():
            result[d] = length(outs[d])
            padding[d - 2], extra[d - 2], margins = window.options(held[d], outs[d])
            place = 2 * (len(shape) - 1 - d)
            crop[place : place + 2] = margins
        arguments = stride, tuple(padding), dilation, True, tuple(extra), groups
        return LocalConvolution(tuple(result), arguments, crop=tuple(crop) if any(crop) else ())

    split, owners, zeros = None, None, (0, 0)
    if needs and owners_compute(spec.tensor_meta.dtype):
        owners = owners_gradient(
            spec, out_spec, windows, lambda d, part, out: windows[d].adjoint.reads(part), convolution, held, outs
        )
    elif len(needs) == 1 and 0 not in local_shape:
        (d,) = needs
        window, out = windows[d], outs[d]

        def alone(part: Interval, out: Interval) -> Alone:
            windows[d], taps = window.between(part, out)
            found, all_taps = convolution({d: part}, {d: out}), windows[d].kernel == window.kernel
            windows[d] = window
            return found, None if all_taps else (d, taps[0], length(taps))

        split = split_gradient(spec, Fetch.of(spec, needs), window, out, alone)
        if split is not None:
            # Such zeros make kernels on the CPU slow in the backward pass, but that has the shard alone here.
            zeros = window.zeros(held[d], out)
            held[d] = held[d][0] - zeros[0], held[d][1] + zeros[1]
    return ConvolutionPlan(out_spec, Fetch.of(spec, needs, zeros), convolution(held, outs), split, owners)


for _n in (1, 2, 3):
    _declare_transposed(_n)
