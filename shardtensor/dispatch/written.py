"""Plain tensors that a network makes and writes sharded values to: ``out = torch.zeros(8, 4); out[:, :2] = x``.

[Note: written tensors] Nobody sees how such a tensor is made, and most that are made so stay plain: positions, masks,
counters. So nothing happens before a sharded value is written to one. Then it becomes a ShardTensor, replicated and
with an open layout, to which the value is written ([Note: open layouts]); as a plain tensor it counted as that before.

The object stays, since the program holds it. It cannot get the class ShardTensor, which has slots; it becomes a
:class:`WrittenTensor`, which has no memory of its own, and gives each call to the ShardTensor that it stands for.

Other tensors with the same memory would not see the write. Whether there are any, torch's count of them tells, which is
the same on all ranks of a program that does the same on all; what waits for Python's garbage collector, which may be at
another point on each rank, is collected first. Memory that came from elsewhere, such as an array's, is not counted. So
these are refused, and views, of which the whole tensor would have to be found, and leaves that require grad.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._compat import AutogradFunction, FakeTensor, exchange_memory, has_own_memory, tracing
from .conversions import is_shard_tensor, promote
from .open_layouts import leave_open
from .plain_tensors import writes
from .planning import converted, flat

if TYPE_CHECKING:
    from .tensor import ShardTensor

# Classes of plain tensors, but for parameters; previews have tensors without data.
PLAIN = frozenset({Tensor, FakeTensor})


class WrittenTensor(Tensor):
    """Stands for a ShardTensor where a program holds the plain tensor that it was, and says that it is one.

    Attributes:
        sharded: the ShardTensor. Its attributes and methods are this tensor's, too.
    """

    sharded: ShardTensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return call_on_sharded(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        return call_on_sharded(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["sharded"], name)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return repr(self.sharded)

    @property  # type: ignore[misc]
    def __class__(self) -> type[ShardTensor]:  # type: ignore[override]  # for isinstance()
        return type(self.sharded)


def call_on_sharded(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A call in which ShardTensors take the place of written tensors; one that returns its first operand does so."""
    first = args[0] if args and type(args[0]) is WrittenTensor else None
    args, kwargs = converted(lambda a: a.sharded if type(a) is WrittenTensor else a, args, kwargs)
    name = func.__name__
    if name == "__get__":  # of an attribute, which ShardTensor may define itself; and so with methods
        return getattr(args[0], func.__self__.__name__)  # type: ignore[attr-defined]
    if name == "__set__":
        result = setattr(args[0], func.__self__.__name__, args[1])  # type: ignore[attr-defined, func-returns-value]
    else:
        is_method = first is not None and getattr(Tensor, name, None) is func
        result = (getattr(type(args[0]), name) if is_method else func)(*args, **kwargs)
    if first is not None and (name == "__set__" or writes(func)):
        exchange_memory(first, _Standing.apply(first.sharded))  # what autograd knows of it has changed
    return first if first is not None and result is first.sharded else result


def write_to_plain(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An in-place function whose first argument is plain, and becomes a written tensor.

    NotImplemented where it cannot, or where nothing that is sharded is written.
    """
    written: Any = args[0]
    operands = [a for a in flat(args, kwargs) if is_shard_tensor(a)]
    if tracing() or all(a._spec.is_replicate() for a in operands):
        return NotImplemented
    mesh = operands[0]._spec.mesh
    if (written.requires_grad and written.is_leaf) or written.device.type != mesh.device_type:
        return NotImplemented
    if written.layout is not torch.strided or not _is_alone(written):
        return NotImplemented
    sharded = promote(written, mesh)
    leave_open(sharded)
    result = func(sharded, *args[1:], **kwargs)  # where it is refused, the tensor stays what it is
    exchange_memory(written, _Standing.apply(sharded))
    written.__class__ = WrittenTensor
    written.__dict__["sharded"] = sharded
    return written if result is sharded else result


def _is_alone(tensor: Tensor) -> bool:
    if not has_own_memory(tensor):
        gc.collect()
    return has_own_memory(tensor)


class _Standing(AutogradFunction):
    """A written tensor without the ShardTensor that it stands for, to whose graph it leads."""

    @staticmethod
    def forward(ctx: Any, sharded: ShardTensor) -> Any:
        meta = sharded._spec.tensor_meta
        return Tensor._make_wrapper_subclass(
            WrittenTensor, meta.shape, meta.stride, dtype=meta.dtype, device=sharded.device
        )

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad
