"""A model's run as each rank in turn, in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement
from torch.overrides import TorchFunctionMode

from ..._compat import NEEDS_VALUES, tree_leaves, tree_map, without_values
from ...dispatch.implicit_replication import implicit_replication
from ...dispatch.scatter import part_at
from ...dispatch.tensor import ShardTensor
from ...errors import UnsupportedSharding
from ...layout.spec import ShardTensorSpec
from ..simulate import simulate_ranks
from .prepare import Job, Sizes
from .recording import Recorder, Row
from .results import Explanation, Layer, Share

Run = tuple[list[Row], str]  # what one rank has recorded, and why it has stopped; "" where it has not


def explained(job: Job, ranks: Sequence[int], values: bool | None) -> Explanation:
    """Run the job as these ranks, and put what they recorded next to each other."""
    notes = []
    runs: list[Run] | None = None
    if not values:
        try:
            runs = simulate_ranks(_run, job.world_size, job, without_values, ranks=ranks)
        except NEEDS_VALUES as error:
            if values is not None:
                raise
            notes.append(
                f"The model reads values of tensors ({str(error) or type(error).__name__}), so it was run with values, "
                "which takes the memory and the time of one rank. What it would receive from other ranks is zero here: "
                "where messages depend on received values, the numbers may be others in a real run."
            )
    if runs is None:
        runs = simulate_ranks(_run, job.world_size, job, nullcontext, ranks=ranks)
    if len(ranks) < job.world_size:
        notes.append(
            f"Of {job.world_size} ranks {len(ranks)} were run: the first, the middle one, the last, and those with the "
            "largest and the smallest shard. The balance is that of these."
        )
    return _joined(job, ranks, runs, notes)


# -- one rank ---------------------------------------------------------------------------------------------------------


def _run(job: Job, values: Callable[[], AbstractContextManager[Any]]) -> Run:
    """Run the job as the rank that this process is now. ``values``: the context without values, or a null context."""
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
        with nullcontext() if mode is None else mode:
            try:
                _passes(job, recorder, model, inputs, kwargs, mesh)
            except UnsupportedSharding as error:  # not in an operator that the model calls
                return recorder.rows, str(error)
        return recorder.rows, ""


def _passes(
    job: Job, recorder: Recorder, model: Any, inputs: Sequence[Any], kwargs: Mapping[str, Any], mesh: DeviceMesh
) -> None:
    given = [t for t in tree_leaves((inputs, kwargs)) if isinstance(t, Tensor)]
    with recorder.forward(given), implicit_replication(mesh) if job.replicate else nullcontext():
        output = model(*inputs, **kwargs)
    if not job.backward:
        return
    if callable(job.backward):
        with recorder.loss():
            output = job.backward(output)
    roots = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    gradients = [torch.ones_like(t) for t in roots]
    with recorder.backward(), implicit_replication(mesh) if job.replicate else nullcontext():
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
    on = device if t.device.type == "meta" else t.device
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


def _joined(job: Job, ranks: Sequence[int], runs: Sequence[Run], notes: Sequence[str]) -> Explanation:
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
    for rows in zip(*(rows for rows, _ in runs)):
        first = rows[0]
        layers.append(
            Layer(
                first.path,
                classes.get(first.path, ""),
                first.operator,
                first.shapes,
                first.layout,
                {rank: _share(row) for rank, row in zip(ranks, rows)},
                first.refused,
            )
        )
    tensors = [*job.model.parameters(), *job.model.buffers()] if isinstance(job.model, nn.Module) else []
    return Explanation(
        mesh=job.mesh,
        inputs=tuple(map(_described, tree_leaves(job.inputs), job.layouts, job.sizes)),
        ranks=tuple(ranks),
        layers=tuple(layers),
        modules=classes,
        weight_bytes=sum(t.numel() * t.element_size() for t in tensors),
        input_bytes={rank: job.held(rank) for rank in ranks},
        differentiated=bool(job.backward),
        stopped=next((stopped for _, stopped in runs if stopped), ""),
        notes=tuple(notes),
    )


def _share(row: Row) -> Share:
    forward, backward = row.communication
    return Share(row.outputs, row.output_bytes, row.saved_bytes, (row.flops[0], row.flops[1]), forward, backward)


def _described(value: Any, layout: tuple[Placement, ...] | None, sizes: Sizes) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    text = f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if layout is None:
        return f"{text}, plain"
    shown = [f"dim {p.dim} as {list(sizes[m])}" for m, p in enumerate(layout) if isinstance(p, Shard)]
    return f"{text}, {' and '.join(shown) or 'replicated'}"


def _first_difference(ranks: Sequence[int], names: Sequence[Sequence[tuple[str, str]]]) -> str:
    longest = max(map(len, names))
    for i in range(longest):
        there = [each[i] if i < len(each) else ("", "nothing") for each in names]
        if len(set(there)) > 1:
            shown = [f"{operator} in {path or 'the model'} on rank {r}" for r, (path, operator) in zip(ranks, there)]
            return f"call {i} is {', '.join(shown)}"
    return ""
