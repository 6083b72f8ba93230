"""``backward()`` and ``autograd.grad()`` of ShardTensors.

Their graph runs as anybody's does, but not inside a call to a torch function of ours: whatever is computed while the
engine runs (activation checkpointing recomputes the forward pass there, hooks may compute anything) must find the
registered functions. So the engine gets the graph's edges instead of the ShardTensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ._compat import DisableTorchFunction
from .registry import register
from .tensor import ShardTensor


def _edge(tensor: Any) -> Any:
    if not isinstance(tensor, ShardTensor):
        return tensor
    if not tensor.requires_grad:
        raise RuntimeError("a ShardTensor that does not require grad and has no grad_fn cannot be differentiated")
    with DisableTorchFunction():
        return get_gradient_edge(tensor)


def _seeds(tensors: Sequence[Any], grads: Any) -> list[Any]:
    """The gradients to start from: a scalar's is one."""
    given = [None] * len(tensors) if grads is None else [grads] if isinstance(grads, Tensor) else list(grads)
    if len(given) != len(tensors):
        raise RuntimeError(f"got {len(tensors)} tensors and {len(given)} gradients")
    seeds = []
    for tensor, grad in zip(tensors, given, strict=True):
        if grad is None and isinstance(tensor, ShardTensor):
            if tensor.numel() != 1:
                raise RuntimeError("grad can be implicitly created only for scalar outputs")
            grad = torch.ones_like(tensor.detach())
        elif grad is not None and isinstance(tensor, ShardTensor) and grad.shape != tensor.shape:
            raise RuntimeError(
                f"a gradient of shape {tuple(grad.shape)} for a ShardTensor of shape {tuple(tensor.shape)}; "
                "a plain gradient must be that of the whole tensor"
            )
        seeds.append(grad)
    return seeds


def _sequence(tensors: Any) -> tuple[Any, ...]:
    return (tensors,) if isinstance(tensors, (Tensor, GradientEdge)) else tuple(tensors)


@register(torch.autograd.backward)
def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    tensors = _sequence(tensors)
    torch.autograd.backward(
        tuple(_edge(t) for t in tensors),
        _seeds(tensors, grad_variables if grad_tensors is None else grad_tensors),
        retain_graph,
        create_graph,
        inputs=None if inputs is None else tuple(_edge(t) for t in _sequence(inputs)),
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
    outputs, inputs = _sequence(outputs), _sequence(inputs)
    if materialize_grads and allow_unused is None:
        allow_unused = True
    grads = torch.autograd.grad(
        tuple(_edge(t) for t in outputs),
        tuple(_edge(t) for t in inputs),
        _seeds(outputs, grad_outputs),
        retain_graph,
        create_graph,
        allow_unused=bool(allow_unused),
    )
    if not materialize_grads:
        return grads
    return tuple(torch.zeros_like(t) if g is None else g for g, t in zip(grads, inputs, strict=True))
