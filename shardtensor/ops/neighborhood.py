"""Neighborhood attention, through natten's own functions and modules.

Queries stay where they are. Keys and values of the windows' reach beyond the shard are borrowed together, then a plain
kernel computes this rank's queries: natten's, where it has one for the device, the dtype and the gradient that is
asked for, else the tiles of ``neighborhood_tiles.py``. What natten would refuse on one device, its own checks refuse
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
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from .._compat import TensorMeta
from ..errors import refuse
from ..geometry import Interval, intervals_of
from ..registry import register
from ..spec import ShardTensorSpec, contiguous_stride
from ..tensor import _FromLocal
from .neighborhood_geometry import Neighborhood
from .neighborhood_tiles import Dim, tiled_attention
from .operands import as_operand, common_cut, common_mesh, local_part, moved
from .spatial import borrow_dims


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
    if not query.dtype.is_floating_point:
        raise refuse(name, tensors[:3], "the dtype is not a floating-point one", "convert queries, keys and values")
    mesh = common_mesh(name, tensors)
    if mesh is None:
        return NotImplemented

    q, k, v = (as_operand(t, mesh) for t in (query, key, value))
    cut = _cut(name, [t._spec for t in (q, k, v)])
    q = moved(name, q, cut)
    k, v = (moved(name, t, _keys_cut(name, t._spec, cut)) for t in (k, v))
    extra = None if not additional else _additional(name, torch.cat(additional, -1), mesh, k._spec, cut)

    whole = checks.is_self_attention(query, windows[0], windows[3], bool(additional))
    kernel = None if whole else _natten_kernel(backend, q, k, v, bool(additional), tuning.get("torch_compile", False))
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
            results = _by_natten(local_q, local_kv, plan.dims, extra, return_lse, arguments)
    shape = (*query.shape[:-1], value.shape[-1])
    out = _FromLocal.apply(results[0].contiguous(), _result_spec(cut, shape, results[0].dtype))
    if not return_lse:
        return out
    return out, _FromLocal.apply(results[1].squeeze(-1), _result_spec(cut, shape[:-1], results[1].dtype))


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
    return common_cut(specs, specs[0].tensor_meta)


def _keys_cut(name: str, spec: ShardTensorSpec, cut: ShardTensorSpec) -> ShardTensorSpec:
    """How keys or values lie next to queries as ``cut``; one of their heads may serve several of the queries'."""
    heads = len(cut.shape) - 2
    group = cut.shape[heads] // spec.shape[heads]
    sizes = list(cut.sizes)
    m = cut.sharded_dims().get(heads)
    if m is not None:
        if any(size % group for size in cut.cut(m)):
            raise refuse(
                name,
                [cut, spec],
                f"shard sizes {cut.sizes[m]} of the query's heads cut groups of {group} that share a head of the keys",
                f"redistribute the queries to shard sizes that are multiples of {group}, or to shard another dim",
            )
        sizes[m] = tuple(size // group for size in cut.cut(m))
    return spec.replace(placements=cut.placements, sizes=tuple(sizes))


def _additional(name: str, pair: Any, mesh: Any, keys: ShardTensorSpec, cut: ShardTensorSpec) -> Tensor:
    """This rank's part of the additional keys and values: whole, but for batch and heads."""
    t = as_operand(pair, mesh)
    heads = len(cut.shape) - 2
    places = {0: 0, heads: 2}
    placements, sizes = [], []
    for p, size in zip(keys.placements, keys.sizes):
        shared = isinstance(p, Shard) and p.dim in places
        placements.append(Shard(places[p.dim]) if shared else Replicate())  # type: ignore[attr-defined]
        sizes.append(size if shared else None)
    return local_part(moved(name, t, t._spec.replace(placements=placements, sizes=tuple(sizes))), cut)


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


# -- natten's kernels -----------------------------------------------------------------------------------------------


def _natten_kernel(asked: str | None, q: Any, k: Any, v: Any, additional: bool, torch_compile: bool) -> str | None:
    """The kernel of natten to use, None where the tiles have to do: from what every rank knows, as halos depend on it.

    Raises:
        Exception: natten's own, for a backend that the caller names and that cannot run.
    """
    from natten import backends

    checks = {
        "blackwell-fna": backends.can_run_cutlass_blackwell_fna,
        "hopper-fna": backends.can_run_cutlass_hopper_fna,
        "cutlass-fna": backends.can_run_cutlass_fna,
    }
    # natten judges dtypes, devices, heads and head_dim; on each rank alike if there are no other dims.
    samples = [_sample(t, t.dim() - 3) for t in (q, k, v)]
    if asked == "flex-fna":
        backends.can_run_flex_attention(*samples, torch_compile=torch_compile, raise_error=True)
        on_cpu = q.device.type == "cpu"
        return None if on_cpu and any(t.requires_grad for t in samples) else asked
    if asked is not None and asked not in checks:
        raise NotImplementedError(f"Unrecognized NATTEN backend {asked}.")
    if asked is not None:
        checks[asked](*samples, raise_error=True)
        return asked
    able = [name for name, check in checks.items() if check(*samples)]
    if not able or (additional and not _attends(*(_sample(t, 1) for t in (q, k, v)))):
        return None
    return able[0]


def _sample(t: Any, ndim: int) -> Tensor:
    """A tensor without elements, but with the device, the dtype, the heads and the need for a gradient of ``t``."""
    needs_grad = t.requires_grad and torch.is_grad_enabled()
    return t._local_tensor.new_empty((0,) * (1 + ndim) + t.shape[-2:]).requires_grad_(needs_grad)


def _attends(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether natten has a kernel for attention to the additional keys."""
    from natten.backends import choose_fmha_backend

    try:
        choose_fmha_backend(q, k, v, is_causal=False, is_varlen=False, torch_compile=False)
    except NotImplementedError:
        return False
    return True


def _by_natten(
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
    key, value = key_value.split([head_dim, key_value.shape[-1] - head_dim], -1)
    if additional is not None:
        extra_keys, extra_values = additional.split([head_dim, additional.shape[-1] - head_dim], -1)
        arguments = arguments | {"additional_keys": extra_keys, "additional_values": extra_values}
    result = neighborhood_attention_generic(padded, key, value, return_lse=return_lse, **arguments)
    results = (result[0], result[1].unsqueeze(-1)) if return_lse else (result,)
    for i, (before, _) in enumerate(margins):
        results = tuple(r.narrow(1 + i, before, query.shape[1 + i]) for r in results)
    return results


# -- registration ---------------------------------------------------------------------------------------------------


def _merge_attentions(
    outputs: Any, lse_tensors: Any, torch_compile: bool = True, use_autograd_fix: bool = True, *, original: Any
) -> Any:
    """Handler of natten's ``merge_attentions``: the same arithmetic, differentiated as it is written.

    natten's "autograd fix" writes the merged result over what its kernels have saved for their backward pass. Here the
    outputs are not those that a kernel saved, and would get wrong gradients.
    """
    return original(outputs, lse_tensors, torch_compile=False, use_autograd_fix=False)


def _register(functional: Any) -> None:
    attention, merge = (
        getattr(f, "__wrapped__", f) for f in (functional.neighborhood_attention_generic, functional.merge_attentions)
    )
    register(attention)(_neighborhood_attention)
    register(merge)(partial(_merge_attentions, original=merge))


# natten is optional: its functions are registered when it is imported, at once if it is already.
wrapt.register_post_import_hook(_register, "natten.functional")
