"""What this process has communicated, in short, so that ranks notice when they have not done the same.

[Note: history] Backends pair what ranks send by its order alone. A rank that leaves out a step, or that catches an
exception which the others did not get, goes on with numbers of another step, and nothing says so. Every process
therefore counts what ShardTensors communicate in each group, and keeps a checksum over it: of kind, dtype, number of
elements where it is equal on all ranks, and the operator with its result's shape and cut. None of it depends on the
rank. Count and checksum travel with what ranks compare or read anyway (``item()``, ``from_local``, ``scatter_tensor``,
``full_tensor``, ``synchronize``, ``verify``), and where they differ, all ranks know it, and gather what was last
recorded, to show the first difference. That costs half a microsecond for each communication, and no message.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

from .caches import forgets

__all__ = [
    "WIDTH",
    "at_first",
    "calling",
    "check_before",
    "counts",
    "difference",
    "fingerprint",
    "forget_history",
    "last_entries",
    "last_entry",
    "observed",
    "operator",
    "record",
    "record_call",
    "set_operator",
]

Key = TypeVar("Key")

WIDTH = 2  # integers of a fingerprint
_KEPT = 128  # entries, of which the first that differs is shown

# The operator that runs. Communication outside of one has none: whether it is redistribution its kind says.
_operator = ""
_observer: Callable[[str, str], None] | None = None


class _Log:
    """One group's communication."""

    __slots__ = ("checksum", "count", "entries")

    def __init__(self) -> None:
        self.count = self.checksum = 0
        self.entries: deque[tuple[int, bytes]] = deque(maxlen=_KEPT)  # each with the checksum before it


_logs: dict[str, _Log] = {}
forgets(_logs.clear)
_at_first: list[Callable[[], None]] = []
_check: Callable[[], None] | None = None


def at_first(function: Callable[[], None]) -> None:
    """Have it called whenever this rank is about to communicate in a group for the first time."""
    _at_first.append(function)


def check_before(function: Callable[[], None]) -> None:
    """Have it called before this rank communicates, each time; it raises where it must not."""
    global _check
    _check = function


def forget_history() -> None:
    """Count anew. All ranks do so at the same point of the program, or none."""
    _logs.clear()


def record(group: str, kind: str, dtype: Any, elements: int = 0) -> None:
    """Note that this rank starts to communicate.

    Args:
        group: the group's name.
        elements: how many, where it is the same number on every rank.
    """
    if _check is not None:
        _check()
    _append(group, _communication(kind, dtype, elements, _operator))


def record_call(group: str, text: str) -> None:
    """Note what all ranks of the group do alike, though nothing is sent."""
    _append(group, text.encode())


def _append(group: str, text: bytes) -> None:
    log = _logs.get(group)
    if log is None:
        log = _logs[group] = _Log()
        for function in _at_first:
            function()
    log.entries.append((log.checksum, text))
    log.count += 1
    log.checksum = zlib.crc32(text, log.checksum)


@lru_cache(4096)
def _communication(kind: str, dtype: Any, elements: int, operator: str) -> bytes:
    number = f"{elements} " if elements else ""
    what = f"{kind} of {number}{str(dtype).removeprefix('torch.')}"
    return (f"{what} in {operator}" if operator else what).encode()


def operator() -> str:
    """The operator that runs, "" outside of one."""
    return _operator


def set_operator(name: str) -> str:
    """Change it, and return the one from before, to be set again."""
    global _operator
    previous, _operator = _operator, name
    if _observer is not None:
        _observer(previous, name)
    return previous


@contextmanager
def observed(observer: Callable[[str, str], None]) -> Iterator[None]:
    """Inside the block ``observer`` is told of each change of the operator that runs: the one before, and the new."""
    global _observer
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before


@contextmanager
def calling(name: str) -> Iterator[None]:
    """Inside the block this operator runs, unless another one does that calls it."""
    previous = set_operator(_operator or name)
    try:
        yield
    finally:
        set_operator(previous)


def fingerprint(group: str) -> tuple[int, int]:
    """How often this rank has communicated in the group, and a checksum over it."""
    log = _logs.get(group)
    return (0, 0) if log is None else (log.count, log.checksum)


def counts() -> dict[str, int]:
    """How often this rank has communicated, by group."""
    return {name: log.count for name, log in _logs.items()}


def last_entry(group: str) -> str:
    """What this rank has begun last."""
    log = _logs.get(group)
    return log.entries[-1][1].decode() if log is not None and log.entries else "communication"


def last_entries(group: str) -> list[tuple[int, int, str]]:
    """The last ones: number, checksum of all before it, text."""
    log = _logs.get(group, _Log())
    first = log.count - len(log.entries)
    return [(first + i, checksum, text.decode()) for i, (checksum, text) in enumerate(log.entries)]


def difference(
    fingerprints: Mapping[Key, Sequence[int]],
    group: str,
    rank_of: Callable[[Key], int],
    gather: Callable[[str], Mapping[Key, str]],
) -> str | None:
    """What ranks of a group have done differently; None where their fingerprints are equal.

    Args:
        fingerprints: every rank's; all ranks pass the same ones.
        gather: gathers a text from each rank; called by all ranks or by none.
    """
    if len({tuple(theirs) for theirs in fingerprints.values()}) == 1:
        return None
    lines = "\n".join(f"{number}\t{checksum}\t{text}" for number, checksum, text in last_entries(group))
    logs = {rank_of(key): _parsed(text) for key, text in gather(lines).items() if key in fingerprints}
    by_rank = {rank_of(key): theirs for key, theirs in fingerprints.items()}
    numbers = sorted(set.intersection(*(set(log) for log in logs.values())))
    total = _by_rank({rank: f"{fingerprint_[0]} times" for rank, fingerprint_ in by_rank.items()})
    return (
        f"the ranks have not done the same ({total}): {_first_difference(logs, numbers)}. Every rank must call the "
        "same operators in the same order, with the same plain values. Look for an operator, or a step, that only some "
        "ranks call, for an exception that only some of them caught, and for weights that differ "
        "(shardtensor.parallel.synchronize). All numbers since then may be wrong"
    )


def _first_difference(logs: Mapping[int, Mapping[int, tuple[int, str]]], numbers: Sequence[int]) -> str:
    """Where the logs differ first; ``numbers`` are those of the entries that all of them have."""
    if not numbers or len({log[numbers[0]][0] for log in logs.values()}) > 1:
        return "this happened earlier than what is kept"
    last = numbers[-1] + 1
    first = next((n for n in numbers if len({log[n][1] for log in logs.values()}) > 1), last)
    seen = {rank: log[first][1] if first in log else "not made" for rank, log in logs.items()}
    return f"number {first} was {_by_rank(seen)}"


def _parsed(text: str) -> dict[int, tuple[int, str]]:
    entries = (line.split("\t", 2) for line in text.split("\n") if line)
    return {int(number): (int(checksum), what) for number, checksum, what in entries}


def _by_rank(texts: Mapping[int, str]) -> str:
    having: dict[str, list[int]] = {}
    for rank, text in texts.items():
        having.setdefault(text, []).append(rank)
    return ", ".join(
        f"{text} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" for text, ranks in having.items()
    )
