"""Recurrent layers and cells: ``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` and their cells.

Every step along the sequence needs the one before, so that only the batch can be worked on in parallel. Where the
sequence or the features are sharded, the batch is sharded instead, if it has an entry for every rank, by one exchange;
another one reshards the output, so that it has the layout of the input.

A batch that is too short for that leaves the sequence sharded, and the state travels in a *relay*: each rank runs its
part of the sequence from the state that the rank before it has reached, and passes on its own. What one rank runs at a
time is a *cell*: one layer, in one direction, on its part. It starts when the cell of the rank before has ended, and
the cells of the layer below on the same rank. So with ``->`` for cells of the forward and ``<-`` of the reverse
direction::

    step      0     1     2     3           0       1       2       3       4       5
    rank 0    ->0   ->1                     ->0             <-0     ->1             <-1
    rank 1          ->0   ->1                       <->0                    <->1
    rank 2                ->0   ->1         <-0             ->0     <-1             ->1

One layer in one direction takes as long as on one device. What is gained is memory, a pipeline of the layers (left),
and the other direction, which starts at the other end (right). All ranks know all steps, and take part in the exchange
after each. Only ranks that have a part of the sequence count. The backward pass takes the steps in reverse, with the
gradient of the state. Before that, all ranks at once run their cells again, from the states that they were given. Saved
are the input and these states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Shard

from .._compat import TensorMeta
from .._compat.c10d import group_along
from ..communication.exchange import Exchange
from ..dispatch.tensor import ShardTensor, redistribute_to, wrap
from ..errors import UnsupportedSharding, refuse
from ..layout.intervals import resized
from ..layout.placements import AxisLayout
from ..layout.spec import ShardTensorSpec
from ..layout.strides import contiguous_stride
from ..operators.declaration import Arguments, Composed, Plan, operator
from ..ranks.history import IN_TURN, here
from .common.batch_parallel import Result, arranged, by_batch
from .common.named_dims import Arrangement

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
                "only the batch sizes of a packed sequence tell which sample a row belongs to",
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
        specs = [input, *_each(hx), *params]
        others = [*([of_state] * len(_each(hx))), *((None,) * len(w.shape) for w in params)]
        try:
            arranged(call.name, specs, [names, *others])
        except UnsupportedSharding:
            along: list[str | None] = ["time" if d == time else name for d, name in enumerate(names)]
            how = arranged(call.name, specs, [along, *others], lost=("time",))
            found = [Result(results, along, out.dtype), *(Result(t.shape, of_state, t.dtype) for t in last)]
            relay = _Relay(call, how, found, function, one, options)
            return Composed(lambda x, states, weights: relay.in_turn([x, *_each(states), *weights]))

        def run(x: ShardTensor, states: States, weights: Sequence[ShardTensor]) -> tuple[ShardTensor, ...]:
            given = _each(states)

            def layers(x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
                return function(x, _like(one, others[: len(given)]), list(others[len(given) :]), *options)

            operands = [(x, names), *((s, of_state) for s in given), *((w, (None,) * w.ndim) for w in weights)]
            out, *last = by_batch(call.name, layers, operands, shapes, takes_empty=True)
            return _laid_along(out, x, time), *last

        return Composed(run)


def _each(states: Any) -> list[Any]:
    """The states, or their specs."""
    return list(states) if isinstance(states, (list, tuple)) else [states]


def _like(one: bool, states: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
    """The states in the form in which they were given."""
    return states[0] if one else tuple(states)


# -- along the sequence ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Turn:
    """What one rank does at one step of a relay.

    Attributes:
        cells: those that it runs, by their numbers: ``layer * directions + direction``.
        sends, gets: the cells whose states it then passes on, and is given, in the order of the other ranks.
        there, back: the messages with the states, and with their gradients; None where no rank has any.
    """

    cells: tuple[int, ...]
    sends: tuple[int, ...]
    gets: tuple[int, ...]
    there: Exchange | None
    back: Exchange | None


class _Relay(Plan):
    """The layers where the sequence is sharded. Tensors: input, states, parameters."""

    outputs: tuple[ShardTensorSpec, ...]

    def __init__(
        self,
        call: Arguments,
        how: Arrangement,
        results: Sequence[Result],
        function: Callable[..., tuple[Tensor, ...]],
        one: bool,
        options: tuple[bool, int, float, bool, bool, bool],
    ) -> None:
        biases, layers, _, train, bidirectional, batch_first = options
        self.name, self.label = call.name, f"{call.name} {IN_TURN}"
        self.device, self.autocast = call.device.type, call.autocast()
        self.targets, self.outputs = how.targets, tuple(result.spec(how) for result in results)
        self.saves = tuple(range(len(how.targets)))
        self.contributed = {i: how.gradient(i).placements for i in self.saves[1:]}
        self.function, self.one = function, one
        self.options = biases, 1, 0.0, train, False, batch_first
        self.time, self.directions, self.states = 1 if batch_first else 0, 1 + bidirectional, len(results) - 1
        self.cells = layers * self.directions
        m = next(m for m, axis in enumerate(how.axes) if axis is not None and "time" in axis.labels())
        self._plan_turns(layers, how.targets[0], m)

    def _plan_turns(self, layers: int, x: ShardTensorSpec, m: int) -> None:
        rank, holders = x.coordinate[m], [r for r, n in enumerate(x.sizes_along(m)) if n]
        ways, last = (holders, holders[::-1])[: self.directions], len(holders) - 1
        # Whether this rank's part of the sequence is the first one and the last one, in each direction.
        self.first, self.last = [rank == way[0] for way in ways], [rank == way[-1] for way in ways]
        shapes = [s.local_shape() for s in self.targets[1 : 1 + self.states]]
        # A layer may start with the step after the one before it, or in both directions when that has ended.
        apart = len(holders) if self.directions > 1 else 1
        steps = []
        for step in range((layers - 1) * apart + len(holders)):
            cells, sends, gets, passed = [], [], [], False
            for i in range(self.cells):
                layer, direction = divmod(i, self.directions)
                place, way = step - layer * apart, ways[direction]
                if 0 <= place <= last and way[place] == rank:
                    cells.append(i)
                if 0 <= place < last:
                    passed = True
                    sends += [(way[place + 1], i)] if way[place] == rank else []
                    gets += [(way[place], i)] if way[place + 1] == rank else []
            if rank not in holders and not step:
                cells = list(range(self.cells))  # for the dtypes and shapes of its empty results
            sends, gets = sorted(sends), sorted(gets)
            sent, got = ([(r, (1, *shape[1:])) for r, _ in pairs for shape in shapes] for pairs in (sends, gets))
            there, back = (
                Exchange(*messages, group_along(x.mesh, m), self.directions) if passed else None
                for messages in ((sent, got), (got, sent))
            )
            steps.append(_Turn(tuple(cells), tuple(i for _, i in sends), tuple(i for _, i in gets), there, back))
        self.turns = steps

    def in_turn(self, tensors: Sequence[ShardTensor]) -> Any:
        """The results, differentiable. What ranks communicate meanwhile says that they wait for each other."""
        caller, here.operator = here.operator, self.label
        try:
            return self.run([redistribute_to(t, target) for t, target in zip(tensors, self.targets, strict=True)])
        finally:
            here.operator = caller

    def forward(self, x: Tensor, *others: Tensor) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        starts, weights = self._by_cell(others[: self.states]), others[self.states :]
        inputs, outs, ends = [x], dict[int, Tensor](), dict[int, Sequence[Tensor]]()
        for turn in self.turns:
            for i in turn.cells:
                layer = i // self.directions
                if layer == len(inputs):
                    inputs.append(self._beside(outs, layer))
                outs[i], *ends[i] = self._run_cell(i, inputs[layer], *starts[i], *self._own(i, weights))
            starts |= self._pass_on(turn.there, turn.sends, turn.gets, ends, starts[0][0])
        reached = self._stacked([ends[i] for i in range(self.cells)], self.last)
        return (self._beside(outs, len(inputs)), *reached), self._stacked([starts[i] for i in range(self.cells)])

    def backward(self, needed: Sequence[bool], grads: Sequence[Any], *saved: Tensor) -> list[Tensor | None]:
        x, weights, starts = saved[0], saved[1 + self.states : -self.states], self._by_cell(saved[-self.states :])
        inputs, outs, ends = [_leaf(x, needed[0])], dict[int, Tensor](), dict[int, Sequence[Tensor]]()
        leaves = []
        with torch.enable_grad(), torch.autocast(self.device, self.autocast, enabled=self.autocast is not None):
            for i in range(self.cells):
                layer = i // self.directions
                if layer == len(inputs):
                    inputs.append(_leaf(self._beside(outs, layer)))
                own = map(_leaf, self._own(i, weights), self._own(i, needed[1 + self.states :]))
                leaves.append([inputs[layer], *map(_leaf, starts[i]), *own])
                outs[i], *ends[i] = self._run_cell(i, *leaves[i])
        found: dict[int, list[Any]] = {}
        of_ends: dict[int, Sequence[Any]] = {
            i: [g[i : i + 1] if g is not None and self.last[i % self.directions] else None for g in grads[1:]]
            for i in range(self.cells)
        }
        sums = {len(inputs): grads[0]}  # the gradients of each layer's input
        for turn in reversed(self.turns):
            of_starts = {i: found[i][1 : 1 + self.states] for i in turn.gets}
            of_ends |= self._pass_on(turn.back, turn.gets, turn.sends, of_starts, starts[0][0])
            for i in reversed(turn.cells):
                layer, direction = divmod(i, self.directions)
                size = outs[i].shape[-1]
                above = None if sums[layer + 1] is None else sums[layer + 1].narrow(-1, direction * size, size)
                found[i] = _gradients(leaves[i], [outs[i], *ends[i]], [above, *of_ends[i]])
                of_input = found[i][0]
                sums[layer] = of_input if sums.get(layer) is None else sums[layer] + of_input
        by_cell = [found[i] for i in range(self.cells)]
        of_states = self._stacked([grads[1 : 1 + self.states] for grads in by_cell], self.first)
        complete = [sums[0], *of_states, *(grad for grads in by_cell for grad in grads[1 + self.states :])]
        return [grad if need else None for grad, need in zip(complete, needed, strict=True)]

    def wrapped(self, result: Sequence[Tensor]) -> tuple[ShardTensor, ...]:
        # In which of these functions autocast casts differs by device.
        return tuple(wrap(t, spec.with_dtype(t.dtype)) for t, spec in zip(result, self.outputs, strict=True))

    def _run_cell(self, i: int, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Its output, and the states that it ends with."""
        time, n, backwards = self.time, x.shape[self.time], i % self.directions == 1
        if not n:  # torch takes no empty sequence
            x = x.new_zeros(resized(x.shape, time, 1))
        states = _like(self.one, others[: self.states])
        x = x.flip(time) if backwards else x
        out, *ends = self.function(x, states, list(others[self.states :]), *self.options)
        return (out.flip(time) if backwards else out).narrow(time, 0, n), *ends

    def _pass_on(
        self,
        exchange: Exchange | None,
        sends: Sequence[int],
        gets: Sequence[int],
        states: Mapping[int, Sequence[Tensor]],
        like: Tensor,
    ) -> dict[int, Sequence[Tensor]]:
        """What this rank gets for cells, by their numbers; ``states`` are those that it sends."""
        if exchange is None:
            return {}
        received = iter(exchange.start([t.to(like.dtype) for i in sends for t in states[i]], like).wait())
        return {i: [next(received) for _ in range(self.states)] for i in gets}

    def _by_cell(self, states: Sequence[Tensor]) -> dict[int, Sequence[Tensor]]:
        return dict(enumerate(zip(*(torch.split(t, 1) for t in states), strict=True)))

    def _stacked(self, by_cell: Sequence[Sequence[Tensor]], here: Sequence[bool] | None = None) -> list[Tensor]:
        """One tensor of each state; zeros for the directions whose states are not ``here``."""
        if here is not None:
            by_cell = [
                ts if here[i % self.directions] else [torch.zeros_like(t) for t in ts] for i, ts in enumerate(by_cell)
            ]
        return [torch.cat(ts) for ts in zip(*by_cell, strict=True)]

    def _beside(self, outs: Mapping[int, Tensor], layer: int) -> Tensor:
        """The input of a layer: what the directions of the one before it give, side by side."""
        found = [outs[i] for i in range((layer - 1) * self.directions, layer * self.directions)]
        return found[0] if len(found) == 1 else torch.cat(found, -1)

    def _own(self, i: int, of_weights: Sequence[Any]) -> Sequence[Any]:
        """What there is of the weights of a cell."""
        each = len(of_weights) // self.cells
        return of_weights[i * each : (i + 1) * each]


def _leaf(t: Tensor, needed: bool = True) -> Tensor:
    return t.detach().requires_grad_(needed)


def _gradients(leaves: Sequence[Tensor], results: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Any]:
    """Those of all leaves, None where there is none."""
    given = [torch.zeros_like(y) if g is None else g for y, g in zip(results, grads, strict=True)]
    found = iter(torch.autograd.grad(results, [t for t in leaves if t.requires_grad], given, materialize_grads=True))
    return [next(found) if t.requires_grad else None for t in leaves]


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
