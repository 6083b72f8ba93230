"""Plain tensors of a shard's size where one of the global size is called for: the error that says so.

A plain tensor counts as replicated, so torch checks its size against that of the global tensor, on tensors without
data. Each rank does so before anything is sent. torch's error does not tell what users have to know: that the size
which it found is that of a shard. So an error of torch's about sizes is looked at once more where it leaves a call with
a ShardTensor. Nothing is done in calls that succeed. The sizes of all shards are in the spec. The sizes of a plain
tensor are this rank's own, and if they happen to fit on one rank, that rank sees no error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._compat import OpOverload, OpOverloadPacket, dispatched, overload_names
from ..errors import (
    PLAIN_TARGET,
    LocalSizeError,
    LostRankError,
    RanksDiffer,
    ThreadConflict,
    UnsupportedSharding,
    error_text,
)
from ..layout.spec import ShardTensorSpec
from .planning import is_inplace

# What torch raises where sizes do not fit.
_ABOUT_SIZES = (RuntimeError, ValueError, IndexError, AssertionError)
_ABOUT_OTHER_THINGS = (UnsupportedSharding, RanksDiffer, LostRankError, ThreadConflict, torch.distributed.DistError)


class _Match(NamedTuple):
    """A dim of a plain tensor that has the length of a shard.

    Attributes:
        dim: of the plain tensor.
        sharded, mesh_dim: the ShardTensor's dim, and the mesh dim that shards it.
        coordinate: on that mesh dim, of the rank whose shard it is.
        distance: how unlikely it is that the length is meant: 0 for this rank's own shard and the dim which would be
            broadcast to the sharded one.
    """

    dim: int
    sharded: int
    mesh_dim: int
    coordinate: int
    distance: int


def explain(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], error: Exception) -> None:
    """Raise :class:`LocalSizeError` in place of an error of torch's about a plain tensor of a shard's size.

    Of nested calls the outermost one has the user's own arguments, so its text replaces that of the inner ones.
    """
    if isinstance(error, LocalSizeError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if not isinstance(error, _ABOUT_SIZES) or isinstance(error, _ABOUT_OTHER_THINGS):
        return
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):  # of an attribute
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    tensors = list(_tensors((args, kwargs)))
    found = local_size_error(name, tensors, str(error), written=tensors[0] if tensors and writes(func) else None)
    if found is not None:
        raise found from error


def local_size_error(
    op: str, tensors: Sequence[Tensor], said: str, *, written: Tensor | None = None
) -> LocalSizeError | None:
    """The error for a call whose plain tensors do not fit its ShardTensors; None where none has a shard's size.

    Args:
        said: what torch says about the sizes. It names the length of the shard and the global one.
        written: the tensor that the call writes to, if any.
    """
    specs = [spec for t in tensors if isinstance(spec := getattr(t, "_spec", None), ShardTensorSpec)]
    whole = [t for t in tensors if not isinstance(t, DTensor) or all(p.is_replicate() for p in t.placements)]
    # The likeliest first: one whose shape the text names, and neither a DTensor nor a parameter.
    found = [
        (
            *(not _names(said, plain.shape), isinstance(plain, DTensor), isinstance(plain, torch.nn.Parameter)),
            *(min(m.distance for m in matches), i, plain, spec, matches),
        )
        for i, plain in enumerate(whole)
        for spec in specs
        if (matches := _matches(plain.shape, spec)) and _tells(said, plain.shape, spec, matches)
    ]
    if not found:
        return None
    *_, plain, spec, matches = min(found, key=lambda item: item[:5])
    return LocalSizeError(_text(op, tensors, plain, spec, matches, said, plain is written))


# What writes to its tensor, and has no schema of its name.
_WITHOUT_SCHEMA = frozenset(
    {"__setitem__", "apply_", "map_", "map2_", "constant_", "kaiming_uniform_"}  # the last two: of torch.nn.init
    | {f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow")}
)
# What leaves values as they are, and has a schema that says that it writes.
_OF_NO_VALUES = frozenset({torch.ops.aten.record_stream, torch.ops.aten.retain_grad})


@lru_cache(1024)
def writes(func: Callable[..., Any]) -> bool:
    """Whether a function writes to its first argument, by its schema, or that of the operator with torch's name for it.

    Of a program's own function nothing is known; the operators that it calls are seen by themselves.
    """
    if isinstance(func, OpOverload):
        return is_inplace(func) and func.overloadpacket not in _OF_NO_VALUES
    if isinstance(func, OpOverloadPacket):
        overloads = overload_names(func)
        return any(writes(op) for op in map(partial(getattr, func), overloads) if dispatched(op))
    name, module = getattr(func, "__name__", ""), getattr(getattr(func, "__objclass__", func), "__module__", None)
    if (module or "").partition(".")[0] != "torch":
        return False
    operator = getattr(torch.ops.aten, f"_foreach_{name}" if module == "torch.foreach" else name, None)
    return writes(operator) if isinstance(operator, OpOverloadPacket) else name in _WITHOUT_SCHEMA


def _tensors(value: object) -> Iterator[Tensor]:
    """The tensors among arguments, also in lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


# -- which dim of which tensor ----------------------------------------------------------------------------------------


def _matches(shape: Sequence[int], spec: ShardTensorSpec) -> list[_Match]:
    """The dims of a plain tensor that have the length of a shard, for each sharded dim of ``spec`` at most one.

    Of other ranks' shards none counts that has less than two rows: such dims are common.
    """
    found = []
    for d, m in spec.sharded_dims().items():
        own, aligned = spec.coordinate[m], d - len(spec.shape) + len(shape)
        matches = [
            _Match(e, d, m, k, abs(e - aligned) + (k != own) * len(shape))
            for k, size in enumerate(spec.sizes_along(m))
            for e, n in enumerate(shape)
            if n == size != spec.shape[d] and (k == own or n > 1)
        ]
        if matches:
            found.append(min(matches, key=lambda match: match.distance))
    return found


def _tells(said: str, shape: Sequence[int], spec: ShardTensorSpec, matches: Sequence[_Match]) -> bool:
    """Whether a text is about these lengths: it names a shard's and the global one, or the global shape, or no number.

    Lengths may be multiplied with others.
    """
    numbers = set(map(int, re.findall(r"\d+", said)))
    if not numbers:
        return re.search("size|shape|length|for each", said) is not None
    for match in matches:
        d = match.sharded
        part = [*spec.shape[:d], shape[match.dim], *spec.shape[d + 1 :]]
        of_shard = _products(shape, match.dim) | _products(part, d)
        if numbers & _products(spec.shape, d) and (numbers & of_shard or _names(said, spec.shape)):
            return True
    return False


def _names(said: str, shape: Sequence[int]) -> bool:
    """Whether a text has this shape."""
    return re.search(rf"[\[(]{', '.join(map(str, shape))},?[\])]", said) is not None


def _products(shape: Sequence[int], dim: int) -> set[int]:
    """The lengths that a dim may have once it is flattened with its neighbours.

    Example:
        >>> sorted(_products((2, 8, 3), 1))
        [8, 16, 24, 48]
    """
    runs = (shape[a:b] for a in range(dim + 1) for b in range(dim + 1, len(shape) + 1))
    return {torch.Size(run).numel() for run in runs}


# -- the text ---------------------------------------------------------------------------------------------------------


def _text(
    op: str,
    tensors: Sequence[Tensor],
    plain: Tensor,
    spec: ShardTensorSpec,
    matches: Sequence[_Match],
    said: str,
    written: bool,
) -> str:
    is_parameter = isinstance(plain, torch.nn.Parameter)
    kind = "replicated" if isinstance(plain, DTensor) else "plain"
    noun = "parameter" if is_parameter else "tensor"
    lengths = " and ".join(_length(spec, match) for match in matches)
    reason = (
        f"a {kind} {noun} of shape {tuple(plain.shape)} meets a ShardTensor of shape {tuple(spec.shape)}. "
        f"{kind.capitalize()} {noun}s are global, and the same on every rank; this one has the size of a shard: "
        f"{lengths}"
    )
    if written:
        remedy = PLAIN_TARGET[1]
    elif is_parameter:
        remedy = "make the module, its parameters and its buffers, for the sizes of the global tensor"
    else:
        remedy = "pass the global tensor"
        if not any(list(plain.shape).count(plain.shape[match.dim]) > 1 for match in matches):  # it is that dim
            remedy += f", or make one ShardTensor of the ranks' parts by {_from_local(spec, matches)}"
    return f"{error_text(op, tensors, reason, remedy)} Cause: {said.strip()}"


def _length(spec: ShardTensorSpec, match: _Match) -> str:
    d, m, k = match.sharded, match.mesh_dim, match.coordinate
    whose = "this rank's shard" if k == spec.coordinate[m] else f"the shard of rank {k} of mesh dim {m}"
    return f"{whose} has {spec.sizes_along(m)[k]} of {spec.shape[d]} rows (dim {d})"


def _from_local(spec: ShardTensorSpec, matches: Sequence[_Match]) -> str:
    dims = {match.mesh_dim: match.dim for match in matches}
    placements = [f"Shard({dims[m]})" if m in dims else "Replicate()" for m in range(spec.mesh.ndim)]
    shown = ", ".join(placements) + ("," if len(placements) == 1 else "")
    sizes = ", ".join(f"{m}: {spec.sizes_along(m)}" for m in sorted(dims))
    if len(dims) == 1:
        return f"ShardTensor.from_local(part, mesh, ({shown}), shard_sizes={spec.sizes_along(*dims)})"
    return f"ShardTensor.from_local(part, mesh, ({shown}), shard_sizes={{{sizes}}})"
