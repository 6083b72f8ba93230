"""A rank's shards on their way from the host to an accelerator, which computes meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ranks.streams import wait_for_streams


class Copies:
    """Copies from pinned memory on a stream of their own. On the CPU nothing is copied.

    Attributes:
        needed: whether the device is not the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.needed = device.type != "cpu"
        self._device = device
        self._stream = torch.Stream(device) if self.needed else None
        self._pinned: list[Tensor] = []  # what the copies under way read

    def memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialized memory of the host to copy from."""
        return torch.empty(shape, dtype=dtype, pin_memory=self.needed)

    def end_last(self) -> None:
        """Return when all copies have been made, and drop the memory that they have read."""
        if self._stream is not None:
            self._stream.synchronize()
            self._pinned.clear()

    def start(self, local: Tensor) -> Tensor:
        """What is in ``local``, a tensor of :meth:`memory`, on the device as soon as :meth:`wait` says so."""
        if self._stream is None:
            return local
        self._pinned.append(local)
        with self._stream:
            return torch.empty_like(local, device=self._device).copy_(local, non_blocking=True)

    def wait(self, copies: Sequence[Tensor]) -> None:
        """Let this thread's stream wait for ``copies``, all of the last ones. The host does not wait."""
        if self._stream is not None:
            wait_for_streams((self._stream,), copies)
