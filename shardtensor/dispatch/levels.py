"""Where ShardTensors meet the levels of ``torch.func``: the error that has a transform carried out by autograd instead.

[Note: levels] torch.func works by levels. Inside a transform's function tensors are wrapped in others, of which nothing
tells above autograd what they hold: operators would reach shards below all levels, as torch's formulas have them, and
past the forms that they have here. So a call with a ShardTensor raises inside of a level, before anything is sent, on
every rank alike; and ``operators/transforms.py`` carries out the transform in another way.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._compat.functorch import innermost_transform
from ..errors import UnsupportedSharding, error_text
from .planning import flat

REMEDY = (
    "call torch.func.grad, vjp, jvp, jacrev, jacfwd, hessian or vmap outside of other transforms, or differentiate by "
    "torch.autograd.grad(..., create_graph=True), one gradient at a time"
)


class InsideLevels(UnsupportedSharding):
    """A ShardTensor is met inside of a transform that torch carries out by levels."""

    @staticmethod
    def at(op: Any, args: Any, kwargs: Any) -> InsideLevels:
        """The error for a call of ``op`` with these arguments."""
        operands = [a for a in flat(args, kwargs) if hasattr(a, "_spec")]
        reason = f"a ShardTensor is met inside a transform of torch's ({innermost_transform()}) that has no form for it"
        return InsideLevels(error_text(op, operands, reason, REMEDY))
