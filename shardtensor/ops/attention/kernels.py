"""How one block of attention is computed: torch's fused kernels of the CPU and of CUDA, or explicit scores.

[Note: kernels of attention] A fused kernel that is called with a block gives its result and its log-sum-exp, which
torch's own function does not return. The kernel's backward takes the log-sum-exp over all blocks. Kernels are chosen as
torch chooses for one device: flash in half precision where nothing is added to the scores, efficient attention
elsewhere. Both read aligned memory, so head sizes are padded with zeros. The result of a block has the dtype of the
queries, and blocks are added up in float32. On the CPU blocks of half precision are computed in float32.

``causal`` is aligned at the lower right here: the last row sees all columns. CUDA's kernels align it so, too, when they
are called by themselves, and flash always does. The CPU's kernel aligns it at the upper left, and is given squares, in
which both are the same.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._compat import hidden_from_program, unflatten
from ...communication.tracing import graph_operator, is_traced
from ..common.alignment import cast

_aten = torch.ops.aten
_INF = float("inf")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # that torch's kernels take
TILE = 1 << 22  # scores that exist at a time where they are made explicitly
_BYTES = 16  # to which CUDA's kernels want memory and strides aligned
_ROWS = 32  # of which efficient attention pads the log-sum-exp to a multiple
_COLUMNS = 16  # of which torch pads masks to a multiple
_LOWER_RIGHT = 2  # what efficient attention calls that


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


class Block(NamedTuple):
    """Some rows of queries, and the columns of keys and values that they are to see.

    Attributes:
        q: (..., heads, rows, E), in float32 where the kernel is ``wide``.
        k, v: (..., heads / group, columns, E and Ev), columns not empty.
        mask: broadcastable to (..., heads, rows, columns), bool or floating-point.
        causal: the last row sees all columns, each before it one less.
        at: the block's place, for dropout.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool
    at: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Kernel:
    """How a block is computed: one of the classes below.

    Attributes:
        scale: of the scores.
        fused: whether it is one of torch's. None knows dropout.
        wide: whether half precision is computed in float32.
        of_masks: whether it gives the gradient of a mask.
        hides: whether without a mask the log-sum-exp of a row can be -inf, where its scores have all overflowed.
    """

    scale: float

    fused = True
    wide = True
    of_masks = False
    hides = True

    def attend(self, block: Block, alone: bool = False) -> tuple[Tensor, Tensor]:
        """Result and log-sum-exp of one block, the latter in the dtype of sums.

        Args:
            alone: there is no other block, so the fused kernel's result is what it is on one device. For a row that
                sees nothing its log-sum-exp is zero.
        """
        raise NotImplementedError

    def attend_backward(
        self, grad: Tensor, block: Block, out: Tensor, lse: Tensor, grad_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, given the result ``out`` and the ``finite(lse)`` of the whole rows.

        ``grad_mask``, of the mask's shape, is added to.
        """
        raise NotImplementedError


def finite(lse: Tensor) -> Tensor:
    """The lse to subtract from scores: zero for rows that see nothing, for which ``-inf - -inf`` would be NaN."""
    return lse.masked_fill(lse == -_INF, 0.0)


# -- explicit scores ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Explicit(Kernel):
    """Scores are made, a tile of rows at a time.

    Attributes:
        dropout: None where nothing is dropped.
    """

    dropout: Dropout | None = None

    fused = False
    of_masks = True

    def attend(self, block: Block, alone: bool = False) -> tuple[Tensor, Tensor]:
        q, k, v = _with_all_heads(block)
        out, lse = q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1])
        for start, n in _tiles(q, k):
            scores = _scores(q, k, block, self.scale, start, n)
            total = torch.logsumexp(scores, -1)
            p = (scores - finite(total).unsqueeze(-1)).exp_()
            if self.dropout is not None:
                p *= self.dropout.factors(p, (*block.at, start))
            out.narrow(-2, start, n).copy_(p @ v)
            lse.narrow(-1, start, n).copy_(total)
        return out, lse

    def attend_backward(
        self, grad: Tensor, block: Block, out: Tensor, lse: Tensor, grad_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = _with_all_heads(block)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        delta = (grad * out).sum(-1, keepdim=True)
        for start, n in _tiles(q, k):
            rows = (-2, start, n)
            p = _scores(q, k, block, self.scale, start, n)
            p.sub_(lse.narrow(-1, start, n).unsqueeze(-1)).exp_()
            d_out = grad.narrow(*rows)
            dp = d_out @ v.mT
            if self.dropout is None:
                dv += p.mT @ d_out
            else:
                factors = self.dropout.factors(p, (*block.at, start))
                dv += (p * factors).mT @ d_out
                dp *= factors
            ds = p.mul_(dp.sub_(delta.narrow(*rows)))
            dq.narrow(*rows).copy_(ds @ k).mul_(self.scale)
            dk += (ds.mT @ q.narrow(*rows)).mul_(self.scale)
            if grad_mask is not None:
                part = grad_mask if grad_mask.shape[-2] == 1 else grad_mask.narrow(*rows)
                part += ds.sum_to_size(part.shape)
        return dq, _from_heads(dk, block.k.shape), _from_heads(dv, block.v.shape)


def _scores(q: Tensor, k: Tensor, block: Block, scale: float, start: int, n: int) -> Tensor:
    """Of some rows of a block, whose keys have been given all heads."""
    scores, mask = (q.narrow(-2, start, n) @ k.mT).mul_(scale), block.mask
    if mask is not None:
        part = mask if mask.shape[-2] == 1 else mask.narrow(-2, start, n)
        if part.dtype == torch.bool:
            scores.masked_fill_(~part, -_INF)
        else:
            scores += part
    if block.causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores.masked_fill_(later.triu_(1 + start + k.shape[-2] - q.shape[-2]), -_INF)
    return scores


def _tiles(q: Tensor, k: Tensor) -> Iterator[tuple[int, int]]:
    """``(start, length)`` of the rows whose scores are made at a time."""
    rows = q.shape[-2]
    step = max(1, TILE // max(1, math.prod(q.shape[:-2]) * k.shape[-2]))
    for start in range(0, rows, step):
        yield start, min(step, rows - start)


def _with_all_heads(block: Block) -> tuple[Tensor, Tensor, Tensor]:
    return block.q, _like_queries(block.k, block.q), _like_queries(block.v, block.q)


def _like_queries(t: Tensor, q: Tensor) -> Tensor:
    """Keys or values in the queries' dtype, with one head for each of theirs: grouped queries share some."""
    t = cast(t, q.dtype)
    if t.ndim < 3 or t.shape[-3] == q.shape[-3]:
        return t
    return t.repeat_interleave(q.shape[-3] // t.shape[-3], -3)


def _from_heads(grad: Tensor, shape: Sequence[int]) -> Tensor:
    if grad.shape[-3:-2] == shape[-3:-2]:
        return grad
    shared: Tensor = unflatten(grad, -3, (shape[-3], -1))
    return shared.sum(-3, dtype=torch.promote_types(grad.dtype, torch.float32))


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return cast(mask, dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -_INF)


def _rows_in_memory(t: Tensor) -> Tensor:
    """Kernels take any strides but the last."""
    return t if t.stride(-1) == 1 else t.contiguous()


# -- the CPU's ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FlashOfCPU(Kernel):
    """torch's flash kernel of the CPU, for keys as wide as values; causal blocks are square."""

    def attend(self, block: Block, alone: bool = False) -> tuple[Tensor, Tensor]:
        (q, k, v), mask, causal = _with_all_heads(block), block.mask, block.causal
        if is_traced(q) and not alone:
            return _attend_in_graph(q, k, v, mask, self.scale, causal)
        bias = self._bias(block)
        q, k, v = map(_rows_in_memory, (q, k, v))
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=bias, scale=self.scale
        )
        if alone:
            return out, lse
        if bias is not None:  # for a row that sees nothing, the kernel gives zero
            lse = torch.where((bias == -_INF).all(-1), -_INF, lse)
        return self._checked(out, lse, q, k, block)

    def attend_backward(
        self, grad: Tensor, block: Block, out: Tensor, lse: Tensor, grad_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = _with_all_heads(block)
        bias = self._bias(block)
        grad, q, k, v, out = map(_rows_in_memory, (grad, q, k, v, out))
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, block.causal, attn_mask=bias, scale=self.scale
        )
        return dq, _from_heads(dk, block.k.shape), _from_heads(dv, block.v.shape)

    def _bias(self, block: Block) -> Tensor | None:
        if block.mask is None:
            return None
        return _bias(block.mask.unsqueeze(0) if block.mask.ndim == 3 else block.mask, block.q.dtype)  # of 2 or 4 dims

    def _checked(self, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """Corrected in rows that it makes zero although their scores have all overflowed to -inf, or are NaN."""
        if int(torch.count_nonzero(lse)) == lse.numel():
            return out, lse
        rows = (lse == 0).flatten(0, -2).any(0).nonzero().flatten().tolist()
        lse = lse.clone()
        for start, n in _tiles(q.narrow(-2, rows[0], rows[-1] + 1 - rows[0]), k):
            start += rows[0]
            total = torch.logsumexp(_scores(q, k, block, self.scale, start, n), -1)
            part = lse.narrow(-1, start, n)
            part.copy_(torch.where((part == 0) & ~total.isfinite(), total, part))
        return torch.where(lse.isnan(), lse, 0.0).unsqueeze(-1) + out, lse


@graph_operator(
    "attend(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool causal) -> (Tensor, Tensor)",
    lambda q, k, v, mask, scale, causal: (q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1])),
    ordered=False,
)
def _attend_in_graph(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """The fused kernel as one operator of a graph: what is done about its result follows from its values."""
    out, lse = FlashOfCPU(scale).attend(Block(q, k, v, mask, causal))
    return out.contiguous(), lse.contiguous()


# -- CUDA's ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Flash(Kernel):
    """torch's flash kernel of CUDA, in half precision, for keys as wide as values and no mask."""

    wide = False
    hides = False

    def attend(self, block: Block, alone: bool = False) -> tuple[Tensor, Tensor]:
        size = block.v.shape[-1]
        q, k, v = map(_aligned, block[:3])
        out, lse = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, block.causal, scale=self.scale)[:2]
        return _first(out, size), lse

    def attend_backward(
        self, grad: Tensor, block: Block, out: Tensor, lse: Tensor, grad_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = block[:3]
        size, rows, columns, causal = q.shape[-1], q.shape[-2], k.shape[-2], block.causal
        seed, offset = (torch.empty(n, dtype=torch.uint64, device=q.device) for n in (2, 0))  # not read
        q, k, v, grad, out = (_aligned(cast(t, q.dtype)) for t in (q, k, v, grad, out))
        grads = _aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, rows, columns, 0.0, causal, seed, offset, scale=self.scale
        )
        dq, dk, dv = (_first(t, size) for t in grads)
        return dq, dk, dv


@dataclass(frozen=True, slots=True)
class Efficient(Kernel):
    """torch's memory-efficient attention of CUDA, except in float64. Its tensors have the heads after the rows."""

    wide = False
    of_masks = True
    hides = False

    def attend(self, block: Block, alone: bool = False) -> tuple[Tensor, Tensor]:
        size, rows = block.v.shape[-1], block.q.shape[-2]
        operands, bias = self._operands(block)
        alignment = _LOWER_RIGHT if block.causal else 0
        out, lse = _aten._efficient_attention_forward(
            *operands, bias, None, None, None, None, 0.0, alignment, True, scale=self.scale
        )[:2]
        lse = lse if lse.shape[-1] == rows else lse.narrow(-1, 0, rows)
        if bias is not None and not alone:  # for a row that sees nothing, the kernel gives zero
            lse = torch.where((bias == -_INF).all(-1), -_INF, lse)
        return _first(out.transpose(1, 2), size), lse

    def attend_backward(
        self, grad: Tensor, block: Block, out: Tensor, lse: Tensor, grad_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype, missing = block.q.dtype, -block.q.shape[-2] % _ROWS
        (q, k, v), bias = self._operands(block)
        grad, out = (_aligned(cast(t, dtype)).transpose(1, 2).contiguous() for t in (grad, out))
        lse = F.pad(lse, (0, missing), value=_INF) if missing else lse.contiguous()
        backward = _efficient_backward_in_graph if is_traced(q) else _efficient_backward
        *grads, d_bias = backward(grad, q, k, v, bias, out, lse, self.scale, block.causal, grad_mask is not None)
        if grad_mask is not None:
            grad_mask += _summed(d_bias, grad_mask)
        dq, dk, dv = (
            _from_heads(_first(t.transpose(1, 2), like.shape[-1]), like.shape)
            for t, like in zip(grads, block[:3], strict=True)
        )
        return dq, dk, dv

    def _operands(self, block: Block) -> tuple[Sequence[Tensor], Tensor | None]:
        q, k, _, mask, *_ = block
        operands = [_aligned(t).transpose(1, 2) for t in _with_all_heads(block)]
        return operands, None if mask is None else _aligned_bias(mask, q, k.shape[-2])


def _efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the operands and, if it is asked for, of the bias: (batch, rows, heads, size) and the lse padded."""
    seed = torch.empty((), dtype=torch.int64, device=q.device)  # not read
    lengths, alignment = (q.shape[1], k.shape[1]), _LOWER_RIGHT if causal else 0
    dq, dk, dv, d_bias = _aten._efficient_attention_backward(
        grad, q, k, v, bias, out, None, None, *lengths, lse, 0.0, seed, seed, alignment, of_bias, scale=scale
    )
    return dq, dk, dv, d_bias if of_bias else q.new_empty(0)


@graph_operator(
    "efficient_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor out, Tensor lse, float scale, "
    "bool causal, bool of_bias) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda grad, q, k, v, bias, out, lse, scale, causal, of_bias: (
        *(t.new_empty(t.shape) for t in (q, k, v)),
        bias.new_empty(bias.shape) if of_bias else q.new_empty(0),
    ),
    ordered=False,
)
def _efficient_backward_in_graph(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same in a graph: what torch 2.13 has in its place for tensors without data lacks a parameter."""
    dq, dk, dv, d_bias = _efficient_backward(*args)
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), d_bias.contiguous()


def _aligned(t: Tensor) -> Tensor:
    """With rows of which each begins at a multiple of 16 bytes, padded with zeros where their length is none."""
    elements = _BYTES // t.element_size()
    if t.shape[-1] % elements:
        return F.pad(t, (0, -t.shape[-1] % elements))
    return t if _is_aligned(t) else t.clone(memory_format=torch.contiguous_format)


def _is_aligned(t: Tensor) -> bool:
    elements = _BYTES // t.element_size()
    strides = (stride for n, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n > 1)
    return t.stride(-1) == 1 and not any(stride % elements for stride in strides) and not t.storage_offset() % elements


def _first(t: Tensor, size: int) -> Tensor:
    """Without what :func:`_aligned` has added."""
    return t if t.shape[-1] == size else t.narrow(-1, 0, size)


def _aligned_bias(mask: Tensor, q: Tensor, columns: int) -> Tensor:
    """The mask as what is added to the scores, in their shape."""
    bias = _bias(mask, q.dtype)
    if bias.shape[-1] != columns:
        bias = bias.expand(*bias.shape[:-1], columns)
    if not _is_aligned(bias):
        bias = F.pad(bias, (0, -columns % _COLUMNS)).narrow(-1, 0, columns)
    return bias.expand(*q.shape[:-1], columns)


def _summed(of_scores: Tensor, mask: Tensor) -> Tensor:
    """The gradient of a mask out of that of the scores."""
    of_mask = of_scores.shape[of_scores.ndim - mask.ndim :]
    dims = [d for d in range(of_scores.ndim - mask.ndim)]
    dims += [d - mask.ndim for d, (n, m) in enumerate(zip(of_mask, mask.shape, strict=True)) if m == 1 < n]
    return of_scores.sum(dims, dtype=mask.dtype).view(mask.shape) if dims else of_scores


# -- which one ---------------------------------------------------------------------------------------------------------

# The switches of ``torch.nn.attention.sdpa_kernel``; that of flash is every device's, in spite of the name.
_flash_enabled: Callable[[], bool] = torch.backends.cuda.flash_sdp_enabled
_efficient_enabled: Callable[[], bool] = torch.backends.cuda.mem_efficient_sdp_enabled


def has_fused_kernels(device_type: str, dtype: torch.dtype) -> bool:
    """Whether there are fused kernels for a dtype; the same on all ranks, whatever GPUs they have."""
    if not (_flash_enabled() or _efficient_enabled()):
        return False
    return device_type == "cpu" or (dtype != torch.float64 and _runs(Efficient, device_type, torch.float32, 8, 8))


def fused_kernel(device_type: str, dtype: torch.dtype, size: int, size_v: int, masked: bool, scale: float) -> Kernel:
    """The kernel that torch would take on such a device for operands of four dims without dropout.

    Args:
        size, size_v: of a head, of keys and of values.
    """
    flash = _flash_enabled() and size == size_v > 0
    if device_type == "cpu":
        return FlashOfCPU(scale) if flash else Explicit(scale)
    if flash and not masked and dtype in (torch.bfloat16, torch.float16):
        if _runs(Flash, device_type, dtype, size, size_v):
            return Flash(scale)
    efficient = _efficient_enabled() and 0 not in (size, size_v)
    if efficient and dtype != torch.float64 and _runs(Efficient, device_type, dtype, size, size_v):
        return Efficient(scale)
    return Explicit(scale)


@cache
def _runs(kind: Callable[[float], Kernel], device_type: str, dtype: torch.dtype, size: int, size_v: int) -> bool:
    """Whether a device has that kernel, and takes such heads: found out by calling it, forward and backward."""
    if device_type == "meta":
        return False
    kernel = kind(1.0)
    try:
        with hidden_from_program(), torch.autocast(device_type, enabled=False):
            q, v = (torch.zeros(1, 1, 1, n, dtype=dtype, device=device_type) for n in (size, size_v))
            block = Block(q, q, v, None, False)
            kernel.attend_backward(v, block, *kernel.attend(block))
    except (RuntimeError, AssertionError):  # no such device is an AssertionError
        return False
    return True
