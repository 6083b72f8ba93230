"""Where ShardTensors meet the levels of ``torch.func``: the error that has a transform carried out by autograd instead.

Inside a transform's function torch.func wraps tensors in other tensors, one level for each transform. Above autograd
these do not tell what they hold. Operators would reach shards below all levels, as torch's formulas have them, and past
the forms that they have here. So a call with a ShardTensor inside of a level raises, before anything is sent, on every
rank alike, and ``operators/transforms.py`` carries out the transform in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._compat import transforms_active
from .._compat.functorch import innermost_transform, unpack_dual
from ..errors import UnsupportedSharding, error_text, refuse
from .planning import converted, flat
from .registry import register
from .size_errors import writes

REMEDY = (
    "call torch.func.grad, vjp, jvp, jacrev, jacfwd, hessian or vmap outside of other transforms, or differentiate by "
    "torch.autograd.grad(..., create_graph=True), one gradient at a time"
)


class InsideLevels(UnsupportedSharding):
    """A ShardTensor is met inside of a transform that torch carries out by levels."""

    @staticmethod
    def at(op: Callable[..., Any] | str, args: Iterable[Any], kwargs: Mapping[str, Any]) -> InsideLevels:
        """The error for a call of ``op`` with these arguments."""
        operands = [a for a in flat(args, kwargs) if hasattr(a, "_spec")]
        reason = f"a ShardTensor is met inside a transform of torch's ({innermost_transform()}) that has no form for it"
        return InsideLevels(error_text(op, operands, reason, REMEDY))


# -- dual tensors ------------------------------------------------------------------------------------------------------

# The Jacobian-vector product of a function: what operators/transforms.py makes of its gradient.
Push = Callable[[Callable[..., Any], tuple[Tensor, ...], tuple[Tensor, ...]], Any]
_push: list[Push] = []
# What is about the dual tensors themselves.
_OF_DUALS = (
    *("_make_dual", "_unpack_dual", "_fw_primal"),
    *("__get__", "__set__", "__repr__", "requires_grad_", "is_inference"),
)


def pushes_forward(push: Push) -> Push:
    """Decorator of the function that gives Jacobian-vector products."""
    _push.append(push)
    return push


def carried_out(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a call inside of ``forward_ad.dual_level`` with its tangent; NotImplemented where it has none.

    Raises:
        InsideLevels: the call is inside of a level of torch.func.
    """
    if transforms_active():
        raise InsideLevels.at(func, args, kwargs)
    name = getattr(func, "__name__", "")
    if name in _OF_DUALS:
        return NotImplemented
    primals: list[Tensor] = []
    tangents: list[Tensor] = []
    places: dict[int, int] = {}
    for a in flat(args, kwargs):
        if isinstance(a, Tensor) and id(a) not in places:
            primal, tangent = unpack_dual(a)
            if tangent is not None:
                places[id(a)] = len(primals)
                primals.append(primal)
                tangents.append(tangent)
    if not primals:
        return NotImplemented
    if writes(func):
        reason = "it writes to a tensor where tangents are computed forward (torch.autograd.forward_ad)"
        raise refuse(name, [*primals], reason, "use the out-of-place form")

    def function(*values: Tensor) -> Any:
        def convert(a: object) -> object:
            return values[places[id(a)]] if isinstance(a, Tensor) and id(a) in places else a

        new_args, new_kwargs = converted(convert, args, kwargs)
        return func(*new_args, **new_kwargs)

    return _push[0](function, tuple(primals), tuple(tangents))


@register(torch.ops.aten.is_same_size.default, torch.ops.aten._has_same_storage_numel.default)
def _is_same_size(self: Tensor, other: Tensor) -> bool:
    return self.shape == other.shape


@register(torch.ops.aten._new_zeros_with_same_feature_meta.default)
def _tangent_for(self: Tensor, other: Tensor, *, self_num_batch_dims: int = 0) -> Tensor:
    """What torch copies the tangent of a view to, on ranks whose view begins elsewhere in its memory."""
    return torch.zeros_like(self)
