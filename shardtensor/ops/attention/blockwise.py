"""Attention of some queries to one block of keys, forward and backward, and how blocks are put together.

[Note: log-sum-exp] With ``lse = log(sum(exp(scores)))`` of each block, a softmax over all keys is the mean of the
softmaxes over the blocks, weighted by ``exp(lse)``. Backward needs only the lse of the whole row: the probabilities in
a block are ``exp(scores - lse)``, so blocks are independent of each other. A row that sees nothing has lse -inf; its
result is zero, as torch's is.

This is the online softmax of M. Milakov and N. Gimelshein, arXiv:1805.02867, and of FlashAttention, arXiv:2205.14135.

torch's flash kernel computes a block where it can; otherwise the scores are made explicitly, a tile of rows at a time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...communication.tracing import graph_operator, is_traced
from ...layout.geometry import Interval
from ..common.alignment import cast

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_INF = float("inf")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # that torch's kernels take
TILE = 1 << 22  # scores that exist at a time where they are made explicitly


@dataclass(frozen=True, slots=True)
class Dropout:
    """Which probabilities are dropped: drawn anew, and alike, whenever they are needed.

    Attributes:
        p: the probability to be dropped.
        seed: a number that all ranks have drawn.
        place: where this rank stands among those that do different work.
    """

    p: float
    seed: int
    place: tuple[int, ...]

    def factors(self, like: Tensor, at: tuple[int, ...]) -> Tensor:
        """Zero or ``1 / (1 - p)`` for the scores ``like`` that stand at ``at`` in this rank's work."""
        digest = hashlib.blake2b(repr((self.seed, *self.place, *at)).encode(), digest_size=8).digest()
        generator = torch.Generator(like.device)
        generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        kept = torch.empty_like(like).bernoulli_(1 - self.p, generator=generator)
        return kept if self.p == 1 else kept / (1 - self.p)


@dataclass(frozen=True, slots=True)
class Kernel:
    """How a block is computed.

    Attributes:
        scale: of the scores.
        fused: by torch's flash kernel. It knows neither dropout nor the gradient of a mask.
        dropout: None where nothing is dropped.
    """

    scale: float
    fused: bool
    dropout: Dropout | None = None


def pieces(rows: Interval, columns: Interval, shift: int | None) -> list[tuple[Interval, Interval, bool]]:
    """What of a block has to be computed: rectangles that are seen entirely, and squares up to their diagonal.

    Args:
        shift: row ``r`` sees the columns up to ``r + shift``; None: all of them.

    Example:
        >>> pieces((3, 6), (0, 5), 0)  # rows 3, 4, 5 see the columns up to their own
        [((3, 6), (0, 3), False), ((3, 5), (3, 5), True), ((5, 6), (3, 5), False)]
    """
    if shift is None:
        found = [(rows, columns, False)]
    else:
        (a, b), (c, d) = rows, columns
        a, b = a + shift, b + shift  # named by the last column that they see
        start = max(a, c)
        stop = max(start, min(b, d))
        square = (start, stop)
        seen = [((a, b), (c, min(d, a)), False), (square, square, True), ((stop, b), square, False)]
        found = [((r[0] - shift, r[1] - shift), s, diagonal) for r, s, diagonal in seen]
    return [(r, s, diagonal) for r, s, diagonal in found if r[1] > r[0] and s[1] > s[0]]


class RunningSoftmax:
    """Results of blocks as they come, see [Note: log-sum-exp]."""

    def __init__(self, query: Tensor, features: int) -> None:
        self._query, self._features = query, features
        self._sums: tuple[Tensor, Tensor] | None = None

    def result(self) -> tuple[Tensor, Tensor]:
        """Result and log-sum-exp of all blocks."""
        if self._sums is None:
            q = self._query
            self._sums = q.new_zeros((*q.shape[:-1], self._features)), q.new_full(q.shape[:-1], -_INF)
        return self._sums

    def add(self, start: int, out: Tensor, lse: Tensor) -> None:
        """Take in a block's result for the rows from ``start`` on."""
        n = lse.shape[-1]
        if self._sums is None and n == self._query.shape[-2]:
            self._sums = out, lse
            return
        sums = self.result()
        mine, total = sums[0].narrow(-2, start, n), sums[1].narrow(-1, start, n)
        both = torch.logaddexp(total, lse)
        shift = finite(both)
        mine.mul_((total - shift).exp().unsqueeze(-1))
        mine.addcmul_(out, (lse - shift).exp().unsqueeze(-1))
        total.copy_(both)


def finite(lse: Tensor) -> Tensor:
    """The lse to subtract from scores: zero for rows that see nothing, for which ``-inf - -inf`` would be NaN."""
    return lse.masked_fill(lse == -_INF, 0.0)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    kernel: Kernel,
    square: bool,
    at: tuple[int, ...],
    alone: bool = False,
) -> tuple[Tensor, Tensor]:
    """Result and lse of one block.

    Args:
        q: (..., heads, rows, E), in the dtype to compute in: float32 for half precision, because results of blocks are
            added up. k and v: (..., heads / group, columns, E and Ev), columns not empty.
        mask: broadcastable to (..., heads, rows, columns), bool or floating-point.
        square: a key is seen by the rows from its own on.
        at: the block's place, for dropout.
        alone: there is no other block, so the fused kernel's result is what it is on one device. For a row that sees
            nothing its lse is zero.
    """
    k, v = _like_queries(k, q), _like_queries(v, q)
    if is_traced(q) and kernel.fused and not alone:
        return _attend_in_graph(q, k, v, mask, kernel.scale, square)
    if kernel.fused:
        bias = None if mask is None else _bias(mask, q.dtype)
        out, lse = _flash(
            _rows_in_memory(q), _rows_in_memory(k), _rows_in_memory(v), 0.0, square, attn_mask=bias, scale=kernel.scale
        )
        if alone:
            return out, lse
        if bias is not None:  # for a row that sees nothing, the kernel gives zero
            lse = torch.where((bias == -_INF).all(-1), -_INF, lse)
        return _checked(out, lse, q, k, mask, kernel, square)
    out, lse = q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1])
    for start, n in _tiles(q, k):
        scores = _scores(q, k, mask, kernel, square, start, n)
        total = torch.logsumexp(scores, -1)
        p = (scores - finite(total).unsqueeze(-1)).exp_()
        if kernel.dropout is not None:
            p *= kernel.dropout.factors(p, (*at, start))
        out.narrow(-2, start, n).copy_(p @ v)
        lse.narrow(-1, start, n).copy_(total)
    return out, lse


@graph_operator(
    "attend(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool square) -> (Tensor, Tensor)",
    lambda q, k, v, mask, scale, square: (q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1])),
    ordered=False,
)
def _attend_in_graph(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, square: bool
) -> tuple[Tensor, Tensor]:
    """The fused kernel as one operator of a graph: what is done about its result follows from its values."""
    out, lse = attend(q, k, v, mask, Kernel(scale, fused=True), square, ())
    return out.contiguous(), lse.contiguous()


def _checked(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, mask: Tensor | None, kernel: Kernel, square: bool
) -> tuple[Tensor, Tensor]:
    """Corrected in rows that the kernel makes zero although their scores have all overflowed to -inf, or are NaN."""
    if int(torch.count_nonzero(lse)) == lse.numel():
        return out, lse
    rows = (lse == 0).flatten(0, -2).any(0).nonzero().flatten().tolist()
    lse = lse.clone()
    for start, n in _tiles(q.narrow(-2, rows[0], rows[-1] + 1 - rows[0]), k):
        start += rows[0]
        total = torch.logsumexp(_scores(q, k, mask, kernel, square, start, n), -1)
        part = lse.narrow(-1, start, n)
        part.copy_(torch.where((part == 0) & ~total.isfinite(), total, part))
    return torch.where(lse.isnan(), lse, 0.0).unsqueeze(-1) + out, lse


def attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    kernel: Kernel,
    square: bool,
    at: tuple[int, ...],
    grad_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from one block, given the result ``out`` and the ``finite(lse)`` of the whole rows.

    ``grad_mask``, of the mask's shape, is added to.
    """
    shapes = k.shape, v.shape
    k, v = _like_queries(k, q), _like_queries(v, q)
    if kernel.fused:
        bias = None if mask is None else _bias(mask, q.dtype)
        grad, q, k, v, out = map(_rows_in_memory, (grad, q, k, v, out))
        dq, dk, dv = _flash_backward(grad, q, k, v, out, lse, 0.0, square, attn_mask=bias, scale=kernel.scale)
        return dq, _from_heads(dk, shapes[0]), _from_heads(dv, shapes[1])
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta = (grad * out).sum(-1, keepdim=True)
    for start, n in _tiles(q, k):
        rows = (-2, start, n)
        p = _scores(q, k, mask, kernel, square, start, n)
        p.sub_(lse.narrow(-1, start, n).unsqueeze(-1)).exp_()
        d_out = grad.narrow(*rows)
        dp = d_out @ v.mT
        if kernel.dropout is None:
            dv += p.mT @ d_out
        else:
            factors = kernel.dropout.factors(p, (*at, start))
            dv += (p * factors).mT @ d_out
            dp *= factors
        ds = p.mul_(dp.sub_(delta.narrow(*rows)))
        dq.narrow(*rows).copy_(ds @ k).mul_(kernel.scale)
        dk += (ds.mT @ q.narrow(*rows)).mul_(kernel.scale)
        if grad_mask is not None:
            part = grad_mask if grad_mask.shape[-2] == 1 else grad_mask.narrow(*rows)
            part += ds.sum_to_size(part.shape)
    return dq, _from_heads(dk, shapes[0]), _from_heads(dv, shapes[1])


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, kernel: Kernel, square: bool, start: int, n: int) -> Tensor:
    scores = (q.narrow(-2, start, n) @ k.mT).mul_(kernel.scale)
    if mask is not None:
        part = mask if mask.shape[-2] == 1 else mask.narrow(-2, start, n)
        if part.dtype == torch.bool:
            scores.masked_fill_(~part, -_INF)
        else:
            scores += part
    if square:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1 + start)
        scores.masked_fill_(later, -_INF)
    return scores


def _tiles(q: Tensor, k: Tensor) -> Iterator[tuple[int, int]]:
    """``(start, length)`` of the rows whose scores are made at a time."""
    rows = q.shape[-2]
    step = max(1, TILE // max(1, math.prod(q.shape[:-2]) * k.shape[-2]))
    for start in range(0, rows, step):
        yield start, min(step, rows - start)


def _like_queries(t: Tensor, q: Tensor) -> Tensor:
    """Keys or values in the queries' dtype, with one head for each of theirs: grouped queries share some."""
    t = cast(t, q.dtype)
    if t.ndim < 3 or t.shape[-3] == q.shape[-3]:
        return t
    return t.repeat_interleave(q.shape[-3] // t.shape[-3], -3)


def _from_heads(grad: Tensor, shape: torch.Size) -> Tensor:
    return grad if grad.shape == shape else grad.unflatten(-3, (shape[-3], -1)).sum(-3)  # type: ignore[no-untyped-call]


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    mask = mask.unsqueeze(0) if mask.ndim == 3 else mask  # the kernel takes two or four dims
    if mask.dtype != torch.bool:
        return cast(mask, dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -_INF)


def _rows_in_memory(t: Tensor) -> Tensor:
    """The kernel takes any strides but the last."""
    return t if t.stride(-1) == 1 else t.contiguous()
