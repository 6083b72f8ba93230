"""Looking up and writing by index: index_select, gather, scatter, x[index], embedding and their gradients.

[Note: labels] Every dim of every operand gets a label; dims that run together (a batch dim of ``gather``) share one,
and the dim that is looked into has one that no other operand knows. The layout follows: where one operand is cut along
a label, all that have it are cut alike, and the others are whole. The result is cut along the label if it has it; if
not, and the operator accumulates (the gradient of an embedding), it is a sum over the ranks. The dim that is looked
into cannot be cut. Plain index tensors are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ..dispatch import Call, Path, Plan, is_inplace, meta_of, rule, run
from ..errors import refuse
from ..registry import register
from ..spec import ShardTensorSpec
from ..tensor import ShardTensor
from .pointwise import pointwise_plan
from .slicing import select_rows
from .views import wrap_dim

__all__ = ["labelled"]

_aten = torch.ops.aten

Labels = Sequence[Hashable]
_LOOKED_UP = "looked up"  # the label of what is indexed; None is that of a dim of length 1 that is broadcast


# -- from labels to a plan -----------------------------------------------------------------------------------


def labelled(
    call: Call,
    roles: dict[Path, Labels],
    out: Labels,
    *,
    accumulates: bool = False,
    picks: bool = False,
) -> Plan:
    """The plan of an operator whose tensors' dims have labels, see [Note: labels].

    Args:
        roles: the labels of each tensor, ShardTensor or plain; the first is the one that is read or written.
        out: those of the result.
        accumulates: the operator adds into its result, so that labels which the result lacks may be cut, too.
        picks: the result consists of entries of the first tensor, so that a Partial stays one.
    """
    lengths: dict[Hashable, set[int]] = {}
    for path, labels in roles.items():
        for label, n in zip(labels, _operand(call, path).shape, strict=True):
            lengths.setdefault(label, set()).add(n)
    first = next(iter(roles))
    mesh = call.specs[0].mesh
    chosen: list[tuple[Hashable, Any]] = []
    for m in range(mesh.ndim):
        found: tuple[Hashable, Any] = (None, None)
        for path, labels in roles.items():
            spec = call.tensors.get(path)
            p = spec.placements[m] if spec is not None else None
            if not isinstance(p, Shard):
                continue
            label = labels[p.dim]
            fixed = label in (None, _LOOKED_UP) or (label not in out and not accumulates) or len(lengths[label]) > 1
            if fixed and spec.shape[p.dim] > 1:  # type: ignore[union-attr]
                shorter = label != _LOOKED_UP and label in out
                what = "is shorter in another operand" if shorter else "is looked up or written to by index"
                raise call.refuse(
                    f"tensor dim {p.dim} of operand {path[0]}, sharded on mesh dim {m}, {what}",
                    "redistribute to shard another dim",
                )
            if not fixed and found[0] is None and label not in [c for c, _ in chosen]:
                found = label, spec.sizes[m]  # type: ignore[union-attr]
        chosen.append(found)
    stays = [
        picks and first in call.tensors and call.tensors[first].placements[m].is_partial() for m in range(mesh.ndim)
    ]

    def layout(labels: Labels, written: bool, spec: ShardTensorSpec | None) -> tuple[list[Any], tuple[Any, ...]]:
        placements: list[Any] = []
        sizes: list[Any] = []
        for m, (label, size) in enumerate(chosen):
            if label is not None and label in labels:
                placements.append(Shard(list(labels).index(label)))
                sizes.append(size)
                continue
            if label is None and stays[m] and written:
                placements.append(call.tensors[first].placements[m])
            else:
                placements.append(Partial() if label is not None and written and label not in out else Replicate())
            sizes.append(None)
        return placements, tuple(sizes)

    targets = {}
    for path, spec in call.tensors.items():
        placements, sizes = layout(roles[path], path == first and (accumulates or picks), spec)
        targets[path] = spec.replace(placements=placements, sizes=sizes)
    placements, sizes = layout(out, True, None)
    result = ShardTensorSpec(mesh, placements, meta_of(call.meta), sizes)
    inplace = is_inplace(call.func)
    if inplace and (first not in call.tensors or targets[first] != call.tensors[first]):
        reason = "a ShardTensor cannot be written into a plain tensor"
        if first in call.tensors:
            reason = "what is written is cut otherwise than the tensor it is written to"
        raise call.refuse(reason, "use the out-of-place form, or redistribute first")
    cuts = {path: _own_part(labels, result, chosen) for path, labels in roles.items() if path not in call.tensors}
    func = call.func

    def compute(*args: Any, **kwargs: Any) -> Any:
        values = [list(a) if isinstance(a, (list, tuple)) else a for a in args]
        for path, places in cuts.items():
            holder: Any = values
            for step in path[:-1]:
                holder = holder[step]
            for dim, start, n in places:
                holder[path[-1]] = holder[path[-1]].narrow(dim, start, n)
        return func(*values, **kwargs)

    return call.plan(result, targets, call=compute, returns_self=inplace)


def _operand(call: Call, path: Path) -> Any:
    value: Any = call.args
    for step in path:
        value = value[step]
    return value


def _own_part(
    labels: Labels, out: ShardTensorSpec, chosen: Sequence[tuple[Hashable, Any]]
) -> list[tuple[int, int, int]]:
    """What of a plain tensor this rank works on, as arguments of narrow."""
    places = []
    for m, (label, sizes) in enumerate(chosen):
        if label is not None and label in labels:
            start = sum(sizes[: out.coordinate[m]])
            places.append((list(labels).index(label), start, sizes[out.coordinate[m]]))
    return places


def _tensors(items: Iterable[tuple[Path, Any, Labels]]) -> dict[Path, Labels]:
    return {path: labels for path, value, labels in items if isinstance(value, (Tensor, ShardTensorSpec))}


# -- along a dim ------------------------------------------------------------------------------------------


def _along(ndim: int, dim: int, label: Hashable) -> list[Hashable]:
    return [label if d == dim else d for d in range(ndim)]


@rule(
    _aten.gather.default,
    _aten.scatter.src,
    _aten.scatter.value,
    _aten.scatter.reduce,
    _aten.scatter.value_reduce,
    _aten.scatter_.src,
    _aten.scatter_.value,
    _aten.scatter_.reduce,
    _aten.scatter_.value_reduce,
    _aten.scatter_add.default,
    _aten.scatter_add_.default,
    _aten.scatter_reduce.two,
    _aten.scatter_reduce_.two,
)
def _gather_or_scatter(call: Call) -> Plan:
    ndim = len(call.args[0].shape)
    if any(len(a.shape) != ndim for a in call.args[2:4] if hasattr(a, "shape")):  # 0-dim tensors among 1-dim ones
        raise call.refuse("the operands differ in their number of dims", "give all of them the same")
    dim = wrap_dim(call.args[1], ndim)
    within, position = _along(ndim, dim, _LOOKED_UP), _along(ndim, dim, "position")
    roles = _tensors(((i,), a, within if i == 0 else position) for i, a in enumerate(call.args))
    gathers = call.func == _aten.gather.default
    adds = call.func in (_aten.scatter_add.default, _aten.scatter_add_.default)
    return labelled(call, roles, position if gathers else within, accumulates=adds, picks=gathers)


@rule(
    _aten.index_select.default,
    _aten.index_add.default,
    _aten.index_add_.default,
    _aten.index_copy.default,
    _aten.index_copy_.default,
    _aten.index_fill.int_Scalar,
    _aten.index_fill.int_Tensor,
    _aten.index_fill_.int_Scalar,
    _aten.index_fill_.int_Tensor,
)
def _by_index(call: Call) -> Plan:
    ndim = len(call.args[0].shape)
    dim = wrap_dim(call.args[1], ndim)
    within, position = _along(ndim, dim, _LOOKED_UP), _along(ndim, dim, "position")
    roles: dict[Path, Labels] = {(0,): within, (2,): ["position"] if len(call.args[2].shape) else []}
    if len(call.args) > 3 and isinstance(call.args[3], (Tensor, ShardTensorSpec)):
        roles[(3,)] = position if len(call.args[3].shape) == ndim else []
    selects = call.func == _aten.index_select.default
    adds = call.func in (_aten.index_add.default, _aten.index_add_.default)
    return labelled(call, roles, position if selects else within, accumulates=adds, picks=selects)


# -- x[index] ---------------------------------------------------------------------------------------------


def _advanced(call: Call) -> tuple[dict[Path, Labels], list[Hashable], list[Hashable]]:
    """Labels of the tensor and its indices, those of the tensor, and those of what ``tensor[indices]`` would be."""
    ndim, indices = len(call.args[0].shape), call.args[1]
    used = [d for d, index in enumerate(indices) if index is not None]
    within: list[Hashable] = [_LOOKED_UP if d in used else d for d in range(ndim)]
    width = max(len(indices[d].shape) for d in used)
    lengths = [1] * width
    for d in used:
        shape = indices[d].shape
        for j, n in enumerate(shape, width - len(shape)):
            lengths[j] = n if n != 1 else lengths[j]
    roles: dict[Path, Labels] = {(0,): within}
    for d in used:
        shape = indices[d].shape
        first = width - len(shape)
        roles[1, d] = [f"index {first + j}" if n == lengths[first + j] else None for j, n in enumerate(shape)]
    # The indices' dims stand where the indexed dims are, or in front if those are apart.
    together = used[-1] - used[0] + 1 == len(used)
    at = used[0] if together else 0
    rest: list[Hashable] = [d for d in range(ndim) if d not in used]
    result = [*rest[:at], *(f"index {j}" for j in range(width)), *rest[at:]]
    return roles, within, result


@rule(_aten.index.Tensor, _aten._unsafe_index.Tensor)
def _index(call: Call) -> Plan:
    roles, _, result = _advanced(call)
    return labelled(call, roles, result, picks=True)


@rule(
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
    _aten._unsafe_index_put.default,
)
def _index_put(call: Call) -> Plan:
    roles, within, result = _advanced(call)
    values = call.args[2].shape
    lengths = {label: n for path, labels in roles.items() for label, n in zip(labels, _operand(call, path).shape)}
    trailing = result[len(result) - len(values) :]
    roles[(2,)] = [label if n == lengths.get(label, n) else None for label, n in zip(trailing, values, strict=True)]
    accumulates = bool(call.args[3]) if len(call.args) > 3 else bool(call.kwargs.get("accumulate", False))
    return labelled(call, roles, within, accumulates=accumulates)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _numbers(op: Any, x: Any, indices: Sequence[Any]) -> list[Any]:
    """Masks as index tensors. A mask that every rank has whole gives the same ones everywhere."""
    result: list[Any] = []
    for index in indices:
        if not _is_mask(index):
            result.append(index)
            continue
        if isinstance(index, DTensor):
            if not all(p.is_replicate() for p in index.placements):
                raise refuse(
                    op,
                    [x, index],
                    "how many entries a sharded mask selects depends on its values",
                    "use torch.where or masked_fill, or redistribute the mask to Replicate()",
                )
            index = index._local_tensor
        result.extend(index.nonzero().unbind(1))
    return result


def _index_by_mask(x: Any, indices: Sequence[Any]) -> Any:
    if not any(_is_mask(index) for index in indices):
        return NotImplemented
    return run(_aten.index.Tensor, (x, _numbers(_aten.index.Tensor, x, indices)), {})


register(_aten.index.Tensor)(_index_by_mask)


def _put_by_mask(op: Any, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    if not any(_is_mask(index) for index in indices):
        return NotImplemented
    if isinstance(x, ShardTensor) and len(indices) == 1 and values.numel() == 1 and not accumulate:
        # One value wherever the mask says so: elementwise, with a mask that may be sharded.
        mask = indices[0]
        if mask.shape != x.shape[: mask.ndim]:
            raise IndexError(f"the mask of shape {tuple(mask.shape)} does not fit the tensor of {tuple(x.shape)}")
        for _ in range(x.ndim - mask.ndim):
            mask = mask.unsqueeze(-1)
        fill = _aten.masked_fill_.Tensor if is_inplace(op) else _aten.masked_fill.Tensor
        return fill(x, mask.bool(), values.reshape(()))
    return run(op, (x, _numbers(op, x, indices), values, accumulate), {})


def _register_put(op: Any) -> None:
    @register(op)
    def _(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False, *rest: Any) -> Any:
        return _put_by_mask(op, x, indices, values, accumulate)


for _op in (_aten.index_put.default, _aten.index_put_.default):
    _register_put(_op)
rule(_aten.masked_fill.Tensor)(pointwise_plan)


# -- a few rows of a sharded dim ---------------------------------------------------------------------------


@register(torch.index_select, Tensor.index_select)
def _index_select_function(input: Any, dim: Any, index: Any) -> Any:
    return select_rows(input, dim, index)


# -- tables -----------------------------------------------------------------------------------------------


@rule(_aten.embedding.default)
def _embedding(call: Call) -> Plan:
    names = [f"index {j}" for j in range(len(call.args[1].shape))]
    return labelled(call, {(0,): [_LOOKED_UP, "row"], (1,): names}, [*names, "row"], picks=True)


@rule(_aten.embedding_dense_backward.default)
def _embedding_backward(call: Call) -> Plan:
    names = [f"index {j}" for j in range(len(call.args[1].shape))]
    by_frequency = call.args[4]
    if by_frequency and any(spec.sharded_dims() for spec in call.specs):
        raise call.refuse("scale_grad_by_freq counts the indices of one shard only", "set it to False")
    return labelled(call, {(0,): [*names, "row"], (1,): names}, [_LOOKED_UP, "row"], accumulates=True)


@rule(_aten.bucketize.Tensor, _aten.isin.Tensor_Tensor, _aten.isin.Tensor_Scalar)
def _against_a_list(call: Call) -> Plan:
    names = list(range(len(call.args[0].shape)))
    roles: dict[Path, Labels] = {(0,): names} if isinstance(call.args[0], (Tensor, ShardTensorSpec)) else {}
    if isinstance(call.args[1], (Tensor, ShardTensorSpec)):
        roles[(1,)] = [_LOOKED_UP] * len(call.args[1].shape)
    return labelled(call, roles, names)


@rule(_aten.searchsorted.Tensor)
def _searchsorted(call: Call) -> Plan:
    names: list[Hashable] = list(range(len(call.args[1].shape)))
    table = [_LOOKED_UP] if len(call.args[0].shape) == 1 else [*names[:-1], _LOOKED_UP]
    if call.kwargs.get("sorter") is not None:
        raise call.refuse("a sorter is not supported", "sort the sequence first")
    return labelled(call, {(0,): table, (1,): names}, names)


@register(F.one_hot)
def _one_hot(tensor: Any, num_classes: int = -1) -> Any:
    if not isinstance(tensor, ShardTensor):
        return NotImplemented
    if tensor.dtype != torch.int64:
        raise RuntimeError(f"one_hot is only applicable to index tensor of type LongTensor, not {tensor.dtype}")
    if num_classes == -1:
        num_classes = int(tensor.max()) + 1
    classes = torch.arange(num_classes, device=tensor.device)
    return (tensor.unsqueeze(-1) == classes).long()
