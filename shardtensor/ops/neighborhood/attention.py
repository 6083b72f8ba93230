"""Neighborhood attention, through natten's own functions and modules.

Queries stay where they are. Keys and values of the windows' reach beyond the shard are borrowed together, then a plain
kernel computes this rank's queries: natten's, where it has one for the device, the dtype and the gradient that is
asked for, else the tiles of ``tiled.py``. What natten would refuse on one device, its own checks refuse
here, on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
import wrapt
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..._compat import TensorMeta
from ...errors import refuse
from ...geometry import Interval, intervals_of
from ...planning import spec_of
from ...registry import register
from ...spec import ShardTensorSpec
from ...strides import contiguous_stride
from ...tensor import ShardTensor, from_part, promote, redistribute_to
from ..attention.blockwise import DTYPES
from ..common.alignment import common_layout, common_mesh, local_part, refuse_gathering
from ..common.stencil import borrow_dims
from ..shape.view import whole_blocks
from .natten_kernels import attention_by_natten, natten_kernel
from .tiled import Dim, tiled_attention
from .window import Neighborhood


def _neighborhood_attention(
    query: Any,
    key: Any,
    value: Any,
    kernel_size: Any,
    stride: Any = 1,
    dilation: Any = 1,
    is_causal: Any = False,
    scale: float | None = None,
    additional_keys: Any = None,
    additional_values: Any = None,
    attention_kwargs: Mapping[str, Any] | None = None,
    backend: str | None = None,
    return_lse: bool = False,
    **tuning: Any,
) -> Any:
    """Handler of natten's ``neighborhood_attention_generic``, to which all its functions and modules lead.

    Args:
        query: ``(batch, *spatial, heads, head_dim)``, with one to three spatial dims.
        key, value: the same with heads that divide the query's; ``value`` may have another ``head_dim``.
        kernel_size, stride, dilation, is_causal, scale: as in natten.
        additional_keys, additional_values: ``(batch, any, heads_kv, head_dim)``, seen by every query.
        backend: one of natten's. natten's "flex-fna" has no gradient on CPU; there the tiles take over.
        return_lse: return the softmax's log-sum-exp, ``(batch, *spatial, heads)``, as well.
        attention_kwargs, tuning: handed to natten's kernel where that runs.
    """
    from natten.utils import checks

    checks.na_tensor_checks(query, key, value)
    checks.additional_kv_tensor_checks(query, key, value, additional_keys, additional_values)
    checks.check_kernel_schedule(tuning.get("kernel_schedule"))
    n = query.dim() - 3
    windows = checks.check_all_args(n, kernel_size, stride, dilation, is_causal)
    checks.check_args_against_input(query, *windows)
    name = f"natten.na{n}d"
    additional = () if additional_keys is None else (additional_keys, additional_values)
    tensors = (query, key, value, *additional)
    mesh = common_mesh(name, tensors)
    if mesh is None:
        return NotImplemented

    # Everything that may be refused, before anything is sent.
    q, k, v = (_distributed(t, mesh) for t in (query, key, value))
    specs = [t._spec.for_gradient() for t in (q, k, v)]
    cut = _cut(name, specs)
    targets = [cut, *(_keys_cut(spec, cut) for spec in specs[1:])]
    for t in additional:
        if isinstance(t, DTensor):
            specs.append(spec_of(t))
            targets.append(_additional_cut(specs[-1], targets[1]))
    refuse_gathering(name, specs, targets)
    kernel = None
    if not checks.is_self_attention(query, windows[0], windows[3], bool(additional)):
        kernel = natten_kernel(
            backend,
            (q, k, v),
            grad=torch.is_grad_enabled() and any(t.requires_grad for t in tensors),
            additional=bool(additional),
            return_lse=return_lse,
            torch_compile=tuning.get("torch_compile", False),
        )

    if kernel is None and query.dtype not in DTYPES:
        raise refuse(name, tensors[:3], f"torch's attention does not compute in {query.dtype}", "convert the operands")

    q, k, v = (redistribute_to(t, target) for t, target in zip((q, k, v), targets))
    extra = None
    if additional:
        halves = [ShardTensor.from_dtensor(t) if isinstance(t, DTensor) else t for t in additional]
        pair = _distributed(torch.cat(halves, -1), mesh)  # plain ones side by side first, for one all-reduce
        extra = local_part(redistribute_to(pair, _additional_cut(pair._spec, targets[1])), cut)
    plan = _plan(cut, *windows, kernel is not None)
    local_q = q.to_local()
    local_kv = borrow_dims(torch.cat([k.to_local(), v.to_local()], -1), cut, plan.needs)
    scale = scale or query.shape[-1] ** -0.5
    with torch.autocast(mesh.device_type, enabled=False):
        if kernel is None:
            results = tiled_attention(local_q, local_kv, plan.dims, extra, scale, return_lse)
        else:
            arguments = dict(zip(("kernel_size", "stride", "dilation", "is_causal"), windows), **tuning)
            arguments |= {"scale": scale, "backend": kernel, "attention_kwargs": attention_kwargs}
            results = attention_by_natten(local_q, local_kv, plan.dims, extra, return_lse, arguments)
    shape = (*query.shape[:-1], value.shape[-1])
    out = from_part(results[0].contiguous(), _result_spec(cut, shape, results[0].dtype))
    if not return_lse:
        return out
    return out, from_part(results[1].squeeze(-1), _result_spec(cut, shape[:-1], results[1].dtype))


def _distributed(t: Any, mesh: Any) -> Any:
    return ShardTensor.from_dtensor(t) if isinstance(t, DTensor) else promote(t, mesh)


# -- who has what -------------------------------------------------------------------------------------------------


def _cut(name: str, specs: list[ShardTensorSpec]) -> ShardTensorSpec:
    """How the queries and the result lie: as the first of queries, keys and values that is sharded on a mesh dim."""
    head_dim = len(specs[0].shape) - 1
    if any(head_dim in spec.sharded_dims() for spec in specs):
        raise refuse(
            name,
            specs,
            f"head_dim (tensor dim {head_dim}) is sharded, and every product of a query and a key needs all of it",
            "redistribute to shard heads, batch or spatial dims",
        )
    groups = specs[0].shape[head_dim - 1] // specs[1].shape[head_dim - 1]
    return common_layout([_with_queries_heads(spec, specs[0], groups) for spec in specs], specs[0].tensor_meta)


def _with_queries_heads(spec: ShardTensorSpec, query: ShardTensorSpec, group: int) -> ShardTensorSpec:
    """``spec`` as if it had the query's heads, cut between groups of ``group`` that share a head of the keys."""
    heads = len(query.shape) - 2
    m = spec.sharded_dims().get(heads)
    if m is None or group == 1:
        return spec
    sizes = list(spec.sizes)
    own = spec.shape[heads] == query.shape[heads]
    sizes[m] = whole_blocks(spec.cut(m), group) if own else tuple(n * group for n in spec.cut(m))
    assert spec.tensor_meta is not None
    shape = (*spec.shape[:heads], query.shape[heads], spec.shape[-1])
    meta = TensorMeta(torch.Size(shape), contiguous_stride(shape), spec.tensor_meta.dtype)
    return spec.replace(meta=meta, sizes=tuple(sizes))


def _keys_cut(spec: ShardTensorSpec, cut: ShardTensorSpec) -> ShardTensorSpec:
    """How keys or values lie next to queries as ``cut``; one of their heads may serve several of the queries'."""
    heads = len(cut.shape) - 2
    sizes = list(cut.sizes)
    m = cut.sharded_dims().get(heads)
    if m is not None:
        group = cut.shape[heads] // spec.shape[heads]
        sizes[m] = tuple(size // group for size in cut.cut(m))
    return spec.replace(placements=cut.placements, sizes=tuple(sizes))


def _additional_cut(spec: ShardTensorSpec, keys: ShardTensorSpec) -> ShardTensorSpec:
    """How additional keys or values lie next to keys as ``keys``: batch and heads alike, otherwise whole."""
    places = {0: 0, len(keys.shape) - 2: 2}
    placements: list[Any] = []
    sizes: list[Any] = []
    for p, size in zip(keys.placements, keys.sizes):
        shared = isinstance(p, Shard) and p.dim in places
        placements.append(Shard(places[p.dim]) if shared else Replicate())  # type: ignore[attr-defined]
        sizes.append(size if shared else None)
    return spec.replace(placements=placements, sizes=tuple(sizes))


@dataclass(frozen=True, slots=True)
class _Plan:
    """Attributes:
    dims: per spatial dim, its windows, this rank's queries, and the keys that it will have.
    needs: ``{tensor dim: the keys that each rank of its mesh dim needs}``, for the sharded ones.
    """

    dims: tuple[Dim, ...]
    needs: dict[int, tuple[Interval, ...]]


@lru_cache(maxsize=1024)
def _plan(
    cut: ShardTensorSpec,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    causal: tuple[bool, ...],
    for_natten: bool,
) -> _Plan:
    dims, needs = [], {}
    sharded = cut.sharded_dims()
    for i, window in enumerate(zip(cut.shape[1:-2], kernel, stride, dilation, causal)):
        neighborhood = Neighborhood(*window)
        m = sharded.get(1 + i)
        queries = keys = (0, neighborhood.size)
        if m is not None:
            reads = neighborhood.slice_for if for_natten else neighborhood.reads
            needs[1 + i] = tuple(reads(own) for own in intervals_of(cut.cut(m)))
            queries, keys = cut.interval(m), needs[1 + i][cut.coordinate[m]]
        dims.append(Dim(neighborhood, queries, keys))
    return _Plan(tuple(dims), needs)


def _result_spec(cut: ShardTensorSpec, shape: tuple[int, ...], dtype: torch.dtype) -> ShardTensorSpec:
    return cut.replace(meta=TensorMeta(torch.Size(shape), contiguous_stride(shape), dtype))


# -- natten's other functions, and registration ---------------------------------------------------------------------


def _attention(
    query: Any,
    key: Any,
    value: Any,
    is_causal: bool = False,
    scale: float | None = None,
    *lengths: Any,
    return_lse: bool = False,
    **more: Any,
) -> Any:
    """Handler of natten's ``attention``: torch's, with heads behind the sequence."""
    from natten.utils import checks

    checks.fmha_tensor_checks(query, key, value)
    lengths += tuple(value for name, value in more.items() if "seqlen" in name)
    if any(length is not None for length in lengths):
        raise refuse(
            "natten.attention", [query, key, value], "packed sequences have no distributed form", "pad them to a batch"
        )
    if return_lse:
        raise refuse(
            "natten.attention", [query, key, value], "torch's attention returns no log-sum-exp", "drop return_lse"
        )
    if is_causal and query.shape[1] != key.shape[1]:
        raise refuse(
            "natten.attention",
            [query, key, value],
            "natten does not say how a causal mask lies on sequences of different lengths",
            "call torch.nn.functional.scaled_dot_product_attention with a mask",
        )
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    grouped = query.shape[2] != key.shape[2]
    scale = scale or query.shape[-1] ** -0.5
    out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def _merge_attentions(
    outputs: Any, lse_tensors: Any, torch_compile: bool = True, use_autograd_fix: bool = True, *, original: Any
) -> Any:
    """Handler of natten's ``merge_attentions``: the same arithmetic, differentiated as it is written.

    natten's "autograd fix" writes the merged result over what its kernels have saved for their backward pass. Here the
    outputs are not those that a kernel saved, and would get wrong gradients.
    """
    return original(outputs, lse_tensors, torch_compile=False, use_autograd_fix=False)


def _register(functional: Any) -> None:
    names = ("neighborhood_attention_generic", "attention", "merge_attentions")
    functions = [getattr(functional, name) for name in names]
    neighborhood, attention, merge = (getattr(f, "__wrapped__", f) for f in functions)
    register(neighborhood)(_neighborhood_attention)
    register(attention)(_attention)
    register(merge)(partial(_merge_attentions, original=merge))


# natten is optional: its functions are registered when it is imported, at once if it is already.
wrapt.register_post_import_hook(_register, "natten.functional")
