"""Communication as operators of a traced graph.

[Note: communication in graphs] ``torch.compile`` runs our code on tensors without data, and records what it does to
local tensors as a graph. A collective is a node of that graph: an operator of ours, which calls the eager function when
the graph runs. Each rank traces for itself, so all graphs must communicate in the same way, even where a rank does not
use what it receives (its shard is empty, or it only sends). torch's functional collectives do not guarantee that:
unused ones are removed. Ours are declared to have ordered effects, so they stay, in the order in which they were
traced, which is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.fx.traceback import get_current_meta

from ._compat import OpOverload, has_ordered_effects, is_traced, no_frames_of
from .errors import UnsupportedSharding

__all__ = ["graph_operator", "is_traced"]

Result = TypeVar("Result")

no_frames_of("shardtensor")
_library = torch.library.Library("shardtensor", "DEF")  # type: ignore[no-untyped-call]


def graph_operator(
    schema: str, without_data: Callable[..., Any], *, ordered: bool = True
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Decorator: make the function below it an operator of the namespace ``shardtensor``, on any device.

    Args:
        schema: its name and signature. No result may share memory with an argument.
        without_data: called in its place while tracing; returns results of the right shapes, dtypes and devices.
        ordered: every call has to stay in the graph, and in its order.
    """

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        name = _library.define(schema)  # type: ignore[no-untyped-call]
        _library.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        operator: OpOverload = getattr(torch.ops.shardtensor, name).default
        torch.library.register_fake(
            f"shardtensor::{name}", _once(name, without_data) if ordered else without_data, lib=_library
        )
        if ordered:
            has_ordered_effects(operator)
        return operator

    return decorate


def _once(name: str, without_data: Callable[..., Any]) -> Callable[..., Any]:
    """``without_data``, which refuses where the graph would have to contain the operator twice."""

    def checked(*args: Any) -> Any:
        if "recompute" in get_current_meta():
            raise UnsupportedSharding(
                f"{name}: activation checkpointing inside of a compiled function would repeat communication or random "
                "numbers, which torch.compile cannot do. Remedy: checkpoint the compiled module, "
                "checkpoint(torch.compile(block), x, use_reentrant=False), rather than compile the checkpoint."
            )
        return without_data(*args)

    return checked
