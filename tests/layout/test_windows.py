"""Integers only: windows, cuts, intervals and reshapes, each against brute force."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtensor.communication.exchange import plan_intervals
from shardtensor.layout.intervals import (
    aligned_sizes,
    boundaries_of,
    chunk_sizes,
    intersect,
    intervals_of,
    length,
    map_boundaries,
    sizes_of,
)
from shardtensor.layout.windows import Window
from shardtensor.ops.shape.view import regroup

sizes_lists = st.lists(st.integers(0, 6), min_size=1, max_size=5)


@st.composite
def windows(draw):
    return Window(
        size=draw(st.integers(1, 14)),
        kernel=draw(st.integers(1, 5)),
        stride=draw(st.integers(1, 4)),
        dilation=draw(st.integers(1, 3)),
        before=draw(st.integers(0, 4)),
        after=draw(st.integers(0, 4)),
        ceil_mode=draw(st.booleans()),
    )


def taps(window, o):
    """The inputs that output ``o`` reads, padding included."""
    return [o * window.stride - window.before + t * window.dilation for t in range(window.kernel)]


@given(windows())
@settings(max_examples=400)
def test_window_counts_the_outputs_that_fit(window):
    if window.ceil_mode:
        return
    fitting = [o for o in range(40) if taps(window, o)[-1] < window.size + window.after]
    assert max(0, window.outputs) == len(fitting)


@given(windows(), st.integers(0, 2))
@settings(max_examples=400)
def test_ceil_mode_counts_as_pooling_does(window, padding):
    padding = min(padding, window.kernel // 2)
    if window.size + 2 * padding < window.extent:
        return
    pooled = torch.nn.functional.max_pool1d(
        torch.empty(1, 1, window.size, device="meta"),
        window.kernel,
        window.stride,
        padding,
        window.dilation,
        ceil_mode=True,
    )
    window = replace(window, before=padding, after=padding, ceil_mode=True)
    assert window.outputs == pooled.shape[-1]


@given(windows(), sizes_lists)
@settings(max_examples=400)
def test_outputs_of_all_ranks_partition_the_output(window, weights):
    """Whatever the input's cut: cuts are monotone, start at 0 and end at the number of outputs."""
    total = max(1, sum(weights))
    scaled = [w * window.size // total for w in weights]
    scaled[-1] += window.size - sum(scaled)
    if window.outputs <= 0:
        return
    sizes = map_boundaries(scaled, window.owned_boundary)
    assert min(sizes) >= 0
    assert sum(sizes) == window.outputs
    boundaries = [window.owned_boundary(c) for c in range(window.size + 1)]
    assert boundaries == sorted(boundaries)


@given(windows(), st.data())
@settings(max_examples=400)
def test_reads_is_the_hull_of_the_taps(window, data):
    if window.outputs <= 0:
        return
    start = data.draw(st.integers(0, window.outputs - 1))
    stop = data.draw(st.integers(start + 1, window.outputs))
    read = [i for o in range(start, stop) for i in taps(window, o)]
    assert window.reads((start, stop)) == (min(read), max(read) + 1)
    assert length(window.reads((stop, stop))) == 0


@given(windows(), st.data())
@settings(max_examples=400)
def test_touching_finds_the_outputs_that_reach_into_an_interval(window, data):
    """Between its first and last tap a dilated window counts as reaching in, too."""
    if window.outputs <= 0:
        return
    a = data.draw(st.integers(0, window.size - 1))
    b = data.draw(st.integers(a + 1, window.size))
    expected = [o for o in range(window.outputs) if taps(window, o)[0] < b and taps(window, o)[-1] >= a]
    found = window.touching((a, b), (0, window.outputs))
    assert list(range(*found)) == expected


@given(st.integers(1, 30), st.integers(1, 5))
def test_a_same_window_of_stride_one_keeps_the_sizes(n, half):
    window = Window(size=n, kernel=2 * half + 1, before=half, after=half)
    sizes = (n // 3, 0, n - n // 3)
    assert map_boundaries(sizes, window.owned_boundary) == sizes


@given(sizes_lists)
def test_cuts_and_sizes_are_inverse(sizes):
    assert sizes_of(boundaries_of(sizes)) == tuple(sizes)
    covered = [i for interval in intervals_of(sizes) for i in range(*interval)]
    assert covered == list(range(sum(sizes)))


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunk_sizes_are_those_of_torch_chunk(n, parts):
    pieces = [len(piece) for piece in torch.zeros(n).chunk(parts)]
    assert chunk_sizes(n, parts) == tuple(pieces + [0] * (parts - len(pieces)))


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 5))
def test_aligned_sizes_are_as_even_as_multiples_allow(n, multiple, parts):
    sizes = aligned_sizes(n, multiple, parts)
    assert len(sizes) == parts and sum(sizes) == n
    assert all(b % multiple == 0 or b == n for b in boundaries_of(sizes))
    assert max(sizes) - min(sizes) < 2 * multiple


@given(*[st.integers(0, 8)] * 4)
def test_intersection_holds_what_both_hold(a, b, c, d):
    both = set(range(a, b)) & set(range(c, d))
    assert set(range(*intersect((a, b), (c, d)))) == both
    assert length(intersect((a, b), (c, d))) == len(both)


@given(sizes_lists, st.data())
@settings(max_examples=300)
def test_plans_of_all_ranks_fit_together(sizes, data):
    """What one rank sends another receives, and everything that a rank needs arrives exactly once."""
    own, total, ranks = intervals_of(sizes), sum(sizes), range(len(sizes))
    need = []
    for _ in ranks:
        a = data.draw(st.integers(0, total))
        need.append((a, data.draw(st.integers(a, total))))
    plans = [plan_intervals(own, tuple(need), r) for r in ranks]
    assert len({plan.active for plan in plans}) == 1
    assert plans[0].active == any(plan.sends for plan in plans)
    for r in ranks:
        assert (plans[r].own, plans[r].need) == (own[r], need[r])
        assert all(peer != r and length(part) for peer, part in (*plans[r].sends, *plans[r].recvs))
        assert all((r, part) in plans[s].sends for s, part in plans[r].recvs)
        assert all((r, part) in plans[s].recvs for s, part in plans[r].sends)
        kept = intersect(own[r], need[r])
        arrived = sorted(i for part in (kept, *(p for _, p in plans[r].recvs)) for i in range(*part))
        assert arrived == list(range(*need[r]))


def test_no_plan_is_active_where_everybody_has_what_it_needs():
    own = intervals_of((3, 0, 2))
    assert not plan_intervals(own, ((1, 3), (0, 0), (3, 5)), 0).active


def reshapes(limit):
    """Pairs of shapes with equally many elements."""
    factors = st.lists(st.sampled_from([1, 2, 3, 5]), min_size=0, max_size=limit)

    @st.composite
    def pair(draw):
        primes = draw(factors)

        def grouped():
            shape, current = [], 1
            for p in primes:
                if draw(st.booleans()):
                    shape.append(current)
                    current = 1
                current *= p
            return (*shape, current)

        return grouped(), grouped()

    return pair()


@given(reshapes(5), st.data())
@settings(max_examples=500)
def test_a_reshape_carries_shards_to_shards(shapes, data):
    """For every carried dim and every cut that divides: reshaping the shards gives the shards of the reshaped."""
    old, new = shapes
    whole = np.arange(int(np.prod(old))).reshape(old)
    result = whole.reshape(new)
    for dim, (to, times, by) in regroup(old, new).items():
        cut = data.draw(st.integers(0, old[dim]))
        if cut * times % by or (old[dim] - cut) * times % by:
            continue  # refused by the caller
        first = np.take(whole, range(cut), axis=dim)
        shape = list(new)
        shape[to] = cut * times // by
        assert np.array_equal(first.reshape(shape), np.take(result, range(cut * times // by), axis=to))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ((4, 6), (24,), {0: (0, 6, 1)}),
        ((24,), (4, 6), {0: (0, 1, 6)}),
        ((2, 3, 4), (2, 12), {0: (0, 1, 1), 1: (1, 4, 1)}),
        ((2, 12), (2, 3, 4), {0: (0, 1, 1), 1: (1, 1, 4)}),
        ((6, 5), (2, 3, 5), {0: (0, 1, 3), 1: (2, 1, 1)}),
        ((6, 4), (4, 6), {0: (0, 4, 6)}),
        ((5, 1, 3), (5, 3), {0: (0, 1, 1), 2: (1, 1, 1)}),
    ],
)
def test_reshapes_that_models_make(old, new, expected):
    carried = regroup(old, new)
    assert {d: to for d, to in carried.items() if old[d] != 1} == expected
