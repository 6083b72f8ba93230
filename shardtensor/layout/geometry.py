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
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

Interval = tuple[int, int]


def chunk_sizes(n: int, parts: int) -> tuple[int, ...]:
    """Sizes that :func:`torch.chunk` gives, padded with zeros to ``parts``.

    Example:
        >>> chunk_sizes(7, 3), chunk_sizes(2, 4)
        ((3, 3, 1), (1, 1, 0, 0))
    """
    step = max(1, -(-n // parts))  # at least 1, as n may be 0
    return tuple(max(0, min(step, n - step * i)) for i in range(parts))


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


@dataclass(frozen=True)
class Window:
    """A sliding window over one tensor dim: convolution and pooling.

    Output ``o`` reads the inputs ``o * stride - before + t * dilation`` for ``t`` in ``range(kernel)``;
    indices outside ``0..size`` are padding.

    Attributes:
        size: global length of the input dim.
        kernel: number of taps.
        stride, dilation: steps between outputs and between taps.
        before, after: padding at the two ends of the global dim (at no boundary between shards).
        ceil_mode: count a last, partly outside window too, as pooling does with ``ceil_mode=True``.

    Example:
        >>> w = Window(size=9, kernel=3, stride=2, before=1, after=1)
        >>> w.outputs, map_boundaries((4, 5), w.boundary), w.reads((0, 2))
        (5, (2, 3), (-1, 4))
    """

    size: int
    kernel: int
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0
    ceil_mode: bool = False

    @cached_property
    def extent(self) -> int:
        """Distance from the first to just past the last tap."""
        return (self.kernel - 1) * self.dilation + 1

    @cached_property
    def outputs(self) -> int:
        """Global length of the output dim; 0 or less when the kernel is larger than the padded input."""
        room = self.size + self.before + self.after - self.extent
        if not self.ceil_mode:
            return max(0, room // self.stride + 1)
        count = max(0, -(-room // self.stride) + 1)
        # The last window has to start inside the input or its left padding (torch's rule for pooling).
        return count - 1 if (count - 1) * self.stride >= self.size + self.before else count

    def boundary(self, b: int) -> int:
        """The boundary of the output that belongs to the boundary ``b`` of the input.

        An output belongs to the rank that owns the middle tap's input, so that halos are balanced and a
        stride-1 "same" window keeps the sizes as they are.
        """
        # The ends map to the ends, although padding and ceil_mode may put the middle of a window beyond them.
        if b <= 0:
            return 0
        if b >= self.size:
            return self.outputs
        middle = (self.extent - 1) // 2 - self.before
        return max(0, min(self.outputs, -(-(b - middle) // self.stride)))

    def reads(self, out: Interval) -> Interval:
        """Input interval that the outputs ``out`` read, padding included (it may reach outside ``0..size``)."""
        if out[1] <= out[0]:
            return (0, 0)
        return (out[0] * self.stride - self.before, (out[1] - 1) * self.stride - self.before + self.extent)

    def touching(self, part: Interval, out: Interval) -> Interval:
        """Those of the outputs ``out`` whose window overlaps the input interval ``part``."""
        first = (part[0] + self.before - self.extent) // self.stride + 1
        stop = -(-(part[1] + self.before) // self.stride)
        return intersect((first, stop), out)

    def between(self, part: Interval, out: Interval) -> tuple[Window, Interval]:
        """The window with only the taps by which the outputs ``out`` may read the inputs ``part``, and which these are.

        Example:
            >>> w = Window(size=9, kernel=3, before=1, after=1)
            >>> w.between((5, 6), (0, 5))
            (Window(size=9, kernel=1, stride=1, dilation=1, before=-1, after=1, ceil_mode=False), (2, 3))
        """
        first, last = out[0] * self.stride - self.before, (out[1] - 1) * self.stride - self.before
        taps = intersect(
            (-((last - part[0]) // self.dilation), (part[1] - 1 - first) // self.dilation + 1), (0, self.kernel)
        )
        taps = taps if length(taps) else (0, self.kernel)  # none, where windows have gaps
        return replace(self, kernel=length(taps), before=self.before - taps[0] * self.dilation), taps
