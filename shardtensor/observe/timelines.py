"""``timeline``: what each rank did when, as a Chrome trace with one row per rank.

Operators on ShardTensors say themselves when they begin and end (see ``history.here``), above autograd and in backward
passes. A mode of torch's sees those below autograd, and calls of collectives. ``waiting`` says when a rank waits.
Outside of the context none of this runs: two modules have a variable that is None.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .._compat import OpOverload, backward_pass
from ..dispatch.tensor import ShardTensor
from ..ranks import history, waiting
from ..ranks.failures import communicating
from ._compat import without_graphs
from .counting import Communication, LocalCalls

_recording = False


@contextmanager
def timeline(path: str | Path, *, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Record the operators and messages of all ranks inside the block, in one Chrome trace with a row for each rank.

    Open the file in ``chrome://tracing`` or https://ui.perfetto.dev. Each row shows the operators on ShardTensors,
    forward and backward. Inside each operator it shows collectives and messages, with their bytes, and the time that
    the rank waits for others. All ranks of the group must enter and leave the block. At the end the first rank gathers
    the records and writes the file. Times are those of the host: kernels of an accelerator run later than the operators
    that start them. The clocks of several hosts are not synchronized.

    Recording takes a few tens of microseconds per operator. Compiled functions run eagerly. If a rank raises inside the
    block, the others wait for it at the end, as in any collective.

    Args:
        path: the JSON file, which the first rank of the group writes.
        group: the process group to record; default: all ranks. Without a process group, this process is rank 0 alone.

    Raises:
        RuntimeError: another timeline is running.

    Example::

        with shardtensor.timeline("trace.json"):
            model(x).mean().backward()
    """
    global _recording
    if _recording:
        raise RuntimeError("timeline: one is being recorded already; leave that block first")
    record = _Record()
    _recording = True
    try:
        with ExitStack() as stack:
            stack.enter_context(history.observed(record.note_operator))
            stack.enter_context(waiting.observed(record.waits))
            stack.enter_context(record)
            stack.enter_context(without_graphs())
            yield
    finally:
        _recording = False
    _write(Path(path), _gathered(record.events, group))


class _Record(LocalCalls):  # type: ignore[no-untyped-call]
    """The events of this rank, as Chrome's format has them; times in microseconds since 1970.

    As a mode it sees operators on ShardTensors below autograd, and collectives.
    """

    def __init__(self) -> None:
        super().__init__(self._collective)
        self.events: list[dict[str, Any]] = []
        self._began: tuple[str, float] | None = None
        self._inside = False
        self._offset = time.time() * 1e6 - time.perf_counter() * 1e6  # a clock that never jumps, but starts anywhere

    def now(self) -> float:
        return time.perf_counter() * 1e6 + self._offset

    def span(self, name: str, kind: str, start: float, **more: Any) -> None:
        """Note what began at ``start`` and ends now."""
        phase = "backward" if backward_pass() >= 0 else "forward"
        args = {"phase": phase, **more}
        self.events.append(
            {"name": name, "cat": kind, "ph": "X", "ts": start, "dur": max(self.now() - start, 0.0), "args": args}
        )

    def note_operator(self, before: str, now: str) -> None:
        """An operator begins inside of ``before``, "" where there is none, or ends."""
        if not before and now:
            self._began = (now, self.now())
        elif before and not now and self._began is not None:
            label, start = self._began
            self._began = None
            name, _, result = label.partition(" to ")
            self.span(name, "operator", start, result=result)

    def waits(self, group: dist.ProcessGroup) -> Callable[[], None]:
        """This rank begins to wait for others; what is returned is called when it has."""
        start = self.now()
        return lambda: self.span(f"wait for {history.last_entry(group.group_name)}", "wait", start)

    def on_shards(self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside or history.here.operator or ShardTensor not in types:
            return NotImplemented
        start, self._inside = self.now(), True
        try:
            with self:  # for what it communicates
                return func(*args, **kwargs)
        finally:
            self._inside = False
            self.span(func._schema.name.removeprefix("aten::"), "operator", start)

    def _collective(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        counted, start = Communication(), self.now()
        counted.add(func, args, kwargs)
        try:
            return func(*args, **kwargs)
        finally:
            name = next(iter(counted.collectives), func._schema.name.split("::")[1].strip("_"))
            sizes = {"messages": counted.messages, "bytes": counted.bytes_sent + counted.collective_bytes}
            self.span(name, "communication", start, **sizes)


# -- all ranks --------------------------------------------------------------------------------------------------------


def _gathered(events: list[dict[str, Any]], group: dist.ProcessGroup | None) -> dict[int, list[dict[str, Any]]] | None:
    """Every rank's events on the first rank of the group; None on the others."""
    if not dist.is_initialized():
        return {0: events}
    group = dist.group.WORLD if group is None else group
    assert group is not None
    every: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    with communicating(group):
        dist.gather_object(events, every, group=group, group_dst=0)
    return None if every is None else dict(zip(dist.get_process_group_ranks(group), every))


def _write(path: Path, by_rank: dict[int, list[dict[str, Any]]] | None) -> None:
    if by_rank is None:
        return
    first = min((event["ts"] for events in by_rank.values() for event in events), default=0.0)
    merged: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "ranks"}}]
    for rank, events in sorted(by_rank.items()):
        row = {"pid": 0, "tid": rank}
        merged.append({"name": "thread_name", "ph": "M", **row, "args": {"name": f"rank {rank}"}})
        merged.append({"name": "thread_sort_index", "ph": "M", **row, "args": {"sort_index": rank}})
        merged += [{**event, **row, "ts": event["ts"] - first} for event in events]
    path.write_text(json.dumps({"traceEvents": merged, "displayTimeUnit": "ms"}))
