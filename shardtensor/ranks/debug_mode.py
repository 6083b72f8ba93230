"""``SHARDTENSOR_DEBUG=1``: ranks compare what they are about to communicate, and raise alike where they would hang.

Whatever ShardTensors communicate then begins with the same small all-gather, which says what it is and where it was
called; so ranks that are about to do different things find out here. It is followed by one of how much is sent to whom.
This is off by default.
"""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from .callers import called_from
from .history import here, record
from .integer_rows import gather_rows, gather_texts

# The dict behind os.environ, which is asked once per communication: os.environ itself takes ten times as long.
_environment = os.environ._data  # type: ignore[attr-defined]
_NAME, *_OFF = (os.environ.encodekey(text) for text in ("SHARDTENSOR_DEBUG", "", "0"))


def debug_enabled() -> bool:
    """Whether ``SHARDTENSOR_DEBUG`` requests cross-rank checks. It must be the same on all ranks.

    Read on every call, so that a test or a debugger can set it in a running process.
    """
    value = _environment.get(_NAME)
    return value is not None and value not in _OFF


def check_call(what: str, group: dist.ProcessGroup, device: torch.device | str) -> None:
    """Compare which communication the ranks of ``group`` are about to start.

    Args:
        what: the same text on all ranks, whatever their shards are.

    Raises:
        RuntimeError: on all ranks, where they disagree; the text has what each is about to do, and its line of code.
    """
    family, lines = called_from()
    what = f"{what} in {family}" if family else what
    where = lines[0] if lines else "a thread without code of yours"
    # Checksums in place of texts: rows have the same length on every rank, whatever the ranks start.
    checksums = [zlib.crc32(text.encode()) for text in (what, "\n".join(lines))]
    rows = gather_rows(checksums, group, device)
    if all(row == checksums for row in rows.values()):
        return
    named = _named(f"{what}, at {where}", group, device)
    if len({kind for kind, _ in rows.values()}) > 1:
        raise RuntimeError(
            f"ranks do not agree on the next communication: {named}. Every rank must call the same operators in the "
            "same order, over the same transport"
        )
    warnings.warn(
        f"ranks start the same communication from different lines of code: {named}. If these "
        "lines do not do the same, numbers are mixed up",
        stacklevel=2,
    )


def _named(text: str, group: dist.ProcessGroup, device: torch.device | str) -> str:
    """The texts of all ranks, which all of them ask for."""
    texts = gather_texts(text, lambda row: gather_rows(row, group, device))
    ranks = dist.get_process_group_ranks(group)
    return "; ".join(f"rank {rank}: {each}" for rank, each in zip(ranks, texts.values()))


def begin(
    what: str,
    like: torch.Tensor,
    group: dist.ProcessGroup,
    elements: int = 0,
    counts: Callable[[], Sequence[Sequence[int]]] | None = None,
) -> None:
    """Note that this rank starts to communicate, before it does: the history is told, and under debug the other ranks.

    Args:
        what: its kind, such as "exchange" or "all-reduce sum".
        like: what is sent, or a tensor of its dtype and device.
        elements: how many every rank sends to each, where that is the same number.
        counts: gives the numbers of elements that go to each rank of the group, and come from each, where they differ.

    Raises:
        RuntimeError: on all ranks, where they disagree; the text names the ranks and what each is about to do.
    """
    record(group.group_name, what, like.dtype, elements)
    if _NAME not in _environment or not debug_enabled():
        return
    kind = f"{what} of {str(like.dtype).removeprefix('torch.')}"
    send, receive = ([elements] * group.size(),) * 2 if counts is None else counts()
    check_call(kind, group, like.device)
    rows = gather_rows([*send, *receive], group, like.device)
    ranks, n = dist.get_process_group_ranks(group), len(rows)
    for s in range(n):
        for r in range(n):
            sent, expected = rows[s][r], rows[r][n + s]
            if sent != expected:
                named = _named(here.operator or "a redistribution", group, like.device)
                raise RuntimeError(
                    f"{kind}: rank {ranks[s]} would send {sent} elements to rank {ranks[r]}, which expects {expected}. "
                    f"The ranks do not agree on the operator: {named}. Every rank must call it with the same "
                    "arguments, on ShardTensors of the same shape and sizes"
                )
