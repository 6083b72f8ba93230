"""The one place that moves pieces of shards between ranks.

An operator that needs more than its own shard states, for every rank along one mesh dim, which interval of a tensor dim
that rank *owns* and which it *needs*. From these two lists every rank computes all transfers, so nothing but data
travels: one packed message per peer, whatever the number of tensors and however many ranks the interval spans. Ranks
with empty shards take part like any other. When no rank of the group needs anything from another, no rank starts a
communication.

The same plan read backwards is the adjoint: gradients of the fetched pieces return to their owners, who add them.

All-to-all takes time in proportion to the number of ranks, whatever they have to say: backends post a message to each
rank, also an empty one, and on gloo a rank also waits for the ranks that it needs nothing from. So if each rank has
something to say to few others only, as with halos, messages go straight to these. All ranks must choose the same of the
two. They decide by the largest number of peers that any of them has (``most_peers``), which follows from the intervals
of all. What is kept for later calls is about the peers, too; counts for every rank are kept only for the exchanges that
are an all-to-all.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from .._compat import is_lazy, recomputed
from .._compat.c10d import c10d_all_to_all, c10d_messages, process_group
from ..context import Setting
from ..layout.intervals import Interval, intersect
from ..ranks.failures import lost
from ..ranks.groups import connect
from ..ranks.history import calling, here, record
from ..ranks.waiting import wait_for
from .tracing import after_start, goes_into_graph, graph_operator, no_ticket, ticket_for
from .tracing import wait as wait_in_graph

Transfer = tuple[int, Interval]  # a peer, and an interval that it sends or gets
_Counts = tuple[list[int], list[int]]  # peers in ascending order, and how many elements each sends or gets

_TRANSPORTS = ("auto", "all_to_all", "p2p")
_transport = Setting("auto", decides=False)
_FEW = 4  # messages go straight to the peers where these are less than a quarter of the ranks


class set_transport:  # named like torch.set_grad_enabled, which works alike
    """Choose how exchanges are sent, from now on or inside a block. Every rank must choose alike.

    The choice applies to the calling thread, and to the backward passes that this thread starts.

    Args:
        name: "all_to_all": one ``all_to_all_single`` per exchange in the group of the mesh dim. "p2p": batched sends
            and receives between peers. "auto" (the default): "p2p" if every rank has fewer peers than a quarter of the
            ranks in the group, and "all_to_all" otherwise. All send the same bytes in the same messages, and the
            results are bitwise equal.

    Raises:
        ValueError: another name.

    Example:
        >>> import shardtensor
        >>> with shardtensor.set_transport("p2p"):
        ...     pass  # y = conv(x)
    """

    def __init__(self, name: str) -> None:
        if name not in _TRANSPORTS:
            raise ValueError(f"transport {name!r}: choose 'auto', 'all_to_all' or 'p2p'")
        self._before = _transport.set(name)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        _transport.restore(self._before)


@dataclass(frozen=True, slots=True)
class Transfers:
    """Who sends which interval to whom along one mesh dim, as one rank sees it. All indices are global.

    Attributes:
        rank: this rank's index along the mesh dim.
        own, need: what this rank holds and what it needs.
        sends: ``(peer, interval)`` for each peer that needs a part of ``own``, in the order of ranks.
        recvs: ``(peer, interval)`` for each peer that owns a part of ``need``, in the order of ranks.
        most_peers: how many others the rank sends to, or gets from, that has most of them; the same on all ranks.
    """

    rank: int
    own: Interval
    need: Interval
    sends: tuple[Transfer, ...]
    recvs: tuple[Transfer, ...]
    most_peers: int

    @property
    def active(self) -> bool:
        """Whether any rank of the group sends anything; the same on all of them."""
        return self.most_peers > 0


def plan_intervals(own: Sequence[Interval], need: Sequence[Interval], rank: int) -> Transfers:
    """Plan the transfers that give every rank ``r`` the interval ``need[r]``, where rank ``s`` owns ``own[s]``.

    No two ranks own the same index.

    Example:
        >>> p = plan_intervals(((0, 4), (4, 6), (6, 9)), ((0, 5), (3, 7), (5, 9)), rank=1)
        >>> p.sends, p.recvs, p.most_peers
        (((0, (4, 5)), (2, (5, 6))), ((0, (3, 4)), (2, (6, 7))), 2)
    """
    owners = sorted((start, stop, s) for s, (start, stop) in enumerate(own) if stop > start)
    starts, stops = [start for start, _, _ in owners], [stop for _, stop, _ in owners]
    places = [-1] * len(own)  # of the ranks among the owners
    for i, (_, _, s) in enumerate(owners):
        places[s] = i
    # The places of those that own a part of what a rank needs.
    spans = [(bisect_right(stops, a), bisect_left(starts, b)) if b > a else (0, 0) for a, b in need]
    mine, place = own[rank], places[rank]
    first, last = spans[rank]
    recvs = sorted((s, intersect(need[rank], (start, stop))) for start, stop, s in owners[first:last] if s != rank)
    sends = [(r, intersect(mine, need[r])) for r, (i, j) in enumerate(spans) if i <= place < j and r != rank]
    return Transfers(rank, mine, need[rank], tuple(sends), tuple(recvs), _most_peers(owners, places, spans))


def _most_peers(owners: Sequence[tuple[int, int, int]], places: Sequence[int], spans: Sequence[tuple[int, int]]) -> int:
    to_itself = [first <= place < last for place, (first, last) in zip(places, spans, strict=True)]
    gets = max(last - first - itself for (first, last), itself in zip(spans, to_itself, strict=True))
    changes = [0] * (len(owners) + 1)  # of the number of ranks that need a part of an owner's, from the one before it
    for first, last in spans:
        changes[first] += 1
        changes[last] -= 1
    receivers = zip(accumulate(changes), owners, strict=False)
    return max(gets, max((n - to_itself[s] for n, (_, _, s) in receivers), default=0))


class Exchange:
    """A message to each peer that gets something: all that is known before there is data.

    Made once, with a plan; :meth:`start` then only packs and sends. A collective on ``group``: every rank starts it,
    also one that has nothing to send.

    Args:
        sends: ``(peer, shape)`` of each piece that this rank sends, peers in ascending order.
        recvs: ``(peer, shape)`` of each piece that it gets, likewise.
        most_peers: at least as many as any rank of the group has; the same on all of them, as it decides
            whether messages go straight to peers.

    Attributes:
        received: how many elements this rank gets.
    """

    def __init__(
        self,
        sends: Sequence[tuple[int, Sequence[int]]],
        recvs: Sequence[tuple[int, Sequence[int]]],
        group: dist.ProcessGroup,
        most_peers: int,
    ) -> None:
        # By name: an exchange may be kept longer than its process group, for the same ranks of another one.
        self._group_name = group.group_name
        self._sends, self._recvs = _counts(sends), _counts(recvs)
        self._recv_shapes = [list(shape) for _, shape in recvs]
        self._recv_sizes = [math.prod(shape) for _, shape in recvs]
        self.received = sum(self._recv_sizes)
        ranks = group.size()
        self._most_peers, self._few = most_peers, most_peers * _FEW < ranks
        self._by_rank = None if self._few else (_spread(self._sends, ranks), _spread(self._recvs, ranks))

    def split(self, buffer: Tensor) -> list[Tensor]:
        """The received pieces, as views of what :meth:`Pending.buffer` gave."""
        if len(self._recv_shapes) == 1:
            return [buffer.view(*self._recv_shapes[0])]
        parts = buffer.split_with_sizes(self._recv_sizes) if self._recv_sizes else ()
        return [part.view(shape) for part, shape in zip(parts, self._recv_shapes, strict=True)]

    @recomputed()
    def start(self, pieces: Sequence[Tensor], like: Tensor) -> Pending:
        """Send the pieces, in the order of ``sends``; what is received has the dtype and device of ``like``.

        Returns at once. The pieces must keep their values until :meth:`Pending.wait`, which gives the received ones in
        the order of ``recvs``.
        """
        if len(pieces) == 1 and not is_lazy(pieces[0]):
            packed = pieces[0].contiguous().view(-1)
        else:
            packed = _packed(pieces) if pieces else like.new_empty(0)
        if type(packed) is not Tensor and goes_into_graph(packed):
            ticket = _exchange(packed, *self._sends, *self._recvs, self._most_peers, self._group_name, here.operator)
            return _PendingInGraph(self, (), None, ticket, packed)
        group = process_group(self._group_name)
        chosen = _transport.value
        direct = self._few if chosen == "auto" else chosen == "p2p"
        kind = "exchange by messages" if direct else "exchange"
        record(self._group_name, kind, packed.dtype)
        received = packed.new_empty(self.received)
        out, inp = received, packed
        if packed.dtype not in _TRANSFERABLE:  # a row of bytes for each element
            out, inp = received.unsqueeze(-1).view(torch.uint8), packed.unsqueeze(-1).view(torch.uint8)
        try:
            if direct:
                connect(group, out.device)
                works = c10d_messages(_by_peer(out, self._recvs), _by_peer(inp, self._sends), group)
            else:
                # By the counts of every rank; they are not kept where messages usually go straight to peers.
                n = group.size()
                counts, gets = self._by_rank or (_spread(self._sends, n), _spread(self._recvs, n))
                works = [c10d_all_to_all(out, inp, gets, counts, group)]
        except RuntimeError as error:
            raise lost(group, error) from error
        return Pending(self, works, group, received, packed, None if direct else received)


def _packed(pieces: Sequence[Tensor]) -> Tensor:
    """The pieces in one dim, one after the other. Each is copied once, however it lies in memory."""
    if all(p.is_contiguous() for p in pieces) or any(type(p) is not Tensor or is_lazy(p) for p in pieces):
        return torch.cat([p.reshape(-1) for p in pieces])
    first, sizes = pieces[0], [p.numel() for p in pieces]
    packed = first.new_empty(sum(sizes))
    if all(p.shape == first.shape for p in pieces):  # one kernel
        torch.cat(list(pieces), out=packed.view(len(pieces) * first.shape[0], *first.shape[1:]))
        return packed
    for place, piece in zip(packed.split_with_sizes(sizes), pieces, strict=True):
        place.view(piece.shape).copy_(piece)
    return packed


class Pending:
    """Pieces on their way."""

    __slots__ = ("_exchange", "_group", "_keep", "_polled", "_received", "_works")

    def __init__(
        self,
        exchange: Exchange,
        works: Sequence[dist.Work],
        group: dist.ProcessGroup | None,
        received: Tensor,
        keep: Tensor,
        polled: Tensor | None = None,
    ) -> None:
        self._exchange, self._works, self._group, self._polled = exchange, works, group, polled
        self._received = received
        self._keep = keep  # the send buffer has to live until the transfer is done

    def wait(self, after: Tensor | None = None) -> list[Tensor]:
        """The received pieces, as views of one buffer.

        Args:
            after: what was computed since the start, if anything: a compiler must not wait before it.
        """
        return self._exchange.split(self.buffer(after))

    def meanwhile(self, operand: Tensor) -> Tensor:
        """A small operand of what is to be computed until :meth:`wait`: no compiler may do so before the start."""
        return operand

    def buffer(self, after: Tensor | None = None) -> Tensor:
        """What :meth:`wait` gives, in the order of the ranks that it comes from, as one tensor of one dim."""
        for work in self._works:
            assert self._group is not None
            wait_for(work, self._polled, self._group)
        return self._received


class _PendingInGraph(Pending):
    """The same while a graph is traced; in place of what is received it has the ticket for it."""

    __slots__ = ()

    def meanwhile(self, operand: Tensor) -> Tensor:
        return after_start(operand, self._received)

    def buffer(self, after: Tensor | None = None) -> Tensor:
        return wait_in_graph(self._received, self._keep, [self._exchange.received], after)


# Dtypes that every backend knows in every collective. Others travel as bytes: nothing is computed on the way.
_TRANSFERABLE = frozenset({torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8})


def _counts(pieces: Sequence[tuple[int, Sequence[int]]]) -> _Counts:
    counts: dict[int, int] = {}
    for peer, shape in pieces:
        counts[peer] = counts.get(peer, 0) + math.prod(shape)
    return list(counts), list(counts.values())


def _spread(counts: _Counts, ranks: int) -> list[int]:
    """A number for each rank."""
    result = [0] * ranks
    for peer, n in zip(*counts, strict=True):
        result[peer] = n
    return result


def _by_peer(buffer: Tensor, counts: _Counts) -> list[tuple[int, Tensor]]:
    """The part of each peer, without empty ones: these are no messages."""
    peers, numbers = counts
    return [(peer, part) for peer, n, part in zip(peers, numbers, buffer.split_with_sizes(numbers), strict=True) if n]


@graph_operator(
    "exchange(Tensor packed, int[] send_to, int[] send_counts, int[] recv_from, int[] recv_counts, int most_peers, "
    "str group, str operator) -> Tensor",
    no_ticket,
)
def _exchange(
    packed: Tensor,
    send_to: list[int],
    send_counts: list[int],
    recv_from: list[int],
    recv_counts: list[int],
    most_peers: int,
    group: str,
    operator: str,
) -> Tensor:
    """See [Note: start and wait] in tracing.py."""
    sends = [(peer, (n,)) for peer, n in zip(send_to, send_counts, strict=True)]
    recvs = [(peer, (n,)) for peer, n in zip(recv_from, recv_counts, strict=True)]
    with calling(operator):
        return ticket_for(Exchange(sends, recvs, process_group(group), most_peers).start([packed], packed).buffer)
