"""Streams for tests on the CPU, which has none: what is queued on one is done when the host waits for it."""

from __future__ import annotations

import threading
import weakref
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardtensor.ranks import streams


class LateStream:
    """In place of a ``torch.Stream``. Of what runs inside ``with``, copies are queued, and write NaN until then."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._queue: list[_Copy] = []

    @property
    def queued(self) -> bool:
        return any(copy.source for copy in self._queue)

    def __enter__(self) -> None:
        self._mode = _Queueing(self._queue)
        self._mode.__enter__()

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)

    def wait_stream(self, other: LateStream) -> None:
        self._queue += other._queue

    def synchronize(self) -> None:
        for copy in self._queue:
            copy.run()
        self._queue.clear()


class _Copy:
    lock = threading.Lock()

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.target, self.source = target.fill_(float("nan")), weakref.ref(source)

    def run(self) -> None:
        with self.lock:
            if self.source is not None:
                source, self.source = self.source(), None
                assert source is not None, "memory that a copy is to read has gone"
                self.target.copy_(source)


class _Queueing(TorchDispatchMode):
    def __init__(self, queue: list[_Copy]) -> None:
        super().__init__()
        self._queue = queue

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is not torch.ops.aten.copy_.default:
            return function(*args, **(kwargs or {}))
        assert args[2:] == (True,), "a copy that the host waits for"
        self._queue.append(_Copy(*args[:2]))
        return args[0]


@contextmanager
def on_stream(current: LateStream, *modules):
    """Inside the block work is queued on this one, in the eyes of ``modules``, too.

    Gives what ``record_stream`` was told, by address.
    """
    recorded: dict[int, str] = {}
    with (
        ExitStack() as stack,
        mock.patch.object(torch.Tensor, "record_stream", lambda t, s: recorded.update({t.data_ptr(): s.name})),
    ):
        for module in (streams, *modules):
            stack.enter_context(mock.patch.object(module, "current_stream", lambda device: current))
        yield recorded
