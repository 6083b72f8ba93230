"""Operators of torch's formulas, by the functions that they are parts of.

[Note: formulas] torch computes a function or a gradient by operators that have no name in ``torch.nn.functional``.
Modules that were scripted or traced reach these of their layers, and so does their backward pass. Each is put together
of what has a plan: forward operators of the function that they are a spelling of, gradients of elementary operators, or
of the function, which then runs once more. That costs more than torch's kernel, and is right for any shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._compat import OpOverloadPacket, decomposition
from ..dispatch.planning import converted, spec_of
from ..dispatch.registry import FUNCTIONS, RANDOM, REFUSED, register
from ..dispatch.tensor import ShardTensor, redistribute_to, wrap
from ..errors import refuse
from ..layout.intervals import map_boundaries
from .common.stencil import scaled_boundary, with_sizes
from .convolution.conv import gradients_of_convolution
from .spatial.interpolate import MODES

_aten = torch.ops.aten
Tensors = Sequence[Tensor | None]


def _of(name: str) -> OpOverloadPacket | None:
    """The operator of this name; None in a release of torch that has none."""
    return getattr(_aten, name, None)


def _spells(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function below it is what this operator does."""
    return register(getattr(_aten, name))


# -- gradients of functions --------------------------------------------------------------------------------------------


def _gradients(function: Callable[..., Any], tensors: Sequence[Tensor], grad: Tensor, mask: Sequence[bool]) -> Tensors:
    """The gradients of ``function`` by its tensors, where the mask says so; its result has the gradient ``grad``."""
    again = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, grad))
    with torch.enable_grad():
        own = [t if again and t.requires_grad else t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
        result = function(*own)
    wanted = [t for t, need in zip(own, mask, strict=True) if need]
    found = iter(torch.autograd.grad(result, wanted, grad, create_graph=again))
    return tuple(next(found) if need else None for need in mask)


def _gradient(function: Callable[..., Any], x: Tensor, grad: Tensor) -> Tensor | None:
    return _gradients(function, [x], grad, [True])[0]


def _upsample_backward(forward: Any, grad: ShardTensor, output_size: Any, input_size: Any, *options: Any) -> Any:
    """``input_size`` says nothing of shards: they are those that lead to the shards of the gradient."""
    spec, like = spec_of(grad).for_gradient(), torch.empty(list(input_size), device="meta")
    sizes = {
        d: map_boundaries(spec.sizes_along(m), scaled_boundary(spec.shape[d], input_size[d]))
        for d, m in spec.sharded_dims().items()
    }
    before = with_sizes(spec, like, grad.dtype, sizes)
    x = wrap(grad._local_tensor.new_zeros(before.own_shape, dtype=grad.dtype), before)
    return _gradient(lambda x: forward(x, output_size, *options), x, grad)


for _name in MODES:
    _spells(f"{_name}_backward")(partial(_upsample_backward, FUNCTIONS[getattr(_aten, _name)]))

for _n in (2, 3):

    @_spells(f"grid_sampler_{_n}d_backward")
    def _grid_sampler_backward(
        grad: Tensor, x: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool, mask: Sequence[bool]
    ) -> Any:
        sample = torch.grid_sampler_2d if x.ndim == 4 else torch.grid_sampler_3d
        return _gradients(lambda x, grid: sample(x, grid, mode, padding, align_corners), [x, grid], grad, mask)

    _average = getattr(F, f"adaptive_avg_pool{_n}d")
    _spells(f"_adaptive_avg_pool{_n}d")(_average)
    _spells(f"_adaptive_avg_pool{_n}d_backward")(
        lambda grad, x, f=_average, n=_n: _gradient(lambda x: f(x, grad.shape[-n:]), x, grad)
    )


@_spells("max_pool2d_with_indices_backward")
def _max_pool_backward(
    grad: Tensor, x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool, _: Any
) -> Any:
    """The indices are those of the pooling with these options."""
    return _gradient(lambda x: F.max_pool2d(x, kernel, stride or kernel, padding, dilation, ceil_mode), x, grad)


@_spells("convolution_backward")
def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, _: Any, *options_and_mask: Any) -> Any:
    """By the plan where that is possible, without a transposed convolution or a graph."""
    if not isinstance(x, DTensor):  # whose convolution, run once more, would lead here again
        raise refuse("convolution_backward", [grad, x], "the input is plain", "make the input a ShardTensor")
    *options, mask = options_and_mask
    stride, padding, dilation, transposed, _, groups = options
    if not transposed and not torch.is_grad_enabled():
        found = gradients_of_convolution(grad, x, weight, stride, padding, dilation, groups, mask)
        if found is not NotImplemented:
            return found
    gradients = _gradients(lambda x, w: torch.convolution(x, w, None, *options), [x, weight], grad, mask[:2])
    return *gradients, grad.sum([d for d in range(grad.ndim) if d != 1]) if mask[2] else None


# -- norms -------------------------------------------------------------------------------------------------------------

# As torch's compiler composes them, of functions that have plans.

for _name in ("native_layer_norm_backward", "_fused_rms_norm_backward", "native_batch_norm_backward"):
    if _packet := _of(_name):
        register(_packet)(decomposition(_packet.default, __name__))


# -- Fourier transforms ------------------------------------------------------------------------------------------------

# By torch's numbers of normalizations: none, by the root of the length, by the length.
_FORWARD, _INVERSE = ("backward", "ortho", "forward"), ("forward", "ortho", "backward")


@_spells("_fft_c2c")
def _c2c(x: Tensor, dim: Any, normalization: int, forward: bool) -> Any:
    if forward:
        return torch.fft.fftn(x, dim=dim, norm=_FORWARD[normalization])
    return torch.fft.ifftn(x, dim=dim, norm=_INVERSE[normalization])


@_spells("_fft_r2c")
def _r2c(x: Tensor, dim: Any, normalization: int, onesided: bool) -> Any:
    return (torch.fft.rfftn if onesided else torch.fft.fftn)(x, dim=dim, norm=_FORWARD[normalization])


@_spells("_fft_c2r")
def _c2r(x: Tensor, dim: Any, normalization: int, last_dim_size: int) -> Any:
    lengths = [*(x.shape[d] for d in dim[:-1]), last_dim_size]
    return torch.fft.irfftn(x, lengths, dim, _INVERSE[normalization])


# -- functions in Python -----------------------------------------------------------------------------------------------

# What torch composes in Python of functions that have plans: its own code, which first asks whether an argument is of a
# class like ours, and here goes on where it is.


def _as_written(function: Any) -> Callable[..., Any]:
    """torch's ``function``, carried out on ShardTensors."""
    asks = ("has_torch_function_unary", "has_torch_function_variadic")
    names = {**function.__globals__, **dict.fromkeys(asks, lambda *_: False)}
    own = FunctionType(function.__code__, names, function.__name__, function.__defaults__)

    def call(*args: Any, **kwargs: Any) -> Any:
        # Partials are reduced once, though the function may use them more often.
        args, kwargs = converted(_reduced, args, kwargs)
        return own(*args, **kwargs)

    return call


def _reduced(value: Any) -> Any:
    return redistribute_to(value, value._spec.for_gradient()) if isinstance(value, ShardTensor) else value


for _function in (F.local_response_norm, F.lp_pool1d, F.lp_pool2d, F.lp_pool3d, F.multilabel_soft_margin_loss):
    register(_function)(_as_written(_function))


# -- refused -----------------------------------------------------------------------------------------------------------

# By their names, with the reason and the remedy.
_REFUSED = {
    "rrelu_with_noise rrelu_with_noise_functional": (
        RANDOM[0],
        "call torch.nn.functional.rrelu",
    ),
    "_grouped_mm _scaled_mm": ("experts and scales are those of all rows", "call it on to_local() of sharded rows"),
    " ".join(
        f"_scaled_dot_product_{kernel}_attention{of}"
        for kernel in ("flash", "efficient", "cudnn")
        for of in ("", "_backward")
    ): ("it is a kernel of one device", "call torch.nn.functional.scaled_dot_product_attention"),
}
for _names, _why in _REFUSED.items():
    REFUSED.update({packet: _why for packet in map(_of, _names.split()) if packet is not None})
