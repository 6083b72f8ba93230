"""What one writes by hand in place of this package, for ranks that have as many rows each.

:class:`OverRanks` makes layers of a model communicate: halos for convolutions and upsampling, statistics of all ranks
for norms, the keys and values of all ranks for attention, and one message for the gradients of weights. They send what
ShardTensor sends. :class:`Ring` is attention over a long sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

_aten = torch.ops.aten
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its earlier name


class Halo(torch.autograd.Function):
    """Concatenate a row of each neighbour to dim 2, and zeros at the ends if ``padded``; their gradient goes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int, ranks: int, padded: bool = True) -> Tensor:  # type: ignore[override]
        ctx.at = rank, ranks, padded
        above, below = _of_neighbours(x[:, :, :1], x[:, :, -1:], rank, ranks)
        if padded and (above is None or below is None):
            zeros = torch.zeros_like(x[:, :, :1])
            above, below = zeros if above is None else above, zeros if below is None else below
        return torch.cat([rows for rows in (above, x, below) if rows is not None], dim=2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        rank, ranks, padded = ctx.at
        above, below = _of_neighbours(grad[:, :, :1], grad[:, :, -1:], rank, ranks)
        first, last = padded or above is not None, padded or below is not None
        own = grad[:, :, int(first) : grad.shape[2] - last].clone()
        if above is not None:
            own[:, :, :1].add_(above)
        if below is not None:
            own[:, :, -1:].add_(below)
        return own, None, None, None


def _of_neighbours(first: Tensor, last: Tensor, rank: int, ranks: int) -> tuple[Tensor | None, Tensor | None]:
    """What the ranks before and after send, which get ``first`` and ``last``; None at the ends."""
    has_before, has_after = rank > 0, rank < ranks - 1
    sent = torch.stack([first] * has_before + [last] * has_after)
    received = _swapped(sent, [int(abs(other - rank) == 1) for other in range(ranks)])
    return received[0] if has_before else None, received[-1] if has_after else None


def _swapped(sent: Tensor, counts: list[int]) -> Tensor:
    """Give each rank so many of the tensors in ``sent``, and get as many from it."""
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, counts, counts)
    return received


class Norm(torch.autograd.Function):
    """Normalize groups of channels of each sample, or of the batch, over all ranks.

    Args:
        noted: is called with mean, variance, and the number of elements that they are of.

    The gradients of weight and bias are those of all ranks.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        groups: int,
        of_batch: bool,
        eps: float,
        ranks: int,
        noted: Callable[[Tensor, Tensor, int], None] | None,
    ) -> Tensor:
        parts = x.reshape(len(x), groups, x.shape[1] // groups, -1)
        own = torch.stack(torch.var_mean(parts, (0, 2, 3) if of_batch else (2, 3), correction=0, keepdim=True))
        of_ranks = own.new_empty(ranks, *own.shape)
        _all_gather(of_ranks.flatten(0, 1), own)
        var, mean = of_ranks.mean(0)
        var = var + of_ranks[:, 1].var(0, correction=0)  # of equal shards: the mean variance, and that of the means
        count = parts.numel() // mean.numel() * ranks
        if noted is not None:
            noted(mean, var, count)
        rstd, weight = (var + eps).rsqrt(), weight.view(groups, -1, 1)
        normed = (parts - mean) * rstd
        ctx.save_for_backward(normed, rstd, weight)
        ctx.dims, ctx.count = (0, 3) if of_batch else 3, count
        return torch.addcmul(bias.view(groups, -1, 1), normed, weight).view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        normed, rstd, weight = ctx.saved_tensors
        parts = grad.reshape(normed.shape)
        sums = torch.stack([parts.sum(ctx.dims, keepdim=True), (parts * normed).sum(ctx.dims, keepdim=True)])
        dist.all_reduce(sums)
        of_bias, of_weight = sums.sum(1).view(2, -1)
        mean, slope = (sums * weight).sum(3, keepdim=True) / ctx.count
        of_input = (torch.addcmul(parts * weight, normed, slope, value=-1) - mean) * rstd
        return of_input.view_as(grad), of_weight, of_bias, None, None, None, None, None


class OfAllRanks(torch.autograd.Function):
    """Concatenate the tensors of all ranks along dim 2; each gradient goes to the rank whose tensor it is of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int, ranks: int) -> Tensor:  # type: ignore[override]
        ctx.at = rank, ranks
        received = _swapped(x.expand(ranks - 1, *x.shape).contiguous(), [int(other != rank) for other in range(ranks)])
        return torch.cat([*received[:rank], x, *received[rank:]], dim=2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        rank, ranks = ctx.at
        parts = list(grad.chunk(ranks, dim=2))
        own = parts.pop(rank)
        received = _swapped(torch.stack(parts), [int(other != rank) for other in range(ranks)])
        return own + received.sum(0), None, None


# -- layers ------------------------------------------------------------------------------------------------------------


class _Conv2d(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return _convolved(F.conv2d, x, self)


class _Conv3d(nn.Conv3d):
    def forward(self, x: Tensor) -> Tensor:
        return _convolved(F.conv3d, x, self)


def _convolved(conv: Callable[..., Tensor], x: Tensor, layer: Any) -> Tensor:
    """With a kernel of 1, or of 3 and as much padding as makes the result as large."""
    rows = x if layer.kernel_size[0] == 1 else Halo.apply(x, *layer.place)
    return conv(rows, layer.weight, layer.bias, padding=(0, *layer.padding[1:]))


class _GroupNorm(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        return Norm.apply(x, self.weight, self.bias, self.num_groups, False, self.eps, self.place[1], None)


class _BatchNorm3d(nn.BatchNorm3d):
    """In training."""

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)
        return Norm.apply(x, self.weight, self.bias, self.num_features, True, self.eps, self.place[1], self.note)

    def note(self, mean: Tensor, var: Tensor, count: int) -> None:
        self.running_mean.lerp_(mean.view(-1), self.momentum)
        self.running_var.lerp_(var.view(-1) * (count / (count - 1)), self.momentum)


class _Upsample(nn.Upsample):
    """Bilinear, twice as large."""

    def forward(self, x: Tensor) -> Tensor:
        rank, ranks = self.place
        y = super().forward(Halo.apply(x, rank, ranks, False))
        return y[:, :, 2 * (rank > 0) : y.shape[2] - 2 * (rank < ranks - 1)]


class _SelfAttention(nn.MultiheadAttention):
    """Batch first, without a mask."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        heads = F.linear(x, self.in_proj_weight, self.in_proj_bias).view(*x.shape[:2], 3, self.num_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        k, v = OfAllRanks.apply(torch.cat([k, v], dim=-1), *self.place).chunk(2, dim=-1)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)), None


NORMS = {nn.GroupNorm: _GroupNorm, nn.BatchNorm3d: _BatchNorm3d}
LAYERS = NORMS | {
    nn.Conv2d: _Conv2d,
    nn.Conv3d: _Conv3d,
    nn.Upsample: _Upsample,
    nn.MultiheadAttention: _SelfAttention,
}


class OverRanks(nn.Module):
    """A model on the shard that this rank has; it changes the classes of the model's layers."""

    def __init__(self, model: nn.Module, rank: int, ranks: int) -> None:
        super().__init__()
        self.model, self.ranks = model, ranks
        layers = list(model.modules())
        # The gradients of norms are those of all ranks already.
        self.to_sum = [p for layer in layers if type(layer) not in NORMS for p in layer.parameters(recurse=False)]
        for layer in layers:
            if type(layer) in LAYERS:
                layer.__class__ = LAYERS[type(layer)]
                layer.place = rank, ranks

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def backward(self, loss: Tensor) -> None:
        """The gradients of the mean of all ranks' losses; those of weights in one message."""
        (loss / self.ranks).backward()
        flat = torch.cat([p.grad.view(-1) for p in self.to_sum])
        dist.all_reduce(flat)
        for p, total in zip(self.to_sum, flat.split([p.numel() for p in self.to_sum]), strict=True):
            p.grad = total.view_as(p)


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
