"""``interpolate`` in all its modes, exactly as torch counts: every weight comes from torch itself, see taps.py.

[Note: owners] An output belongs to the rank that holds its centre, so doubling a dim doubles every shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...communication.halo import Fetch
from ...dispatch.registry import FUNCTIONS, register
from ...layout.geometry import intervals_of, map_boundaries
from ...layout.spec import ShardTensorSpec
from ...layout.strides import CHANNELS_LAST
from ...operators.declaration import Arguments, Composed, LocalPlan, Plan, operator
from ..common.stencil import LinearStencilPlan, keeping_sums, per_dim, resized, result_dtype, scaled_boundary
from .resample import MODES, resampling
from .taps import Resize


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
    fetch, out = Fetch.of(spec, needs), resized(spec, meta, dtype, sizes)
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
            return NotImplemented  # type: ignore[no-any-return]
        scales = tuple(given.get(name) for name in scale_names)
        factors = [scale for scale in scales if scale is not None]
        fits = len(factors) == n and [int(k * s) for k, s in zip(self.shape[2:], factors)] == list(output_size)
        if factors and not fits:
            raise call.refuse(
                f"scales {scales} do not lead to the output size {tuple(output_size)}",
                "call torch.nn.functional.interpolate with the one or the other",
            )
        size = None if factors else tuple(output_size)
        # By its handler: below autograd, calling torch's function would lead here again.
        return Composed(lambda x: interpolate(x, size, factors or None, mode, align_corners, antialias=antialias))

    # Also below autograd, where torch functions are disabled: the plan fetches, as a rule's cannot.
    register(packet.default)(FUNCTIONS[packet])


for _name, _mode in MODES.items():
    _declare_upsample(_name, *_mode)
