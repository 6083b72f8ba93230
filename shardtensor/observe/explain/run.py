"""A model's run as each rank in turn, in one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.overrides import TorchFunctionMode

from ..._compat import NEEDS_VALUES, tree_leaves, tree_map, without_values
from ...dispatch.scatter import part_at
from ...dispatch.tensor import ShardTensor
from ...errors import UnsupportedSharding
from ...layout.intervals import chunk_sizes
from ...layout.spec import ShardTensorSpec
from .._compat import without_graphs
from ..counting import Communication
from ..simulate import simulate_ranks, without_groups
from .layers import Layer, Share
from .recording import Recorder, Row
from .report import Explanation

# -- prepare -----------------------------------------------------------------------------------------------------------

# What a preview is asked for, checked and completed: layouts and sizes of inputs, and which ranks to run.

FEW = 8  # up to so many ranks are all run
_MANY_ROWS = 0.5  # of other ranks, that no rank should have to read

Sizes = Mapping[int, Sequence[int]]
GivenSizes = Sizes | tuple[int, ...] | None


class UnfitArguments(ValueError):
    """Arguments of a preview that do not fit each other or the inputs, as opposed to what a model raises."""


@dataclass(frozen=True)
class Job:
    """What is run: see :func:`shardtensor.explain`.

    Attributes:
        inputs: the arguments, of which some may be dicts or lists of tensors.
        layouts: for each leaf of the inputs one placement per mesh dim, or None for one that stays plain.
        sizes: for each leaf of the inputs its shard sizes by mesh dim.
        device: the type of the device that tensors are on, or say that they are.
    """

    model: Callable[..., Any]
    inputs: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    mesh: tuple[int, ...]
    layouts: tuple[tuple[Placement, ...] | None, ...]
    sizes: tuple[Sizes, ...]
    backward: bool | Callable[[Any], Tensor]
    device: str

    @property
    def world_size(self) -> int:
        return math.prod(self.mesh)

    @property
    def given(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [t for t in tree_leaves((self.inputs, dict(self.kwargs))) if isinstance(t, Tensor)]

    @property
    def weights(self) -> list[Tensor]:
        """Parameters and buffers."""
        return [*self.model.parameters(), *self.model.buffers()] if isinstance(self.model, nn.Module) else []

    def held(self, rank: int) -> int:
        """How many bytes of the inputs a rank holds."""
        return sum(own for _, own, _ in self._inputs_of(rank))

    def part(self, rank: int) -> float:
        """How much of the sharded inputs a rank holds, from 0 to 1."""
        sharded = [(own, n) for is_sharded, own, n in self._inputs_of(rank) if is_sharded]
        return sum(own for own, _ in sharded) / max(1, sum(n for _, n in sharded))

    def _inputs_of(self, rank: int) -> Iterator[tuple[bool, int, int]]:
        """Of each tensor: whether it is sharded, and how many bytes a rank and one process hold of it."""
        at = [int(k) for k in torch.unravel_index(torch.tensor(rank), self.mesh)]
        for value, layout, sizes in zip(tree_leaves(self.inputs), self.layouts, self.sizes):
            if isinstance(value, Tensor):
                shape = list(value.shape)
                for m, placement in enumerate(layout or ()):
                    if isinstance(placement, Shard):
                        shape[placement.dim] = sizes[m][at[m]]
                yield bool(sizes), math.prod(shape) * value.element_size(), value.nbytes


def prepared(
    model: Callable[..., Any],
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mesh: int | Sequence[int],
    shard: Any,
    shard_sizes: GivenSizes | list[GivenSizes],
    backward: bool | Callable[[Any], Tensor],
) -> Job:
    """The job of :func:`shardtensor.explain`'s arguments, or the errors that it documents."""
    shape = (mesh,) if isinstance(mesh, int) else tuple(mesh)
    if not shape or min(shape) < 1:
        raise UnfitArguments(
            f"mesh={mesh!r}: give a number of ranks, or the mesh's shape, such as (2, 2); all at least 1"
        )
    by_input, sizes_by_input = _by_input("shard", shard, inputs), _by_input("shard_sizes", shard_sizes, inputs)
    leaves = [
        (leaf, each, given)
        for value, each, given in zip(inputs, by_input, sizes_by_input)
        for leaf in tree_leaves(value)
    ]
    layouts, sizes = [], []
    for value, each, given in leaves:
        layout = _layout(each, shape, value.ndim) if isinstance(value, Tensor) and each is not None else None
        layouts.append(layout)
        sharded = {m: p.dim for m, p in enumerate(layout or ()) if isinstance(p, Shard)}
        chosen = _by_mesh_dim(given, shape, list(sharded))
        sizes.append({m: _chosen(chosen.get(m), value.shape[d], shape[m]) for m, d in sharded.items()})
    if shard is None and shape != (1,):
        raise UnfitArguments(f"shard=None is the model on one rank, without shards; mesh={mesh!r} has more")
    if shard is not None and all(layout is None for layout in layouts):
        raise UnfitArguments(f"shard={shard!r}: none of the inputs is a tensor that has these dims")
    devices = {t.device.type for t, *_ in leaves if isinstance(t, Tensor)} - {"meta"}
    if isinstance(model, nn.Module):
        devices |= {t.device.type for t in model.parameters()} - {"meta"}
    if len(devices) > 1:
        raise UnfitArguments(f"model and inputs are on different devices: {sorted(devices)}")
    device = devices.pop() if devices else "cpu"
    return Job(model, inputs, kwargs, shape, tuple(layouts), tuple(sizes), backward, device)


def _by_input(name: str, given: Any, inputs: Sequence[Any]) -> list[Any]:
    """One for each input: those of a list, or the same for all."""
    if not isinstance(given, list):
        return [given] * len(inputs)
    if len(given) != len(inputs):
        raise UnfitArguments(f"{name} has {len(given)} entries for {len(inputs)} inputs")
    return given


def _by_mesh_dim(sizes: GivenSizes, shape: Sequence[int], sharded: Sequence[int]) -> Sizes:
    """Sizes by mesh dims counted from the front; ``sharded``: those that shard a tensor."""
    if isinstance(sizes, tuple):
        if len(sharded) > 1:
            raise UnfitArguments(
                f"shard_sizes={sizes}: mesh dims {tuple(sharded)} shard the input; give {{mesh_dim: sizes}}"
            )
        return dict.fromkeys(sharded, sizes)
    sizes = sizes or {}
    given = {m % len(shape): tuple(each) for m, each in sizes.items() if -len(shape) <= m < len(shape)}
    if len(given) != len(sizes):
        raise UnfitArguments(f"shard_sizes={sizes!r} names mesh dims beyond those of {tuple(shape)}")
    return given


def sample_of(job: Job) -> tuple[int, ...]:
    """The ranks to run: all of a small world, otherwise those that differ most."""
    world = range(job.world_size)
    if job.world_size <= FEW:
        return tuple(world)
    return tuple(sorted({*ends_and_middle(job.mesh), max(world, key=job.held), min(world, key=job.held)}))


def ends_and_middle(mesh: Sequence[int]) -> list[int]:
    """The first rank, the last, and one that has neighbours on both sides along every mesh dim where any has."""
    middle = 0
    for n in mesh:
        middle = middle * n + n // 2
    return sorted({0, middle, math.prod(mesh) - 1})


def _layout(shard: Any, mesh: tuple[int, ...], ndim: int) -> tuple[Placement, ...] | None:
    """One placement per mesh dim of what a caller gives; None where the tensor does not have the dims."""
    given = shard if isinstance(shard, (tuple, list)) else (shard,)
    if len(given) != len(mesh):
        raise UnfitArguments(f"shard={shard!r} does not have one tensor dim for each dim of the mesh {mesh}")
    placements: list[Placement] = []
    for each in given:
        if isinstance(each, Shard):
            each = each.dim
        if each is None or each == Replicate():
            placements.append(Replicate())
        elif isinstance(each, int):
            if not -ndim <= each < ndim:
                return None
            placements.append(Shard(each % ndim))
        else:
            raise TypeError(f"shard={shard!r}: for each mesh dim the tensor dim that it shards, Shard(dim) or None")
    return tuple(placements)


def _chosen(given: Sequence[int] | None, length: int, ranks: int) -> tuple[int, ...]:
    """The shard sizes of a dim of this length, torch.chunk's where none are given."""
    if given is None:
        return chunk_sizes(length, ranks)
    if len(given) != ranks or sum(given) != length or min(given) < 0:
        raise UnfitArguments(f"shard sizes {tuple(given)} are not {ranks} sizes that add up to {length}")
    return tuple(given)


# -- run ---------------------------------------------------------------------------------------------------------------

Run = tuple[list[Row], str]  # what one rank has recorded, and why it has stopped; "" where it has not


def explained(job: Job, ranks: Sequence[int], values: bool | None, compared: bool = True) -> Explanation:
    """Run the job as these ranks, and put what they recorded next to each other, and ``compared`` to one process."""
    if dist.is_initialized():
        job = replace(job, device="cpu")  # a copy of this process can use no other
    return without_groups(_explained, job, ranks, values, compared)


def _explained(job: Job, ranks: Sequence[int], values: bool | None, compared: bool) -> Explanation:
    notes, reads = [], "values=True"
    runs: list[Run] | None = None
    if not values:
        try:
            runs = simulate_ranks(_run, job.world_size, job, without_values, values is False, only=ranks)
        except NEEDS_VALUES as error:
            reads = str(error) or type(error).__name__
            notes.append(
                f"The model reads values of tensors ({reads}), so it was run with values, "
                "which takes the memory and the time of one rank. What it would receive from other ranks is zero here: "
                "where messages depend on received values, the numbers may be others in a real run."
            )
    by_index = any(row.row_bytes for rows, _ in runs or () for row in rows)
    if runs is not None and values is None and by_index and _has_values(job):
        runs = None
        notes.append(
            "Which rows an index reads of other ranks is in its values, so the model was run with values, which takes "
            "the memory and the time of one rank. What it would receive from other ranks is zero here."
        )
    if runs is None:
        if any(t.is_meta for t in job.weights):
            raise UnfitArguments(
                f"this preview reads values of tensors ({reads}), and the model's weights are on the meta device, "
                "where there are none: make the model on the CPU (on the command line without --meta)"
            )
        if away := {t.device.type for t in [*job.given, *job.weights]} - {"meta", job.device}:
            raise RuntimeError(
                f"this preview reads values, and the model or its inputs are on {away.pop()!r}, which cannot be read "
                "while a process group runs: move them to the CPU, or call explain before init_process_group"
            )
        runs = simulate_ranks(_run, job.world_size, job, nullcontext, only=ranks)
    if len(ranks) < job.world_size:
        notes.append(f"Only the ranks {list(ranks)} of {job.world_size} were run; the balance is theirs.")
    return _joined(job, ranks, runs, notes, _alone(job) if compared else "it was not asked for")


_Call = tuple[str, str, int]


def _call(row: Row) -> _Call:
    """What a call is known by on one process, too."""
    return row.path, row.operator, row.call


def _alone(job: Job) -> Mapping[_Call, Row] | str:
    """What one process with the global tensors does, call by call, without values or memory; or why it is not known."""
    if all(layout is None for layout in job.layouts):
        return "nothing is sharded"
    alone = replace(job, mesh=(1,), layouts=(None,) * len(job.layouts), sizes=({},) * len(job.sizes))
    try:
        ((rows, _),) = simulate_ranks(_run, 1, alone, without_values)
    except NEEDS_VALUES as error:
        return f"the model reads values of tensors ({error or type(error).__name__})"
    except Exception as error:  # the model's own: it may take nothing but ShardTensors
        return f"the model raises {type(error).__name__} on plain tensors: {error}"
    whole: dict[_Call, Row] = {}
    for row in rows:
        first = whole.setdefault(_call(row), row)
        if first is not row:  # all that belongs to no call: the gradients of weights, what a checkpoint keeps
            first.saved_bytes += row.saved_bytes
            first.flops = [a + b for a, b in zip(first.flops, row.flops, strict=True)]
    return whole


# -- one rank ---------------------------------------------------------------------------------------------------------


def _run(job: Job, values: Callable[[], AbstractContextManager[Any]], stops: bool = False) -> Run:
    """Run the job as the rank that this process is now. ``values``: the context without values, or a null context;
    ``stops``: where a value is read that is not there, this ends the run and not the preview."""
    with values() as mode:
        mesh = init_device_mesh(job.device, job.mesh)
        bare = partial(_bare, mode, job.device)
        with nullcontext() if mode is None else _Copying(bare):
            model = copy.deepcopy(job.model) if isinstance(job.model, nn.Module) else job.model
        given = bare if mode is not None else partial(_with_values, job.device)
        layouts = iter(zip(job.layouts, job.sizes))  # in the order of the leaves
        inputs = tree_map(lambda leaf: _input(_each_tensor(given, leaf), mesh, *next(layouts)), job.inputs)
        kwargs = _each_tensor(given, job.kwargs)
        plain = all(layout is None for layout in job.layouts)
        recorder = Recorder(model, values=mode is None, plain=plain)
        with nullcontext() if mode is None else mode, without_graphs():
            try:
                _passes(job, recorder, model, inputs, kwargs)
            except UnsupportedSharding as error:  # not in an operator that the model calls
                return recorder.rows, str(error)
            except NEEDS_VALUES as error:
                if not stops:
                    raise
                after = f" after {recorder.rows[-1].path} {recorder.rows[-1].operator}" if recorder.rows else ""
                return recorder.rows, f"the model reads values{after} ({error}), and values=False has none"
        return recorder.rows, ""


def _passes(job: Job, recorder: Recorder, model: Any, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    given = [t for t in tree_leaves((inputs, kwargs)) if isinstance(t, Tensor)]
    with recorder.forward(given):
        output = model(*inputs, **kwargs)
    if not job.backward:
        return
    if callable(job.backward):
        with recorder.loss():
            output = job.backward(output)
    roots = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    gradients = [torch.ones_like(t) for t in roots]
    with recorder.backward():
        torch.autograd.backward(roots, gradients)


def _input(value: Any, mesh: DeviceMesh, layout: tuple[Placement, ...] | None, sizes: Sizes) -> Any:
    """An input as the ranks of the mesh have it: this rank's shard, made without communication."""
    if layout is None:
        return value
    spec = ShardTensorSpec.make(mesh, layout, value.shape, value.dtype, shard_sizes=dict(sizes), stride=value.stride())
    local = part_at(value, spec, spec.coordinate).clone()
    return ShardTensor.from_local(local, mesh, layout, shard_sizes=dict(sizes)).requires_grad_(value.requires_grad)


def _each_tensor(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    return tree_map(lambda t: function(t) if isinstance(t, Tensor) else t, value)


def _bare(mode: Any, device: str, t: Tensor) -> Tensor:
    """A tensor like ``t`` without values."""
    on = t.device if t.device.type == device else device
    with mode:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=on, requires_grad=t.requires_grad)


def _with_values(device: str, t: Tensor) -> Tensor:
    """``t``, or in place of one on the meta device any that is like it."""
    return torch.zeros_like(t, device=device, requires_grad=t.requires_grad) if t.device.type == "meta" else t


class _Copying(TorchFunctionMode):
    """Inside, ``copy.deepcopy`` copies tensors without their values."""

    def __init__(self, bare: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._bare = bare

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.clone:
            return self._bare(args[0].detach())
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self._bare(tensor)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


# -- all of them ------------------------------------------------------------------------------------------------------


def _joined(
    job: Job, ranks: Sequence[int], runs: Sequence[Run], notes: Sequence[str], whole: Mapping[_Call, Row] | str
) -> Explanation:
    """The ranks' rows as layers. All ranks call the same operators in the same order."""
    names = [[(row.path, row.operator) for row in rows] for rows, _ in runs]
    if any(each != names[0] for each in names):
        raise RuntimeError(
            f"ranks {list(ranks)} would not call the same operators: {_first_difference(ranks, names)}. A model must "
            "not decide by its rank what it computes"
        )
    classes = {}
    if isinstance(job.model, nn.Module):
        classes = {path: type(module).__name__ for path, module in job.model.named_modules()}
    layers = []
    alone = {} if isinstance(whole, str) else dict(whole)
    for rows in zip(*(rows for rows, _ in runs)):
        first = rows[0]
        one = alone.pop(_call(first), None)
        layers.append(
            Layer(
                first.path,
                classes.get(first.path, ""),
                first.operator,
                first.shapes,
                first.layout,
                _shares(dict(zip(ranks, rows))),
                first.refused,
                first.operands,
                None if one is None else _shares({0: one})[0],
            )
        )
    notes = [*notes, *_far_apart(layers)]
    if waiting := sorted({row.operator for row in runs[0][0] if row.in_turn}):
        notes.append(
            f"In {' and '.join(waiting)} each rank waits for the state that the one before it reaches: one layer in "
            "one direction takes as long as on one rank. A batch with a sample for each rank is sharded instead."
        )
    return Explanation(
        mesh=job.mesh,
        inputs=tuple(map(_described, tree_leaves(job.inputs), job.layouts, job.sizes)),
        ranks=tuple(ranks),
        layers=tuple(layers),
        modules=classes,
        weight_bytes=sum(t.numel() * t.element_size() for t in job.weights),
        input_bytes={rank: job.held(rank) for rank in ranks},
        differentiated=bool(job.backward),
        stopped=next((stopped for _, stopped in runs if stopped), ""),
        notes=tuple(notes),
        parts={} if isinstance(whole, str) else {rank: job.part(rank) for rank in ranks},
        not_compared=whole if isinstance(whole, str) else "",
    )


def _shares(rows: Mapping[int, Row]) -> dict[int, Share]:
    """One layer's, by rank."""
    result = {}
    for rank, row in rows.items():
        forward, backward = (_completed(rows, rank, phase) for phase in (0, 1))
        read = row.one_sided[0].bytes_received // row.row_bytes if row.row_bytes else 0
        flops = row.flops[0], row.flops[1]
        result[rank] = Share(
            row.outputs, row.output_bytes, row.saved_bytes, flops, forward, backward, read, row.other_rows
        )
    return result


def _completed(rows: Mapping[int, Row], rank: int, phase: int) -> Communication:
    """What a rank communicates in a layer, with what only its peers know: which of its rows they read or add to."""
    total = Communication() + rows[rank].communication[phase]
    total.include(rows[rank].one_sided[phase])
    for peer, other in rows.items():
        there = other.one_sided[phase]
        if there.received_from[rank]:
            total.messages += 1
            total.bytes_sent += there.received_from[rank]
            total.sent_to[peer] += there.received_from[rank]
        if there.sent_to[rank]:
            total.received_messages += 1
            total.bytes_received += there.sent_to[rank]
            total.received_from[peer] += there.sent_to[rank]
    return total


def _has_values(job: Job) -> bool:
    """Whether weights and all inputs that may be indices have values."""
    indices = [t for t in job.given if not (t.is_floating_point() or t.is_complex())]
    return not any(t.is_meta for t in [*indices, *job.weights])


def _far_apart(layers: Sequence[Layer]) -> list[str]:
    """A note where ranks read most rows of others."""
    reading = [(layer, s) for layer in layers for s in layer.shares.values() if s.rows > _MANY_ROWS * s.other_rows]
    if not reading:
        return []
    layer, share = max(reading, key=lambda pair: pair[1].rows)
    return [
        f"{layer.operator} reads {share.rows} of the {share.other_rows} rows that other ranks have: what is next to "
        "each other lies on different ranks. In a mesh, or a graph of neighbours, few rows have to travel: number the "
        "nodes by shardtensor.partition(), whose reads are these rows, and shard the edges like their targets."
    ]


def _described(value: Any, layout: tuple[Placement, ...] | None, sizes: Sizes) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    text = f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if layout is None:
        return f"{text}, plain"
    shown = [f"dim {p.dim} as {list(sizes[m])}" for m, p in enumerate(layout) if isinstance(p, Shard)]
    return f"{text}, {' and '.join(shown) or 'replicated'}"


def _first_difference(ranks: Sequence[int], names: Sequence[Sequence[tuple[str, str]]]) -> str:
    for i, there in enumerate(zip_longest(*names, fillvalue=("", "nothing"))):
        if len(set(there)) > 1:
            shown = [f"{operator} in {path or 'the model'} on rank {r}" for r, (path, operator) in zip(ranks, there)]
            return f"call {i} is {', '.join(shown)}"
    return ""


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    mesh: int | Sequence[int],
    shard: Any,
    shard_sizes: GivenSizes | list[GivenSizes] = None,
    backward: bool | Callable[[Any], Tensor] = False,
    only: Sequence[int] | None = None,
    values: bool | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Explanation:
    """Preview a model on the ranks of a mesh, layer by layer, in one process and with little memory.

    For every operator and every rank, the preview has the shape of the result, messages and bytes, the memory kept for
    the backward pass, and floating-point operations. It lists refusals with their remedy. The model runs once as each
    rank, on tensors without values. Communication is counted and not sent. A refused operator is replaced by a result
    of the right shape, and the run continues.

    If process groups exist, one rank may call this function alone: the model then runs in a forked copy of the process,
    on the CPU. torch refuses a backward pass in the copy after one on a GPU. Call this function before, or without
    ``backward``.

    The model is copied, and does not change. It may be on the meta device, and larger than memory. If it reads values
    (``x.item()``, ``if x.sum() > 0``), it runs with values instead, which takes the memory of one rank.

    Args:
        model: a module, or a function of the inputs.
        inputs: its arguments as on one device. Tensors may be on the meta device, because their values are not used.
            Tensors that have the dims to be sharded are sharded, also in dicts, lists and tuples. Others stay plain.
        mesh: the number of ranks, or the shape of the mesh.
        shard: the tensor dim to shard, or one for each mesh dim (None: replicated), or a list with an entry for each
            input (None: plain). None with a mesh of 1 runs the model without shards, for comparison.
        shard_sizes: ``(size on rank 0, ...)`` where one mesh dim shards, or ``{mesh_dim: sizes}``, for all sharded
            inputs; or a list with an entry for each input. Default: torch.chunk's sizes.
        backward: whether to run a backward pass. A function computes the loss from the model's result. Otherwise each
            result gets a gradient in its own layout, which needs no communication.
        only: the ranks to run. Default: all of up to 8 ranks. In larger worlds, the first, the middle and the last
            rank, and those with the largest and the smallest shard.
        values: whether tensors have values. Default: only if the model needs them. If False, the run ends where the
            model reads one that is not computed from numbers alone, and :attr:`Explanation.stopped` says where.
        kwargs: keyword arguments of the model; tensors among them stay plain.

    Raises:
        RuntimeError: ranks would not call the same operators; or a process group runs, and the model needs values that
            are on a device.
        ValueError, TypeError: no tensor has the dims to be sharded; sizes, ranks or dims that do not fit.

    Example:
        >>> import torch, shardtensor
        >>> model = torch.nn.Conv2d(3, 8, 3, padding=1)
        >>> found = shardtensor.explain(model, torch.empty(1, 3, 1350, 2700, device="meta"), mesh=4, shard=2)
        >>> found.communication(1).messages, found.communication(1).bytes_sent  # two rows of 2700 pixels, 3 channels
        (2, 64800)
        >>> found.layers[0].shares[3].outputs
        ((1, 8, 336, 2700),)
    """
    job = prepared(model, inputs, kwargs or {}, mesh, shard, shard_sizes, backward)
    if only is not None:
        only = sorted(set(only))
        if not only or not all(0 <= rank < job.world_size for rank in only):
            raise UnfitArguments(f"only={only}: give some of 0 to {job.world_size - 1}, the ranks of the mesh")
    return explained(job, sample_of(job) if only is None else tuple(only), values)
