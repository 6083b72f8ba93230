"""Convolution on one rank, transposed or not: fetch the halo, put it next to the shard, and call the kernel once.

Between forward and backward a rank keeps its shard, which autograd holds in any case, and the halo. The two are put
together once more for the weight's gradient: both in one tensor would take as much memory again as all shards do.

::

    forward   halo = fetch(x)       read = shard + halo      y = kernel(read, weight, bias)
    backward                        read = shard + halo      the kernel's gradients of read, weight and bias
              the halo's part of read's gradient goes back to its owners, who add it to their own

The gradient of what a tall shard reads is computed in two parts, see :class:`SplitGradient`.
Which inputs a rank reads, and how the kernel is to pad them, stands in ``geometry.py`` and ``conv.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...communication.exchange import Pending
from ...communication.halo import Fetch, Narrow
from ...layout.spec import ShardTensorSpec
from ...layout.strides import stride_like
from ...operators.declaration import Plan
from ..common.alignment import cast, wide_dtype, widened
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
        if 0 in self.out_shape or not read.numel():  # nothing to compute on this rank
            y = read.new_zeros(self.out_shape) + _nothing_of(read, weight)
            return y if bias is None else y + _over_channels(bias, y)
        read = torch.constant_pad_nd(read, self.zeros) if self.zeros else read
        after = max(self.crop, default=0) > 0  # outputs that no input reaches: they are the bias
        kernel = convolve_volume if read.ndim == 5 else torch.convolution
        y = kernel(read, weight, None if after else bias, *self.arguments)
        y = torch.constant_pad_nd(y, self.crop) if self.crop else y
        return y + _over_channels(bias, y) if after and bias is not None else y

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
        padded = torch.constant_pad_nd(read, self.zeros) if self.zeros else read
        grad = torch.constant_pad_nd(grad, [-n for n in self.crop]) if self.crop else grad
        mask = [need_x, need_w, False]
        grad_x, grad_w, _ = backward(grad, padded, weight, None, *self.arguments, mask)
        if grad_x is not None and self.zeros:
            grad_x = torch.constant_pad_nd(grad_x, [-n for n in self.zeros])
        return grad_x, grad_w, grad_b


def _nothing_of(read: Tensor, weight: Tensor) -> Tensor:
    """Zero, as a function that is bilinear in both, as a convolution is.

    A rank without outputs adds it to them: so derivatives of any order depend on the same tensors on every rank, and
    come through the exchanges alike.
    """
    return read.reshape(-1)[:0].sum() * weight.reshape(-1)[:0].sum()


def _over_channels(bias: Tensor, y: Tensor) -> Tensor:
    return bias.view(-1, *[1] * (y.ndim - 2))


@dataclass(frozen=True, slots=True)
class Strip:
    """Some rows of what is read, whose gradient is computed by itself.

    Attributes:
        outputs: those that read them.
        reads: the shape of all that these outputs read.
        convolve: gives these outputs of it.
        within: the rows among what they read.
    """

    outputs: Narrow
    reads: tuple[int, ...]
    convolve: LocalConvolution
    within: Narrow

    def gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Of these rows, in float32 for half precision, out of the gradient of all this rank's outputs."""
        grad, weight = widened(grad.narrow(*self.outputs), weight)
        shape = torch.empty_strided(self.reads, stride_like(grad, self.reads), dtype=grad.dtype, device=grad.device)
        found, _, _ = self.convolve.gradients(ONLY_INPUT, grad, shape, weight)
        assert found is not None
        return found.narrow(*self.within)


@dataclass(frozen=True, slots=True)
class SplitGradient:
    """The gradient of what is read, the shard's apart from the halo's, which travels meanwhile.

    For tall shards. Shard and halo in one take one activation more at a time: 108 MiB of tensors rather than 99 in a
    step of the globe U-Net. And what ranks add up is to be in float32 for half precision, in which the kernel takes
    several times as long: here these are a few rows.

    Attributes:
        shard: the kernel with the shard alone, among zeros.
        halo: what is received from each peer.
        edges: for half precision, the rows of the shard that others read, and their places in it.
    """

    shard: LocalConvolution
    halo: tuple[Strip, ...]
    edges: tuple[tuple[Narrow, Strip], ...]

    def start(self, fetch: Fetch, grad: Tensor, weight: Tensor) -> Pending:
        """Send the halo's gradient to its owners."""
        return fetch.start_return([strip.gradient(grad, weight) for strip in self.halo], widened(grad[:0])[0])

    def finish(self, fetch: Fetch, grad: Tensor, x: Tensor, weight: Tensor, returning: Pending) -> Tensor:
        """The shard's gradient, complete."""
        total, _, _ = self.shard.gradients(ONLY_INPUT, grad, x, weight)
        assert total is not None
        (total,) = widened(total)
        for place, strip in self.edges:
            total.narrow(*place).copy_(strip.gradient(grad, weight))
        return cast(fetch.add_returned(total, returning), x.dtype)


class ConvolutionPlan(Plan):
    """One rank's part of an N-d convolution of an input ``(N, C, *spatial)`` with replicated weights.

    The result is never sharded in its channels.

    Args:
        out_spec: of the result.
        fetch: the inputs that are read.
        convolve: the kernel with them.
        split: how to compute their gradient in two; None to do it in one.
    """

    saves = (0, 1)
    twice = True
    depends = {0: (1,), 1: (0,), 2: ()}
    outputs: ShardTensorSpec

    def __init__(
        self, out_spec: ShardTensorSpec, fetch: Fetch, convolve: LocalConvolution, split: SplitGradient | None = None
    ) -> None:
        self.outputs, self.fetch, self.convolve, self.split = out_spec, fetch, convolve, split
        dtype = out_spec.tensor_meta.dtype
        self._fetches, self._half = bool(fetch), wide_dtype(dtype) != dtype

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Sequence[Tensor | None]]:
        """This rank's outputs, and the halo."""
        if not self._fetches:
            return self.convolve(x, weight, bias), ()
        read, halo = self.fetch.read(x)
        return self.convolve(read, weight, bias), halo

    def again(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """This rank's outputs, computed in a way that autograd can differentiate any number of times."""
        return self.convolve(self.fetch(x), weight, bias)

    def backward(self, needed: Sequence[bool], grads: Sequence[Any], *saved: Any) -> Gradients:
        """Gradients of the shard, the weight and the bias.

        What ranks add up is in float32 where it is of half precision: see [Note: rounded once] in redistribute.py.

        Args:
            saved: the shard, the weight, and what :meth:`forward` returned besides the outputs.
        """
        (grad,), (x, weight, *halo), (need_x, need_w, need_b) = grads, saved, needed
        if grad is None:
            return None, None, None
        split = self.split if need_x else None
        returning = None
        # Only some ranks may compute in two: where there is a sum, all of them start it before they return the halo's.
        if split is not None and self.total is None:
            returning = split.start(self.fetch, grad, weight)
            weight = returning.meanwhile(weight)
        joins = self._fetches and (split is None or need_w or need_b)
        read = self.fetch.join(x, halo) if joins else x
        wide = self._half and (self.sums or self._fetches)
        # One call of the kernel for all is faster, but nothing travels meanwhile.
        together = need_x and split is None and self.total is None and wide == (wide and self._fetches)
        given = widened(grad, read, weight) if wide else [grad, read, weight]
        grad_x, grad_w, grad_b = self.convolve.gradients((together, need_w, need_b), *given)
        # The kernel has made the parameters' gradients for this call alone.
        finish = None if self.total is None else self.total.start([None, grad_w, grad_b], overwrite=True)
        if split is not None:
            del given, read
            returning = returning or split.start(self.fetch, grad, weight)
            grad_x = split.finish(self.fetch, grad, x, weight, returning)
        elif need_x:
            if not together:
                given = given if self._fetches else [grad, read, weight]
                grad_x, _, _ = self.convolve.gradients(ONLY_INPUT, *given)
            assert grad_x is not None
            del given, read
            grad_x = cast(self.fetch.backward(grad_x), x.dtype)
        if finish is not None:
            _, grad_w, grad_b = finish()
        return grad_x, grad_w, grad_b
