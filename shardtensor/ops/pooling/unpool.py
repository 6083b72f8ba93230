"""``max_unpool``: the inverse of max pooling, which is told where each maximum was."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...layout.spec import ShardTensorSpec
from ...layout.strides import stride_like
from ...operators.declaration import Arguments, Plan, operator
from ..common.batch_parallel import Result, image_names, plan_by_batch
from .pool import Numbers


def _declare_unpool(n: int) -> None:
    function = getattr(F, f"max_unpool{n}d")

    @operator(function, tensors="input indices")
    def plan_max_unpool(
        call: Arguments,
        input: ShardTensorSpec,
        indices: ShardTensorSpec,
        kernel_size: Numbers,
        stride: Numbers | None = None,
        padding: Numbers = 0,
        output_size: Sequence[int] | None = None,
    ) -> Plan:
        size = None if output_size is None else tuple(output_size)
        shape = call.returned(function, input, indices, kernel_size, stride, padding, size).shape
        names, out = image_names(len(input.shape), n), list(shape[-n:])

        def unpool(x: Tensor, places: Tensor) -> Tensor:
            return function(x, places, kernel_size, stride, padding, out)  # type: ignore[no-any-return]

        given = torch.empty_strided(input.shape, input.stride, device="meta")
        # The kernel gives it the input's memory format; on tensors without data torch calls it row-major.
        result = Result(shape, names, input.tensor_meta.dtype, stride_like(given, shape))
        return plan_by_batch(call, unpool, {"input": names, "indices": names}, [result])


for _n in (1, 2, 3):
    _declare_unpool(_n)
