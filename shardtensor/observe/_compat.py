"""The private torch API that counting, previews and the test tools use; see ``shardtensor/_compat`` for why."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork as FakeWork  # to be waited for, at once
from torch._C._distributed_c10d import _unregister_all_process_groups
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from .._compat import Library, OpOverload, tree_leaves
from .._compat.c10d import process_group

Kernel: TypeAlias = Callable[..., Any]


def group_of(reference: str | torch.ScriptObject | dist.ProcessGroup) -> dist.ProcessGroup:
    """The process group that a c10d operator was given: by name, boxed, or itself."""
    if isinstance(reference, str):
        return process_group(reference)
    return dist.ProcessGroup.unbox(reference) if isinstance(reference, torch.ScriptObject) else reference


def init_fake_process_group(rank: int, world_size: int) -> None:
    """Make this process ``rank`` of a world in which nothing is communicated."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def hide_process_groups() -> None:
    """Make a forked process one in which no process group runs.

    None is destroyed: it would wait for threads that a forked process does not have.
    """
    world = distributed_c10d._world
    tables: list[dict[Any, Any]] = [
        *(world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config),
        *(world.pg_to_tag, world.tags_to_pg, world.pg_coalesce_state),
    ]
    _hidden.extend([world.default_pg, *(dict(table) for table in tables)])
    for table in tables:
        table.clear()
    distributed_c10d._update_default_pg(None)
    world.group_count = 0
    _unregister_all_process_groups()


_hidden: list[Any] = []


def all_process_groups() -> list[dist.ProcessGroup]:
    """All that objects of Python refer to, also those that a program has destroyed.

    The garbage collector lists neither groups nor the dicts and tuples that have nothing else in them.
    """
    groups, containers = [], gc.get_objects()
    while containers:
        referents = {id(referent): referent for referent in gc.get_referents(*containers)}.values()
        groups += [referent for referent in referents if issubclass(type(referent), dist.ProcessGroup)]
        containers = [item for item in referents if type(item) in (tuple, dict) and not gc.is_tracked(item)]
    return groups


def clear_dtensor_caches() -> None:
    """Clear what DTensor has cached for earlier operators; it may be valid for this process's earlier rank only."""
    torch._C._clear_DTensor_sharding_propagator_cache()
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[no-untyped-call]


def next_node() -> int:
    """The number that the next node of autograd's graph made in this thread will have; above 0."""
    while not torch._C._autograd._get_sequence_nr():
        torch.empty(0, requires_grad=True).view_as(torch.empty(0))
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def current_node() -> int:
    """The number of the node whose backward runs in this thread; -1 outside of backward passes."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else int(node._sequence_nr())


def without_graphs() -> AbstractContextManager[Any]:
    """Run compiled functions eagerly: where a mode sees operators torch does so, but raises where it wants one graph.

    Eager ``flex_attention`` does. The compiler is not imported for this.
    """
    compiling = {"torch._dynamo", "torch.nn.attention.flex_attention"} & sys.modules.keys()
    return torch.compiler.set_stance("force_eager") if compiling else nullcontext()


def put_in_front(names: Iterable[str], make: Callable[[str, Kernel, bool], Kernel]) -> Callable[[], None]:
    """Put kernels in front of those of c10d's operators, below all modes and subclasses; returns what removes them.

    Args:
        make: gives the new kernel, of the operator's name, torch's kernel, and whether the operator returns tensors in
            front of the work.
    """
    library = Library("c10d", "IMPL")
    for name in names:
        operator = getattr(torch.ops.c10d, name).default
        new = make(name, _kernel_of_device(operator), len(operator._schema.returns) > 1)
        library.impl(name, new, "BackendSelect")

    remove: Callable[[], None] = library._destroy
    return remove


def _kernel_of_device(operator: OpOverload) -> Kernel:
    """What would run without a kernel in front. It is called without the GIL, which gloo's threads may wait for."""

    def call(*args: Any) -> Any:
        device = next(t.device for t in tree_leaves(args) if isinstance(t, torch.Tensor))
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device.type.upper()))
        return operator.redispatch(keys, *args)

    return call
