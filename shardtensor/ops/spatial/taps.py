"""What an output of ``interpolate`` reads, and with what weights: asked of torch.

[Note: taps] Resampling treats each dim by itself and is linear: an output is a weighted sum of a few consecutive
inputs, its *taps*. Which, and with what weights, depends on the global sizes, the scale, the mode and the rounding in
the tensor's dtype. Rather than repeating torch's formulas we ask torch: it resamples one dim that holds ``K`` combs,
of which comb ``k`` is 1 at the places ``k, k + K, k + 2K, ...`` and 0 elsewhere. The taps of an output lie within ``K``
places, one on each comb at most: what comes out are the weights, and which comb it came from tells the tap.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._compat import untraced
from ...layout.geometry import Interval
from ...layout.strides import zeros_like
from ..common.stencil import Constant

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

    @untraced()
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
        here = slice(*out)

        def index(t: int) -> Constant:
            return Constant(lambda: (self.first[here] - origin + t).to(device))

        def weight(t: int) -> Constant:
            return Constant(lambda: self.weights[here, t].to(device, dtype))

        taps = range(self.weights.shape[1])
        return WeightedSum([index(t) for t in taps], [weight(t) for t in taps])


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """The outputs of one rank along one dim, as weighted sums of its inputs.

    Attributes:
        index: per tap, the local indices of the inputs, one per output.
        weight: per tap, what they are multiplied with.
    """

    index: Sequence[Constant]
    weight: Sequence[Constant]

    def __call__(self, part: Tensor, dim: int) -> Tensor:
        """The outputs along ``dim`` of ``part``."""
        if len(self.index) == 1:  # a copy: 1 * inf is inf, but 0 * inf in a gradient is not 0
            return part.index_select(dim, self.index[0].like(part))
        shape = [-1, *[1] * (part.ndim - dim - 1)]
        terms = (
            part.index_select(dim, index.like(part)) * weight.like(part).view(shape)
            for index, weight in zip(self.index, self.weight, strict=True)
        )
        return functools.reduce(torch.add, terms)

    def adjoint(self, grad: Tensor, dim: int, n: int) -> Tensor:
        """The gradient of ``n`` inputs along ``dim``, out of that of the outputs."""
        result = zeros_like(grad, [n if d == dim else length for d, length in enumerate(grad.shape)])
        if len(self.index) == 1:
            return result.index_add_(dim, self.index[0].like(grad), grad)
        shape = [-1, *[1] * (grad.ndim - dim - 1)]
        for index, weight in zip(self.index, self.weight, strict=True):
            result.index_add_(dim, index.like(grad), grad * weight.like(grad).view(shape))
        return result


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

    def taps(self) -> Taps:
        """Taps of all outputs."""
        return _taps(self)


@lru_cache(maxsize=256)
@untraced()
def _taps(resize: Resize) -> Taps:
    """See [Note: taps]."""
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
@untraced()
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
