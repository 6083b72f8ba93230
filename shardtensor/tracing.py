"""Communication as operators that a traced graph holds.

[Note: communication in graphs] ``torch.compile`` runs our code on tensors without data, and keeps what it does to local
tensors as a graph. A collective is a node of that graph: an operator of ours, which runs the eager function when the
graph runs. Each rank traces for itself, so all graphs must communicate alike, also where a rank has no use for what it
receives (an empty shard, or one that only gives). torch's functional collectives do not promise that: unused ones are
removed. Ours are declared to have ordered effects; so they stay, in the order in which they were traced, which is the
same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.traceback import get_current_meta

from ._compat import has_ordered_effects, is_traced, no_frames_of
from .errors import UnsupportedSharding

__all__ = ["graph_operator", "is_traced"]

no_frames_of("shardtensor")
_library = torch.library.Library("shardtensor", "DEF")


def graph_operator(
    schema: str, without_data: Callable[..., Any], *, ordered: bool = True
) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: an operator of the namespace ``shardtensor`` that runs the function below it, on any device.

    Args:
        schema: its name and signature. Nothing that it returns may share memory with an argument.
        without_data: called in its place while tracing; gives results of the right shapes, dtypes and devices.
        ordered: every call has to stay in the graph, and in its order.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        name = _library.define(schema)
        _library.impl(name, function, "CompositeExplicitAutograd")
        operator = getattr(torch.ops.shardtensor, name).default
        torch.library.register_fake(
            f"shardtensor::{name}", _once(name, without_data) if ordered else without_data, lib=_library
        )
        if ordered:
            has_ordered_effects(operator)
        return operator

    return decorate


def _once(name: str, without_data: Callable[..., Any]) -> Callable[..., Any]:
    """``without_data``, refusing where the graph would have to hold the operator twice."""

    def checked(*args: Any) -> Any:
        if "recompute" in get_current_meta():
            raise UnsupportedSharding(
                f"{name}: activation checkpointing inside of a compiled function would repeat communication or random "
                "numbers, which torch.compile cannot do. Remedy: checkpoint the compiled module, "
                "checkpoint(torch.compile(block), x, use_reentrant=False), rather than compile the checkpoint."
            )
        return without_data(*args)

    return checked
