"""Communication between CPUs that is as late as that between accelerators may be.

With gloo a message has often arrived before anybody waits for it, and what is sent is often copied at once. A program
that reads a result too early, or reuses a buffer too early, then computes the right numbers on CPUs and wrong ones with
NCCL. Here kernels are put in front of those of torch's c10d operators, whoever calls them: functions of
``torch.distributed``, functional collectives, DeviceMesh, DDP, FSDP2, plans of ours; on any gloo group. An operation

- fills what it is to write with NaN (integers with their greatest number), from the call until ``wait``, which brings
  the result in, or until the future that was asked for is complete;
- reads what it sends after a while, so that whatever is written there before is sent to the others;
- is complete after another while. Both are drawn anew for each operation, on each rank from numbers of its own;
- raises in ``wait`` where a tensor that it reads or writes was written to since the call.

Collectives of one group run one after the other, and so do messages to one peer, and messages from one peer; nothing
else has an order. There is no model of streams: after ``wait`` a result is there for everybody, where NCCL's is there
for the current stream only.

The data travels through gloo, from and into copies, on threads of this module: an operation makes progress although
nobody waits for it.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout  # another one than the built-in up to Python 3.10
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardtensor._compat import hidden_from_program, tree_leaves, tree_map
from shardtensor.layout.strides import as_bytes
from shardtensor.observe._compat import Kernel, group_of, put_in_front


class late_communication:  # named like torch.no_grad, which works alike
    """Delay communication between CPUs inside the block, as between accelerators.

    Results are NaN until ``wait()``, and send buffers are read late. If a program writes to a buffer too early,
    ``wait()`` raises an error. So a missing wait shows even if gloo is fast enough to hide it. The block affects only
    this process, so all ranks must enter it. The results of correct programs are bitwise those of gloo.

    Args:
        seconds: the longest delay before an operation starts, and again before it is complete.
        seed: the seed of the delays; each rank draws its own.

    Raises:
        ValueError: negative ``seconds``.
        RuntimeError: in ``wait()``: the program has written to a tensor of an incomplete operation.

    Example:
        >>> total = torch.ones(2)
        >>> with late_communication():
        ...     work = dist.all_reduce(total, async_op=True)
        ...     early = total.tolist()
        ...     work.wait()
        >>> early, total.tolist()  # on 2 ranks
        ([nan, nan], [2.0, 2.0])
    """

    def __init__(self, seconds: float = 0.002, seed: int = 0) -> None:
        if seconds < 0:
            raise ValueError(f"late_communication of {seconds} seconds: give a number that is not negative")
        self._seconds, self._seed = seconds, seed

    def __enter__(self) -> None:
        global _scene
        self._outer, _scene = _scene, _Scene(self._seconds, self._seed)
        if self._outer is None:
            self._remove = put_in_front(c10d_operators(), _kernel)

    def __exit__(self, *_: object) -> None:
        global _scene
        ended, _scene = _scene, self._outer
        if self._outer is None:
            self._remove()
        if ended is not None:
            ended.end()


def stay_late(seconds: float = 0.002, seed: int = 0) -> None:
    """Enter :class:`late_communication` for the rest of the process, before or after it has a process group."""
    _for_good.enter_context(late_communication(seconds, seed))


def c10d_operators() -> list[str]:
    """The names of c10d's operators that communicate."""
    names = (name.removeprefix("c10d::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::"))
    return [name for name in names if name != "check_for_nan"]


class _Scene:
    """What operations of one block share: the times they take, and threads that run them in their order."""

    def __init__(self, seconds: float, seed: int) -> None:
        self._seconds = seconds
        self._random = random.Random(f"{seed} on rank {os.environ['RANK']}")
        self._lock = threading.Lock()
        self._lanes: dict[tuple[Any, ...], ThreadPoolExecutor] = {}

    def submit(self, lane: tuple[Any, ...], run: Callable[[], None]) -> Future[None]:
        """Have ``run`` called after all that was submitted to ``lane`` before."""
        with self._lock:
            before, after = (self._random.uniform(0, self._seconds) for _ in range(2))
            if lane not in self._lanes:
                self._lanes[lane] = ThreadPoolExecutor(1, thread_name_prefix=f"late {lane}")
            return self._lanes[lane].submit(_between, before, run, after)

    def end(self) -> None:
        """Return when all operations are complete."""
        for lane in self._lanes.values():
            lane.shutdown()


_for_good = ExitStack()  # it keeps the kernels, which end with whoever has registered them
_scene: _Scene | None = None
# C++ alone may hold a work until it waits, and may wait again; but what Python overrides ends with Python's object.
_open: set[_LateWork] = set()
_waited: deque[_LateWork] = deque(maxlen=4096)  # they hold no tensors


def _between(before: float, run: Callable[[], None], after: float) -> None:
    time.sleep(before)
    run()
    time.sleep(after)


class _LateWork(dist.Work):
    """An operation under way; to be waited for like any other."""

    def __init__(self, name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        super().__init__()
        self._name, self._written = name, list(written)
        self._lock = threading.Lock()
        self._done: Future[None] = Future()
        self._source = -1
        with _unseen():
            memory = {t.untyped_storage().data_ptr() for t in written}
            apart = [t for t in read if t.untyped_storage().data_ptr() not in memory]
            # What is in memory that is written has to be read at once.
            self._operands = {id(t): t if any(t is a for a in apart) else t.clone() for t in read}
            self._operands |= {id(t): t.clone() for t in written}
            for t in written:
                _poison(t)
            self._expected = [(t, t.clone()) for t in (*apart, *written)]

    def start(self, scene: _Scene, lane: tuple[Any, ...], kernel: Kernel, args: Sequence[Any]) -> None:
        """Have the kernel run in its turn, on copies of what it writes."""

        def run() -> None:
            with _unseen():
                made = kernel(*tree_map(lambda a: self._operands.get(id(a), a), list(args)))
                works = [w for w in (made if isinstance(made, tuple) else (made,)) if isinstance(w, torch.ScriptObject)]
                for work in works:
                    inner = dist.Work.unbox(work)
                    inner.wait()
                    self._source = inner._source_rank() if self._name == "recv_any_source_" else -1

        _open.add(self)
        self._done = scene.submit(lane, run)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the result is where it belongs; raises what went wrong."""
        seconds = timeout.total_seconds() if timeout else 0.0
        try:
            self._done.result(seconds if seconds > 0 else None)
        except FutureTimeout:
            raise RuntimeError(f"{self._name}: not complete after {seconds:g} s") from None
        finally:
            _open.discard(self)
            _waited.append(self)
        self._bring_in()
        return True

    def synchronize(self) -> None:
        """The same."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether :meth:`wait` would return at once. The result is still to be waited for."""
        return self._done.done()

    def is_success(self) -> bool:
        """Whether it is complete, and nothing went wrong."""
        return self._done.done() and self._done.exception() is None

    def exception(self) -> Any:
        """What went wrong so far."""
        return self._done.exception() if self._done.done() else None

    def result(self) -> list[Tensor]:
        """The tensors that are written; none any more once they were waited for."""
        return self._written

    def source_rank(self) -> int:
        """Of a receive from anybody that is complete: from whom it was."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the tensors that are written. Once it is asked for, the result does not stay away until wait."""
        future: torch.futures.Future[Any] = torch.futures.Future()

        written = self._written

        def complete(_: Future[None]) -> None:
            try:
                self.wait()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(written)

        self._done.add_done_callback(complete)
        return future

    def _bring_in(self) -> None:
        with self._lock, _unseen():
            for tensor, expected in self._expected:
                if not torch.equal(as_bytes(tensor), as_bytes(expected)):
                    raise RuntimeError(
                        f"{self._name}: a tensor of {tuple(tensor.shape)} that it reads or writes was written to "
                        f"before wait(); other ranks may have received either value"
                    )
            for tensor in self._written:
                if id(tensor) in self._operands:
                    tensor.data.copy_(self._operands[id(tensor)])
            self._expected, self._operands, self._written = [], {}, []


def _kernel(name: str, kernel: Kernel, returns_tensors: bool) -> Kernel:
    """The kernel that goes in front of torch's of c10d's operator ``name``."""

    def run(*args: Any) -> Any:
        group = group_of(next(a for a in args if isinstance(a, torch.ScriptObject)))
        scene = _scene
        if scene is None or group.name() != "gloo":
            return kernel(*args)
        work = _LateWork(name, *_operands(name, group, args))
        work.start(scene, _lane(name, group, args), kernel, args)
        if name == "monitored_barrier_":
            work.wait()
            return None
        return (args[0], work.boxed()) if returns_tensors else work.boxed()

    return run


def _operands(name: str, group: dist.ProcessGroup, args: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """What is read, and what is written."""
    if name in ("barrier", "monitored_barrier_"):
        return [], []
    # The first argument is written and the second one, where it has tensors, read; or the first one is both, or sent.
    first, second = tree_leaves(args[0]), [t for t in tree_leaves(args[1]) if isinstance(t, Tensor)]
    is_sent = name == "send" or (name == "broadcast_" and args[2] == group.rank())
    return (first, []) if is_sent else (second, first)


def _lane(name: str, group: dist.ProcessGroup, args: Sequence[Any]) -> tuple[Any, ...]:
    """The order in which it has a place: that of the group's collectives, or of the messages to or from a peer."""
    if name in ("send", "recv_", "recv_any_source_"):
        return group.group_name, name, args[2] if name != "recv_any_source_" else None
    return (group.group_name,)


def _poison(tensor: Tensor) -> None:
    """Fill with what nobody takes for a result."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.data.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.data.fill_(torch.iinfo(tensor.dtype).max)


@contextmanager
def _unseen() -> Iterator[None]:
    """What is computed inside is no part of the program: no mode sees it, and autograd does not."""
    with hidden_from_program(), torch.inference_mode():
        yield
