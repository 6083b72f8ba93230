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
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._compat import TensorMeta, constant_like, untraced
from ...errors import refuse
from ...geometry import Interval, intervals_of, length, map_cuts
from ...registry import register
from ...spec import CHANNELS_LAST
from ...tensor import ShardTensor
from ..common.stencil import borrow_dims, dtype_of_result, finish, per_dim, scaled_cut, settled

__all__ = ["Resize", "Taps", "as_local"]

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
        with untraced():
            first = self.first[out[0] : out[1]]
            return int(first.min()), int(first.max()) + self.weights.shape[1]

    def apply(self, part: Tensor, dim: int, origin: int, out: Interval) -> Tensor:
        """The outputs ``out``, from ``part``, which holds the input from ``origin`` on along ``dim``."""
        with untraced():
            first = (self.first[out[0] : out[1]] - origin).to(part.device)
            weights = self.weights[out[0] : out[1]].to(part.device)
        first, weights = constant_like(first, part), constant_like(weights, part)
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
@untraced()
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


@lru_cache(maxsize=1024)
@untraced()
def as_local(resize: Resize, part: Interval, out: Interval) -> tuple[Resize, int] | None:
    """How torch can compute the outputs ``out`` from ``part`` alone, as if that were the whole dim; None if it cannot.

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


@lru_cache(maxsize=1024)
@untraced()
def _on_meta(x: TensorMeta, size: Any, scale_factor: Any, recompute: bool | None, kwargs: tuple[Any, ...]) -> Tensor:
    """The result without its data, and torch's own errors. Kept: torch's meta kernels take milliseconds here."""
    whole = torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device="meta")
    return F.interpolate(whole, size, scale_factor, recompute_scale_factor=recompute, **dict(kwargs))


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
    kwargs: dict[str, Any] = {"mode": mode, "align_corners": align_corners, "antialias": antialias}
    lengths = tuple(size) if isinstance(size, (tuple, list)) else size
    factors = tuple(scale_factor) if isinstance(scale_factor, (tuple, list)) else scale_factor
    meta = _on_meta(input._spec.tensor_meta, lengths, factors, recompute_scale_factor, tuple(kwargs.items()))
    if mode == "area":
        return getattr(F, f"adaptive_avg_pool{input.ndim - 2}d")(input, tuple(meta.shape[2:]))
    x = settled(input, linear=mode not in ("nearest", "nearest-exact") or input.is_floating_point())
    spec = x._spec
    ndim = x.ndim - 2
    scales: Sequence[float | None] = [None] * ndim
    if size is None and not recompute_scale_factor:
        scales = [float(s) for s in per_dim(scale_factor, ndim)]
    probe = lambda t: F.interpolate(t, size=[1] * ndim, **kwargs)  # noqa: E731
    dtype = dtype_of_result(x._local_tensor, probe, [1] * x.ndim)
    sharded = {d: m for d, m in spec.sharded_dims().items() if d >= 2}
    if sharded and not x.is_floating_point() and not mode.startswith("nearest"):
        reason = f"mode {mode!r} of {x.dtype} rounds between dims, which is done for floating point only"
        raise refuse("interpolate", x, reason, "convert to float and round yourself")
    # torch computes in single precision for the half types, and so do we, between the dims too.
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    sizes, needs, mine = {}, {}, {}
    resizes = {}
    for d in range(2, x.ndim):
        n, out = spec.shape[d], meta.shape[d]
        resizes[d] = Resize(n, out, scales[d - 2], mode, align_corners, antialias, compute, str(x.device))
        mine[d] = (0, n), (0, out)
        if d in sharded:
            m = sharded[d]
            sizes[d] = map_cuts(spec.cut(m), scaled_cut(n, out))
            outs = intervals_of(sizes[d])
            needs[d] = [resizes[d].taps().reads(interval) for interval in outs]
            mine[d] = needs[d][spec.coordinate[m]], outs[spec.coordinate[m]]
    local = borrow_dims(x.to_local(), spec, needs).to(dtype)
    result = _resample(local, resizes, mine)
    # Resampled dim after dim, or cut out of a larger result, it may have lost its memory format.
    last = CHANNELS_LAST.get(meta.ndim)
    if last is not None and not meta.is_contiguous() and meta.is_contiguous(memory_format=last):
        result = result.contiguous(memory_format=last)
    return finish(result, x, meta, sizes)


def _resample(local: Tensor, resizes: dict[int, Resize], mine: dict[int, tuple[Interval, Interval]]) -> Tensor:
    """Resample dims; ``mine``: per dim, the global input interval that ``local`` holds and the outputs wanted."""
    if local.numel() == 0:
        return local.reshape([length(mine[d][1]) if d in mine else n for d, n in enumerate(local.shape)])
    parts = {d: as_local(resizes[d], *mine[d]) for d in mine}
    found = [part for part in parts.values() if part is not None]
    if len(found) == len(parts):
        # One call of torch's kernel, which is several times faster than dim after dim.
        first, scales = found[0][0], [part.scale for part, _ in found]
        size = {"size": [part.out for part, _ in found]} if None in scales else {"scale_factor": scales}
        kwargs = {"mode": first.mode, "align_corners": first.align_corners, "antialias": first.antialias}
        local = F.interpolate(local, **size, **kwargs)  # type: ignore[arg-type]
        for d, (_, drop) in zip(mine, found):
            local = local.narrow(d, drop, length(mine[d][1]))
        return local
    dtype = local.dtype
    for d, (part, out) in mine.items():
        if resizes[d].mode not in ("nearest", "nearest-exact"):
            local = local.to(resizes[d].dtype)
        local = resizes[d].taps().apply(local, d, part[0], out)
    return local.to(dtype)


register(F.interpolate)(_interpolate)


# -- called by the operators' names ---------------------------------------------------------------------------------


def _upsample(mode: str, n: int, antialias: bool, names: Sequence[str], *args: Any, **kwargs: Any) -> Any:
    """``upsample_*(self, output_size, [align_corners,] scales...)``; ``names`` are those of its arguments."""
    arguments = {**dict(zip(names, args)), **kwargs}
    input, output_size, align_corners = (arguments.get(k) for k in ("self", "output_size", "align_corners"))
    if not isinstance(input, ShardTensor) or output_size is None:
        return NotImplemented
    scales = tuple(arguments.get(name) for name in names if name.startswith("scales"))
    given = [scale for scale in scales if scale is not None]
    if given and (len(given) < n or [int(k * s) for k, s in zip(input.shape[2:], given)] != list(output_size)):
        raise refuse(
            f"upsample_{mode}{n}d",
            input,
            f"scales {scales} do not lead to the output size {tuple(output_size)}",
            "call torch.nn.functional.interpolate with the one or the other",
        )
    size = None if given else list(output_size)
    return _interpolate(input, size, given or None, mode, align_corners, antialias=antialias)


_MODES = {
    **{f"upsample_nearest{n}d": ("nearest", n, False) for n in (1, 2, 3)},
    **{f"_upsample_nearest_exact{n}d": ("nearest-exact", n, False) for n in (1, 2, 3)},
    "upsample_linear1d": ("linear", 1, False),
    "upsample_bilinear2d": ("bilinear", 2, False),
    "upsample_bicubic2d": ("bicubic", 2, False),
    "upsample_trilinear3d": ("trilinear", 3, False),
    "_upsample_bilinear2d_aa": ("bilinear", 2, True),
    "_upsample_bicubic2d_aa": ("bicubic", 2, True),
}
for _name, _mode in _MODES.items():
    _packet = getattr(torch.ops.aten, _name)
    _arguments = [argument.name for argument in _packet.default._schema.arguments]
    register(_packet, _packet.default)(partial(_upsample, *_mode, _arguments))
