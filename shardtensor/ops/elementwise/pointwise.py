"""Operators that treat every element alone: arithmetic, activations, comparisons, casts, copies, ``*_like``.

Operands with different shard sizes are realigned, see common/named_dims.py. For in-place operators they get the layout
of the tensor that is written to.

[Note: small operands] In ``x[:, None] - x[None]`` one operand is broadcast along the dim that shards the result, while
its own shards are of another dim. Such an operand would have to be gathered. It is gathered if it has no more elements
than a rank's even share of the result: then it takes no more memory than what is computed from it.

[Note: written to a Partial] A contribution that is added in place to a Partial is added to the Partial's contributions,
by each rank what it has, without communication. For other values and operators the Partial is reduced, to the layout of
the other operands, and the result is made a Partial again.

An operator that torch tags as pointwise needs no declaration: :func:`pointwise_plan` plans it. That is the one default.
Elementwise operators without the tag are declared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from ..._compat import OpOverload, nn_functions, recomputed
from ...communication.redistribute import redistribute_local
from ...dispatch.aten_calls import run
from ...dispatch.planning import (
    AtenCall,
    AtenPlan,
    Path,
    Rule,
    has_home,
    is_inplace,
    keeps_owners,
    meta_of,
    without_data,
)
from ...dispatch.registry import default_rule, register
from ...dispatch.tensor import ShardTensor
from ...errors import PLAIN_TARGET, UnsupportedSharding
from ...layout.intervals import map_boundaries
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ...layout.strides import dense_stride
from ...operators.declaration import Arguments, Composed, operator
from ..common.alignment import fit, fitted_parts, plain_operands, with_own_parts
from ..common.named_dims import common_layout
from ..interop import item

_aten = torch.ops.aten


# Elementwise, but not tagged as such by torch, in some releases at least: aten operators, or overloads of them.
_UNTAGGED = """
    __irshift__ _prelu_kernel _prelu_kernel_backward _to_copy alias_copy celu complex copy.default copy_.default
    elu_backward fake_quantize_per_channel_affine_cachemask_backward fake_quantize_per_tensor_affine_cachemask_backward
    fill fill_ floor_divide floor_divide_ hardshrink_backward hardsigmoid_backward hardswish hardswish_
    hardswish_backward hardtanh_backward leaky_relu leaky_relu_ leaky_relu_backward log_sigmoid_backward
    masked_fill.Tensor masked_fill_ mish_ mish_backward native_dropout_backward polar.default rsub softplus_backward
    softshrink_backward zero_
"""
# Linear in all their tensors, so the sum over ranks may be taken afterwards.
_LINEAR = (
    _aten.neg.default,
    _aten.clone.default,
    _aten.add.Tensor,
    _aten.sub.Tensor,
    _aten.add_.Tensor,
    _aten.sub_.Tensor,
)
# If the operand that is written to is a contribution, the other one may be one, too: [Note: written to a Partial].
_ADDING = (_aten.add_.Tensor, _aten.sub_.Tensor, _aten.copy_.default)
_SCALED = (_aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar, _aten.mul_.Tensor, _aten.div_.Tensor)


def _overloads(names: Sequence[str]) -> Iterator[OpOverload]:
    """The overloads of aten operators that do not write to ``out=``; of ``name.overload`` that one."""
    for name in names:
        packet = getattr(_aten, name.split(".")[0])
        for overload in name.split(".")[1:] or packet.overloads():
            op = getattr(packet, overload)
            if not any(a.is_out for a in op._schema.arguments):
                yield op


@operator(*_overloads(_UNTAGGED.split()))
@keeps_owners
def pointwise_plan(call: AtenCall) -> AtenPlan:
    """The operator itself on the local parts of operands that are realigned first."""
    owners = _owners(call)
    return _planned(call) if owners is None else _planned_at_owners(call, owners)


def _owners(call: AtenCall) -> dict[int, AxisLayout] | None:
    """The layout of the mesh dims on which the result is where the operands are: [Note: owners] in placements.py."""
    meta = call.meta
    if not isinstance(meta, Tensor) or not (meta.is_floating_point() or meta.is_complex()) or is_inplace(call.func):
        return None
    owners: dict[int, AxisLayout] = {}
    for m in range(call.specs[0].mesh.ndim):
        axes = {spec.layout[m] for spec in call.specs if not spec.placements[m].is_replicate()}
        if any(axis.placement.is_partial() for axis in axes):
            axis = axes.pop()
            if axes or axis.owner is None:
                return None
            owners[m] = axis
    return owners or None


def _planned_at_owners(call: AtenCall, owners: dict[int, AxisLayout]) -> AtenPlan:
    """The plan of an operator whose operands' owners compute it, for the others' zeros say nothing."""
    at = call.specs[0].coordinate
    theirs = {m: AxisLayout(Replicate()) for m in owners}
    seen = {path: spec.with_axes(theirs) for path, spec in call.tensors.items()}
    plan = _planned(replace(call, tensors=seen))
    out = plan.outputs.with_axes(owners)
    inner, shape, dtype = plan.call or call.func, out.own_shape, out.held_dtype

    def compute(*args: Any, **kwargs: Any) -> Tensor:
        # As one device has them: contributions may be held in a wider dtype.
        narrowed = {i: args[i].to(spec.tensor_meta.dtype) for (i, *_), spec in seen.items() if isinstance(i, int)}
        result: Tensor = inner(*(narrowed.get(i, a) for i, a in enumerate(args)), **kwargs)
        return result.to(dtype)

    def zeros(*args: Any, device: Any = None, **_: Any) -> Tensor:
        # On the device that the owner has it on, as to("meta") says: what ranks do next follows from that.
        return next(a for a in args if isinstance(a, Tensor)).new_zeros(shape, dtype=dtype, device=device)

    plan.call = compute if all(at[m] == axis.owner for m, axis in owners.items()) else zeros
    plan.outputs = out
    return plan


def _planned(call: AtenCall) -> AtenPlan:
    meta = call.meta
    outputs = list(meta) if isinstance(meta, (list, tuple)) else [meta]
    inplace = is_inplace(call.func)
    if inplace and (0,) not in call.tensors:
        raise call.refuse(*PLAIN_TARGET)
    current = call.tensors if _keeps_partial(call) or _adds_to_partial(call) else call.reduced()
    target = _target(call, current, inplace)
    targets = {path: fit(spec, target) for path, spec in current.items()}
    if inplace and targets[(0,)] != current[(0,)] and not call.specs[0].partial_mesh_dims():
        raise call.refuse(
            "the result and the tensor that it is written to have different layouts", "use the out-of-place form"
        )
    specs = [target.replace(meta=meta_of(m)) for m in outputs]
    written = targets.pop((0,)) if inplace else None
    returned = specs if isinstance(meta, (list, tuple)) else specs[0]
    ranks = [target.mesh.size(m) for m in target.sharded_dims().values()]
    small = target.shape.numel() // math.prod(ranks) if ranks else 1  # an even shard
    try:
        plan = call.plan(returned, targets, small=small, returns_self=inplace)
    except UnsupportedSharding:
        if not inplace:
            raise
        raise call.refuse(
            "a value would have to be gathered to be written to a tensor that is not sharded alike",
            "use the out-of-place form (a = a + b), or redistribute that tensor first. A plain one (torch.zeros) gets "
            "the layout of the value, and so does a replicated one, if no other view, local tensor or graph has its "
            "memory, and it is no leaf that requires grad",
        ) from None
    plain = fitted_parts(call, target)
    plan.call = with_own_parts(call.func, plain) if plain else None
    if written is not None and written != call.specs[0]:
        plan.call = _written_to_partial(call.specs[0], written, plan.call or call.func)
    return plan


def _target(call: AtenCall, current: dict[Path, ShardTensorSpec], inplace: bool) -> ShardTensorSpec:
    """The layout in which the local operators run."""
    meta = meta_of(call.meta[0] if isinstance(call.meta, (list, tuple)) else call.meta)
    if not inplace:
        return common_layout(list(current.values()), meta)
    written = call.specs[0]
    sums = [m for m, p in enumerate(written.placements) if p == Partial("sum")]
    if current[(0,)] != written and len(sums) == len(written.partial_mesh_dims()):
        target = common_layout(list(current.values()), meta)
        if all(target.layout[m] == axis for m, axis in enumerate(written.layout) if m not in sums):
            return target
    return common_layout([current[(0,)]], meta)


# torch does not run it on meta tensors.
operator(_aten.glu_jvp.default, meta=lambda glu, x, dx, dim: torch.empty_like(glu))(pointwise_plan)


def _like_fake_quantized(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """New tensors for the values and where they were in range. torch does not run these on meta tensors either."""
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


operator(
    _aten.fake_quantize_per_tensor_affine_cachemask.default,
    _aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default,
    meta=_like_fake_quantized,
)(pointwise_plan)


@operator(_aten.fake_quantize_per_channel_affine_cachemask.default, meta=_like_fake_quantized)
def _fake_quantize_channels(call: AtenCall) -> AtenPlan:
    """Scales and zero points belong to the entries of one dim of the tensor."""
    current, axis = call.reduced(), call.args[3]
    target = current.get((0,)) or plain_operands(call)[(0,)]

    def along(spec: ShardTensorSpec) -> ShardTensorSpec:
        m = target.sharded_dims().get(axis)
        return (
            spec.replicated() if m is None else spec.replicated().with_axes({m: AxisLayout(Shard(0), target.sizes[m])})
        )

    parts = {path: along(spec) for path, spec in plain_operands(call).items() if path != (0,)}
    targets = {path: target if path == (0,) else along(spec) for path, spec in current.items()}
    outputs = tuple(target.replace(meta=meta_of(t)) for t in call.meta)

    def quantize(x: Tensor, scale: Tensor, *others: Any) -> Sequence[Tensor]:
        # torch looks for the least zero point, of which a shard may have none.
        return call.func(x, scale, *others) if scale.numel() else _like_fake_quantized(x)

    return call.plan(outputs, targets, call=with_own_parts(quantize, parts))


@default_rule("elementwise")
def _default(op: OpOverload) -> Rule | None:
    """The rule of an operator that torch tags as pointwise, which needs no declaration."""
    name = op._schema.name.removeprefix("aten::")
    if name.startswith("_foreach_"):
        return None  # see optimizers.py
    elementwise = torch.Tag.pointwise in op.tags or _writes_pointwise(name)
    if not elementwise or torch.Tag.nondeterministic_seeded in op.tags:
        return None
    if any(a.is_out for a in op._schema.arguments) or any(str(r.type) != "Tensor" for r in op._schema.returns):
        return None
    return pointwise_plan


def _writes_pointwise(name: str) -> bool:
    """Whether this is the in-place form of a pointwise operator: those often lack the tag."""
    if not name.endswith("_") or not hasattr(_aten, name[:-1]):
        return False
    packet = getattr(_aten, name[:-1])
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


def _written_to_partial(
    partial: ShardTensorSpec, reduced: ShardTensorSpec, inner: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """What a Partial is changed to, in place, is a Partial again: the reduced value on one rank."""

    def write(written: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        value = redistribute_local(written, partial, reduced)
        inner(value, *args, **kwargs)
        return written.copy_(redistribute_local(value, reduced, partial))

    return write


def _keeps_partial(call: AtenCall) -> bool:
    """Whether Partial operands may stay: the operator is linear, and all its operands are Partial alike."""
    first = call.specs[0]
    if not first.partial_mesh_dims() or any(isinstance(p, Partial) and p.reduce_op != "sum" for p in first.placements):
        return False
    tensors = [a for a in call.args if isinstance(a, (Tensor, ShardTensorSpec))]
    if call.func in _LINEAR:
        alike = all(isinstance(a, ShardTensorSpec) and a.placements == first.placements for a in tensors)
        scalars = len(tensors) < 2 and call.func not in (_aten.neg.default, _aten.clone.default)
        return alike and not scalars and call.meta.dtype != torch.bool
    return call.func in _SCALED and len(tensors) == 1 and isinstance(call.args[0], ShardTensorSpec)


def _adds_to_partial(call: AtenCall) -> bool:
    """Whether an operator adds to the contributions of a Partial sum; see [Note: written to a Partial]."""
    written = call.specs[0]
    if call.func not in _ADDING or call.args[0] is not written or written.tensor_meta.dtype == torch.bool:
        return False
    if not any(p == Partial("sum") for p in written.placements) or len(call.specs) < 2:
        return False
    other = call.specs[1]
    wanted = fit(other, written)
    if call.func == _aten.copy_.default and other.tensor_meta.dtype != written.tensor_meta.dtype:
        if other.partial_mesh_dims():  # the sum of what is rounded is not the sum, rounded
            return False
    # An extreme of contributions becomes no sum without being reduced; a shard that is written to is no contribution.
    if has_home(written) and other.layout != wanted.layout:
        return False  # what others add would not be the owner's
    return all(
        old == new or (new == Partial("sum") and (isinstance(old, Shard) or old.is_replicate()))
        for old, new in zip(other.placements, wanted.placements, strict=True)
    ) and not any(p.is_partial() and p != Partial("sum") for p in written.placements)


# -- the same elements, and new tensors like old ones ------------------------------------------------------------------


@operator(
    _aten.detach.default, _aten.alias.default, _aten.lift_fresh.default, _aten._conj.default, _aten._neg_view.default
)
def _same(call: AtenCall) -> AtenPlan:
    return AtenPlan(call.specs[0].replace(meta=meta_of(call.meta)))


@operator(_aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default, _aten.empty_like.default)
def _like(call: AtenCall) -> AtenPlan:
    return AtenPlan(call.specs[0].for_gradient().replace(meta=meta_of(call.meta)))


@operator(
    *(_aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default, _aten.new_empty.default),
    _aten.new_empty_strided.default,
)
def _new(call: AtenCall) -> AtenPlan:
    """A new tensor has the old one's layout; one of another shape, on those mesh dims whose dim has kept its length.

    With another number of dims, the dims before that have to be the same, too. What is replicated then has an open
    layout, see open_layouts.py: it is for other rows than the old one's, whose sizes will follow from what is written.
    """
    func, spec, shape = call.func, call.specs[0].for_gradient(), tuple(call.args[1])

    def changed(d: int) -> bool:
        first = d if len(shape) == len(spec.shape) else 0
        return shape[first : d + 1] != tuple(spec.shape[first : d + 1])

    gone = [m for d, m in spec.sharded_dims().items() if changed(d)]
    out = spec.with_axes({m: AxisLayout(Replicate()) for m in gone}).replace(meta=meta_of(call.meta))
    size, stride, opens = list(out.local_shape()), out.tensor_meta.stride, bool(gone) and out.is_replicate()
    if opens and func != _aten.new_empty_strided.default:
        return AtenPlan(out, call=lambda x, _, *args, **kwargs: func(x, [], *args, **kwargs).expand(size), opens=True)
    if func != _aten.new_empty_strided.default:
        return AtenPlan(out, call=lambda x, _, *args, **kwargs: func(x, size, *args, **kwargs))
    # The shard's dims lie in memory in the order of the global tensor's, without gaps.
    local = dense_stride(size, stride)
    return AtenPlan(out, call=lambda x, _, __, **kwargs: func(x, size, local, **kwargs))


# -- activations -------------------------------------------------------------------------------------------------------

# Activations that are not just elementwise: ``glu``, ``rrelu``, ``logsigmoid``.


@operator(F.glu, nn_functions.glu, _aten.glu, tensors="input")
def plan_glu(call: Arguments, input: ShardTensorSpec, dim: int = -1) -> Composed:
    """The two halves of a sharded dim meet where both have half the shard sizes: a rank computes half of its shard."""
    call.returned(F.glu, input, dim)
    m = input.sharded_dims().get(dim % len(input.shape))
    sizes = None if m is None else {m: map_boundaries(input.sizes_along(m), lambda boundary: boundary // 2)}

    def glu(x: Any) -> Any:
        halves = x.chunk(2, dim)
        if sizes is not None:
            halves = [half.redistribute(shard_sizes=sizes) for half in halves]
        return halves[0] * halves[1].sigmoid()

    return Composed(glu)


@operator(F.rrelu, torch.rrelu, _aten.rrelu, torch.rrelu_, _aten.rrelu_, tensors="input", partial="input")
def plan_rrelu(
    call: Arguments,
    input: ShardTensorSpec,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
    generator: Generator | None = None,
) -> Composed:
    """Slopes are drawn like all random numbers of shards; torch's own writes them into a plain tensor."""
    inplace = inplace or call.name == "rrelu_"

    @recomputed()
    def slopes(x: Any) -> Any:
        return torch.empty_like(x.detach()).uniform_(lower, upper, generator=generator)

    def rrelu(x: Any) -> Any:
        if not training:
            return F.leaky_relu(x, (lower + upper) / 2, inplace=inplace)
        result = torch.where(x <= 0, x * slopes(x), x)
        return x.copy_(result) if inplace else result

    return Composed(rrelu)


@operator(F.logsigmoid, tensors="input")
def plan_log_sigmoid(call: Arguments, input: ShardTensorSpec) -> Composed:
    """By parts: torch's own has a second result, whose shape each backend decides for itself."""

    def log_sigmoid(x: Any) -> Tensor:
        return torch.minimum(x, torch.zeros_like(x)) - torch.log1p(torch.exp(-x.abs()))

    return Composed(log_sigmoid)


# -- comparison --------------------------------------------------------------------------------------------------------

# ``allclose``, ``equal`` and ``_assert_async``: one answer for the global tensors, the same on every rank.
#
# The first two return a number that is read from the data, so they have no plan.


@register(_aten.allclose.default)
def _allclose(a: ShardTensor, b: ShardTensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    close = torch.isclose(a, b, rtol=rtol, atol=atol, equal_nan=equal_nan)
    return bool(item(run(_aten.all.default, (close,), {})))


@register(_aten.equal.default)
def _equal(a: ShardTensor, b: ShardTensor) -> bool:
    if a.shape != b.shape:
        return False
    return bool(item(run(_aten.all.default, (run(_aten.eq.Tensor, (a, b), {}),), {})))


@operator(_aten._assert_async.default, _aten._assert_async.msg)
def _assert_async(call: AtenCall) -> AtenPlan:
    """Every rank checks the same value, so either all raise or none."""
    return call.plan(None, {path: spec.replicated() for path, spec in call.tensors.items()})


# -- autograd's zeros --------------------------------------------------------------------------------------------------
#
# Where torch's formula of a gradient gives zeros, these have no memory. torch itself adds and multiplies them, and asks
# for the shape and dtype of the result by its references in Python, with operands that are moved to the meta device.


def _meta_of_reference(function: Callable[..., Tensor], a: Any, b: Any) -> Any:
    if any(isinstance(t, Tensor) and t.device.type != "meta" for t in (a, b)):
        return NotImplemented
    whole = (without_data(t._spec.tensor_meta) if isinstance(t, ShardTensor) else t for t in (a, b))
    return function(*whole)


for _reference, _function in (("add", torch.add), ("mul", torch.mul), ("div", torch.div)):
    register(getattr(torch.ops.prims, _reference).default)(partial(_meta_of_reference, _function))
