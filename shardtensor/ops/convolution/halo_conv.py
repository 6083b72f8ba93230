"""Convolution on one rank, transposed or not: fetch the halo, put it next to the shard, and call the kernel once.

Between forward and backward a rank keeps its shard, which autograd holds in any case, and the halo: both in one tensor
would take as much memory again as all shards do.

::

    forward   halo = fetch(x)       read = shard + halo      y = kernel(read, weight, bias)
    backward                        the kernel's gradients of halo and weight; the halo's goes back to its owners
                                    the kernel's gradients of shard, weight and bias; what is returned is added

Where shards are not tall, they are put together with the halo once more, and the backward pass, too, is one call of the
kernel: see :class:`SplitGradient`. In half precision a sum of what kernels return is rounded twice, and so a rank
fetches the gradients of others' outputs instead: see :class:`OwnersGradient`. Which inputs a rank reads, and how the
kernel is to pad them, stands in ``conv.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...communication.halo import Fetch, Narrow
from ...communication.weight_gradients import GradientSum
from ...communication.zeros import padded
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import Plan
from ..common.alignment import is_half, product, widened
from ..common.stencil import grown
from .volumes import Gradients, convolution_backward, convolve_volume, volume_backward

ONLY_INPUT = True, False, False


@dataclass(frozen=True, slots=True)
class LocalConvolution:
    """A call of torch's kernel with a local tensor.

    Attributes:
        out_shape: of the result.
        arguments: what ``torch.convolution`` gets after the bias.
        zeros: to put around the input where the kernel cannot pad so, as ``F.pad`` takes them; empty for none.
        crop: zeros to put around the result (negative: to crop it), likewise.
    """

    out_shape: tuple[int, ...]
    arguments: tuple[Any, ...]
    zeros: tuple[int, ...] = ()
    crop: tuple[int, ...] = ()

    def __call__(self, read: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The outputs; differentiable."""
        kernel = convolve_volume if read.ndim == 5 else torch.convolution
        if 0 in self.out_shape or not read.numel():  # nothing to compute on this rank
            y = read.new_zeros(self.out_shape)
            if torch.is_grad_enabled():
                # Derivatives of any order are to come through the exchanges and sums as on other ranks, in their order:
                # so the graph has the kernel's nodes. It gets enough zeros to have an output, which is left out.
                some = kernel(grown(read, self._least(weight)), weight, None, *self.arguments)
                y = y + some.reshape(-1)[:0].sum()
            return y if bias is None else y + _over_channels(bias, y)
        read = padded(read, self.zeros) if self.zeros else read
        after = max(self.crop, default=0) > 0  # outputs that no input reaches: they are the bias
        y = kernel(read, weight, None if after else bias, *self.arguments)
        y = padded(y, self.crop) if self.crop else y
        return y + _over_channels(bias, y) if after and bias is not None else y

    def _least(self, weight: Tensor) -> list[int]:
        """Lengths of an input's dims with which the kernel has an output."""
        stride, padding, dilation, transposed, *_ = self.arguments
        least = [1, 0]
        for k, s, p, d in zip(weight.shape[2:], stride, padding, dilation, strict=True):
            least.append(2 + 2 * p // s if transposed else 1 + d * (k - 1))
        return least

    def gradients(self, needed: Sequence[bool], grad: Tensor, read: Tensor, weight: Tensor) -> Gradients:
        """Those of input, weight and bias, where they are needed."""
        need_x, need_w, need_b = needed
        empty = 0 in self.out_shape or not read.numel()
        backward = volume_backward if read.ndim == 5 else convolution_backward
        if not (empty or self.zeros or self.crop) and any(needed):
            found = backward(grad, read, weight, self.out_shape[1:2], *self.arguments, needed)
            # Asked for the bias's gradient, oneDNN returns the weight's, too; ranks that do not call it have none.
            return found[0], found[1] if need_w else None, found[2]
        grad_b = grad.sum([0, *range(2, grad.ndim)]) if need_b else None
        if empty:
            return torch.zeros_like(read) if need_x else None, torch.zeros_like(weight) if need_w else None, grad_b
        if not (need_x or need_w):
            return None, None, grad_b
        read = padded(read, self.zeros) if self.zeros else read
        grad = padded(grad, [-n for n in self.crop]) if self.crop else grad
        mask = [need_x, need_w, False]
        grad_x, grad_w, _ = backward(grad, read, weight, None, *self.arguments, mask)
        if grad_x is not None and self.zeros:
            grad_x = padded(grad_x, [-n for n in self.zeros])
        return grad_x, grad_w, grad_b

    def is_product(self, read: Tensor, weight: Tensor) -> bool:
        """Whether an output is a product of the weight and one input."""
        stride, padding, _, transposed, _, groups = self.arguments
        plain = not (transposed or self.zeros or self.crop) and groups == max(stride) == 1 and not any(padding)
        return plain and weight.shape[2:].numel() == 1 and read.numel() > 0

    def products(self, needed: Sequence[bool], grad: Tensor, read: Tensor, weight: Tensor) -> Gradients:
        """Those of weight and bias of such a kernel, in float32, of operands in half precision."""
        _, need_w, need_b = needed
        grad_b = grad.sum([0, *range(2, grad.ndim)], dtype=torch.float32) if need_b else None
        if not need_w:
            return None, None, grad_b
        rows, others = (t.movedim(1, -1).reshape(-1, t.shape[1]) for t in (grad, read))
        return None, product(rows, others).view(weight.shape), grad_b


def _over_channels(bias: Tensor, y: Tensor) -> Tensor:
    return bias.view(-1, *[1] * (y.ndim - 2))


@dataclass(frozen=True, slots=True)
class Strip:
    """A few rows of what is read, by themselves.

    Attributes:
        outputs: those that read them.
        convolve: gives these outputs of the rows alone, among zeros.
        taps: those of the weight that lie between the two, None for all.
    """

    outputs: Narrow
    convolve: LocalConvolution
    taps: Narrow | None

    def gradients(self, needed: Sequence[bool], grad: Tensor, rows: Tensor, weight: Tensor) -> Gradients:
        """Those of the rows and of the weight's taps.

        Args:
            grad: of all this rank's outputs.
            rows: of any values where the weight's is not needed.
        """
        weight = weight if self.taps is None else weight.narrow(*self.taps)
        return self.convolve.gradients(needed, grad.narrow(*self.outputs), rows, weight)


@dataclass(frozen=True, slots=True)
class OwnersGradient:
    """The gradients by the rank that owns the inputs, of half precision.

    The gradient of a row that several ranks read is a sum over their outputs. Kernels round what they return to half
    precision, and so a sum of it over ranks would be rounded once more. So a rank fetches the gradients of all outputs
    that read its rows, a halo as in the forward pass, and one call of the kernel adds up everything. What it gives for
    the weight is this rank's contribution just as well: of the pairs of its inputs with all outputs, where other ranks
    have the other ones. The halo of the forward pass is not needed again.

    Attributes:
        fetch: of the result's gradient.
        convolve: the kernel that gives these outputs of the shard alone, among zeros.
    """

    fetch: Fetch
    convolve: LocalConvolution


@dataclass(frozen=True, slots=True)
class SplitGradient:
    """The gradients of the shard apart from those of the halo, which travels meanwhile.

    For tall shards. A convolution is linear in what it reads: the weight's gradient is a sum, too, of that of the shard
    among zeros and those of the received rows, which have a few of its taps. So the two are not put together once more,
    which would copy the shard and take two activations more at a time.

    Attributes:
        shard: the kernel with the shard alone, among zeros.
        halo: what is received from each peer.
    """

    shard: LocalConvolution
    halo: tuple[Strip, ...]

    def gradients(
        self,
        needed: Sequence[bool],
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        fetch: Fetch,
        halo: Tensor,
        total: GradientSum | None,
    ) -> Gradients:
        """Those of shard, weight and bias, see :meth:`ConvolutionPlan.backward`."""
        need_x, need_w, need_b = needed
        pieces: list[Tensor] = []
        parts: list[tuple[Narrow | None, Tensor]] = []
        for strip, rows in zip(self.halo, fetch.received(halo), strict=True):
            of_rows, of_weight, _ = strip.gradients((need_x, need_w, False), grad, rows, weight)
            pieces += [] if of_rows is None else [of_rows]
            parts += [] if of_weight is None else [(strip.taps, of_weight)]

        returning = None
        # Only some ranks may compute in two: where there is a sum, all of them start it before they return the halo's.
        if need_x and total is None:
            returning = fetch.start_return(pieces, grad[:0])
            weight = returning.meanwhile(weight)
        # One call of the kernel for all is faster; but a sum is to travel meanwhile.
        together = need_x and total is None
        grad_x, grad_w, grad_b = self.shard.gradients((together, need_w, need_b), grad, x, weight)
        for taps, part in parts:
            assert grad_w is not None
            (grad_w if taps is None else grad_w.narrow(*taps)).add_(part)
        # The kernel has made the parameters' gradients for this call alone.
        finish = None if total is None else total.start([None, grad_w, grad_b], overwrite=True)
        if need_x:
            returning = returning or fetch.start_return(pieces, grad[:0])
            if not together:
                grad_x, _, _ = self.shard.gradients(ONLY_INPUT, grad, x, weight)
            assert grad_x is not None
            grad_x = fetch.add_returned(grad_x, returning)
        if finish is not None:
            _, grad_w, grad_b = finish()
        return grad_x, grad_w, grad_b


class ConvolutionPlan(Plan):
    """One rank's part of an N-d convolution of an input ``(N, C, *spatial)`` with replicated weights.

    The result is never sharded in its channels.

    Args:
        out_spec: of the result.
        fetch: the inputs that are read.
        convolve: the kernel with them.
        split: how to compute their gradient in two; None to do it in one.
        owners: how the owners of the inputs compute it; None if they add up what others return.
    """

    saves = (0, 1)
    twice = new = True
    depends = {0: (1,), 1: (0,), 2: ()}
    outputs: ShardTensorSpec

    def __init__(
        self,
        out_spec: ShardTensorSpec,
        fetch: Fetch,
        convolve: LocalConvolution,
        split: SplitGradient | None = None,
        owners: OwnersGradient | None = None,
    ) -> None:
        self.outputs, self.fetch, self.convolve, self.split, self.owners = out_spec, fetch, convolve, split, owners
        self._fetches = bool(fetch)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Sequence[Tensor | None]]:
        """This rank's outputs, and the halo."""
        if not self._fetches:
            return self.convolve(x, weight, bias), ()
        read, halo = self.fetch.read(x)
        return self.convolve(read, weight, bias), halo if self.owners is None else ()

    def again(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """This rank's outputs, computed in a way that autograd can differentiate any number of times."""
        return self.convolve(self.fetch(x), weight, bias)

    def backward(self, needed: Sequence[bool], grads: Sequence[Any], *saved: Any) -> Gradients:
        """Gradients of the shard, the weight and the bias.

        Args:
            saved: the shard, the weight, and what :meth:`forward` returned besides the outputs.
        """
        (grad,), (x, weight, *halo), (need_x, need_w, need_b) = grads, saved, needed
        if grad is None:
            return None, None, None
        if self.split is not None:
            return self.split.gradients(needed, grad, x, weight, self.fetch, halo[0], self.total)
        convolve, of_bias = self.convolve, None
        if self.owners is None:
            read = self.fetch.join(x, halo) if self._fetches else x
        else:
            read, convolve = x, self.owners.convolve
            if need_b and self.owners.fetch:  # of this rank's outputs alone
                of_bias = grad.sum([0, *range(2, grad.ndim)], dtype=torch.float32 if self.widens else None)
                need_b = False
            grad, _ = self.owners.fetch.read(grad)
        given, gradients, wide = [grad, read, weight], convolve.gradients, self.widens and is_half(x)
        # One call of the kernel for all is faster, but nothing travels meanwhile, and float32 takes longer.
        together = need_x and self.total is None and not wide
        operands = given
        if wide and convolve.is_product(read, weight):
            gradients = convolve.products
        elif wide:
            operands = widened(*given)
        grad_x, grad_w, grad_b = gradients((together, need_w, need_b), *operands)
        grad_b = grad_b if of_bias is None else of_bias
        # The kernel has made the parameters' gradients for this call alone.
        finish = None if self.total is None else self.total.start([None, grad_w, grad_b], overwrite=True)
        if need_x:
            if not together:
                grad_x, _, _ = convolve.gradients(ONLY_INPUT, *given)
            assert grad_x is not None
            del given, read
            grad_x = grad_x if self.owners is not None else self.fetch.backward(grad_x, overwrite=True)
        if finish is not None:
            _, grad_w, grad_b = finish()
        return grad_x, grad_w, grad_b
