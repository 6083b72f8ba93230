"""What the plans of all normalizations have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._compat import TensorMeta
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Operand, Plan
from ..common.alignment import wide_dtype
from .geometry import Geometry

Kept = tuple[Tensor, tuple[Tensor, ...]]  # a local result, and what its gradient needs besides


class Norm(Plan):
    """Normalization of an input, then scaling by a weight and adding a bias.

    Args:
        dtype: of the result.
        parameters: weight and bias; specs for those that are sharded.
    """

    twice = True
    depends = {0: (0, 1), 1: (0,), 2: ()}

    def __init__(self, call: Arguments, geometry: Geometry, dtype: torch.dtype, *parameters: Operand | None) -> None:
        self.geometry, self.dtype, self.outputs = geometry, dtype, geometry.output_spec(dtype)
        self.casts, self.empty = call.autocast() is not None, 0 in geometry.view
        # Which of the parameters this rank uses a part of. Sharded ones arrive as that part.
        self.narrows = [isinstance(p, TensorMeta) and geometry.own_shape(p.shape) != p.shape for p in parameters]
        self.metas = [p.tensor_meta if isinstance(p, ShardTensorSpec) else p for p in parameters]

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *buffers: Tensor | None) -> Kept:
        if self.casts:
            with torch.autocast(x.device.type, enabled=False):
                return self._forward(x, weight, bias, *buffers)
        return self._forward(x, weight, bias, *buffers)

    def _forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *buffers: Tensor | None) -> Kept:
        raise NotImplementedError

    def _own(self, parameter: Tensor | None, i: int) -> Tensor | None:
        """The part of weight (0) or bias (1) that belongs to the shard, contiguous.

        Some of torch's kernels read it as if it were, and leave it to those who call them.
        """
        mine = self.geometry.own_part(parameter) if parameter is not None and self.narrows[i] else parameter
        return None if mine is None else mine.contiguous()

    def _of_parameter(self, contribution: Tensor, i: int) -> Tensor:
        """The gradient of weight (0) or bias (1), from what belongs to the shard; zeros for what other ranks hold."""
        meta, geometry = self.metas[i], self.geometry
        assert meta is not None
        dtype = wide_dtype(meta.dtype) if self.sums else meta.dtype
        mine = contribution if contribution.dtype == dtype else contribution.to(dtype)
        if not self.narrows[i]:
            return mine if mine.ndim == 1 else mine.reshape(geometry.own_shape(meta.shape))
        full = mine.new_zeros(meta.shape)
        geometry.own_part(full).copy_(mine.reshape(geometry.own_shape(meta.shape)))  # type: ignore[union-attr]
        return full
