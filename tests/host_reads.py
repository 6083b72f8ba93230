"""What the host of a device would wait for, counted on CPUs: for tensors that the emulated device does not have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardtensor.communication import row_halos
from shardtensor.ops.linalg import sparse

_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_METHODS = ("tolist", "cpu", "numpy", "__array__")  # which on the CPU call no operator


class _Reads(TorchDispatchMode):
    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its operators on local tensors come here
        indexed = func._schema.name in ("aten::index", "aten::index_put", "aten::index_put_")
        masks = indexed and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        if masks or (not indexed and _READS & set(func.tags)):
            self._seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _compared_later(now: Tensor, before: Tensor, text: str = "") -> None:
    torch.ops.aten._assert_async.msg((now == before).all(), text)


def _counting(name: str, seen: Counter[str]) -> Callable[..., Any]:
    read = getattr(Tensor, name)

    def counting(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen[name] += 1
        return read(self, *args, **kwargs)

    return counting


@contextmanager
def host_reads() -> Iterator[Counter[str]]:
    """Count what reads values of tensors, or makes tensors of sizes that depend on values: operators and methods.

    Kept indices are compared as on devices, which report a difference later.
    """
    seen: Counter[str] = Counter()
    with ExitStack() as stack:
        for module in (row_halos, sparse):
            stack.enter_context(mock.patch.object(module, "check_unwritten", _compared_later))
        for name in _METHODS:
            stack.enter_context(mock.patch.object(Tensor, name, _counting(name, seen)))
        stack.enter_context(_Reads(seen))
        yield seen
