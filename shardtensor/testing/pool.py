"""Run a function on every rank of a small world of processes, from an ordinary test.

Starting processes takes seconds, a call to running ones milliseconds. So there is one pool of workers per world size;
it is started by the first call that needs it, serves all later ones, and ends with the interpreter. A hang or a crash
costs only that pool: its ranks' stacks go into the error, and the next call starts a new pool.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .failures import Outcome, failure, own_threads

START_TIMEOUT = 180.0
COLLECTIVE_TIMEOUT = 30.0  # gloo's own; shorter than a call's default, so that an unmatched collective raises first
GRACE = 5.0  # how long the others may still take once one rank has failed
HEALTH_TIMEOUT = 3.0
# Environment variables: the type of the workers' devices, and a module that they import before torch.
DEVICE = "SHARDTENSOR_TEST_DEVICE"
PRELOAD = "SHARDTENSOR_TEST_PRELOAD"

_WORKER = Path(__file__).with_name("_worker.py")
_device: tuple[str, str] = (os.environ.get(DEVICE, "cpu"), os.environ.get(PRELOAD, ""))
_pools: dict[tuple[int, tuple[str, str]], Pool] = {}


class TooFewDevices(RuntimeError):
    """A world has more ranks than this machine has devices of the type that was asked for."""


@contextlib.contextmanager
def on_device(device_type: str, preload: str = "") -> Iterator[None]:
    """Give each rank of :func:`run_distributed` a device of this type inside the block, as its default device.

    Args:
        device_type: ``"cpu"``, or the type of an accelerator.
        preload: a module that workers import before torch. If it has a function ``after_call``, that is called after
            each successful call.

    >>> def where():
    ...     return torch.ones(1).device.type
    >>> with on_device("cpu"):
    ...     run_distributed(where, 2)  # doctest: +SKIP
    ['cpu', 'cpu']
    """
    global _device
    before, _device = _device, (device_type, preload)
    try:
        yield
    finally:
        _device = before


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0, **kwargs: Any
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on each of ``world_size`` ranks and return the results, one per rank.

    Each rank is a process with a running process group (gloo, or the backend of :func:`on_device`), one thread and the
    seed 0. ``fn`` must be importable (a function at the top level of a module other than the main script). Arguments
    and results must be picklable.

    >>> from operator import add
    >>> run_distributed(add, 2, 1, 2)
    [3, 3]

    Args:
        timeout: seconds after which ranks that have not returned count as hung.

    Raises:
        DistributedFailure: a rank raised, hung or died. Its text holds the traceback or stack of each.
    """
    outcomes, waited = _call(fn, world_size, args, kwargs, timeout, GRACE)
    if any(outcome.kind != "returned" for outcome in outcomes):
        raise failure(_name(fn), outcomes, waited)
    for rank, outcome in enumerate(outcomes):
        for line in outcome.printed.splitlines():
            print(f"[rank {rank}] {line}")
    return [pickle.loads(outcome.value) for outcome in outcomes]  # type: ignore[arg-type]


def run_expecting_errors(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0, **kwargs: Any
) -> list[BaseException | None]:
    """Like :func:`run_distributed`, but return the exception of each rank, or None for a rank that raised none.

    An exception that cannot be pickled becomes a :class:`RemoteError`. The traceback is in ``remote_traceback``. If a
    rank hangs or dies, this raises :class:`DistributedFailure`.

    >>> from operator import truediv
    >>> run_expecting_errors(truediv, 2, 1, 0)
    [ZeroDivisionError('division by zero'), ZeroDivisionError('division by zero')]
    """
    outcomes, waited = _call(fn, world_size, args, kwargs, timeout, timeout)
    if any(outcome.kind in ("running", "dead") for outcome in outcomes):
        raise failure(_name(fn), outcomes, waited)
    return [outcome.exception() for outcome in outcomes]


def shutdown_pools() -> None:
    """End all workers. The interpreter calls this at exit. Call it before a test that measures memory, for example."""
    for key in list(_pools):
        _pools.pop(key).close()


atexit.register(shutdown_pools)


def _name(fn: Callable[..., Any]) -> str:
    return f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', repr(fn))}"


def _call(
    fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float, grace: float
) -> tuple[list[Outcome], float]:
    """How a call ended on each rank, and how long it took; a pool that cannot be kept is closed."""
    if getattr(fn, "__module__", None) == "__main__":
        raise ValueError(f"{_name(fn)} is defined in the main script, which workers do not import; move it to a module")
    try:
        payload = pickle.dumps((fn, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{_name(fn)} and its arguments must be picklable; define functions at the top level of a module ({error})"
        ) from error
    key = (world_size, _device)
    if key not in _pools:
        _pools[key] = Pool(world_size, *_device)
    pool = _pools[key]
    keep = False
    try:
        start = time.monotonic()
        outcomes = pool.run(("call", list(sys.path), payload), timeout, grace)
        waited = time.monotonic() - start
        kinds = {outcome.kind for outcome in outcomes}
        keep = kinds == {"returned"} or (kinds <= {"returned", "raised"} and pool.healthy())
    finally:  # also after Ctrl-C
        if not keep:
            del _pools[key]
            pool.close(at_once=True)
    return outcomes, waited


class Pool:
    """``world_size`` worker processes in one process group: gloo's, and for devices that of their type."""

    def __init__(self, world_size: int, device_type: str = "cpu", preload: str = "") -> None:
        if device_type != "cpu" and not preload:
            devices = torch.get_device_module(device_type).device_count()
            if world_size > devices:
                raise TooFewDevices(
                    f"{world_size} ranks need as many devices of type {device_type}; there are {devices}"
                )
        self.folder = Path(tempfile.mkdtemp(prefix="shardtensor-pool-"))
        self.connections: list[Connection] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        # The parent holds the store, on a port that the system selects: no port can be taken twice, and the death of
        # rank 0 is like that of any other.
        self.store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=START_TIMEOUT)
        )
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world_size), "PYTHONUNBUFFERED": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port)}
        if sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            for rank in range(world_size):
                ours, theirs = Pipe()
                arguments = [theirs.fileno(), rank, world_size, self.store.port, COLLECTIVE_TIMEOUT, self.stacks(rank)]
                arguments += [device_type, preload, json.dumps(sys.path)]
                with open(self.log(rank), "w") as log:
                    process = subprocess.Popen(
                        [sys.executable, str(_WORKER), *map(str, arguments)],
                        env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        pass_fds=[theirs.fileno()],
                    )
                theirs.close()
                self.connections.append(ours)
                self.processes.append(process)
            outcomes = self.collect(START_TIMEOUT, GRACE)
            if any(outcome.kind != "ready" for outcome in outcomes):
                raise failure(f"the start of a pool of {world_size}", outcomes, START_TIMEOUT)
        except BaseException:
            self.close(at_once=True)
            raise

    def log(self, rank: int) -> Path:
        return self.folder / f"{rank}.log"

    def stacks(self, rank: int) -> Path:
        return self.folder / f"{rank}.stacks"

    def run(self, request: tuple[Any, ...], timeout: float, grace: float) -> list[Outcome]:
        """Send ``request`` to every rank and collect how it ended."""
        printed = [self.log(rank).stat().st_size for rank in range(len(self.processes))]
        message = pickle.dumps(request)
        for connection in self.connections:
            with contextlib.suppress(OSError):  # collect finds dead workers
                connection.send_bytes(message)
        outcomes = self.collect(timeout, grace)
        for rank, outcome in enumerate(outcomes):
            outcome.printed = self.log(rank).read_bytes()[printed[rank] :].decode(errors="replace")
        return outcomes

    def collect(self, timeout: float, grace: float) -> list[Outcome]:
        """Wait for one reply per rank; after the first failure, for ``grace`` seconds more."""
        outcomes = [Outcome() for _ in self.processes]
        waiting = {connection: rank for rank, connection in enumerate(self.connections)}
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    kind, value = connection.recv()
                except (EOFError, OSError):
                    # Its pipe closes a moment before the process has ended.
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self.processes[rank].wait(5)
                    kind, value = "dead", self.processes[rank].returncode
                outcomes[rank].kind, outcomes[rank].value = kind, value
                if kind in ("raised", "dead", "unhealthy"):
                    deadline = min(deadline, time.monotonic() + grace)
        self.add_stacks(outcomes, list(waiting.values()))
        return outcomes

    def add_stacks(self, outcomes: list[Outcome], hanging: list[int]) -> None:
        """Fill in where the hanging ranks are, and where the dead ones were."""
        for rank in hanging:
            self.processes[rank].send_signal(signal.SIGUSR1)
        if hanging:
            time.sleep(0.3)  # the dump is written by a signal handler, which does not say when it is done
        for rank, outcome in enumerate(outcomes):
            if outcome.kind in ("running", "dead") and self.stacks(rank).exists():
                outcome.stack = own_threads(self.stacks(rank).read_text(errors="replace"))

    def healthy(self) -> bool:
        """Whether all ranks still meet in a collective: after a failure some may have sent what no rank received."""
        outcomes = self.run(("check", HEALTH_TIMEOUT), 4 * HEALTH_TIMEOUT, HEALTH_TIMEOUT)
        return all(outcome.kind == "healthy" for outcome in outcomes)

    def close(self, at_once: bool = False) -> None:
        """End the workers: by closing their pipes, or by killing them."""
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            if at_once:
                process.kill()
        for process in self.processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
