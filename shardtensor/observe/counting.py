"""Count what this rank sends and receives, point-to-point messages included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._compat import OpOverload, TorchDispatchMode
from ._compat import group_of, without_graphs

# What c10d and its functional operators call differently: names that contain one of these, with or without "_".
_KINDS = ("all_gather", "all_reduce", "barrier", "reduce_scatter")
_NO_COMMUNICATION = {"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"}
_ANY_SOURCE = -1  # a receive from any rank does not know its peer

# What is called instead of an operator: with it, its arguments and those by name.
Call = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]


@dataclass
class Communication:
    """The communication of one rank, as :func:`count_communication` counts it.

    Attributes:
        messages: messages sent: point-to-point sends, and the non-empty pieces of an all-to-all for other ranks.
        bytes_sent: their bytes.
        received_messages: messages received.
        bytes_received: their bytes.
        sent_to: global rank -> bytes sent to it.
        received_from: global rank -> bytes received from it (-1: a receive from any source).
        collectives: name (``all_reduce``, ``all_gather``, ``all_to_all``, ...) -> number of calls.
        collective_bytes: bytes of this rank's operands of the collectives, except all-to-all, whose bytes are messages.
    """

    messages: int = 0
    bytes_sent: int = 0
    received_messages: int = 0
    bytes_received: int = 0
    sent_to: Counter[int] = field(default_factory=Counter)
    received_from: Counter[int] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)
    collective_bytes: int = 0

    def __add__(self, other: Communication) -> Communication:
        return Communication(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def include(self, other: Communication) -> None:
        """Add the counts of ``other``."""
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))

    def sent(self, group: dist.ProcessGroup, peer: int, size: int) -> None:
        """Add a message of ``size`` bytes to rank ``peer`` of ``group``."""
        if size and peer != group.rank():
            self.messages += 1
            self.bytes_sent += size
            self.sent_to[dist.get_global_rank(group, peer)] += size

    def received(self, group: dist.ProcessGroup, peer: int, size: int) -> None:
        """Add a message of ``size`` bytes from rank ``peer`` of ``group``."""
        if size and peer != group.rank():
            self.received_messages += 1
            self.bytes_received += size
            self.received_from[peer if peer == _ANY_SOURCE else dist.get_global_rank(group, peer)] += size

    def add(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Add one call of an operator of c10d, or of a functional one."""
        # Only trailing defaults are left out of a call. What is read here has none, but may be given by name.
        named = dict(zip((argument.name for argument in func._schema.arguments), args)) | dict(kwargs)
        args = [named[a.name] for a in func._schema.arguments if a.name in named]
        name = func._schema.name.split("::")[1]
        if name in ("send", "isend"):
            tensors, group, peer = (args[0], args[1], args[2]) if name == "send" else (args[0], args[3], args[1])
            self.sent(group_of(group), peer, _bytes(tensors))
        elif name in ("recv_", "irecv"):
            tensors, group, peer = (args[0], args[1], args[2]) if name == "recv_" else (args[0], args[3], args[1])
            self.received(group_of(group), peer, _bytes(tensors))
        elif name == "recv_any_source_":
            self.received(group_of(args[1]), _ANY_SOURCE, _bytes(args[0]))
        elif name == "batch_p2p_ops":
            for kind, peer, tensor in zip(args[0], args[1], args[3]):
                (self.sent if kind == "isend" else self.received)(group_of(args[4]), peer, _bytes(tensor))
        elif name in ("alltoall_base_", "all_to_all_single", "alltoall_"):
            self.collectives["all_to_all"] += 1
            self._add_all_to_all(name, args)
        elif name not in _NO_COMMUNICATION:
            short = name.replace("_", "")
            kind = next((k for k in _KINDS if k.replace("_", "") in short), name.removesuffix("_"))
            self.collectives[kind] += 1
            # c10d's in-place forms have the result first. Only one rank has a scatter's operand, so its result counts.
            has_output_first = func.namespace == "c10d" and kind in ("all_gather", "reduce_scatter", "gather")
            if kind != "barrier":
                self.collective_bytes += _bytes(args[1 if has_output_first else 0])

    def _add_all_to_all(self, name: str, args: Sequence[Any]) -> None:
        if name == "alltoall_":
            group = group_of(args[2])
            received, sent = [_bytes(t) for t in args[0]], [_bytes(t) for t in args[1]]
        elif name == "alltoall_base_":
            group = group_of(args[2])
            received, sent = _pieces(args[0], args[3], group), _pieces(args[1], args[4], group)
        else:
            group = group_of(args[3])
            sent = _pieces(args[0], args[2], group)
            row = args[0].element_size() * args[0].shape[1:].numel()
            received = [int(n) * row for n in args[1]]
        for peer, size in enumerate(sent):
            self.sent(group, peer, size)
        for peer, size in enumerate(received):
            self.received(group, peer, size)


@contextmanager
def count_communication() -> Iterator[Communication]:
    """Count this rank's messages, bytes and collectives inside the block, in forward and backward.

    It counts collectives of ``torch.distributed`` and functional ones, including those of DTensor and ShardTensor. It
    does not count empty messages and messages of a rank to itself. Compiled functions run eagerly inside the block.

    >>> def halo_bytes(conv, x):
    ...     with count_communication() as counted:
    ...         conv(x)
    ...     return counted.messages, counted.bytes_sent
    """
    counted = Communication()

    def count(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        counted.add(func, args, kwargs)
        return func(*args, **kwargs)

    with LocalCalls(count), without_graphs():
        yield counted


class LocalCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operators on local tensors inside its block: those of c10d, and all others.

    Args:
        communicate: is called instead of an operator of c10d, or a functional one, with it and its arguments.
        compute: likewise of all others; None: they run as they are. Those of higher order, which call functions, do.
    """

    supports_higher_order_operators = True

    def __init__(self, communicate: Call, compute: Call | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._communicate, self._compute = communicate, compute

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return self.on_shards(func, types, args, kwargs)
        if func.namespace in ("c10d", "_c10d_functional"):
            return self._communicate(func, args, kwargs)
        if self._compute is None or not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        return self._compute(func, args, kwargs)

    def on_shards(self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The subclass comes first: only what it does to its local tensors is of interest."""
        return NotImplemented


def _bytes(tensors: Tensor | Sequence[Any]) -> int:
    """Bytes of a tensor or of nested lists of them."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_bytes, tensors))


def _pieces(tensor: Tensor, splits: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """Bytes of each rank's piece of an all-to-all operand; an empty ``splits`` means even ones."""
    if not splits:
        return [_bytes(tensor) // group.size()] * group.size()
    row = tensor.element_size() * tensor.shape[1:].numel()
    return [int(n) * row for n in splits]
