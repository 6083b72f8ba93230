"""Who waits for whom in any communication, also in that of FSDP2 and the program's own: warnings after some seconds.

A rank that has run fewer batches than another one waits in the collective after its loop, and the other one waits in a
collective of FSDP2. Each waits for the other, until a timeout that names nothing. This package starts neither
collective. So a thread looks now and then at where the main thread is. If the main thread has been in one collective of
torch's Python functions or of this package for some seconds, the thread says so in the store, reads what other ranks
have said there, and warns. The program goes on waiting, as another rank may be busy for minutes. The thread does not
see what Python does not wait for: the collectives of DDP in a backward pass, works that a program waits for itself, and
streams of accelerators.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any, NamedTuple
from weakref import ref

import torch.distributed as dist

from .callers import is_of_program
from .differences import by_rank
from .history import last_entry

PATIENCE = 5.0  # seconds between two looks: at the second one a rank says that it waits, from the third on it warns
_log = logging.getLogger("shardtensor")
_C10D = dist.distributed_c10d.__file__
_OWN = str(Path(__file__).with_name("waiting.py"))
_ASKED = 64  # of a large group, the next ranks
_TEXT = (
    "rank %d has waited for %.0f s in %s. The others: %s. It goes on waiting, until the timeout of the process group. "
    "Ranks that wait in different calls wait for each other: let all ranks run as many batches (drop the last one, or "
    "repeat it), and make the same calls"
)


class Wait(NamedTuple):
    """What a thread waits for.

    Attributes:
        work: of torch's, which is alive as long as the thread is in this call.
        place: the function and the line of the program.
    """

    work: ref[Any]
    place: str
    ranks: Sequence[int]


def wait_in(frames: Iterable[FrameType]) -> Wait | None:
    """In what communication these frames are, from the innermost one on, if they are in any."""
    name, work, group = "", None, None
    for frame in frames:
        file = frame.f_code.co_filename
        if file in (_C10D, _OWN):
            found = frame.f_locals
            work, group = work or found.get("work"), group or found.get("group")
            name = last_entry(group.group_name) if file == _OWN and group else frame.f_code.co_name
        elif is_of_program(file):
            if work is None:
                break
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            return Wait(ref(work), f"{name} ({file}:{frame.f_lineno})", ranks)
    return None


def _key(rank: int) -> str:
    return f"shardtensor/rank {rank} is blocked"


def blocked(store: Any, ranks: Iterable[int]) -> Iterator[tuple[int, str]]:
    """Which of these ranks have said that they wait, and where. RuntimeError where the store has gone."""
    for rank in ranks:
        if store.check([_key(rank)]) and (place := store.get(_key(rank)).decode()):
            yield rank, place


_looks: _Looks | None = None


def watch(rank: int, store: Any) -> None:
    """From here on this rank says where it waits for long."""
    global _looks
    if _looks is None:
        _looks = _Looks(rank, store)
        threading.Thread(target=_looks.go_on, daemon=True, name="shardtensor blocked").start()
    _looks.rank, _looks.store = rank, store


class _Looks:
    """What this rank says of itself, and what it has seen so far."""

    def __init__(self, rank: int, store: Any) -> None:
        self.rank, self.store = rank, store
        self.seen: Wait | None = None
        self.since = self.warned = 0.0
        self.times = 0  # that the same wait has been seen

    def go_on(self) -> None:
        while True:
            time.sleep(PATIENCE)
            with suppress(RuntimeError, ValueError, KeyError):  # the store or the groups have gone
                self.look()

    def look(self) -> None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        wait = wait_in(f for f, _ in walk_stack(frame)) if frame is not None else None
        del frame  # which holds tensors
        before, times, self.seen = self.seen, self.times, wait
        if wait is None or before is None or wait.work() is not before.work():
            self.since, self.times, self.warned = time.monotonic(), 0, 0.0
            if times:
                self.store.set(_key(self.rank), "")
            return
        self.times, waited = times + 1, time.monotonic() - self.since
        if self.times == 1:
            self.store.set(_key(self.rank), wait.place)
        elif waited > 2 * self.warned:
            self.warned = waited
            _log.warning(_TEXT, self.rank, waited, wait.place, self.others(wait))

    def others(self, wait: Wait) -> str:
        following = sorted(wait.ranks, key=lambda rank: (rank < self.rank, rank))[1:]
        asked = following[:_ASKED]
        texts = dict.fromkeys(asked, "in no communication that is seen here") | dict(blocked(self.store, asked))
        return by_rank({rank: texts[rank] for rank in sorted(texts)})
