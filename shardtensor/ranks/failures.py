"""What ranks tell each other when they fail.

[Note: failures] When a rank dies, its peers learn from the transport that a connection was closed, or nothing at all
until a timeout. The peers of these ranks learn it from them. None of it names a rank. So each rank that fails says so
in the store by which the ranks found each other (torchrun's, which outlives its ranks; or that of rank 0): where it
was, what it waited for, what it raised. A rank whose communication fails, or takes longer than the process group's
timeout, looks there for some seconds. The ranks that have said nothing were killed, hang, or are out of reach. If the
store itself is on a host that is out of reach, nothing is heard of any rank. But whoever started the ranks has told
each of them how many ranks its host has. These have consecutive numbers, so a rank can say which ones are elsewhere.

A rank that raises inside of an operator, and whose program goes on, leaves the others waiting in that operator. A rank
that waits for longer than a second looks into the store now and then. If another rank has raised in the very operator,
after as many communications, there is nothing to wait for. If this rank has raised there, too, and went on, it keeps
waiting: the other rank may come later. The same holds for a backward pass, which may end on one rank before it comes to
an operator. What a graph of local tensors has saved differs between ranks (a transposition is a view of a shard of one
row, and a copy of a shard of several), and so does whether a program has written to it. A waiting rank also leaves in
the store what it has begun last, and looks at what the next rank of the group has begun. If the two have not done the
same, they wait for each other. So both stop, as do all who wait for them.

A message that is longer than what a rank waits for makes gloo end the process, by an exception in a thread of gloo's
own. That thread is stopped instead. So the rank waits for the message for ever, and finds out why as any rank that
waits. The rank's groups are never destroyed, because their destructors would wait for the thread. A program that waits
for something else, such as its own collective, is ended after a while, as gloo would have ended it.

The threads that communicate do not exist in a forked process, such as a worker of a data loader. What such a process
starts never ends. It may hold ShardTensors and compute with its shard, but it says nothing to other ranks.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from traceback import walk_tb
from types import TracebackType
from typing import Any

import torch.distributed as dist

from .._compat import STOPS_RECOMPUTATION, backward_pass
from .._compat.c10d import default_store, never_destroy_groups
from .._compat.replaced import replace
from .._compat.terminate import before_termination, stop_thread
from ..errors import LostRankError, RanksDiffer, ThreadConflict
from . import blocked
from .callers import called_from, raised_at
from .differences import named
from .history import as_text, at_conflict, at_first, before_each, counts, difference, here, last_entry

GRACE = 3.0  # seconds, for others to say that they have failed as well
_HELD = 10.0  # seconds, for a program to wait for a ShardTensor's communication, after gloo has thrown
_POLL = 0.05
BACKWARD = "a backward pass"  # in place of an operator

_log = logging.getLogger("shardtensor")
_ANY = "shardtensor/raised"
_THROWN = "gloo has failed in a thread of its own, as it does where a message is longer than what a rank waits for"


class _Post:
    """What this rank has to say, and where: its rank and the store."""

    def __init__(self) -> None:
        self.rank, self.store = dist.get_rank(), default_store()

    def say(self, what: str, **more: Any) -> None:
        """Tell all others; what this rank has said before is forgotten. RuntimeError where the store has gone."""
        self.store.set(_key(self.rank), json.dumps({"what": what, "time": time.time(), **more}))

    def said_by(self, rank: int) -> dict[str, Any] | None:
        """What another rank has said, if anything. RuntimeError where the store has gone."""
        if not self.store.check([_key(rank)]):
            return None
        said: dict[str, Any] = json.loads(self.store.get(_key(rank)))
        return said


_post: _Post | None = None
_raised: tuple[str, dict[str, int]] | None = None  # the operator that this rank has raised in last, and when
_forked_with: Any = ()  # the world of the process that this one was forked from


def _key(rank: int) -> str:
    return f"shardtensor/rank {rank}"


def watch() -> None:
    """From here on this rank says when it ends, or raises what nobody catches. Called when it first communicates."""
    global _post, _raised
    if not dist.is_initialized():
        return
    if not _previous_hook:
        replace("sys:excepthook", _say_before)
        atexit.register(_say_ended)
        before_termination("gloo", _hold)
    _post, _raised, _store_answers[0] = _Post(), None, True
    blocked.watch(_post.rank, _post.store)


def _note_fork() -> None:
    """In a forked process: the parent speaks for the rank, and what would communicate raises."""
    global _post, _forked_with
    if dist.is_initialized():
        _post, _forked_with = None, dist.group.WORLD
        before_each.append(_check_fork)


def _check_fork() -> None:
    if dist.group.WORLD is _forked_with:
        raise RuntimeError(
            f"this process was forked from that of rank {dist.get_rank()}, whose process groups work in no other "
            "process: let workers of a DataLoader return plain tensors, and use ShardTensors in the main process"
        )


at_first.append(watch)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
_previous_hook: list[Callable[..., Any]] = []


def _say_before(hook: Callable[..., Any]) -> Callable[..., Any]:
    _previous_hook.append(hook)
    return _say_uncaught


_store_answers = [True]
_uncaught = False


def _say_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    global _uncaught
    _uncaught = True
    if _post is not None and not isinstance(error, LostRankError):  # that has been said
        post, what = _post, f"raised {_described(error)}"
        world = dist.group.WORLD
        if world is not None and isinstance(error, RuntimeError) and _is_of_transport(error):
            wait = blocked.wait_in(frame for frame, _ in reversed(list(walk_tb(traceback))))
            where = wait.place if wait else f"communication ({raised_at(traceback)})"  # of other packages
            _log.error("%s", lost(world, error, where))
        _ask(lambda: post.say(what))
    _previous_hook[0](kind, error, traceback)


def _is_of_transport(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or "gloo" in str(error)


# When gloo has thrown in its thread, whether the program ends by itself, and whether that thread has noticed.
_thrown: float | None = None
_ends, _stopped = threading.Event(), threading.Event()
waiting: set[int] = set()  # the threads that look now and then for what has happened


def _hold() -> None:
    """In gloo's thread, before it would end the process."""
    global _thrown
    never_destroy_groups()
    _thrown = time.monotonic()
    _log.error("%s. The process ends, with an error where a ShardTensor waits for the message", _THROWN)
    while not _ends.wait(_POLL):
        if not waiting and time.monotonic() > _thrown + _HELD:
            return
    _stopped.set()
    stop_thread()


def _say_ended() -> None:
    if _thrown is not None:
        _ends.set()
        _stopped.wait(GRACE)
    if _post is not None and not _uncaught and _store_answers[0]:
        with suppress(RuntimeError):  # the store has gone, with all others
            _post.say("has ended")


def _described(error: BaseException) -> str:
    lines = called_from()
    line = raised_at(error.__traceback__) or (lines[0] if lines else "")
    return f"{type(error).__name__}: {_first_line(error)}" + (f" ({line})" if line else "")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no text"


# -- a rank raises inside of an operator ---------------------------------------------------------------------------


def note_raised(error: Exception, operator: str | None = None) -> None:
    """Tell the others that this rank has raised inside of an operator, by default the one that runs."""
    global _raised
    if _post is None or isinstance(error, (LostRankError, RanksDiffer, ThreadConflict, STOPS_RECOMPUTATION)):
        return
    _raised = where, when = operator or here.operator, counts()
    _say_raised(error, operator=where, counts=when)


def _say_raised(error: Exception, **more: Any) -> None:
    """Tell the others, which may wait for this rank, what it has raised."""
    if _post is None:
        return
    post, what = _post, f"raised {_described(error)}"

    def say() -> None:
        post.say(what, **more)
        post.store.set(_ANY, "")

    _ask(say)


at_conflict.append(lambda group, error: _say_raised(error, conflict=group))  # for which they will wait for ever


def check_raised(group: dist.ProcessGroup) -> None:
    """LostRankError if a rank of the group has raised in the operator in which this one waits for it."""
    if _post is None:
        return
    name, post = group.group_name, _post
    if differs := _difference(group, post):
        raise _conflict(group, differs)
    found: dict[int, dict[str, Any]] = {}
    if not _ask(lambda: post.store.check([_ANY]) and _read(post, _others(group, post.rank), found)):
        return  # the transport will say the rest
    for rank, said in found.items():
        if said.get("conflict") == name:
            raise _conflict(group, f"rank {rank} {said['what']}")
    before = counts().get(name, 0) - 1
    waits_in = {here.operator, BACKWARD if backward_pass() >= 0 else ""} - {""}
    if _raised is not None and _raised[0] in waits_in and _raised[1].get(name, 0) == before:
        return  # so did this one, and has gone on
    for rank, said in found.items():
        if said.get("operator") in waits_in and said["counts"].get(name, 0) == before:
            raise _error(_where(name), f"rank {rank} {said['what']}", None)
    if _thrown is not None and time.monotonic() > _thrown + GRACE:
        raise lost(group, RuntimeError(_THROWN))


def _conflict(group: dist.ProcessGroup, why: str) -> LostRankError:
    """The error that all ranks of the group raise. Waits for them to know it, as the store may go with this rank."""
    name = group.group_name
    _say_raised(RanksDiffer(why), conflict=name)
    if (post := _post) is not None:
        others = _others(group, post.rank)
        _ask(lambda: _in_time(lambda: all((post.said_by(r) or {}).get("conflict") == name for r in others)))
    return _error(_where(name), why, None)


def _difference(group: dist.ProcessGroup, post: _Post) -> str | None:
    """What this rank and the next one of the group, where it waits as well, have done differently."""
    ranks, texts = dist.get_process_group_ranks(group), {post.rank: as_text(group.group_name)}
    following = ranks[(group.rank() + 1) % len(ranks)]

    def tell() -> None:
        post.store.set(_waiting(post.rank, group), texts[post.rank])
        if post.store.check([_waiting(following, group)]):
            texts[following] = post.store.get(_waiting(following, group)).decode()

    _ask(tell)
    return difference({rank: text for rank, text in texts.items() if text}, finished=False)


def stop_telling(group: dist.ProcessGroup) -> None:
    """This rank waits no longer for communication in the group, in which it has called :func:`check_raised`."""
    if _post is not None:
        post = _post
        _ask(lambda: post.store.set(_waiting(post.rank, group), ""))


def _waiting(rank: int, group: dist.ProcessGroup) -> str:
    return f"{_key(rank)} waits in {group.group_name}"


# -- communication fails -------------------------------------------------------------------------------------------


@contextmanager
def communicating(group: dist.ProcessGroup) -> Iterator[None]:
    """What the transport raises inside the block becomes a :class:`LostRankError` that names ranks."""
    _check_fork()
    if _post is None:
        watch()
    try:
        yield
    except LostRankError:
        raise
    except RuntimeError as error:
        raise lost(group, error) from error


def lost(group: dist.ProcessGroup, error: RuntimeError, where: str = "") -> LostRankError:
    """The error to raise where communication in ``group`` has failed with ``error``. Takes some seconds.

    Args:
        where: in what; by default what this rank has begun last.
    """
    if isinstance(error, LostRankError):
        return error
    where = where or _where(group.group_name)
    if _post is None:
        return _error(where, _first_line(error), None)
    waits = f"failed in {where}"
    # At once: who starts the ranks may end them all as soon as one has died.
    _log.error("rank %d %s: %s. Asking the other ranks why", _post.rank, waits, _first_line(error))
    post, others = _post, _others(group, _post.rank)
    found: dict[int, dict[str, Any]] = {}
    reachable = _ask(lambda: _say_and_wait(post, waits, others, found))
    said = {rank: _in_words(theirs) for rank, theirs in found.items()}
    parts = [f"rank {rank} {'failed there as well' if what == waits else what}" for rank, what in said.items()]
    waiting_in: dict[int, str] = {}
    _ask(lambda: waiting_in.update(blocked.blocked(post.store, (rank for rank in others if rank not in said))))
    parts += [f"rank {rank} waits in {place}" for rank, place in waiting_in.items()]
    silent = [rank for rank in others if rank not in said and rank not in waiting_in]
    if not reachable:
        parts.append(
            "the store by which the ranks found each other does not answer: its host, rank 0's or that of who started "
            "the ranks, has gone or is cut off"
        )
        parts += _by_host(dist.get_process_group_ranks(group), silent)
    elif silent:
        has, it = ("have", "they were") if len(silent) > 1 else ("has", "it was")
        parts.append(f"{named(silent)} {has} said nothing: {it} killed, frozen, busy elsewhere, or cut off")
    return _error(where, "; ".join(parts), _first_line(error))


def _by_host(ranks: Sequence[int], silent: Sequence[int]) -> list[str]:
    """Which of the ranks are on this host, and which of the silent ones on others; nothing where that is not known."""
    rank, size = dist.get_rank(), dist.get_world_size()
    told = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    if told[:2] != [str(rank), str(size)] or not all(map(str.isdecimal, told)):
        return []
    first = rank - int(told[2])
    near = range(first, first + int(told[3]))
    parts = [f"this host, {socket.gethostname()}, has {named([rank for rank in ranks if rank in near])}"]
    if far := [rank for rank in silent if rank not in near]:
        parts.append(f"nothing can be heard of {named(far)}, on other hosts")
    return parts


def _in_words(said: dict[str, Any]) -> str:
    ago = time.time() - said["time"]
    return str(said["what"]) + (f", {ago:.0f} s ago" if ago > 2 * GRACE else "")


def _read(post: _Post, ranks: Sequence[int], found: dict[int, dict[str, Any]]) -> bool:
    """Add what the ranks have said to ``found``; whether all of them have."""
    for rank in ranks:
        if rank not in found and (said := post.said_by(rank)) is not None:
            found[rank] = said
    return len(found) == len(ranks)


def _say_and_wait(post: _Post, what: str, ranks: Sequence[int], found: dict[int, dict[str, Any]]) -> bool:
    post.say(what)
    return _in_time(lambda: _read(post, ranks, found))


def _in_time(happened: Callable[[], bool]) -> bool:
    """Whether something happens before other ranks are no longer waited for."""
    end = time.monotonic() + GRACE
    while not happened():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL)
    return True


def _ask(question: Callable[[], object]) -> bool:
    """Run what asks the store, which may be on a host that does not answer; whether it has been answered in time."""
    if not _store_answers[0]:
        return False
    answered = threading.Event()

    def ask() -> None:
        with suppress(RuntimeError):  # the store has gone
            question()
            answered.set()

    asking = threading.Thread(target=ask, daemon=True, name="shardtensor failures")
    asking.start()
    asking.join(2 * GRACE)
    _store_answers[0] = not asking.is_alive()
    return answered.is_set()


def _others(group: dist.ProcessGroup, rank: int) -> list[int]:
    return [other for other in dist.get_process_group_ranks(group) if other != rank]


def _where(group: str) -> str:
    lines = called_from()
    return last_entry(group) + (f" ({lines[0]})" if lines else "")


def _error(where: str, why: str, transport: str | None) -> LostRankError:
    heard = f" The transport says: {transport}" if transport else ""
    return LostRankError(
        f"rank {dist.get_rank()}: {where} was not completed: {why}. The process group cannot be used any more; "
        f"end the program, and restart it from a checkpoint.{heard}"
    )
