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

from ._compat import has_ordered_effects, is_traced

__all__ = ["graph_operator", "is_traced"]

_library = torch.library.Library("shardtensor", "DEF")


def graph_operator(schema: str, without_data: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: an operator of the namespace ``shardtensor`` that runs the function below it, on any device.

    Args:
        schema: its name and signature. Nothing that it returns may share memory with an argument.
        without_data: called in its place while tracing; gives results of the right shapes, dtypes and devices.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        name = _library.define(schema)
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"shardtensor::{name}", without_data, lib=_library)
        operator = getattr(torch.ops.shardtensor, name).default
        has_ordered_effects(operator)
        return operator

    return decorate
