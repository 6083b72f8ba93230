"""Neighborhood attention by natten's own kernels, on slices of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...layout.spec import ShardTensorSpec
from .tiled import Dim, tiled_attention


def natten_kernel(
    asked: str | None,
    specs: Sequence[ShardTensorSpec],
    device: torch.device,
    *,
    grad: bool,
    additional: bool,
    return_lse: bool,
    torch_compile: bool,
) -> str | None:
    """The kernel of natten to use, None where the tiles have to do: from what every rank knows, as halos depend on it.

    Args:
        asked: the caller's choice.
        specs: of queries, keys and values.
        device: theirs.
        grad: whether a gradient will be asked for.
        additional, return_lse, torch_compile: what else the call has.

    Raises:
        Exception: natten's own, for a backend that the caller names and that cannot run.
    """
    from natten import backends

    checks = {
        "blackwell-fna": backends.can_run_cutlass_blackwell_fna,
        "hopper-fna": backends.can_run_cutlass_hopper_fna,
        "cutlass-fna": backends.can_run_cutlass_fna,
    }
    # natten checks dtypes, devices, heads and head_dim; on each rank alike if there is nothing else.
    n = len(specs[0].shape) - 3
    samples = [_sample(spec, n, grad, device) for spec in specs]
    if asked == "flex-fna":
        backends.can_run_flex_attention(*samples, torch_compile=torch_compile, raise_error=True)
    elif asked in checks:
        checks[asked](*samples, raise_error=True)
    elif asked is not None:
        raise NotImplementedError(f"Unrecognized NATTEN backend {asked}.")
    # The kernels drop the gradient of the log-sum-exp, and flex attention has none at all on CPU.
    if grad and (return_lse or (asked == "flex-fna" and samples[0].device.type == "cpu")):
        return None
    if additional and not _attends(*(_sample(spec, 1, grad, device) for spec in specs)):
        return None
    able = [name for name, check in checks.items() if check(*samples)] if asked is None else [asked]
    return able[0] if able else None


def _sample(spec: ShardTensorSpec, ndim: int, grad: bool, device: torch.device) -> Tensor:
    """A tensor without elements, but with the device, the dtype and the heads of one with ``spec``."""
    shape = (0,) * (1 + ndim) + tuple(spec.shape[-2:])
    return torch.empty(shape, dtype=spec.tensor_meta.dtype, device=device).requires_grad_(grad)


def _attends(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether natten has a kernel for attention to the additional keys."""
    from natten.backends import choose_fmha_backend

    try:
        choose_fmha_backend(q, k, v, is_causal=False, is_varlen=False, torch_compile=False)
    except NotImplementedError:
        return False
    return True


def attention_by_natten(
    query: Tensor,
    key_value: Tensor,
    dims: tuple[Dim, ...],
    additional: Tensor | None,
    return_lse: bool,
    arguments: dict[str, Any],
) -> tuple[Tensor, ...]:
    """What ``tiled_attention`` returns, by natten's kernel on the keys' slice of the tensor.

    The kernel wants as many queries as keys; those that are not this rank's are zero, and their outputs are dropped.
    """
    if 0 in query.shape:
        return tiled_attention(query, key_value, dims, additional, arguments["scale"], return_lse)
    from natten.functional import neighborhood_attention_generic

    head_dim = query.shape[-1]
    margins = [(queries[0] - keys[0], keys[1] - queries[1]) for _, queries, keys in dims]
    padded = F.pad(query, [0, 0, 0, 0, *(side for margin in reversed(margins) for side in margin)])
    key, value = key_value.split_with_sizes([head_dim, key_value.shape[-1] - head_dim], -1)
    if additional is not None:
        extra_keys, extra_values = additional.split_with_sizes([head_dim, additional.shape[-1] - head_dim], -1)
        arguments = arguments | {"additional_keys": extra_keys, "additional_values": extra_values}
    result = neighborhood_attention_generic(padded, key, value, return_lse=return_lse, **arguments)
    results = (result[0], result[1].unsqueeze(-1)) if return_lse else (result,)
    for i, (before, _) in enumerate(margins):
        results = tuple(r.narrow(1 + i, before, query.shape[1 + i]) for r in results)
    return results
