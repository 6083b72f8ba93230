"""What is swept: operators, their samples, and the ways to cut a sample's tensors."""

from __future__ import annotations

import random
import sys
import types
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.utils._pytree import tree_leaves, tree_map

from shardtensor import ShardTensor
from shardtensor.testing import shard, shared_mesh

from .memory import copied, laid_out

DTYPES = {"float": torch.float32, "int": torch.int64, "bool": torch.bool}
HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
OTHERS = ("plain", "replicated", "alike")  # how the operands that are not the first one lie on the ranks
ENTRY = -1  # in place of a dim: the tensor is an entry of a sharded dim, which is on one rank


@cache
def database() -> dict[str, Any]:
    """torch's own operators with sample inputs, by name."""
    if "expecttest" not in sys.modules:
        try:
            import expecttest  # noqa: F401
        except ImportError:  # a package that the list's module imports and does not use for it
            stub = types.ModuleType("expecttest")
            stub.TestCase = object  # type: ignore[attr-defined]
            sys.modules["expecttest"] = stub
    from torch.testing._internal.common_methods_invocations import op_db

    return {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db}


def operator_names(prefixes: tuple[str, ...] = ("",)) -> list[str]:
    """The names in the database that start so. Operators that only exist on CUDA are left out."""
    names = [name for name in database() if "jiterator" not in name]
    return [name for name in names if name.startswith(prefixes)]


@dataclass(frozen=True)
class Cut:
    """How a sample's tensors are laid out: the first operand's dim ``dim`` in shards, the others as said."""

    dim: int
    empty: bool
    others: str

    def __str__(self) -> str:
        if self.dim == ENTRY:
            return f"entry, others {self.others}{' of another rank' if self.empty else ''}"
        return f"dim {self.dim}{' with an empty shard' if self.empty else ''}, others {self.others}"


def shard_sizes(length: int, ranks: int, empty: bool) -> tuple[int, ...]:
    """Unequal sizes, one of them zero if ``empty``.

    >>> shard_sizes(10, 2, False), shard_sizes(10, 3, False), shard_sizes(10, 2, True), shard_sizes(10, 3, True)
    ((8, 2), (6, 2, 2), (0, 10), (7, 0, 3))
    """
    if empty:
        first = length - length // 3
        return (0, length) if ranks == 2 else (first, *(0,) * (ranks - 2), length - first)
    if length < ranks:
        return (1,) * length + (0,) * (ranks - length)
    rest = max(1, length // (ranks + 2))
    return (length - rest * (ranks - 1), *(rest,) * (ranks - 1))


def first_operands(sample: Any) -> list[torch.Tensor]:
    """The tensors that are cut first: the input, or all tensors of a list of inputs."""
    return [t for t in tree_leaves(sample.input) if isinstance(t, torch.Tensor)]


def other_operands(sample: Any) -> list[torch.Tensor]:
    """The tensors among the further arguments."""
    return [t for t in tree_leaves((sample.args, sample.kwargs)) if isinstance(t, torch.Tensor)]


def _alike(first: torch.Tensor, dim: int, other: torch.Tensor) -> int | None:
    """The dim of ``other`` that broadcasting pairs with ``dim`` of ``first``, if it has the same length."""
    paired = dim - first.ndim + other.ndim
    same = other.layout == torch.strided and paired >= 0 and other.shape[paired] == first.shape[dim]
    return paired if same else None


def cuts(sample: Any) -> Iterator[Cut]:
    """All ways to cut a sample."""
    first = [t for t in first_operands(sample) if t.layout == torch.strided]
    others = other_operands(sample)
    for dim in range(max((t.ndim for t in first), default=0)):
        longest = max((t for t in first if t.ndim > dim), key=lambda t: t.shape[dim])
        pairs = any(_alike(longest, dim, t) is not None for t in others)
        for empty in (False, True)[: 1 + bool(longest.shape[dim])]:
            for kind in OTHERS:
                if kind == "plain" or (kind == "replicated" and others) or (kind == "alike" and pairs):
                    yield Cut(dim, empty, kind)


def along_one_dim(sample: Any) -> Iterator[Cut]:
    """The ways to shard all operands along one dim, which the operator need not pair."""
    if any(t.layout == torch.strided for t in first_operands(sample)) and other_operands(sample):
        yield from (Cut(dim, False, "sharded") for dim in range(max(t.ndim for t in first_operands(sample))))


def entries(sample: Any) -> Iterator[Cut]:
    """The ways to have the first operands on one rank, as entries of a sharded dim; the others, too, or on another."""
    if not any(t.layout == torch.strided for t in first_operands(sample)):
        return
    yield Cut(ENTRY, False, "plain")
    if other_operands(sample):
        yield Cut(ENTRY, False, "replicated")
        yield Cut(ENTRY, False, "alike")
        yield Cut(ENTRY, True, "alike")


def _entry(t: torch.Tensor, ranks: int, of: int) -> ShardTensor:
    """``t`` as the entry that rank ``of`` has of a tensor whose other entries are others."""
    among = torch.stack([t.detach() if rank == of else torch.zeros_like(t.detach()) for rank in range(ranks)])
    return shard(among, shared_mesh(ranks), [Shard(0)], None)[of].detach().clone().requires_grad_(t.requires_grad)


def place(
    sample: Any, cut: Cut, ranks: int, memory: str | None = None
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Fresh arguments, laid out as ``cut`` says, each rank's part in memory as ``memory`` says."""
    if cut.dim == ENTRY:
        return _place_entries(sample, cut, ranks)
    longest = max((t for t in first_operands(sample) if t.ndim > cut.dim), key=lambda t: t.shape[cut.dim])

    def placed(t: torch.Tensor, dim: int | None) -> torch.Tensor:
        mesh, placements = shared_mesh(ranks), [Replicate() if dim is None else Shard(dim)]
        sizes = None if dim is None else {0: shard_sizes(t.shape[dim], ranks, cut.empty)}
        made = shard(t.detach().clone(), mesh, placements, sizes)
        if memory is not None:
            local = laid_out(made.to_local(), memory)
            made = ShardTensor.from_local(local, mesh, placements, shard_sizes=sizes or {})
        return made.requires_grad_(t.requires_grad)

    def first(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or t.layout != torch.strided or t.ndim <= cut.dim:
            return copied(t)
        return placed(t, cut.dim)

    def other(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or t.layout != torch.strided or cut.others == "plain":
            return copied(t)
        if cut.others == "sharded":
            return placed(t, cut.dim) if t.ndim > cut.dim else copied(t)
        return placed(t, _alike(longest, cut.dim, t) if cut.others == "alike" else None)

    return tree_map(first, sample.input), tree_map(other, sample.args), tree_map(other, sample.kwargs)


def _place_entries(sample: Any, cut: Cut, ranks: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    def entry(t: Any, of: int) -> Any:
        strided = isinstance(t, torch.Tensor) and t.layout == torch.strided
        return _entry(t, ranks, of) if strided else copied(t)

    def other(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or t.layout != torch.strided or cut.others == "plain":
            return copied(t)
        if cut.others == "alike":
            return entry(t, 0 if cut.empty else ranks - 1)
        return shard(t.detach().clone(), shared_mesh(ranks), [Replicate()]).requires_grad_(t.requires_grad)

    first = tree_map(lambda t: entry(t, ranks - 1), sample.input)
    return first, tree_map(other, sample.args), tree_map(other, sample.kwargs)


def copied_sample(sample: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The plain arguments of a sample, fresh."""
    return tree_map(copied, sample.input), tree_map(copied, sample.args), tree_map(copied, sample.kwargs)


def in_double(sample: Any, memory: str | None) -> Any:
    """The sample in double precision, to tell rounding from mistakes."""
    wider = dict.fromkeys([torch.float32, *HALF.values()], torch.float64)
    wider |= dict.fromkeys([torch.complex64, torch.complex32], torch.complex128)

    def widen(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype in wider:
            value = value.detach().to(wider[value.dtype]).requires_grad_(value.requires_grad)
            return laid_out(value, memory)
        return wider.get(value, value) if isinstance(value, torch.dtype) else value

    parts = (sample.input, sample.args, sample.kwargs)
    return types.SimpleNamespace(**dict(zip(("input", "args", "kwargs"), (tree_map(widen, part) for part in parts))))


def samples(name: str, dtype: torch.dtype, gradients: bool) -> Iterator[Any]:
    """The operator's samples: the same on every rank."""
    op = database()[name]
    seed = zlib.crc32(name.encode())
    torch.manual_seed(seed)
    random.seed(seed)
    made = iter(op.sample_inputs(torch.get_default_device().type, dtype, requires_grad=gradients))
    while True:
        try:
            yield next(made)
        except StopIteration:
            return
        except Exception:  # samples that need what this machine has not
            return


def variant(name: str, kind: str) -> Callable[..., Any] | None:
    """The operator as a function, or its in-place form."""
    op = database()[name]
    return op.inplace_variant if kind == "in place" else op.op
