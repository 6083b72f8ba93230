"""Sliding windows over a sharded dim: which inputs an output reads, and which rank computes an output.

Arithmetic on integers, as in intervals.py. No tensors, no processes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from .intervals import Interval, intersect, length


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
        >>> w.outputs, map_boundaries((4, 5), w.owned_boundary), w.reads((0, 2))
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

    def owned_boundary(self, b: int) -> int:
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
