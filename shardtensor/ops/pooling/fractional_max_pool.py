"""``fractional_max_pool``: pooling over windows of random sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Arguments, Composed, Plan, operator
from ..common.batch_parallel import Names, Result, image_names, plan_by_batch
from ..common.stencil import result_dtype
from .pool import Numbers


def _declare_fractional_pool(n: int) -> None:
    name = f"fractional_max_pool{n}d"
    function = getattr(F, f"{name}_with_indices")

    @operator(getattr(F, name), function, tensors="input _random_samples")
    def plan_fractional_max_pool(
        call: Arguments,
        input: ShardTensorSpec,
        kernel_size: Numbers,
        output_size: Numbers | None = None,
        output_ratio: float | Sequence[float] | None = None,
        return_indices: bool = False,
        _random_samples: ShardTensorSpec | None = None,
    ) -> Plan:
        indices = return_indices or call.name != name
        batched = len(input.shape) == n + 2
        batch, channels = input.shape[0] if batched else 1, input.shape[-n - 1]
        dtype = input.tensor_meta.dtype
        if _random_samples is None:

            def draw_and_pool(x: Tensor, _: None) -> Tensor | tuple[Tensor, Tensor]:
                # A few numbers per channel, drawn as on one device: by every rank for the global tensor.
                drawn = torch.rand(batch, channels, n, dtype=dtype, device=x.device)
                pooled = function(x, kernel_size, output_size, output_ratio, True, drawn)
                return pooled if indices else pooled[0]  # type: ignore[no-any-return]

            return Composed(draw_and_pool)
        shape = call.returned(function, input, kernel_size, output_size, output_ratio, True, _random_samples)[0].shape
        names, out = image_names(len(input.shape), n), list(shape[-n:])

        def pool(x: Tensor, at: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            pooled = function(x, kernel_size, out, None, True, at)
            return pooled if indices else pooled[0]  # type: ignore[no-any-return]

        def probe(x: Tensor) -> Tensor:
            return function(x, 1, 1, None, True, x.new_zeros(1, 1, n))[0]  # type: ignore[no-any-return]

        # In three dims torch takes no input of length 1.
        results = [Result(shape, names, result_dtype(call, dtype, probe, [1, 1, *[2] * n]))]
        if indices:
            results.append(Result(shape, names, torch.int64))
        sample_names: Names = ["batch" if batched else None, "channels", None]
        return plan_by_batch(call, pool, {"input": names, "_random_samples": sample_names}, results)


for _n in (2, 3):
    _declare_fractional_pool(_n)
