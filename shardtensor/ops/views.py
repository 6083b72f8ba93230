"""Operators that rearrange dims: view, permute, expand, squeeze, select, slice, split, cat, stack, flip and backward.

A tensor dim keeps its shards where the result is a sharding again; where it is not, the call is refused. Never is a
shard reinterpreted as something that it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..dispatch import Call, Path, Plan, meta_of, rule, wrap
from ..errors import refuse
from ..geometry import intervals_of
from ..redistribute import move_intervals
from ..registry import register
from ..spec import ShardTensorSpec

_aten = torch.ops.aten

Carried = dict[int, tuple[int, int, int]]  # input dim -> (output dim, multiply sizes by, divide sizes by)


def carry(call: Call, spec: ShardTensorSpec, meta: Tensor, dims: dict[int, Any]) -> ShardTensorSpec:
    """The output's spec, where input dim ``d`` becomes output dim ``dims[d]`` with the same sizes.

    A value may also be ``(output dim, multiply, divide)``. Dims that are missing are refused where they are sharded.
    """
    placements: list[Any] = []
    sizes: list[Any] = []
    for m, p in enumerate(spec.placements):
        size = spec.sizes[m]
        if isinstance(p, Shard):
            if p.dim not in dims:
                raise call.refuse(
                    f"tensor dim {p.dim}, sharded on mesh dim {m}, does not stay a dim of the result",
                    "redistribute to shard another dim first",
                )
            to = dims[p.dim]
            dim, times, by = to if isinstance(to, tuple) else (to, 1, 1)
            assert size is not None
            if any(n * times % by for n in size):
                raise call.refuse(
                    f"shard sizes {size} of tensor dim {p.dim} are not multiples of {by}, the length of the inner part",
                    f"redistribute to sizes that are, e.g. shard_sizes={{{m}: ...}}, or to shard another dim",
                )
            p, size = Shard(dim), tuple(n * times // by for n in size)
        placements.append(p)
        sizes.append(size)
    return ShardTensorSpec(spec.mesh, placements, meta_of(meta), tuple(sizes))


@rule(_aten.view_as_real.default, _aten.view_as_complex.default)
def _complex_view(call: Call) -> Plan:
    ndim = min(call.meta.ndim, len(call.specs[0].shape))
    return Plan(carry(call, call.specs[0], call.meta, {d: d for d in range(ndim)}))


def _wrap_dim(dim: int, ndim: int) -> int:
    return dim + ndim if dim < 0 else dim


def regroup(old: Sequence[int], new: Sequence[int]) -> Carried:
    """Where each input dim of a reshape from ``old`` to ``new`` goes, if it stays a dim or leads one.

    Example:
        >>> regroup((2, 6, 5), (2, 30))  # 6 leads the flattened dim: its shards are runs of 5
        {0: (0, 1, 1), 1: (1, 5, 1)}
        >>> regroup((12, 5), (3, 4, 5))
        {0: (0, 1, 4), 1: (2, 1, 1)}
    """
    carried: Carried = {}
    i = j = 0
    while i < len(old) or j < len(new):
        a, b = i, j
        left = old[i] if i < len(old) else 1
        right = new[j] if j < len(new) else 1
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left *= old[i]
                i += 1
            else:
                right *= new[j]
                j += 1
        inputs = [d for d in range(a, min(i, len(old))) if old[d] != 1]
        outputs = [d for d in range(b, min(j, len(new))) if new[d] != 1]
        if inputs and outputs:
            lead, to = inputs[0], outputs[0]
            inner_in = _product(old[lead + 1 : i])
            inner_out = _product(new[to + 1 : j])
            carried[lead] = (to, inner_in, inner_out)
        else:
            # Dims of length 1 stay where there are as many of them.
            ones_in, ones_out = range(a, min(i, len(old))), range(b, min(j, len(new)))
            carried.update({d: (to, 1, 1) for d, to in zip(ones_in, ones_out)})
    return carried


def _product(values: Sequence[int]) -> int:
    n = 1
    for v in values:
        n *= v
    return n


@rule(_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten._reshape_alias.default)
def _view(call: Call) -> Plan:
    spec = call.specs[0]
    if 0 in spec.shape:
        dims: dict[int, Any] = {d: d for d in range(len(spec.shape)) if call.meta.shape[: d + 1] == spec.shape[: d + 1]}
    else:
        dims = dict(regroup(spec.shape, call.meta.shape))
    out = carry(call, spec, call.meta, dims)
    shape = out.local_shape()
    return Plan(out, call=lambda x, *_: x.reshape(shape))


@rule(_aten.permute.default)
def _permute(call: Call) -> Plan:
    spec = call.specs[0]
    order = [_wrap_dim(d, len(spec.shape)) for d in call.args[1]]
    return Plan(carry(call, spec, call.meta, {d: i for i, d in enumerate(order)}))


@rule(_aten.transpose.int)
def _transpose(call: Call) -> Plan:
    spec = call.specs[0]
    n = len(spec.shape)
    a, b = (_wrap_dim(d, n) for d in call.args[1:3])
    dims = {d: d for d in range(n)}
    if n:
        dims[a], dims[b] = b, a
    return Plan(carry(call, spec, call.meta, dims))


@rule(_aten.t.default)
def _t(call: Call) -> Plan:
    n = len(call.specs[0].shape)
    return Plan(carry(call, call.specs[0], call.meta, {0: 1, 1: 0} if n == 2 else {0: 0}))


@rule(_aten.unsqueeze.default)
def _unsqueeze(call: Call) -> Plan:
    spec = call.specs[0]
    at = _wrap_dim(call.args[1], len(spec.shape) + 1)
    return Plan(carry(call, spec, call.meta, {d: d + (d >= at) for d in range(len(spec.shape))}))


@rule(_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims)
def _squeeze(call: Call) -> Plan:
    spec = call.specs[0]
    n = len(spec.shape)
    given = call.args[1] if len(call.args) > 1 else range(n)
    wanted = {_wrap_dim(d, n) for d in (given if not isinstance(given, int) else [given])}
    gone = [d for d in range(n) if d in wanted and spec.shape[d] == 1]
    kept = [d for d in range(n) if d not in gone]
    out = carry(call, spec, call.meta, {d: i for i, d in enumerate(kept)})
    # By name, not by length: a shard of length 1 is not a dim of length 1.
    return Plan(out, call=lambda x, *_: x.squeeze(gone))


@rule(_aten.expand.default)
def _expand(call: Call) -> Plan:
    spec = call.specs[0]
    new = len(call.meta.shape) - len(spec.shape)
    dims = {d: d + new for d in range(len(spec.shape)) if spec.shape[d] == call.meta.shape[d + new]}
    out = carry(call, spec, call.meta, dims)
    shape = out.local_shape()
    return Plan(out, call=lambda x, *_, **__: x.expand(shape))


def _without(call: Call, dim: int, what: str) -> dict[int, int]:
    """Every dim to itself, after a check that ``dim`` is not sharded."""
    spec = call.specs[0]
    dim = _wrap_dim(dim, len(spec.shape))
    if dim in spec.sharded_dims():
        raise call.refuse(f"{what} acts along tensor dim {dim}, which is sharded", "redistribute to shard another dim")
    return {d: d for d in range(len(spec.shape))}


@rule(_aten.select.int)
def _select(call: Call) -> Plan:
    dim = _wrap_dim(call.args[1], len(call.specs[0].shape))
    kept = _without(call, dim, "select")
    return Plan(carry(call, call.specs[0], call.meta, {d: d - (d > dim) for d in kept if d != dim}))


@rule(_aten.slice.Tensor)
def _slice(call: Call) -> Plan:
    spec = call.specs[0]
    dim = call.args[1] if len(call.args) > 1 else 0
    if call.meta.shape == spec.shape:
        return Plan(spec.replace(meta=meta_of(call.meta)), call=lambda x, *_: x.view_as(x))
    return Plan(carry(call, spec, call.meta, _without(call, dim, "slice")))


@rule(_aten.unbind.int)
def _unbind(call: Call) -> Plan:
    spec = call.specs[0]
    dim = _wrap_dim(call.args[1] if len(call.args) > 1 else 0, len(spec.shape))
    kept = _without(call, dim, "unbind")
    dims = {d: d - (d > dim) for d in kept if d != dim}
    return Plan([carry(call, spec, m, dims) for m in call.meta])


@rule(_aten.split.Tensor, _aten.split_with_sizes.default)
def _split(call: Call) -> Plan:
    dims = _without(call, call.args[2] if len(call.args) > 2 else 0, "split")
    return Plan([carry(call, call.specs[0], m, dims) for m in call.meta])


@register(torch.tensor_split, Tensor.tensor_split)
def _tensor_split(input: Any, indices_or_sections: Any = None, dim: int = 0, **kwargs: Any) -> Any:
    """Only for indices in a ShardTensor: their values are read, so every rank must have them all."""
    indices = kwargs.get("tensor_indices_or_sections", indices_or_sections)
    if not isinstance(indices, DTensor):
        return NotImplemented
    if not all(p.is_replicate() for p in indices.placements):
        raise refuse("tensor_split", [input, indices], "the indices are not whole", "pass a plain tensor or a list")
    return torch.tensor_split(input, indices.to_local().tolist(), dim)


@rule(_aten.select_backward.default, _aten.slice_backward.default)
def _embed(call: Call) -> Plan:
    """The gradient of select and slice: ``grad`` among zeros of the input's shape."""
    spec = call.reduced()[(0,)]
    dim = _wrap_dim(call.args[2], len(call.args[1]))
    removed = call.func == _aten.select_backward.default
    dims = {d: d + (removed and d >= dim) for d in range(len(spec.shape)) if removed or d != dim}
    out = carry(call, spec, call.meta, dims)
    shape = list(out.local_shape())
    func = call.func
    return call.plan(out, {(0,): spec}, call=lambda grad, _, *rest: func(grad, shape, *rest))


def _alike(call: Call, dim: int, ndim: int) -> dict[Path, ShardTensorSpec]:
    """Targets that bring the tensors of a list to the cut of the first sharded one (along dims other than ``dim``)."""
    specs = call.reduced()
    pattern = next((s for s in specs.values() if s.sharded_dims()), next(iter(specs.values())))
    if dim in pattern.sharded_dims():
        raise call.refuse(f"tensors are joined along dim {dim}, which is sharded", "redistribute to shard another dim")
    return {
        path: s.replace(placements=pattern.placements, sizes=pattern.sizes) if len(s.shape) == ndim else s
        for path, s in specs.items()
    }


@rule(_aten.cat.default, _aten.stack.default)
def _join(call: Call) -> Plan:
    stacks = call.func == _aten.stack.default
    ndim = call.meta.ndim
    dim = _wrap_dim(call.args[1] if len(call.args) > 1 else 0, ndim)
    if any(isinstance(a, Tensor) for a in call.args[0]):
        raise call.refuse(
            "plain tensors are joined with ShardTensors", "make them ShardTensors, e.g. by ShardTensor.from_local"
        )
    targets = _alike(call, -1 if stacks else dim, ndim - stacks)
    pattern = next(s for s in targets.values() if len(s.shape) == ndim - stacks)
    dims = {d: d + (stacks and d >= dim) for d in range(ndim - stacks)}
    return call.plan(carry(call, pattern, call.meta, dims), targets)


@register(_aten.flip.default)
def _flip(x: Any, dims: Sequence[int]) -> Any:
    """Reverse dims; a sharded one is exchanged, so that the result has the input's sizes."""
    spec = x._spec
    local = x._local_tensor.flip(list(dims))
    flipped = {_wrap_dim(d, len(spec.shape)) for d in dims}
    for d, m in spec.sharded_dims().items():
        if d in flipped:
            need = intervals_of(spec.cut(m))
            total = spec.shape[d]
            own = [(total - b, total - a) for a, b in need]
            local = move_intervals(local, d, own, need, spec.coordinate[m], spec.mesh.get_group(m))
    return wrap(local, spec)


__all__ = ["Replicate", "carry", "regroup"]
