"""Operators that take the entries of some dims (batch, channels) each by itself and need the other dims whole:
``max_unpool``, ``fractional_max_pool``, ``grid_sample``, ``affine_grid``, ``ctc_loss``, recurrent networks.

[Note: free dims] Every dim of every operand either has a name or has to be whole. Dims of one name run together and may
be cut: all operands that have it are cut alike, those without it are whole. A mesh dim cuts a name that all operands
have which it finds cut: one that is cut already, or else the longest, by one exchange in which every rank keeps as much
as it had. Then the result, whose other dims have other lengths, stays spread over that dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Replicate, Shard

from ..._compat import TensorMeta
from ...errors import refuse
from ...geometry import chunk_sizes
from ...spec import ShardTensorSpec
from ...strides import contiguous_stride
from ...tensor import from_part, redistribute_to
from .alignment import as_operand, common_mesh, local_part

__all__ = ["Names", "by_batch", "image_names"]

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


def image_names(ndim: int, spatial: int) -> list[str | None]:
    """Names of batch and channels, and the spatial dims behind them, which have to be whole."""
    names: list[str | None] = ["batch", "channels"]
    return names[2 + spatial - ndim :] + [None] * spatial
