"""Operators that rearrange dims: view, permute, expand, squeeze and their gradients.

A tensor dim keeps its shards where the result is a sharding again. A shard is never reinterpreted as something that it
is not.

[Note: moved off] A sharded dim that does not stay a dim of the result (the inner one of two that are flattened) is
exchanged for another: by one all-to-all the mesh dim shards another dim, evenly, so that every rank holds as much as
before. The other dim is the outer one of those that are flattened, so that the flattened dim is sharded: pixels become
tokens, and what follows works on each token by itself. If no dim has an entry for each rank, the call is refused. A dim
of length 1, which one rank has all of, is broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..._compat import OpOverload, tree_map
from ..._compat.c10d import group_along
from ...communication.exchange import Exchange, plan_intervals
from ...dispatch.aten_calls import run
from ...dispatch.planning import AtenCall, AtenPlan, Path, meta_of
from ...dispatch.registry import DECLINED, register
from ...dispatch.tensor import ShardTensor
from ...layout.intervals import Interval, chunk_sizes, intersect, intervals_of, length, resized, whole_blocks
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ...layout.strides import cat_like
from ...operators.declaration import Arguments, operator
from ..common.records import Key, note, recall

_aten = torch.ops.aten


# -- blocks ------------------------------------------------------------------------------------------------------------

# A dim put together of what ranks hold of it: of tensors that are joined, and of the blocks that reshapes make.
#
# ``(B, N)`` with ``N`` sharded, flattened, is a dim of ``B`` blocks, and every rank has an interval of each. One
# exchange makes a sharding of it, where a rank has one interval, and the other way round.


class _Run(NamedTuple):
    """A run of a part's local tensor: where it begins in the result, and its narrowing."""

    at: int
    part: int
    start: int
    length: int

    def of(self, tensors: Sequence[Tensor], dim: int) -> Tensor:
        return tensors[self.part].narrow(dim, self.start, self.length)


class Assembly:
    """What one rank needs of a dim that several tensors make up together. Planned once; a call is one exchange.

    Args:
        dim: the tensor dim.
        shapes: of this rank's local tensor of each part.
        owned: for each part and rank, which interval of the dim that rank's local tensor is.
        needs: for each block of the result and rank, which interval it gets; those of a rank in ascending order.
        like: of the memory format that the result has; None where it has that of the first local tensor.
    """

    def __init__(
        self,
        dim: int,
        shapes: Sequence[Sequence[int]],
        owned: Sequence[Sequence[Interval]],
        needs: Sequence[Sequence[Interval]],
        rank: int,
        group: dist.ProcessGroup,
        *,
        like: Tensor | None = None,
    ) -> None:
        self._dim, self._like = dim, like
        self._shape = resized(shapes[0], dim, sum(length(need[rank]) for need in needs))
        plans = [(i, plan_intervals(own, need, rank)) for i, own in enumerate(owned) for need in needs]
        common = ((i, plan.own[0], *intersect(plan.own, plan.need)) for i, plan in plans)
        self._kept = [_Run(a, i, a - begin, b - a) for i, begin, a, b in common if b > a]
        # The messages of the peers in their order, in each the pieces in the order of the dim.
        sends = sorted((r, a, b, i) for i, plan in plans for r, (a, b) in plan.sends)
        recvs = sorted((s, a, b, i) for i, plan in plans for s, (a, b) in plan.recvs)
        self._sent = [_Run(a, i, a - owned[i][rank][0], b - a) for _, a, b, i in sends]
        self._exchange = None
        most_peers = sum(plan.most_peers for _, plan in plans)  # or fewer, where parts have the same ones
        if most_peers:  # some rank has any, so all of them take part
            self._exchange = Exchange(
                [(r, resized(shapes[i], dim, b - a)) for r, a, b, i in sends],
                [(s, resized(shapes[i], dim, b - a)) for s, a, b, i in recvs],
                group,
                most_peers,
            )
        # Where the pieces, the own ones and then what was received, come in the result.
        starts = [run.at for run in self._kept] + [a for _, a, _, _ in recvs]
        self._order = sorted(range(len(starts)), key=starts.__getitem__)

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """A new tensor: this rank's intervals, one after the other."""
        dim, first = self._dim, tensors[0]
        pieces = [run.of(tensors, dim) for run in self._kept]
        if self._exchange is not None:
            pieces += self._exchange.start([run.of(tensors, dim) for run in self._sent], first).wait()
        if not pieces:
            return first.new_empty(self._shape)
        ordered = [pieces[i] for i in self._order]
        return cat_like(ordered, dim, first if self._like is None else self._like, self._shape)


# -- view --------------------------------------------------------------------------------------------------------------

# input dim -> (output dim, multiply sizes by, divide sizes by)
Carried = dict[int, tuple[int, int, int]]
# The same, where an output dim alone means that the sizes stay.
Carry = Mapping[int, "int | tuple[int, int, int]"]


def _parts(to: int | tuple[int, int, int]) -> tuple[int, int, int]:
    return to if isinstance(to, tuple) else (to, 1, 1)


def _block(to: int | tuple[int, int, int]) -> int:
    """The number of which shard sizes must be multiples for a dim to be carried."""
    _, times, by = _parts(to)
    return by // math.gcd(times, by)


def carry(call: AtenCall | Arguments, spec: ShardTensorSpec, meta: Tensor, dims: Carry) -> ShardTensorSpec:
    """The output's spec, where input dim ``d`` becomes output dim ``dims[d]`` with the same sizes.

    A value may also be ``(output dim, multiply, divide)``. Dims that are missing are refused where they are sharded.
    """
    axes: dict[int, AxisLayout] = {}
    for d, m in spec.sharded_dims().items():
        if d not in dims:
            raise call.refuse(
                f"tensor dim {d}, sharded on mesh dim {m}, does not stay a dim of the result",
                "redistribute to shard another dim first",
            )
        dim, times, by = _parts(dims[d])
        sizes = spec.sizes_along(m)
        if any(n * times % by for n in sizes):
            raise call.refuse(
                f"shard sizes {sizes} of tensor dim {d} are not multiples of {by}, the length of the inner part",
                f"redistribute to sizes that are, e.g. shard_sizes={{{m}: ...}}, or to shard another dim",
            )
        axes[m] = AxisLayout(Shard(dim), tuple(n * times // by for n in sizes))
    return spec.with_layout([axes.get(m, own) for m, own in enumerate(spec.layout)], meta_of(meta))


def fitted(spec: ShardTensorSpec, dims: Carry) -> ShardTensorSpec:
    """``spec`` with the sizes that :func:`carry` to ``dims`` asks for.

    A dim that is divided, ``(N,) -> (N / k, k)``, stays sharded if every shard is a multiple of ``k``. Otherwise the
    boundaries are first moved to the nearest multiples, by an exchange of what differs (less than ``k`` indices at each
    boundary). The result is a copy then, not a view.
    """
    blocks = {m: (d, _block(dims[d])) for d, m in spec.sharded_dims().items() if isinstance(dims.get(d), tuple)}
    axes = {m: AxisLayout(Shard(d), whole_blocks(spec.sizes_along(m), n)) for m, (d, n) in blocks.items()}
    return spec.with_axes(axes)


@operator(_aten.view_as_real.default, _aten.view_as_complex.default)
def _complex_view(call: AtenCall) -> AtenPlan:
    dims = {d: d for d in range(min(call.meta.ndim, len(call.specs[0].shape)))}
    source = moved_off(call.specs[0], dims)
    out = carry(call, source, call.meta, dims)
    if call.func is _aten.view_as_real.default:
        return call.plan(out, {(0,): source})
    return call.plan(out, {(0,): source}, call=_as_complex, may_copy=True)


def _as_complex(local: Tensor) -> Tensor:
    """``torch.view_as_complex`` of a shard, which may lie in memory otherwise than the global tensor."""
    if local.stride(-1) != 1 or any(n % 2 for n in (*local.stride()[:-1], local.storage_offset())):
        local = local.clone(memory_format=torch.contiguous_format)
    return torch.view_as_complex(local)


def moved_off(spec: ShardTensorSpec, dims: Carry) -> ShardTensorSpec:
    """``spec`` with sharded dims that ``dims`` lacks exchanged for others where possible, see [Note: moved off]."""
    for d, m in spec.sharded_dims().items():
        if d in dims:
            continue
        ranks = spec.mesh.size(m)
        if spec.shape[d] <= 1 or ranks == 1:
            spec = spec.with_axes({m: AxisLayout(Replicate())})
            continue
        taken = spec.sharded_dims()
        # The lengths, in blocks, of the dims that could be sharded instead.
        lengths = {other: spec.shape[other] // _block(to) for other, to in dims.items() if other not in taken}
        lengths = {other: n for other, n in lengths.items() if n >= ranks}
        if lengths:
            outer = _outer(d, dims)
            other = outer if outer in lengths else max(lengths, key=lambda k: spec.shape[k])
            block = _block(dims[other])
            sizes = tuple(block * n for n in chunk_sizes(lengths[other], ranks))
            spec = spec.with_axes({m: AxisLayout(Shard(other), sizes)})
    return spec


def _outer(dim: int, dims: Carry) -> int | None:
    """The dim into which a reshape that carries ``dims`` flattens ``dim``."""
    before = max((d for d in dims if d < dim), default=None)
    return before if before is not None and _parts(dims[before])[1] > 1 else None


def wrap_dim(dim: int, ndim: int) -> int:
    """The number of a dim that may count from the end."""
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
            inner_in = math.prod(old[lead + 1 : i])
            inner_out = math.prod(new[to + 1 : j])
            carried[lead] = (to, inner_in, inner_out)
        else:
            # Dims of length 1 stay where there are as many of them.
            ones_in, ones_out = range(a, min(i, len(old))), range(b, min(j, len(new)))
            carried.update({d: (to, 1, 1) for d, to in zip(ones_in, ones_out)})
    return carried


@operator(_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten._reshape_alias.default)
def _view(call: AtenCall) -> AtenPlan:
    spec = call.specs[0]
    if 0 in spec.shape:
        kept = {d: d for d in range(len(spec.shape)) if call.meta.shape[: d + 1] == spec.shape[: d + 1]}
        free = {m: AxisLayout(Replicate()) for d, m in spec.sharded_dims().items() if d not in kept}
        out = carry(call, spec.with_axes(free), call.meta, kept)
        shape = out.local_shape()
        return AtenPlan(out, call=lambda x, *_: x.new_empty(shape))
    dims = regroup(spec.shape, call.meta.shape)
    _note_flattened(spec, dims)
    plan = next(filter(None, (_by_blocks(call, spec, m, dims) for m in spec.sharded_dims().values())), None)
    if plan is not None:
        return plan
    source = fitted(moved_off(spec, dims), dims)
    out = carry(call, source, call.meta, dims)
    shape = out.local_shape()
    flattens = any(times > 1 for _, times, _ in dims.values())
    return call.plan(out, {(0,): source}, call=lambda x, *_: x.reshape(shape), may_copy=flattens)


def _by_blocks(call: AtenCall, spec: ShardTensorSpec, m: int, dims: Carried) -> AtenPlan | None:
    """The plan of a reshape that moves what mesh dim ``m`` shards between few blocks.

    Moved boundaries and another dim leave some ranks without a part if there are fewer blocks than ranks: a batch of 2
    images is flattened on 4 ranks, and divided again; of 4 levels in windows of two only two of 4 ranks have any.
    Others have much more than their part where there are not many more: of 3 frames on 2 ranks one has two. The
    flattened dim is sharded all the same, and evenly, by one exchange of intervals of the blocks. If it is divided, a
    dim inside of the blocks is sharded, but not their innermost one, which what follows may take as a unit (the
    features of a head).

    None where there are blocks enough, or where another mesh dim shards one of the dims in question.
    """
    (d,) = (d for d, k in spec.sharded_dims().items() if k == m)
    lead = d if d in dims else _outer(d, dims)
    if lead is None or spec.shape[d] <= 1:
        return None
    to, after, inner = dims[lead]
    length, shape, ranks = spec.shape[lead] * after, call.meta.shape, spec.mesh.size(m)
    old_dims, new_dims = _grouped(spec.shape, lead, length), _grouped(shape, to, length)
    sizes: tuple[int, ...] | None = None
    if d != lead:
        at = to
        if _shards_evenly(spec.shape[lead] // _block(dims[lead]), ranks):
            return None
    elif after > 1 and spec.shape[d] < ranks:
        at = to
    else:
        inside = (e for e in new_dims[1:-1] if shape[e] >= ranks)
        key = _flattened(m, [shape[e] for e in new_dims])
        offset, sizes = (len(new_dims) > 1 and recall(spec, key)) or (0, None)
        if sizes is not None and shape[to] < min(THIN * ranks, shape[to + offset]):
            at = to + offset
        elif shape[to] >= ranks or all(n * after % inner == 0 for n in spec.sizes_along(m)):
            return None
        else:
            at, sizes = next(inside, to), None
    if shape[at] < ranks:
        return None
    free = spec.with_axes({m: AxisLayout(Replicate())})
    rest = fitted(moved_off(free, dims), dims)
    if not set(old_dims).isdisjoint(rest.sharded_dims()):
        return None
    source, sizes = rest.with_axes({m: spec.layout[m]}), sizes or chunk_sizes(shape[at], ranks)
    out = carry(call, rest, call.meta, dims).with_axes({m: AxisLayout(Shard(at), sizes)})
    old, new = _blocks(spec.shape, old_dims, d, spec.sizes_along(m)), _blocks(shape, new_dims, at, sizes)
    here, there, rank = source.local_shape(), out.local_shape(), spec.coordinate[m]
    runs = [b - a for a, b in (block[rank] for block in old)]  # of this rank, in the flattened dim
    flat = (*here[:lead], sum(runs), *here[old_dims.stop :])
    shapes = [resized(flat, lead, n) for n in runs]
    assembly = Assembly(lead, shapes, old, new, rank, group_along(spec.mesh, m))

    def rearrange(x: Tensor, *_: Sequence[int]) -> Tensor:
        return assembly(x.reshape(flat).split_with_sizes(runs, lead)).reshape(there)

    targets: dict[Path, ShardTensorSpec] = {(0,): source}
    return call.plan(out, targets, call=rearrange, call_moves=True)


THIN = 4
_EVEN = 1.2  # the largest shard by the mean


def _shards_evenly(n: int, ranks: int) -> bool:
    """Whether a dim of this length gives each rank a part, and none much more than others."""
    return n >= ranks and max(chunk_sizes(n, ranks)) * ranks <= _EVEN * n


def _flattened(m: int, lengths: Sequence[int]) -> Key:
    """What is noted where dims of these lengths are flattened, of which mesh dim ``m`` shards an inner one."""
    return ("flattened", m, tuple(lengths))


def _note_flattened(spec: ShardTensorSpec, dims: Carried) -> None:
    """Note which dims are exchanged for the outer ones of those they are flattened with.

    The rows of a video are exchanged for its frames where pixels become tokens. Tokens that become pixels again would
    leave them sharded along the frames: a few frames for each rank, whose halos are as large as the shards. So what was
    exchanged is noted, and if ranks would have fewer than ``THIN`` blocks, the dim that was sharded is sharded again.
    """
    for d, m in spec.sharded_dims().items():
        lead = None if d in dims else _outer(d, dims)
        if lead is not None:
            group = _grouped(spec.shape, lead, spec.shape[lead] * dims[lead][1])
            note(spec, _flattened(m, [spec.shape[e] for e in group]), (d - lead, spec.sizes_along(m)))


def _grouped(shape: Sequence[int], first: int, length: int) -> range:
    """The dims from ``first`` on that have ``length`` elements together."""
    stop = first + 1
    while math.prod(shape[first:stop]) < length:
        stop += 1
    return range(first, stop)


def _blocks(shape: Sequence[int], dims: range, sharded: int, sizes: Sequence[int]) -> list[list[Interval]]:
    """What ranks have of dims that are flattened: of each block, as the dims before the sharded one make them, an
    interval for each rank.
    """
    inner, total = math.prod(shape[sharded + 1 : dims.stop]), math.prod(shape[dims.start : dims.stop])
    own = intervals_of([n * inner for n in sizes])
    return [[(at + a, at + b) for a, b in own] for at in range(0, total, shape[sharded] * inner)]


@operator(_aten.view.dtype)
def _view_dtype(call: AtenCall) -> AtenPlan:
    spec = call.reduced()[0,]
    if call.meta.shape != spec.shape:
        reason = f"elements of {spec.tensor_meta.dtype} and {call.meta.dtype} have different sizes"
        raise call.refuse(reason, "view its to_local(), and make a ShardTensor of that")
    return call.plan(spec.replace(meta=meta_of(call.meta)), {(0,): spec})


@operator(_aten.permute.default)
def _permute(call: AtenCall) -> AtenPlan:
    spec = call.specs[0]
    order = [wrap_dim(d, len(spec.shape)) for d in call.args[1]]
    return AtenPlan(carry(call, spec, call.meta, {d: i for i, d in enumerate(order)}))


@operator(_aten.transpose.int, _aten.t.default)
def _transpose(call: AtenCall) -> AtenPlan:
    spec = call.specs[0]
    n = len(spec.shape)
    a, b = (wrap_dim(d, n) for d in call.args[1:3] or (0, n - 1))
    dims = {d: d for d in range(n)}
    if n:
        dims[a], dims[b] = b, a
    return AtenPlan(carry(call, spec, call.meta, dims))


@operator(_aten.unsqueeze.default)
def _unsqueeze(call: AtenCall) -> AtenPlan:
    spec = call.specs[0]
    at = wrap_dim(call.args[1], len(spec.shape) + 1)
    return AtenPlan(carry(call, spec, call.meta, {d: d + (d >= at) for d in range(len(spec.shape))}))


@operator(_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims)
def _squeeze(call: AtenCall) -> AtenPlan:
    spec = call.specs[0]
    n = len(spec.shape)
    given = call.args[1] if len(call.args) > 1 else range(n)
    wanted = {wrap_dim(d, n) for d in (given if not isinstance(given, int) else [given])}
    gone = [d for d in range(n) if d in wanted and spec.shape[d] == 1]
    dims = {d: i for i, d in enumerate(d for d in range(n) if d not in gone)}
    source = moved_off(spec, dims)
    # By name, not by length: a shard of length 1 is not a dim of length 1.
    return call.plan(carry(call, source, call.meta, dims), {(0,): source}, call=lambda x, *_: x.squeeze(gone))


@operator(_aten.expand.default)
def _expand(call: AtenCall) -> AtenPlan:
    spec = call.specs[0]
    new = len(call.meta.shape) - len(spec.shape)
    dims = {d: d + new for d in range(len(spec.shape)) if spec.shape[d] == call.meta.shape[d + new]}
    source = moved_off(spec, dims)
    out = carry(call, source, call.meta, dims)
    shape = out.local_shape()
    return call.plan(out, {(0,): source}, call=lambda x, *_, **__: x.expand(shape))


def dim_of(x: Tensor | ShardTensorSpec, dim: object) -> int | None:
    """The number of a dim, not negative; None where it is none of ``x``."""
    n = len(x.shape)
    return wrap_dim(dim, n) if isinstance(dim, int) and -n <= dim < n else None


# -- view copy ---------------------------------------------------------------------------------------------------------

# Operators that are another one and a copy: ``*_copy``, ``*_scatter``.
#
# Below autograd, each is other operators in a row, which have plans; so they are registered and have none themselves.

# -- a view, copied ---------------------------------------------------------------------------------------------

_VIEWS = """
    alias detach diagonal expand narrow permute select slice split split_with_sizes squeeze t transpose unbind
    unsqueeze view view_as_complex view_as_real
"""


def _register_copy(view: OpOverload, copy: OpOverload) -> None:
    @register(copy)
    def _(*args: Any, **kwargs: Any) -> Any:
        # The view first: only its plan knows where shards have to be moved.
        return tree_map(lambda t: t.clone(memory_format=torch.contiguous_format), view(*args, **kwargs))


for _name in _VIEWS.split():
    _viewing, _copying = getattr(_aten, _name), getattr(_aten, f"{_name}_copy")
    for _overload in _copying.overloads():
        if "out" not in _overload and _overload in _viewing.overloads():
            _register_copy(getattr(_viewing, _overload), getattr(_copying, _overload))


# -- a copy of which a view is written to ------------------------------------------------------------------------


@register(_aten.slice_scatter.default)
def _slice_scatter(x: Tensor, src: Tensor, *args: int | None, **kwargs: int | None) -> Tensor:
    if not isinstance(x, ShardTensor):
        return DECLINED
    # Partial is reduced first: what is written into a part of it would have to be shared out, too.
    result: Tensor = run(_aten.clone.default, (x.redistribute(placements=x._spec.for_gradient().placements),), {})
    _aten.slice.Tensor(result, *args, **kwargs).copy_(src)
    return result


@register(_aten.diagonal_scatter.default)
def _diagonal_scatter(x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    if not isinstance(x, ShardTensor):
        return DECLINED
    place = torch.zeros(x.shape, device="meta").diagonal(offset, dim1, dim2)
    if src.shape != place.shape:
        raise RuntimeError(f"a diagonal of shape {tuple(place.shape)} was expected, not of {tuple(src.shape)}")
    ones = torch.ones_like(_aten.diagonal.default(x, offset, dim1, dim2), dtype=torch.bool)
    where = _aten.diagonal_backward.default(ones, x.shape, offset, dim1, dim2)
    src = src.to(x.dtype).expand_as(ones) if isinstance(src, DTensor) else torch.zeros_like(ones, dtype=x.dtype) + src
    return torch.where(where, _aten.diagonal_backward.default(src, x.shape, offset, dim1, dim2), x)


@register(_aten.select_scatter.default)
def _select_scatter(x: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    if not isinstance(x, ShardTensor):
        return DECLINED
    torch.empty(x.shape, device="meta").select(dim, index)  # torch's own errors
    scattered: Tensor = _aten.slice_scatter.default(x, src.unsqueeze(dim % x.ndim), dim, index, index + 1 or None)
    return scattered
