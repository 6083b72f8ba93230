"""Max and average pooling, with fixed windows and adaptive, in one to three dims.

[Note: padding] The kernel pads, not we. A rank whose windows reach over a global end gives its kernel the operator's
padding, one whose windows do not gives it none; outputs that come out in excess at borders between ranks are dropped.
So divisors at the global ends, ``-inf`` in the padding and the choice among equal maxima are torch's by construction.

[Note: output size 1] Pooling a sharded dim to one value would leave it with one rank. Instead an average is a mean:
Partial over that mesh dim, reduced when it is needed. A maximum is taken over the ranks at once and is
replicated. Other output sizes are sharded, on ranks without outputs with empty shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Replicate

from ...errors import refuse
from ...geometry import Interval, Window, intervals_of, map_cuts
from ...registry import register
from ...spec import ShardTensorSpec
from ...tensor import ShardTensor, from_part, redistribute_to, wrap
from ..common.stencil import borrow_dims, finish, is_whole, judged, per_dim, resized, result_dtype, scaled_cut, settled

__all__ = ["adaptive_window", "pool_reads"]

# -- geometry ---------------------------------------------------------------------------------------------


def pool_reads(window: Window, out: Interval, least: int = 0) -> tuple[Interval, int, int]:
    """What a kernel that pads both ends alike has to be given to compute the outputs ``out``.

    Args:
        least: the kernel accepts no shorter input; the whole dim is not shorter.

    Returns:
        The input interval, the padding, and how many of the kernel's outputs to drop before the wanted ones.

    Example:
        >>> w = Window(size=9, kernel=3, stride=2, before=1, after=1)
        >>> pool_reads(w, (0, 2)), pool_reads(w, (2, 4)), pool_reads(w, (4, 5))
        (((0, 4), 1, 0), ((3, 8), 0, 0), ((6, 9), 1, 1))
    """
    if out[1] <= out[0]:
        return (0, 0), 0, 0
    start, stop = window.reads(out)
    if start >= 0 and stop <= window.size:
        return (start, stop), 0, 0
    # With padding the kernel's first window starts before the input it is given; begin so many outputs earlier that
    # the wanted ones start where they should.
    first = max(0, out[0] - -(-window.before // window.stride))
    stop = min(window.size, max(stop, first * window.stride + least))
    first = min(first, max(0, (stop - least) // window.stride))
    return (first * window.stride, stop), window.before, out[0] - first


def adaptive_window(n: int, out: int, o: int) -> Interval:
    """Input interval of output ``o`` when a dim of length ``n`` is pooled to ``out``.

    Example:
        >>> [adaptive_window(5, 3, o) for o in range(3)]
        [(0, 2), (1, 4), (3, 5)]
    """
    return (o * n // out, -(-(o + 1) * n // out))


# -- fixed windows ----------------------------------------------------------------------------------------


def _pool(
    x: ShardTensor,
    ndim: int,
    meta: Any,
    windows: Sequence[Window],
    kernel: Callable[..., Any],
    *,
    whole_windows: bool = False,
) -> Any:
    """Pool the last ``ndim`` dims: ``kernel(local, padding)`` on what this rank's outputs read.

    Args:
        meta: the result on the global meta tensor, a tensor or (values, indices).
        windows: one per spatial dim.
        whole_windows: the kernel refuses inputs shorter than the window, even if padded.
    """
    spec = x._spec
    values_meta = meta[0] if isinstance(meta, tuple) else meta
    first = len(spec.shape) - ndim
    sizes: dict[int, tuple[int, ...]] = {}
    needs, dropped = {}, {}
    paddings, origin = [w.before for w in windows], [0] * ndim
    for d, m in spec.sharded_dims().items():
        if d < first:
            continue
        w = windows[d - first]
        sizes[d] = map_cuts(spec.cut(m), w.cut)
        reads = [pool_reads(w, out, w.kernel if whole_windows else 0) for out in intervals_of(sizes[d])]
        needs[d] = [need for need, _, _ in reads]
        (origin[d - first], _), paddings[d - first], drop = reads[spec.coordinate[m]]
        dropped[d] = drop, sizes[d][spec.coordinate[m]]
    taps = [w.extent for w in windows]
    dtype = result_dtype(x._local_tensor, lambda t: _values(kernel(t, [0] * ndim)), [1] * first + taps)
    local = borrow_dims(x.to_local(), spec, needs).to(dtype)
    out = resized(spec, values_meta, dtype, sizes)
    if 0 in out.local_shape():
        # Kernels refuse empty dims, yet this rank takes part in the exchange of the backward pass.
        values, indices = local.reshape(out.local_shape()), local.new_empty(out.local_shape(), dtype=torch.int64)
    else:
        result = kernel(local, paddings)
        values, indices = result if isinstance(result, tuple) else (result, None)
        for d, (drop, count) in dropped.items():
            values = values.narrow(d, drop, count)
            indices = indices if indices is None else indices.narrow(d, drop, count)
        if indices is not None:
            indices = _global_indices(indices, local.shape[first:], origin, spec.shape[first:])
    result = finish(values, x, values_meta, sizes)
    if not isinstance(meta, tuple):
        return result
    return result, wrap(indices, resized(spec, values_meta, torch.int64, sizes))


def _pool_inside(x: ShardTensor, meta: Any, function: Callable[..., Any]) -> Any:
    """Pool dims that no mesh dim cuts: each rank pools what it has."""
    result = function(x.to_local())
    if not isinstance(meta, tuple):
        return finish(result, x, meta, {})
    values, indices = result
    return finish(values, x, meta[0], {}), wrap(indices, resized(x._spec, meta[1], torch.int64, {}))


def _values(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def _global_indices(
    indices: Tensor, local: Sequence[int], lookup: Sequence[int | Tensor], whole: Sequence[int]
) -> Tensor:
    """Flat indices into the spatial shape ``local`` as flat indices into the global one, ``whole``.

    Args:
        lookup: per dim, the global index where the local one is 0, or a table of global indices.
    """
    result, rest, step = torch.zeros_like(indices), indices, 1
    for n, places, total in reversed(list(zip(local, lookup, whole, strict=True))):
        at = rest % n
        result = result + (places[at] if isinstance(places, Tensor) else places + at) * step
        rest = rest // n
        step *= total
    return result


def _max_pool(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    *,
    ndim: int,
    indices: bool = False,
) -> Any:
    """Handler of max pooling; ``indices``: this door returns them whatever ``return_indices`` says."""
    if not isinstance(input, ShardTensor):
        return NotImplemented
    stride = None if stride in ((), []) else stride
    function = getattr(F, f"max_pool{ndim}d")
    indices = indices or return_indices
    kwargs = {"stride": stride, "dilation": dilation, "ceil_mode": ceil_mode, "return_indices": indices}
    meta = judged(function, input, kernel_size, padding=padding, **kwargs)
    x = settled(input, linear=False)
    if is_whole(x, ndim):
        return _pool_inside(x, meta, lambda t: function(t, kernel_size, padding=padding, **kwargs))
    windows = _windows(x._spec, ndim, kernel_size, stride, padding, dilation, ceil_mode)
    return _pool(x, ndim, meta, windows, lambda t, p: function(t, kernel_size, padding=p, **kwargs))


def _avg_pool(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    ndim: int,
) -> Any:
    """Handler of average pooling."""
    if not isinstance(input, ShardTensor):
        return NotImplemented
    stride = None if stride in ((), []) else stride
    kwargs: dict[str, Any] = {"ceil_mode": ceil_mode, "count_include_pad": count_include_pad}
    if stride is not None:
        kwargs["stride"] = stride
    if divisor_override is not None:
        kwargs["divisor_override"] = divisor_override
    function = getattr(F, f"avg_pool{ndim}d")
    meta = judged(function, input, kernel_size, padding=padding, **kwargs)
    x = settled(input, linear=True)
    if is_whole(x, ndim):
        return _pool_inside(x, meta, lambda t: function(t, kernel_size, padding=padding, **kwargs))
    windows = _windows(x._spec, ndim, kernel_size, stride, padding, 1, ceil_mode)

    def kernel(t: Tensor, p: Sequence[int]) -> Tensor:
        return function(t, kernel_size, padding=p, **kwargs)

    return _pool(x, ndim, meta, windows, kernel, whole_windows=ndim == 3)


def _windows(
    spec: ShardTensorSpec, ndim: int, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> list[Window]:
    arguments = kernel, kernel if stride is None else stride, dilation, padding, padding
    columns = spec.shape[-ndim:], *(per_dim(a, ndim) for a in arguments)
    return [Window(n, k, s, d, p, q, ceil_mode) for n, k, s, d, p, q in zip(*columns, strict=True)]


def _lp_pool(
    input: Any, norm_type: float, kernel_size: Any, stride: Any = None, ceil_mode: bool = False, *, ndim: int
) -> Any:
    """Handler of power-average pooling: torch's own composition of the average."""
    if not isinstance(input, ShardTensor):
        return NotImplemented
    mean = _avg_pool(input.pow(norm_type), kernel_size, stride, 0, ceil_mode, ndim=ndim)
    count = math.prod(per_dim(kernel_size, ndim))
    return (torch.sign(mean) * F.relu(torch.abs(mean))).mul(count).pow(1.0 / norm_type)


# -- adaptive windows -------------------------------------------------------------------------------------


def _adaptive_avg_pool(input: Any, output_size: Any, *, ndim: int) -> Any:
    """Handler of adaptive average pooling; see [Note: output size 1]."""
    if not isinstance(input, ShardTensor):
        return NotImplemented
    function = getattr(F, f"adaptive_avg_pool{ndim}d")
    meta = judged(function, input, output_size)
    x = settled(input, linear=True)
    if is_whole(x, ndim):
        return _pool_inside(x, meta, lambda t: function(t, output_size))
    to_one = [d for d in range(x.ndim - ndim, x.ndim) if meta.shape[d] == 1]
    if any(d in x._spec.sharded_dims() for d in to_one):
        x = x.mean(to_one, keepdim=True)
    return _adaptive_pool(x, ndim, meta, function, indices=False)


def _adaptive_max_pool(
    input: Any, output_size: Any, return_indices: bool = False, *, ndim: int, indices: bool = False
) -> Any:
    """Handler of adaptive max pooling; see [Note: output size 1]."""
    if not isinstance(input, ShardTensor):
        return NotImplemented
    indices = indices or return_indices
    function = getattr(F, f"adaptive_max_pool{ndim}d_with_indices")
    meta = judged(function, input, output_size)[0]
    x = settled(input, linear=False)
    values, places = _adaptive_pool(x, ndim, meta, function, indices=True)
    to_one = [d for d in values._spec.sharded_dims() if d >= x.ndim - ndim and meta.shape[d] == 1]
    if to_one:
        values, places = _best_of_ranks(values, places, meta, to_one)
    return (values, places) if indices else values


def _adaptive_pool(x: ShardTensor, ndim: int, meta: Tensor, function: Callable[..., Any], indices: bool) -> Any:
    """Pool the last ``ndim`` dims to the sizes of ``meta``.

    A sharded dim that becomes 1 is pooled within each shard only: the result has one entry there per rank with a shard.
    """
    spec = x._spec
    first = len(spec.shape) - ndim
    target, sizes = list(meta.shape), {}
    needs, layouts, origin = {}, {}, [0] * ndim
    for d, m in spec.sharded_dims().items():
        if d < first:
            continue
        n, out, rank = spec.shape[d], target[d], spec.coordinate[m]
        own = intervals_of(spec.cut(m))
        if out == 1:
            sizes[d] = tuple(int(b > a) for a, b in own)
            target[d] = sum(sizes[d])
            origin[d - first] = own[rank][0]
            continue
        sizes[d] = map_cuts(spec.cut(m), scaled_cut(n, out))
        outs = intervals_of(sizes[d])
        needs[d] = [
            (adaptive_window(n, out, a)[0], adaptive_window(n, out, b - 1)[1]) if b > a else (0, 0) for a, b in outs
        ]
        origin[d - first] = needs[d][rank][0]
        if n % out:
            layouts[d] = [adaptive_window(n, out, o) for o in range(*outs[rank])]
    out_meta = meta.new_empty(target)
    dtype = result_dtype(x._local_tensor, lambda t: _values(function(t, [1] * ndim)), [1] * len(spec.shape))
    local = borrow_dims(x.to_local(), spec, needs).to(dtype)
    out_spec = resized(spec, out_meta, dtype, sizes)
    shape = out_spec.local_shape()
    if 0 in shape:
        values, places = local.reshape(shape), local.new_empty(shape, dtype=torch.int64)
    else:
        lookup: list[Any] = list(origin)
        for d, windows in layouts.items():
            local, lookup[d - first] = _uniform(local, d, windows, origin[d - first], None if indices else 0)
        result = function(local, shape[first:])
        values, places = result if indices else (result, None)
        if indices:
            places = _global_indices(places, local.shape[first:], lookup, spec.shape[first:])
        else:
            for d, windows in layouts.items():
                widest = max(b - a for a, b in windows)
                scale = local.new_tensor([widest / (b - a) for a, b in windows])
                values = values * scale.view(-1, *[1] * (values.ndim - d - 1))
    result = from_part(values, out_spec)
    return (result, wrap(places, resized(spec, out_meta, torch.int64, sizes))) if indices else result


def _uniform(
    local: Tensor, dim: int, windows: Sequence[Interval], origin: int, fill: float | None
) -> tuple[Tensor, Tensor]:
    """Windows of unequal lengths side by side, all as long as the longest, so that one kernel can pool them.

    Args:
        fill: what the shorter windows are filled up with; None: their own last element.

    Returns:
        The tensor, and for each place along ``dim`` the global index that it was taken from.
    """
    widest = max(b - a for a, b in windows)
    taken = [min(a + t, b - 1) for a, b in windows for t in range(widest)]
    table = torch.tensor(taken, device=local.device)
    result = local.index_select(dim, table - origin)
    if fill is not None:
        excess = torch.tensor([a + t >= b for a, b in windows for t in range(widest)], device=local.device)
        result = result.masked_fill(excess.view(-1, *[1] * (local.ndim - dim - 1)), fill)
    return result, table


def _best_of_ranks(
    values: ShardTensor, places: ShardTensor, meta: Tensor, dims: Sequence[int]
) -> tuple[ShardTensor, ShardTensor]:
    """The maximum over the ranks' own maxima along ``dims``, replicated over the mesh dims that sharded them."""
    spec = values._spec
    meshed = [spec.sharded_dims()[d] for d in dims]
    target = spec.replace(
        placements=[Replicate() if m in meshed else p for m, p in enumerate(spec.placements)],
        sizes=tuple(None if m in meshed else s for m, s in enumerate(spec.sizes)),
    )
    out = target.replace(meta=resized(target, meta, values.dtype, {}).tensor_meta)
    shape = out.local_shape()

    def candidates(t: ShardTensor) -> Tensor:
        whole = redistribute_to(t, target.replace(meta=t._spec.tensor_meta)).to_local()
        return whole.movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims))

    best, index = candidates(values), candidates(places)
    if best.numel() == 0:
        best, index = best.reshape(shape), index.reshape(shape)
    else:
        # In the order of the global tensor: torch takes the first of equal maxima, and the last NaN.
        order = index.argsort(-1)
        best, index = best.gather(-1, order).flatten(0, -2), index.gather(-1, order).flatten(0, -2)
        best, chosen = F.adaptive_max_pool1d(best, 1, return_indices=True)
        best, index = best.reshape(shape), index.gather(-1, chosen).reshape(shape)
    return from_part(best, out), wrap(index, resized(target, meta, torch.int64, {}))


# -- doors ------------------------------------------------------------------------------------------------

_nn, _aten = torch._C._nn, torch.ops.aten

for _n in (1, 2, 3):
    _name = f"max_pool{_n}d"
    _doors = (getattr(torch, _name), getattr(F, _name), getattr(_aten, _name))
    register(*_doors)(partial(_max_pool, ndim=_n))
    _name = f"max_pool{_n}d_with_indices"
    _doors = (getattr(torch if _n == 1 else _nn, _name), getattr(F, _name), getattr(_aten, _name))
    register(*_doors)(partial(_max_pool, ndim=_n, indices=True))
    _name = f"avg_pool{_n}d"
    register(getattr(F, _name), getattr(_aten, _name))(partial(_avg_pool, ndim=_n))
    register(getattr(F, f"lp_pool{_n}d"))(partial(_lp_pool, ndim=_n))
    _name = f"adaptive_avg_pool{_n}d"
    _same = {getattr(F, _name), getattr(torch if _n == 1 else _nn, _name), getattr(_aten, _name)}
    register(*_same)(partial(_adaptive_avg_pool, ndim=_n))
    _name = f"adaptive_max_pool{_n}d"
    register(getattr(F, _name))(partial(_adaptive_max_pool, ndim=_n))
    # Below torch.nn.functional, these always return the indices too.
    _doors = (getattr(torch if _n == 1 else _nn, _name), getattr(F, f"{_name}_with_indices"), getattr(_aten, _name))
    register(*_doors)(partial(_adaptive_max_pool, ndim=_n, indices=True))


# -- the gradient of max pooling, called by its operator's name ---------------------------------------------------


class _MaxPoolGradient(torch.autograd.Function):
    """The pooling is done once more, and its own gradient taken: the same elements are the largest."""

    @staticmethod
    def forward(ctx: Any, grad: Any, pooled: Any, *options: Any) -> Any:  # type: ignore[override]
        ctx.pooled = pooled.detach()
        with torch.enable_grad():
            leaf = ctx.pooled.requires_grad_()
            out = F.max_pool2d(leaf, *options)
        return torch.autograd.grad(out, leaf, grad)[0]

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:  # type: ignore[override]
        if ctx.needs_input_grad[0]:
            raise refuse(
                "max_pool2d_with_indices_backward",
                ctx.pooled,
                "it cannot be differentiated by the gradient that it is given",
                "call F.max_pool2d and torch.autograd.grad",
            )
        return (None, torch.zeros_like(ctx.pooled), *(None,) * 5)


def _max_pool_gradient(
    grad_output: Any,
    self: Any,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    indices: Any,
) -> Any:
    """Handler of the operator; ``indices`` are those of the pooling with these options."""
    if not isinstance(self, ShardTensor):
        return NotImplemented
    return _MaxPoolGradient.apply(grad_output, self, kernel_size, stride or kernel_size, padding, dilation, ceil_mode)


_gradient = _aten.max_pool2d_with_indices_backward
register(_gradient, _gradient.default)(_max_pool_gradient)
