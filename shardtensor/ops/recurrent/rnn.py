"""Recurrent layers and cells: ``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` and their cells.

Every step along the sequence needs the one before, so that the batch alone can be worked on side by side. Where the
sequence or the features are cut, the batch is cut instead, if it has an entry for every rank, by one exchange; another
one puts the output back, so that it lies like the input. A batch that is too short is refused: the ranks would work one
after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Shard

from ...errors import refuse
from ...registry import register
from ...tensor import ShardTensor, redistribute_to
from ..common.alignment import common_mesh, described
from ..common.batch_parallel import by_batch

__all__: list[str] = []


def _layers(function: Any, input: Any, hx: Any, *rest: Any) -> Any:
    """``torch.lstm`` (whose ``hx`` is a pair) and its kin: the output, and the last states."""
    name = function.__name__
    packed = isinstance(hx, Tensor) and (function is torch.lstm or isinstance(rest[0], Tensor))
    states = list(hx) if isinstance(hx, (list, tuple)) else [hx]
    if packed:
        if common_mesh(name, [input, hx]) is None:
            return NotImplemented
        raise refuse(
            name,
            [input, hx],
            "the rows of a packed sequence belong to entries of the batch that only the batch sizes tell apart",
            "pass the padded sequences, with the batch sharded",
        )
    params, has_biases, num_layers, dropout, train, bidirectional, batch_first = rest
    operands = [input, *states, *params]
    if common_mesh(name, operands) is None:
        return NotImplemented
    if dropout and train and num_layers > 1:
        return _one_by_one(function, input, states, *rest)
    time, batch = (1, 0) if batch_first else (0, 1)
    single = [n if d != time else min(n, 1) for d, n in enumerate(input.shape)]  # a step shows all shapes and errors
    found = function(
        torch.empty(single, dtype=input.dtype, device="meta"),
        _like(hx, [described(s) for s in states]),
        [described(p) for p in params],
        *rest[1:],
    )
    shape = list(found[0].shape)
    shape[time] = input.shape[time]
    names: list[str | None] = [None, None, None]
    names[batch] = "batch"

    def run(x: Tensor, *others: Tensor) -> Any:
        return function(x, _like(hx, others[: len(states)]), list(others[len(states) :]), *rest[1:])

    out, *last = by_batch(
        name,
        run,
        [(input, names), *((s, (None, "batch", None)) for s in states), *((p, (None,) * p.ndim) for p in params)],
        [(shape, names), *((s.shape, (None, "batch", None)) for s in found[1:])],
        takes_empty=True,
    )
    return _laid_along(out, input, time), *last


def _like(hx: Any, states: Sequence[Any]) -> Any:
    """The states in the form in which they were given."""
    return tuple(states) if isinstance(hx, (list, tuple)) else states[0]


def _laid_along(out: Any, input: Any, time: int) -> Any:
    """The output cut along the sequence where the input is."""
    if not isinstance(input, ShardTensor):
        return out
    placements, sizes = list(out._spec.placements), list(out._spec.sizes)
    m = input._spec.sharded_dims().get(time)
    if m is not None:
        placements[m], sizes[m] = Shard(time), input._spec.sizes[m]
    return redistribute_to(out, out._spec.replace(placements=placements, sizes=tuple(sizes)))


def _one_by_one(
    function: Any,
    input: Any,
    states: Sequence[Any],
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """Layer by layer, with a dropout between that draws its numbers as for any other ShardTensor."""
    directions = 1 + bidirectional
    each = len(params) // num_layers
    last: list[list[Any]] = [[] for _ in states]
    for i in range(num_layers):
        own = [s[i * directions : (i + 1) * directions] for s in states]
        layer = list(params[i * each : (i + 1) * each])
        hx = tuple(own) if function is torch.lstm else own[0]
        input, *reached = function(input, hx, layer, has_biases, 1, 0.0, train, bidirectional, batch_first)
        for found, state in zip(last, reached, strict=True):
            found.append(state)
        if i < num_layers - 1:
            input = F.dropout(input, dropout, training=True)
    return input, *(torch.cat(found) for found in last)


def _cell(function: Any, input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    """One step: ``torch.lstm_cell`` (whose ``hx`` is a pair) and its kin."""
    states = list(hx) if isinstance(hx, (list, tuple)) else [hx]
    weights = [w for w in (w_ih, w_hh, b_ih, b_hh) if w is not None]
    operands = [input, *states, *weights]
    if common_mesh(function.__name__, operands) is None:
        return NotImplemented
    found = function(described(input), _like(hx, [described(s) for s in states]), *map(described, weights))
    found = found if isinstance(found, tuple) else (found,)

    def run(x: Tensor, *others: Tensor) -> Any:
        return function(x, _like(hx, others[: len(states)]), *others[len(states) :])

    rows = ("batch", None)
    return by_batch(
        function.__name__,
        run,
        [*((t, rows) for t in (input, *states)), *((w, (None,) * w.ndim) for w in weights)],
        [(t.shape, rows) for t in found],
        takes_empty=True,
    )


_LAYERS: tuple[Callable[..., Any], ...] = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
_CELLS: tuple[Callable[..., Any], ...] = (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)

for _function in _LAYERS:
    register(_function)(partial(_layers, _function))
for _function in _CELLS:
    register(_function)(partial(_cell, _function))
