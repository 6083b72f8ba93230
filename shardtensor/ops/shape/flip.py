"""``flip``, ``rot90`` and ``roll``: the parts of a sharded dim are exchanged, and it keeps its sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..._compat import decomposition
from ..._compat.c10d import group_along
from ...dispatch.planning import AtenCall, AtenPlan, argument, keeps_owners, meta_of
from ...dispatch.registry import DECLINED, register
from ...dispatch.tensor import ShardTensor
from ...layout.intervals import Interval, intersect, intervals_of, length
from ...layout.spec import ShardTensorSpec
from ...operators.declaration import operator
from .view import Assembly, wrap_dim

_aten = torch.ops.aten

Moving = Callable[[Tensor], Tensor]


def rolled(own: Interval, shift: int, n: int) -> tuple[Interval, Interval]:
    """Where an interval of a dim of length ``n`` comes to lie when the dim is rolled: what stays below ``n``, the rest.

    Example:
        >>> rolled((2, 6), 5, 8)
        ((7, 8), (0, 3))
    """
    a, b = own[0] + shift, own[1] + shift
    stays, wraps = intersect((a, b), (0, n)), intersect((a - n, b - n), (0, n))
    return (stays if length(stays) else (0, 0)), (wraps if length(wraps) else (0, 0))


# -- roll -------------------------------------------------------------------------------------------------------


def _rolling(spec: ShardTensorSpec, d: int, shift: int) -> Moving:
    """The local work of rolling the sharded dim ``d``: each shard is two runs of the result, sent in one exchange."""
    m = spec.sharded_dims()[d]
    rank, group = spec.coordinate[m], group_along(spec.mesh, m)
    own, n, here = intervals_of(spec.sizes_along(m)), spec.shape[d], list(spec.own_shape)
    stays, wraps = zip(*(rolled(each, shift % n, n) for each in own), strict=True)
    k, rest = length(stays[rank]), here[d] - length(stays[rank])
    shapes = [[*here[:d], k, *here[d + 1 :]], [*here[:d], rest, *here[d + 1 :]]]
    assembly = Assembly(d, shapes, [stays, wraps], [own], rank, group)
    return lambda x: assembly([x.narrow(d, 0, k), x.narrow(d, k, rest)])


@operator(_aten.roll.default)
@keeps_owners
def _roll(call: AtenCall) -> AtenPlan:
    spec, shifts, dims = call.specs[0], call.args[1], argument(call, 2, "dims", ())
    sharded = spec.sharded_dims()
    out = spec.replace(meta=meta_of(call.meta))
    amounts: dict[int, int] = {}
    for d, shift in zip(dims, shifts):  # a dim may be named several times
        d = wrap_dim(d, len(spec.shape))
        amounts[d] = amounts.get(d, 0) + shift
    dims = [d for d in amounts if d not in sharded]
    if len(dims) == len(amounts):
        return AtenPlan(out)
    shifts = [amounts[d] for d in dims]
    moved = [d for d in amounts if d in sharded and spec.shape[d] and amounts[d] % spec.shape[d]]
    works = [_rolling(spec, d, amounts[d]) for d in moved]

    def compute(x: Tensor, *_: Sequence[int], **__: Sequence[int]) -> Tensor:
        if dims or not works:
            x = x.roll(shifts, dims) if dims else x.clone()
        for work in works:
            x = work(x)
        return x

    return AtenPlan(out, call=compute)


@register(_aten.roll.default)
def _roll_flattened(x: ShardTensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    """Without dims, in the order of the elements: no plan of its own, but other operators in a row."""
    if dims or len(shifts) != 1 or not x._spec.sharded_dims():
        return DECLINED
    return x.reshape(-1).roll(shifts, 0).reshape(x.shape)


# -- flip and rot90 ---------------------------------------------------------------------------------------------


@operator(_aten.flip.default)
@keeps_owners
def _flip(call: AtenCall) -> AtenPlan:
    """Each rank reverses its shard; a reversed dim is then sent to where it belongs."""
    spec = call.specs[0]
    flipped = [wrap_dim(d, len(spec.shape)) for d in call.args[1]]
    assemblies = []
    for d, m in spec.sharded_dims().items():
        if d in flipped:
            need, n = intervals_of(spec.sizes_along(m)), spec.shape[d]
            own = [(n - b, n - a) for a, b in need]
            rank, group = spec.coordinate[m], group_along(spec.mesh, m)
            assemblies.append(Assembly(d, [spec.own_shape], [own], [need], rank, group))

    def flip(x: Tensor, *_: Sequence[int]) -> Tensor:
        x = x.flip(flipped)
        for assembly in assemblies:
            x = assembly([x])
        return x

    return AtenPlan(spec.replace(meta=meta_of(call.meta)), call=flip)


# A quarter turn is a flip and a transposition; the layout turns with the tensor.
register(_aten.rot90.default)(decomposition(_aten.rot90.default, __name__))
