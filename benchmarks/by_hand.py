"""What one writes by hand in place of this package: halos for convolutions, sums for norms, a ring for attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

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


class GroupNormOverRanks(torch.autograd.Function):
    """Group norm of an image of which each rank has as many rows. The gradients of weight and bias are this rank's."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, ranks: int
    ) -> Tensor:
        parts = x.reshape(len(x), groups, -1)
        sums = torch.stack([parts.sum(-1), parts.square().sum(-1)])
        dist.all_reduce(sums)
        mean, square = (sums / (parts.shape[-1] * ranks)).unsqueeze(-1)
        rstd = (square - mean.square() + eps).rsqrt()
        normed = ((parts - mean) * rstd).view_as(x)
        ctx.save_for_backward(normed, rstd, weight)
        ctx.ranks = ranks
        return torch.addcmul(bias.view(1, -1, 1, 1), normed, weight.view(1, -1, 1, 1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor, Tensor, None, None]:  # type: ignore[override]
        normed, rstd, weight = ctx.saved_tensors
        of_weight = grad * normed
        weighted = (grad * weight.view(1, -1, 1, 1)).view(*rstd.shape[:2], -1)
        parts = normed.view_as(weighted)
        sums = torch.stack([weighted.sum(-1), (weighted * parts).sum(-1)])
        dist.all_reduce(sums)
        mean, slope = (sums / (parts.shape[-1] * ctx.ranks)).unsqueeze(-1)
        of_input = (torch.addcmul(weighted, parts, slope, value=-1) - mean) * rstd
        return of_input.view_as(grad), None, of_weight.sum((0, 2, 3)), grad.sum((0, 2, 3)), None, None


class Convolutions(nn.Module):
    """Blocks of a 3 x 3 convolution, a group norm and SiLU on the rows of an image that this rank has."""

    def __init__(self, blocks: nn.Sequential, rank: int, ranks: int) -> None:
        super().__init__()
        self.blocks, self.place = blocks, (rank, ranks)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm, act in self.blocks:
            x = torch.conv2d(Halo.apply(x, *self.place), conv.weight, conv.bias, padding=(0, 1))
            x = GroupNormOverRanks.apply(x, norm.num_groups, norm.weight, norm.bias, norm.eps, self.place[1])
            x = act(x)
        return x

    def sum_gradients(self) -> None:
        """After the backward pass: those of all ranks, in one message."""
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        flat = torch.cat([g.view(-1) for g in grads])
        dist.all_reduce(flat)
        for g, total in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            g.copy_(total.view_as(g))


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
