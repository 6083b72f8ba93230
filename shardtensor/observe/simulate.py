"""Run as each rank of a huge world in turn, in one process: for what depends on specs alone, such as message counts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from ..layout.caches import forget
from ._compat import FakeWork, clear_dtensor_caches, init_fake_process_group, put_in_front


def simulate_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, ranks: Sequence[int] | None = None, **kwargs: Any
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` as each of ``world_size`` ranks, one after the other, and return the results.

    There are no processes and no communication: collectives return immediately and leave their results unchanged, so
    values that a rank would have received are wrong. Shapes, specs and the number of messages are right.

    >>> simulate_ranks(lambda: dist.get_rank() ** 2, 4)
    [0, 1, 4, 9]

    Args:
        ranks: only these, where a few (a corner, an edge, an inner one) are enough.
    """
    if dist.is_initialized():
        raise RuntimeError(
            f"simulate_ranks makes process groups of its own, but this process is rank {dist.get_rank()} of a "
            f"{dist.get_backend()} group already; call it where none is running, or destroy_process_group() first"
        )
    results = []
    # torch's own raises where a rank only receives.
    restore = put_in_front(["alltoall_base_"], lambda name, _, returns: lambda *args: complete(args[0], returns))
    excepthook = sys.excepthook  # torch puts one in front that names the rank, for each group that is made
    try:
        for rank in range(world_size) if ranks is None else ranks:
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
