"""``SHARDTENSOR_DEBUG=1``: ranks compare what they are about to communicate, and raise alike where they would hang.

This costs one small all-gather per communication, so it is off by default.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = ["check_communication", "debug_enabled"]


# The dict behind os.environ, which is asked once per communication: os.environ itself takes ten times as long.
_environment = os.environ._data  # type: ignore[attr-defined]
_NAME, *_OFF = (os.environ.encodekey(text) for text in ("SHARDTENSOR_DEBUG", "", "0"))


def debug_enabled() -> bool:
    """Whether ``SHARDTENSOR_DEBUG`` requests cross-rank checks. It must be the same on all ranks.

    Read on every call, so that a test or a debugger can set it in a running process.
    """
    value = _environment.get(_NAME)
    return value is not None and value not in _OFF


def check_communication(
    what: str,
    dtype: torch.dtype,
    send: Sequence[int],
    receive: Sequence[int],
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Compare the communication that the ranks of ``group`` are about to start.

    Args:
        what: its kind, such as "exchange" or "all_reduce sum".
        send, receive: numbers of elements per rank of the group.

    Raises:
        RuntimeError: on all ranks, where they disagree; the text names the ranks and what each is about to do.
    """
    kinds = f"{what} of {str(dtype).removeprefix('torch.')}"
    # A checksum in place of the text: rows of integers have the same length on every rank, whatever the ranks start.
    row = torch.tensor([zlib.crc32(kinds.encode()), *send, *receive], dtype=torch.int64, device=device)
    table = [torch.empty_like(row) for _ in send]
    dist.all_gather(table, row, group=group)
    rows = [t.tolist() for t in table]
    n = len(rows)
    ranks = dist.get_process_group_ranks(group)
    mine = dist.get_rank(group)
    for r, other in enumerate(rows):
        if other[0] != rows[0][0]:
            # A rank knows the text of its own checksum only.
            first, second = (kinds, "something else") if rows[mine][0] == rows[0][0] else ("something else", kinds)
            raise RuntimeError(
                f"ranks do not agree on the next communication: rank {ranks[0]} is about to start {first}, rank "
                f"{ranks[r]} {second}; every rank must call the same operators in the same order, over the same "
                "transport"
            )
    for s in range(n):
        for r in range(n):
            sent, expected = rows[s][1 + r], rows[r][1 + n + s]
            if sent != expected:
                raise RuntimeError(
                    f"{kinds}: rank {ranks[s]} would send {sent} elements to rank {ranks[r]}, which expects "
                    f"{expected}; the ranks' ShardTensors differ in shape or sizes"
                )
