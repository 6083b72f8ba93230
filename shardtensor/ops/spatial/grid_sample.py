"""``grid_sample`` and ``affine_grid``: an image at places that a grid gives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Plan, operator
from ..common.batch_parallel import Names, Result, image_names, plan_by_batch


@operator(F.grid_sample, tensors="input grid")
def plan_grid_sample(
    call: Arguments,
    input: ShardTensorSpec,
    grid: ShardTensorSpec,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Plan:
    """Each output reads anywhere in the input, which is unsharded in its spatial dims; the grid may be sharded."""
    meta = call.returned(F.grid_sample, input, grid, mode, padding_mode, align_corners)
    if call.autocast() is not None:  # by whose rules it runs in float32
        half = (torch.float16, torch.bfloat16)
        call.cast(torch.float32, *(name for name, spec in call.tensors.items() if spec.tensor_meta.dtype in half))
    spatial = len(input.shape) - 2
    places = [f"output dim {d}" for d in range(spatial)]

    def sample(x: Tensor, at: Tensor) -> Tensor:
        return F.grid_sample(x, at, mode, padding_mode, align_corners)

    operands: dict[str, Names] = {
        "input": image_names(len(input.shape), spatial),
        "grid": ["batch", *places, None],
    }
    dtype = call.tensors["input"].tensor_meta.dtype
    return plan_by_batch(call, sample, operands, [Result(meta.shape, ["batch", "channels", *places], dtype)])


def _declare_grid_sampler(name: str) -> None:
    @operator(getattr(torch, name), getattr(torch.ops.aten, name), tensors="input grid")
    def plan_grid_sampler(
        call: Arguments,
        input: ShardTensorSpec,
        grid: ShardTensorSpec,
        interpolation_mode: int,
        padding_mode: int,
        align_corners: bool,
    ) -> Plan:
        """The operators below ``grid_sample``, which take numbers for the modes."""
        mode = ("bilinear", "nearest", "bicubic")[interpolation_mode]
        return plan_grid_sample(call, input, grid, mode, ("zeros", "border", "reflection")[padding_mode], align_corners)


for _name in ("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"):
    _declare_grid_sampler(_name)


@operator(F.affine_grid, tensors="theta")
def plan_affine_grid(
    call: Arguments, theta: ShardTensorSpec, size: Sequence[int], align_corners: bool | None = None
) -> Plan:
    meta = call.returned(F.affine_grid, theta, list(size), align_corners)
    lengths = tuple(size[1:])

    def grid(local: Tensor) -> Tensor:
        return F.affine_grid(local, [local.shape[0], *lengths], align_corners)

    names: Names = ["batch", *[None] * (len(meta.shape) - 1)]
    result = Result(meta.shape, names, theta.tensor_meta.dtype)
    return plan_by_batch(call, grid, {"theta": ["batch", None, None]}, [result])
