"""What one writes by hand instead of using this package: a halo for convolutions, and a ring for attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_aten = torch.ops.aten


class Halo(torch.autograd.Function):
    """Concatenate one fetched row on each side of dim 2; the gradient of the fetched rows goes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int, ranks: int) -> Tensor:  # type: ignore[override]
        ctx.at = rank, ranks
        up, down = _neighbours(x[:, :, :1].contiguous(), x[:, :, -1:].contiguous(), rank, ranks)
        return torch.cat([up, x, down], dim=2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        up, down = _neighbours(grad[:, :, :1].contiguous(), grad[:, :, -1:].contiguous(), *ctx.at)
        own = grad[:, :, 1:-1].clone()
        own[:, :, :1] += up
        own[:, :, -1:] += down
        return own, None, None


def _neighbours(first: Tensor, last: Tensor, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    up, down = torch.zeros_like(first), torch.zeros_like(last)
    ops = []
    if rank > 0:
        ops += [dist.P2POp(dist.isend, first, rank - 1), dist.P2POp(dist.irecv, up, rank - 1)]
    if rank < ranks - 1:
        ops += [dist.P2POp(dist.isend, last, rank + 1), dist.P2POp(dist.irecv, down, rank + 1)]
    for work in dist.batch_isend_irecv(ops) if ops else []:
        work.wait()
    return up, down


class Ring(torch.autograd.Function):
    """Attention over a sequence in equal shards."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, rank: int, ranks: int, causal: bool
    ) -> Tensor:
        held = [k, v]
        out, lse = torch.zeros_like(q), None
        for step in range(ranks):
            received, works = _start(held, rank, ranks) if step < ranks - 1 else ([], [])
            if not causal or step <= rank:
                square = causal and step == 0
                part, part_lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, *held, is_causal=square)
                if lse is None:
                    out, lse = part, part_lse
                else:
                    both = torch.logaddexp(lse, part_lse)
                    out = out * (lse - both).exp()[..., None] + part * (part_lse - both).exp()[..., None]
                    lse = both
            for work in works:
                work.wait()
            held = received
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.at = rank, ranks, causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        rank, ranks, causal = ctx.at
        grad, dq = grad.contiguous(), torch.zeros_like(q)
        held, sums = [k, v], [torch.zeros_like(k), torch.zeros_like(v)]
        for step in range(ranks):
            received, works = _start(held, rank, ranks) if step < ranks - 1 else ([], [])
            if not causal or step <= rank:
                parts = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    grad, q, *held, out, lse, 0.0, causal and not step
                )
                dq += parts[0]
                for total, part in zip(sums, parts[1:], strict=True):
                    total += part
            for work in works:
                work.wait()
            held = received
            sums, works = _start(sums, rank, ranks)  # the sums follow their block, and are home after the last step
            for work in works:
                work.wait()
        return dq, *sums, None, None, None


def _start(tensors: list[Tensor], rank: int, ranks: int) -> tuple[list[Tensor], list[Any]]:
    """Send to the right, receive from the left."""
    received = [torch.empty_like(t) for t in tensors]
    ops = [dist.P2POp(dist.isend, t, (rank + 1) % ranks) for t in tensors]
    ops += [dist.P2POp(dist.irecv, t, (rank - 1) % ranks) for t in received]
    return received, dist.batch_isend_irecv(ops)
