"""Group, instance, batch, layer and RMS normalization: one kernel for "normalize over a set of dims".

[Note: statistics] Each rank takes mean and variance of its own shard, two passes or Welford, never E[x²] - E[x]². The
ranks' pairs are gathered and merged by Chan's formula, weighted with the share of elements that the spec says each
rank has. A large mean so costs no more precision than on one device, unequal and empty shards are exact, and every
rank merges the same numbers in the same order, so running statistics stay equal. One small all-gather forward per
mesh dim that cuts a normalized dim, one small all-reduce backward.

Where no normalized dim is cut, nothing is sent forward, and torch's own kernel works on the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from .._compat import TensorMeta
from ..dispatch import wrap
from ..errors import refuse
from ..gradients import once_differentiable
from ..parameters import local_parameters
from ..redistribute import all_gather, all_reduce, redistribute_local
from ..registry import register
from ..spec import ShardTensorSpec
from ..tensor import ShardTensor, _FromLocal, as_gradient, redistribute_to
from .operands import torch_judges, wide_dtype


@dataclass(frozen=True)
class _Plan:
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


def _merges(spec: ShardTensorSpec, dims: Sequence[int]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    cut = [m for d, m in spec.sharded_dims().items() if d in dims and spec.mesh.size(m) > 1 and spec.shape[d]]
    return tuple((m, spec.cut(m)) for m in cut)


def _plan_over(
    name: str, spec: ShardTensorSpec, dims: Sequence[int], first: int, last: int, eps: float, centered: bool = True
) -> _Plan:
    """A plan over whole dims of the input; weight and bias belong to its dims ``first`` to ``last``, exclusive."""
    local = spec.local_shape()
    affine = tuple(n if first <= d < last else 1 for d, n in enumerate(local))
    count = torch.Size(spec.shape[d] for d in dims).numel()
    return _Plan(name, spec, local, tuple(dims), affine, first, _merges(spec, dims), count, eps, centered)


def _plan_last(name: str, spec: ShardTensorSpec, k: int, eps: float, centered: bool = True) -> _Plan:
    """A plan over the last ``k`` dims."""
    n = len(spec.shape)
    return _plan_over(name, spec, range(n - k, n), n - k, n, eps, centered)


def _plan_groups(name: str, spec: ShardTensorSpec, groups: int, eps: float) -> _Plan:
    """A plan over groups of channels and all spatial dims."""
    per_group = spec.shape[1] // groups
    m = spec.sharded_dims().get(1)
    if m is not None and any(n % per_group for n in spec.cut(m)):
        raise refuse(
            name,
            spec,
            f"shard sizes {spec.sizes[m]} of the channels (tensor dim 1) cut groups of {per_group} channels",
            f"redistribute to shard sizes that are multiples of {per_group}, or to shard another dim",
        )
    n, channels, *spatial = spec.local_shape()
    view = (n, channels // per_group, per_group, *spatial)
    affine = (1, *view[1:3], *(1 for _ in spatial))
    over = range(2, len(spec.shape))
    count = per_group * spec.shape[2:].numel()
    return _Plan(name, spec, view, tuple(range(2, len(view))), affine, 1, _merges(spec, over), count, eps)


# -- statistics over all ranks ----------------------------------------------------------------------------------


def _statistics(x: Tensor, plan: _Plan) -> tuple[Tensor | None, Tensor]:
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


def _normalized(x: Tensor, mean: Tensor | None, rstd: Tensor, plan: _Plan) -> Tensor:
    """A new tensor of the view's shape. The mean is subtracted first: ``x * scale + shift`` would lose a large one."""
    x = x.reshape(plan.view).to(rstd.dtype)
    return x * rstd if mean is None else (x - mean).mul_(rstd)


@lru_cache(maxsize=4096)
def _like(spec: ShardTensorSpec, dtype: torch.dtype) -> ShardTensorSpec:
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
        plan: _Plan,
        dtype: torch.dtype,
    ) -> Any:
        y = _normalized(x._local_tensor, mean, rstd, plan)
        if weight is not None:
            y.mul_(weight.reshape(plan.affine))
        if bias is not None:
            y.add_(bias.reshape(plan.affine))
        ctx.out_spec = _like(plan.spec, dtype)
        ctx.plan = plan
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        ctx.save_for_backward(x, weight, mean, rstd)
        return wrap(y.to(dtype).reshape(plan.spec.local_shape()), ctx.out_spec)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        x, weight, mean, rstd = ctx.saved_tensors
        plan: _Plan = ctx.plan
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        grad = as_gradient(grad, ctx.out_spec)._local_tensor.reshape(plan.view).to(rstd.dtype)
        grad_x = grad_w = grad_b = None
        if need_b:
            shape, dtype = ctx.bias
            grad_b = grad.sum_to_size(plan.affine).reshape(shape).to(dtype)
        xhat = _normalized(x._local_tensor, mean, rstd, plan)
        if need_w:
            grad_w = (grad * xhat).sum_to_size(plan.affine).reshape(weight.shape).to(weight.dtype)
        if need_x:
            if weight is not None:
                grad = grad * weight.reshape(plan.affine)
            sums = [(grad * xhat).sum(plan.dims, keepdim=True)]
            if plan.centered:
                sums.append(grad.sum(plan.dims, keepdim=True))
            means = torch.stack(sums) / max(plan.count, 1)
            for mesh_dim, _ in plan.merges:
                if means.numel():
                    means = all_reduce(means, plan.spec.mesh.get_group(mesh_dim))
            local = grad - xhat.mul_(means[0])
            if plan.centered:
                local.sub_(means[1])
            local.mul_(rstd)
            grad_x = wrap(local.to(x._local_tensor.dtype).reshape(plan.spec.local_shape()), plan.spec)
        return grad_x, grad_w, grad_b, None, None, None, None


# -- what torch would say ---------------------------------------------------------------------------------------


_Kernel = Callable[..., Tensor]


def _group_kernel(x: Tensor, weight: Any, bias: Any) -> Tensor:
    return torch.group_norm(x, 1, weight, bias)


def _channel_kernel(x: Tensor, weight: Any, bias: Any, mean: Any = None, var: Any = None) -> Tensor:
    return torch.batch_norm(x, weight, bias, mean, var, True, 0.1, 1e-5, False)


def _layer_kernel(x: Tensor, weight: Any, bias: Any) -> Tensor:
    return torch.layer_norm(x, (1,), weight, bias)


def _rms_kernel(x: Tensor, weight: Any) -> Tensor:
    return torch.rms_norm(x, (1,), weight)


def _result_dtype(kernel: _Kernel, x: Any, *others: Tensor | None) -> torch.dtype:
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


# -- the doors --------------------------------------------------------------------------------------------------


def _cut(parameter: Tensor | None, plan: _Plan) -> Tensor | None:
    """The part of a parameter (or running statistic) that belongs to this rank's shard. A view."""
    if parameter is None:
        return None
    sharded = plan.spec.sharded_dims()
    for d in range(parameter.ndim):
        if plan.first + d in sharded:
            start, stop = plan.spec.interval(sharded[plan.first + d])
            parameter = parameter.narrow(d, start, stop - start)
    return parameter


def _parameters(plan: _Plan, *parameters: Tensor | None) -> list[Tensor | None]:
    # Cut after the gradients' sum over ranks is arranged: what a rank does not hold then gets zeros from it.
    return [_cut(p, plan) for p in local_parameters(plan.name, plan.spec, *parameters)]


def _needs_kernel(x: Any, plan: _Plan) -> bool:
    """Whether torch's own kernel cannot do it: ranks must talk, or the shard is empty (some of torch's fail then)."""
    return bool(plan.merges) or x._local_tensor.numel() == 0


def _input(x: Any) -> Any:
    return redistribute_to(x, x._spec.for_gradient())


def _run(
    x: Any, weight: Any, bias: Any, plan: _Plan, dtype: torch.dtype, stats: tuple[Tensor | None, Tensor] | None = None
) -> Any:
    """Normalize with our kernel."""
    if stats is None:
        with torch.no_grad():
            stats = _statistics(x._local_tensor, plan)
    mean, var = stats
    weight, bias = _parameters(plan, weight, bias)
    with torch.autocast(x._local_tensor.device.type, enabled=False):
        return _Normalize.apply(x, weight, bias, mean, (var + plan.eps).rsqrt(), plan, dtype)


def _locally(x: Any, plan: _Plan, function: Callable[..., Tensor]) -> Any:
    """torch's own kernel on the shard; the result lies like the input."""
    y = function(x.to_local())
    return _FromLocal.apply(y, _like(plan.spec, y.dtype))


def _group_norm(check: Callable[..., Any], x: Any, num_groups: int, weight: Any, bias: Any, eps: float) -> Any:
    if not isinstance(x, ShardTensor):
        return NotImplemented
    torch_judges(check, x, num_groups, weight, bias, eps)
    x = _input(x)
    plan = _plan_groups("group_norm", x._spec, num_groups, eps)
    if _needs_kernel(x, plan):
        return _run(x, weight, bias, plan, _result_dtype(_group_kernel, x, weight, bias))
    w, b = _parameters(plan, weight, bias)
    return _locally(x, plan, lambda local: torch.group_norm(local, plan.view[1], w, b, eps))


@register(F.group_norm)
def _functional_group_norm(input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    return _group_norm(F.group_norm, input, num_groups, weight, bias, eps)


@register(torch.group_norm)
def _torch_group_norm(
    input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True
) -> Any:
    return _group_norm(torch.group_norm, input, num_groups, weight, bias, eps)


@register(F.layer_norm, torch.layer_norm)
def _layer_norm(
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    if not isinstance(input, ShardTensor):
        return NotImplemented
    shape = tuple(normalized_shape)
    torch_judges(torch.layer_norm, input, shape, weight, bias, eps)
    x = _input(input)
    plan = _plan_last("layer_norm", x._spec, len(shape), eps)
    if _needs_kernel(x, plan):
        return _run(x, weight, bias, plan, _result_dtype(_layer_kernel, x, weight, bias))
    w, b = _parameters(plan, weight, bias)
    return _locally(x, plan, lambda local: torch.layer_norm(local, shape, w, b, eps))


@register(F.rms_norm, torch.rms_norm)
def _rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    if not isinstance(input, ShardTensor):
        return NotImplemented
    shape = tuple(normalized_shape)
    torch_judges(torch.rms_norm, input, shape, weight, eps)
    x = _input(input)
    dtype = x._local_tensor.dtype
    if dtype.is_complex:
        raise refuse("rms_norm", x, "complex numbers are not supported", "normalize real and imaginary parts")
    smallest = torch.finfo(wide_dtype(dtype)).eps if eps is None else eps
    plan = _plan_last("rms_norm", x._spec, len(shape), smallest, centered=False)
    if _needs_kernel(x, plan):
        return _run(x, weight, None, plan, _result_dtype(_rms_kernel, x, weight))
    (w,) = _parameters(plan, weight)
    return _locally(x, plan, lambda local: torch.rms_norm(local, shape, w, eps))


# -- batch and instance normalization, which keep running statistics ----------------------------------------------


def _plain(buffer: Any) -> Any:
    if not isinstance(buffer, DTensor):
        return buffer
    if not all(p.is_replicate() for p in buffer.placements):
        raise refuse("batch_norm", buffer, "a running statistic is not whole on every rank", "redistribute it first")
    return buffer._local_tensor


def _channel_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, plan: _Plan, use_input: bool, momentum: float
) -> Any:
    """Batch norm (``plan.dims`` hold dim 0) or instance norm, with statistics of the input or running ones."""
    running = [_plain(mean), _plain(var)]
    empty = x._local_tensor.numel() == 0
    # torch's kernel would update the running statistics with what this rank alone has.
    updates = use_input and any(s is not None for s in running) and bool(plan.spec.sharded_dims())
    if not updates and not empty and not (use_input and plan.merges):
        w, b = _parameters(plan, weight, bias)
        rm, rv = (_cut(s, plan) for s in running)
        function = torch.batch_norm if 0 in plan.dims else torch.instance_norm
        return _locally(x, plan, lambda local: function(local, w, b, rm, rv, use_input, momentum, plan.eps, False))
    dtype = _result_dtype(_channel_kernel, x, weight, bias, *running)
    with torch.no_grad():
        if use_input:
            stats = _statistics(x._local_tensor, plan)
            _update(running, stats, plan, momentum)
        else:
            # An empty shard: not all of torch's kernels take them. The others, who do use torch's, send nothing.
            plan = replace(plan, merges=())
            rm, rv = (_cut(s, plan).reshape(plan.affine) for s in running)  # type: ignore[union-attr]
            stats = rm, rv
    return _run(x, weight, bias, plan, dtype, stats)


def _update(running: list[Any], stats: tuple[Any, Tensor], plan: _Plan, momentum: float) -> None:
    """Move running mean and variance ``(C,)`` towards the batch's, whose variance is made unbiased, as torch does."""
    if all(s is None for s in running):
        return
    mean, var = stats
    spec = plan.spec
    sharded = spec.sharded_dims()
    new = torch.stack([mean, var * plan.count / (plan.count - 1)]).reshape(2, *mean.shape[:2])  # (2, N or 1, C)
    if 0 not in plan.dims:  # instance norm keeps the mean over the batch
        new = new.sum(1, keepdim=True) / spec.shape[0]
        if 0 in sharded:
            new = all_reduce(new, spec.mesh.get_group(sharded[0]))
    new = new[:, 0]
    if 1 in sharded:
        m = sharded[1]
        sizes = spec.sizes[m] or ()
        placements = [Shard(1) if i == m else Replicate() for i in range(spec.mesh.ndim)]
        cut = ShardTensorSpec.make(spec.mesh, placements, (2, spec.shape[1]), new.dtype, shard_sizes={m: sizes})
        new = redistribute_local(new, cut, cut.replicated())
    for buffer, value in zip(running, new, strict=True):
        if buffer is not None:
            buffer.copy_(momentum * value + (1 - momentum) * buffer)


def _batch_norm(
    check: Callable[..., Any],
    x: Any,
    mean: Any,
    var: Any,
    weight: Any,
    bias: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    if not isinstance(x, ShardTensor):
        return NotImplemented
    if check is F.batch_norm:
        torch_judges(check, x, mean, var, weight, bias, training, momentum, eps)
    else:
        torch_judges(check, x, weight, bias, mean, var, training, momentum, eps, False)
    x = _input(x)
    over = [d for d in range(x.ndim) if d != 1]
    plan = _plan_over("batch_norm", x._spec, over, 1, 2, eps)
    return _channel_norm(x, weight, bias, mean, var, plan, training, momentum)


@register(F.batch_norm)
def _functional_batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    return _batch_norm(F.batch_norm, input, running_mean, running_var, weight, bias, training, momentum, eps)


@register(torch.batch_norm)
def _torch_batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    return _batch_norm(torch.batch_norm, input, running_mean, running_var, weight, bias, training, momentum, eps)


def _instance_norm(
    check: Callable[..., Any],
    x: Any,
    mean: Any,
    var: Any,
    weight: Any,
    bias: Any,
    use_input_stats: bool,
    momentum: float,
    eps: float,
) -> Any:
    if not isinstance(x, ShardTensor):
        return NotImplemented
    if check is F.instance_norm:
        torch_judges(check, x, mean, var, weight, bias, use_input_stats, momentum, eps)
    else:
        torch_judges(check, x, weight, bias, mean, var, use_input_stats, momentum, eps, False)
    x = _input(x)
    plan = _plan_over("instance_norm", x._spec, range(2, x.ndim), 1, 2, eps)
    return _channel_norm(x, weight, bias, mean, var, plan, use_input_stats, momentum)


@register(F.instance_norm)
def _functional_instance_norm(
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    return _instance_norm(
        F.instance_norm, input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
    )


@register(torch.instance_norm)
def _torch_instance_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    return _instance_norm(
        torch.instance_norm, input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
    )
