"""The one place that moves pieces of shards between ranks.

[Note: exchange] An operator that needs more than its own shard states, for every rank along one mesh dim, which
interval of a tensor dim that rank *owns* and which it *needs*. From these two lists every rank computes all
transfers, so nothing but data travels: one packed message per peer, whatever the number of tensors and however
many ranks the interval spans. Ranks with empty shards take part like any other. When no rank of the group needs
anything from another, no communication is started, on any rank.

The same plan read backwards is the adjoint: gradients of the fetched pieces return to their owners, who add them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ._compat import c10d_all_to_all, is_lazy, process_group
from .debug import check_communication, debug_enabled
from .geometry import Interval, intersect, length
from .strides import as_bytes
from .tracing import graph_operator, is_traced

__all__ = ["Exchange", "Pending", "Transfers", "plan_intervals", "set_transport", "start_swap", "transport"]

Pieces = Sequence[Sequence[Tensor]]
Shapes = Sequence[Sequence[Sequence[int]]]
Part = tuple[int, Interval]  # a peer, and an interval that it sends or gets

_transport = "all_to_all"


class set_transport:  # named like torch.set_grad_enabled, which works alike
    """Choose how pieces of shards travel, from here on or inside a block. Every rank must choose alike.

    Args:
        name: "all_to_all" (the default): one ``all_to_all_single`` per exchange on the mesh dim's group; or "p2p":
            batched sends and receives with the peers that have something to exchange. Both move the same bytes in
            the same number of messages, and give bitwise the same results.

    Raises:
        ValueError: another name.

    Example:
        >>> import shardtensor
        >>> with shardtensor.set_transport("p2p"):
        ...     pass  # y = conv(x)
    """

    def __init__(self, name: str) -> None:
        global _transport
        if name not in ("all_to_all", "p2p"):
            raise ValueError(f"transport {name!r}: choose 'all_to_all' or 'p2p'")
        self._previous, _transport = _transport, name

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        global _transport
        _transport = self._previous


def transport() -> str:
    """The one that is chosen now."""
    return _transport


@dataclass(frozen=True, slots=True)
class Transfers:
    """Who sends which interval to whom along one mesh dim, as one rank sees it. All indices are global.

    Attributes:
        rank: this rank's index along the mesh dim.
        own, need: what this rank holds and what it needs.
        sends: ``(peer, interval)`` for each peer that needs a part of ``own``, in the order of ranks.
        recvs: ``(peer, interval)`` for each peer that owns a part of ``need``, in the order of ranks.
        active: whether any rank of the group sends anything; the same on all of them.
    """

    rank: int
    own: Interval
    need: Interval
    sends: tuple[Part, ...]
    recvs: tuple[Part, ...]
    active: bool


def plan_intervals(own: tuple[Interval, ...], need: tuple[Interval, ...], rank: int) -> Transfers:
    """Plan the transfers that give every rank ``r`` the interval ``need[r]``, where rank ``s`` owns ``own[s]``.

    Example:
        >>> p = plan_intervals(((0, 4), (4, 6), (6, 9)), ((0, 5), (3, 7), (5, 9)), rank=1)
        >>> p.sends, p.recvs
        (((0, (4, 5)), (2, (5, 6))), ((0, (3, 4)), (2, (6, 7))))
    """

    def parts(mine: Interval, theirs: Sequence[Interval]) -> tuple[Part, ...]:
        found = ((peer, intersect(mine, interval)) for peer, interval in enumerate(theirs) if peer != rank)
        return tuple((peer, part) for peer, part in found if length(part))

    return Transfers(
        rank=rank,
        own=own[rank],
        need=need[rank],
        sends=parts(own[rank], need),
        recvs=parts(need[rank], own),
        active=any(length(n) > length(intersect(o, n)) for o, n in zip(own, need, strict=True)),
    )


class Exchange:
    """A message to each peer that gets something: all that is known before there is data.

    Made once, with a plan; :meth:`start` then only packs and sends. A collective on ``group``: every rank starts it,
    also one that has nothing to send.

    Args:
        sends: ``(peer, shape)`` of each piece that this rank sends, peers in ascending order.
        recvs: ``(peer, shape)`` of each piece that it gets, likewise.
    """

    __slots__ = ("_group_name", "_received", "_recv_counts", "_recv_shapes", "_recv_sizes", "_send_counts")

    def __init__(
        self,
        sends: Sequence[tuple[int, Sequence[int]]],
        recvs: Sequence[tuple[int, Sequence[int]]],
        group: dist.ProcessGroup,
    ) -> None:
        # By name: an exchange may be kept longer than its process group, for the same ranks of another one.
        self._group_name = group.group_name
        self._send_counts, self._recv_counts = ([0] * group.size() for _ in range(2))
        for counts, messages in ((self._send_counts, sends), (self._recv_counts, recvs)):
            for peer, shape in messages:
                counts[peer] += math.prod(shape)
        self._recv_shapes = [list(shape) for _, shape in recvs]
        self._recv_sizes = [math.prod(shape) for _, shape in recvs]
        self._received = sum(self._recv_sizes)

    def start(self, pieces: Sequence[Tensor], like: Tensor) -> Pending:
        """Send the pieces, in the order of ``sends``; what is received has the dtype and device of ``like``.

        Returns at once. The pieces must keep their values until :meth:`Pending.wait`, which gives the received ones in
        the order of ``recvs``.
        """
        if len(pieces) == 1 and not is_lazy(pieces[0]):
            packed = pieces[0].contiguous().view(-1)
        else:
            packed = torch.cat([p.reshape(-1) for p in pieces]) if pieces else like.new_empty(0)
        return self._start(packed)

    def _start(self, packed: Tensor) -> Pending:
        sends, recvs = self._send_counts, self._recv_counts
        if type(packed) is not Tensor and is_traced(packed):
            received = _exchange(packed, sends, recvs, self._group_name)
            return Pending((), received, self._recv_shapes, self._recv_sizes, packed)
        dtype, group = packed.dtype, process_group(self._group_name)
        if debug_enabled():
            check_communication("exchange", dtype, sends, recvs, group, packed.device)
        received = packed.new_empty(self._received)
        if dtype in _TRANSFERABLE:
            works = _transfer(packed, received, sends, recvs, group)
        else:
            send_bytes, recv_bytes = ([n * dtype.itemsize for n in counts] for counts in (sends, recvs))
            works = _transfer(as_bytes(packed), received.view(torch.uint8), send_bytes, recv_bytes, group)
        return Pending(works, received, self._recv_shapes, self._recv_sizes, packed)


class Pending:
    """Pieces on their way."""

    __slots__ = ("_keep", "_received", "_shapes", "_sizes", "_works")

    def __init__(
        self,
        works: Sequence[dist.Work],
        received: Tensor,
        shapes: Sequence[Sequence[int]],
        sizes: Sequence[int],
        keep: Tensor,
    ) -> None:
        self._works, self._received, self._shapes, self._sizes = works, received, shapes, sizes
        self._keep = keep  # the send buffer has to live until the transfer is done

    def wait(self) -> list[Tensor]:
        """The received pieces, as views of one buffer."""
        for work in self._works:
            work.wait()
        if len(self._shapes) == 1:
            return [self._received.view(*self._shapes[0])]
        parts = self._received.split_with_sizes(self._sizes) if self._sizes else ()
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


def start_swap(pieces: Pieces, shapes: Shapes, group: dist.ProcessGroup, like: Tensor) -> Pending:
    """Send ``pieces[r]`` to rank ``r`` of ``group`` and receive tensors of ``shapes[s]`` from each rank ``s``.

    An :class:`Exchange` that is used once. All pieces have the dtype and device of ``like``.
    """
    sends = [(peer, p.shape) for peer, row in enumerate(pieces) for p in row]
    recvs = [(peer, shape) for peer, row in enumerate(shapes) for shape in row]
    return Exchange(sends, recvs, group).start([p for row in pieces for p in row], like)


# Dtypes that every backend knows in every collective. Others travel as bytes: nothing is computed on the way.
_TRANSFERABLE = frozenset({torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8})


def _transfer(
    packed: Tensor, received: Tensor, send_counts: list[int], recv_counts: list[int], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Send consecutive parts of ``packed`` to the ranks of ``group``, and receive such from them."""
    if _transport == "p2p":
        return _batched(received, packed, recv_counts, send_counts, group)
    return [c10d_all_to_all(received, packed, recv_counts, send_counts, group)]


@graph_operator(
    "exchange(Tensor packed, int[] send_counts, int[] recv_counts, str group) -> Tensor",
    lambda packed, send_counts, recv_counts, group: packed.new_empty(sum(recv_counts)),
)
def _exchange(packed: Tensor, send_counts: list[int], recv_counts: list[int], group: str) -> Tensor:
    """See [Note: communication in graphs] in tracing.py."""
    resolved = process_group(group)
    sends, recvs = ([(peer, (n,)) for peer, n in enumerate(counts)] for counts in (send_counts, recv_counts))
    pending = Exchange(sends, recvs, resolved)._start(packed)
    pending.wait()
    return pending._received


def _batched(
    out: Tensor, inp: Tensor, recv_counts: list[int], send_counts: list[int], group: dist.ProcessGroup
) -> list[dist.Work]:
    ops = []
    for transfer, buffer, counts in ((dist.isend, inp, send_counts), (dist.irecv, out, recv_counts)):
        for peer, part in enumerate(buffer.split_with_sizes(counts)):
            if part.numel():
                ops.append(dist.P2POp(transfer, part, dist.get_global_rank(group, peer), group))
    return dist.batch_isend_irecv(ops) if ops else []
