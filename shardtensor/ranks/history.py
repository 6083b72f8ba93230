"""What this process has communicated, in short, so that ranks notice when they have not done the same.

[Note: history] Backends pair what ranks send by its order alone. A rank that leaves out a step, or that catches an
exception which the others did not get, goes on with numbers of another step, and nothing says so. Every process
therefore counts what ShardTensors communicate in each group, and keeps a checksum over it: of kind, dtype, number of
elements where it is equal on all ranks, and the operator with its result's layout and its arguments. None of it depends
on the rank. Count and checksum travel with what ranks compare or read anyway (``item()``, ``from_local``,
``scatter_tensor``, ``full_tensor``, ``synchronize``, ``debug.check``). Where they differ, all ranks know it, and gather
what was last recorded, to show the first difference. That costs half a microsecond for each communication, and no
message.

[Note: first communication] A message of another size than a rank expects stops gloo. Other backends may wait for ever,
or take it for the expected one. So when something is communicated in a group for the first time, by its text, the
group's ranks compare count and checksum before it is sent. Whether it is the first time follows from the history alone,
so it is for all ranks or for none, unless they have not done the same. Then one rank compares and another communicates,
their messages do not match, and both wait. A rank that waits for longer than a second looks what the others wait for,
see [Note: failures] in failures.py. What all ranks have communicated before is not compared again: a header in front of
every message would cost as much as the message. ``SHARDTENSOR_DEBUG=1`` pays that: ranks then compare whenever they
record something. They record their lines of code, too, and warn where only these differ.

[Note: values] What plain tensors hold when they first meet ShardTensors is compared on the same occasions, and where an
operator communicates for the first time. It is kept next to the history, by the place in it and the lines of code. What
only one rank has noted is left out: ranks may use tensors for themselves, and a rank that has forgotten a plan notes
again what is not the first time to another. If the values are equal bit by bit, which is usual, nothing else is
compared; otherwise rounding errors are told from other differences. ``debug.check`` and ``DomainParallel`` note what
they are given in the same way, and have it compared at once.

[Note: one thread] Two threads that communicate in one group do so in an order that differs between ranks, and get each
other's numbers. No lock in this process could help: it knows nothing of the order on other ranks. So a group belongs to
the thread that communicates in it, and a second thread raises before it sends anything. From then on every thread that
uses the group raises, also one that waits at that moment, since ranks may notice at different times. A group passes to
another thread if its thread has ended, and inside of :func:`take_turns`. It also passes from the main thread, which may
have made what its threads use, as long as the main thread does not communicate any more while they live. A backward
pass belongs to the thread that called ``backward()``, in whatever thread autograd runs it.
"""

from __future__ import annotations

import json
import sys
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._compat import hidden_from_program
from ..context import caller_of_backward
from ..errors import ThreadConflict
from ..layout.caches import check_world, forgets
from .callers import called_from
from .debug_mode import NAME, debug_enabled, environment
from .differences import by_rank, first_difference
from .summaries import differ

WIDTH = 2  # integers of a fingerprint
_KEPT = 128  # entries, of which the first that differs is shown
_KNOWN = 4096  # of what has been communicated as much is known, before all of it is forgotten
_NAMED = 7  # of further tensors that differ
MOST_VALUES = 4096  # of these as many are kept until they are compared

# What to do where tensors differ.
SAME_VALUES = (
    "A plain tensor that meets ShardTensors is global, and the same on every rank. Call torch.manual_seed(seed) on all "
    "ranks before it is drawn or the model is made, or draw it from a torch.Generator with the same seed everywhere; "
    "send what one rank has read or made to the others (torch.distributed.broadcast; for weights "
    "shardtensor.parallel.synchronize(model, mesh)); make one ShardTensor of what differs on purpose "
    "(ShardTensor.from_local)"
)


# Part of the name of an operator in which ranks work one after the other.
IN_TURN = "in turn"


class _Here(threading.local):
    """What runs in a thread.

    Attributes:
        operator: who runs one sets it, and afterwards what was there before. Communication outside of one has none: its
            kind says what it is.
        refused: the text of the last refusal below autograd. TorchScript, which may have called it, loses it.
    """

    operator = ""
    refused = ""


class _ObservedHere(_Here):
    """The same while changes of the operator are observed."""

    @property
    def operator(self) -> Any:
        return self.__dict__.get("operator", "")

    @operator.setter
    def operator(self, name: str) -> None:
        before, self.__dict__["operator"] = self.operator, name
        if _observer is not None:
            _observer(before, name)


here = _Here()
_observer: Callable[[str, str], None] | None = None


class _Value(NamedTuple):
    """A tensor that was noted.

    Attributes:
        key: where in the history and in the program.
        what: what it is; the same on all ranks.
        shape: as a text.
    """

    key: str
    what: str
    shape: str
    tolerance: float
    summary: Any


class _Log:
    """One group's communication."""

    __slots__ = ("checksum", "count", "entries", "known", "lines", "thread", "values")

    def __init__(self) -> None:
        self.count = self.checksum = 0
        self.known: dict[tuple[Any, ...], bytes] = {}  # what has been communicated, as a text
        self.thread = 0  # whose it is, see [Note: one thread]
        # Each with the checksum before it and, when debugging, the line of code.
        self.entries: deque[tuple[int, bytes, str]] = deque(maxlen=_KEPT)
        self.lines: list[str] = []  # that led to the last entry, when debugging
        self.values: deque[_Value] = deque(maxlen=MOST_VALUES)


_logs: dict[str, _Log] = {}
forgets(_logs.clear)
# What others have called whenever this rank is about to communicate in a group for the first time, and
at_first: list[Callable[[], None]] = []
# before it communicates, each time; it raises where it must not; and
before_each: list[Callable[[], None]] = []
# where the ranks of a group, by its name, have to compare what they have done; told whether values, too. See
# [Note: first communication].
at_comparison: list[Callable[[str, bool], None]] = []


def forget_history() -> None:
    """Count anew. All ranks do so at the same point of the program, or none."""
    _logs.clear()


def record(group: str, kind: str, dtype: Any = None, elements: int = 0, *, compares: bool = False) -> None:
    """Note that this rank starts to communicate, or what all ranks of a group do alike, though nothing is sent.

    Args:
        group: the group's name.
        kind: what is sent; or what is done, where there is no ``dtype``.
        elements: how many, where it is the same number on every rank.
        compares: it tells count and checksum itself, in rows that are as long for all dtypes and operators.
    """
    log = _logs.get(group) or _log(group)
    known: bytes | None
    if dtype is None:
        text = known = kind.encode()
    else:
        if before_each:
            for check in before_each:
                check()
        key = kind, dtype, elements, here.operator
        known = log.known.get(key)
        text = known or _communication(*key)
    if log.thread != get_ident():
        _pass_on(group, log)
    debugs, line = NAME in environment and debug_enabled(), ""
    if debugs:
        log.lines = called_from()
        line = log.lines[0] if log.lines else "a thread without code of yours"
    log.entries.append((log.checksum, text, line))
    log.count += 1
    log.checksum = zlib.crc32(text, log.checksum)
    new = False
    if known is None:
        if len(log.known) >= _KNOWN:
            log.known.clear()
        log.known[key] = text
        new = not compares or (kind, elements) not in log.known
        log.known[kind, elements] = b""
    if new or debugs:
        for compare in at_comparison:
            compare(group, not compares)


def note_values(group: str, where: str, what: str, shape: Sequence[int], tolerance: float, summary: Tensor) -> None:
    """Note what a tensor holds, to be compared where other ranks do at the same place. See [Note: values].

    Args:
        where: the lines of code, as a text; or anything that is the same on the ranks that are to be compared.
        what: what it is, and in which operator.
        tolerance, summary: see summaries.py.
    """
    log = _log(group)
    log.values.append(_Value(f"{log.count} {where}", what, str(tuple(shape)), tolerance, summary))


def forget_values(summary: Tensor) -> None:
    """Forget what was noted with this summary."""
    for log in _logs.values():
        log.values = deque((value for value in log.values if value.summary is not summary), MOST_VALUES)


def values_compared(group: str) -> None:
    """Forget what was noted of values. All ranks of the group do so at the same point of the program."""
    if group in _logs:
        _logs[group].values.clear()


def _log(group: str) -> _Log:
    log = _logs.get(group)
    if log is None:
        check_world()  # what is of another world goes now, and not later on some ranks only, with this
        log = _logs[group] = _Log()
        for function in at_first:
            function()
    return log


def _communication(kind: str, dtype: Any, elements: int, operator: str) -> bytes:
    number = f"{elements} " if elements else ""
    what = f"{kind} of {number}{str(dtype).removeprefix('torch.')}"
    return (f"{what} in {operator}" if operator else what).encode()


@contextmanager
def observed(observer: Callable[[str, str], None]) -> Iterator[None]:
    """Inside the block ``observer`` is told of each change of the operator that runs: the one before, and the new."""
    global _observer
    _observer, here.__class__ = observer, _ObservedHere
    try:
        yield
    finally:
        _observer, here.__class__ = None, _Here


@contextmanager
def calling(name: str, *, whoever_calls: bool = False) -> Iterator[None]:
    """Inside the block this operator runs, unless another one does that calls it and is not to be known."""
    before = here.operator
    here.operator = name if whoever_calls else before or name
    try:
        yield
    finally:
        here.operator = before


def fingerprint(group: str, with_values: bool = True) -> tuple[int, int]:
    """How often this rank has communicated in the group, and a checksum over it and the values that were noted."""
    log = _logs.get(group)
    if log is None:
        return 0, 0
    noted = with_values and log.values
    return log.count, zlib.crc32(repr(_values(log)).encode(), log.checksum) if noted else log.checksum


def last_lines(group: str) -> list[str]:
    """The lines of code that led to what this rank has begun last, innermost first, when debugging."""
    return _log(group).lines


def _values(log: _Log) -> list[_Value]:
    """What was noted, read from its devices."""
    for device in {v.summary.device for v in log.values if isinstance(v.summary, Tensor)}:
        there = [i for i, v in enumerate(log.values) if isinstance(v.summary, Tensor) and v.summary.device == device]
        with hidden_from_program():
            read = torch.stack([log.values[i].summary for i in there]).tolist()
        for i, numbers in zip(there, read, strict=True):
            log.values[i] = log.values[i]._replace(summary=numbers)
    return list(log.values)


def counts() -> dict[str, int]:
    """How often this rank has communicated, by group."""
    return {name: log.count for name, log in _logs.items()}


def last_entry(group: str) -> str:
    """What this rank has begun last."""
    log = _logs.get(group)
    return log.entries[-1][1].decode() if log is not None and log.entries else here.operator or "communication"


def as_text(group: str) -> str:
    """What this rank tells the others of the group where fingerprints differ: its last entries and values."""
    log = _logs.get(group, _Log())
    first = log.count - len(log.entries)
    entries = [(first + i, checksum, text.decode(), line) for i, (checksum, text, line) in enumerate(log.entries)]
    return json.dumps([log.count, log.checksum, entries, _values(log)])


class _Told:
    """What a rank has told by :func:`as_text`.

    Attributes:
        state: count and checksum.
        entries: what it has done, by number.
        before: the checksum before each.
        lines: where each was called.
        values: what it has noted at each place, in order.
    """

    def __init__(self, text: str) -> None:
        *state, entries, values = json.loads(text)
        self.state = tuple(state)
        self.entries = {number: what for number, _, what, _ in entries}
        self.before = {number: checksum for number, checksum, _, _ in entries}
        self.lines = {number: f" ({line})" if line else "" for number, _, _, line in entries}
        self.values: dict[tuple[str, str], list[_Value]] = {}
        for value in map(_Value._make, values):
            self.values.setdefault((value.key, value.what), []).append(value)


def difference(texts: Mapping[int, str], *, finished: bool = True) -> str | None:
    """What ranks of a group have done differently, by what each has told; None if nothing, or nothing but rounding.

    Args:
        finished: all have come as far. Otherwise only what all of them have told of counts.
    """
    told = {rank: _Told(text) for rank, text in texts.items()}
    common = sorted(set.intersection(*(set(one.entries) for one in told.values())))
    if finished:
        same = len({one.state for one in told.values()}) == 1
    else:
        same = all(len({(one.before[n], one.entries[n]) for one in told.values()}) == 1 for n in common)
    if same:
        return _first_unequal(told) if finished else None
    total = by_rank({rank: f"{one.state[0]} times" for rank, one in told.items()})
    return (
        f"the ranks have not done the same ({total}): {_first_entry(told, common)}. Every rank must call the same "
        "operators in the same order, with the same plain values. Look for an operator, or a step, that only some "
        "ranks call, for an exception that only some of them caught, for weights that differ "
        "(shardtensor.parallel.synchronize), and for random generators that do (torch.manual_seed). All numbers since "
        "then may be wrong"
    )


def _first_entry(told: Mapping[int, _Told], common: Sequence[int]) -> str:
    """The first entry that differs; ``common`` are the numbers of those that all have told of."""
    if not common or len({one.before[common[0]] for one in told.values()}) > 1:
        return "this happened earlier than what is kept"
    found = first_difference(
        {rank: {n: text for n, text in one.entries.items() if n >= common[0]} for rank, one in told.items()}
    )
    assert found is not None
    number, texts = found
    return f"number {number} was {by_rank({r: text + told[r].lines.get(number, '') for r, text in texts.items()})}"


def _first_unequal(told: Mapping[int, _Told]) -> str | None:
    """Which tensors differ, of those that several ranks have noted at one place; None: none, but for rounding."""
    found: list[dict[int, _Value]] = []
    for at in dict.fromkeys(at for one in told.values() for at in one.values):
        having = {rank: one.values[at] for rank, one in told.items() if at in one.values}
        # Where a rank has noted more than another, it has other plans: those of a shard without elements, say.
        for values in zip(*having.values()) if len(set(map(len, having.values()))) == 1 else ():
            one = values[0]
            if any(v.shape != one.shape for v in values) or differ([v.summary for v in values], one.tolerance):
                found.append(dict(zip(having, values)))
    if not found:
        return None
    what, *others = (next(iter(having.values())).what for having in found)
    shown = by_rank({r: f"{v.shape} with the digest {v.summary[0] % 2**64:016x}" for r, v in found[0].items()})
    names = "; ".join(name.rstrip(",") for name in others[:_NAMED]) + "; ..." * (len(others) > _NAMED)
    more = f" (and {len(others)} more: {names})" if others else ""
    return f"tensors differ between ranks: {what} is {shown}{more}. {SAME_VALUES}. All numbers since then may be wrong"


# -- threads ----------------------------------------------------------------------------------------------------------

conflicts: dict[str, str] = {}  # what all threads raise that communicate in a group
forgets(conflicts.clear)
# Called where a thread is about to communicate in a group, by its name, that belongs to another one.
at_conflict: list[Callable[[str, ThreadConflict], None]] = []
_turn = threading.RLock()
_has_turn = 0
_WAITING = f"{__package__}.waiting"


def check_conflict(group: str) -> None:
    """ThreadConflict where two threads have communicated in the group."""
    if group in conflicts:
        raise ThreadConflict(conflicts[group])


@contextmanager
def take_turns() -> Iterator[None]:
    """Let several threads communicate on one mesh, one at a time, each inside this block.

    Without this context, only one thread may communicate on a mesh. All ranks must enter the blocks in the same order.
    In a server, let rank 0 choose the next request, and tell the others. Blocks may be nested. A thread waits at the
    start of its block until all other threads have left theirs.

    Example:
        >>> import shardtensor
        >>> def answer(request):
        ...     with shardtensor.take_turns():
        ...         return request  # model(request)
        >>> answer(3)
        3
    """
    global _has_turn
    with _turn:
        before, _has_turn = _has_turn, get_ident()
        try:
            yield
        finally:
            _has_turn = before


def _pass_on(group: str, log: _Log) -> None:
    """Make the group this thread's, or raise, see [Note: one thread]."""
    check_conflict(group)
    mine, owner = caller_of_backward(), log.thread
    if mine == owner:
        return
    threads = {thread.ident: thread for thread in threading.enumerate()}
    if mine not in threads:
        return  # one of autograd's, for a thread that has not called any operator
    main = threading.main_thread().ident
    if owner not in threads or mine == _has_turn or (owner == main and not _waits(owner, group)):
        log.thread = mine
        return
    said = (
        f"two threads communicate in the process group {group}: thread {threads[mine].name!r}, in "
        f"{here.operator or 'no operator'}, after thread {threads[owner].name!r}, which is alive. Other ranks may run "
        "them in another order, and each would get the other's numbers; what either of them has computed since the "
        "other began may be wrong. Nothing can be communicated in this group any more. Remedy: make all calls from one "
        "thread, or end one before the next; give each thread a mesh with a process group and a name of its own "
        "(DeviceMesh.from_group(torch.distributed.new_group(), ..., mesh_dim_names=...)); or call inside of "
        "shardtensor.take_turns(), in the same order on all ranks"
    )
    conflicts[group], log.thread = said, -1
    for function in at_conflict:
        function(group, ThreadConflict(said))
    raise ThreadConflict(said)


def _waits(thread: int, group: str) -> bool:
    """Whether another thread waits for what it has started in the group."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        waited_for = frame.f_locals.get("group") if frame.f_globals.get("__name__") == _WAITING else None
        if getattr(waited_for, "group_name", None) == group:
            return True
        frame = frame.f_back
    return False
