"""The one place that moves pieces of shards between ranks.

[Note: exchange] An operator that needs more than its own shard states, for every rank along one mesh dim, which
interval of a tensor dim that rank *owns* and which it *needs*. From these two lists every rank computes all
transfers, so nothing but data travels: one packed message per peer, whatever the number of tensors and however
many ranks the interval spans. Ranks with empty shards take part like any other. When no rank of the group needs
anything from another, no communication is started, on any rank.

The same plan read backwards is the adjoint: gradients of the borrowed pieces return to their owners, who add them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from ._compat import process_group
from .debug import check_communication, debug_enabled
from .geometry import Interval, intersect, length
from .tracing import graph_operator, is_traced

__all__ = ["Pending", "Plan", "plan_intervals", "set_transport", "start_swap"]

Pieces = Sequence[Sequence[Tensor]]
Shapes = Sequence[Sequence[Sequence[int]]]

_transport = "all_to_all"


def set_transport(name: str) -> str:
    """Choose how pieces travel; returns the previous choice. Every rank must choose alike.

    Args:
        name: "all_to_all" (default): one ``all_to_all_single`` per exchange on the mesh dim's group; or "p2p":
            batched sends and receives with the peers that have something to exchange. Both move the same bytes in
            the same number of messages, and give bitwise the same results.

    Raises:
        ValueError: another name.

    Example:
        >>> import shardtensor
        >>> previous = shardtensor.set_transport("p2p")
        >>> shardtensor.set_transport(previous)
        'p2p'
    """
    global _transport
    if name not in ("all_to_all", "p2p"):
        raise ValueError(f"transport {name!r}: choose 'all_to_all' or 'p2p'")
    previous, _transport = _transport, name
    return previous


@dataclass(frozen=True, slots=True)
class Plan:
    """Who sends which interval to whom along one mesh dim, as one rank sees it. All indices are global.

    Attributes:
        rank: this rank's index along the mesh dim.
        own, need: what this rank holds and what it needs.
        sends: per peer, the part of ``own`` that the peer needs (empty for itself and where there is none).
        recvs: per peer, the part of ``need`` that the peer owns.
        active: whether any rank of the group sends anything; the same on all of them.
    """

    rank: int
    own: Interval
    need: Interval
    sends: tuple[Interval, ...]
    recvs: tuple[Interval, ...]
    active: bool


@lru_cache(maxsize=4096)
def plan_intervals(own: tuple[Interval, ...], need: tuple[Interval, ...], rank: int) -> Plan:
    """Plan the transfers that give every rank ``r`` the interval ``need[r]``, where rank ``s`` owns ``own[s]``.

    Example:
        >>> p = plan_intervals(((0, 4), (4, 6), (6, 9)), ((0, 5), (3, 7), (5, 9)), rank=1)
        >>> p.sends, p.recvs
        (((4, 5), (0, 0), (5, 6)), ((3, 4), (0, 0), (6, 7)))
    """
    ranks = range(len(own))

    def part(owner: int, reader: int) -> Interval:
        piece = intersect(own[owner], need[reader])
        return piece if owner != reader and length(piece) else (0, 0)

    return Plan(
        rank=rank,
        own=own[rank],
        need=need[rank],
        sends=tuple(part(rank, r) for r in ranks),
        recvs=tuple(part(s, rank) for s in ranks),
        active=any(length(part(s, r)) for s in ranks for r in ranks),
    )


class Pending:
    """Pieces on their way: :meth:`wait` returns them, per peer, as views of one receive buffer."""

    def __init__(self, works: Sequence[dist.Work], received: Tensor, shapes: Shapes, keep: Tensor) -> None:
        self._works, self._received, self._shapes = works, received, shapes
        self._keep = keep  # the send buffer has to live until the transfer is done

    def wait(self) -> list[list[Tensor]]:
        """The received pieces, ``[peer][piece]``."""
        for work in self._works:
            work.wait()
        pieces, at = [], 0
        for shapes in self._shapes:
            row = []
            for shape in shapes:
                n = math.prod(shape)
                row.append(self._received[at : at + n].view(*shape))
                at += n
            pieces.append(row)
        return pieces


def start_swap(
    pieces: Pieces, shapes: Shapes, group: dist.ProcessGroup, *, dtype: torch.dtype, device: torch.device
) -> Pending:
    """Send ``pieces[r]`` to rank ``r`` of ``group`` and receive tensors of ``shapes[s]`` from each rank ``s``.

    A collective on ``group``: every rank calls it, also one that has nothing to send. All pieces have ``dtype``.
    Returns at once; the transfer runs until :meth:`Pending.wait`.
    """
    send_counts = [sum(p.numel() for p in row) for row in pieces]
    recv_counts = [sum(math.prod(s) for s in row) for row in shapes]
    flat = [p.reshape(-1) for row in pieces for p in row if p.numel()]
    packed = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device)
    if is_traced(packed):
        return Pending([], _exchange(packed, send_counts, recv_counts, group.group_name), shapes, packed)
    works, received = _start(packed, send_counts, recv_counts, group)
    return Pending(works, received, shapes, packed)


def _start(
    packed: Tensor, send_counts: list[int], recv_counts: list[int], group: dist.ProcessGroup
) -> tuple[list[dist.Work], Tensor]:
    """Send consecutive parts of ``packed`` to the ranks of ``group``, and receive such from them."""
    dtype = packed.dtype
    if debug_enabled():
        check_communication("exchange", dtype, send_counts, recv_counts, group, packed.device)
    received = packed.new_empty(sum(recv_counts))
    # Bytes: no backend knows every dtype in every collective, and nothing is computed on the way.
    out, inp = received.view(torch.uint8), packed.view(torch.uint8)
    send_counts, recv_counts = ([n * dtype.itemsize for n in counts] for counts in (send_counts, recv_counts))
    if _transport == "p2p":
        works = _batched(out, inp, recv_counts, send_counts, group)
    else:
        works = [dist.all_to_all_single(out, inp, recv_counts, send_counts, group=group, async_op=True)]
    return works, received


@graph_operator(
    "exchange(Tensor packed, int[] send_counts, int[] recv_counts, str group) -> Tensor",
    lambda packed, send_counts, recv_counts, group: packed.new_empty(sum(recv_counts)),
)
def _exchange(packed: Tensor, send_counts: list[int], recv_counts: list[int], group: str) -> Tensor:
    """See [Note: communication in graphs] in tracing.py."""
    works, received = _start(packed, send_counts, recv_counts, process_group(group))
    for work in works:
        work.wait()
    return received


def _batched(
    out: Tensor, inp: Tensor, recv_counts: list[int], send_counts: list[int], group: dist.ProcessGroup
) -> list[dist.Work]:
    ops = []
    for transfer, buffer, counts in ((dist.isend, inp, send_counts), (dist.irecv, out, recv_counts)):
        for peer, part in enumerate(buffer.split(counts)):
            if part.numel():
                ops.append(dist.P2POp(transfer, part, dist.get_global_rank(group, peer), group))
    return dist.batch_isend_irecv(ops) if ops else []
