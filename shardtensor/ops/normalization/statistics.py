"""The kernel of normalizations: one for "normalize over a set of dims".

[Note: statistics] Each rank takes mean and variance of its own shard, two passes or Welford, never E[x²] - E[x]². The
ranks' pairs are gathered and merged by Chan's formula, weighted with the share of elements that the spec says each
rank has. A large mean so costs no more precision than on one device, unequal and empty shards are exact, and every
rank merges the same numbers in the same order, so running statistics stay equal. One small all-gather forward per
mesh dim that cuts a normalized dim, one small all-reduce backward.

Where no normalized dim is cut, nothing is sent forward, and torch's own kernel works on the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from ..._compat import TensorMeta
from ...geometry import map_cuts
from ...parameters import GradientSum, unsummed_parameters
from ...redistribute import all_gather, all_reduce
from ...spec import ShardTensorSpec
from ...tensor import ShardTensor, as_gradient, from_part, redistribute_to, wrap
from ..common.alignment import as_operand, local_part, moved, whole_rows, wide_dtype

__all__ = [
    "NormalizationPlan",
    "channel_kernel",
    "group_kernel",
    "layer_kernel",
    "like",
    "locally",
    "moments",
    "normalize",
    "own_part",
    "parameters_of",
    "plan_groups",
    "plan_last",
    "plan_over",
    "result_dtype",
    "rms_kernel",
    "settled_input",
    "statistics",
    "unsummed_parameters_of",
    "whole_groups",
]


@dataclass(frozen=True)
class NormalizationPlan:
    """What one rank does.

    Attributes:
        name: of the operator, for errors.
        spec: of the input. The output has the same.
        view: local shape, of as many dims as it takes to make the normalized elements whole dims of it.
        dims: dims of the view that are normalized over.
        affine: shape of weight and bias that broadcasts against the view.
        first: the input's dim that the first dim of weight and bias belongs to.
        merges: ``(mesh dim, its shard sizes)`` for the mesh dims that cut a normalized dim.
        count: how many elements of the whole tensor share a mean.
        eps: added to the variance.
        centered: False where the mean is not subtracted (RMS norm).
        fixed: the statistics are running ones, which do not depend on the input.
    """

    name: str
    spec: ShardTensorSpec
    view: tuple[int, ...]
    dims: tuple[int, ...]
    affine: tuple[int, ...]
    first: int
    merges: tuple[tuple[int, tuple[int, ...]], ...]
    count: int
    eps: float
    centered: bool = True
    fixed: bool = False

    @cached_property
    def intervals(self) -> tuple[tuple[int, int, int], ...]:
        """``(dim, start, length)`` of what belongs to this rank's shard of a weight and bias, where that is a part."""
        held = ((d - self.first, self.spec.interval(m)) for d, m in self.spec.sharded_dims().items())
        return tuple((d, start, stop - start) for d, (start, stop) in held if d >= 0)

    @cached_property
    def needs_kernel(self) -> bool:
        """Whether torch's own kernel cannot do it on every rank: ranks must talk, or a shard is empty (some of torch's
        fail then). All ranks use the same kernel, for their second derivatives must communicate alike.
        """
        cut = [self.spec.cut(m) for m in self.spec.sharded_dims().values()]
        return bool(self.merges) or 0 in self.spec.shape or any(0 in sizes for sizes in cut)


def _merges(spec: ShardTensorSpec, dims: Sequence[int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    cut = [m for d, m in spec.sharded_dims().items() if d in dims and spec.mesh.size(m) > 1 and spec.shape[d]]
    return tuple((m, spec.cut(m)) for m in cut)


def plan_over(
    name: str, spec: ShardTensorSpec, dims: Sequence[int], first: int, last: int, eps: float, centered: bool = True
) -> NormalizationPlan:
    """A plan over whole dims of the input; weight and bias belong to its dims ``first`` to ``last``, exclusive."""
    local = spec.local_shape()
    affine = tuple(n if first <= d < last else 1 for d, n in enumerate(local))
    count = torch.Size(spec.shape[d] for d in dims).numel()
    return NormalizationPlan(name, spec, local, tuple(dims), affine, first, _merges(spec, dims), count, eps, centered)


@lru_cache(maxsize=4096)
def plan_last(name: str, spec: ShardTensorSpec, k: int, eps: float, centered: bool = True) -> NormalizationPlan:
    """A plan over the last ``k`` dims."""
    n = len(spec.shape)
    return plan_over(name, spec, range(n - k, n), n - k, n, eps, centered)


def whole_groups(name: str, spec: ShardTensorSpec, groups: int) -> ShardTensorSpec:
    """The spec of the input with no group of channels cut: its cuts moved to the nearest borders of groups, or, with
    fewer groups than ranks, another dim sharded.
    """
    per_group, m = spec.shape[1] // groups, spec.sharded_dims().get(1)
    if m is None or not any(n % per_group for n in spec.cut(m)):
        return spec
    if groups < spec.mesh.size(m):
        return whole_rows(name, spec, 1)
    sizes = map_cuts(spec.cut(m), lambda c: (c + per_group // 2) // per_group * per_group)
    return spec.replace(sizes=tuple(sizes if i == m else old for i, old in enumerate(spec.sizes)))


@lru_cache(maxsize=4096)
def plan_groups(name: str, spec: ShardTensorSpec, groups: int, eps: float) -> NormalizationPlan:
    """A plan over groups of channels, of which none is cut, and all spatial dims."""
    per_group = spec.shape[1] // groups
    n, channels, *spatial = spec.local_shape()
    view = (n, channels // per_group, per_group, *spatial)
    affine = (1, *view[1:3], *(1 for _ in spatial))
    over = range(2, len(spec.shape))
    count = per_group * spec.shape[2:].numel()
    return NormalizationPlan(name, spec, view, tuple(range(2, len(view))), affine, 1, _merges(spec, over), count, eps)


# -- statistics over all ranks ----------------------------------------------------------------------------------


def statistics(x: Tensor, plan: NormalizationPlan) -> tuple[Tensor | None, Tensor]:
    """Mean (None if not centered) and biased variance (else mean square) of the whole sets, in float32 at least.

    ``x`` is the local shard. Both results have the view's shape with 1 for the normalized dims.
    """
    x = x.reshape(plan.view).to(wide_dtype(x.dtype))
    if x.numel() == 0:
        shape = [1 if d in plan.dims else n for d, n in enumerate(plan.view)]
        moments = x.new_zeros(1 + plan.centered, *shape)
    elif plan.centered:
        var, mean = torch.var_mean(x, plan.dims, correction=0, keepdim=True)
        moments = torch.stack([mean, var])
    else:
        moments = x.square().mean(plan.dims, keepdim=True)[None]
    for mesh_dim, sizes in plan.merges:
        moments = _merge(all_gather(moments, plan.spec.mesh.get_group(mesh_dim)), sizes)
    return (moments[0] if plan.centered else None), moments[-1]


def _merge(moments: Tensor, sizes: Sequence[int]) -> Tensor:
    """Means and variances ``(ranks, 2, ...)`` of parts of these sizes, merged; ``(ranks, 1, ...)``: mean squares."""
    parts = [rank for rank, size in enumerate(sizes) if size]
    weights = moments.new_tensor([sizes[rank] / sum(sizes) for rank in parts])
    weights = weights.view(-1, *[1] * (moments.ndim - 2))
    moments = moments[parts]
    if moments.shape[1] == 1:
        return (weights * moments[:, 0]).sum(0, keepdim=True)
    means, variances = moments.unbind(1)
    # Relative to one of the means, so that what they have in common is not rounded.
    mean = means[0] + (weights * (means - means[0])).sum(0)
    return torch.stack([mean, (weights * (variances + (means - mean).square())).sum(0)])


# -- the kernel -------------------------------------------------------------------------------------------------


def _normalized(x: Tensor, mean: Tensor | None, rstd: Tensor, plan: NormalizationPlan) -> Tensor:
    """A new tensor of the view's shape. The mean is subtracted first: ``x * scale + shift`` would lose a large one."""
    x = x.reshape(plan.view).to(rstd.dtype)
    return x * rstd if mean is None else (x - mean).mul_(rstd)


@lru_cache(maxsize=4096)
def like(spec: ShardTensorSpec, dtype: torch.dtype) -> ShardTensorSpec:
    """The spec of a new tensor that lies like the one with ``spec``."""
    meta = torch.empty_like(torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device="meta"))
    return spec.replace(meta=TensorMeta(meta.shape, meta.stride(), dtype))


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: ShardTensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        rstd: Tensor,
        plan: NormalizationPlan,
        dtype: torch.dtype,
        total: GradientSum,
    ) -> Any:
        y = _normalized(x._local_tensor, mean, rstd, plan)
        if weight is not None:
            y.mul_(weight.reshape(plan.affine))
        if bias is not None:
            y.add_(bias.reshape(plan.affine))
        ctx.out_spec = like(plan.spec, dtype)
        ctx.plan, ctx.total = plan, total
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        ctx.save_for_backward(x, weight, mean, rstd)
        return wrap(y.to(dtype).reshape(plan.spec.local_shape()), ctx.out_spec)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        x, weight, mean, rstd = ctx.saved_tensors
        plan: NormalizationPlan = ctx.plan
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            weight, _ = ctx.total.complete([weight, None])
            grads = _differentiable_gradients(x, weight, ctx.bias, mean, rstd, as_gradient(grad, ctx.out_spec), plan)
            grad_x, *mine = (g if need else None for g, need in zip(grads, (need_x, need_w, need_b), strict=True))
            return (grad_x, *ctx.total.start(mine)(), None, None, None, None, None)
        grad = as_gradient(grad, ctx.out_spec)._local_tensor.reshape(plan.view).to(rstd.dtype)
        grad_x = grad_w = grad_b = None
        if need_b:
            shape, dtype = ctx.bias
            grad_b = grad.sum_to_size(plan.affine).reshape(shape).to(dtype)
        xhat = _normalized(x._local_tensor, mean, rstd, plan)
        if need_w:
            grad_w = (grad * xhat).sum_to_size(plan.affine).reshape(weight.shape).to(weight.dtype)
        finish = ctx.total.start([grad_w, grad_b])
        if need_x:
            if weight is not None:
                grad = grad * weight.reshape(plan.affine)
            sums = [(grad * xhat).sum(plan.dims, keepdim=True)]
            if plan.centered:
                sums.append(grad.sum(plan.dims, keepdim=True))
            local = grad
            if not plan.fixed:
                means = torch.stack(sums) / max(plan.count, 1)
                for mesh_dim, _ in plan.merges:
                    if means.numel():
                        means = all_reduce(means, plan.spec.mesh.get_group(mesh_dim))
                local = grad - xhat.mul_(means[0])
                if plan.centered:
                    local.sub_(means[1])
            local = local * rstd
            grad_x = wrap(local.to(x._local_tensor.dtype).reshape(plan.spec.local_shape()), plan.spec)
        return (grad_x, *finish(), None, None, None, None, None)


# -- the gradients once more, in operators that can be differentiated again -------------------------------------------


class _SumOverRanks(torch.autograd.Function):
    """The sum of what the ranks contribute, of which every rank makes use: so its adjoint is such a sum, too."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, plan: NormalizationPlan) -> Tensor:  # type: ignore[override]
        ctx.plan = plan
        for mesh_dim, _ in plan.merges:
            if value.numel():
                value = all_reduce(value, plan.spec.mesh.get_group(mesh_dim))
        return value.clone() if not plan.merges else value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _SumOverRanks.apply(grad, ctx.plan), None


def _differentiable_gradients(
    x: Any, weight: Tensor | None, bias: Any, mean: Tensor | None, rstd: Tensor, grad: Any, plan: NormalizationPlan
) -> list[Any]:
    """Gradients of input, weight and bias, as functions of the input, the weight and the incoming gradient."""

    def average(t: Tensor) -> Tensor:
        return _SumOverRanks.apply(t.sum(plan.dims, keepdim=True), plan) / max(plan.count, 1)

    with torch.enable_grad():
        local = x.to_local()
        y = local.reshape(plan.view).to(rstd.dtype)
        if plan.fixed:
            y = (y if mean is None else y - mean) * rstd
        else:
            y = y - average(y) if plan.centered else y
            y = y * (average(y * y) + plan.eps).rsqrt()
        if weight is not None:
            y = y * weight.reshape(plan.affine)
        offset = None if bias is None else torch.zeros(bias[0], dtype=bias[1], device=y.device, requires_grad=True)
        if offset is not None:
            y = y + offset.reshape(plan.affine)
        upper = grad.to_local().reshape(plan.view).to(y.dtype)
        inputs = [t for t in (local, weight, offset) if t is not None and t.requires_grad]
        found = iter(torch.autograd.grad(y, inputs, upper, create_graph=True))
        grads = [next(found) if t is not None and t.requires_grad else None for t in (local, weight, offset)]
    if grads[0] is not None:
        grads[0] = from_part(grads[0], plan.spec)
    return grads


# -- what torch would say ---------------------------------------------------------------------------------------


_Kernel = Callable[..., Tensor]


def group_kernel(x: Tensor, weight: Any, bias: Any) -> Tensor:
    return torch.group_norm(x, 1, weight, bias)


def channel_kernel(x: Tensor, weight: Any, bias: Any, mean: Any = None, var: Any = None) -> Tensor:
    return torch.batch_norm(x, weight, bias, mean, var, True, 0.1, 1e-5, False)


def layer_kernel(x: Tensor, weight: Any, bias: Any) -> Tensor:
    return torch.layer_norm(x, (1,), weight, bias)


def rms_kernel(x: Tensor, weight: Any) -> Tensor:
    return torch.rms_norm(x, (1,), weight)


def result_dtype(kernel: _Kernel, x: Any, *others: Tensor | None) -> torch.dtype:
    """The dtype of torch's own result, under autocast too, and its own errors for dtypes that do not go together."""
    local = x._local_tensor
    device = local.device
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    dtypes = tuple(None if t is None else t.dtype for t in others)
    return _probe(kernel, device, autocast, local.dtype, dtypes)


@lru_cache(maxsize=1024)
def _probe(
    kernel: _Kernel, device: torch.device, autocast: Any, dtype: torch.dtype, others: tuple[Any, ...]
) -> torch.dtype:
    # Asked of torch on two elements rather than copied from its tables, which differ by device and version.
    with torch.no_grad():
        small = [None if d is None else torch.ones(1, dtype=d, device=device) for d in others]
        return kernel(torch.ones(2, 1, 1, dtype=dtype, device=device), *small).dtype


# -- running it ------------------------------------------------------------------------------------------------------


def own_part(parameter: Tensor | None, plan: NormalizationPlan) -> Tensor | None:
    """The part of a parameter (or running statistic) that belongs to this rank's shard. A view."""
    if parameter is not None:
        for d, start, length in plan.intervals:
            if d < parameter.ndim:
                parameter = parameter.narrow(d, start, length)
    return parameter


def parameters_of(plan: NormalizationPlan, *parameters: Tensor | None) -> list[Tensor | None]:
    """What of the parameters belongs to this rank's shard, gradients seen to."""
    mine, total = unsummed_parameters_of(plan, *parameters)
    return total.complete(mine)


def unsummed_parameters_of(
    plan: NormalizationPlan, *parameters: Tensor | None
) -> tuple[list[Tensor | None], GradientSum]:
    """:func:`parameters_of` for what sums the gradients in its own backward, while it does other work."""
    sharded = [isinstance(p, ShardTensor) and bool(p._spec.sharded_dims()) for p in parameters]
    whole = [None if s else p for p, s in zip(parameters, sharded, strict=True)]
    plain, total = unsummed_parameters(plan.name, plan.spec, *whole)
    if any(p is not None and any(d < p.ndim for d, _, _ in plan.intervals) for p in plain):
        # Cut after the gradients' sum over ranks is arranged: what a rank does not hold then gets zeros from it.
        plain, total = total.complete(plain), replace(total, needed=(False,) * len(plain))
    mine = [_aligned(p, plan) if s else own_part(q, plan) for p, q, s in zip(parameters, plain, sharded, strict=True)]
    return mine, total


def _aligned(parameter: Any, plan: NormalizationPlan) -> Tensor:
    """The local part of a sharded parameter, which is brought to the input's cut."""
    p, spec = as_operand(parameter, plan.spec.mesh), plan.spec
    belongs = [isinstance(q, Shard) and 0 <= q.dim - plan.first < p.ndim for q in spec.placements]
    placements = [
        Shard(q.dim - plan.first) if b else Replicate()  # type: ignore[attr-defined]
        for q, b in zip(spec.placements, belongs, strict=True)
    ]
    sizes = tuple(s if b else None for s, b in zip(spec.sizes, belongs, strict=True))
    return local_part(moved(plan.name, p, p._spec.replace(placements=placements, sizes=sizes)), spec)


def settled_input(x: Any) -> Any:
    """The input with what is Partial reduced."""
    return redistribute_to(x, x._spec.for_gradient())


def normalize(
    x: Any,
    weight: Any,
    bias: Any,
    plan: NormalizationPlan,
    dtype: torch.dtype,
    stats: tuple[Tensor | None, Tensor] | None = None,
) -> Any:
    """Normalize with our kernel."""
    if stats is None:
        with torch.no_grad():
            stats = statistics(x._local_tensor, plan)
    mean, var = stats
    (weight, bias), total = unsummed_parameters_of(plan, weight, bias)
    with torch.autocast(x._local_tensor.device.type, enabled=False):
        return _Normalize.apply(x, weight, bias, mean, (var + plan.eps).rsqrt(), plan, dtype, total)


def locally(x: Any, plan: NormalizationPlan, function: Callable[..., Tensor]) -> Any:
    """torch's own kernel on the shard; the result lies like the input."""
    y = function(x.to_local())
    return from_part(y, like(plan.spec, y.dtype))


def moments(x: Any, plan: NormalizationPlan, shape: Sequence[int], dims: Mapping[int, tuple[int, int]]) -> list[Any]:
    """Mean and reciprocal standard deviation, as torch's operators return them besides their result.

    Args:
        shape: theirs.
        dims: ``{dim of the input: (their dim, how many entries of the input share one of theirs)}``.
    """
    placements: list[Any] = []
    sizes: dict[int, tuple[int, ...]] = {}
    for m, p in enumerate(plan.spec.placements):
        at, step = dims.get(p.dim, (None, 1)) if isinstance(p, Shard) else (None, 1)
        placements.append(Replicate() if at is None else Shard(at))
        if at is not None:
            sizes[m] = tuple(n // step for n in plan.spec.cut(m))
    with torch.no_grad():
        mean, var = statistics(x._local_tensor, plan)
        assert mean is not None
        spec = ShardTensorSpec.make(plan.spec.mesh, placements, shape, mean.dtype, shard_sizes=sizes)
        return [wrap(t.reshape(spec.local_shape()), spec) for t in (mean, (var + plan.eps).rsqrt())]
