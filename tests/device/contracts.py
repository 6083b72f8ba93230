"""What CUDA's kernels demand of their arguments and the CPU's do not; the emulated device checks it before each kernel.

The CPU's kernels, which run in their place, take more: a channels-last input, a weight that is not there, float32
weights of a norm in half precision. What CUDA does not take raises here, with CUDA's text; where its kernel would go
wrong without an error, the text says that. Only what a tensor tells without its values is looked at: a check waits for
nothing.

Read in torch's sources, of which each contract names the file: what 2.13 demands, and what versions before and after it
do besides. ``docs/kernels.md`` is the table for people, with how the package keeps each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["CONTRACTS", "NAMES", "Contract", "check", "contract"]


@dataclass(frozen=True)
class Contract:
    """A row of the table.

    Attributes:
        names: the operators, ``aten::name`` or ``aten::name.overload``.
        source: the file of torch's sources that demands it.
        demands: what, in a sentence.
        check: raises where arguments break it; its parameters are arguments' names in the operators' schemas, with
            defaults for those that not every one has.
    """

    names: tuple[str, ...]
    source: str
    demands: str
    check: Callable[..., None]


CONTRACTS: list[Contract] = []
_by_name: dict[str, tuple[Contract, tuple[tuple[int, str], ...], tuple[Any, ...]]] = {}


def contract(*names: str, source: str, demands: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: the function is the contract of these operators. Those that this torch does not have are left out."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        row = Contract(names, source, demands, function)
        CONTRACTS.append(row)
        wanted = inspect.signature(function).parameters
        for name in names:
            packet, _, overload = name.removeprefix("aten::").partition(".")
            if not hasattr(torch.ops.aten, packet):
                continue
            arguments = getattr(getattr(torch.ops.aten, packet), overload or "default")._schema.arguments
            places = tuple((i, a.name) for i, a in enumerate(arguments) if a.name in wanted)
            _by_name[name] = row, places, tuple(a.default_value for a in arguments)
        return function

    return add


def check(name: str, args: tuple[Any, ...]) -> None:
    """Raise RuntimeError, as CUDA's kernel does, where a call breaks its contract.

    Args:
        name: of the operator, one of :data:`NAMES`.
        args: all its arguments in the schema's order, those that are keywords in Python included, None for tensors
            that are undefined. Those left out at the end have their defaults.
    """
    row, places, defaults = _by_name[name]
    args = (*args, *defaults[len(args) :])
    row.check(**{argument: args[i] for i, argument in places})


# -- what is demanded often --------------------------------------------------------------------------------------------

_TYPES = {
    torch.float64: "Double",
    torch.float32: "Float",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Long",
    torch.int32: "Int",
    torch.int16: "Short",
    torch.int8: "Char",
    torch.uint8: "Byte",
    torch.bool: "Bool",
    torch.complex128: "ComplexDouble",
    torch.complex64: "ComplexFloat",
    torch.complex32: "ComplexHalf",
}
_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _name(dtype: torch.dtype) -> str:
    return _TYPES.get(dtype, str(dtype))


def _expect(holds: bool, expression: str) -> None:
    """A TORCH_CHECK without a text of its own."""
    if not holds:
        raise RuntimeError(
            f"Expected {expression} to be true, but got false.  (Could this error message be improved?  If so, please "
            "report an enhancement request to PyTorch.)"
        )


def _defined(tensor: Tensor | None, expression: str, source: str, text: str) -> None:
    """A TORCH_INTERNAL_ASSERT."""
    if tensor is None:
        raise RuntimeError(f'{expression} INTERNAL ASSERT FAILED at "{source}", please report a bug to PyTorch. {text}')


def _floating(dtype: torch.dtype, kernel: str) -> None:
    """What AT_DISPATCH_FLOATING_TYPES_AND2 with the half types takes."""
    if dtype not in _FLOATING:
        raise NotImplementedError(f"\"{kernel}\" not implemented for '{_name(dtype)}'")


def _read_as(dtype: torch.dtype, *tensors: Tensor | None) -> None:
    """What ``data_ptr<T>()`` takes."""
    for t in tensors:
        if t is not None and t.dtype != dtype:
            raise RuntimeError(f"expected scalar type {_name(dtype)} but found {_name(t.dtype)}")


def _accessed_as(dtype: torch.dtype, **tensors: Tensor | None) -> None:
    """What the packed accessors of batch norm take."""
    for name, t in tensors.items():
        if t is not None and t.dtype != dtype:
            raise RuntimeError(f"Expected {name} to have type {_name(dtype)} but got {_name(t.dtype)}")


def _contiguous(kernel: str, **tensors: Tensor | None) -> None:
    """What is read by ``data_ptr`` and without strides."""
    for name, t in tensors.items():
        if t is not None and not t.is_contiguous():
            raise RuntimeError(f"{kernel} reads {name} as contiguous, which it is not: wrong numbers")


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In which CUDA adds up."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _saved(input: Tensor, **statistics: Tensor | None) -> None:
    """Those that the forward kernel saved: in the dtype of sums, but the CPU's, which runs here, keeps the input's."""
    _accessed_as(
        _wide(input.dtype), **{n: t for n, t in statistics.items() if t is not None and t.dtype != input.dtype}
    )


def _deterministic(kernel: str) -> None:
    """``alertNotDeterministic``."""
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(
            f"{kernel} does not have a deterministic implementation, but you set "
            "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this operation, or you "
            "can use the 'warn_only=True' option, if that's acceptable for your application."
        )


# -- normalization -----------------------------------------------------------------------------------------------------

_NORMALIZATION = "aten/src/ATen/native/cuda/Normalization.cu"


def _in_mixed_types(input: Tensor, **parameters: Tensor | None) -> torch.dtype:
    """The dtype in which batch norm reads its parameters: all the input's, or all that of its sums."""
    dtype = next((p.dtype for p in parameters.values() if p is not None), input.dtype)
    dtype = input.dtype if dtype == input.dtype else _wide(input.dtype)
    _accessed_as(dtype, **parameters)
    return dtype


def _has_channels_last(t: Tensor) -> bool:
    formats = torch.channels_last, torch.channels_last_3d
    return any(t.is_contiguous(memory_format=f) for f in formats) or (t.is_contiguous() and t.stride(1) == 1)


@contract(
    "aten::native_batch_norm",
    "aten::_native_batch_norm_legit",
    "aten::_native_batch_norm_legit.no_stats",
    source=_NORMALIZATION,
    demands="At least one channel; weight and bias of one dtype, the input's or that of its sums; running statistics "
    "in evaluation.",
)
def _batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
) -> None:
    _floating(input.dtype, "batch_norm_elementwise_cuda")
    _expect((running_mean is None) == (running_var is None), "has_running_mean == has_running_var")
    _expect(training or running_mean is not None, "has_running_mean")
    if not input.shape[1]:
        raise RuntimeError("CUDA error: invalid configuration argument")
    _in_mixed_types(input, weight=weight, bias=bias)


@contract(
    "aten::native_batch_norm_backward",
    source=_NORMALIZATION,
    demands="A gradient of the input's dtype; a weight if its gradient or the bias's is requested; saved "
    "statistics in the dtype of sums, or empty ones for the running statistics. They may be undefined "
    "only in evaluation, if the gradients of a row-major input and of a parameter are requested together.",
)
def _batch_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    output_mask: Sequence[bool],
) -> None:
    of_input, *of_parameters = output_mask
    reduces = train or any(of_parameters)
    _floating(input.dtype, "batch_norm_backward_cuda")
    if any(of_parameters) and weight is None:
        raise RuntimeError("tensor does not have a device")  # the weight's options are asked for
    if reduces and of_input and not _has_channels_last(input):
        _in_mixed_types(input, weight=weight, running_mean=running_mean, running_var=running_var)
        _accessed_as(input.dtype, grad_output=grad_out)
        _saved(input, save_mean=save_mean, save_invstd=save_invstd)
        if any(t is None for t in ((save_mean, save_invstd) if train else (running_mean, running_var))):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return
    for name, saved, running in (("save_mean", save_mean, running_mean), ("save_invstd", save_invstd, running_var)):
        _defined(saved, f"{name}->defined()", _NORMALIZATION, f"{name} should always be defined\n")
        if saved is not None and not saved.numel() and (reduces or name == "save_invstd"):
            expected = "running_mean->defined()" if name == "save_mean" else "running_var->defined()"
            _expect(not train and running is not None, f"!train && {expected}")
        elif saved is not None and saved.numel():
            _saved(input, **{name.removeprefix("save_"): saved})
    _in_mixed_types(input, weight=weight)
    _accessed_as(input.dtype, grad_output=grad_out)


@contract(
    "aten::batch_norm_update_stats",
    source=_NORMALIZATION,
    demands="A non-empty input; both running statistics or none. MPS has no such kernel.",
)
def _batch_norm_update_stats(input: Tensor, running_mean: Tensor | None, running_var: Tensor | None) -> None:
    _floating(input.dtype, "batch_norm_stats_cuda")
    _expect((running_mean is None) == (running_var is None), "running_mean->defined() == running_var->defined()")
    if not input.numel():
        raise RuntimeError(f"input tensor must have at least one element, but got input_sizes = {list(input.shape)}")


@contract(
    "aten::batch_norm_stats", source=_NORMALIZATION, demands="A non-empty input. Only CUDA has such a kernel."
)
def _batch_norm_stats(input: Tensor) -> None:
    _floating(input.dtype, "batch_norm_stats_cuda")
    if not input.numel():
        raise RuntimeError(f"input tensor must have at least one element, but got input_sizes = {list(input.shape)}")


@contract(
    "aten::batch_norm_elemt",
    source=_NORMALIZATION,
    demands="Weight and bias of one dtype, the input's or that of its sums; statistics in that of its sums.",
)
def _batch_norm_elemt(input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor) -> None:
    _floating(input.dtype, "batch_norm_elementwise_cuda")
    _in_mixed_types(input, weight=weight, bias=bias)
    _accessed_as(_wide(input.dtype), mean=mean, invstd=invstd)


@contract(
    "aten::batch_norm_backward_reduce",
    source=_NORMALIZATION,
    demands="A gradient of the input's dtype; a weight if its gradient or the bias's is requested; statistics in "
    "the dtype of sums, contiguous where channels are last.",
)
def _batch_norm_backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    weight_g: bool,
    bias_g: bool,
) -> None:
    _floating(input.dtype, "batch_norm_backward_reduce")
    if mean.dtype != invstd.dtype:
        raise RuntimeError("mean and invstd need to have the same data types")
    if (weight_g or bias_g) and weight is None:
        raise RuntimeError("tensor does not have a device")
    _accessed_as(grad_out.dtype, input=input)
    _in_mixed_types(input, weight=weight)
    _accessed_as(_wide(input.dtype), mean=mean, invstd=invstd)
    if _has_channels_last(grad_out):
        _contiguous("batch_norm_backward_reduce", mean=mean, invstd=invstd)


@contract(
    "aten::batch_norm_backward_elemt",
    source=_NORMALIZATION,
    demands="A gradient of the input's dtype; weight, statistics and sums in the dtype of sums; counts of type int32. "
    "Where channels are last, or one step apart in memory as each has one element: weight, statistics and sums "
    "contiguous.",
)
def _batch_norm_backward_elemt(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> None:
    _floating(input.dtype, "batch_norm_backward_elemt")
    if mean.dtype != invstd.dtype:
        raise RuntimeError("mean and invstd need to have the same data types")
    _accessed_as(grad_out.dtype, input=input)
    given = {"mean": mean, "invstd": invstd, "weight": weight, "sum_dy": sum_dy, "sum_dy_xmu": sum_dy_xmu}
    _accessed_as(_wide(input.dtype), **given)
    if _has_channels_last(grad_out):
        _contiguous("batch_norm_backward_elemt", **given)
    _read_as(torch.int32, count)


@contract(
    "aten::batch_norm_gather_stats_with_counts",
    source=_NORMALIZATION,
    demands="Statistics `(ranks, channels)` in the dtype of sums; a count per rank, of the dtype of the running "
    "statistics or, without them, of the input.",
)
def _batch_norm_gather_stats(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    counts: Tensor,
) -> None:
    name = "batch_norm_gather_stats_with_counts: expected"
    if mean.ndim != 2:
        raise RuntimeError(
            f"{name} mean to be 2-dimensional (world_size, num_features), but got mean of sizes {list(mean.shape)}"
        )
    if invstd.shape != mean.shape:
        raise RuntimeError(
            f"{name} invstd to have the same shape as mean ({list(mean.shape)}), but got invstd of sizes "
            f"{list(invstd.shape)}"
        )
    if counts.numel() < len(mean):
        raise RuntimeError(
            f"{name} counts to have at least one element per entry in mean's first dimension ({len(mean)}), but got "
            f"{counts.numel()} elements"
        )
    dtype = input.dtype if running_mean is None else running_mean.dtype
    _accessed_as(_wide(dtype), mean=mean, invstd=invstd)
    _accessed_as(dtype, running_mean=running_mean, running_var=running_var, counts=counts)


_GROUP_NORM = "aten/src/ATen/native/group_norm.cpp"


@contract(
    "aten::native_group_norm",
    source=_GROUP_NORM,
    demands="An input that is row-major, not channels-last; weight and bias contiguous and of its dtype. Also on MPS.",
)
def _group_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    _floating(input.dtype, "GroupNormKernelImpl")
    _expect(input.is_contiguous(), "X.is_contiguous(memory_format)")
    for name, t in (("gamma", weight), ("beta", bias)):
        _expect(t is None or t.is_contiguous(), f"!{name}.defined() || {name}.is_contiguous()")
    _read_as(input.dtype, weight, bias)


@contract(
    "aten::native_group_norm_backward",
    source=_GROUP_NORM,
    demands="Gradient and input of one dtype and row-major, not channels-last. Some versions do not "
    "check this, and return wrong numbers. Statistics and weight contiguous and of that dtype; a weight if its "
    "gradient or the bias's is requested.",
)
def _group_norm_backward(
    grad_out: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, output_mask: Sequence[bool]
) -> None:
    _floating(input.dtype, "GroupNormBackwardKernelImpl")
    if input.dtype != grad_out.dtype:
        raise RuntimeError("Expected scalar types of X and dY are same.")
    if not (input.is_contiguous() and grad_out.is_contiguous()):
        raise RuntimeError("native_group_norm_backward reads X and dY as row-major, which they are not: wrong numbers")
    _expect(mean.is_contiguous(), "mean.is_contiguous()")
    _expect(rstd.is_contiguous(), "rstd.is_contiguous()")
    _expect(weight is None or weight.is_contiguous(), "!gamma.defined() || gamma.is_contiguous()")
    if weight is None and any(output_mask[1:]):
        raise RuntimeError("tensor does not have a device")
    _read_as(input.dtype, mean, rstd, weight)


_LAYER_NORM = "aten/src/ATen/native/cuda/layer_norm_kernel.cu"


@contract(
    "aten::native_layer_norm",
    source=_LAYER_NORM,
    demands="Weight and bias of the input's dtype, also in half precision.",
)
def _layer_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    _floating(input.dtype, "LayerNormKernelImpl")
    _read_as(input.dtype, weight, bias)


@contract(
    "aten::native_layer_norm_backward",
    source=_LAYER_NORM,
    demands="Gradient and weight of the input's dtype; statistics contiguous and in the dtype of sums; weight and "
    "bias if their gradients are requested.",
)
def _layer_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> None:
    _floating(input.dtype, "LayerNormBackwardKernelImpl")
    for wanted, t in zip(output_mask[1:], (weight, bias)):
        if wanted and t is None:
            raise RuntimeError("tensor does not have a device")
    _read_as(input.dtype, grad_out, weight)
    _read_as(_wide(input.dtype), *(t for t in (mean, rstd) if t.dtype != input.dtype))
    if not (mean.is_contiguous() and rstd.is_contiguous()):
        raise RuntimeError(
            "native_layer_norm_backward reads mean and rstd as contiguous, which they are not: wrong numbers"
        )


# -- convolution, pooling, interpolation -------------------------------------------------------------------------------


@contract(
    "aten::convolution_backward",
    source="aten/src/ATen/native/Convolution.cpp",
    demands="Gradient, input and weight of one dtype, floating-point or complex, in any memory format.",
)
def _convolution_backward(grad_output: Tensor, input: Tensor, weight: Tensor) -> None:
    if input.dtype != weight.dtype:
        raise RuntimeError(
            f"Input type ({_name(input.dtype)}) and weight type ({_name(weight.dtype)}) should be the same"
        )
    if not (input.is_floating_point() or input.is_complex()):
        raise RuntimeError(f"getCudnnDataTypeFromScalarType() not supported for {_name(input.dtype)}")
    _read_as(input.dtype, grad_output)


@contract(
    "aten::max_pool2d_with_indices_backward",
    source="aten/src/ATen/native/cuda/DilatedMaxPool2d.cu",
    demands="A gradient of the input's dtype; int64 indices into the planes of the input, which are not checked.",
)
def _max_pool2d_backward(grad_output: Tensor, self: Tensor, indices: Tensor) -> None:
    _floating(self.dtype, "max_pool2d_with_indices_out_cuda_frame")
    _read_as(self.dtype, grad_output)
    _read_as(torch.int64, indices)


@contract(
    "aten::max_pool3d_with_indices_backward",
    source="aten/src/ATen/native/cuda/DilatedMaxPool3d.cu",
    demands="A gradient of the input's dtype; int64 indices into the volumes of the input, which are not checked.",
)
def _max_pool3d_backward(grad_output: Tensor, self: Tensor, indices: Tensor) -> None:
    _floating(self.dtype, "max_pool3d_with_indices_backward_out_frame")
    _read_as(self.dtype, grad_output)
    _read_as(torch.int64, indices)


@contract(
    "aten::avg_pool2d_backward",
    source="aten/src/ATen/native/cuda/AveragePool2d.cu",
    demands="A gradient of the input's dtype.",
)
def _avg_pool2d_backward(grad_output: Tensor, self: Tensor) -> None:
    _floating(self.dtype, "avg_pool2d_backward_out_cuda_frame")
    _read_as(self.dtype, grad_output)


@contract(
    "aten::avg_pool3d_backward",
    source="aten/src/ATen/native/cuda/AveragePool3d.cu",
    demands="A gradient of the input's dtype; no `torch.use_deterministic_algorithms`.",
)
def _avg_pool3d_backward(grad_output: Tensor, self: Tensor) -> None:
    _deterministic("avg_pool3d_backward_cuda")
    _floating(self.dtype, "avg_pool3d_backward_out_frame")
    _read_as(self.dtype, grad_output)


@contract(
    "aten::upsample_nearest1d_backward",
    "aten::upsample_nearest2d_backward",
    "aten::upsample_nearest3d_backward",
    "aten::_upsample_nearest_exact1d_backward",
    "aten::_upsample_nearest_exact2d_backward",
    "aten::_upsample_nearest_exact3d_backward",
    source="aten/src/ATen/native/cuda/UpSampleNearest2d.cu",
    demands="A gradient that is floating-point or uint8.",
)
def _nearest_backward(grad_output: Tensor) -> None:
    if grad_output.dtype != torch.uint8:
        _floating(grad_output.dtype, "upsample_nearest_backward_out_frame")


@contract(
    "aten::upsample_linear1d_backward",
    "aten::upsample_bilinear2d_backward",
    "aten::upsample_trilinear3d_backward",
    "aten::upsample_bicubic2d_backward",
    "aten::_upsample_bilinear2d_aa_backward",
    "aten::_upsample_bicubic2d_aa_backward",
    source="aten/src/ATen/native/cuda/UpSampleBilinear2d.cu",
    demands="A floating-point gradient; no `torch.use_deterministic_algorithms`. MPS has none of those with "
    "antialiasing.",
)
def _interpolation_backward(grad_output: Tensor) -> None:
    _deterministic("upsample_backward_out_cuda")
    _floating(grad_output.dtype, "upsample_backward_out_frame")


# -- attention ---------------------------------------------------------------------------------------------------------

_FUNCTIONS = "aten/src/ATen/native/native_functions.yaml"
_FLASH = "aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp"
_EFFICIENT = "aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h"
_EFFICIENT_BACKWARD = "aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_backward.h"


def _no_kernel(names: str) -> None:
    raise NotImplementedError(f"Could not run '{names}' with arguments from the 'CUDA' backend.")


@contract(
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    source=_FUNCTIONS,
    demands="Only the CPU has this kernel.",
)
def _flash_for_cpu() -> None:
    _no_kernel("aten::_scaled_dot_product_flash_attention_for_cpu")


def _flash(direction: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    for name, t in (("key", key), ("value", value)):
        if t.dtype != query.dtype:
            raise RuntimeError(f"query and {name} must have the same dtype")
    if any(t.stride(-1) != 1 for t in (query, key, value)):
        raise RuntimeError("Input tensor must have contiguous last dimension")
    if query.shape[-1] % 8:
        raise RuntimeError("head_size must be a multiple of 8, this is ensured by padding!")
    if any(t.storage_offset() % 8 or any(s % 8 for n, s in zip(t.shape, t.stride()[:-1]) if n > 1)
           for t in (query, key, value)):  # fmt: skip
        raise RuntimeError("CUDA error: misaligned address")
    if query.shape[-1] > 256:
        raise RuntimeError(f"FlashAttention {direction} only supports head dimension at most 256")
    for name, t in (("k", key), ("v", value)):
        if t.shape[-1] != query.shape[-1] or query.shape[1] % t.shape[1]:
            raise RuntimeError(f"{name} must have shape (batch_size, seqlen_k, num_heads_k, head_size)")


@contract(
    "aten::_scaled_dot_product_flash_attention",
    source=_FLASH,
    demands="Half precision; queries, keys and values of one head size, a multiple of 8 up to 256, contiguous in "
    "their last dim, memory and other strides aligned to 16 bytes, which is not checked; no mask. `is_causal` is "
    "aligned at the lower right. The log-sum-exp is float32 `(batch, heads, rows)`, +inf for rows without keys.",
)
def _flash_forward(query: Tensor, key: Tensor, value: Tensor) -> None:
    _flash("forward", query, key, value)


@contract(
    "aten::_scaled_dot_product_flash_attention_backward",
    source=_FLASH,
    demands="The same; gradient and result of the queries' dtype; the forward kernel's log-sum-exp, contiguous.",
)
def _flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor
) -> None:
    _flash("backward", query, key, value)
    for name, t in (("out", out), ("dout", grad_out)):
        if t.dtype != query.dtype:
            raise RuntimeError(f"query and {name} must have the same dtype")
    if logsumexp.dtype != torch.float32 or logsumexp.shape != query.shape[:-1] or not logsumexp.is_contiguous():
        raise RuntimeError(
            "flash attention reads a contiguous float32 log-sum-exp (batch, heads, rows), not "
            f"{_name(logsumexp.dtype)} {list(logsumexp.shape)}: wrong numbers"
        )


def _efficient(kernel: str, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> int:
    """Returns how many elements 16 bytes are, to which all of it is aligned since sm80."""
    if query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise RuntimeError("Only fp32, half & bf16 supported at the moment")
    given = {"query": query, "key": key, "value": value}
    aligned = 16 // query.element_size()
    _read_as(query.dtype, key, value)
    for name, t in given.items():
        _expect(t.shape[1] == query.shape[1], f"query.size(2) == {name}.size(2)")
        if t.stride(-1) != 1:
            raise RuntimeError(f"{name}: last dimension must be contiguous")
    if any(t.stride(1) % aligned for t in given.values()):
        raise RuntimeError(f"{kernel}: no kernel found to launch!")
    for name, t in given.items():
        if t.data_ptr() % 16:
            raise RuntimeError(f"p.{name}_ptr is not correctly aligned")
        if t.stride(2) % aligned:
            raise RuntimeError(f"{name} is not correctly aligned (strideM)")
        if len(t) > 1 and t.stride(0) % aligned:
            raise RuntimeError(f"{name} is not correctly aligned (strideB)")
    if bias is not None:
        _efficient_bias(bias, query, (*query.shape[:3], key.shape[2]), aligned)
    return aligned


def _efficient_bias(bias: Tensor, query: Tensor, shape: tuple[int, ...], aligned: int) -> None:
    if bias.dtype != query.dtype:
        raise RuntimeError("invalid dtype for bias - should match query's dtype")
    if bias.ndim != 4:
        raise RuntimeError("Bias expected in BMHK format")
    for given, n, dim in zip(bias.shape, shape, ("batch", "head", "seqlenQ", "seqlenKV")):
        if given != n:
            raise RuntimeError(f"attn_bias: wrong shape ({dim} dimension)")
    if bias.stride(3) != 1:
        raise RuntimeError("attn_bias: wrong alignment (last dimension must be contiguous)")
    for d, dim in enumerate("BHM"):
        if bias.shape[d] > 1 and bias.stride(d) % aligned:
            raise RuntimeError(
                f"attn_bias is not correctly aligned (stride{dim}). attn_bias.stride({d}) = {bias.stride(d)}, and "
                f"should be a multiple of {aligned}."
            )


@contract(
    "aten::_scaled_dot_product_efficient_attention",
    source=_EFFICIENT,
    demands="No float64; keys and values with as many heads as queries; memory and strides that are multiples of 16 "
    "bytes, but a last dim with stride 1 (so head sizes of contiguous tensors are multiples of 4, or 8 in "
    "half precision); a mask of the queries' dtype, expanded to all four dims, with such strides (so its rows "
    "are padded). The log-sum-exp is float32, its rows padded to a multiple of 32 with +inf, and 0 for rows "
    "without keys.",
)
def _efficient_forward(query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None) -> None:
    _efficient("cutlassF", query, key, value, attn_bias)


@contract(
    "aten::_scaled_dot_product_efficient_attention_backward",
    source=_EFFICIENT_BACKWARD,
    demands="The same; gradient and result of the queries' dtype, the result as the forward kernel returns it, "
    "`(batch, rows, heads, size)` in memory; the forward kernel's log-sum-exp, padded.",
)
def _efficient_backward(
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
) -> None:
    _efficient("cutlassB", query, key, value, attn_bias)
    _read_as(query.dtype, grad_out_, out)
    if not out.transpose(1, 2).is_contiguous():
        raise RuntimeError("efficient attention reads out as contiguous in (batch, rows, heads, size): wrong numbers")
    _read_as(torch.float32, logsumexp)
    for d, dim in ((1, "H"), (0, "B")):
        if logsumexp.shape[d] > 1 and logsumexp.stride(d) % 8:
            raise RuntimeError(f"LSE is not correctly aligned (stride{dim})")
    if logsumexp.shape[-1] != -(-query.shape[2] // 32) * 32:
        raise RuntimeError("efficient attention reads rows of the log-sum-exp up to a multiple of 32: wrong numbers")


def _by_heads(*tensors: Tensor) -> tuple[Tensor, ...]:
    """(batch, rows, heads, size) as (batch, heads, rows, size)."""
    for t in tensors:
        _expect(t.dim() == 4, "t.dim() == 4")
    return tuple(t.transpose(1, 2) for t in tensors)


@contract(
    "aten::_efficient_attention_forward",
    source=_EFFICIENT,
    demands="The same of tensors `(batch, rows, heads, size)`; `custom_mask_type` aligns a causal mask at the upper "
    "left (1) or at the lower right (2).",
)
def _efficient_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, custom_mask_type: int) -> None:
    _expect(custom_mask_type in (0, 1, 2), "custom_mask_type < NumCustomMaskTypes")
    _efficient("cutlassF", *_by_heads(query, key, value), bias)


@contract(
    "aten::_efficient_attention_backward",
    source=_EFFICIENT_BACKWARD,
    demands="The same; gradient and result of the queries' dtype, the result contiguous; the forward kernel's "
    "log-sum-exp, padded. The gradient of a bias has the bias's shape, expanded.",
)
def _efficient_attention_backward(
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    custom_mask_type: int,
) -> None:
    _expect(custom_mask_type in (0, 1, 2), "custom_mask_type < NumCustomMaskTypes")
    tensors = _by_heads(grad_out_, query, key, value)
    _efficient_backward(*tensors, bias, *_by_heads(out), logsumexp)


# -- the rest ----------------------------------------------------------------------------------------------------------


# By their c10::ScalarType.
_NUMBERED = {5: torch.float16, 6: torch.float32, 7: torch.float64, 15: torch.bfloat16}


@contract(
    "aten::_softmax_backward_data",
    "aten::_log_softmax_backward_data",
    source="aten/src/ATen/native/cuda/SoftMax.cu",
    demands="Gradient and output of one dtype: the input's, or float32 if that is float16.",
)
def _softmax_backward(grad_output: Tensor, output: Tensor, input_dtype: torch.dtype | int) -> None:
    # In a schema a ScalarType is a number.
    dtype = input_dtype if isinstance(input_dtype, torch.dtype) else _NUMBERED.get(input_dtype, torch.int64)
    if grad_output.dtype != dtype and (grad_output.dtype, dtype) != (torch.float32, torch.float16):
        raise RuntimeError("expected input and grad types to match, or input to be at::Half and grad to be at::Float")
    _floating(dtype, "host_softmax_backward")
    _read_as(grad_output.dtype, output)


def _power_of_two(lengths: Sequence[int], shape: Sequence[int]) -> None:
    if any(n & (n - 1) for n in lengths):
        raise RuntimeError(
            "cuFFT only supports dimensions whose sizes are powers of two when computing in half precision, but got a "
            f"signal size of{list(shape)}"
        )


@contract(
    "aten::_fft_r2c",
    "aten::_fft_c2c",
    source="aten/src/ATen/native/cuda/CuFFTPlanCache.h",
    demands="In half precision, lengths that are powers of two. The CPU has no half precision.",
)
def _fft(self: Tensor, dim: Sequence[int]) -> None:
    if self.dtype in (torch.float16, torch.complex32):
        _power_of_two([self.shape[d] for d in dim], self.shape)


@contract(
    "aten::_fft_c2r",
    source="aten/src/ATen/native/cuda/CuFFTPlanCache.h",
    demands="The same, of the result's lengths.",
)
def _fft_to_real(self: Tensor, dim: Sequence[int], last_dim_size: int) -> None:
    if self.dtype == torch.complex32:
        _power_of_two([*(self.shape[d] for d in dim[:-1]), last_dim_size], self.shape)


def _steps_fast(*lists: Sequence[Tensor]) -> bool:
    """``check_fast_path_restrictions``."""
    parameters, given = lists[0], [tensors for tensors in lists if tensors]
    for i, parameter in enumerate(parameters):
        for t in (tensors[i] for tensors in given):
            alike = t.dtype == parameters[0].dtype and t.device == parameters[0].device and t.shape == parameter.shape
            strided = all(t.stride(d) == parameter.stride(d) for d, n in enumerate(t.shape) if n != 1)
            if not (alike and strided and _is_dense(t)):
                return False
    return True


def _is_dense(t: Tensor) -> bool:
    """``is_non_overlapping_and_dense``."""
    dims = sorted((d for d in range(t.ndim) if t.shape[d] != 1), key=lambda d: (t.stride(d), t.shape[d]))
    expected = 1
    for d in dims if t.numel() else ():
        if t.stride(d) != expected:
            return False
        expected *= t.shape[d]
    return True


@contract(
    "aten::_fused_adam_",
    "aten::_fused_adam_.tensor_lr",
    "aten::_fused_adamw_",
    "aten::_fused_adamw_.tensor_lr",
    source="aten/src/ATen/native/cuda/FusedAdamKernel.cu",
    demands="Parameters, gradients and states of one dtype, those of each parameter dense and of the same strides. "
    "Otherwise the CPU's results are wrong.",
)
def _fused_adam(
    self: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
) -> None:
    if not _steps_fast(self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs):
        names = "exp_avgs, exp_avg_sqs, and max_exp_avg_sqs" if max_exp_avg_sqs else "exp_avgs, and exp_avg_sqs"
        raise RuntimeError(f"params, grads, {names} must have same dtype, device, and layout")


@contract(
    "aten::_fused_sgd_",
    "aten::_fused_sgd_.tensor_lr",
    source="aten/src/ATen/native/cuda/FusedSgdKernel.cu",
    demands="The same of parameters, gradients and momentum buffers.",
)
def _fused_sgd(self: Sequence[Tensor], grads: Sequence[Tensor], momentum_buffer_list: Sequence[Tensor]) -> None:
    names = "{params, grads, momentum_buffer_list}" if momentum_buffer_list else "{params, grads}"
    _expect(_steps_fast(self, grads, momentum_buffer_list), f"at::native::check_fast_path_restrictions({names})")


@contract(
    "aten::_fused_adagrad_",
    "aten::_fused_adagrad_.tensor_lr",
    source="aten/src/ATen/native/cuda/FusedAdagradKernel.cu",
    demands="The same of parameters, gradients and sums. MPS has no such kernel.",
)
def _fused_adagrad(self: Sequence[Tensor], grads: Sequence[Tensor], state_sums: Sequence[Tensor]) -> None:
    if not _steps_fast(self, grads, state_sums):
        raise RuntimeError("params, grads, and state_sums must have same dtype, device, and layout")


@contract(
    "aten::histogram.bin_ct",
    "aten::histogram.bins_tensor",
    "aten::_histogramdd_bin_edges",
    "aten::_histogramdd_from_bin_cts",
    "aten::_histogramdd_from_bin_tensors",
    source=_FUNCTIONS,
    demands="The CPU or MPS: CUDA has no such kernel.",
)
def _histogram() -> None:
    _no_kernel("aten::histogram.bin_ct")


NAMES = frozenset(_by_name)
