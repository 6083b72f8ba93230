"""``interpolate`` in all its modes, exactly as torch counts: every weight comes from torch itself.

The rank that holds the centre of an output computes it, so doubling a dim doubles every shard.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._compat import kernel, nn_functions
from ...communication.halo import Fetch
from ...dispatch.registry import DECLINED, FUNCTIONS
from ...layout.intervals import Interval, intervals_of, length, map_boundaries
from ...layout.spec import ShardTensorSpec
from ...layout.strides import CHANNELS_LAST, zeros_like
from ...operators.declaration import Arguments, Composed, LocalPlan, Plan, operator
from ..common.stencil import (
    Constant,
    Differentiated,
    LinearStencilPlan,
    keeping_sums,
    nothing,
    per_dim,
    result_dtype,
    scaled_boundary,
    taken,
    with_sizes,
)

# -- taps --------------------------------------------------------------------------------------------------------------

# What an output of ``interpolate`` reads, and with what weights: asked of torch.
#
# Resampling treats each dim by itself and is linear: an output is a weighted sum of a few consecutive inputs, its
# *taps*. Which inputs these are, and their weights, depends on the global sizes, the scale, the mode and the rounding
# in the tensor's dtype. This module does not repeat torch's formulas, but asks torch. torch resamples one dim that
# holds ``K`` combs, of which comb ``k`` is 1 at the places ``k, k + K, k + 2K, ...`` and 0 elsewhere. The taps of an
# output lie within ``K`` places, at most one on each comb. So what comes out are the weights, and the comb that a
# weight came from tells its tap.

# Half the spread of the taps of each mode, in units of the larger of 1 and the step between outputs.
_REACH = {"nearest": 1, "nearest-exact": 1, "linear": 1, "bilinear": 1, "trilinear": 1, "bicubic": 2, "lanczos": 3}


@dataclass(frozen=True, slots=True)
class Taps:
    """Per output of a dim, its first tap and its weights.

    Attributes:
        first: (out,) int64 on the CPU: global index of the first tap.
        weights: (out, width): output ``o`` is the sum of ``weights[o, t] * x[first[o] + t]``.
    """

    first: Tensor
    weights: Tensor

    def reads(self, sizes: Sequence[int]) -> list[Interval]:
        """The input interval that each rank reads for its part of the outputs; empty for an empty one."""
        # Of all ranks at once: for many of them an operator for each would take long.
        parts = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        first, last = (
            torch.zeros(len(sizes), dtype=torch.int64).scatter_reduce_(0, parts, self.first, how, include_self=False)
            for how in ("amin", "amax")
        )
        stop = last + self.weights.shape[1]
        pairs = zip(sizes, first.tolist(), stop.tolist(), strict=True)
        return [(start, stop) if n else (0, 0) for n, start, stop in pairs]

    def of(self, out: Interval, origin: int, dtype: torch.dtype, device: torch.device | str) -> WeightedSum:
        """How to compute the outputs ``out`` from a tensor that holds the input from ``origin`` on.

        Args:
            dtype: of the input.
        """
        here, width = slice(*out), self.weights.shape[1]
        index = Constant(lambda: (self.first[here, None] - origin + torch.arange(width)).flatten().to(device))
        return WeightedSum(index, Constant(lambda: self.weights[here].to(device, dtype)), width)


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """The outputs of one rank along one dim, as weighted sums of its inputs.

    Attributes:
        index: the local indices of the inputs, ``width`` for each output.
        weight: what they are multiplied with, ``(outputs, width)``.
    """

    index: Constant
    weight: Constant
    width: int

    def __call__(self, part: Tensor, dim: int) -> Tensor:
        """The outputs along ``dim`` of ``part``."""
        taken = part.index_select(dim, self.index.like(part))
        if self.width == 1:  # a copy: 1 * inf is inf, but 0 * inf in a gradient is not 0
            return taken
        weight = self._along(dim, part)
        shape = (*part.shape[:dim], *weight.shape[:2], *part.shape[dim + 1 :])
        return (taken.reshape(shape) * weight).sum(dim + 1)

    def adjoint(self, grad: Tensor, dim: int, n: int) -> Tensor:
        """The gradient of ``n`` inputs along ``dim``, out of that of the outputs."""
        result = zeros_like(grad, [n if d == dim else length for d, length in enumerate(grad.shape)])
        if self.width > 1:
            grad = (grad.unsqueeze(dim + 1) * self._along(dim, grad)).flatten(dim, dim + 1)
        return result.index_add_(dim, self.index.like(grad), grad)

    def _along(self, dim: int, t: Tensor) -> Tensor:
        """The weights, to broadcast against inputs along ``dim`` and the dim behind."""
        weight = self.weight.like(t)
        return weight.view(*weight.shape, *[1] * (t.ndim - dim - 1))


@dataclass(frozen=True, slots=True)
class Resize:
    """How one dim is resampled: everything that its taps depend on.

    Attributes:
        size, out: global lengths before and after.
        scale: the caller's scale factor where torch computes with it, else None (then it computes with ``size / out``).
        mode, align_corners, antialias: as in ``interpolate``.
        dtype, device: in which torch computes the weights.
        ndim: how many dims are resampled; torch's nearest neighbours in one dim are not always those in two.
    """

    size: int
    out: int
    scale: float | None
    mode: str
    align_corners: bool | None
    antialias: bool
    dtype: torch.dtype
    device: str
    ndim: int

    @property
    def step(self) -> float:
        """Distance of the taps of two neighbouring outputs."""
        if self.align_corners:
            return (self.size - 1) / (self.out - 1) if self.out > 1 else 0.0
        return 1 / self.scale if self.scale else self.size / self.out

    def with_outputs(self, out: int) -> Resize | None:
        """The first ``out`` outputs only, computed alike; None if torch's kernels could not tell, or not be told."""
        if out == self.out:
            return self
        # The kernels take any number of outputs with a scale, and compute with it what they compute with the ratio of
        # the sizes where that is a power of two. They copy where a dim keeps its size.
        scale = self.scale or (self.out / self.size if math.frexp(self.out / self.size)[0] == 0.5 else None)
        return None if scale is None or out == self.size or self.align_corners else replace(self, out=out, scale=scale)

    def taps(self) -> Taps:
        """Taps of all outputs."""
        return _taps(self)


@lru_cache(maxsize=256)
def _taps(resize: Resize) -> Taps:
    """The taps of every output along one dim, and their weights: what torch makes of combs."""
    step, size = resize.step, resize.size
    # Only antialiasing widens the taps with the step. 2 more: rounding may move a tap by one either way.
    reach = _REACH[resize.mode] * (max(step, 1.0) if resize.antialias else 1.0)
    combs = min(size, 2 * math.ceil(reach) + 3)
    ndim = resize.ndim
    places = torch.arange(size)
    comb = (places.remainder(combs) == torch.arange(combs)[:, None]).to(resize.device, resize.dtype)
    # Along the last dim: torch's antialiasing kernel goes wrong where that one has length 1.
    comb = comb.view(1, combs, *[1] * (ndim - 1), size)
    kwargs: dict[str, Any] = {"align_corners": resize.align_corners, "antialias": resize.antialias}
    if resize.scale is None:
        kwargs["size"] = [1] * (ndim - 1) + [resize.out]
    else:
        kwargs["scale_factor"] = [1.0] * (ndim - 1) + [resize.scale]
    with torch.no_grad(), torch.autocast(torch.device(resize.device).type, enabled=False):
        found = F.interpolate(comb, mode=resize.mode, **kwargs).view(combs, resize.out).t().cpu()
    # Each comb has one place among the K around the output's centre.
    centre = torch.arange(resize.out, dtype=torch.float64) * step
    if not resize.align_corners and resize.mode != "nearest":
        centre = centre + 0.5 * step - 0.5
    low = (centre.round().long() - combs // 2).clamp(0, size - combs)
    at = low[:, None] + (torch.arange(combs) - low[:, None]).remainder(combs)
    used = found != 0
    first = torch.where(used, at, size).amin(1)
    last = torch.where(used, at, -1).amax(1)
    width = int((last - first).max()) + 1
    first = first.clamp(max=size - width)
    # Scatter the combs' results to their places in the window of each output.
    weights = torch.zeros(resize.out, combs + width, dtype=found.dtype)
    offset = torch.where(used, at - first[:, None], combs + width - 1)
    weights = weights.scatter_add(1, offset, torch.where(used, found, 0))[:, :width]
    return Taps(first, weights.contiguous())


@lru_cache(maxsize=1024)
def as_local(resize: Resize, part: Interval, out: Interval) -> tuple[Resize, int] | None:
    """How torch can compute the outputs ``out`` from ``part`` alone, as if that were the global dim; None if it cannot.

    Returns:
        The resampling of the part, and how many of its outputs come before the wanted ones.
    """
    if part == (0, resize.size) and out == (0, resize.out):
        return resize, 0
    start, n = part[0], part[1] - part[0]
    if resize.align_corners or start * resize.out % resize.size or n * resize.out % resize.size:
        return None
    local = replace(resize, size=n, out=n * resize.out // resize.size)
    drop, count = out[0] - start * resize.out // resize.size, out[1] - out[0]
    if drop < 0 or drop + count > local.out or (local.scale and math.floor(n * local.scale) != local.out):
        return None
    # The formulas are shifted by whole numbers, but do they round alike?
    theirs, ours = local.taps(), resize.taps()
    if theirs.weights.shape[1] != ours.weights.shape[1]:
        return None
    here = slice(drop, drop + count), slice(*out)
    same = torch.equal(theirs.first[here[0]] + start, ours.first[here[1]])
    return (local, drop) if same and torch.equal(theirs.weights[here[0]], ours.weights[here[1]]) else None


# -- resample ----------------------------------------------------------------------------------------------------------

# Resampling of local tensors: by one call of torch's kernel where that takes a part for the whole, or dim by dim.

# The operators of torch by which F.interpolate does it: mode, number of dims, antialiasing.
MODES = {
    **{f"upsample_nearest{n}d": ("nearest", n, False) for n in (1, 2, 3)},
    **{f"_upsample_nearest_exact{n}d": ("nearest-exact", n, False) for n in (1, 2, 3)},
    "upsample_linear1d": ("linear", 1, False),
    "upsample_bilinear2d": ("bilinear", 2, False),
    "upsample_bicubic2d": ("bicubic", 2, False),
    "upsample_trilinear3d": ("trilinear", 3, False),
    "_upsample_bilinear2d_aa": ("bilinear", 2, True),
    "_upsample_bicubic2d_aa": ("bicubic", 2, True),
}
_OPERATORS = {mode: name for name, mode in MODES.items()}


def resampling(
    resizes: Mapping[int, Resize],
    mine: Mapping[int, tuple[Interval, Interval]],
    shape: Sequence[int],
    out: ShardTensorSpec,
    last: torch.memory_format | None,
) -> Differentiated:
    """What resamples this rank's part, a tensor of ``shape``.

    Args:
        resizes: per dim, how the global tensor is resampled.
        mine: per dim, the global input interval that the part holds and the outputs wanted.
        out: of the result; its dtype is the part's.
        last: the memory format of results; None for row-major.
    """
    if 0 in shape:
        return nothing(shape, out.local_shape())
    parts = {d: as_local(resizes[d], *mine[d]) for d in mine}
    found = {d: part for d, part in parts.items() if part is not None}
    if len(found) < len(parts):
        return _in_format(_dim_by_dim(shape, resizes, mine, out.tensor_meta.dtype), last)
    # One call of torch's kernel, as if these parts were all there is: several times faster than dim after dim.
    local = [part for part, _ in found.values()]
    if _operator_of(local[0]) is not None:
        shortened = [part.with_outputs(drop + length(mine[d][1])) for d, (part, drop) in found.items()]
        local = [part for part in shortened if part is not None] if None not in shortened else local
    wanted = {
        d: (drop, length(mine[d][1]), part.out)
        for part, (d, (_, drop)) in zip(local, found.items(), strict=True)
        if (drop, length(mine[d][1])) != (0, part.out)
    }
    function = taken(_by_torch(shape, local), wanted, len(shape))
    if last is None and math.prod(part.size for part in local) <= math.prod(part.out for part in local):
        # Given channels-last memory under other strides, as a transposed sequence of one sample has, torch's kernel
        # computes channels-last and copies its result, twice. The input is smaller.
        return replace(function, forward=lambda t: function.forward(t.contiguous()))
    return _in_format(function, last)


def _in_format(function: Differentiated, last: torch.memory_format | None) -> Differentiated:
    if last is None:
        return function
    return replace(function, forward=lambda t: (function.forward(t)[0].contiguous(memory_format=last), ()))


def _operator_of(resize: Resize) -> str | None:
    """The operator of torch that does it; None where that is to be left to torch's function."""
    name = _OPERATORS.get((resize.mode, resize.ndim, resize.antialias))
    return None if torch.are_deterministic_algorithms_enabled() else name


def _by_torch(shape: Sequence[int], parts: Sequence[Resize]) -> Differentiated:
    first, scales, out = parts[0], [part.scale for part in parts], [part.out for part in parts]
    name = _operator_of(first)
    if name is None:
        return _composed(first, scales, out)
    resample, gradient = getattr(nn_functions, name), kernel(getattr(torch.ops.aten, f"{name}_backward").default)
    corners = () if first.mode in ("nearest", "nearest-exact") else (bool(first.align_corners),)
    return Differentiated(
        lambda t: (resample(t, out, *corners, *scales), ()),
        lambda grad, _: gradient(grad, out, list(shape), *corners, *scales),
    )


def _composed(first: Resize, scales: Sequence[float | None], out: Sequence[int]) -> Differentiated:
    """By torch's function, which chooses among operators; its gradient by autograd, whatever values it resamples."""
    size, scale_factor = (out, None) if None in scales else (None, scales)

    def resample(t: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        mode, corners = first.mode, first.align_corners
        return F.interpolate(t, size, scale_factor, mode, corners, antialias=first.antialias), ()  # type: ignore[arg-type]

    def gradient(grad: Tensor, read: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = read.detach().requires_grad_()
            result, _ = resample(leaf)
        return torch.autograd.grad(result, leaf, grad)[0]

    return Differentiated(resample, gradient)


def _dim_by_dim(
    shape: Sequence[int],
    resizes: Mapping[int, Resize],
    mine: Mapping[int, tuple[Interval, Interval]],
    dtype: torch.dtype,
) -> Differentiated:
    steps = []
    for d, (part, out) in mine.items():
        compute = dtype if resizes[d].mode in ("nearest", "nearest-exact") else resizes[d].dtype
        steps.append((d, compute, resizes[d].taps().of(out, part[0], compute, resizes[d].device)))

    def resample(t: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        for d, compute, weighted in steps:
            t = weighted(t.to(compute), d)
        return t.to(dtype), ()

    def gradient(grad: Tensor, _: Tensor) -> Tensor:
        for d, compute, weighted in reversed(steps):
            grad = weighted.adjoint(grad.to(compute), d, shape[d])
        return grad.to(dtype)

    return Differentiated(resample, gradient)


# -- interpolate -------------------------------------------------------------------------------------------------------


@operator(F.interpolate, tensors="input", partial="input")
def plan_interpolate(
    call: Arguments,
    input: ShardTensorSpec,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Plan:
    """``F.interpolate``."""
    options: Any = {"mode": mode, "align_corners": align_corners, "antialias": antialias}
    meta = call.returned(
        F.interpolate, input, size, scale_factor, recompute_scale_factor=recompute_scale_factor, **options
    )
    ndim = len(input.shape) - 2
    if mode == "area":
        average, lengths = getattr(F, f"adaptive_avg_pool{ndim}d"), tuple(meta.shape[2:])
        return Composed(lambda x: average(x, lengths))
    floating = input.tensor_meta.dtype.is_floating_point
    nearest = mode in ("nearest", "nearest-exact")
    if nearest and not floating:
        input = input.for_gradient()
    spec = call.redistribute("input", keeping_sums(input))
    if not floating and not nearest and any(d >= 2 for d in spec.sharded_dims()):
        dtype = spec.tensor_meta.dtype
        reason = f"mode {mode!r} of {dtype} rounds between dims, which is done for floating point only"
        raise call.refuse(reason, "convert to float and round yourself")
    scales: Sequence[float | None] = [None] * ndim
    if size is None and not recompute_scale_factor:
        scales = [float(s) for s in per_dim(scale_factor, ndim)]
    dtype = result_dtype(
        call, spec.tensor_meta.dtype, lambda t: F.interpolate(t, size=[1] * ndim, **options), [1] * (ndim + 2)
    )
    # torch computes in single precision for the half types, and so do we, between the dims too.
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    resizes = {
        d: Resize(
            spec.shape[d], meta.shape[d], scales[d - 2], mode, align_corners, antialias, compute, str(call.device), ndim
        )
        for d in range(2, ndim + 2)
    }
    sizes, needs, mine = {}, {}, {}
    for d, resize in resizes.items():
        mine[d] = (0, resize.size), (0, resize.out)
        m = spec.sharded_dims().get(d)
        if m is not None:
            sizes[d] = map_boundaries(spec.sizes_along(m), scaled_boundary(resize.size, resize.out))
            needs[d] = resize.taps().reads(sizes[d])
            mine[d] = needs[d][spec.coordinate[m]], intervals_of(sizes[d])[spec.coordinate[m]]
    fetch, out = Fetch.of(spec, needs), with_sizes(spec, meta, dtype, sizes)
    # What a result, resampled dim after dim or taken out of a larger one, may have lost.
    last = CHANNELS_LAST.get(meta.ndim)
    lost = last is not None and not meta.is_contiguous() and meta.is_contiguous(memory_format=last)
    function = resampling(resizes, mine, fetch.shape, out, last if lost else None)
    casts = dtype != spec.tensor_meta.dtype
    if not casts and not spec.partial_mesh_dims():
        return LinearStencilPlan(fetch, function, out)

    def resample(t: Tensor) -> Tensor:
        t = fetch(t)
        return function.forward(t.to(dtype) if casts else t)[0]

    return LocalPlan(resample, out)


# -- called by the operators' names ------------------------------------------------------------------------------------


interpolate = FUNCTIONS[F.interpolate]


def _declare_upsample(name: str, mode: str, n: int, antialias: bool) -> None:
    packet = getattr(torch.ops.aten, name)
    names = [argument.name for argument in packet.default._schema.arguments][1:]
    scale_names = [name for name in names if name.startswith("scales")]

    # Called by their packet's name, ``default`` and ``vec`` are told apart by their arguments only.
    @operator(packet, tensors="self", partial="self")
    def plan_upsample(call: Arguments, self: ShardTensorSpec, *args: Any, **kwargs: Any) -> Plan:
        """``upsample_*(self, output_size, [align_corners,] scales...)``."""
        given = {**dict(zip(names, args)), **kwargs}
        output_size, align_corners = given.get("output_size"), given.get("align_corners")
        if output_size is None:
            return DECLINED
        scales = tuple(given.get(name) for name in scale_names)
        factors = [scale for scale in scales if scale is not None]
        fits = len(factors) == n and [int(k * s) for k, s in zip(self.shape[2:], factors)] == list(output_size)
        if factors and not fits:
            raise call.refuse(
                f"scales {scales} do not lead to the output size {tuple(output_size)}",
                "call torch.nn.functional.interpolate with one of the two",
            )
        size = None if factors else tuple(output_size)
        # By its handler: below autograd, calling torch's function would lead here again.
        return Composed(lambda x: interpolate(x, size, factors or None, mode, align_corners, antialias=antialias))


for _name, _mode in MODES.items():
    _declare_upsample(_name, *_mode)
