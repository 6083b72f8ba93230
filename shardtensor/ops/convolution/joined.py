"""Convolution on one rank, with shard and halo in one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...halo import Fetch
from ...spec import ShardTensorSpec
from ..common.half import cast, is_half, widened
from .parts import Part

__all__ = ["Convolution", "JoinedConvolution", "StartSum", "nothing_of"]

# Starts the sum over the ranks of the gradients of (input,) weight and bias; what it returns waits for it.
StartSum = Callable[[Sequence[Tensor | None]], Callable[[], list[Tensor | None]]]


class Convolution:
    """One convolution on one rank: its local work.

    Attributes:
        out_spec: of the result.
        out_shape: of this rank's shard of it.
        saves: which of input and weight (0 and 1) the backward pass needs.
    """

    out_spec: ShardTensorSpec
    out_shape: tuple[int, ...]
    saves: tuple[int, ...]

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """This rank's outputs, and what of other ranks the backward pass needs."""
        raise NotImplementedError

    def fetched(self, x: Tensor) -> tuple[Tensor | None, ...]:
        """What :meth:`forward` returns besides the outputs."""
        raise NotImplementedError

    def backward(
        self, needed: Sequence[bool], grad: Tensor, start_sum: StartSum | None, *saved: Tensor | None
    ) -> Sequence[Tensor | None]:
        """Gradients of the shard, the weight and the bias; without ``start_sum`` this rank's contributions to these.

        Args:
            saved: those of input and weight that :attr:`saves` names, then what :meth:`fetched` returns.
        """
        raise NotImplementedError

    def again(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """This rank's outputs, computed in a way that autograd can differentiate any number of times."""
        raise NotImplementedError

    @property
    def exchanges(self) -> bool:
        """Whether other ranks add to the gradient of the shard, or get contributions to theirs from this one."""
        raise NotImplementedError

    def differentiate(
        self, needed: Sequence[bool], grad: Tensor, start_sum: StartSum | None, sums: bool, *saved: Tensor | None
    ) -> Sequence[Tensor | None]:
        """:meth:`backward`, in float32 where ranks sum half precision: see [Note: rounded once] in redistribute.py.

        Args:
            sums: whether they sum the gradients of weight and bias, here or later.
        """
        if not is_half(grad) or not (sums or self.exchanges):
            return self.backward(needed, grad, start_sum, *saved)
        need_x, need_w, need_b = needed
        apart = need_x and not self.exchanges
        wide = widened(grad, *saved)
        found = list(self.backward((need_x and not apart, need_w, need_b), wide[0], start_sum, *wide[1:]))
        if apart:
            found[0] = self.backward((True, False, False), grad, None, *saved)[0]
        return [None if found[0] is None else cast(found[0], grad.dtype), *found[1:]]

    def _without_input(self, like: Tensor, bias: Tensor | None) -> Tensor:
        """The outputs of a rank that reads nothing."""
        y = like.new_zeros(self.out_shape)
        return y if bias is None else y.add_(bias.view(-1, *[1] * (y.ndim - 2)))


def nothing_of(read: Tensor, weight: Tensor) -> Tensor:
    """Zero, as a function that is bilinear in both, as a convolution is.

    A rank without outputs adds it to them: so derivatives of any order depend on the same tensors on every rank, and
    come through the exchanges alike.
    """
    return read.reshape(-1)[:0].sum() * weight.reshape(-1)[:0].sum()


def _sum_of_bias(grad: Tensor) -> Tensor:
    return grad.sum(dim=[0, *range(2, grad.ndim)])


@dataclass(frozen=True, slots=True)
class JoinedConvolution(Convolution):
    """Shard and halo in one tensor, and one call of the kernel.

    Attributes:
        fetch: what puts them together.
        part: both; None where there is nothing to compute.
        overlaps: whether the sum of the parameters' gradients travels while the input's is computed. Otherwise one call
            of the kernel computes all, which is faster.
    """

    out_spec: ShardTensorSpec
    out_shape: tuple[int, ...]
    fetch: Fetch
    part: Part | None
    overlaps: bool
    saves: tuple[int, ...]

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        kept = self.fetched(x)
        read = kept[0] if kept else x
        y = self._without_input(x, bias) if self.part is None else self.part.convolve(read, weight, bias)
        return y, kept

    def fetched(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.fetch.forward(x),) if self.fetch else ()

    def again(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        read = self.fetch(x)
        if self.part is not None:
            return self.part.convolve(read, weight, bias)
        y = read.new_zeros(self.out_shape) + nothing_of(read, weight)
        return y if bias is None else y + bias.view(-1, *[1] * (y.ndim - 2))

    @property
    def exchanges(self) -> bool:
        return bool(self.fetch)

    def backward(
        self, needed: Sequence[bool], grad: Tensor, start_sum: StartSum | None, *saved: Tensor | None
    ) -> Sequence[Tensor | None]:
        read, weight = saved if 0 in self.saves else saved[::-1]
        assert read is not None and weight is not None
        apart = self.overlaps and needed[0] and start_sum is not None
        grads = self._gradients((needed[0] and not apart, needed[1], needed[2]), grad, read, weight)
        returning = self.fetch.start_backward(grads[0]) if self.fetch and grads[0] is not None else None
        finish = None if start_sum is None else start_sum(grads)
        if apart:
            grad_x = self._gradients((True, False, False), grad, read, weight)[0]
        else:
            grad_x = grads[0] if returning is None else returning()
        _, grad_w, grad_b = grads if finish is None else finish()
        return grad_x, grad_w, grad_b

    def _gradients(self, needed: Sequence[bool], grad: Tensor, read: Tensor, weight: Tensor) -> Sequence[Tensor | None]:
        if self.part is not None:
            return self.part.differentiate(grad, read, weight, needed)
        need_x, need_w, need_b = needed
        return (
            torch.zeros_like(read) if need_x else None,
            torch.zeros_like(weight) if need_w else None,
            _sum_of_bias(grad) if need_b else None,
        )
