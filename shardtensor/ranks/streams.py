"""Streams of a device: what is queued on one waits for what is queued on another only where it is told to.

On the CPU there are none. Written against torch's interface for any accelerator.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor


def current_stream(device: torch.device) -> torch.Stream | None:
    """The stream on which this thread queues its work on ``device``; None on the CPU."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


def wait_for_streams(streams: Collection[torch.Stream], tensors: Sequence[Tensor | None]) -> None:
    """Let this thread's stream wait for what is queued on ``streams`` so far, as that computes ``tensors``.

    Their memory, which may belong to one of these streams, is not used anew before what this thread's stream does with
    it is done. The host does not wait.
    """
    some = [t for t in tensors if t is not None]
    here = current_stream(some[0].device) if some else None
    others = [stream for stream in streams if stream != here]
    if here is not None and others:
        for stream in others:
            here.wait_stream(stream)
        for t in some:
            t.record_stream(here)
