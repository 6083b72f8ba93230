"""A few hundred training steps with changing cuts and slices: nothing that is kept grows, and no weight drifts."""

from __future__ import annotations

import pytest

from endurance.__main__ import table
from endurance.steps import ROWS, drawn, train
from shardtensor.testing import run_distributed, shutdown_pools


@pytest.mark.on_gloo("late communication keeps the last few thousand operations")
@pytest.mark.slow
def test_nothing_grows_once_every_layout_was_there():
    shutdown_pools()  # what compiled functions of other tests hold goes at any time: count in processes of its own
    for notes in run_distributed(train, 2, 200, 50, 40, timeout=300):
        assert [n.step for n in notes] == [50, 100, 150, 200]
        assert notes[0].caches["shardtensor.dispatch.planning._plans"] > 100  # they are found at all
        for note in notes[1:]:
            assert note.caches == notes[0].caches
            assert note.tensors == notes[0].tensors
        assert notes[-1].objects - notes[1].objects < 50  # of some 300,000; one that is kept by each step would be 100
        assert max(n.drift for n in notes) < 1e-9


def test_steps_are_drawn_alike_and_cut_anew():
    steps = drawn(30, 3, None, 0)
    assert steps == drawn(30, 3, None, 0) and steps != drawn(30, 3, None, 1)
    assert len({s.first for s in steps}) > 5 and len({(s.start, s.stop) for s in steps}) > 25
    assert all(sum(s.first) == sum(s.second) == ROWS and s.start < s.stop for s in steps)
    assert drawn(30, 3, 10, 0) == steps[:10] * 3


@pytest.mark.slow
def test_a_longer_run_has_flat_caches():
    """New layouts all the time: what is cached stays within its bounds, and what is written tells all of it."""
    ranks = run_distributed(train, 2, 600, 200, timeout=600)
    assert table(ranks).count("\n") == 4
    for notes in ranks:
        assert max(n.drift for n in notes) < 1e-9
        assert notes[-1].tensors < notes[0].tensors + 100
