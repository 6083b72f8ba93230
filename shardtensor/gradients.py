"""``backward()`` and ``autograd.grad()`` of ShardTensors.

Their graph runs as anybody's does, but not inside a call to a torch function of ours: whatever is computed while the
engine runs (activation checkpointing recomputes the forward pass there, hooks may compute anything) must find the
registered functions. So the engine is called directly, after what torch's functions do before they call it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ._compat import alias, gradient_seeds, run_engine
from .registry import register
from .tensor import ShardTensor


def _seed(output: Any, grad: Any) -> Any:
    """The gradient to start from: a scalar's is one."""
    if not isinstance(output, ShardTensor):
        return gradient_seeds((output,), (grad,), is_grads_batched=False)[0]
    meta = output._spec.tensor_meta
    if grad is None:
        if meta.shape.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        if not meta.dtype.is_floating_point:
            raise RuntimeError(f"grad can be implicitly created only for real scalar outputs but got {meta.dtype}")
        return torch.ones_like(output.detach())
    if not isinstance(grad, Tensor):
        raise TypeError(f"gradients can be either Tensors or None, but got {type(grad).__name__}")
    if grad.shape != meta.shape:
        raise RuntimeError(
            f"a gradient of shape {tuple(grad.shape)} for a ShardTensor of shape {tuple(meta.shape)}; "
            "a plain gradient must be that of the whole tensor"
        )
    return grad


def _seeds(outputs: Sequence[Any], grads: Any) -> tuple[Any, ...]:
    given = [None] * len(outputs) if grads is None else [grads] if isinstance(grads, Tensor) else list(grads)
    if len(given) != len(outputs):
        raise RuntimeError(f"got {len(outputs)} tensors and {len(given)} gradients")
    return tuple(map(_seed, outputs, given))


def _differentiable(tensors: Any) -> tuple[Any, ...]:
    """One tensor or several, as the engine wants them."""
    result = (tensors,) if isinstance(tensors, (Tensor, GradientEdge)) else tuple(tensors)
    for tensor in result:
        if isinstance(tensor, ShardTensor) and not tensor.requires_grad:
            raise RuntimeError("a ShardTensor that does not require grad and has no grad_fn cannot be differentiated")
    return result


@register(torch.autograd.backward)
def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    tensors = _differentiable(tensors)
    run_engine(
        tensors,
        _seeds(tensors, grad_variables if grad_tensors is None else grad_tensors),
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        () if inputs is None else _differentiable(inputs),
        allow_unreachable=True,
        accumulate_grad=True,
    )


@register(Tensor.backward)
def _tensor_backward(
    self: Any, gradient: Any = None, retain_graph: bool | None = None, create_graph: bool = False, inputs: Any = None
) -> None:
    _backward(self, gradient, retain_graph, create_graph, inputs=inputs)


@register(torch.autograd.grad)
def _grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Any, ...]:
    if is_grads_batched:
        raise NotImplementedError("is_grads_batched is not supported for ShardTensors; loop over the gradients")
    outputs, inputs = _differentiable(outputs), _differentiable(inputs)
    if materialize_grads and allow_unused is None:
        allow_unused = True
    grads = run_engine(
        outputs,
        _seeds(outputs, grad_outputs),
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        inputs,
        allow_unreachable=bool(allow_unused),
        accumulate_grad=False,
    )
    if not materialize_grads:
        return grads
    return tuple(torch.zeros_like(t) if g is None else g for g, t in zip(grads, inputs, strict=True))


# -- derivatives of derivatives ---------------------------------------------------------------------------------------


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a ``backward``: what it returns raises when it is differentiated in turn.

    torch's own decorator of that name looks at the incoming gradients only. Where these are constants (the gradient of
    a sum), it returns constants, even if they depend on what was saved for backward: a second derivative would be
    wrong without a word.

    Raises:
        RuntimeError: on every rank alike, while the second derivative is computed.
    """

    @wraps(backward)
    def wrapper(ctx: Any, *grads: Any) -> Any:
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return results
        name = type(ctx).__name__.removesuffix("Backward").strip("_")
        single = not isinstance(results, tuple)
        marked = not_twice(name, (results,) if single else results, (*grads, *ctx.saved_tensors))
        return marked[0] if single else marked

    return wrapper


def not_twice(name: str, gradients: Sequence[Any], computed_from: Sequence[Any]) -> tuple[Any, ...]:
    """The gradients of the operator ``name``, which raise where they are differentiated by what they depend on."""
    sources = [t for t in computed_from if isinstance(t, Tensor) and t.requires_grad]
    if not sources:
        return tuple(gradients)
    return tuple(g if g is None else _NotAgain.apply(name, g, *sources) for g in gradients)


class _NotAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, result: Any, *sources: Any) -> Any:  # type: ignore[override]
        ctx.name = name
        return alias(result)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # type: ignore[override]
        raise RuntimeError(
            f"the gradient of {ctx.name} on a ShardTensor cannot be differentiated twice; "
            "if it need not be, detach it or leave out create_graph"
        )
