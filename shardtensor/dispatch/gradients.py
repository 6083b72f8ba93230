"""``backward()`` and ``autograd.grad()`` of ShardTensors.

Left to torch, both would run inside a call to ``__torch_function__``, which disables torch functions until it returns.
But operators that run in the meantime must reach their handlers: activation checkpointing recomputes the forward pass,
and hooks may compute anything. So the engine is called directly, after the steps that torch's functions take before
they call it.

[Note: graphs of gradients] Of the nodes that are ready, the engine runs the one that was made last, by a number that
each thread counts for itself. On accelerators the engine runs the nodes in a thread per device. With ``create_graph``
the nodes of gradients would be counted in that thread, and those of the forward pass in the program's thread. Ranks
differ in the number of nodes of their local work. So they would run nodes that communicate in different orders, and
wait for each other. A graph of gradients is therefore made in the program's thread, as on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .._compat import AutogradFunction, FunctionContext, alias, gradient_seeds, nodes_executed, run_engine
from ..context import Setting
from ..errors import UnsupportedSharding
from ..ranks.failures import BACKWARD, note_raised
from .registry import register
from .tensor import ShardTensor, wrap

# What torch's functions take as roots and inputs of a graph, one or several.
Node = Tensor | GradientEdge
Nodes = Node | Sequence[Node]
# Gradients of the roots; None where a root is a scalar.
Seeds = Tensor | Sequence[Tensor | None] | None


def _seeds(outputs: Sequence[Node], grads: Seeds) -> tuple[Tensor | None, ...]:
    """The gradients to start from; by default one, for a scalar.

    Raises:
        TypeError, RuntimeError: torch's own errors, with the global shape in place of the local one.
    """
    given: list[Tensor | None] = [None] * len(outputs)
    if grads is not None:
        given = [grads] if isinstance(grads, Tensor) else list(grads)
    if len(given) != len(outputs):
        raise RuntimeError(f"got {len(outputs)} tensors and {len(given)} gradients")
    for i, (output, grad) in enumerate(zip(outputs, given, strict=True)):
        if not isinstance(output, ShardTensor):
            given[i] = gradient_seeds((output,), (grad,), is_grads_batched=False)[0]
        elif grad is None:
            given[i] = _one(output)
        elif not isinstance(grad, Tensor):
            raise TypeError(f"gradients can be either Tensors or None, but got {type(grad).__name__}")
        elif grad.shape != output._spec.tensor_meta.shape:
            raise RuntimeError(
                f"a gradient of shape {tuple(grad.shape)} for a ShardTensor of shape {tuple(output.shape)}; "
                "a plain gradient must be that of the global tensor"
            )
    return tuple(given)


def _one(output: ShardTensor) -> Tensor | None:
    """The gradient of a scalar by itself; None where it has none, of which the engine says why."""
    meta = output._spec.tensor_meta
    if not output.requires_grad:
        return None
    if meta.shape.numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    if not meta.dtype.is_floating_point:
        raise RuntimeError(f"grad can be implicitly created only for real scalar outputs but got {meta.dtype}")
    spec = output._spec.for_gradient()
    return wrap(output._local_tensor.new_ones(spec.own_shape), spec)


def _several(nodes: Nodes) -> tuple[Node, ...]:
    """One tensor or several, as a tuple for the engine."""
    return (nodes,) if isinstance(nodes, (Tensor, GradientEdge)) else tuple(nodes)


class _Passes:
    """Those that are under way.

    Attributes:
        asked: ids of the inputs whose gradients were asked for, where a pass is for the gradients of some inputs. What
            threads that run passes at the same time leave here costs time, and no gradient is left out for it.
    """

    asked: frozenset[int] = frozenset()


passes = _Passes()


def _run(
    roots: Sequence[Node], seeds: Seeds, retain_graph: bool, create_graph: bool, inputs: Sequence[Node], **options: bool
) -> Any:
    """Call the engine. See [Note: graphs of gradients]."""
    before = passes.asked
    passes.asked = before.union(map(id, inputs))
    try:
        with torch.autograd.set_multithreading_enabled(False) if create_graph else nullcontext():
            return run_engine(roots, seeds, retain_graph, create_graph, inputs, **options)
    except Exception as error:
        note_raised(error, BACKWARD)
        raise
    finally:
        passes.asked = before


def needed_gradients(ctx: FunctionContext, first: int) -> Sequence[bool]:
    """Which gradients a node is to compute, of its inputs from ``first`` on, which is the first one with a graph.

    ``ctx.needs_input_grad`` was fixed in the forward pass. In a pass for the gradients of some inputs, torch's own
    operators compute what leads to these: forces from an energy take no gradients of weights. So do ours.
    """
    needed = ctx.needs_input_grad[first:]
    if not passes.asked:
        return needed
    executed = nodes_executed(ctx.next_functions, passes.asked)  # of the needed inputs, in their order
    if all(executed):
        return needed
    of_needed = iter(executed)
    return [need and next(of_needed) for need in needed]


@register(torch.autograd.backward)
def _backward(
    tensors: Nodes,
    grad_tensors: Seeds = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Seeds = None,  # the former name of grad_tensors, which torch still takes
    inputs: Nodes | None = None,
) -> None:
    roots = _several(tensors)
    _run(
        roots,
        _seeds(roots, grad_variables if grad_tensors is None else grad_tensors),
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        () if inputs is None else _several(inputs),
        allow_unreachable=True,
        accumulate_grad=True,
    )


@register(Tensor.backward)
def _tensor_backward(
    self: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Nodes | None = None,
) -> None:
    _backward(self, gradient, retain_graph, create_graph, inputs=inputs)


@register(torch.autograd.grad)
def _grad(
    outputs: Nodes,
    inputs: Nodes,
    grad_outputs: Seeds = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:
    roots, targets = _several(outputs), _several(inputs)
    if materialize_grads and allow_unused is None:
        allow_unused = True
    if is_grads_batched:
        seeds = (grad_outputs,) if isinstance(grad_outputs, Tensor) else tuple(grad_outputs or ())
        given = [seed for seed in seeds if seed is not None]
        if not given:
            raise RuntimeError("is_grads_batched needs grad_outputs, with a dim in front for the gradients")
        rows = [[s if s is None else s[i] for s in seeds] for i in range(len(given[0]))]
        found = [_grad(roots, targets, row, True, create_graph, True, allow_unused, False, True) for row in rows]
        return tuple(map(torch.stack, zip(*found, strict=True)))
    grads: tuple[Tensor | None, ...] = _run(
        roots,
        _seeds(roots, grad_outputs),
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        targets,
        allow_unreachable=bool(allow_unused),
        accumulate_grad=False,
    )
    if not materialize_grads:
        return grads
    return tuple(_zeros_like(t) if g is None else g for g, t in zip(grads, targets, strict=True))


def _zeros_like(target: Node) -> Tensor:
    if isinstance(target, GradientEdge):  # torch's own error
        raise RuntimeError("materialize_grads cannot be used when the given input is a GradientEdge")
    return torch.zeros_like(target)


# -- derivatives of derivatives ---------------------------------------------------------------------------------------


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a ``backward``: differentiating its results raises.

    torch's own decorator of this name considers the incoming gradients only. Where these are constants (the gradient of
    a sum), it returns constants, even if the results depend on what was saved for backward: a second derivative would
    be silently wrong.

    Raises:
        RuntimeError: on every rank alike, while the second derivative is computed.
    """

    @wraps(backward)
    def wrapper(ctx: FunctionContext, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            ctx = _Unpacked(ctx)
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return results
        name = getattr(ctx, "operator", type(ctx._ctx).__name__.removesuffix("Backward").strip("_"))
        single = not isinstance(results, tuple)
        marked = not_twice(name, (results,) if single else results, (*grads, *ctx.saved_tensors))
        return marked[0] if single else marked

    return wrapper


class _Unpacked:
    """The context of a node whose saved tensors are asked for twice; checkpointing gives them once."""

    def __init__(self, ctx: FunctionContext) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def not_twice(name: str, gradients: Sequence[Any], computed_from: Sequence[Any]) -> tuple[Any, ...]:
    """The gradients of the operator ``name``, which raise where they are differentiated by what they depend on."""
    sources = [t for t in computed_from if isinstance(t, Tensor) and t.requires_grad]
    if not sources:
        return tuple(gradients)
    return tuple(g if g is None else _NotAgain.apply(name, g, *sources) for g in gradients)


# Whether derivatives of gradients are taken to push tangents forward, as ``torch.func.jvp`` does.
for_tangents = Setting(False, decides=False)


class NotTwice(UnsupportedSharding):
    """A gradient was differentiated that cannot be."""


class _NotAgain(AutogradFunction):
    """The identity on ``result``, which counts as a function of ``sources`` and raises in its backward pass."""

    @staticmethod
    def forward(ctx: FunctionContext, name: str, result: Tensor, *sources: Tensor) -> Tensor:
        ctx.name = name
        return alias(result)

    @staticmethod
    def backward(ctx: FunctionContext, *grads: Tensor) -> NoReturn:
        raise NotTwice(
            f"the gradient of {ctx.name} on a ShardTensor cannot be differentiated twice; "
            "if it need not be, detach it or leave out create_graph"
        )
