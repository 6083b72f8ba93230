"""Recurrent layers and cells: ``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` and their cells.

Every step along the sequence needs the one before, so that only the batch can be worked on in parallel. Where the
sequence or the features are sharded, the batch is sharded instead, if it has an entry for every rank, by one exchange;
another one reshards the output, so that it has the layout of the input. A batch that is too short is refused: the ranks
would work one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Shard

from .._compat import TensorMeta
from ..dispatch.tensor import ShardTensor, redistribute_to
from ..errors import refuse
from ..layout.placements import AxisLayout
from ..layout.spec import ShardTensorSpec
from ..layout.strides import contiguous_stride
from ..operators.declaration import Arguments, Composed, Plan, operator
from .common.batch_parallel import by_batch

# One state, or of an LSTM a pair: as the caller gave them.
States = ShardTensor | Sequence[ShardTensor]
StateSpecs = ShardTensorSpec | Sequence[ShardTensorSpec]


def _declare_layers(function: Callable[..., tuple[Tensor, ...]]) -> None:
    """``torch.lstm`` (whose ``hx`` is a pair) or one of its kin: the output, and the last states."""

    @operator(function, tensors="input hx params")
    def plan_layers(
        call: Arguments,
        input: ShardTensorSpec,
        hx: StateSpecs,
        params: Sequence[ShardTensorSpec],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool = False,
    ) -> Plan:
        one = isinstance(hx, ShardTensorSpec)
        if one and (function is torch.lstm or isinstance(params, ShardTensorSpec)):
            # The arguments of a packed sequence: data, batch sizes, states, parameters.
            raise refuse(
                call.name,
                [input, hx],
                "the rows of a packed sequence belong to entries of the batch that only the batch sizes tell apart",
                "pass the padded sequences, with the batch sharded",
            )
        options = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
        if dropout and train and num_layers > 1:
            return Composed(lambda x, states, weights: _one_by_one(function, x, _each(states), weights, *options))
        time, batch = (1, 0) if batch_first else (0, 1)
        # One step shows all shapes and errors.
        shape = torch.Size(n if d != time else min(n, 1) for d, n in enumerate(input.shape))
        step = TensorMeta(shape, contiguous_stride(shape), input.tensor_meta.dtype)
        out, *last = call.returned(function, step, hx, params, *options)
        results = [n if d != time else input.shape[time] for d, n in enumerate(out.shape)]
        names: list[str | None] = [None, None, None]
        names[batch] = "batch"
        of_state = (None, "batch", None)
        shapes = [(results, names), *((t.shape, of_state) for t in last)]

        def run(x: ShardTensor, states: States, weights: Sequence[ShardTensor]) -> tuple[ShardTensor, ...]:
            given = _each(states)

            def layers(x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
                return function(x, _like(one, others[: len(given)]), list(others[len(given) :]), *options)

            operands = [(x, names), *((s, of_state) for s in given), *((w, (None,) * w.ndim) for w in weights)]
            out, *last = by_batch(call.name, layers, operands, shapes, takes_empty=True)
            return _laid_along(out, x, time), *last

        return Composed(run)


def _each(states: States) -> list[ShardTensor]:
    return [states] if isinstance(states, ShardTensor) else list(states)


def _like(one: bool, states: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
    """The states in the form in which they were given."""
    return states[0] if one else tuple(states)


def _laid_along(out: ShardTensor, input: ShardTensor, time: int) -> ShardTensor:
    """The output sharded along the sequence where the input is."""
    m = input._spec.sharded_dims().get(time)
    if m is None:
        return out
    return redistribute_to(out, out._spec.with_axes({m: AxisLayout(Shard(time), input._spec.sizes[m])}))


def _one_by_one(
    function: Callable[..., tuple[Tensor, ...]],
    input: Tensor,
    states: Sequence[ShardTensor],
    params: Sequence[ShardTensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Layer by layer, with a dropout between that draws its numbers as for any other ShardTensor."""
    directions = 1 + bidirectional
    each = len(params) // num_layers
    last: list[list[Tensor]] = [[] for _ in states]
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


def _declare_cell(function: Callable[..., Tensor | tuple[Tensor, ...]]) -> None:
    """One step: ``torch.lstm_cell`` (whose ``hx`` is a pair) or one of its kin."""

    @operator(function, tensors="input hx w_ih w_hh b_ih b_hh")
    def plan_cell(
        call: Arguments,
        input: ShardTensorSpec,
        hx: StateSpecs,
        w_ih: ShardTensorSpec,
        w_hh: ShardTensorSpec,
        b_ih: ShardTensorSpec | None = None,
        b_hh: ShardTensorSpec | None = None,
    ) -> Plan:
        found = call.returned(function, input, hx, w_ih, w_hh, b_ih, b_hh)
        shapes = [t.shape for t in (found if isinstance(found, tuple) else (found,))]
        one, rows = isinstance(hx, ShardTensorSpec), ("batch", None)

        def run(x: ShardTensor, states: States, *weights: ShardTensor | None) -> ShardTensor | tuple[ShardTensor, ...]:
            given, parameters = _each(states), [w for w in weights if w is not None]

            def cell(x: Tensor, *others: Tensor) -> Tensor | tuple[Tensor, ...]:
                return function(x, _like(one, others[: len(given)]), *others[len(given) :])

            operands = [*((t, rows) for t in (x, *given)), *((w, (None,) * w.ndim) for w in parameters)]
            reached = by_batch(call.name, cell, operands, [(shape, rows) for shape in shapes], takes_empty=True)
            return reached[0] if len(reached) == 1 else reached

        return Composed(run)


for _function in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu):
    _declare_layers(_function)
for _cell in (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell):
    _declare_cell(_cell)
