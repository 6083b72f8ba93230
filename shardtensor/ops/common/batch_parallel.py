"""Operators that take the entries of some dims (batch, channels) each by itself and need the other dims whole:
``max_unpool``, ``fractional_max_pool``, ``grid_sample``, ``affine_grid``, ``ctc_loss``.

[Note: free dims] Every dim of every operand either has a name or has to be whole. Dims of one name run together and may
be cut: all operands that have it are cut alike, those without it are whole. A mesh dim cuts a name that all operands
have which it finds cut: one that is cut already, or else the longest, by one exchange in which every rank keeps as much
as it had. Then the result, whose other dims have other lengths, stays spread over that dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from ..._compat import TensorMeta
from ...errors import refuse
from ...geometry import chunk_sizes
from ...registry import register
from ...spec import ShardTensorSpec, contiguous_stride
from ...tensor import ShardTensor, from_part, redistribute_to
from ..loss.elementwise import full_precision, register_loss
from .alignment import as_operand, common_mesh, described, local_part, torch_judges

__all__ = ["by_batch"]

Names = Sequence[str | None]


class _Cut(NamedTuple):
    """Which named dim a mesh dim cuts, and into what."""

    name: str | None
    sizes: tuple[int, ...] | None


def _cuts(op: str, specs: Sequence[ShardTensorSpec], names: Sequence[Names]) -> list[_Cut]:
    """See [Note: free dims]."""
    mesh = specs[0].mesh
    lengths = {name: n for spec, row in zip(specs, names, strict=True) for n, name in zip(spec.shape, row, strict=True)}
    offered: list[list[_Cut]] = [[] for _ in range(mesh.ndim)]
    common: list[set[str | None]] = [set(lengths) - {None} for _ in range(mesh.ndim)]
    for spec, row in zip(specs, names, strict=True):
        for d, m in spec.sharded_dims().items():
            if row[d] is not None or spec.shape[d] > 1:
                offered[m].append(_Cut(row[d], spec.sizes[m]))
                common[m] &= set(row)
    cuts: list[_Cut] = []
    for m in range(mesh.ndim):
        others = {c.name for c in cuts} | {c.name for row in offered[m + 1 :] for c in row}
        ready = [c for c in offered[m] if c.name in common[m] - {cut.name for cut in cuts}]
        free = [name for name in common[m] - others if lengths[name] >= mesh.size(m)]
        if ready or not offered[m]:
            cuts.append(ready[0] if ready else _Cut(None, None))
        elif free:
            name = max(sorted(free, key=str), key=lambda k: lengths[k])
            cuts.append(_Cut(name, chunk_sizes(lengths[name], mesh.size(m))))
        else:
            raise refuse(
                op,
                list(specs),
                f"it needs a tensor dim whole that mesh dim {m} cuts, and no batch or channel dim is free and long "
                f"enough to be shared among its {mesh.size(m)} ranks",
                "redistribute to shard the batch, or to Replicate() what is small",
            )
    return cuts


def _laid_out(spec: ShardTensorSpec, names: Names, cuts: Sequence[_Cut]) -> ShardTensorSpec:
    placements = [Shard(list(names).index(c.name)) if c.name in names and c.name else Replicate() for c in cuts]
    sizes = tuple(c.sizes if isinstance(p, Shard) else None for c, p in zip(cuts, placements, strict=True))
    return spec.replace(placements=placements, sizes=sizes)


def by_batch(
    op: str,
    function: Callable[..., Any],
    operands: Sequence[tuple[Any, Names]],
    results: Sequence[tuple[Sequence[int], Names]],
    takes_empty: bool = False,
) -> Any:
    """Call ``function`` on this rank's parts of the operands, see [Note: free dims].

    Args:
        op: the operator's name, for errors.
        operands: tensors, at least one of them a ShardTensor, each with its dims' names; None for those to be whole.
        results: the global shape of each result, with names likewise.
        takes_empty: ``function`` can be called with an empty dim; otherwise a second result is one of indices.
    """
    mesh = common_mesh(op, [t for t, _ in operands])
    assert mesh is not None
    tensors, names = [as_operand(t, mesh) for t, _ in operands], [row for _, row in operands]
    cuts = _cuts(op, [t._spec for t in tensors], names)
    whole = [Replicate()] * mesh.ndim
    specs = [
        _laid_out(ShardTensorSpec.make(mesh, whole, shape, torch.float32), row, cuts) for shape, row in results
    ]
    local = [
        local_part(redistribute_to(t, _laid_out(t._spec, row, cuts)), specs[0])
        for t, row in zip(tensors, names, strict=True)
    ]
    if not takes_empty and any(0 in spec.local_shape() for spec in specs):
        # Not all of torch's kernels take empty dims, yet this rank takes part in the backward pass.
        nothing = sum(t.sum() for t in local if t.is_floating_point())
        found = [nothing.expand(spec.local_shape()) for spec in specs]  # type: ignore[union-attr]
        if len(found) > 1:
            found[1] = found[1].detach().long()
    else:
        result = function(*local)
        found = list(result) if isinstance(result, tuple) else [result]
    wrapped = []
    for t, spec in zip(found, specs, strict=True):
        meta = TensorMeta(spec.shape, contiguous_stride(spec.shape), t.dtype)
        wrapped.append(from_part(t, spec.replace(meta=meta)))
    return wrapped[0] if len(wrapped) == 1 else tuple(wrapped)


# -- pooling that is told, or draws, where it looks --------------------------------------------------------------------


def _lead(ndim: int, spatial: int) -> list[str | None]:
    """Names of batch and channels, and the spatial dims behind them, which have to be whole."""
    names: list[str | None] = ["batch", "channels"]
    return names[2 + spatial - ndim :] + [None] * spatial


def _max_unpool(
    input: Any,
    indices: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    output_size: Any = None,
    *,
    spatial: int,
) -> Any:
    function = getattr(F, f"max_unpool{spatial}d")
    if common_mesh(function.__name__, [input, indices]) is None:
        return NotImplemented
    size = None if output_size is None else tuple(output_size)
    meta = torch_judges(function, input, indices, kernel_size, stride, padding, size)
    names = _lead(input.ndim, spatial)
    out = list(meta.shape[-spatial:])

    def unpool(x: Tensor, places: Tensor) -> Tensor:
        return function(x, places, kernel_size, stride, padding, out)

    return by_batch(function.__name__, unpool, [(input, names), (indices, names)], [(meta.shape, names)])


def _fractional_max_pool(
    input: Any,
    kernel_size: Any,
    output_size: Any = None,
    output_ratio: Any = None,
    return_indices: bool = False,
    _random_samples: Any = None,
    *,
    spatial: int,
    indices: bool = False,
) -> Any:
    """The samples, a few numbers per channel, are drawn as on one device: by every rank for the whole tensor."""
    function = getattr(F, f"fractional_max_pool{spatial}d_with_indices")
    if common_mesh(function.__name__, [input]) is None:
        return NotImplemented
    names = _lead(input.ndim, spatial)
    batch = input.shape[0] if input.ndim == spatial + 2 else 1
    if _random_samples is None:
        _random_samples = torch.rand(
            batch, input.shape[-spatial - 1], spatial, dtype=input.dtype, device=input.device
        )
    values, _ = function(described(input), kernel_size, output_size, output_ratio, True, described(_random_samples))
    out = list(values.shape[-spatial:])

    def pool(x: Tensor, samples: Tensor) -> Any:
        return function(x, kernel_size, out, None, True, samples)

    sample_names: Names = ["batch" if input.ndim == spatial + 2 else None, "channels", None]
    operands = [(input, names), (_random_samples, sample_names)]
    pooled = by_batch(function.__name__, pool, operands, [(values.shape, names)] * 2)
    return pooled if return_indices or indices else pooled[0]


# -- grids -----------------------------------------------------------------------------------------------------------


def _grid_sample(
    input: Any, grid: Any, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool | None = None
) -> Any:
    """Each output looks anywhere into the input, so that is whole in its spatial dims; the grid may be cut."""
    mesh = common_mesh("grid_sample", [input, grid])
    if mesh is None:
        return NotImplemented
    meta = torch_judges(F.grid_sample, input, grid, mode, padding_mode, align_corners)
    spatial = input.ndim - 2
    names = _lead(input.ndim, spatial)
    places = [f"output dim {d}" for d in range(spatial)]
    with full_precision(mesh.device_type) as cast:

        def sample(x: Tensor, at: Tensor) -> Tensor:
            return F.grid_sample(x, at, mode, padding_mode, align_corners)

        return by_batch(
            "grid_sample",
            sample,
            [(cast(input), names), (cast(grid), ["batch", *places, None])],
            [(meta.shape, ["batch", "channels", *places])],
        )


def _grid_sampler(input: Any, grid: Any, interpolation_mode: int, padding_mode: int, align_corners: bool) -> Any:
    """The operators below ``grid_sample``, which take numbers for the modes."""
    mode = ("bilinear", "nearest", "bicubic")[interpolation_mode]
    return _grid_sample(input, grid, mode, ("zeros", "border", "reflection")[padding_mode], align_corners)


def _affine_grid(theta: Any, size: Sequence[int], align_corners: bool | None = None) -> Any:
    if common_mesh("affine_grid", [theta]) is None:
        return NotImplemented
    meta = torch_judges(F.affine_grid, theta, list(size), align_corners)

    def grid(local: Tensor) -> Tensor:
        return F.affine_grid(local, [local.shape[0], *size[1:]], align_corners)

    names: Names = ["batch", *[None] * (len(meta.shape) - 1)]
    return by_batch("affine_grid", grid, [(theta, ["batch", None, None])], [(meta.shape, names)])


# -- connectionist temporal classification -----------------------------------------------------------------------------


def _whole_numbers(value: Any) -> Tensor:
    """Lengths, or targets that follow each other: a few numbers per entry of the batch, on every rank."""
    if isinstance(value, ShardTensor):
        return value.full_tensor()
    return value if isinstance(value, Tensor) else torch.tensor(list(value))


def _ctc(given: dict[str, Any], reduction: str) -> Any:
    logs, targets = given["log_probs"], given["targets"]
    mesh = common_mesh("ctc_loss", [t for t in given.values() if isinstance(t, Tensor)])
    if mesh is None:
        return NotImplemented
    batched = logs.ndim == 3
    inputs, lengths = (_whole_numbers(given[k]).reshape(-1) for k in ("input_lengths", "target_lengths"))
    if not batched:
        logs, targets = logs.unsqueeze(1), targets.unsqueeze(0)
    if targets.ndim == 1:
        # One after the other: side by side, so that each entry of the batch has a row.
        numbers = _whole_numbers(targets)
        there = torch.arange(int(lengths.max()) if lengths.numel() else 0) < lengths.cpu()[:, None]
        targets = numbers.new_zeros(there.shape).masked_scatter(there.to(numbers.device), numbers)

    def loss_of(logs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor) -> Tensor:
        return F.ctc_loss(logs, targets, inputs, lengths, given["blank"], "none", given["zero_infinity"])

    with full_precision(mesh.device_type) as cast:
        operands: list[tuple[Any, Names]] = [
            (cast(logs), [None, "batch", None]),
            (targets, ["batch", None]),
            (inputs, ["batch"]),
            (lengths, ["batch"]),
        ]
        loss = by_batch("ctc_loss", loss_of, operands, [(lengths.shape, ["batch"])])
        if reduction == "mean":
            return (loss / lengths.clamp(min=1).to(loss.device, loss.dtype)).mean()
        return loss.sum() if reduction == "sum" else loss if batched else loss.squeeze(0)


# -- doors -----------------------------------------------------------------------------------------------------------

for _n in (1, 2, 3):
    register(getattr(F, f"max_unpool{_n}d"))(partial(_max_unpool, spatial=_n))
for _n in (2, 3):
    _name = f"fractional_max_pool{_n}d"
    register(getattr(F, _name))(partial(_fractional_max_pool, spatial=_n))
    register(getattr(F, f"{_name}_with_indices"))(partial(_fractional_max_pool, spatial=_n, indices=True))
register(F.grid_sample)(_grid_sample)
for _name in ("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"):
    register(getattr(torch, _name), getattr(torch.ops.aten, _name))(_grid_sampler)
register(F.affine_grid)(_affine_grid)
register_loss(F.ctc_loss, _ctc)
