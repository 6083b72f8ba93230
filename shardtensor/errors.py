"""The one exception for what cannot be done exactly on shards."""

from __future__ import annotations

__all__ = ["UnsupportedSharding", "refuse"]


class UnsupportedSharding(NotImplementedError):
    """An operator has no exact form for these shards; raised on every rank, before anything is sent.

    The text names the operator, the placements and sizes of its tensors, the reason and the remedy.
    It is also a :class:`NotImplementedError`, so callers that already handle "not on this tensor
    type" handle it too.

    Example:
        >>> import shardtensor
        >>> issubclass(shardtensor.UnsupportedSharding, NotImplementedError)
        True
    """


def describe(value: object) -> str:
    """One operand as an error shows it: its spec if it is sharded, its shape if it is plain."""
    spec = getattr(value, "_spec", value)
    if hasattr(spec, "placements"):
        return str(spec)
    if hasattr(value, "shape"):
        return f"plain tensor {tuple(value.shape)}"
    return repr(value)


def refuse(op: object, operands: object, reason: str, remedy: str) -> UnsupportedSharding:
    """Build (not raise) the exception for ``op`` on ``operands``, a tensor, a spec or a sequence of them."""
    name = op if isinstance(op, str) else getattr(op, "__name__", None) or str(op)
    items = operands if isinstance(operands, (list, tuple)) else [operands]
    shown = "; ".join(describe(item) for item in items)
    return UnsupportedSharding(f"{name}: {reason}. Operands: {shown}. Remedy: {remedy}.")
