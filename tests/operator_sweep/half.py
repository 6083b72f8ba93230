"""Half precision: samples whose sums cancel, and the error of a result against float64, compared with one device's.

Sums of numbers with an offset, or of opposite signs on the ranks, are small where their parts are large. A part that is
rounded before it is added up is wrong by a unit of the part; one device rounds once, by a unit of the sum.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.utils._pytree import tree_map

# The first operand: as torch made it, with an offset, or with one that changes its sign in the middle of the dim
# that is sharded. The others have no mean in the second case, and one in the third.
DATA = ("samples", "offset", "cancelling")
OFFSET = 280.0
LIMIT = 2.0  # times the error of one device


def shifted(sample: Any, data: str, dim: int) -> Any:
    """The sample with such data instead of its own, for a case that shards dim ``dim`` of its first operand."""
    if data == "samples":
        return sample

    def first(t: Any) -> Any:
        if not _has_data(t):
            return t
        unit = OFFSET * torch.finfo(t.dtype).eps
        noise = (t.detach().float() * 4).round().clamp(-8, 8) * unit
        offset = torch.full(t.shape, OFFSET)
        if data == "cancelling" and t.ndim > max(dim, 0):
            n = t.shape[dim]
            offset.narrow(dim, n - n // 2, n // 2).neg_()
        return (offset + noise).to(t.dtype).requires_grad_(t.requires_grad)

    def other(t: Any) -> Any:
        if not _has_data(t):
            return t
        small = t.detach().float().clamp(-8, 8) / 8
        if data == "cancelling":
            small = 1 + (small * 32).round() * torch.finfo(t.dtype).eps / 16
        for d in {0, t.ndim - 1} if data == "offset" else ():
            small = small - small.mean(d, keepdim=True) if t.ndim and t.shape[d] > 1 else small
        return small.to(t.dtype).requires_grad_(t.requires_grad)

    parts = tree_map(first, sample.input), tree_map(other, sample.args), tree_map(other, sample.kwargs)
    return types.SimpleNamespace(**dict(zip(("input", "args", "kwargs"), parts)))


def rounded_weights(data: str, dim: int, t: torch.Tensor) -> torch.Tensor:
    """Weights of a loss that are the same numbers in every precision; with an offset they cancel."""
    weight = (torch.arange(t.numel()) % 32 / 64 + 1).reshape(t.shape)
    if data == "offset" and t.ndim > dim:
        n = t.shape[dim]
        weight.narrow(dim, n - n // 2, n // 2).neg_()
    return weight.to(t.dtype.to_real())


def _has_data(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.layout == torch.strided and t.is_floating_point() and t.numel() > 0


def less_exact(got: list[Any], one: list[Any], precise: list[Any], rounded: torch.dtype | None = None) -> str | None:
    """Which result is further from ``precise`` than ``LIMIT`` times what one device gives, in words; or None.

    A result is a rounded number even where one device happens to hit it exactly: so an error of one unit in the last
    place of the largest element is allowed in any case, of ``rounded`` where the computation is rounded to that and the
    result is not, as the gradients of autocast. And so is one that float16 does not resolve, where terms of the
    order of one cancel: it is what float32's rounding leaves.
    """
    for i, (a, b, p) in enumerate(zip(got, one, precise, strict=True)):
        if not isinstance(b, torch.Tensor) or not (b.is_floating_point() or b.is_complex()) or not b.numel():
            continue
        wide = torch.complex128 if b.is_complex() else torch.float64
        a, b, p = (t.to_dense().to(wide) if t.layout != torch.strided else t.to(wide) for t in (a, b, p))
        fair = b.isfinite() & p.isfinite()
        if bool((fair & ~a.isfinite()).any()):
            return f"result {i} is not finite where it is on one device"
        if not bool(fair.any()):
            continue
        error, ours = (float((t - p).abs()[fair].max()) for t in (b, a))
        unit = torch.finfo(rounded or one[i].dtype).eps * float(p[fair].abs().max())
        if ours > LIMIT * max(error, unit / 2, torch.finfo(torch.float16).tiny):
            return f"result {i} is off by {ours:.3g}, on one device by {error:.3g}; one unit is {unit:.3g}"
    return None
