"""Neighborhood attention, through natten's own functions and modules.

Queries stay where they are. Keys and values of the windows' reach beyond the shard, the halo, are fetched together;
then a plain kernel computes this rank's queries: natten's, where it has one for the device, the dtype and the gradient
that is asked for, else the tiles of ``tiled.py``. What natten would refuse on one device, its own checks refuse
here, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import wrapt
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..._compat import TensorMeta, hidden_from_program
from ...communication.halo import Fetch
from ...dispatch.planning import without_data
from ...dispatch.registry import register
from ...dispatch.tensor import ShardTensor, promote, redistribute_to
from ...errors import refuse
from ...layout.intervals import Interval, intervals_of
from ...layout.placements import AxisLayout
from ...layout.spec import ShardTensorSpec
from ...layout.strides import contiguous_stride
from ...operators.declaration import Arguments, Composed, LocalPlan, Plan, operator, planned
from ..attention.kernels import DTYPES
from ..common.alignment import local_part, refuse_gathering, wide_dtype
from ..common.named_dims import Form, arrange, gathering
from .tiled import Dim, Neighborhood, tiled_attention

Windows = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[bool]]  # kernel, stride, dilation, causal


def _neighborhood_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    dilation: int | Sequence[int] = 1,
    is_causal: bool | Sequence[bool] = False,
    scale: float | None = None,
    additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None,
    attention_kwargs: Mapping[str, Any] | None = None,
    backend: str | None = None,
    return_lse: bool = False,
    **tuning: Any,
) -> Any:
    """Handler of natten's ``neighborhood_attention_generic``, to which all its functions and modules lead.

    It is an entry point of its own because the kernel depends on whether a gradient is needed, which plans' keys do
    not tell.

    Args:
        query: ``(batch, *spatial, heads, head_dim)``, with one to three spatial dims.
        key, value: the same with heads that divide the query's; ``value`` may have another ``head_dim``.
        kernel_size, stride, dilation, is_causal, scale: as in natten.
        additional_keys, additional_values: ``(batch, any, heads_kv, head_dim)``, seen by every query.
        backend: one of natten's. natten's "flex-fna" has no gradient on CPU; there the tiles take over.
        return_lse: return the softmax's log-sum-exp, ``(batch, *spatial, heads)``, as well.
        attention_kwargs, tuning: handed to natten's kernel where that runs.
    """
    additional = [additional_keys, additional_values]
    tensors = [t for t in (query, key, value, *additional) if t is not None]
    return plan_neighborhood_attention(
        query,
        key,
        value,
        None if len(tensors) == 3 else additional,
        (kernel_size, stride, dilation, is_causal),
        scale,
        return_lse,
        backend,
        torch.is_grad_enabled() and any(t.requires_grad for t in tensors),
        None if attention_kwargs is None else tuple(attention_kwargs.items()),
        tuple(tuning.items()),
    )


@planned("neighborhood_attention", tensors="query key value additional", partial="additional")
def plan_neighborhood_attention(
    call: Arguments,
    query: ShardTensorSpec,
    key: ShardTensorSpec,
    value: ShardTensorSpec,
    additional: Sequence[ShardTensorSpec | None] | None,
    windows: tuple[Any, ...],
    scale: float | None,
    return_lse: bool,
    backend: str | None,
    grad: bool,
    attention_kwargs: tuple[tuple[str, Any], ...] | None,
    tuning: tuple[tuple[str, Any], ...],
) -> Plan:
    """The plan of a call: ``windows`` are kernel size, stride, dilation and causality as the caller gives them.

    It fetches the halo of keys and values side by side, and attends with this rank's queries.
    """
    specs, more = [query, key, value], dict(tuning)
    windows, is_self_attention = _checked(specs, additional or (), windows, more.get("kernel_schedule"))
    name = f"natten.na{len(query.shape) - 3}d"
    layout, *_ = targets = _layouts(name, specs)
    axes = _additional_axes(targets[1])
    extra = [spec for spec in additional or () if spec is not None]
    refuse_gathering(name, [*specs, *extra], [*targets, *(spec.with_layout(axes) for spec in extra)])
    kernel = None
    if not is_self_attention:
        kernel = natten_kernel(
            backend,
            specs,
            call.device,
            grad=grad,
            additional=bool(extra),
            return_lse=return_lse,
            torch_compile=more.get("torch_compile", False),
        )
    dtype = query.tensor_meta.dtype
    if kernel is None and dtype not in DTYPES:
        raise refuse(name, specs, f"torch's attention does not compute in {dtype}", "convert the operands")
    call.tensors.update(zip(("query", "key", "value"), targets, strict=True))
    if extra:
        # Instead of the usual preparation, which would make ShardTensors of both halves.
        call.steps["additional"] = [partial(_local_additional, call.mesh, axes, layout)]
    factor, arguments = scale or query.shape[-1] ** -0.5, None
    if kernel is not None:
        arguments = dict(zip(("kernel_size", "stride", "dilation", "is_causal"), windows, strict=True), **more)
        kwargs = None if attention_kwargs is None else dict(attention_kwargs)
        arguments |= {"scale": factor, "backend": kernel, "attention_kwargs": kwargs}
    shape = (*query.shape[:-1], value.shape[-1])
    out, lse = _with_shape(layout, shape), _with_shape(layout, shape[:-1]).with_dtype(wide_dtype(dtype))
    dims, needs = _dims(layout, windows, kernel is not None)
    fetch = Fetch.of(_with_shape(targets[1], (*key.shape[:-1], key.shape[-1] + value.shape[-1])), needs)

    def attend(query: Tensor, key: Tensor, value: Tensor, additional: Tensor | None) -> Any:
        key_value = fetch(torch.cat([key, value], -1))  # one exchange for both
        if arguments is None:
            results = tiled_attention(query, key_value, dims, additional, factor, return_lse)
        else:
            results = attention_by_natten(query, key_value, dims, additional, return_lse, arguments)
        attended = results[0].contiguous()
        return (attended, results[1].squeeze(-1)) if return_lse else attended

    return LocalPlan(call.without_autocast(attend), (out, lse) if return_lse else out)


def _checked(
    specs: Sequence[ShardTensorSpec],
    additional: Sequence[ShardTensorSpec | None],
    windows: tuple[Any, ...],
    schedule: object,
) -> tuple[Windows, bool]:
    """The windows per dim, and whether every query sees all keys, once natten has checked the arguments.

    Raises:
        Exception: natten's own, for the global tensors, and so on every rank alike.
    """
    from natten.utils import checks

    query, key, value = tensors = [_described(spec) for spec in specs]
    checks.na_tensor_checks(*tensors)
    halves = [None if spec is None else _described(spec) for spec in additional]
    checks.additional_kv_tensor_checks(query, key, value, *halves)
    checks.check_kernel_schedule(schedule)
    windows = checks.check_all_args(query.dim() - 3, *windows)
    checks.check_args_against_input(query, *windows)
    return windows, checks.is_self_attention(query, windows[0], windows[3], bool(halves))


@hidden_from_program()
def _described(spec: ShardTensorSpec) -> Tensor:
    """A global tensor without data, for natten's checks; of its own dtype with autocast, too, which natten ignores."""
    return without_data(spec.tensor_meta)


def _local_additional(
    mesh: DeviceMesh, axes: Sequence[AxisLayout], queries: ShardTensorSpec, halves: Sequence[Tensor]
) -> Tensor:
    """The additional keys and values that this rank's queries see, side by side. Differentiable."""
    halves = [ShardTensor.from_dtensor(t) if isinstance(t, DTensor) else t for t in halves]
    # Plain ones are joined before they are ShardTensors, so that one all-reduce sums the gradients of both.
    pair = torch.cat(list(halves), -1)
    pair = pair if isinstance(pair, ShardTensor) else promote(pair, mesh)
    return local_part(redistribute_to(pair, pair._spec.with_layout(axes)), queries)


# -- which rank has what ------------------------------------------------------------------------------------------


def _layouts(name: str, specs: Sequence[ShardTensorSpec]) -> Sequence[ShardTensorSpec]:
    """How queries, keys and values must lie; the result lies as the queries."""
    head_dim = len(specs[0].shape) - 1
    if any(head_dim in spec.sharded_dims() for spec in specs):
        raise refuse(
            name,
            specs,
            f"head_dim (tensor dim {head_dim}) is sharded, but every product of a query and a key needs it unsharded",
            "redistribute to shard heads, batch or spatial dims",
        )
    labels = tuple(range(head_dim + 1))
    form = Form((labels,) * 3, labels, ways=(gathering,), groups=frozenset({head_dim - 1}))
    return arrange(name, form, tuple(specs)).targets


def _additional_axes(keys: ShardTensorSpec) -> list[AxisLayout]:
    """The layout of additional keys and values: batch and heads sharded as the keys', otherwise replicated."""
    places = {0: 0, len(keys.shape) - 2: 2}
    return [
        AxisLayout(Shard(places[p.dim]), sizes) if isinstance(p, Shard) and p.dim in places else AxisLayout(Replicate())
        for p, sizes in keys.layout
    ]


def _dims(
    queries: ShardTensorSpec, windows: Windows, for_natten: bool
) -> tuple[tuple[Dim, ...], dict[int, list[Interval]]]:
    """The spatial dims, and the keys that each rank needs: ``{tensor dim: interval per rank of its mesh dim}``."""
    dims, needs = [], {}
    sharded = queries.sharded_dims()
    for dim, window in enumerate(zip(queries.shape[1:-2], *windows, strict=True), 1):
        neighborhood = Neighborhood(*window)
        m = sharded.get(dim)
        own = keys = (0, neighborhood.size)
        if m is not None:
            reads = neighborhood.slice_for if for_natten else neighborhood.reads
            needs[dim] = [reads(of_rank) for of_rank in intervals_of(queries.sizes_along(m))]
            own, keys = queries.interval(m), needs[dim][queries.coordinate[m]]
        dims.append(Dim(neighborhood, own, keys))
    return tuple(dims), needs


def _with_shape(spec: ShardTensorSpec, shape: Sequence[int]) -> ShardTensorSpec:
    """The spec of a contiguous tensor of another shape and the same layout."""
    return spec.replace(meta=TensorMeta(torch.Size(shape), contiguous_stride(shape), spec.tensor_meta.dtype))


# -- natten's other functions, and registration ---------------------------------------------------------------------


def plan_attention(
    call: Arguments,
    query: ShardTensorSpec,
    key: ShardTensorSpec,
    value: ShardTensorSpec,
    is_causal: bool = False,
    scale: float | None = None,
    *lengths: Any,
    return_lse: bool = False,
    **more: Any,
) -> Plan:
    """The plan of natten's ``attention``: torch's, with heads behind the sequence."""
    from natten.utils import checks

    checks.fmha_tensor_checks(*map(_described, (query, key, value)))
    lengths += tuple(value for name, value in more.items() if "seqlen" in name)
    name, specs = "natten.attention", [query, key, value]
    if any(length is not None for length in lengths):
        raise refuse(name, specs, "packed sequences have no distributed form", "pad them to a batch")
    if return_lse:
        raise refuse(name, specs, "torch's attention returns no log-sum-exp", "drop return_lse")
    if is_causal and query.shape[1] != key.shape[1]:
        raise refuse(
            name,
            specs,
            "natten does not define a causal mask for sequences of different lengths",
            "call torch.nn.functional.scaled_dot_product_attention with a mask",
        )
    grouped, factor = query.shape[2] != key.shape[2], scale or query.shape[-1] ** -0.5

    def attend(*tensors: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in tensors)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=factor, enable_gqa=grouped)
        return attended.transpose(1, 2)

    return Composed(attend)


def _plans_of_merging(original: Callable[..., Any]) -> Callable[..., Plan]:
    """What plans natten's ``merge_attentions``: the same arithmetic, differentiated as it is written.

    natten's "autograd fix" writes the merged result over what its kernels have saved for their backward pass. Here the
    outputs are not those that a kernel saved, and would get wrong gradients.
    """

    def plan_merge_attentions(
        call: Arguments,
        outputs: Sequence[ShardTensorSpec],
        lse_tensors: Sequence[ShardTensorSpec],
        torch_compile: bool = True,
        use_autograd_fix: bool = True,
    ) -> Plan:
        return Composed(partial(original, torch_compile=False, use_autograd_fix=False))

    return plan_merge_attentions


def _register(functional: Any) -> None:
    names = ("neighborhood_attention_generic", "attention", "merge_attentions")
    functions = [getattr(functional, name) for name in names]
    neighborhood, attention, merge = (getattr(f, "__wrapped__", f) for f in functions)
    register(neighborhood)(_neighborhood_attention)
    operator(attention, tensors="query key value")(plan_attention)
    operator(merge, tensors="outputs lse_tensors")(_plans_of_merging(merge))


# natten is optional: its functions are registered when it is imported, at once if it is already.
wrapt.register_post_import_hook(_register, "natten.functional")


# -- natten kernels ----------------------------------------------------------------------------------------------------

# Neighborhood attention by natten's own kernels, on slices of a tensor.


def natten_kernel(
    asked: str | None,
    specs: Sequence[ShardTensorSpec],
    device: torch.device,
    *,
    grad: bool,
    additional: bool,
    return_lse: bool,
    torch_compile: bool,
) -> str | None:
    """The kernel of natten to use, None where the tiles have to do: from what every rank knows, as halos depend on it.

    Args:
        asked: the caller's choice.
        specs: of queries, keys and values.
        device: theirs.
        grad: whether a gradient will be asked for.
        additional, return_lse, torch_compile: what else the call has.

    Raises:
        Exception: natten's own, for a backend that the caller names and that cannot run.
    """
    from natten import backends

    checks = {
        "blackwell-fna": backends.can_run_cutlass_blackwell_fna,
        "hopper-fna": backends.can_run_cutlass_hopper_fna,
        "cutlass-fna": backends.can_run_cutlass_fna,
    }
    # natten checks dtypes, devices, heads and head_dim; on each rank alike if there is nothing else.
    n = len(specs[0].shape) - 3
    samples = [_sample(spec, n, grad, device) for spec in specs]
    if asked == "flex-fna":
        backends.can_run_flex_attention(*samples, torch_compile=torch_compile, raise_error=True)
    elif asked in checks:
        checks[asked](*samples, raise_error=True)
    elif asked is not None:
        raise NotImplementedError(f"Unrecognized NATTEN backend {asked}.")
    # The kernels drop the gradient of the log-sum-exp, and flex attention has none at all on CPU.
    if grad and (return_lse or (asked == "flex-fna" and samples[0].device.type == "cpu")):
        return None
    if additional and not _attends(*(_sample(spec, 1, grad, device) for spec in specs)):
        return None
    able = [name for name, check in checks.items() if check(*samples)] if asked is None else [asked]
    return able[0] if able else None


def _sample(spec: ShardTensorSpec, ndim: int, grad: bool, device: torch.device) -> Tensor:
    """A tensor without elements, but with the device, the dtype and the heads of one with ``spec``."""
    shape = (0,) * (1 + ndim) + tuple(spec.shape[-2:])
    return torch.empty(shape, dtype=spec.tensor_meta.dtype, device=device).requires_grad_(grad)


def _attends(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether natten has a kernel for attention to the additional keys."""
    from natten.backends import choose_fmha_backend

    try:
        choose_fmha_backend(q, k, v, is_causal=False, is_varlen=False, torch_compile=False)
    except NotImplementedError:
        return False
    return True


def attention_by_natten(
    query: Tensor,
    key_value: Tensor,
    dims: tuple[Dim, ...],
    additional: Tensor | None,
    return_lse: bool,
    arguments: dict[str, Any],
) -> tuple[Tensor, ...]:
    """What ``tiled_attention`` returns, by natten's kernel on the keys' slice of the tensor.

    The kernel wants as many queries as keys; those that are not this rank's are zero, and their outputs are dropped.
    """
    if 0 in query.shape:
        return tiled_attention(query, key_value, dims, additional, arguments["scale"], return_lse)
    from natten.functional import neighborhood_attention_generic

    head_dim = query.shape[-1]
    margins = [(queries[0] - keys[0], keys[1] - queries[1]) for _, queries, keys in dims]
    padded = F.pad(query, [0, 0, 0, 0, *(side for margin in reversed(margins) for side in margin)])
    key, value = key_value.split_with_sizes([head_dim, key_value.shape[-1] - head_dim], -1)
    if additional is not None:
        extra_keys, extra_values = additional.split_with_sizes([head_dim, additional.shape[-1] - head_dim], -1)
        arguments = arguments | {"additional_keys": extra_keys, "additional_values": extra_values}
    result = neighborhood_attention_generic(padded, key, value, return_lse=return_lse, **arguments)
    results = (result[0], result[1].unsqueeze(-1)) if return_lse else (result,)
    for i, (before, _) in enumerate(margins):
        results = tuple(r.narrow(1 + i, before, query.shape[1 + i]) for r in results)
    return results
