"""Operators that work on the entries of some dims (batch, channels) independently and need the other dims unsharded:
``max_unpool``, ``fractional_max_pool``, ``grid_sample``, ``affine_grid``, ``ctc_loss``, recurrent networks.

Every dim of every operand either has a name or has to be unsharded. Dims of one name run together and may be sharded:
all operands that have the name are sharded alike, and those without it are replicated. A mesh dim shards a name that
every operand has that is sharded on it, see named_dims.py: a name that is sharded already, or else that of the longest
dim. That takes one exchange, in which every rank keeps as much as it had. The result, whose other dims have other
lengths, stays spread over that dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dispatch.tensor import ShardTensor, from_part
from ...layout.spec import ShardTensorSpec
from ...operators.arguments import common_mesh
from ...operators.declaration import Arguments, Composed, Plan
from .alignment import as_operand
from .named_dims import Arrangement, Form, Label, arrange, fresh, shared

Names = Sequence[str | None]


class Result(NamedTuple):
    """One result of an operator: global shape, names of its dims, dtype; its strides where it is not row-major."""

    shape: Sequence[int]
    names: Names
    dtype: torch.dtype
    stride: Sequence[int] | None = None

    def spec(self, how: Arrangement) -> ShardTensorSpec:
        """The spec that it has where the operands are arranged so."""
        out = how.out(self.shape, self.dtype, self.names)
        return out if self.stride is None else out.replace(meta=out.tensor_meta._replace(stride=tuple(self.stride)))


def arranged(op: str, specs: Sequence[ShardTensorSpec], names: Sequence[Names], lost: Names = ()) -> Arrangement:
    """The layouts that operands need whose dims have these names.

    Args:
        lost: names of dims that some results do not have: these are Partial where they are sharded.
    """
    terms: list[tuple[Label, ...]] = []
    whole: set[Label] = set()
    for i, (spec, row) in enumerate(zip(specs, names, strict=True)):
        unnamed = {d for d, name in enumerate(row) if name is None and spec.shape[d] > 1}
        terms.append(tuple((i, d) if d in unnamed else name for d, name in enumerate(row)))
        whole |= {(i, d) for d in unnamed}
    named = dict.fromkeys(name for row in names for name in row if name is not None and name not in lost)
    return arrange(op, Form(tuple(terms), tuple(named), frozenset(whole), ways=(shared, fresh)), tuple(specs))


def _run(
    function: Callable[..., Any],
    how: Arrangement,
    tensors: Sequence[Tensor],
    outputs: Sequence[ShardTensorSpec],
    takes_empty: bool,
) -> tuple[ShardTensor, ...]:
    """The results, from this rank's parts of ``tensors``."""
    local = [how.local(i, t) for i, t in enumerate(tensors)]
    if not takes_empty and any(0 in spec.local_shape() for spec in outputs):
        # Not all of torch's kernels take empty dims, yet this rank takes part in the backward pass.
        nothing = reduce(torch.add, [t.sum() for t in local if t.is_floating_point()])
        found: Sequence[Tensor] = [nothing.expand(spec.local_shape()).to(spec.tensor_meta.dtype) for spec in outputs]
    else:
        result = function(*local)
        found = result if isinstance(result, (tuple, list)) else (result,)
    return tuple(from_part(t, spec.with_dtype(t.dtype)) for t, spec in zip(found, outputs, strict=True))


def plan_by_batch(
    call: Arguments,
    function: Callable[..., Any],
    operands: Mapping[str, Names],
    results: Sequence[Result],
) -> Plan:
    """The plan that calls ``function`` on this rank's parts of the operands.

    Args:
        operands: ``{argument: names of its dims}`` of all tensors, in the order of the declaration; a name of None is
            of a dim to be unsharded.
    """
    how = arranged(call.name, [call.tensors[name] for name in operands], list(operands.values()))
    outputs = [result.spec(how) for result in results]

    def run(*tensors: ShardTensor) -> ShardTensor | tuple[ShardTensor, ...]:
        found = _run(function, how, tensors, outputs, takes_empty=False)
        return found[0] if len(found) == 1 else found

    return Composed(run)


def by_batch(
    op: str,
    function: Callable[..., Any],
    operands: Sequence[tuple[Tensor, Names]],
    results: Sequence[tuple[Sequence[int], Names]],
    takes_empty: bool = False,
) -> tuple[ShardTensor, ...]:
    """The results for operands that are at hand, at least one of them a ShardTensor; ``op`` is named in errors.

    Args:
        takes_empty: ``function`` can be called with an empty dim.
    """
    mesh = common_mesh(op, [t for t, _ in operands])
    assert mesh is not None
    tensors = [as_operand(t, mesh) for t, _ in operands]
    how = arranged(op, [t._spec for t in tensors], [row for _, row in operands])
    outputs = [Result(shape, row, tensors[0].dtype).spec(how) for shape, row in results]
    return _run(function, how, tensors, outputs, takes_empty)


def image_names(ndim: int, spatial: int) -> list[str | None]:
    """Names of batch and channels, and the spatial dims behind them, which have to be unsharded."""
    names: list[str | None] = ["batch", "channels"]
    return names[2 + spatial - ndim :] + [None] * spatial
