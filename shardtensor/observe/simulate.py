"""Run as each rank of a huge world in turn, in one process: for what depends on specs alone, such as message counts."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..layout.caches import forget
from ._compat import (
    FakeWork,
    all_process_groups,
    clear_dtensor_caches,
    hide_process_groups,
    init_fake_process_group,
    put_in_front,
)

T = TypeVar("T")


def simulate_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, only: Sequence[int] | None = None, **kwargs: Any
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` as each of ``world_size`` ranks, one after the other, and return the results.

    There are no processes and no communication: collectives return immediately and leave their results unchanged. So
    received values are wrong, but shapes, specs and the number of messages are right.

    >>> simulate_ranks(lambda: dist.get_rank() ** 2, 4)
    [0, 1, 4, 9]

    Args:
        only: the ranks to simulate; default: all.
    """
    if dist.is_initialized():
        raise RuntimeError(
            f"simulate_ranks makes its own process groups, but this process is rank {dist.get_rank()} of a "
            f"{dist.get_backend()} group already; call it where none is running, or destroy_process_group() first"
        )
    results = []
    # torch's own raises where a rank only receives.
    restore = put_in_front(["alltoall_base_"], lambda name, _, returns: lambda *args: complete(args[0], returns))
    excepthook = sys.excepthook  # torch puts one in front that names the rank, for each group that is made
    try:
        for rank in range(world_size) if only is None else only:
            _forget_the_last_rank()
            init_fake_process_group(rank, world_size)
            try:
                results.append(fn(*args, **kwargs))
            finally:
                dist.destroy_process_group()
    finally:
        sys.excepthook = excepthook
        restore()
        _forget_the_last_rank()
    return results


def complete(result: Any, returns_result: bool) -> Any:
    """What a c10d operator returns that has nothing to do.

    Args:
        result: its first argument, where the result is.
        returns_result: whether the operator returns it in front of the work.
    """
    work = FakeWork().boxed()
    return (result, work) if returns_result else work


def _forget_the_last_rank() -> None:
    """Clear the caches whose entries are valid for one rank only: the meshes of two simulated ranks are equal."""
    clear_dtensor_caches()
    forget()


# -- next to running groups -------------------------------------------------------------------------------------------


def without_groups(function: Callable[..., T], *args: Any) -> T:
    """``function(*args)`` where no process group runs: here, or else in a forked copy of this process.

    The copy has this process's objects, and leaves its groups, caches and histories as they are. Only the result, or
    the error, is pickled. Devices other than the CPU cannot be used in it.
    """
    if not dist.is_initialized():
        return function(*args)
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(sending, all_process_groups(), function, args))
    with warnings.catch_warnings():
        # Python warns of forks where there are threads, as of gloo: nothing in the copy waits for them.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    sending.close()
    result: T
    try:
        result, error, shown = pickle.loads(receiving.recv_bytes())
    except EOFError:
        process.join()
        raise RuntimeError(
            f"the forked process that runs the model ended with exit code {process.exitcode}. It was forked because a "
            "process group is running: call this before init_process_group, or in a separate program"
        ) from None
    finally:
        receiving.close()
    process.join()
    if error is not None:
        raise error from RuntimeError(f"in a copy of this process, as a process group runs in it:\n{shown}")
    return result


def _report(sending: Connection, groups: Sequence[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Send what the function returns, or raises, with the traceback.

    Args:
        groups: all process groups of this process. A group that its program has destroyed has threads until the last
            mesh or plan lets go of it. Here are none of these threads, and it would wait for them: so all are held.
    """
    torch.set_num_threads(1)  # OpenMP's threads are not copied
    hide_process_groups()
    forget()
    try:
        message = pickle.dumps((function(*args), None, ""))
    except Exception as raised:
        error, shown = raised, traceback.format_exc()
        if "autograd's threading" in str(raised):
            error = RuntimeError(
                "there was a backward pass on a device, whose threads a forked process has not, so that nothing is "
                "differentiated in it. It was forked because a process group is running: call this before the first "
                "backward pass, before init_process_group, or in a separate program"
            )
        try:
            message = pickle.dumps((None, error, shown))
            pickle.loads(message)
        except Exception:  # not every error can be sent
            message = pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}"), shown))
    sending.send_bytes(message)
