"""Communication as operators of a traced graph.

[Note: communication in graphs] ``torch.compile`` runs our code on tensors without data, and records what it does to
local tensors as a graph. A collective is a node of that graph: an operator of ours, which calls the eager function when
the graph runs. Each rank traces for itself, so all graphs must communicate in the same way, even if a rank does not use
what it receives (its shard is empty, or it only sends). torch's functional collectives do not guarantee that, because
unused ones are removed. Our operators are declared to have ordered effects. So they stay, in the order in which they
were traced, which is the same on all ranks.

[Note: start and wait] Communication that other work may overlap with is two operators. The one that starts it returns a
ticket, an integer that :func:`wait` exchanges for the result. The buffer that is being received is no tensor of the
graph before that, so no compiler can reuse its memory, or read it too early. The tensor that is being sent is an
argument of ``wait``, and so keeps its memory until then. Compilers are free to move local work to either side of both,
and do so to save memory. So ``wait`` also takes what is to be computed before it, and work that is to come after the
start takes an operand that :func:`after_start` has copied. Both are arguments, and no compiler moves work across these.

[Note: order in graphs] Communication stays in the order in which it was traced, and no pass over a graph joins it. In
the forward graph that order is the program's. In the backward graph it is autograd's, which runs, of the nodes that are
ready, the one made last. What a node waits for was made after it, so all nodes run in the reverse order of their
making, whatever other nodes a rank has. The nodes that take weights' gradients have no such order, but when they run
all sums are on their way.

The operators of each graph are a chain: each takes a token that the one before it returns, so passes over the graph
keep their order. The tokens of the forward graph are saved for the backward graph, so no operator is called twice.
Inductor's scheduler, which otherwise takes the order that needs least memory with this rank's sizes, is held to the
chain.

Graphs differ from rank to rank: in a convolution with stride 2 one rank only sends and its neighbour only receives, an
empty shard depends on nothing that arrives, and only some ranks compute gradients in two parts. So each graph tells
something else about which messages are independent, and could change places or be joined. Ranks that decided this from
their own graphs would wait for each other forever. Messages are joined from specs, while the graph is traced. There is
little else to gain: in a chain of convolutions and norms each message depends on the one before it.

A CUDA graph repeats kernels, and nothing that the host does: no number of a ticket, no seed, no entry of the history.
So inductor does not make a CUDA graph of a graph with our operators (``mode="reduce-overhead"``): it runs such a graph
as in its default mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx.traceback import get_current_meta

from .._compat import (
    Library,
    OpOverload,
    goes_into_graph,
    has_ordered_effects,
    is_traced,
    no_cuda_graphs_of,
    no_frames_of,
)
from ..errors import UnsupportedSharding

__all__ = [
    "after_start",
    "goes_into_graph",
    "graph_operator",
    "is_traced",
    "materialized",
    "no_ticket",
    "ticket_for",
    "wait",
]

Result = TypeVar("Result")

no_frames_of("shardtensor")
no_cuda_graphs_of("shardtensor")
_library = Library("shardtensor", "DEF")


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
        name = _library.define(schema, tags=(torch.Tag.cudagraph_unsafe,))
        _library.impl(name, function, "CompositeExplicitAutograd")
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


# -- start and wait ----------------------------------------------------------------------------------------------------

_numbers = count()
_under_way: dict[int, Callable[[], Tensor]] = {}


def ticket_for(finish: Callable[[], Tensor]) -> Tensor:
    """The ticket of what was started; ``finish`` waits for it, and returns a contiguous tensor."""
    number = next(_numbers)
    _under_way[number] = finish
    return torch.tensor(number, device="cpu")


def no_ticket(*_: Any) -> Tensor:
    """The ticket of what is only traced: ``without_data`` of the operators that start something."""
    return torch.empty((), dtype=torch.int64, device="cpu")


@graph_operator(
    "wait(Tensor ticket, Tensor sent, int[] shape, Tensor? after) -> Tensor",
    lambda ticket, sent, shape, after: sent.new_empty(shape),
)
def wait(ticket: Tensor, sent: Tensor, shape: Sequence[int], after: Tensor | None) -> Tensor:
    """The result of what was started, like ``sent`` and of this shape. See [Note: start and wait].

    Args:
        sent: what is being sent, and must not change before.
        after: what is to be computed while the communication is under way.

    Raises:
        RuntimeError: nothing was started for the ticket, or it has been waited for.
    """
    finish = _under_way.pop(int(ticket), None)
    if finish is None:
        raise RuntimeError(
            "wait: nothing was started for this ticket, or it has been waited for. A CUDA graph that contains "
            "the start of a communication but not its end cannot be replayed: capture both, or none."
        )
    return finish()


@graph_operator("after_start(Tensor value, Tensor ticket) -> Tensor", lambda value, _: value.clone(), ordered=False)
def after_start(value: Tensor, ticket: Tensor) -> Tensor:
    """A copy of ``value``, made after what the ticket is for has been started. See [Note: start and wait]."""
    return value.clone()


# -- numbers that loops over shards read -------------------------------------------------------------------------------


def materialized(numbers: Sequence[Tensor]) -> Sequence[Tensor]:
    """The same numbers, which a compiler for CPUs computes once, before the loops that read them.

    By itself inductor computes what is small anew for each element of a shard, with its roots and divisions, and makes
    no vector instructions of the loop then. Kernels of accelerators wait for memory meanwhile, and are not helped.
    """
    first = numbers[0]
    return _materialized(numbers) if first.device.type == "cpu" and goes_into_graph(first) else numbers


@graph_operator(
    "materialized(Tensor[] numbers) -> Tensor[]", lambda numbers: [t.clone() for t in numbers], ordered=False
)
def _materialized(numbers: Sequence[Tensor]) -> Sequence[Tensor]:
    return [t.clone() for t in numbers]
