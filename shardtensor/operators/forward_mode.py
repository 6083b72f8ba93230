"""Decompositions whose gradients tell less of a tangent than torch's forward mode does.

``cholesky`` and ``eigh`` read a half of a matrix. Their gradients treat the other half alike, so they are Hermitian but
for imaginary parts of the diagonal. torch's forward mode takes a tangent as it is. A Jacobian-vector product that is
made of gradients would see the tangent's Hermitian part alone. So if tangents will be pushed, these functions have a
gradient of their own: torch's formula, in which the step that makes the gradient Hermitian lets tangents pass.
Everything else that is made of the gradient, such as second derivatives, follows. The phases of a complex ``svd``'s
vectors are free, and forward mode turns left and right vectors alike, which gradients do not tell. The gradient of a
real ``logcumsumexp`` is computed in logarithms, which have no derivative where a gradient is zero, as it is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from .._compat import FunctionContext, transforms_active
from ..context import Setting
from ..dispatch.gradients import for_tangents

# The gradient of a matrix, from the matrix, the results and their gradients.
PullBack = Callable[[Sequence[Tensor], Sequence[Tensor | None]], Tensor | None]
_pushing = Setting(False, decides=False)


class _Halves(torch.autograd.Function):
    """Both halves of a gradient alike; the diagonal stays. Tangents pass as they are."""

    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor) -> Tensor:
        return _hermitian(grad)

    @staticmethod
    def setup_context(ctx: FunctionContext, inputs: tuple[Tensor], output: Tensor) -> None: ...

    @staticmethod
    def backward(ctx: FunctionContext, grad: Tensor) -> Tensor:
        return grad if for_tangents.value else _hermitian(grad)


def _hermitian(grad: Tensor) -> Tensor:
    diagonal = torch.eye(grad.shape[-1], dtype=torch.bool, device=grad.device)
    return torch.where(diagonal, grad, (grad + grad.mH) / 2)


class _Decomposition(torch.autograd.Function):
    """What ``call`` returns of a matrix, as a tuple, with a gradient by ``pull_back``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        call: Callable[[Tensor], tuple[Tensor, ...]], pull_back: PullBack, matrix: Tensor
    ) -> tuple[Tensor, ...]:
        return call(matrix)

    @staticmethod
    def setup_context(ctx: FunctionContext, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.pull_back = inputs[1]
        ctx.mark_non_differentiable(*(t for t in output if not (t.is_floating_point() or t.is_complex())))
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx: FunctionContext, *grads: Tensor | None) -> tuple[None, None, Tensor | None]:
        return None, None, ctx.pull_back(ctx.saved_tensors, grads)


_alike: Callable[..., Any] = _Halves.apply
_decompose: Callable[..., Any] = _Decomposition.apply


def _of_cholesky(matrix: Tensor, upper: bool = False, **_: object) -> PullBack:
    def pull_back(results: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Tensor | None:
        factor, grad = results[0], grads[0]
        if grad is None:
            return None
        if upper:
            factor, grad = factor.mH, grad.mH
        half = (factor.mH @ grad).tril()
        inner = _alike(half - half.diagonal(dim1=-2, dim2=-1).diag_embed() / 2)
        left = torch.linalg.solve_triangular(factor.mH, inner, upper=True)
        gradient: Tensor = torch.linalg.solve_triangular(factor, left, upper=False, left=False)
        return gradient

    return pull_back


def _of_eigh(matrix: Tensor, UPLO: str = "L", compute_v: bool = True) -> PullBack | None:
    def pull_back(results: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Tensor | None:
        (values, vectors), (of_values, of_vectors) = results, grads
        inner = torch.zeros_like(vectors) if of_values is None else of_values.to(vectors.dtype).diag_embed()
        if of_vectors is not None:
            turned = vectors.mH @ of_vectors
            inner = inner + (turned - turned.diagonal(dim1=-2, dim2=-1).diag_embed()) / _gaps(values)
        gradient: Tensor = vectors @ _alike(inner) @ vectors.mH
        return gradient

    return pull_back if compute_v else None


def _of_svd(matrix: Tensor, full_matrices: bool = True, *, driver: str | None = None) -> PullBack | None:
    rows, columns = matrix.shape[-2:]
    if not matrix.is_complex() or (full_matrices and rows != columns):
        return None

    def pull_back(results: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Tensor | None:
        u, s, vh = results
        of_u, of_s, of_vh = (torch.zeros_like(t) if g is None else g for t, g in zip(results, grads, strict=True))
        left, right = _skew(u.mH @ of_u), _skew(vh @ of_vh.mH)
        turned = (left * s.unsqueeze(-2) + s.unsqueeze(-1) * right) / _gaps(s.square())
        phases = (left - right).diagonal(dim1=-2, dim2=-1) / (4 * s)
        inner = turned - turned.diagonal(dim1=-2, dim2=-1).diag_embed() + (of_s + phases).diag_embed()
        beside, below = of_u / s.unsqueeze(-2), of_vh / s.unsqueeze(-1)
        gradient: Tensor = (u @ inner + beside - u @ (u.mH @ beside)) @ vh + u @ (below - below @ vh.mH @ vh)
        return gradient

    return pull_back


def _of_logcumsumexp(x: Tensor, dim: int) -> PullBack | None:
    def pull_back(results: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Tensor | None:
        (result,), (grad,) = results, grads
        if grad is None:
            return None
        largest = x.detach().amax(dim, keepdim=True)
        largest = torch.where(largest.isfinite(), largest, 0)
        later = (grad * (largest - result).exp()).flip(dim).cumsum(dim).flip(dim)
        gradient: Tensor = (x - largest).exp() * later
        return gradient

    return None if x.is_complex() or not x.numel() else pull_back


def _skew(matrix: Tensor) -> Tensor:
    return matrix - matrix.mH


def _gaps(values: Tensor) -> Tensor:
    """How far each value is behind each other one; 1 on the diagonal."""
    return values.unsqueeze(-2) - values.unsqueeze(-1) + torch.eye(values.shape[-1]).to(values)


# What has such a form, each with its gradient for the arguments of a call.
_FORMS: dict[Any, Callable[..., PullBack | None]] = {
    torch.linalg.cholesky: _of_cholesky,
    torch.linalg.cholesky_ex: _of_cholesky,
    torch.ops.aten.linalg_cholesky_ex: _of_cholesky,
    torch.linalg.eigh: _of_eigh,
    torch.linalg.eigvalsh: _of_eigh,
    torch.ops.aten._linalg_eigh: _of_eigh,
    torch.linalg.svd: _of_svd,
    torch.logcumsumexp: _of_logcumsumexp,
}


def decomposed(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``function(*args, **kwargs)`` of plain tensors; in its form for tangents where these will be pushed."""
    if not _pushing.value or function not in _FORMS or not torch.is_grad_enabled() or "out" in kwargs:
        return function(*args, **kwargs)
    if function is torch.linalg.eigvalsh:  # second derivatives need the vectors
        return decomposed(torch.linalg.eigh, args, kwargs)[0]
    (matrix, *others), named = (args, kwargs) if args else _first_of(kwargs)
    pull_back = _FORMS[function](matrix, *others, **named)
    differentiable = transforms_active() or matrix.requires_grad  # which mapped tensors do not tell
    if pull_back is None or isinstance(matrix, DTensor) or not differentiable:
        return function(*args, **kwargs)
    kind: Any = None

    def call(matrix: Tensor) -> tuple[Tensor, ...]:
        nonlocal kind
        found = function(matrix, *others, **named)
        kind = type(found)
        return (found,) if isinstance(found, Tensor) else tuple(found)

    results = _decompose(call, pull_back, matrix)
    if issubclass(kind, Tensor):
        return results[0]
    return results if kind is tuple else kind(results)


def _first_of(kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (name,) = kwargs.keys() & {"input", "A", "self"}
    return (kwargs[name],), {key: value for key, value in kwargs.items() if key != name}


@contextmanager
def pushing_tangents() -> Iterator[None]:
    """Around the call of a function whose tangents will be pushed forward: it gets the gradients of above."""
    with _pushing.set_to(True), _OfPlainTensors():
        yield


class _OfPlainTensors(TorchFunctionMode):
    """Calls of plain tensors; those of local tensors are made by plans."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return decomposed(func, args, kwargs or {})
