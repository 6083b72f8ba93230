"""Resampling of local tensors: by one call of torch's kernel where that takes a part for the whole, or dim by dim."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._compat import kernel, nn_functions
from ...layout.geometry import Interval, length
from ...layout.spec import ShardTensorSpec
from ..common.stencil import Differentiated, nothing, taken
from .taps import Resize, as_local

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
        return nothing(shape, out.local_shape(), linear=True)
    parts = {d: as_local(resizes[d], *mine[d]) for d in mine}
    found = {d: part for d, part in parts.items() if part is not None}
    if len(found) < len(parts):
        return _in_format(_dim_by_dim(shape, resizes, mine, out.tensor_meta.dtype), last)
    # One call of torch's kernel, as if these parts were all there is: several times faster than dim after dim.
    local = [part for part, _ in found.values()]
    wanted = {
        d: (drop, length(mine[d][1]), part.out)
        for d, (part, drop) in found.items()
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


def _by_torch(shape: Sequence[int], parts: Sequence[Resize]) -> Differentiated:
    first, scales, out = parts[0], [part.scale for part in parts], [part.out for part in parts]
    name = _OPERATORS.get((first.mode, first.ndim, first.antialias))
    if name is None or torch.are_deterministic_algorithms_enabled():
        return _composed(first, scales, out)
    resample, gradient = getattr(nn_functions, name), kernel(getattr(torch.ops.aten, f"{name}_backward").default)
    corners = () if first.mode in ("nearest", "nearest-exact") else (bool(first.align_corners),)
    scales = [None] * len(out) if None in scales else scales
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
