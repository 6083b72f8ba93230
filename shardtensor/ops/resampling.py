"""``interpolate`` in all its modes, exactly as torch counts: every weight comes from torch itself.

[Note: taps] Resampling treats each dim by itself and is linear: an output is a weighted sum of a few consecutive
inputs, its *taps*. Which, and with what weights, depends on the global sizes, the scale, the mode and the rounding in
the tensor's dtype. Rather than repeating torch's formulas we ask torch: it resamples one dim that holds ``K`` combs,
of which comb ``k`` is 1 at the places ``k, k + K, k + 2K, ...`` and 0 elsewhere. The taps of an output lie within ``K``
places, one on each comb at most: what comes out are the weights, and which comb it came from tells the tap.

[Note: owners] An output belongs to the rank that holds its centre, so doubling a dim doubles every shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import refuse
from ..geometry import Interval, intervals_of, map_cuts
from ..registry import register
from ..tensor import ShardTensor
from .pooling import _adaptive_avg_pool
from .spatial import borrow_dims, finish, on_meta, per_dim, result_dtype, scaled_cut, settled

__all__ = ["Resize", "Taps"]

# Half the spread of the taps of each mode, in units of the larger of 1 and the step between outputs.
_REACH = {"nearest": 1, "nearest-exact": 1, "linear": 1, "bilinear": 1, "trilinear": 1, "bicubic": 2, "lanczos": 3}


@dataclass(frozen=True, slots=True)
class Taps:
    """Per output of a dim, its first tap and its weights.

    Attributes:
        first: (out,) int64 on the CPU, not decreasing: global index of the first tap.
        weights: (out, width): output ``o`` is the sum of ``weights[o, t] * x[first[o] + t]``.
    """

    first: Tensor
    weights: Tensor

    def reads(self, out: Interval) -> Interval:
        """Input interval that the outputs ``out`` read."""
        if out[1] <= out[0]:
            return (0, 0)
        first = self.first[out[0] : out[1]]
        return int(first.min()), int(first.max()) + self.weights.shape[1]

    def apply(self, part: Tensor, dim: int, origin: int, out: Interval) -> Tensor:
        """The outputs ``out``, from ``part``, which holds the input from ``origin`` on along ``dim``."""
        first = (self.first[out[0] : out[1]] - origin).to(part.device)
        weights = self.weights[out[0] : out[1]].to(part.device)
        if weights.shape[1] == 1:
            return part.index_select(dim, first)
        result = None
        for t in range(weights.shape[1]):
            weight = weights[:, t].to(part.dtype).view(-1, *[1] * (part.ndim - dim - 1))
            term = part.index_select(dim, first + t) * weight
            result = term if result is None else result + term
        assert result is not None
        return result


@dataclass(frozen=True, slots=True)
class Resize:
    """How one dim is resampled: everything that its taps depend on.

    Attributes:
        size, out: global lengths before and after.
        scale: the caller's scale factor where torch computes with it, else None (then it computes with ``size / out``).
        mode, align_corners, antialias: as in ``interpolate``.
        dtype, device: in which torch computes the weights.
    """

    size: int
    out: int
    scale: float | None
    mode: str
    align_corners: bool | None
    antialias: bool
    dtype: torch.dtype
    device: str

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
def _taps(resize: Resize) -> Taps:
    """See [Note: taps]."""
    step, size = resize.step, resize.size
    # Only antialiasing widens the taps with the step. 2 more: rounding may move a tap by one either way.
    reach = _REACH[resize.mode] * (max(step, 1.0) if resize.antialias else 1.0)
    combs = min(size, 2 * math.ceil(reach) + 3)
    ndim = {"linear": 1, "trilinear": 3}.get(resize.mode, 2)
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


def _interpolate(
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    """Handler of ``F.interpolate``."""
    if not isinstance(input, ShardTensor):
        return NotImplemented
    kwargs = {"mode": mode, "align_corners": align_corners, "antialias": antialias}
    meta = F.interpolate(
        on_meta(input), size, scale_factor, recompute_scale_factor=recompute_scale_factor, **kwargs
    )
    if mode == "area":
        return _adaptive_avg_pool(input, tuple(meta.shape[2:]), ndim=input.ndim - 2)
    x = settled(input, linear=mode not in ("nearest", "nearest-exact") or input.is_floating_point())
    spec = x._spec
    ndim = x.ndim - 2
    scales: Sequence[float | None] = [None] * ndim
    if size is None and not recompute_scale_factor:
        scales = [float(s) for s in per_dim(scale_factor, ndim)]
    probe = lambda t: F.interpolate(t, size=[1] * ndim, **kwargs)  # noqa: E731
    dtype = result_dtype(x._local_tensor, probe, [1] * x.ndim)
    sharded = {d: m for d, m in spec.sharded_dims().items() if d >= 2}
    local = x.to_local()
    if not sharded:
        if local.numel() == 0:
            local = local.reshape(*local.shape[:2], *meta.shape[2:])
        else:
            local = F.interpolate(local, size, scale_factor, recompute_scale_factor=recompute_scale_factor, **kwargs)
        return finish(local.to(dtype), x, meta, {})
    if not x.is_floating_point() and not mode.startswith("nearest"):
        reason = f"mode {mode!r} of {x.dtype} rounds between dims, which is done for floating point only"
        raise refuse("interpolate", x, reason, "convert to float and round yourself")
    # torch computes in single precision for the half types, and so do we, between the dims too.
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    sizes, needs, mine = {}, {}, {}
    taps = {}
    for d in range(2, x.ndim):
        resize = Resize(
            spec.shape[d], meta.shape[d], scales[d - 2], mode, align_corners, antialias, compute, str(local.device)
        )
        taps[d] = resize.taps()
        mine[d] = 0, (0, meta.shape[d])
        if d in sharded:
            m = sharded[d]
            sizes[d] = map_cuts(spec.sizes[m] or (), scaled_cut(spec.shape[d], meta.shape[d]))
            outs = intervals_of(sizes[d])
            needs[d] = [taps[d].reads(out) for out in outs]
            mine[d] = needs[d][spec.coordinate[m]][0], outs[spec.coordinate[m]]
    local = borrow_dims(local, spec, needs)
    if not mode.startswith("nearest"):
        local = local.to(compute)
    for d, (origin, out) in mine.items():
        if local.numel() == 0:
            shape = list(local.shape)
            shape[d] = out[1] - out[0]
            local = local.reshape(shape)
        else:
            local = taps[d].apply(local, d, origin, out)
    return finish(local.to(dtype), x, meta, sizes)


register(F.interpolate)(_interpolate)
