"""How much a program copies, and in which order it sends, computes and waits: counted, not timed."""

from __future__ import annotations

from collections import Counter
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

from shardtensor import ShardTensor
from shardtensor.communication.exchange import Pending

COPIES = {"aten::cat", "aten::clone", "aten::copy_", "aten::narrow_copy", "aten::constant_pad_nd", "aten::_to_copy"}


class Copied(TorchDispatchMode):
    """Inside of its block, counts the elements that operators on local tensors copy.

    Attributes:
        elements: by the operator's name.
        order: "send" for an exchange that is started, "wait" where it is waited for, and names of other operators.
    """

    def __init__(self):
        super().__init__()
        self.elements, self.order = Counter(), []

    @property
    def total(self):
        return sum(self.elements.values())

    def __enter__(self):
        buffer, order = Pending.buffer, self.order

        def waited(*args):
            order.append("wait")
            return buffer(*args)

        self.patch = mock.patch.object(Pending, "buffer", waited)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, ShardTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        self.order.append("send" if "alltoall" in name else name)
        if name in COPIES:
            self.elements[name] += result.numel()
        return result
