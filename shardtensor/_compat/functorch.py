"""torch.func: where it carries out its transforms, and what these check of their arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.autograd.forward_ad
from torch._functorch import apis, eager_transforms
from torch._functorch.vmap import (  # type: ignore[attr-defined]
    _broadcast_to_and_flatten,
    _process_batched_inputs,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from .replaced import replace

__all__ = [
    "batched_inputs",
    "first_node_after",
    "flattened_like",
    "forward_mode",
    "innermost_transform",
    "is_made_since",
    "make_dual",
    "replace_transforms",
    "replaced_arguments",
    "sliced_arguments",
    "traces_graph",
    "unpack_dual",
]

# Its ``_current_level`` is that of ``dual_level``, below 0 outside: nothing has a tangent there.
forward_mode: Any = torch.autograd.forward_ad
make_dual: Callable[..., Any] = forward_mode.make_dual
unpack_dual: Callable[..., Any] = forward_mode.unpack_dual

# All transforms of torch.func are made of the first four, which it looks up when it calls them; linearize, which it
# traces, takes tangents by the last one.
_PLACES: dict[str, Any] = {
    "_vjp_with_argnums": eager_transforms,
    "_jvp_with_argnums": eager_transforms,
    "grad_and_value_impl": eager_transforms,
    "vmap_impl": apis,
    "safe_unpack_dual": eager_transforms,
}

# Size of the mapped dim, dim of each tensor that is mapped, the tensors, their structure; torch's errors.
batched_inputs = _process_batched_inputs
# A tree, such as ``out_dims``, as a list with one entry for each leaf of another; None if it does not fit.
flattened_like = _broadcast_to_and_flatten
sliced_arguments = eager_transforms._slice_argnums
replaced_arguments = eager_transforms._replace_args


def replace_transforms(wrapped: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put ``wrapped(name, function)`` in the place of each function that carries out transforms.

    torch.compile goes on to see torch's functions.
    """
    originals = {}

    def make(name: str, function: Callable[..., Any]) -> Any:
        new: Any = wrapped(name, function)
        new._torchdynamo_inline = function
        originals[new] = function
        return new

    for name, module in _PLACES.items():
        replace(f"{module.__name__}:{name}", partial(make, name))

    def keep_rules(rules: Callable[[], Any]) -> Callable[[], Any]:
        @cache
        def of_originals() -> Any:
            found = rules()
            for new in originals.keys() & found.keys():
                found[originals[new]] = found.pop(new)
            return found

        return of_originals

    replace("torch._dynamo.trace_rules:get_torch_obj_rule_map", keep_rules)


def traces_graph() -> bool:
    """Whether ``make_fx`` is recording what is called, as for ``torch.func.linearize``."""
    return get_proxy_mode() is not None


def innermost_transform() -> str:
    """The name of the innermost transform that is under way: "grad", "vmap", "jvp", "functionalize"."""
    return torch._C._functorch.peek_interpreter_stack().key().name.lower()


def first_node_after() -> int:
    """Nodes of autograd's that this thread makes from now on have this number or a greater one."""
    probe = torch.zeros((), requires_grad=True).view(())
    assert probe.grad_fn is not None
    return probe.grad_fn._sequence_nr()


def is_made_since(node: Any, number: int) -> bool:
    """Whether a node was made by an operator that was called since :func:`first_node_after` gave this number."""
    return number <= node._sequence_nr() and not hasattr(node, "variable")
