"""Operators that treat every element alone: arithmetic, activations, comparisons, casts, copies, ``*_like``.

Operands with several cuts are brought to one, see [Note: alignment] in common/alignment.py; for in-place operators to
that of the tensor that is written to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate

from ...operators import operator
from ...planning import Call, Plan, Rule, is_inplace, meta_of
from ...redistribute import redistribute_local
from ...registry import default_rule
from ...spec import ShardTensorSpec
from ..common.alignment import common_cut, fit

_aten = torch.ops.aten

# Elementwise, but not tagged as such by torch.
_UNTAGGED = (
    "_dirichlet_grad",
    "_prelu_kernel",
    "_prelu_kernel_backward",
    "_standard_gamma_grad",
    "_to_copy",
    "alias_copy",
    "celu",
    "complex",
    "copy_",
    "elu_backward",
    "fill",
    "fill_",
    "floor_divide",
    "floor_divide_",
    "glu_jvp",
    "hardshrink_backward",
    "hardsigmoid_backward",
    "hardswish",
    "hardswish_",
    "hardswish_backward",
    "hardtanh_backward",
    "leaky_relu",
    "leaky_relu_",
    "leaky_relu_backward",
    "masked_fill_",
    "log_sigmoid_backward",
    "mish_",
    "mish_backward",
    "polar",
    "relu6",
    "rsub",
    "softplus_backward",
    "softshrink_backward",
    "zero_",
)
# Linear in all their tensors, so the sum over ranks may be taken afterwards.
_LINEAR = (
    _aten.neg.default,
    _aten.clone.default,
    _aten.add.Tensor,
    _aten.sub.Tensor,
    _aten.add_.Tensor,
    _aten.sub_.Tensor,
)
_SCALED = (_aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar, _aten.mul_.Tensor, _aten.div_.Tensor)


@default_rule
def _find(op: torch._ops.OpOverload) -> Rule | None:
    name = op._schema.name.removeprefix("aten::")
    if name.startswith("_foreach_"):
        return _each if name.rstrip("_") not in ("_foreach_norm", "_foreach_max", "_foreach_powsum") else None
    elementwise = name in _UNTAGGED or _tagged(op)
    if not elementwise and name.endswith("_") and hasattr(_aten, name[:-1]):  # in-place forms often lack the tag
        packet = getattr(_aten, name[:-1])
        elementwise = any(_tagged(getattr(packet, overload)) for overload in packet.overloads())
    if not elementwise or torch.Tag.nondeterministic_seeded in op.tags:
        return None
    if any(a.is_out for a in op._schema.arguments):
        return None
    if not all(str(r.type) == "Tensor" for r in op._schema.returns):
        return None
    return pointwise_plan


def pointwise_plan(call: Call) -> Plan:
    meta = call.meta
    outputs = list(meta) if isinstance(meta, (list, tuple)) else [meta]
    shape = outputs[0].shape
    inplace = is_inplace(call.func)
    keeps_partial = _keeps_partial(call)
    current = call.tensors if keeps_partial else call.reduced()
    if inplace and (0,) not in call.tensors:
        raise call.refuse("a ShardTensor cannot be written into a plain tensor", "use the out-of-place form")
    target = common_cut([current[(0,)]] if inplace else list(current.values()), meta_of(outputs[0]))
    targets = {path: fit(spec, target) for path, spec in current.items()}
    if inplace and targets[(0,)] != current[(0,)]:
        raise call.refuse("the result is cut otherwise than the tensor it is written to", "use the out-of-place form")
    specs = [target.replace(meta=meta_of(m)) for m in outputs]
    if inplace:
        del targets[(0,)]
    plan = call.plan(specs if isinstance(meta, (list, tuple)) else specs[0], targets, returns_self=inplace)
    _slice_plain(call, plan, target, shape)
    if inplace and current[(0,)] != call.tensors[(0,)]:
        _write_partial(call, plan, current[(0,)])
    return plan


def _write_partial(call: Call, plan: Plan, whole: ShardTensorSpec) -> None:
    """What a Partial is changed to, in place, is a Partial again: the reduced value on one rank."""
    partial, inner = call.tensors[(0,)], plan.call or call.func

    def write(written: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        value = redistribute_local(written, partial, whole)
        inner(value, *args, **kwargs)
        return written.copy_(redistribute_local(value, whole, partial))

    plan.call = write


def _keeps_partial(call: Call) -> bool:
    """Whether Partial operands may stay: the operator is linear, and all its operands are Partial alike."""
    first = call.specs[0]
    if not first.partial_mesh_dims() or any(
        p.is_partial() and p.reduce_op != "sum"
        for p in first.placements  # type: ignore[attr-defined]
    ):
        return False
    tensors = [a for a in call.args if isinstance(a, (Tensor, ShardTensorSpec))]
    if call.func in _LINEAR:
        alike = all(isinstance(a, ShardTensorSpec) and a.placements == first.placements for a in tensors)
        scalars = len(tensors) < 2 and call.func not in (_aten.neg.default, _aten.clone.default)
        return alike and not scalars and call.meta.dtype != torch.bool
    return call.func in _SCALED and len(tensors) == 1 and isinstance(call.args[0], ShardTensorSpec)


def _slice_plain(call: Call, plan: Plan, target: ShardTensorSpec, shape: torch.Size) -> None:
    """Plain operands count as replicated: cut those that span a sharded dim."""
    cuts: list[tuple[int, list[tuple[int, int, int]]]] = []
    for i, a in enumerate(call.args):
        if not isinstance(a, Tensor) or a.ndim == 0:
            continue
        places = []
        for d, m in target.sharded_dims().items():
            dim = d - (len(shape) - a.ndim)
            if dim >= 0 and a.shape[dim] == shape[d] and shape[d] != 1:
                start, stop = target.interval(m)
                places.append((dim, start, stop - start))
        if places:
            cuts.append((i, places))
    if not cuts:
        return
    func = call.func

    def sliced(*args: Any, **kwargs: Any) -> Any:
        local = list(args)
        for i, places in cuts:
            for dim, start, n in places:
                local[i] = local[i].narrow(dim, start, n)
        return func(*local, **kwargs)

    plan.call = sliced


def _tagged(op: torch._ops.OpOverload) -> bool:
    return torch.Tag.pointwise in op.tags


def _each(call: Call) -> Plan:
    """``_foreach_*``, as optimizers use it: lists of tensors that are laid out alike, or plain, item by item."""
    layouts: dict[Any, tuple[Any, Any]] = {}
    for path, spec in call.tensors.items():
        layout = (spec.placements, spec.sizes)
        if spec.partial_mesh_dims() or layouts.setdefault(path[-1], layout) != layout:
            raise call.refuse("the lists' tensors are not laid out alike", "redistribute them, or loop over the lists")
    for a in call.args:
        for i, item in enumerate(a if isinstance(a, (list, tuple)) else ()):
            if isinstance(item, Tensor) and item.ndim and i in layouts:
                raise call.refuse("plain tensors meet ShardTensors", "make them ShardTensors, or loop over the lists")
    if call.meta is None:
        return Plan(None)
    firsts = [call.tensors.get((0, i)) for i in range(len(call.meta))]
    return Plan([s if s is None else s.replace(meta=meta_of(m)) for s, m in zip(firsts, call.meta, strict=True)])


@operator(
    _aten.detach.default, _aten.alias.default, _aten.lift_fresh.default, _aten._conj.default, _aten._neg_view.default
)
def _same(call: Call) -> Plan:
    return Plan(call.specs[0].replace(meta=meta_of(call.meta)))


@operator(_aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default, _aten.empty_like.default)
def _like(call: Call) -> Plan:
    return Plan(call.specs[0].for_gradient().replace(meta=meta_of(call.meta)))


@operator(
    _aten.new_zeros.default,
    _aten.new_ones.default,
    _aten.new_full.default,
    _aten.new_empty.default,
)
def _new(call: Call) -> Plan:
    """A new tensor lies like the old one; of another shape, along those sharded dims that have kept their length.

    One with another number of dims is replicated.
    """
    out = _like_old(call, tuple(call.args[1]))
    size = list(out.local_shape())
    func = call.func
    return Plan(out, call=lambda x, _, *args, **kwargs: func(x, size, *args, **kwargs))


@operator(_aten.new_empty_strided.default)
def _new_strided(call: Call) -> Plan:
    out = _like_old(call, tuple(call.args[1]))
    shape, stride = out.local_shape(), out.tensor_meta.stride
    # The shard's dims lie in memory in the order of the whole tensor's, without gaps.
    local, step = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (stride[d], -d)):
        local[d] = step
        step *= max(1, shape[d])
    return Plan(out, call=lambda x, _, __, **kwargs: _aten.new_empty_strided.default(x, shape, local, **kwargs))


def _like_old(call: Call, shape: tuple[int, ...]) -> ShardTensorSpec:
    spec = call.specs[0].for_gradient()
    sizes = list(spec.sizes)
    for d, m in spec.sharded_dims().items():
        if len(shape) != len(spec.shape) or shape[d] != spec.shape[d]:
            sizes[m] = None
    placements = [p if size is not None else Replicate() for p, size in zip(spec.placements, sizes, strict=True)]
    return spec.replace(placements=placements, sizes=tuple(sizes), meta=meta_of(call.meta))


operator(_aten.masked_fill.Tensor)(pointwise_plan)
