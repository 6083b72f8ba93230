"""Samples inside transforms of torch.func, and inside selective activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

TRANSFORMS = ("grad", "vjp", "jvp", "vmap", "twice")


def _keep_all(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def _keep_all_but_pointwise(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE if torch.Tag.pointwise in op.tags else CheckpointPolicy.MUST_SAVE


def _keep_nothing(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


POLICIES = {"all": _keep_all, "all-but-pointwise": _keep_all_but_pointwise, "nothing": _keep_nothing}


def checkpointed(policy: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside selective activation checkpointing, which keeps results as the policy says."""

    def call(*args: Any, **kwargs: Any) -> Any:
        contexts = partial(create_selective_checkpoint_contexts, POLICIES[policy])
        return checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return call


# Of these, torch's own forward mode differs from finite differences. Its gradients do not, so what is expected of one
# device is made of these.
WRONG_FORWARD = ("scatter_reduce.prod", "triangular_solve", "cholesky_inverse")


def weights(t: torch.Tensor) -> torch.Tensor:
    """Numbers that tell all elements apart, of the tensor's shape and dtype."""
    return torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype.to_real()).to(t.dtype).reshape(t.shape)


def transformed(
    transform: str, function: Callable[..., Any], arguments: tuple[Any, Any, Any], name: str = ""
) -> list[Any]:
    """What the transform of an operator gives for a sample: results and derivatives.

    It is differentiated by all operands that require gradients, and mapped over two of the first one. "twice" is
    ``torch.autograd.grad`` of each gradient; where there is none, both times, the result is None.
    """
    torch.manual_seed(1)
    if transform == "twice":
        return twice(function, arguments)
    if transform == "vmap":
        first, args, kwargs = arguments
        pairs = tree_map(lambda t: torch.stack([t.detach(), t.detach()]) if isinstance(t, torch.Tensor) else t, first)
        dims = tree_map(lambda t: 0 if isinstance(t, torch.Tensor) else None, first)
        mapped = torch.func.vmap(lambda x: tree_leaves(function(x, *args, **kwargs)), in_dims=(dims,))
        return list(mapped(pairs))
    values, structure = tree_flatten(arguments)
    chosen = [i for i, t in enumerate(values) if isinstance(t, torch.Tensor) and t.requires_grad]
    values = [t.detach() if isinstance(t, torch.Tensor) else t for t in values]

    def of_chosen(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = list(values)
        for i, leaf in zip(chosen, leaves, strict=True):
            given[i] = leaf
        first, args, kwargs = tree_unflatten(given, structure)
        outputs = [t for t in tree_leaves(function(first, *args, **kwargs)) if isinstance(t, torch.Tensor)]
        return tuple(t for t in outputs if t.is_floating_point() or t.is_complex())

    primals = tuple(values[i] for i in chosen)
    if transform == "jvp":
        vectors = tuple(map(weights, primals))
        if name in WRONG_FORWARD:
            results, tangents = torch.autograd.functional.jvp(of_chosen, primals, vectors)
        else:
            results, tangents = torch.func.jvp(of_chosen, primals, vectors)
        return [*results, *tangents]
    if transform == "vjp":
        results, pull_back = torch.func.vjp(of_chosen, *primals)
        return [*results, *pull_back(tuple(weights(t) for t in results))]

    def loss(*leaves: torch.Tensor) -> torch.Tensor:
        parts = [(t.abs().square() if t.is_complex() else t) * weights(t).real for t in of_chosen(*leaves)]
        return sum(t.sum() for t in parts)

    return list(torch.func.grad(loss, argnums=tuple(range(len(primals))))(*primals))


def twice(function: Callable[..., Any], arguments: tuple[Any, Any, Any]) -> list[Any]:
    """The gradients by each operand that requires one, and the gradients of these."""
    first, args, kwargs = arguments
    leaves = [t for t in tree_leaves(arguments) if isinstance(t, torch.Tensor) and t.requires_grad]
    outputs = [t for t in tree_leaves(function(first, *args, **kwargs)) if isinstance(t, torch.Tensor)]
    total = sum((t.abs().square() * weights(t).real).sum() for t in outputs if t.requires_grad)
    found: list[Any] = []
    grads = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True)
    for grad in grads:
        found.append(grad if grad is None else grad.detach())
        if grad is not None and grad.requires_grad:
            loss = (grad.abs().square() * weights(grad).real).sum()
            found += torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
    return found
