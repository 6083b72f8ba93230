"""``autograd.Function``s of programs: gradients that they return for plain tensors, and for DTensors.

[Note: functions of programs] Operators return plain gradients for plain tensors. A program's own function computes with
ShardTensors in its backward. So what it returns for a plain weight is a ShardTensor, usually a contribution, which
would become the weight's ``grad``. If a call has a ShardTensor among its arguments or results, its node therefore gets
a hook, which knows what each gradient is for, and completes it. Graphs and placements are the same on all ranks, and so
is what is sent. Calls without ShardTensors are only looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor

from .._compat import DisableTorchFunction, wrap_functions
from .planning import spec_of
from .tensor import ShardTensor, redistribute_to, to_dtensor
from .written import WrittenTensor, is_of_written

# What a gradient becomes that is a ShardTensor.
_Completion = Callable[[ShardTensor], Tensor]


def _called(cls: type[Function], args: Sequence[Any], outputs: Sequence[Any]) -> None:
    completions = [_completion(t) for t in args if isinstance(t, Tensor)]
    node = _node(cls, outputs) if any(completions) else None
    if node is not None:
        node.register_hook(partial(_complete, completions))


def _node(cls: type[Function], outputs: Sequence[Any]) -> Any:
    """The call's node; None where no output has a gradient."""
    for output in outputs:
        if isinstance(output, Tensor):
            with DisableTorchFunction():
                node: Any = output.grad_fn
            while is_of_written(node):  # the history that was given to a ShardTensor is the last input's
                node = node.next_functions[-1][0]
            # The node of a function that has written to a view is part of another one, with the same inputs.
            if isinstance(node, cls._backward_cls) or (node is not None and node.name() == "CopySlices"):
                return node
    return None


def _completion(tensor: Tensor) -> _Completion | None:
    """What becomes of the gradient of an argument; None where it may be a ShardTensor, or there is none."""
    if not tensor.requires_grad or isinstance(tensor, ShardTensor):
        return None
    if isinstance(tensor, DTensor):
        spec = spec_of(tensor).for_contributions()
        return lambda grad: to_dtensor(grad, spec)
    return lambda grad: redistribute_to(grad, grad._spec.replicated()).to_local()


def _complete(
    completions: Sequence[_Completion | None], grads: Sequence[Tensor | None], _: object
) -> tuple[Tensor | None, ...]:
    return tuple(
        grad if complete is None or not isinstance(grad, ShardTensor) else complete(grad)
        for complete, grad in zip(completions, grads, strict=True)
    )


wrap_functions(frozenset({ShardTensor, WrittenTensor}), _called)
