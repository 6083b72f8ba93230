"""Shard sizes, boundaries and intervals: arithmetic on integers. No tensors, no processes.

Three ways to describe the shards of one tensor dim, used by every other module (docs/glossary.md):

- *sizes*: the length of the shard on each rank of a mesh dim, e.g. ``(5, 0, 3)``.
- *boundaries*: where shards begin and end, ``len(sizes) + 1`` indices from 0 to the global size: ``(0, 5, 5, 8)``.
- *interval*: half-open ``(start, stop)`` in global indices. Every empty interval has ``stop <= start``.

An operator that changes a dim's length (a strided window, resampling, flattening) is described by how it maps
boundaries: a monotone function on ``0..n`` that sends 0 to 0 and n to the new length. Applied to the input's boundaries
it yields the output's, so every rank knows every other rank's sizes without asking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

Interval = tuple[int, int]


def chunk_sizes(n: int, parts: int) -> tuple[int, ...]:
    """Sizes that :func:`torch.chunk` gives, padded with zeros to ``parts``.

    Example:
        >>> chunk_sizes(7, 3), chunk_sizes(2, 4)
        ((3, 3, 1), (1, 1, 0, 0))
    """
    step = max(1, -(-n // parts))  # at least 1, as n may be 0
    full, rest = divmod(n, step)
    return ((step,) * full + (rest,) + (0,) * parts)[:parts]


def aligned_sizes(n: int, multiple: int, parts: int) -> tuple[int, ...]:
    """Sizes with every boundary at a multiple of ``multiple``, as even as that allows.

    Example:
        >>> aligned_sizes(38, 8, 4), aligned_sizes(5, 8, 2)
        ((8, 8, 8, 14), (0, 5))
    """
    count = -(-n // multiple)
    return sizes_of([min(n, multiple * (count * i // parts)) for i in range(parts + 1)])


def boundaries_of(sizes: Iterable[int]) -> tuple[int, ...]:
    """Where the shards of these sizes begin and end.

    Example:
        >>> boundaries_of((5, 0, 3))
        (0, 5, 5, 8)
    """
    return (0, *accumulate(sizes))


def sizes_of(boundaries: Sequence[int]) -> tuple[int, ...]:
    """Inverse of :func:`boundaries_of`."""
    return tuple(stop - start for start, stop in zip(boundaries, boundaries[1:], strict=False))


def intervals_of(sizes: Iterable[int]) -> tuple[Interval, ...]:
    """Global interval of each rank's shard.

    Example:
        >>> intervals_of((5, 0, 3))
        ((0, 5), (5, 5), (5, 8))
    """
    boundaries = boundaries_of(sizes)
    return tuple(zip(boundaries, boundaries[1:], strict=False))


def intersect(a: Interval, b: Interval) -> Interval:
    """Common part of two intervals; empty (``stop <= start``) where there is none."""
    return (max(a[0], b[0]), min(a[1], b[1]))


def length(interval: Interval) -> int:
    """Number of indices in an interval, 0 for an empty one."""
    return max(0, interval[1] - interval[0])


def resized(shape: Sequence[int], dim: int, size: int) -> list[int]:
    """The shape with another size of one dim.

    Example:
        >>> resized((2, 3, 4), 1, 5)
        [2, 5, 4]
    """
    return [*shape[:dim], size, *shape[dim + 1 :]]


def map_boundaries(sizes: Sequence[int], boundary: Callable[[int], int]) -> tuple[int, ...]:
    """Output sizes of an operator that maps the boundary ``b`` of the input to ``boundary(b)`` of the output.

    Example:
        >>> map_boundaries((5, 4), lambda b: (b + 1) // 2)  # every second index, starting at 0
        (3, 2)
    """
    return sizes_of([boundary(b) for b in boundaries_of(sizes)])


def whole_blocks(sizes: Sequence[int], block: int) -> tuple[int, ...]:
    """Sizes with every boundary at the nearest multiple of ``block``, which divides their sum.

    Example:
        >>> whole_blocks((5, 0, 7), 4), whole_blocks((1, 11), 4)
        ((4, 0, 8), (0, 12))
    """
    return map_boundaries(sizes, lambda b: (2 * b + block) // (2 * block) * block)


def clipped(sizes: Sequence[int], n: int) -> tuple[int, ...]:
    """Sizes of a dim of length ``n`` that begins like one with ``sizes``; what is beyond belongs to the last rank.

    Example:
        >>> clipped((3, 2, 4), 4), clipped((3, 2), 7)
        ((3, 1, 0), (3, 4))
    """
    return sizes_of([min(b, n) for b in boundaries_of(sizes)[:-1]] + [n])
