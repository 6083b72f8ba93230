"""``advise``: which dims to shard, over which mesh, in which sizes, and whether it pays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import combinations
from typing import Any

from torch import Tensor

from ..._compat import tree_leaves
from ...layout.intervals import aligned_sizes, chunk_sizes
from ..machines import MACHINES, Machine
from .report import Explanation, bytes_text, table
from .run import UnfitArguments, ends_and_middle, explained, prepared, sample_of

_BALANCED = 1.03  # the slowest rank's time by the mean; below that other sizes gain nothing
_GAIN = 1.05  # as many times as fast, so that uneven sizes are worth it
_PAYS = 1.2  # and sharding at all


@dataclass(frozen=True)
class Choice:
    """One way to shard.

    Attributes:
        mesh, dims, sizes: the mesh's shape, the tensor dim of each mesh dim, and the shard sizes by mesh dim.
        seconds: the time of the slowest rank that was run, by the machine model.
        memory: :meth:`Explanation.memory` of the rank that needs most.
        bytes_sent: the largest number of bytes that a rank sends.
        refused: the first refusal; "" if there is none.
    """

    mesh: tuple[int, ...]
    dims: tuple[int, ...]
    sizes: dict[int, tuple[int, ...]]
    seconds: float
    memory: int
    bytes_sent: int
    refused: str = ""

    def __str__(self) -> str:
        world = "x".join(map(str, self.mesh))
        parts = [f"dim {d} as {_short(self.sizes[m])}" for m, d in enumerate(self.dims)]
        return f"mesh {world}: {', '.join(parts)}" if parts else "one rank"


@dataclass(frozen=True)
class Advice:
    """What :func:`shardtensor.advise` found. ``print`` shows it.

    Attributes:
        machine: the machine that the times assume.
        single: one rank with the global tensor.
        choices: the ways to shard that are not refused, the fastest first.
        refused: the ways to shard that are refused.
    """

    machine: Machine
    single: Choice
    choices: tuple[Choice, ...]
    refused: tuple[Choice, ...]

    @property
    def best(self) -> Choice | None:
        """The fastest way to shard; None if all are refused."""
        return self.choices[0] if self.choices else None

    @property
    def speedup(self) -> float:
        """The time of one rank divided by that of the best choice; 0 if there is none."""
        return self.single.seconds / self.best.seconds if self.best is not None else 0.0

    @property
    def pays(self) -> bool:
        """Whether the best choice is clearly faster than one rank."""
        return self.speedup >= _PAYS

    def __str__(self) -> str:
        rows = [
            (
                *(str(c), f"{1e3 * c.seconds:.3g}", f"{self.single.seconds / c.seconds:.2f}"),
                *(bytes_text(c.memory), bytes_text(c.bytes_sent)),
            )
            for c in (self.single, *self.choices)
        ]
        shown = table(("choice", "ms", "speedup", "memory", "sent"), rows)
        assumed = f"Times are those of an assumed machine: {self.machine}."
        return "\n\n".join([shown, assumed, self.verdict(), *(f"refused: {c}: {c.refused}" for c in self.refused)])

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def verdict(self) -> str:
        """Return a sentence that says whether to shard, and how."""
        if self.best is None:
            return "Every way to shard is refused."
        ranks = math.prod(self.best.mesh)
        memory = f"{bytes_text(self.single.memory)} on one rank, {bytes_text(self.best.memory)} on each of {ranks}"
        if self.pays:
            faster = f"{self.speedup:.2f} times as fast as one rank ({self.machine.name})"
            return f"Shard by {self.best}: {faster}, memory {memory}."
        times = f"{1e3 * self.best.seconds:.3g} ms, one rank {1e3 * self.single.seconds:.3g} ms ({self.machine.name})"
        gain = f"{self.best} takes {times}"
        if self.best.memory < 0.8 * self.single.memory:
            return f"Not for speed: {gain}. It saves memory: {memory}."
        return f"Domain parallelism does not pay here: {gain}; memory {memory}. Shard the batch over the ranks instead."


def advise(
    model: Callable[..., Any],
    *inputs: Any,
    ranks: int,
    dims: Sequence[int] | None = None,
    machine: Machine | str = "h100",
    backward: bool | Callable[[Any], Tensor] = True,
    kwargs: Mapping[str, Any] | None = None,
    tried: Callable[[Choice, int], None] | None = None,
) -> Advice:
    """Compare the dims, meshes and shard sizes for an input.

    The function tries meshes of one to three dims. Shard sizes are even, or aligned to the model's strides and patches.
    For the fastest of these, it also tries sizes that balance the ranks. :func:`shardtensor.explain` runs each choice
    without values, as the first, the middle and the last rank. It runs the fastest choice as all ranks. A model of the
    machine estimates times.

    Args:
        model, inputs, kwargs, backward: as for :func:`shardtensor.explain`. ``dims`` are those of the first input that
            is a tensor. Other inputs are sharded if they have these dims with the same length.
        ranks: the number of ranks.
        dims: the dims to try. Default: all with at least two elements for each rank. Dim 0 is left out (the batch,
            which data parallelism shards). So is dim 1 (the channels) of inputs of more than three dims.
        machine: the speed of ranks and links: a :class:`Machine`, or "h100", "a100" or "cpu".
        tried: a function that is called with each choice, and the number of choices left.

    Raises:
        ValueError: there is no dim to try, or fewer than two ranks.
        RuntimeError: as for :func:`shardtensor.explain`.

    Example:
        >>> import torch, shardtensor
        >>> model = torch.nn.Conv2d(64, 64, 3, padding=1)
        >>> found = shardtensor.advise(model, torch.empty(1, 64, 1024, 2048, device="meta"), ranks=4)
        >>> found.pays, found.best.dims
        (True, (3,))
    """
    tensor = next((t for t in tree_leaves(inputs) if isinstance(t, Tensor)), None)
    if tensor is None or ranks < 2:
        raise UnfitArguments(f"ranks={ranks}: advise needs at least two, and an input that is a tensor")
    if dims is None:
        first = 2 if tensor.ndim > 3 else 1
        dims = [d for d in range(first, tensor.ndim) if tensor.shape[d] >= 2 * ranks]
    elif not all(isinstance(d, int) and -tensor.ndim <= d < tensor.ndim for d in dims):
        raise UnfitArguments(f"dims={tuple(dims)}: the input {tuple(tensor.shape)} does not have all of these")
    if not dims:
        raise UnfitArguments(
            f"the input {tuple(tensor.shape)} has no dim that is long enough for {ranks} ranks; give dims="
        )
    if isinstance(machine, str) and machine not in MACHINES:
        raise UnfitArguments(f"machine={machine!r}: give a Machine, or one of {', '.join(MACHINES)}")
    known = MACHINES[machine] if isinstance(machine, str) else machine
    search = _Search(model, inputs, tensor, known, kwargs or {}, backward)
    single, whole = search.run((1,), (), {})
    candidates = list(search.candidates(ranks, dims, whole))
    found = []
    for i, (mesh, at, sizes) in enumerate(candidates, 1):
        found.append(search.run(mesh, at, sizes, only=ends_and_middle(mesh))[0])
        if tried is not None:
            tried(found[-1], len(candidates) - i)
    choices = sorted((choice for choice in found if not choice.refused), key=lambda choice: choice.seconds)
    if choices:
        choices[:1] = search.best(choices[0], whole)
        choices.sort(key=lambda choice: choice.seconds)
    return Advice(known, single, tuple(choices), tuple(choice for choice in found if choice.refused))


@dataclass(frozen=True)
class _Search:
    """What is tried, and how it is run."""

    model: Callable[..., Any]
    inputs: Sequence[Any]
    tensor: Tensor
    machine: Machine
    kwargs: Mapping[str, Any]
    backward: bool | Callable[[Any], Tensor]

    def candidates(
        self, ranks: int, dims: Sequence[int], whole: Explanation
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], Any]]:
        """Meshes, their dims and shard sizes: even ones, then those aligned to the model's strides where they differ.

        ``whole`` is what one rank does.
        """
        meshes = [(mesh, at) for n in (1, 2, 3) for mesh in _factors(ranks, n) for at in combinations(dims, n)]
        for mesh, at in meshes:
            lengths = [self.tensor.shape[d] for d in at]
            even = {m: chunk_sizes(length, mesh[m]) for m, length in enumerate(lengths)}
            yield mesh, at, even
            aligned = {
                m: aligned_sizes(self.tensor.shape[d], self._stride(d, mesh[m], whole), mesh[m])
                for m, d in enumerate(at)
            }
            if aligned != even:
                yield mesh, at, aligned

    def _stride(self, dim: int, ranks: int, whole: Explanation) -> int:
        """The product of strides along a dim: by how much the shortest result is shorter than the input."""
        length, ndim = self.tensor.shape[dim], self.tensor.ndim
        lengths = [s[dim] for layer in whole.layers for s in layer.shapes if len(s) == ndim and s[dim] > 1]
        stride = round(length / min(lengths, default=length))
        return stride if 1 <= stride <= length // ranks else 1

    def run(
        self,
        mesh: tuple[int, ...],
        dims: tuple[int, ...],
        sizes: dict[int, tuple[int, ...]],
        only: Sequence[int] | None = None,
    ) -> tuple[Choice, Explanation]:
        """A choice, and what was found out about it by running some ranks."""
        lengths = [self.tensor.shape[d] for d in dims]
        shard = [dims if any(_has(t, dims, lengths) for t in tree_leaves(value)) else None for value in self.inputs]
        job = prepared(self.model, tuple(self.inputs), self.kwargs, mesh, shard if dims else None, sizes, self.backward)
        found = explained(job, only or sample_of(job), values=None, compared=False)  # the first choice is one process
        choice = Choice(
            mesh,
            dims,
            sizes,
            max(self.machine.seconds(found, rank) for rank in found.ranks),
            max(map(found.memory, found.ranks)),
            max(found.total(rank, "bytes_sent") for rank in found.ranks),
            found.stopped or next((layer.refused for layer in found.refused), ""),
        )
        return choice, found

    def best(self, choice: Choice, whole: Explanation) -> list[Choice]:
        """The choice run as all ranks, and with shard sizes in inverse proportion to a row's time where these gain."""
        choice, found = self.run(choice.mesh, choice.dims, choice.sizes)
        times = {rank: self.machine.seconds(found, rank) for rank in found.ranks}
        mean = sum(times.values()) / len(times)
        if len(choice.mesh) > 1 or len(times) < choice.mesh[0] or max(times.values()) < _BALANCED * mean:
            return [choice]
        sizes = choice.sizes[0]
        speeds = [sizes[rank] / times[rank] for rank in range(len(sizes))]
        multiple = self._stride(choice.dims[0], len(sizes), whole)
        ends = [round(sum(speeds[: r + 1]) / sum(speeds) * sum(sizes) / multiple) * multiple for r in range(len(sizes))]
        ends[-1] = sum(sizes)
        new = tuple(b - a for a, b in zip([0, *ends], ends))
        if min(new) <= 0 or new == sizes:
            return [choice]
        other, _ = self.run(choice.mesh, choice.dims, {0: new})
        gains = not other.refused and other.seconds * _GAIN < choice.seconds
        return [choice, other] if gains else [choice]


def _factors(number: int, n: int) -> Iterator[tuple[int, ...]]:
    """``n`` factors of at least two with this product, in all orders."""
    if n == 1:
        yield (number,)
    for first in range(2, number // 2 + 1) if n > 1 else ():
        if number % first == 0:
            yield from ((first, *others) for others in _factors(number // first, n - 1))


def _has(value: Any, dims: Sequence[int], lengths: Sequence[int]) -> bool:
    """Whether it is a tensor with dims of these lengths."""
    if not isinstance(value, Tensor):
        return False
    return all(d < value.ndim and value.shape[d] == n for d, n in zip(dims, lengths))


def _short(sizes: Sequence[int]) -> str:
    if len(sizes) > 4 and len(set(sizes)) == 1:
        return f"{len(sizes)} x {sizes[0]}"
    return str(list(sizes)) if len(sizes) <= 8 else f"{len(sizes)} shards of {min(sizes)} to {max(sizes)}"
