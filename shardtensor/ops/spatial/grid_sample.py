"""``grid_sample`` and ``affine_grid``: an image at places that a grid gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...registry import register
from ..common.alignment import common_mesh, torch_judges
from ..common.batch_parallel import Names, by_batch, image_names
from ..loss.base import full_precision


def _grid_sample(
    input: Any, grid: Any, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool | None = None
) -> Any:
    """Each output looks anywhere into the input, so that is whole in its spatial dims; the grid may be cut."""
    mesh = common_mesh("grid_sample", [input, grid])
    if mesh is None:
        return NotImplemented
    meta = torch_judges(F.grid_sample, input, grid, mode, padding_mode, align_corners)
    spatial = input.ndim - 2
    names = image_names(input.ndim, spatial)
    places = [f"output dim {d}" for d in range(spatial)]
    with full_precision(mesh.device_type) as cast:

        def sample(x: Tensor, at: Tensor) -> Tensor:
            return F.grid_sample(x, at, mode, padding_mode, align_corners)

        return by_batch(
            "grid_sample",
            sample,
            [(cast(input), names), (cast(grid), ["batch", *places, None])],
            [(meta.shape, ["batch", "channels", *places])],
        )


def _grid_sampler(input: Any, grid: Any, interpolation_mode: int, padding_mode: int, align_corners: bool) -> Any:
    """The operators below ``grid_sample``, which take numbers for the modes."""
    mode = ("bilinear", "nearest", "bicubic")[interpolation_mode]
    return _grid_sample(input, grid, mode, ("zeros", "border", "reflection")[padding_mode], align_corners)


def _affine_grid(theta: Any, size: Sequence[int], align_corners: bool | None = None) -> Any:
    if common_mesh("affine_grid", [theta]) is None:
        return NotImplemented
    meta = torch_judges(F.affine_grid, theta, list(size), align_corners)

    def grid(local: Tensor) -> Tensor:
        return F.affine_grid(local, [local.shape[0], *size[1:]], align_corners)

    names: Names = ["batch", *[None] * (len(meta.shape) - 1)]
    return by_batch("affine_grid", grid, [(theta, ["batch", None, None])], [(meta.shape, names)])


register(F.grid_sample)(_grid_sample)


for _name in ("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"):
    register(getattr(torch, _name), getattr(torch.ops.aten, _name))(_grid_sampler)


register(F.affine_grid)(_affine_grid)
